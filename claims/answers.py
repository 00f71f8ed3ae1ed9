"""The figures in the README's column of measured findings and two tables of docs/operators.md, from the records.

The words of the findings are written by hand. `python -m claims --write` writes the figures that stand for #.## in
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ch07.resample import BEST
from ch10.tile_pipeline.lesson.experiments import LARGE
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


def get_ratios(rows: Iterable[dict]) -> list[float]:
    return [row["ratio"] for row in rows]


def mean_ratio(rows: Iterable[dict]) -> float:
    return geometric_mean(get_ratios(rows))


def mean_model_ratio(rows: Iterable[dict]) -> float:
    return geometric_mean(row["model_ratio"] for row in rows)


def bulk_copies(evidence):
    rows = evidence("ch07_bulk_speed", op="copy")
    return [max(get_ratios(row for row in rows if ("bulk" in row["name"]) == tma)) for tma in (False, True)]


def resampling(evidence):
    ladder = {row["name"]: row["ratio"] for row in evidence("ch07_resample_ladder") if row["shape"][3] == 128}
    return ladder[BEST], ladder["bulk_rows"]


def host_descriptors(evidence):
    return [
        max(get_ratios(row for row in evidence("ch14_descriptors_speed", op="copy") if "host" in row["name"]))
    ]


def compile_failures(evidence):
    rows = evidence("ch14_bug_hunt_loop")
    return sum(row["outcome"] == "fails" for row in rows), len(rows)


def quantising(evidence):
    rows = evidence("ch14_mx_formats_speed")
    return [
        max(
            get_ratios(
                row for row in rows if row["format"] == name and row["what"] in mx_formats.configs(name)
            )
        )
        for name in ("mxfp8_e4m3", "nvfp4")
    ]


def changed_kernels(evidence):
    same = [row["verdict"] == "the same kernel" for row in note_attempts.accumulator_rows()]
    same += [row["same kernel"] for row in note_attempts.stage_rows()]
    return len(same) - sum(same), len(same)


def judged_claims(evidence):
    hold, conditional, fail, missing = count_outcomes(trial.judge_all())
    return hold + conditional, hold + conditional + fail + missing, conditional


# (notebook, words, function of the evidence that returns the figures). The README's line about the notebook must hold
# the words: # stands for a whole number, #.# for one with a digit after the point, +#.# for one with its sign.
ANSWERS: list[tuple[str, str, Callable[[Evidence], Iterable[float]]]] = [
    ("00_start", "A copy reaches #.# TB/s", lambda evidence: [evidence("ceilings")[0]["gbps"] / 1e3]),
    ("ch07_bulk_copy", "Plain loads copy at #.## × torch's speed, TMA at #.## ×", bulk_copies),
    ("ch07_resample", "Plain loads reach #.## of a copy's bandwidth, TMA #.##", resampling),
    (
        "ch10_tile_pipeline",
        "A transpose of 16,384 × 8,192 floats runs at #.## × torch's copy",
        lambda evidence: [max(get_ratios(evidence("ch10_tile_speed", op="transpose", shape=list(LARGE))))],
    ),
    (
        "ch10_wgmma_gemm",
        "Tuned, it runs at #.## × cuBLAS on # layer shapes of language models, untuned at #.## ×",
        lambda evidence: [
            mean_ratio(evidence("ch10_gemm_layers")),
            len(evidence("ch10_gemm_layers")),
            mean_model_ratio(evidence("ch10_gemm_layers")),
        ],
    ),
    ("ch14_descriptors", "A copy by descriptor runs at #.## × torch's", host_descriptors),
    (
        "ch14_gemm",
        "Tuned, it runs at #.## × cuBLAS on the same shapes, untuned at #.## ×",
        lambda evidence: [
            mean_ratio(evidence("ch14_gemm_layers")),
            mean_model_ratio(evidence("ch14_gemm_layers")),
        ],
    ),
    (
        "ch14_sweep",
        "The sweep takes #.# of `triton.autotune`'s time",
        lambda evidence: [evidence("sweep_race")[0]["seconds"] / evidence("sweep_race")[1]["seconds"]],
    ),
    ("ch14_bug_hunt", "# of # builds fail", compile_failures),
    (
        "ch14_compiled",
        "A decoder block in fp8 runs at #.## × eager bf16; `torch.compile` in bf16 at #.## ×",
        lambda evidence: [
            get_ratios(evidence("ch14_compiled_decoder", name=name, tokens=4096))[0]
            for name in ("course fp8", "torch.compile")
        ],
    ),
    (
        "ch14_attention",
        "At 8,192 tokens (4 × 16 heads of 128, no mask) the kernel runs at #.## × cuDNN",
        lambda evidence: get_ratios(evidence("ch14_attention_ladder", name="persistent", causal=False)),
    ),
    ("ch14_mx_formats", "MXFP8 is written at #.## × a copy's speed, NVFP4 at #.## ×", quantising),
    (
        "ch14_blockscaled",
        "At 4,096 tokens or more, fp8 with block scales runs at #.## × torch's `scaled_mm`",
        lambda evidence: [mean_ratio(evidence("ch14_blockscaled_fp8", name="course"))],
    ),
    ("ch14_blackwell_plan", "Two attempts change # of # kernels", changed_kernels),
    ("claims", "# of # claims hold, # of them with a condition", judged_claims),
]


def rewrite_figures(readme: str) -> str:
    """Return the README's text with the figures of today's records. A figure without a record stays.

    ValueError if a line of the README lacks its words, or a record lacks a figure.
    """
    for notebook, words, figures in ANSWERS:
        start = readme.find(f"(notebooks/{notebook}.ipynb) |")
        end = readme.find("\n", start)
        found = re.search(FIGURE.join(map(re.escape, PLACE.split(words))), readme[start:end])
        if start < 0 or found is None:
            raise ValueError(
                f"README.md's line about {notebook} must hold {words!r}, with a figure for each #."
            )
        evidence = Evidence()
        try:
            with evidence.explain_errors(f"the answer of {notebook}, {words!r},"):
                new = fill_in(words, figures(evidence))
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
            raise ValueError(
                f"{OPERATORS.name} must hold the lines {marks[0]} and {marks[1]}, in this order."
            )
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
