"""Trace, check and time the decoder block: eager, compiled, and compiled with the course's operators in bf16 and fp8.

`measure` times the variants in a process of its own, because Dynamo and Inductor keep state for the life of a process.
"""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from unittest import mock

import torch

from ch14 import attention
from ch14.compiled import decoder_block
from ch14.compiled.decoder_block import LLAMA_3_8B, DecoderBlock, Fp8Linear, Sizes, TilesLinear, TorchLinear
from ch14.compiled.lesson import process
from tilelab.measure import bench, check
from tilelab.runtime import device, provenance, worker_pool

MODULE, WHAT, LIMIT_S = "ch14.compiled.lesson.decoder_timing", "the process that times the decoder block", 240
# {name: (linear layer, attention, whether it is compiled)}; the first is the peer of the others.
VARIANTS = {
    "eager": (TorchLinear, decoder_block.attend_torch, False),
    "torch.compile": (TorchLinear, decoder_block.attend_torch, True),
    "course bf16": (TilesLinear, decoder_block.attend_tiles, True),
    "course fp8": (Fp8Linear, decoder_block.attend_tiles, True),
}
TOKENS = (4096, 16)  # are timed
CALLS = (4096, 16, 17)  # tokens of the calls whose graphs are counted, in this order
# Several roundings to the format lie between x and the result.
LIMITS = {
    TorchLinear: 4 * check.TOLERANCE[torch.bfloat16],
    TilesLinear: 4 * check.TOLERANCE[torch.bfloat16],
    Fp8Linear: check.TOLERANCE[torch.float8_e4m3fn],
}
# What a kernel does, by its name; the first that matches counts. The names of Inductor's kernels also list operators
# for which they only prepare the data. The last names of products are those of the course's CUDA kernels.
KINDS = {
    "other": re.compile("triton_"),
    "attention": re.compile("(?i).*(attention|flash|fmha|sdpa)"),
    "products": re.compile("(?i).*(gemm|nvjet|cutlass|splitk)|(one_group|specialised|split|fp8_blocks)$"),
}
PROFILED = 20  # calls


def source() -> str:
    """Return the hash of the block and of the way it is measured."""
    return provenance.source_hash(pathlib.Path(__file__), decoder_block)


def compile_and_count(block: Callable, compile_graph: Callable) -> tuple[Callable, list]:
    """Return torch.compile(block, fullgraph=True) and the list to which it adds each graph that it compiles.

    `compile_graph(graph, inputs)` is the rest of the compiler, such as Inductor's compile_fx.
    """
    graphs: list = []

    def backend(graph, inputs):
        graphs.append(graph)
        return compile_graph(graph, inputs)

    return torch.compile(block, backend=backend, fullgraph=True), graphs


def count_graphs(block: Callable, graphs: list, inputs, marked: bool) -> list[int]:
    """Return the number of graphs after a call with each of `inputs`; if `marked`, with mark_dynamic on the tokens."""
    numbers = []
    for x in inputs:
        if marked:
            torch._dynamo.mark_dynamic(x, 1)
        block(x)
        numbers.append(len(graphs))
    return numbers


def _make_inputs(sizes: Sizes, tokens, where: str) -> list[torch.Tensor]:
    return [torch.randn(1, each, sizes.hidden, device=where).bfloat16() for each in tokens]


def attend_float64(q, k, v):
    """Return causal attention in float64, one key head at a time: all scores at once would not fit."""
    per_kv = q.shape[1] // k.shape[1]
    parts = zip(q.split(per_kv, 1), k.split(1, 1), v.split(1, 1))
    return torch.cat([attention.spec(*part, is_causal=True) for part in parts], 1)


def make_references(sizes: Sizes, weights: dict[str, torch.Tensor], inputs) -> list[torch.Tensor]:
    """Return the block's result in float64 for each of `inputs`, from the given weights without rounding them."""
    block = DecoderBlock(
        sizes, {name: weight.double() for name, weight in weights.items()}, attend=attend_float64
    )
    return [block(x.double()) for x in inputs]


# ---- the caller's side


def measure() -> list[dict]:
    """Return a row per variant and number of tokens, with {tokens, ms, call_ms, error, breaks, graphs}.

    `ms` is under a CUDA graph and `call_ms` without; `ratio` and `call_ratio` are eager's time, measured in the same
    way and the same rounds, over them. `graphs` counts the graphs after calls with CALLS tokens. The row has the fields
    of `divide_kernels` too, where torch's profiler sees the kernels of a call.
    """
    with worker_pool.lease_worker(MODULE, WHAT) as worker:
        answer = worker.ask({}, LIMIT_S)
        worker.stop()  # frees its memory on the GPU
    if "rows" not in answer:
        raise RuntimeError(answer.get("reason", "the process died"))
    return answer["rows"]


# ---- in the process


def _prepare_variant(name: str, block: DecoderBlock, inputs, references) -> tuple[Callable, dict]:
    """Return the function to time, and its graphs, errors and status; it compiles with the first of `inputs`."""
    from torch._inductor.compile_fx import compile_fx

    linear, _, is_compiled = VARIANTS[name]
    function, found = block, {}
    if is_compiled:
        function, graphs = compile_and_count(block, compile_fx)
        found["graphs"] = count_graphs(function, graphs, [x.clone() for x in inputs], marked=True)
    errors = [check.relative_error(function(x), reference) for x, reference in zip(inputs, references)]
    found["errors"] = errors
    if max(errors) > LIMITS[linear]:
        found |= {"status": "wrong", "reason": f"the error {max(errors):.1e} is above {LIMITS[linear]:.1e}"}
    return function, found


def _capture(function: Callable, x: torch.Tensor) -> Callable[[], None]:
    """Return the replay of a CUDA graph of one call."""
    return bench.capture_burst([functools.partial(function, x)], 1)


def _time(functions: dict[str, Callable], sizes: Sizes, tokens: int, weights) -> tuple[dict, dict]:
    """Return bench.Timing of each function by name: under CUDA graphs, and called plainly."""

    def make_inputs():  # the weights count as inputs: they fill the L2 cache several times
        return (*_make_inputs(sizes, (tokens,), "cuda"), *weights.values())

    def as_candidates(prepare):
        return {
            name: lambda x, *_, function=function: prepare(function, x)
            for name, function in functions.items()
        }

    timing = dict(flops=sizes.count_flops(tokens), rounds=12, warm_s=0.2, burst_ms=8.0)
    with mock.patch.object(bench, "GRAPH_BELOW_US", 0):  # each candidate makes its own graph, or none
        return tuple(
            bench.compare(as_candidates(prepare), make_inputs, next(iter(functions)), **timing)
            for prepare in (_capture, functools.partial)
        )


def divide_kernels(launches: Sequence[tuple[str, float]], calls: int) -> dict:
    """Return {launches, products_ms, attention_ms, other_ms} of one of `calls` equal calls.

    `launches` are the (name, microseconds) of the kernels of all calls. The result is empty if they are no whole
    number of kernels per call.
    """
    if not launches or len(launches) % calls:
        return {}
    found = {
        "launches": len(launches) // calls,
        **{f"{kind}_ms": 0.0 for kind in ("products", "attention", "other")},
    }
    for name, us in launches:
        kind = next((kind for kind, pattern in KINDS.items() if pattern.match(name)), "other")
        found[f"{kind}_ms"] += us / 1e3 / calls
    return found


def _profile(function: Callable, x: torch.Tensor, ms: float) -> dict:
    """Return `divide_kernels` of PROFILED calls, after calls for 0.2 s with which the clock settles."""
    for _ in range(math.ceil(200 / ms)):
        function(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            function(x)
        torch.cuda.synchronize()
    launches = [
        (event.name, event.time_range.elapsed_us())
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    return divide_kernels(launches, PROFILED)


def _count_breaks(block: DecoderBlock, x: torch.Tensor) -> int | None:
    """Return the graph breaks in a call, or None on a GPU that cannot run it."""
    try:
        return torch._dynamo.explain(block)(x).graph_break_count
    except torch.AcceleratorError:
        raise
    except Exception:  # the variant's row says why it cannot run
        return None


@torch.no_grad()
def _measure(sizes: Sizes = LLAMA_3_8B) -> dict:
    torch.manual_seed(0)
    weights, inputs = decoder_block.make_weights(sizes, "cuda"), _make_inputs(sizes, CALLS, "cuda")
    references = make_references(sizes, weights, inputs)
    torch.cuda.empty_cache()
    blocks = {
        name: DecoderBlock(sizes, weights, linear, attend) for name, (linear, attend, _) in VARIANTS.items()
    }
    functions, facts = {}, {name: {"status": "ok"} for name in VARIANTS}
    # explain forgets what was compiled, so it comes first.
    breaks = {
        name: _count_breaks(block, inputs[1].clone()) for name, block in blocks.items() if VARIANTS[name][2]
    }
    torch._dynamo.reset()
    for name, block in blocks.items():
        try:
            function, found = _prepare_variant(name, block, inputs, references)
            facts[name] |= {"breaks": breaks.get(name), **found}
            functions[name] = function
        except torch.AcceleratorError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {device.first_line(error)}"[:300]
            facts[name] = {"status": "failed", "reason": reason}
    rows, times = [], {tokens: _time(functions, sizes, tokens, weights) for tokens in TOKENS}
    for i, (tokens, (replayed, called)) in enumerate(times.items()):
        for name in VARIANTS:
            row = {"name": name, "workload": "decoder block", "tokens": tokens}
            row |= {"dtype": "fp8" if "fp8" in name else "bf16", "shape": [1, tokens, sizes.hidden]}
            if name in functions:
                row |= replayed[name].row()
                plain = called[name]
                row |= {"call_ms": plain.ms, "call_ratio": plain.ratio, "call_spread": plain.spread}
                row |= {"error": facts[name]["errors"][i], **_profile(functions[name], inputs[i], plain.ms)}
            kept = {key: value for key, value in facts[name].items() if key != "errors" and value is not None}
            if kept["status"] == "ok":  # else the timing's status would hide a wrong result
                kept["status"] = row["status"]
            rows.append(row | kept)
    return {"rows": rows}


if __name__ == "__main__":
    worker_pool.serve(process.answer_with(_measure))
