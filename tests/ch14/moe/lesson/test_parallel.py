"""Experts that are divided among processes give what one process gives."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ch14.moe.lesson import parallel

PROCESSES, EXPERTS, TOKENS, HIDDEN, INNER, TOP_K = 2, 6, 9, 16, 8, 2


def layer(x, gate_up, down, ids, weights):
    """Compute the layer in plain torch: the interpreter would take seconds in each process."""
    out = torch.zeros_like(x)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights)):
        for expert, share in ((e, share) for e, share in zip(chosen, shares) if e >= 0):
            gate, value = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += share * (down[expert] @ (F.silu(gate) * value))
    return out


def make():
    torch.manual_seed(0)
    x = torch.randn(PROCESSES * TOKENS, HIDDEN)
    weights = torch.randn(EXPERTS, 2 * INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    ids = torch.rand(len(x), EXPERTS - 1).topk(TOP_K).indices  # the last expert gets nothing
    return x, *weights, ids, torch.rand(len(x), TOP_K)


def work(rank, store):
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    x, gate_up, down, ids, weights = make()
    mine, here = slice(rank * TOKENS, (rank + 1) * TOKENS), EXPERTS // PROCESSES
    kept = [each[rank * here : (rank + 1) * here] for each in (gate_up, down)]
    skipped = torch.where(torch.arange(len(ids))[:, None] % 3 == 0, -1, ids)
    for chosen in (ids, torch.zeros_like(ids), skipped):  # in the second, one process gets no rows at all
        found = parallel.parallel_moe(x[mine], *kept, chosen[mine], weights[mine], layer)
        assert torch.allclose(found, layer(x, gate_up, down, chosen, weights)[mine], atol=1e-5)
    mine = slice(0, 0 if rank else TOKENS)  # the second process has no tokens
    found = parallel.parallel_moe(x[mine], *kept, ids[mine], weights[mine], layer)
    assert torch.allclose(found, layer(x, gate_up, down, ids, weights)[mine], atol=1e-5)
    with pytest.raises(RuntimeError, match="no backward pass"):
        parallel.parallel_moe(x.requires_grad_(), *kept, ids, weights, layer)


def test_divided_experts_give_what_one_process_gives(tmp_path):
    fork = multiprocessing.get_context("fork")  # a new process would import torch for seconds
    how = {"target": work, "daemon": True}  # one that hangs ends with the tests
    started = [fork.Process(**how, args=(rank, tmp_path / "store")) for rank in range(PROCESSES)]
    for each in started:
        each.start()
    for each in started:
        each.join(60)
    assert [each.exitcode for each in started] == [0, 0]
