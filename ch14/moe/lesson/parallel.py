"""Divide the experts among GPUs: rows travel to the GPU of their expert and back by torch.distributed's all-to-all.

A program of one process for each GPU calls `parallel_moe` as it would call `ch14.moe.moe`. Torch's all-to-all takes the
numbers of rows from the host, so each layer waits for the GPU once; the products themselves wait for nothing.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ch14 import moe
from ch14.moe.lesson import experiments, workloads
from tilelab.measure import bench, check

CASES = [(model, tokens) for model in ("Qwen 3 235B", "Mixtral 8x7B") for tokens in (32, 512, 4096)]
ROUNDS, BURST_MS = 12, 15


def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send the first sent[0] rows to GPU 0, the next to GPU 1, and so on; return what arrives, in the same order."""
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived


def parallel_moe(
    x: torch.Tensor,  # (tokens, hidden): the tokens of this GPU
    gate_up: torch.Tensor,  # (experts / GPUs, 2 I, hidden): the experts of this GPU
    down: torch.Tensor,  # (experts / GPUs, hidden, I)
    topk_ids: torch.Tensor,  # (tokens, top_k), of all experts
    topk_weights: torch.Tensor,  # (tokens, top_k)
    layer: Callable = moe.moe,
) -> torch.Tensor:  # (tokens, hidden)
    """Return what `moe` returns for the tokens of this GPU, whose experts are divided among the processes in order.

    There is no backward pass: RuntimeError where autograd records. An id below 0 or beyond the experts is skipped.
    """
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, gate_up, down, topk_weights)):
        raise RuntimeError("parallel_moe has no backward pass: call it under torch.no_grad().")
    gpus, here, (tokens, top_k) = dist.get_world_size(), len(gate_up), topk_ids.shape
    experts = gpus * here
    ids = topk_ids.flatten().long()
    expert, order = torch.where((ids >= 0) & (ids < experts), ids, experts).sort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.long, device=x.device)
    counts = counts.scatter_add_(0, expert, torch.ones_like(expert))[:experts]
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sent, received = (
        torch.stack([counts, arriving]).view(2, gpus, here).sum(-1).tolist()
    )  # the host waits here

    order = order[: sum(sent)]
    rows = exchange(x[order // top_k], sent, received)
    ids = torch.arange(here, device=x.device).repeat(gpus)  # each GPU's rows arrive sorted by expert
    ids = ids.repeat_interleave(arriving, output_size=len(rows))[:, None]
    result = layer(rows, gate_up, down, ids, torch.ones(ids.shape, device=x.device))
    back = torch.zeros(tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
    back[order] = exchange(result, received, sent)
    return (topk_weights[:, None].to(x.dtype) @ back.view(tokens, top_k, x.shape[1]))[:, 0]


# ---- measured: all tokens on one GPU that has every expert, and on all GPUs


def _make(model: workloads.Model, tokens: int, gpus: int) -> tuple[torch.Tensor, ...]:
    """Return x, gate_up, down, ids and weights of all GPUs. Every process makes the same ones."""
    torch.manual_seed(0)
    x = torch.randn(gpus * tokens, model.hidden, device="cuda").bfloat16()
    parts = []
    for part in ("up", "down"):
        n, k = model.product(part)
        parts.append(torch.empty(model.experts, n, k, dtype=torch.bfloat16, device="cuda"))
        for matrix in parts[-1]:
            matrix.copy_(torch.randn(n, k, device="cuda") / math.sqrt(k))
    ids = torch.rand(len(x), model.experts, device="cuda").topk(model.top_k).indices
    return x, *parts, ids, torch.rand(ids.shape, device="cuda").softmax(-1)


def _time_ms(run: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def _slowest_ms(run: Callable[[], object], calls: int) -> float:
    """Return the time of the slowest GPU, when all begin together."""
    dist.barrier()
    found = torch.tensor(_time_ms(run, calls), device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _measure_case(model_name: str, tokens: int) -> dict:
    """Return the row of a case; every process calls this."""
    rank, gpus = dist.get_rank(), dist.get_world_size()
    model = (workloads.MODELS | workloads.HELD_OUT)[model_name]
    x, gate_up, down, ids, weights = _make(model, tokens, gpus)
    mine, experts = slice(rank * tokens, (rank + 1) * tokens), model.experts // gpus
    kept = [each[rank * experts : (rank + 1) * experts].clone() for each in (gate_up, down)]
    alone = functools.partial(moe.moe, x, gate_up, down, ids, weights)
    together = functools.partial(parallel_moe, x[mine], *kept, ids[mine], weights[mine])
    sizes = [tokens * model.top_k // gpus] * gpus
    rows = x.new_empty(sum(sizes), model.hidden)
    exchanges = functools.partial(exchange, rows, sizes, sizes)
    error = torch.tensor(check.relative_error(together(), alone()[mine].double()), device="cuda")
    dist.all_reduce(error, op=dist.ReduceOp.MAX)
    for run in (alone, together, exchanges) * 2:
        run()
    calls = max(1, round(BURST_MS / _slowest_ms(together, 2)))
    times: dict[str, list[float]] = {"alone": [], "together": [], "exchange": []}
    for _ in range(ROUNDS):
        dist.barrier()
        times["alone"].append(_time_ms(alone, calls) if rank == 0 else 0.0)
        times["together"].append(_slowest_ms(together, calls))
        times["exchange"].append(2 * _slowest_ms(exchanges, calls))
    ms = {name: statistics.median(found) for name, found in times.items()}
    ratios = [one / two for one, two in zip(times["alone"], times["together"])]
    row = {"model": model_name, "tokens": tokens, "gpus": gpus, "name": f"{gpus} GPUs", "ms": ms["together"]}
    row |= {"peer": "1 GPU", "peer_ms": ms["alone"], "ratio": ms["alone"] / ms["together"]}
    row |= {"spread": bench.find_spread(ratios), "exchange_ms": ms["exchange"], "error": float(error)}
    limit = 2**-6
    reason = "" if error <= limit else f"the error {float(error):.1e} is above {limit:.1e}"
    return row | {"status": "failed" if reason else "ok", "reason": reason}


def _work(rank: int, gpus: int, store: str, to: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=gpus)
    rows = []
    for case in CASES:
        rows.append(_measure_case(*case))
        torch.cuda.empty_cache()
    if rank == 0:
        pathlib.Path(to).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


@experiments.experiment(
    *("ch14_moe_parallel", parallel_moe, exchange, workloads), can_run=lambda: torch.cuda.device_count() > 1
)
def measure_parallel() -> list[dict]:
    """Measure the layer with its experts divided among all GPUs of this machine, beside one GPU that has them all."""
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        store, to = (pathlib.Path(folder, name) for name in ("store", "rows.json"))
        processes.spawn(_work, (gpus, str(store), str(to)), nprocs=gpus)
        return json.loads(to.read_text(encoding="utf-8"))
