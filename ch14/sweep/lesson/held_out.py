"""Does a choice that is perfect at the shapes it was tuned on suit other shapes?

The table of chapter 10's GEMM (tilelab.runtime.choice) holds, for each measured shape and family of configurations, by
how much a model of time errs. Model and error together give the measured time back, without a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from ch10.wgmma_gemm import choice as gemm_choice
from ch10.wgmma_gemm.configs import WgmmaConfig
from tilelab.measure import layer_shapes
from tilelab.pictures import plots
from tilelab.records import results
from tilelab.runtime import choice

GPU, SMS = "NVIDIA H200", 132
HELD_OUT_MODEL = "DeepSeek-V3"  # its layers share no (N, K) with those of the other models
RECORDS = {"CUDA, chapter 10": "ch10_gemm", "Triton, chapter 14": "ch14_gemm"}
CHOICES, GEMMS = ("#666666", "#882255", "#009E73"), ("#0072B2", "#D55E00")  # colours of the two charts

Shape = tuple[int, int, int]
Times = dict[Shape, dict[str, float]]  # {shape: {family: µs}}
Choose = Callable[[Shape, Mapping[str, WgmmaConfig], Times], str]


@functools.cache
def candidates(shape: Shape) -> dict[str, WgmmaConfig]:
    """Return {family: configuration} of chapter 10's GEMM at a shape (M, N, K)."""
    return gemm_choice.candidates(*shape)


@functools.cache
def read_times() -> tuple[Times, Times]:
    """Return the measured times of language models' layers: of five models, and of HELD_OUT_MODEL."""
    table = choice.load("wgmma_gemm", GPU)
    if table is None:
        raise FileNotFoundError(f"{choice.path('wgmma_gemm', GPU)} is not there or is damaged.")
    models = {size: model for model, layers in layer_shapes.LAYERS.items() for size in layers.values()}
    learning: Times = {}
    held_out: Times = {}
    for shape, errors in zip(table.shapes, table.errors):
        if model := models.get(shape[1:]):
            (held_out if model == HELD_OUT_MODEL else learning)[shape] = {
                family: gemm_choice.predict_us(candidates(shape)[family], *shape, SMS)
                * math.exp(errors[place])
                for family, place in table.places.items()
                if errors[place] is not None and family in candidates(shape)
            }
    return learning, held_out


def measure_distance(shape: Shape, other: Shape) -> float:
    """Return the distance of two shapes in octaves."""
    return math.dist([math.log2(extent) for extent in shape], [math.log2(extent) for extent in other])


def judge(choose: Choose, rows: Times, measured: Times) -> list[dict]:
    """Return for each measured shape the best measured time over the time of the family that `choose` names.

    `choose(shape, candidates, rows)` sees the rows that it may learn from, and not `measured`.
    """
    found = []
    for shape, times in measured.items():
        name = choose(shape, {family: candidates(shape)[family] for family in times}, rows)
        assert name in times, f"at {shape} it chooses {name!r}, which is none of the candidates"
        found.append({"shape": list(shape), "ratio": min(times.values()) / times[name]})
    return found


def correct_model(rows: Times) -> Choose:
    """Return the course's way to choose: a model of time, corrected by its errors at the nearest of `rows`."""

    def predict(shape: Shape, families: Mapping[str, WgmmaConfig]) -> dict[str, float]:
        return {family: gemm_choice.predict_us(config, *shape, SMS) for family, config in families.items()}

    families = sorted({family for times in rows.values() for family in times})
    errors = []
    for shape, times in rows.items():
        expected = predict(shape, candidates(shape))
        known = {family: 1000 * math.log(us / expected[family]) for family, us in times.items()}
        errors.append([known.get(family) for family in families])
    table = choice.Table(GPU, families, list(rows), errors)

    def choose(shape: Shape, candidates: Mapping[str, WgmmaConfig], rows: Times) -> str:
        times = gemm_choice.correct(table, *shape)
        return min(candidates, key=times.__getitem__)

    return choose


def summarise(sets: Mapping[str, Sequence[dict]]) -> list[dict]:
    """Return for each set of rows the geometric mean and the lowest ratio, and the share of shapes below 0.95."""
    names = {"geometric_mean": "geometric mean", "below_0.95": "share below 0.95"}
    rows = (row for row in layer_shapes.summarise(sets) if row["tokens"] == "all")
    return [{names.get(key, key): row[key] for key in row if key != "tokens"} for row in rows]


def load_ratios() -> dict[str, list[dict]]:
    """Return the recorded ratios to cuBLAS of both GEMMs, on layers that their choice knows and on held-out shapes."""
    return {
        f"{kernel}, {which}": results.load(f"{record}_{name}", results.PREFERRED)["rows"]
        for kernel, record in RECORDS.items()
        for which, name in (("tuned", "layers"), ("held out", "held_out"))
    }


def draw(look_up: Mapping[str, Sequence[dict]], recorded: Mapping[str, Sequence[dict]]) -> plots.Picture:
    """Draw each set's ratios from the lowest to the highest: a looked-up choice's, and those of both GEMMs."""
    title = "On its own shapes a table is perfect; on others it is not"
    source = f"measured on {GPU}; left: the table behind chapter 10's choice, right: records of both GEMMs"
    figure, axes = plots.new_figure([1], title, source, 3.4)
    axes.remove()
    sides = ("best measured time / time of the choice", look_up), ("speed / cuBLAS", recorded)
    for place, (label, sets) in enumerate(sides):
        part = figure.add_subplot(1, 2, place + 1)
        for number, (name, rows) in enumerate(sets.items()):
            ratios = sorted(row["ratio"] for row in rows)
            shares = [100 * (at + 0.5) / len(ratios) for at in range(len(ratios))]
            tone = GEMMS[number // 2] if place else CHOICES[number]
            dashes = "--" if place and number % 2 == 0 else "-"
            part.plot(shares, ratios, color=tone, ls=dashes, lw=1.6, label=name)
        part.axhline(0.95, color="#999999", lw=0.8, ls=":")
        plots.write_note(part, 100, 0.93, "0.95", ha="right")
        part.set_ylim(0.45, None if place else 1.05)
        part.set_ylabel(label, fontsize=8)
        part.set_xlabel("% of the shapes, worst first", fontsize=8)
        part.tick_params(labelsize=7)
        part.spines[["top", "right"]].set_visible(False)
        part.legend(fontsize=7, frameon=False, loc="lower right")
    said = " ".join(
        f"{row['shapes']}: {row['share below 0.95']:.0%} of the shapes are below 0.95, lowest {row['lowest']:.2f}."
        for row in summarise({**look_up, **recorded})
    )
    return figure.describe(
        "Two charts of sorted ratios. Left: the best measured time over the time of each choice. Right: the speed of "
        f"both GEMMs over that of cuBLAS, on tuned layers and on held-out shapes. {said}"
    )
