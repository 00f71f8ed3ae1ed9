"""Find the fastest configuration of a kernel for each of many shapes, on the GPU here.

A shape takes about a second. Each candidate is checked against the library's result, then timed in a CUDA graph on
operands that come from DRAM. The fastest few are timed again, interleaved with the library.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tilelab import cli
from tilelab.measure import bench
from tilelab.runtime import build, device, tuned

FINALISTS = 4
SHARE = 0.15  # of the configurations that can run a shape: half of the time this finds the fastest of all
PEER_EVERY = 6  # candidates between two timings of the library: the clock of the chip moves
BURST_MS = 0.3


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A kernel C = A B as the tuner sees it.

    `candidates(m, n, k)` are the configurations that can run a shape. `make_inputs(m, n, k)` returns tensors of which
    the third is the result, `prepare(config, *tensors)` and `prepare_peer(*tensors)` a launch on them. `predict_us` is
    the model's time of a configuration at a shape, `job` its compilation, and `source` a hash of the kernel's code.
    """

    name: str
    peer: str
    candidates: Callable[[int, int, int], Sequence]
    predict_us: Callable[[Any, int, int, int], float]
    make_inputs: Callable[[int, int, int], tuple]
    prepare: Callable[..., Callable]
    prepare_peer: Callable[..., Callable]
    job: Callable[[Any, int, int, int], build.Job]
    source: Callable[[], str]
    dtype: str = "bf16"
    multiples: tuple[int, int] = (8, 8)  # the numbers that must divide N and K
    needs: str = "has_tma"  # the predicate of tilelab.runtime.device that the GPU must have
    share: float = SHARE  # of the candidates that `run` tries


def choose_candidates(tunable: Tunable, m: int, n: int, k: int, share: float = 1.0) -> list:
    """Return the candidates for a shape, the one predicted fastest first; `share` of those that can run, at least 4."""
    found = sorted(tunable.candidates(m, n, k), key=lambda config: tunable.predict_us(config, m, n, k))
    return found[: max(4, math.ceil(share * len(found)))]


def tune_shapes(
    tunable: Tunable, shapes: Iterable[tuple[int, int, int]], share: float = 1.0
) -> Iterator[dict]:
    """Yield for each shape (m, n, k) a row with the fastest `config`, its `us`, and its `ratio` to the library.

    `share` is the part of the configurations that is tried, those first that the model expects to be fastest. `trials`
    lists all of them as (name, predicted µs, measured µs). Raises Unsupported without a GPU.
    """
    _require(tunable)
    wanted = {shape: choose_candidates(tunable, *shape, share) for shape in shapes}
    jobs = [tunable.job(config, *shape) for shape, configs in wanted.items() for config in configs]
    build.compile_ahead({repr(job): job for job in jobs}.values())  # sizes that compile alike share one
    for shape, configs in wanted.items():
        yield tune_shape(tunable, shape, configs)


def _require(tunable: Tunable) -> None:
    device.require(tunable.needs, f"tuning {tunable.name}", "run it on a GPU that has it")


def run(tunable: Tunable, path: str, share: float | None = None) -> int:
    """Tune the shapes of a file, keep them in the table of the GPU here, and print a sentence for each.

    A line of the file holds M,N,K; text after a # does not count. `share` is that of `tune_shapes`; None stands for the
    tunable's. Return 0, or 1 if a shape gets no row: no configuration was right, or the library refuses it, so that
    there is no result to compare with. A row is on disk before the next shape begins. Raises ValueError for a bad line
    or a damaged table, or a file that cannot be read, and Unsupported without a GPU, all before the work.
    """
    shapes = read_shapes(path, tunable.multiples)
    _require(tunable)
    gpu, status = device.current().name, 0
    table = tuned.table_path(tunable.name, gpu)
    tuned.load(tunable.name, gpu)
    if reason := cli.unwritable_reason(str(table)):
        raise ValueError(f"the table of tuned shapes cannot be kept: {reason}.")
    for row in tune_shapes(tunable, shapes, tunable.share if share is None else share):
        if row["config"] is None:
            status = 1
            reason = row.get("reason") or "no configuration gave the right result"
            print("{m} × {n} × {k}: ".format_map(row) + reason.rstrip(".") + ".", flush=True)
        else:
            print(*tuned.keep(tunable.name, [row], gpu), flush=True)
    print(f"The table is {table}.")
    return status


def keep_winner(
    tunable: Tunable, shape: Sequence[int], dtype: str, config: Any, row: dict, tried: int
) -> str:
    """Keep the fastest configuration of a sweep, measured on the GPU here, as `tuned.keep` does; return its sentence.

    `row` is the configuration's row of the sweep, `tried` the number of configurations that were timed. Raises
    ValueError for another dtype than the table's, for a row without a time beside the peer, and for a damaged table.
    """
    if dtype != tunable.dtype:
        raise ValueError(
            f"the table of {tunable.name} holds {tunable.dtype} only; the sweep's dtype is {dtype}."
        )
    ms, ratio = (row.get(f"final_{name}") or row.get(name) for name in ("ms", "ratio"))
    if not ms or not ratio:
        raise ValueError(f"{row['kernel']} has no time beside {tunable.peer}: sweep it on this GPU.")
    found = {
        **dict(zip("mnk", shape)),
        "dtype": dtype,
        "config": config,
        "us": ms * 1e3,
        "peer": tunable.peer,
        "peer_us": ms * 1e3 * ratio,
        "ratio": ratio,
        "spread": row.get("spread") or 0.0,
        "tried": tried,
        "source": tunable.source(),
        "recorded": row.get("recorded"),
    }
    return tuned.keep(tunable.name, [found], device.current().name)[0]


def read_shapes(path: str, multiples: tuple[int, int] = (8, 8)) -> list[tuple[int, int, int]]:
    """Return the shapes in a file of lines "M,N,K". ValueError, with the number of the line, for another line.

    The two numbers of `multiples` must divide N and K. ValueError for a file that cannot be read.
    """
    shapes = []
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is no text")
        raise ValueError(f"the file of shapes {path} cannot be read ({reason}).") from None
    for number, line in enumerate(lines, 1):
        if text := line.partition("#")[0].strip():
            try:
                m, n, k = map(int, text.replace(",", " ").split())
                if not 0 < min(m, n, k) <= max(m, n, k) < 2**31 or n % multiples[0] or k % multiples[1]:
                    raise ValueError
            except ValueError:
                raise ValueError(
                    f"line {number} of {path} must be M,N,K, each below 2^31, N a multiple of "
                    f"{multiples[0]} and K of {multiples[1]}; it is {text[:40]!r}."
                ) from None
            shapes.append((m, n, k))
    if not shapes:
        raise ValueError(f"{path} holds no shapes; a line is M,N,K.")
    return shapes


def tune_shape(tunable: Tunable, shape: tuple[int, int, int], configs: Sequence) -> dict:
    """Return the row of `tune_shapes` for one shape and the given configurations."""
    sets = bench.make_input_sets(lambda: tunable.make_inputs(*shape))
    row = dict(zip("mnk", shape)) | {"dtype": tunable.dtype, "peer": tunable.peer, "source": tunable.source()}
    try:
        peer = [tunable.prepare_peer(*tensors) for tensors in sets]
        peer[0]()
    except torch.AcceleratorError:
        raise
    except (ValueError, RuntimeError) as error:  # the other shapes can still be tuned
        return row | {
            "config": None,
            "reason": f"{tunable.peer} refuses the shape: {device.first_line(error)}",
        }
    expected = sets[0][2].float()
    call_ms = bench.estimate_ms(peer)
    calls = max(2, len(sets), min(100, math.ceil(BURST_MS / call_ms)))
    replay_peer = bench.capture_burst(peer, calls)
    trials, rejected, peer_us = [], [], _time_us(replay_peer, calls)
    for number, config in enumerate(configs):
        try:
            launches = [tunable.prepare(config, *tensors) for tensors in sets]
            if error := _find_error(launches[0], sets[0][2], expected):
                rejected.append((str(config), error))
                continue
            us = _time_us(bench.capture_burst(launches, calls), calls)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            rejected.append((str(config), f"{type(error).__name__}: {device.first_line(error)}"[:200]))
            continue
        if number % PEER_EVERY == PEER_EVERY - 1:
            peer_us = _time_us(replay_peer, calls)
        trials.append((us / peer_us, us, config))
    trials.sort(key=lambda trial: trial[0])
    row |= {
        "tried": len(trials),
        "rejected": rejected,
        "trials": [(_name(config), tunable.predict_us(config, *shape), us) for _, us, config in trials],
    }
    if not trials:
        return row | {"config": None, "reason": "no configuration gave the right result"}
    finalists = {_name(config): config for config in _choose_finalists([config for *_, config in trials])}
    predicted = min((config for *_, config in trials), key=lambda config: tunable.predict_us(config, *shape))
    finalists[_name(predicted)] = predicted  # so that a noisy short timing cannot cost the model's choice
    again = iter(sets)
    found = bench.compare(
        {
            tunable.peer: tunable.prepare_peer,
            **{
                name: lambda *tensors, config=config: tunable.prepare(config, *tensors)
                for name, config in finalists.items()
            },
        },
        again.__next__,
        tunable.peer,
        rounds=10,
        warm_s=0.02,
        burst_ms=1.5,
    )
    best = min((found[name] for name in finalists if found[name].ms), key=lambda timing: timing.ms)
    return row | {
        "config": finalists[best.name],
        "us": best.ms * 1e3,
        "peer_us": best.peer_ms * 1e3,
        "ratio": best.ratio,
        "spread": best.spread,
    }


def _choose_finalists(configs: Sequence) -> list:
    """Return the fastest two, and the fastest of other tiles: a short timing tells tiles apart better than variants."""
    kept, tiles = list(configs[:2]), {(config.block_m, config.block_n) for config in configs[:2]}
    for config in configs[2:]:
        if len(kept) < FINALISTS and (config.block_m, config.block_n) not in tiles:
            kept.append(config)
            tiles.add((config.block_m, config.block_n))
    return kept


def _name(config) -> str:
    return getattr(config, "name", None) or str(config)


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
