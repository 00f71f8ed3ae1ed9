"""Programs that break a rule of tensor maps that only a run shows, for the notebook `03_ch10_tile_pipeline`.

Each runs in a process of its own, which may fault or hang.
"""

from __future__ import annotations

import functools

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.lesson import box_dump, experiments
from tilelab.measure import check
from tilelab.measure.patch import patched_source
from tilelab.records import results


def load_from(column: int) -> None:
    x = torch.ones(8, 32, device="cuda")
    box_dump.dump_box(x, 0, column, (8, 32))
    torch.cuda.synchronize()
    print("it loads")


def store_rows() -> None:
    tile_pipeline.UNIT = 4  # bytes: now the launcher accepts rows of any number of floats
    x, out = torch.ones(8, 32, device="cuda"), torch.full((8, 32), 7.0, device="cuda")
    tile_pipeline.copy(x[:, :31], out=out[:, :31])
    print("the 32nd column held 7 and holds", *out[:, 31].unique().tolist())


def expect(more: int) -> None:
    change = "barrier, TILE_BYTES)", f"barrier, TILE_BYTES + {more})", 2
    with patched_source(tile_pipeline.SOURCE, change) as tile_pipeline.SOURCE:
        wrong = 0
        for _ in range(200):
            x = torch.randn(64, 64, device="cuda")
            wrong += not torch.equal(box_dump.dump_box(x, 0, 0, (64, 64)).view(x.dtype), x.flatten())
    print(f"wrong in {wrong} of 200 runs")


PROGRAMS = {
    **{f"load from column {column}": functools.partial(load_from, column) for column in (4, -4, 1, -1)},
    "store rows of 31 floats": store_rows,
    **{f"expect {more:+,} bytes": functools.partial(expect, more) for more in (0, -8192, 8192)},
}


def run_program(name: str, limit_s: float = 10) -> str:
    """Run a program in a process of its own, and return what it prints or how it ended."""
    return check.try_snippet(
        "import torch; from ch10.tile_pipeline.lesson import broken_programs; torch.zeros(1, device='cuda'); "
        f"print('begun', flush=True); broken_programs.PROGRAMS[{name!r}]()",
        limit_s,
    )


@results.experiment("ch10_tile_broken", lambda: experiments.source(box_dump, load_from, store_rows, expect))
def run_programs():
    """Run all programs at once, because two programs hang."""
    found = check.run_side_by_side(*(functools.partial(run_program, name) for name in PROGRAMS))
    return [{"program": name, "result": result} for name, result in zip(PROGRAMS, found)]
