"""The figures in the README's column of measured answers, from the records.

The words are written by hand. `python -m claims --write` writes the figures that stand for #.## in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ch07.bulk_copy.configs import OPS
from ch07.resample import BEST
from ch10.tile_pipeline.experiments import LARGE
from ch14 import mx_formats
from claims.judge import Evidence
from claims.tma_setup_guide_gb10 import product_speed
from tilelab.results import geometric_mean

PLACE = re.compile(r"\+?#(?:\.#+)?")
FIGURE = r"[+-]?\d+(?:\.\d+)?"


def get_ratios(rows: Iterable[dict]) -> list[float]:
    return [row["ratio"] for row in rows]


def mean_ratio(rows: Iterable[dict]) -> float:
    return geometric_mean(get_ratios(rows))


def bulk_copies(evidence):
    speeds = evidence("ch07_bulk_speed")
    return [max(get_ratios(row for row in speeds if row["op"] == op and ("bulk" in row["name"]) == tma))
            for op in OPS for tma in (False, True)]


def resampling(evidence):
    ladder = {row["name"]: row["ratio"] for row in evidence("ch07_resample_ladder") if row["shape"][3] == 128}
    return ladder[BEST], ladder["bulk_rows"]


def host_descriptors(evidence):
    ratios = get_ratios(row for row in evidence("ch14_descriptors_speed")
                        if row["op"] in ("copy", "add") and not row["name"].endswith("device"))
    return min(ratios), max(ratios)


def launches(evidence):
    us = {row["name"]: row["us"] for row in evidence("ch14_descriptors_launch")}
    return us["host, kept"] - us["pointers"], us["host, bound"] - us["pointers, bound"]


def proposed_tiles(evidence):
    status = {row["config"]: row["status"] for row in evidence("ch14_gemm_claim", name="proposed")}
    return sum(value != "ok" for value in status.values()), len(status)


def compile_failures(evidence):
    rows = evidence("ch14_bug_hunt_loop")
    failing = [row for row in rows if row["outcome"] == "fails"]
    rule = [row for row in failing if row["BLOCK_K"] <= 32 or row["num_stages"] == 1 or row["num_warps"] <= 4]
    return len(rows), len(failing), len(rule)


def quantising(evidence):
    rows = evidence("ch14_mx_formats_speed")
    return [max(get_ratios(row for row in rows if row["format"] == name and row["what"] in mx_formats.configs(name)))
            for name in ("mxfp8_e4m3", "mxfp4", "nvfp4")]


# (notebook, words, function of the evidence that returns the figures). The README's line about the notebook must hold
# the words: # stands for a whole number, #.# for one with a digit after the point, +#.# for one with its sign.
ANSWERS: list[tuple[str, str, Callable[[Evidence], Iterable[float]]]] = [
    ("00_start", "a copy reaches #.# TB/s, the library's bf16 product # TFLOP/s",
     lambda evidence: (evidence("ceilings")[0]["gbps"] / 1e3, evidence("ceilings")[1]["tflops"])),
    ("ch14_sweep", "it takes #.# of `triton.autotune`'s time for 96 configurations",
     lambda evidence: [evidence("sweep_race")[0]["seconds"] / evidence("sweep_race")[1]["seconds"]]),
    ("ch07_bulk_copy", "plain loads #.## × torch's copy, TMA #.## ×; for a x + y #.## and #.## ×", bulk_copies),
    ("ch07_resample", "reach #.## of the copy's bandwidth, rows by TMA #.##", resampling),
    ("ch10_tile_pipeline", "runs at #.## × torch's copy, a stencil #.##, a transpose #.##;",
     lambda evidence: [max(get_ratios(evidence("ch10_tile_speed", op=op, shape=list(LARGE))))
                       for op in ("copy", "stencil", "transpose")]),
    ("ch10_wgmma_gemm", "by the shape: #.## × cuBLAS on squares (geometric mean), #.## × on decoder shapes",
     lambda evidence: (mean_ratio(evidence("ch10_gemm_squares", how="interleaved")),
                       mean_ratio(evidence("ch10_gemm_llm")))),
    ("ch14_descriptors", "run at #.## to #.## × torch", host_descriptors),
    ("ch14_descriptors", "(+#.# µs, bound once +#.#)", launches),
    ("ch14_gemm", "# of # never start", proposed_tiles),
    ("ch14_gemm", "runs at #.## × cuBLAS on squares (geometric mean), #.## × on decoder shapes",
     lambda evidence: [mean_ratio(evidence(name)) for name in ("ch14_gemm_square", "ch14_gemm_llm")]),
    ("ch14_bug_hunt", "of # builds # fail, and the note says that # of those build", compile_failures),
    ("ch14_compiled", "gives #.## × eager, max-autotune #.## with the copies of its CUDA graph, an MLP #.##",
     lambda evidence: (product_speed(evidence, "default"), product_speed(evidence, "max-autotune"),
                       *get_ratios(evidence("ch14_compiled_cells", workload="mlp", name="default")))),
    ("ch14_attention", "#.## × cuDNN, #.## × with a causal mask",
     lambda evidence: [ratio for causal in (False, True)
                       for ratio in get_ratios(evidence("ch14_attention_ladder", name="persistent", causal=causal))]),
    ("ch14_attention", "plain Triton #.## × cuDNN's speed",
     lambda evidence: get_ratios(evidence("ch14_attention_ladder", name="plain", causal=False))),
    ("ch14_mx_formats", "reaches #.## of a copy's bandwidth for MXFP8, #.## for MXFP4, #.## for NVFP4", quantising),
    ("ch14_blockscaled", "fp8 #.## × torch",
     lambda evidence: [mean_ratio(evidence("ch14_blockscaled_fp8", name="course"))]),
    ("ch14_blockscaled", "emulated #.## to #.## × cuBLAS bf16",
     lambda evidence: [end(get_ratios(evidence("ch14_blockscaled_emulated", name="emulated"))) for end in (min, max)]),
    ("ch14_blockscaled", "for 16 tokens #.## ×",
     lambda evidence: get_ratios(evidence("ch14_blockscaled_decode", name="decode", tokens=16))),
    ("ch14_blockscaled", "fused #.## ×",
     lambda evidence: get_ratios(evidence("ch14_blockscaled_epilogue", name="all fused", shape=[8192, 14336, 4096])))]


def rewrite_figures(readme: str) -> str:
    """Return the README's text with the figures of today's records. A figure without a record stays.

    ValueError if a line of the README lacks its words, or a record lacks a figure.
    """
    for notebook, words, figures in ANSWERS:
        start = readme.find(f"(notebooks/{notebook}.ipynb) |")
        end = readme.find("\n", start)
        found = re.search(FIGURE.join(map(re.escape, PLACE.split(words))), readme[start:end])
        if start < 0 or found is None:
            raise ValueError(f"README.md's line about {notebook} must hold {words!r}, with a figure for each #.")
        evidence = Evidence()
        try:
            with evidence.explain_errors(f"the answer of {notebook}, {words!r},"):
                new = fill_in(words, figures(evidence))
        except FileNotFoundError:
            continue
        readme = readme[:start] + readme[start:end].replace(found[0], new, 1) + readme[end:]
    return readme


def fill_in(words: str, figures: Iterable[float]) -> str:
    """Return the words with a figure in each place; ValueError unless there are as many figures as places."""
    for place, figure in zip(PLACE.findall(words), figures, strict=True):
        digits = place.count("#") - 1
        sign = "+" if place.startswith("+") else ""
        rounded = round(figure, digits) + 0.0  # + 0.0 turns -0.0 into 0.0
        words = words.replace(place, f"{rounded:{sign}.{digits}f}", 1)
    return words
