"""Figures in the README's column of measured answers, from the records.

The words are written by hand; the figures that stand for #.## in them are written by `python -m claims --write`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ch07 import resample
from ch07.bulk_copy import experiments
from ch10.tile_pipeline import experiments as tile_pipeline_experiments
from ch14 import mx_formats
from claims.judge import Evidence
from claims.tma_setup_guide_gb10 import product
from tilelab.results import geometric_mean

PLACE = re.compile(r"\+?#(?:\.#+)?")
FIGURE = r"[+-]?\d+(?:\.\d+)?"
ANSWERS: list[tuple[str, str, Callable[[Evidence], Iterable[float]]]] = []


def answer(notebook: str, words: str):
    """Adds a function that makes the figures in `words`, which the README's line about `notebook` must hold: # stands
    for a whole number, #.# for one with a digit after the point, +#.# for one with its sign."""
    def add(figures):
        ANSWERS.append((notebook, words, figures))
        return figures
    return add


def rewritten(text: str) -> str:
    """The README with the figures of today's records; without a record they stay. ValueError where a line lacks its
    words, or a record a figure."""
    of = Evidence()
    for notebook, words, figures in ANSWERS:
        start = text.find(f"(notebooks/{notebook}.ipynb) |")
        end = text.find("\n", start)
        found = re.search(FIGURE.join(map(re.escape, PLACE.split(words))), text[start:end])
        if start < 0 or found is None:
            raise ValueError(f"README.md's line about {notebook} must hold {words!r}, with a figure for each #.")
        try:
            new = filled(words, figures(of))
        except FileNotFoundError:
            continue
        except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
            raise ValueError(f"the records give no figures for {words!r} of {notebook}: {error!r}.") from error
        text = text[:start] + text[start:end].replace(found[0], new, 1) + text[end:]
    return text


def filled(words: str, figures: Iterable[float]) -> str:
    """The words with a figure in each place. ValueError unless there are as many."""
    for place, figure in zip(PLACE.findall(words), figures, strict=True):
        digits = place.count("#") - 1
        sign = "+" if place.startswith("+") else ""
        words = words.replace(place, f"{round(figure, digits) + 0.0:{sign}.{digits}f}", 1)  # + 0.0: of -0.0
    return words


def ratios(rows: Iterable[dict]) -> list[float]:
    return [row["ratio"] for row in rows]


@answer("00_start", "a copy reaches #.# TB/s, the library's bf16 product # TFLOP/s")
def ceilings(of):
    copy, tensor = of("ceilings")
    return copy["gbps"] / 1e3, tensor["tflops"]


@answer("01_sweep", "it takes #.# of `triton.autotune`'s time for 96 configurations")
def race(of):
    ours, autotune = of("sweep_race")
    return [ours["seconds"] / autotune["seconds"]]


@answer("ch07_bulk_copy", "plain loads #.## × torch's copy, TMA #.## ×; for a x + y #.## and #.## ×")
def bulk(of):
    return [max(ratios(row for row in of("ch07_bulk_speed") if row["op"] == op and ("bulk" in row["name"]) == tma))
            for op in experiments.OPS for tma in (False, True)]


@answer("ch07_resample", "reach #.## of the copy's bandwidth, rows by TMA #.##")
def rows_of_128(of):
    ladder = {row["name"]: row["ratio"] for row in of("ch07_resample_ladder") if row["shape"][3] == 128}
    return ladder[resample.BEST], ladder["bulk_rows"]


@answer("ch10_tile_pipeline", "runs at #.## × torch's copy, a stencil #.##, a transpose #.##;")
def tiles(of):
    large = [row for row in of("ch10_tile_speed") if row["shape"] == list(tile_pipeline_experiments.LARGE)]
    return [max(ratios(row for row in large if row["op"] == op)) for op in ("copy", "stencil", "transpose")]


@answer("ch10_wgmma_gemm", "by the shape: #.## × cuBLAS on squares (geometric mean), #.## × on decoder shapes")
def by_hand(of):
    squares = [row for row in of("ch10_gemm_squares") if row["how"] == "interleaved"]
    return geometric_mean(ratios(squares)), geometric_mean(ratios(of("ch10_gemm_llm")))


@answer("ch14_descriptors", "run at #.## to #.## × torch")
def by_the_host(of):
    found = ratios(row for row in of("ch14_descriptors_speed")
                   if row["op"] in ("copy", "add") and not row["name"].endswith("device"))
    return min(found), max(found)


@answer("ch14_descriptors", "(+#.# µs, bound once +#.#)")
def launches(of):
    us = {row["name"]: row["us"] for row in of("ch14_descriptors_launch")}
    return us["host, kept"] - us["pointers"], us["host, bound"] - us["pointers, bound"]


@answer("ch14_gemm", "# of # never start")
def proposed(of):
    status = {row["config"]: row["status"] for row in of("ch14_gemm_claim") if row["name"] == "proposed"}
    return sum(each != "ok" for each in status.values()), len(status)


@answer("ch14_gemm", "runs at #.## × cuBLAS on squares (geometric mean), #.## × on decoder shapes")
def by_triton(of):
    return [geometric_mean(ratios(of(name))) for name in ("ch14_gemm_square", "ch14_gemm_llm")]


@answer("ch14_bug_hunt", "of # builds # fail, and the note says that # of those build")
def failures(of):
    rows = of("ch14_bug_hunt_loop")
    fail = [row for row in rows if row["outcome"] == "fails"]
    rule = [row for row in fail if row["BLOCK_K"] <= 32 or row["num_stages"] == 1 or row["num_warps"] <= 4]
    return len(rows), len(fail), len(rule)


@answer("ch14_compiled", "gives #.## × eager, max-autotune #.## with the copies of its CUDA graph, an MLP #.##")
def compiled(of):
    mlp, = ratios(row for row in of("ch14_compiled_cells") if (row["workload"], row["name"]) == ("mlp", "default"))
    return product(of, "default"), product(of, "max-autotune"), mlp


@answer("ch14_attention", "#.## × cuDNN, #.## × with a causal mask")
def best_attention(of):
    best = {row["causal"]: row["ratio"] for row in of("ch14_attention_ladder") if row["name"] == "persistent"}
    return best[False], best[True]


@answer("ch14_attention", "plain Triton #.## × cuDNN's speed")
def plain_attention(of):
    return ratios(row for row in of("ch14_attention_ladder") if row["name"] == "plain" and not row["causal"])


@answer("ch14_mx_formats", "reaches #.## of a copy's bandwidth for MXFP8, #.## for MXFP4, #.## for NVFP4")
def quantising(of):
    return [max(ratios(row for row in of("ch14_mx_formats_speed")
                       if row["format"] == form and row["what"] in mx_formats.configs(form)))
            for form in ("mxfp8_e4m3", "mxfp4", "nvfp4")]


@answer("ch14_blockscaled", "fp8 #.## × torch")
def fp8(of):
    return [geometric_mean(ratios(row for row in of("ch14_blockscaled_fp8") if row["name"] == "course"))]


@answer("ch14_blockscaled", "emulated #.## to #.## × cuBLAS bf16")
def emulated(of):
    found = ratios(row for row in of("ch14_blockscaled_emulated") if row["name"] == "emulated")
    return min(found), max(found)


@answer("ch14_blockscaled", "for 16 tokens #.## ×")
def decoded(of):
    return ratios(row for row in of("ch14_blockscaled_decode") if (row["name"], row["tokens"]) == ("decode", 16))


@answer("ch14_blockscaled", "fused #.## ×")
def fused(of):
    return ratios(row for row in of("ch14_blockscaled_epilogue")
                  if row["name"] == "all fused" and row["shape"] == [8192, 14336, 4096])
