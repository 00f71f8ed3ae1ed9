"""The figures in the README's column of measured findings and two tables of docs/operators.md, from the records.

The words of the findings are written by hand in answers.toml. `python -m claims --write` writes the figures that stand
for #.## in them.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections.abc import Iterable
from typing import Any

from ch14 import mx_formats
from ch14.blockscaled.lesson import note_attempts
from claims import trial
from claims.judge import ROOT, Evidence, count_outcomes
from tilelab.records.results import geometric_mean

OPERATORS = ROOT / "docs" / "operators.md"
BEGIN, END = "<!-- {}: written by python -m claims --write -->", "<!-- end of {} -->"
# (kernel, record, the least and the most tokens of the rows that count; None for all rows)
PEERS = (
    ("`wgmma_gemm`, bf16", "ch10_gemm_peers", None),
    ("`attention`, bf16", "ch14_attention_peers", None),
    ("`fp8`, 1 to 64 tokens", "ch14_blockscaled_peers", (1, 64)),
    ("`fp8`, 256 to 1,024 tokens", "ch14_blockscaled_peers", (256, 1024)),
    ("`fp8`, 4,096 to 8,192 tokens", "ch14_blockscaled_peers", (4096, 8192)),
)
PLACE = re.compile(r"\+?#(?:\.#+)?")
FIGURE = r"[+-]?\d+(?:\.\d+)?"
ANSWERS = tomllib.loads((ROOT / "claims" / "answers.toml").read_text(encoding="utf-8"))


def read_figure(
    evidence: Evidence,
    record: str,
    rows: dict[str, Any] | None = None,
    named: str = "",
    unnamed: str | None = None,
    field: str = "ratio",
    of: str = "largest",
    unit: float = 1,
) -> float:
    """Return one figure of a record, as `answers.toml` describes it."""
    chosen = [
        row
        for row in evidence(record, **rows or {})
        if named in row.get("name", "") and (unnamed is None or unnamed not in row["name"])
    ]
    if of == "count":
        return len(chosen)
    values = [row[field] for row in chosen if field in row]
    summaries = {"largest": max, "lowest": min, "mean": geometric_mean, "median": statistics.median}
    return summaries[of](values) / unit


def compare_with_autotune(evidence: Evidence) -> list[float]:
    """Return the time of the sweep over that of triton.autotune."""
    sweep, autotune = evidence("sweep_race")
    return [sweep["seconds"] / autotune["seconds"]]


def compare_multicast(evidence: Evidence) -> list[float]:
    """Return the speed of a search with loads shared over the cluster's barrier, over the one that shares nothing."""
    speed = {row["version"]: row["ratio"] for row in evidence("ch10_tile_searches")}
    return [speed["nearest_multicast"] / speed["nearest"]]


def compare_quantising(evidence: Evidence) -> list[float]:
    """Return the speed at which the fastest kernel writes MXFP8 and NVFP4, over torch's copy."""
    rows = evidence("ch14_mx_formats_speed")
    return [
        max(row["ratio"] for row in rows if row["format"] == name and row["what"] in mx_formats.configs(name))
        for name in ("mxfp8_e4m3", "nvfp4")
    ]


def count_changed_kernels(evidence: Evidence) -> list[int]:
    """Return how many kernels the two attempts of a note change, and how many they concern."""
    same = [row["verdict"] == "the same kernel" for row in note_attempts.accumulator_rows()]
    same += [row["same kernel"] for row in note_attempts.stage_rows()]
    return [len(same) - sum(same), len(same)]


def count_claims(evidence: Evidence) -> list[int]:
    """Return how many claims hold, how many there are, and how many hold with a condition."""
    hold, conditional, fail, missing = count_outcomes(trial.judge_all())
    return [hold + conditional, hold + conditional + fail + missing, conditional]


def find_figures(evidence: Evidence, answer: dict[str, Any]) -> list[float]:
    """Return the figures of an answer."""
    if "rule" in answer:
        return globals()[answer["rule"]](evidence)
    return [read_figure(evidence, **figure) for figure in answer["figures"]]


def rewrite_figures(readme: str) -> str:
    """Return the README's text with the figures of today's records. A figure without a record stays.

    ValueError if a line of the README lacks its words, or a record lacks a figure.
    """
    for notebook, answer in ANSWERS.items():
        words = answer["words"]
        start = readme.find(f"(notebooks/{notebook}.ipynb) |")
        end = readme.find("\n", start)
        found = re.search(FIGURE.join(map(re.escape, PLACE.split(words))), readme[start:end])
        if start < 0 or found is None:
            raise ValueError(f"README.md's line about {notebook} must hold {words!r}, with a figure per #.")
        evidence = Evidence()
        try:
            with evidence.explain_errors(f"the answer of {notebook}, {words!r},"):
                new = fill_in(words, find_figures(evidence, answer))
        except FileNotFoundError:
            continue
        readme = readme[:start] + readme[start:end].replace(found[0], new, 1) + readme[end:]
    return readme


def make_peers() -> str:
    """Return a table of the course's speed relative to each peer; ValueError for a record that lacks a figure."""
    evidence = Evidence()
    lines = ["| kernel | peer | shapes | lowest | geometric mean | highest |", "|---|---|---|---|---|---|"]
    for kernel, record, tokens in PEERS:
        ratios: dict[str, list[float]] = {}
        with evidence.explain_errors("the table of peers"):
            for row in evidence(record, name="course", status="ok"):
                if tokens is None or tokens[0] <= row["shape"][0] <= tokens[1]:
                    ratios.setdefault(f"{row['peer']} {row['peer_version']}", []).append(row["ratio"])
            lines += [
                f"| {kernel} | {peer} | {len(found)} | {min(found):.2f} | {geometric_mean(found):.2f} | "
                f"{max(found):.2f} |"
                for peer, found in ratios.items()
            ]
    return "\n".join(lines)


def make_costs() -> str:
    """Return a table of the CPU's time for a repeated call; ValueError for a record that lacks a figure."""
    evidence = Evidence()
    lines = ["| call | µs | beside it | µs |", "|---|---|---|---|"]
    with evidence.explain_errors("the table of calls"):
        rows = evidence("ch14_compiled_host_time", status="ok")
        if not rows:
            raise ValueError("no call was timed")
        for row in rows:
            call, comma, kind = row["name"].partition(", ")
            lines.append(
                f"| `{call}`{comma}{kind} | {row['us']:.0f} | {row['peer']} | {row['peer_us']:.0f} |"
            )
    return "\n".join(lines)


TABLES = {"peers": make_peers, "calls": make_costs}


def rewrite_tables(page: str) -> str:
    """Return the text of docs/operators.md with today's TABLES; a table without its records stays as it is."""
    for name, make in TABLES.items():
        marks = BEGIN.format(name), END.format(name)
        before, begin, rest = page.partition(marks[0])
        _, end, after = rest.partition(marks[1])
        if not begin or not end:
            raise ValueError(f"{OPERATORS.name} must hold the lines {marks[0]} and {marks[1]} in order.")
        try:
            page = f"{before}{begin}\n{make()}\n\n{end}{after}"
        except FileNotFoundError:
            continue
    return page


def fill_in(words: str, figures: Iterable[float]) -> str:
    """Return the words with a figure in each place; ValueError unless there are as many figures as places."""
    for place, figure in zip(PLACE.findall(words), figures, strict=True):
        digits = place.count("#") - 1
        sign = "+" if place.startswith("+") else ""
        rounded = round(figure, digits) + 0.0  # + 0.0 turns -0.0 into 0.0
        words = words.replace(place, f"{rounded:{sign}.{digits}f}", 1)
    return words
