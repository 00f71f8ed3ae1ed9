"""Find the fastest configuration of a kernel for each of many shapes, on the GPU here, and keep it in a table.

A shape is one quick sweep (tilelab.sweeps.quick), which takes about a second. Its fastest few are timed again,
interleaved with the library.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilelab import cli
from tilelab.runtime import device, tuned
from tilelab.sweeps.space import Space
from tilelab.sweeps.sweep import Sweep

FINALISTS = 4


def choose_candidates(space: Space, share: float = 1.0) -> list:
    """Return the candidates for a shape, the one predicted fastest first; `share` of those that can run, at least 4."""
    found = sorted(space.candidates(), key=space.predict_us)
    return found[: max(4, math.ceil(share * len(found)))]


def choose_finalists(space: Space, ranked: Sequence) -> list:
    """Return the fastest two, the fastest of other tiles, and the model's choice.

    A short timing tells tiles apart better than variants of a tile, and it may be noisy, which must not cost the
    model's choice.
    """
    kept, tiles = [], set()
    for place, config in enumerate(ranked):
        tile = config.block_m, config.block_n
        if place < 2 or len(kept) < FINALISTS and tile not in tiles:
            kept.append(config)
            tiles.add(tile)
    return [*kept, min(ranked, key=space.predict_us)]


def tune_shapes(
    kernel: type[Space], shapes: Iterable[tuple[int, int, int]], share: float = 1.0
) -> Iterator[dict]:
    """Yield for each shape (m, n, k) a row with the fastest `config`, its `us`, and its `ratio` to the library.

    `share` is the part of the candidates that is tried, those first that the model expects to be fastest. `trials`
    lists all that were timed as (name, predicted µs, measured µs). Where no configuration was right, or the library
    refuses the shape, `config` is None and `reason` says why. Raises Unsupported without a GPU.
    """
    _require(kernel)
    for shape in shapes:
        yield tune_shape(kernel(shape, kernel.table_dtype), share)


def _require(kernel: type[Space]) -> None:
    device.require(kernel.needs, f"tuning {kernel.table}", "run it on a GPU that has it")


def tune_shape(space: Space, share: float = 1.0) -> dict:
    """Return the row of `tune_shapes` for one shape."""
    sweep = Sweep(
        choose_candidates(space, share),
        space,
        quick=True,
        choose_finalists=lambda ranked: choose_finalists(space, ranked),
    )
    rows = sweep.finish()
    timed = [row for row in rows if row["status"] == "ok"]
    if not timed:
        reasons = {row["reason"] for row in rows}
        reason = reasons.pop() if len(reasons) == 1 else "no configuration gave the right result"
        return dict(zip("mnk", space.shape)) | {"config": None, "reason": reason}
    config = sweep.configs[sweep.winner["key"]]
    trials = [(row["kernel"], 1e3 * row["predicted_ms"], 1e3 * row["ms"]) for row in timed]
    return _make_row(space, config, sweep.winner, len(timed)) | {"trials": trials}


def _make_row(space: Space, config: Any, row: dict, tried: int) -> dict:
    """Return a row of the table from the row of a sweep, by its last timing."""
    ms, ratio, spread = (row.get(f"final_{name}") or row.get(name) for name in ("ms", "ratio", "spread"))
    return {
        **dict(zip("mnk", space.shape)),
        "dtype": space.dtype,
        "config": config,
        "us": ms * 1e3,
        "peer": space.peer,
        "peer_us": ms * 1e3 * ratio,
        "ratio": ratio,
        "spread": spread or 0.0,
        "tried": tried,
        "source": space.tuned_source(),
        "recorded": row.get("recorded"),
    }


def run(kernel: type[Space], path: str, share: float | None = None) -> int:
    """Tune the shapes of a file, keep them in the table of the GPU here, and print a sentence for each.

    A line of the file holds M,N,K; text after a # does not count. `share` is that of `tune_shapes`; None stands for the
    kernel's. Return 0, or 1 if a shape gets no row: no configuration was right, or the library refuses it, so that
    there is no result to compare with. A row is on disk before the next shape begins. Raises ValueError for a bad line
    or a damaged table, or a file that cannot be read, and Unsupported without a GPU, all before the work.
    """
    shapes = read_shapes(path, kernel.multiples)
    _require(kernel)
    gpu, status = device.current().name, 0
    table = tuned.table_path(kernel.table, gpu)
    tuned.load(kernel.table, gpu)
    if reason := cli.unwritable_reason(str(table)):
        raise ValueError(f"the table of tuned shapes cannot be kept: {reason}.")
    for row in tune_shapes(kernel, shapes, kernel.share if share is None else share):
        if row["config"] is None:
            status = 1
            reason = row.get("reason") or "no configuration gave the right result"
            print("{m} × {n} × {k}: ".format_map(row) + reason.rstrip(".") + ".", flush=True)
        else:
            print(*tuned.keep(kernel.table, [row], gpu), flush=True)
    print(f"The table is {table}.")
    return status


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
