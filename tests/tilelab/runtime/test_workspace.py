"""Counters of kernels whose programs count themselves."""

import pytest
import torch

from tilelab.runtime import workspace


def test_counters_are_zero():
    counters = workspace.make_counters(5, torch.device("cpu"))
    assert counters.dtype == torch.int32 and counters.tolist() == [0] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_share_counters_on_a_stream_and_never_in_graphs():
    where = torch.device("cuda", torch.cuda.current_device())
    first, again = (workspace.make_counters(8, where) for _ in range(2))
    assert first.data_ptr() == again.data_ptr() and not first.any()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert workspace.make_counters(8, where).data_ptr() != first.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = [workspace.make_counters(8, where) for _ in range(2)]
    assert captured[0].data_ptr() != captured[1].data_ptr() and not captured[0].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counters_outlive_the_pool_that_their_first_launch_allocates_from(monkeypatch):
    # torch.compile plans operators while this thread allocates from the pool of a CUDA graph.
    monkeypatch.setattr(workspace, "_by_stream", {})
    monkeypatch.setattr(workspace, "_for_graphs", {})
    where, pool = torch.device("cuda", torch.cuda.current_device()), torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.zeros(8, device=where)
        counters = workspace.make_counters(8, where)
    ranges = [(segment["address"], segment["address"] + segment["total_size"]) for segment in pool.snapshot()]

    def is_in_pool(tensor):
        return any(begin <= tensor.data_ptr() < end for begin, end in ranges)

    assert is_in_pool(inside) and not counters.any()
    for kept in (counters, workspace._for_graphs[where][0]):
        assert not is_in_pool(kept)
