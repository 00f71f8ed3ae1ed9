"""The course's headline figures, and the page that shows them with two versions of torch.

`python -m tilelab.course.record --experiments` measures EXPERIMENTS. results/<gpu>/ holds the records of one version of
torch, and results/<gpu>/torch-2.13/ the headlines of another one. `python -m tilelab.records.compare --stacks` writes
the page with both for the H200, and with the summaries of the tests on every GPU.
"""

from __future__ import annotations

import json
import pathlib
import statistics

from tilelab import ROOT
from tilelab.records import gpus, margins, results
from tilelab.records.report import make_table
from tilelab.runtime import device, provenance

PAGE = ROOT / "docs" / "stacks.md"
# the experiment | fields of the rows that count | what is compared with what
TABLE = """\
ch07_bulk_speed | op=copy, name=bulk_single | a bulk copy of 1 GiB, against torch's copy
ch07_resample_ladder | name=vectors | resampling, against torch's copy of as many bytes
ch10_tile_speed | op=transpose, name=down | a transpose by tensor map, against torch's copy
ch10_gemm_layers |  | the CUDA GEMM on layers of language models, against cuBLAS
ch14_descriptors_speed | op=copy, name=tile_host | a copy by host descriptor, against torch's copy
ch14_gemm_layers |  | the Triton GEMM on the same layers, against cuBLAS
ch14_attention_ladder | name=persistent | attention at 8,192 tokens, against cuDNN
ch14_mx_formats_speed | what=cvt | quantising to MXFP8 or scaled fp8, against torch's copy
ch14_mx_formats_speed | what=back, format=mxfp4 | reading MXFP4 back to bfloat16, against torch's copy (see \
*A layout decides* in `docs/deeper/mx_formats.md`)
ch14_blockscaled_fp8 | name=course | a GEMM in fp8 with block scales, against torch
ch14_compiled_decoder | name=course fp8 | a decoder block compiled with the course's fp8, against eager bf16
"""
HEADLINES = []  # (what is compared with what, experiment, fields of the rows that count)
for experiment, fields, words in (line.split(" | ") for line in TABLE.splitlines()):
    wanted = dict(field.split("=") for field in fields.split(", ") if field)
    HEADLINES.append((words, experiment, wanted))
EXPERIMENTS = tuple(dict.fromkeys(experiment for _, experiment, _ in HEADLINES))
COUNTS = ("passed", "failed", "skipped", "seconds")
TEXT = """\
# Two versions of torch

The records of the {gpu} come from {old}. This page compares the course's headline figures with the figures of {new}. \
`python -m tilelab.records.compare --stacks` computes it from the records in `results/{folder}/`. \
Those of {torch} were made on {days}; a row whose kernel has changed since says “recorded from other code”.

Each figure is the course's speed relative to the peer's, timed in the same run; above 1 the course is faster. \
Several rows are summarised by their geometric mean, where the README may show one of them or another record. The \
peers belong to the software too, so a difference may come from the course's kernel or from the peer. The spread of a \
row is half of the distance between the quartiles of its rounds. The table adds the spreads of both records and shows \
the median over the rows. A difference below the spread may be noise. So may one below the margin of its kind \
(`tilelab.records.margins`): {margins}.

{table}

## The tests

`python -m tilelab.course.record --notebooks --tests` runs every notebook on a GPU, and every test that the machine \
can run. Its summary, `tests.json`, counts the reasons for which tests were skipped.

{tests}
"""


def stack_name(torch_version: str) -> str:
    """Return the name of the folder for a version of torch: "torch-2.13" for "2.13.0+cu130"."""
    return "torch-" + ".".join(torch_version.split(".")[:2])


def holds_headlines(folder: pathlib.Path) -> bool:
    """Return whether a folder holds the record of a headline, and not only the summary of the tests."""
    return any((folder / results.file_name(name)).exists() for name in EXPERIMENTS)


def find_folder(*others: str) -> pathlib.Path:
    """Return the folder for the headlines of this GPU and this version of torch, which need not exist.

    The folder is results/<gpu>/, or results/<gpu>/torch-2.13/ where results/<gpu>/ holds headlines of another version,
    or where one of its files `others` (names without ".json") comes from another version. ValueError for a file that
    names no version.
    """
    folder, recorded = results.results_folder() / device.current().slug, set()
    for path in (folder / results.file_name(name) for name in (*EXPERIMENTS, *others)):
        try:
            if path.exists():
                recorded.add(stack_name(json.loads(path.read_text(encoding="utf-8"))["versions"]["torch"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} names no version of torch: delete it.") from error
    own = stack_name(provenance.versions()["torch"])
    return folder if recorded <= {own} else folder / own


def compare_headline(old: dict | None, new: dict | None, fields: dict) -> list[str]:
    """Return the cells of a headline for its two records: rows, both figures, their difference and the spread.

    Words replace the figures where a record is missing or comes from other code, or where a row has no ratio.
    """
    if old is None or new is None:
        return ["", *("not recorded" if record is None else "" for record in (old, new)), "", ""]
    if old["source"] != new["source"]:
        return ["", "", "recorded from other code", "", ""]
    pairs = [(row, other) for _, row, other in gpus.pair_rows(old, new) if fields.items() <= row.items()]
    timed = [(row, other) for row, other in pairs if other and row.get("ratio") and other.get("ratio")]
    if not timed:
        return [f"0 of {len(pairs)}", "", "no ratio", "", ""]
    figures = [results.geometric_mean(each["ratio"] for each in rows) for rows in zip(*timed)]
    spreads = [sum(row.get("spread") or 0 for row in pair) / pair[0]["ratio"] for pair in timed]
    rows = str(len(pairs)) if len(timed) == len(pairs) else f"{len(timed)} of {len(pairs)}"
    change, spread = figures[1] / figures[0] - 1, statistics.median(spreads)
    return [rows, *(f"{figure:.3f}" for figure in figures), f"{change:+.1%}", f"{spread:.1%}"]


def make_page() -> str:
    """Return the Markdown page that shows the headlines of the H200 with both versions of torch.

    ValueError for a folder without a headline's record.
    """
    folder = results.results_folder() / results.PREFERRED
    other = find_second_set(folder)
    found = []
    for each in (folder, other):
        paths = {name: each / results.file_name(name) for name in EXPERIMENTS}
        found.append({name: results.read(path) for name, path in paths.items() if path.exists()})
        if not found[-1]:
            raise ValueError(f"{each} holds no record of a headline.")
    first, second = (next(iter(records.values())) for records in found)
    torches = [f"torch {record['versions']['torch']}" for record in (first, second)]
    tritons = [record["versions"]["triton"] for record in (first, second)]
    old, new = (f"{torch} with Triton {triton}" for torch, triton in zip(torches, tritons))
    head, rows = ["headline", "rows", *torches, "difference", "spread", "record"], []
    for words, name, fields in HEADLINES:
        cells = compare_headline(*(records.get(name) for records in found), fields)
        rows.append([words, *cells, f"`{name}`"])
    table, tests = make_table(head, rows), summarise_tests(results.results_folder())
    fresh = margins.describe_margins(margins.find_fresh_margins(folder.name))
    days = " and ".join(sorted({record["recorded"][:10] for record in found[1].values()}))
    own = {"gpu": first["device"]["name"], "folder": folder.name, "margins": fresh}
    own |= {"torch": torches[1], "days": days}
    return TEXT.format(old=old, new=new, table=table, tests=tests, **own)


def summarise_tests(folder: pathlib.Path) -> str:
    """Return a table with a row for each summary of the tests below a folder, and the names of those that failed.

    ValueError names a file that is no summary.
    """
    runs = []
    for path in folder.glob("**/tests.json"):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            where = [run["device"]["name"], run["versions"]["torch"], run["versions"]["triton"] or "none"]
            row = [run["recorded"][:10], *where, *(f"{run[count]:,.0f}" for count in COUNTS)]
            if not all(isinstance(cell, str) for cell in row):
                raise TypeError("a name or the date is no text")
            runs.append((run["recorded"], row, [test.partition("::")[2] for test in run.get("failures", ())]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no summary of tests ({type(error).__name__}: {error}).") from error
    if not runs:
        return "No summary is recorded."
    runs.sort(reverse=True)
    lines, (_, newest, still) = [], runs[0]
    for _, (date, gpu, torch, *_), failures in runs:
        for test in failures:
            since = "" if test in still else f"; not in the newest run, on {newest[1]} with torch {newest[2]}"
            lines.append(f"- Failed on {date}, on {gpu} with torch {torch}: `{test}`{since}.")
    head = ["date", "GPU", "torch", "Triton", *COUNTS]
    return "\n".join([make_table(head, [row for _, row, _ in runs]), *([""] if lines else []), *lines])


def find_second_set(folder: pathlib.Path) -> pathlib.Path:
    """Return the newest version's folder among the second sets in the folder of a GPU; ValueError without any."""
    others = [path for path in folder.glob("torch-*") if holds_headlines(path)]
    if not others:
        raise ValueError(
            f"{folder} holds no records of a second version of torch: python -m tilelab.course.record "
            "--experiments makes them."
        )
    return max(others, key=lambda path: [int(part) for part in path.name.removeprefix("torch-").split(".")])
