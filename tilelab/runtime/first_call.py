"""Measure a dozen configurations at the first call of a shape (config="tune") and keep the winner for later processes.

The table of winners lies in the user's cache, or in the folder that TILES_TUNED names.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tilelab.runtime import device, plans, tuned

CANDIDATES = 12
ROUNDS = 5
BURST_US = 400  # of one candidate in one round


def choose(
    kernel: str,
    shape: tuple[int, int, int],
    dtype: str,
    ranked: Sequence[Any],
    compile_one: Callable[[Any], object],
    prepare: Callable[..., Callable[[], object]],
    tensors: Sequence[torch.Tensor],
    source: str,
) -> tuple[Any, str]:
    """Return the fastest of the first dozen of `ranked` configurations, and in words how it was found.

    `compile_one(config)` compiles, in threads; `prepare(config, *tensors)` returns a launch. The last of `tensors` is
    the output; measurements write copies. During the capture of a graph, and without memory for the copies, the first
    of `ranked` is returned and nothing is kept.
    """
    if plans.is_capturing():
        return ranked[0], "not tuned, because a CUDA graph is being captured"
    tried = list(ranked[:CANDIDATES])
    with ThreadPoolExecutor(len(tried)) as pool:  # NVRTC works without Python's lock
        found = list(pool.map(lambda config: _attempt(compile_one, config), tried))
    tried = [config for config, reason in zip(tried, found) if not reason] or tried[:1]
    try:
        copies = _copies(tensors)
        us = _measure([[prepare(config, *each) for each in copies] for config in tried])
    except torch.OutOfMemoryError:
        return ranked[0], "not tuned, because there is no memory for copies of the operands"
    best = min(range(len(tried)), key=us.__getitem__)
    row = dict(zip("mnk", shape)) | {"dtype": dtype, "config": tried[best], "us": us[best]}
    row |= {"peer": "the first choice", "peer_us": us[0], "ratio": us[0] / us[best], "spread": 0.0}
    row |= {"tried": len(tried), "source": source}
    with contextlib.suppress(OSError, ValueError):  # nowhere to write, or a damaged table
        tuned.keep(kernel, [row], device.current().name or "", replace=True)
    return tried[best], f"tuned among {len(tried)} at the first call"


def _attempt(compile_one: Callable[[Any], object], config: Any) -> str:
    try:
        compile_one(config)
        return ""
    except Exception as error:  # one that does not compile is passed over
        return device.first_line(error)


def _copies(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return copies of the tensors that together leave L2 before the first is used again, if memory allows."""
    size = sum(tensor.nbytes for tensor in tensors)
    free = torch.cuda.mem_get_info()[0] // 2
    wanted = min(16, 1 + 3 * device.current().l2_bytes // max(size, 1), max(1, free // max(size, 1)))
    return [
        [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device).copy_(each)
            for each in tensors
        ]
        for _ in range(wanted)
    ]


def _measure(launches: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
    """Return the median microseconds of a launch of each candidate, over interleaved bursts."""

    def burst(candidate, calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in range(calls):
            candidate[call % len(candidate)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    graphs = []
    for candidate in launches:
        burst(candidate, 2)  # loads the kernel
        calls = max(2, min(40, round(BURST_US / max(burst(candidate, len(candidate)), 1))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                candidate[call % len(candidate)]()
        graphs.append((graph, calls))
    times: list[list[float]] = [[] for _ in graphs]
    for number in range(ROUNDS + 1):
        for place in range(len(graphs))[:: 1 if number % 2 else -1]:
            graph, calls = graphs[place]
            times[place].append(burst([graph.replay], 1) / calls)
    return [statistics.median(each[1:]) for each in times]
