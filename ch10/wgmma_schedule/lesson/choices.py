"""Judge the choice of a tile: at shapes that it has not seen, and at those where the kernel is slowest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ch10.wgmma_gemm import choice
from tilelab.runtime import choice as shared

TABLE = shared.load("wgmma_gemm", "NVIDIA H200")
SMS = 132
SLOW = 0.95  # × cuBLAS


def predict(shape: shared.Shape) -> dict[str, float]:
    """Return the model's microseconds of each family that has a configuration for a shape."""
    us, _ = choice.predict(*shape, SMS, TABLE.gpu)
    return {name: time for name, time in zip(choice.NAMES, us.tolist()) if time < math.inf}


def find_times(shape: shared.Shape) -> tuple[dict[str, float], dict[str, float]]:
    """Return the predicted and the measured microseconds of the families that were measured at a shape."""
    errors = TABLE.errors[TABLE.shapes.index(tuple(shape))]
    known = {name: us for name, us in predict(shape).items() if errors[TABLE.places[name]] is not None}
    return known, {name: us * math.exp(errors[TABLE.places[name]]) for name, us in known.items()}


def judge_choice(every: int = 10) -> dict[str, tuple[float, float, float]]:
    """Return the error of a time, the speed over the fastest family, and the share of shapes below SLOW.

    The key says whether the model chooses alone or corrected. Every tenth measured shape counts as unknown, with all
    others of its N and K.
    """
    found: dict[str, list] = {"the model alone": [], "corrected": []}
    for shape in TABLE.shapes[::every]:
        predicted, measured = find_times(shape)
        corrected = choice.correct(TABLE, *shape, without=lambda other, layer=shape[1:]: other[1:] == layer)
        for some, times in zip(found.values(), (predicted, {each: corrected[each] for each in predicted})):
            error = statistics.mean(abs(math.log(times[each] / measured[each])) for each in times)
            some.append((error, min(measured.values()) / measured[min(times, key=times.__getitem__)]))
    return {
        name: (
            statistics.mean(error for error, _ in some),
            statistics.geometric_mean(speed for _, speed in some),
            sum(speed < SLOW for _, speed in some) / len(some),
        )
        for name, some in found.items()
    }


def find_slow(rows: Sequence[dict]) -> list[dict]:
    """Return the rows below 0.95 × cuBLAS, the slowest first."""
    return sorted((row for row in rows if row["ratio"] < SLOW), key=lambda row: row["ratio"])


def describe_lowest(held_out: Sequence[dict], count: int = 6) -> list[dict]:
    """Return the lowest rows of the held-out shapes, with the speed without early launch."""
    names = {
        "shape": "shape",
        "ratio": "× cuBLAS",
        "late_ratio": "without early launch",
        "again": "cuBLAS again",
    }
    slow = (row | {"shape": " × ".join(map(str, row["shape"]))} for row in find_slow(held_out)[:count])
    rows = ({title: row[key] for key, title in names.items()} for row in slow)
    return [{key: round(at, 3) if isinstance(at, float) else at for key, at in row.items()} for row in rows]


def count_causes(learnt: Sequence[dict], held_out: Sequence[dict]) -> str:
    """Return in sentences what early launch, the choice and the kernel have to do with slow shapes."""
    slow, known = find_slow(held_out), find_slow(learnt)
    early = statistics.geometric_mean(row["ratio"] / row["late_ratio"] for row in held_out)
    late = sum(row["late_ratio"] >= SLOW for row in slow)
    promised = 0
    for row in slow:
        corrected = choice.correct(TABLE, *row["shape"])
        promised += min(corrected.values()) < 1e3 * row["peer_ms"]
    hopeless = sum(min(find_times(row["shape"])[1].values()) > 1e3 * row["peer_ms"] for row in known)
    return (
        f"Early launch has {early:.3f} × the speed without it, the mean of {len(held_out)} held-out shapes.\n"
        f"{len(slow)} of them have less than {SLOW} × cuBLAS, and {late} of these reach {SLOW} without early launch. "
        f"At {promised} the corrected model promised more than cuBLAS's speed.\n"
        f"{len(known)} learnt shapes have less than {SLOW}; at {hopeless} every measured family is slower than cuBLAS."
    )
