"""Programs that break a rule of tensor maps which only a run shows, for the notebook `ch10_tile_pipeline`.

Each runs in a process of its own, which may fault or hang: `python -m ch10.tile_pipeline.broken_programs "load from column 1"`.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline import box_dump, experiments
from tilelab import check, cli, device, results


def load_from(column: int) -> None:
    tile_pipeline.UNIT = 4  # bytes: the launcher's check lets any float pass
    x = torch.ones(8, 32, device="cuda")
    box_dump.dump_box(x, 0, column, (8, 32))
    torch.cuda.synchronize()
    print("it loads")


def store_rows() -> None:
    tile_pipeline.UNIT = 4
    x, out = torch.ones(8, 32, device="cuda"), torch.full((8, 32), 7.0, device="cuda")
    tile_pipeline.copy(x[:, :31], out[:, :31])
    print("the 32nd column held 7 and holds", *out[:, 31].unique().tolist())


def expect(more: int) -> None:
    source, folder = tile_pipeline.SOURCE, tempfile.TemporaryDirectory()
    text = source.read_text()
    changed = text.replace("barrier, TILE_BYTES)", f"barrier, TILE_BYTES + {more})")
    assert changed != text
    tile_pipeline.SOURCE = pathlib.Path(folder.name, "changed.cu")
    tile_pipeline.SOURCE.write_text(changed)
    wrong = 0
    for _ in range(200):
        x = torch.randn(64, 64, device="cuda")
        wrong += not torch.equal(box_dump.dump_box(x, 0, 0, (64, 64)).view(x.dtype), x.flatten())
    print(f"wrong in {wrong} of 200 runs")


PROGRAMS = {**{f"load from column {column}": functools.partial(load_from, column) for column in (4, -4, 1, -1)},
            "store rows of 31 floats": store_rows,
            **{f"expect {more:+,} bytes": functools.partial(expect, more) for more in (0, -8192, 8192)}}


def begin(name: str) -> None:
    torch.zeros(1, device="cuda")
    print("begun", flush=True)
    PROGRAMS[name]()


def run(name: str, limit_s: float = 10) -> str:
    """What the program of that name says, or what became of it."""
    status, output, errors = check.run_snippet(f"from ch10 import tile_broken; tile_broken.begin({name!r})", limit_s)
    if status is None:
        return f"no answer within {limit_s:g} s"
    said = [line for line in (output or errors).splitlines() if line.strip()]
    last = said[-1] if said else f"exit status {status}"
    return next((line[line.index("CUDA error"):] for line in said if "CUDA error" in line), last)


@results.experiment("ch10_tile_broken", lambda: experiments.source(box_dump, load_from, store_rows, expect))
def broken():
    """{program, result} of PROGRAMS, all at once: two of them hang."""
    found = check.run_side_by_side(*(functools.partial(run, name) for name in PROGRAMS))
    return [{"program": name, "result": result} for name, result in zip(PROGRAMS, found)]


def main(argv: list[str] | None = None) -> int:
    """Run the program of that name; without a GPU show what is recorded of all."""
    made = cli.make_plain_parser("ch10.tile_pipeline.broken_programs", "Run a program that breaks a rule.")
    made.add_argument("name", nargs="?", choices=PROGRAMS, help="without one, and without a GPU: the table of all")
    asked = made.parse_args(argv)
    if asked.name and device.current().has_tma:
        PROGRAMS[asked.name]()
    else:
        print(broken().show())
    return 0


if __name__ == "__main__":
    sys.exit(main())
