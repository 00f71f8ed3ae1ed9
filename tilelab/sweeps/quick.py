"""Measure many configurations at one shape in milliseconds each, as the tuner does, in the worker that has the GPU.

A candidate is checked against the library's result, then timed in a CUDA graph on operands that come from DRAM. The
operands, the library's result and its graph are made once per shape.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilelab.measure import bench
from tilelab.runtime import device

if TYPE_CHECKING:
    from tilelab.sweeps.space import Space

PEER_EVERY = 6  # candidates between two timings of the library: the clock of the chip moves
BURST_MS = 0.3


@dataclasses.dataclass
class _Operands:
    """Sets of operands of one space, and what the library makes of them."""

    space: Space
    sets: list[Sequence]
    expected: torch.Tensor
    calls: int  # of one burst
    replay_peer: Callable[[], None]
    peer_us: float
    timed: int = 0


_last: list[_Operands] = []  # at most one: another shape needs the memory


def measure(space: Space, config: Any) -> dict:
    """Check one configuration, then time it beside the peer; return a row's `status`, `reason`, `ms` and `ratio`."""
    try:
        operands = _get_operands(space)
    except torch.AcceleratorError:
        raise
    except (ValueError, RuntimeError) as error:
        return {"status": "failed", "reason": f"{space.peer} refuses the shape: {device.first_line(error)}"}
    launches = [space.prepare(config, *tensors) for tensors in operands.sets]
    if error := _find_error(launches[0], operands.sets[0][2], operands.expected):
        return {"status": "wrong", "reason": error}
    us = _time_us(bench.capture_burst(launches, operands.calls), operands.calls)
    operands.timed += 1
    if operands.timed % PEER_EVERY == 0:
        operands.peer_us = _time_us(operands.replay_peer, operands.calls)
    return {"status": "ok", "reason": "", "ms": us / 1e3, "ratio": operands.peer_us / us}


def measure_finalists(space: Space, configs: Sequence) -> list[dict]:
    """Time configurations and the peer interleaved; return {`ms`, `ratio`, `spread`} for each."""
    sets = iter(_get_operands(space).sets)
    prepared = {
        str(config): lambda *tensors, config=config: space.prepare(config, *tensors) for config in configs
    }
    found = bench.compare(
        {space.peer: space.prepare_peer, **prepared},
        sets.__next__,
        space.peer,
        rounds=10,
        warm_s=0.02,
        burst_ms=1.5,
    )
    _last.clear()
    return [
        {name: getattr(found[str(config)], name) for name in ("ms", "ratio", "spread")} for config in configs
    ]


def _get_operands(space: Space) -> _Operands:
    if not _last or _last[0].space != space:
        _last.clear()
        _last.append(_make_operands(space))
    return _last[0]


def _make_operands(space: Space) -> _Operands:
    sets = bench.make_input_sets(space.make_inputs)
    peer = [space.prepare_peer(*tensors) for tensors in sets]
    peer[0]()
    expected = sets[0][2].float()
    calls = max(2, len(sets), min(100, math.ceil(BURST_MS / bench.estimate_ms(peer))))
    replay_peer = bench.capture_burst(peer, calls)
    return _Operands(space, sets, expected, calls, replay_peer, _time_us(replay_peer, calls))


def _find_error(launch: Callable, out: torch.Tensor, expected: torch.Tensor) -> str:
    """Return in one sentence what is wrong with the result of a launch, or ""."""
    out.fill_(math.nan)
    launch()
    difference = (out.float() - expected).abs().max() / expected.abs().max()
    return "" if difference < 2**-6 else f"the result differs from the library's by {float(difference):.1e}."


def _time_us(replay: Callable, calls: int) -> float:
    """Return the median microseconds per call of three replays, after one that is not counted."""
    replay()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) * 1e3 / calls
