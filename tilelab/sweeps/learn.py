"""Add measured times to the table from which a GEMM's choice learns (tilelab.runtime.choice).

From a GPU to its table:

    python -m tilelab.sweeps.measure --gpu 0 --of 1 --limit 1200 --out measured
    python -m tilelab.sweeps.learn "NVIDIA H200" measured/*.jsonl

The files hold lines of JSON: {"kernel": "wgmma_gemm", "shape": [M, N, K], "us": {configuration: µs}, "families":
{family: configuration}}. Other lines do not count, nor do families that the kernel no longer has, nor layers on which
the choice is only judged (tilelab.measure.layer_shapes).

A table holds the errors of a model, so a change of the model's rates spoils it. Before the change, write its times as
such lines with `--export FILE`. After it, delete the table and add the file.
"""

from __future__ import annotations

import importlib
import json
import math
import pathlib
from collections.abc import Iterable, Mapping

from tilelab import cli
from tilelab.measure import layer_shapes
from tilelab.runtime import choice

MODULES = {"wgmma_gemm": "ch10.wgmma_gemm.choice", "gemm": "ch14.gemm.choice"}

Times = dict[choice.Shape, dict[str, float]]  # {shape: {family: µs}}


def predict(kernel: str, gpu: str, shape: choice.Shape) -> dict[str, float]:
    """Return {family: predicted µs} of a kernel at a shape."""
    model = importlib.import_module(MODULES[kernel])
    us, _ = model.predict(*shape, choice.SMS, gpu)
    return {name: time for name, time in zip(model.NAMES, us.tolist()) if time < math.inf}


def read_table(kernel: str, gpu: str) -> Times:
    """Return the times behind a table: those that the model predicts, times its errors."""
    found: Times = {}
    if table := choice.load(kernel, gpu):
        for shape, row in zip(table.shapes, table.errors):
            errors = {name: row[place] for name, place in table.places.items()}
            predicted = predict(kernel, gpu, shape).items()
            found[shape] = {
                name: us * math.exp(error)
                for name, us in predicted
                if (error := errors.get(name)) is not None
            }
    return found


def is_held_out(shape: choice.Shape) -> bool:
    """Return whether a shape is only for judging."""
    models = layer_shapes.VALIDATION | layer_shapes.HELD_OUT
    apart = {size for layers in models.values() for size in layers.values()}
    return shape[1:] in apart or shape in layer_shapes.HELD_OUT_OTHERS


def add(kernel: str, gpu: str, rows: Iterable[Mapping]) -> int:
    """Add rows, as the file's lines are, to the table of a kernel; return how many shapes it now has.

    Of two times of a family at a shape the shorter counts.
    """
    times = read_table(kernel, gpu)
    for row in rows:
        m, n, k = row["shape"]
        if not is_held_out(shape := (m, n, k)):
            known = times.setdefault(shape, {})
            for name, config in row["families"].items():
                if config in row["us"]:
                    known[name] = min(known.get(name, math.inf), row["us"][config])
    kept = []
    for shape, known in times.items():
        names = predict(kernel, gpu, shape)
        if found := {name: us for name, us in known.items() if name in names}:
            kept.append((shape, found))
    choice.keep(kernel, gpu, kept, lambda *shape: predict(kernel, gpu, shape))
    return len(kept)


def export(gpu: str) -> str:
    """Return the times behind a GPU's tables as lines that `main` reads."""
    lines = [
        {"kernel": kernel, "shape": shape, "us": us, "families": {name: name for name in us}}
        for kernel in MODULES
        for shape, us in read_table(kernel, gpu).items()
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = cli.make_plain_parser(
        "tilelab.sweeps.learn", "Add measured times to the tables of the GEMMs' choice."
    )
    parser.add_argument("gpu", metavar="GPU", help='the name that its driver gives it, such as "NVIDIA H200"')
    parser.add_argument("paths", nargs="*", metavar="FILE", type=pathlib.Path, help="lines of JSON")
    parser.add_argument("--export", metavar="FILE", type=pathlib.Path, help="write the tables' times instead")
    options = parser.parse_args(argv)
    if options.export:
        options.export.write_text(export(options.gpu), encoding="utf-8")
        return 0
    if not options.paths:
        parser.error("give files with measured times, or --export.")
    try:
        lines = [json.loads(line) for path in options.paths for line in path.read_text().splitlines()]
        for kernel in MODULES:
            if rows := [line for line in lines if line.get("kernel") == kernel]:
                shapes = add(kernel, options.gpu, rows)
                print(f"{kernel}: {shapes:,} shapes in {choice.path(kernel, options.gpu)}.")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        parser.error(f"the files cannot be read as lines of measured times: {error!r}.")
    return 0


if __name__ == "__main__":
    cli.run_main(main)
