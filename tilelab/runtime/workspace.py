"""Counters in the GPU's memory with which the programs of one kernel find out who is last."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

CAPTURED = 1 << 20  # counters for launches that graphs capture, 4 MiB per GPU

_by_stream: dict[tuple, torch.Tensor] = {}
_for_graphs: dict[torch.device, tuple[torch.Tensor, int]] = {}


def make_counters(count: int, where: torch.device) -> torch.Tensor:
    """Return `count` zeros (int32) for one launch on the current stream. The kernel sets them back to zero.

    Launches on one stream run one after the other, so they share counters. A graph may be replayed on any stream, so
    each launch that it captures gets its own, which are never used again.
    """
    if where.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=where)
    if torch.cuda.is_current_stream_capturing():
        spare, used = _for_graphs.get(where, (None, CAPTURED))
        if used + count > CAPTURED:  # memory that the graph sets to zero at each replay
            return torch.zeros(count, dtype=torch.int32, device=where)
        _for_graphs[where] = spare, used + count
        return spare[used : used + count]
    if where not in _for_graphs:
        _for_graphs[where] = _make_lasting_zeros(CAPTURED, where), 0
        torch.cuda.synchronize(where)  # a graph on another stream may use them next
    # torch.cuda.current_stream(where).cuda_stream is the same number, and takes 15 times longer.
    key = where, torch._C._cuda_getCurrentRawStream(where.index)
    counters = _by_stream.get(key)
    if counters is None or len(counters) < count:
        counters = _by_stream[key] = _make_lasting_zeros(max(count, 4096), where)
    return counters


def _make_lasting_zeros(count: int, where: torch.device) -> torch.Tensor:
    """Return `count` zeros that are set on the current stream, and whose memory belongs to no pool.

    Before torch.compile captures a CUDA graph, it runs the operators once with a pool from which this thread allocates.
    Only results of the graph may live there. Another thread allocates from the memory that everything else uses.
    """

    def allocate(stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(count, dtype=torch.int32, device=where)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate, torch.cuda.current_stream(where)).result()
