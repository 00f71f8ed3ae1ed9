"""Where a value stands among others: on a colour scale, in natural order, or by rank. It needs no matplotlib."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy


def natural_key(text: str) -> tuple:
    """Return a sort key that puts "64×256" before "128×64"."""
    return [int(part) for part in re.findall(r"\d+", text)], text


def place_on_scale(value: float, values: Sequence[float], less_is_better: bool = False) -> float:
    """Return where a value stands on a logarithmic scale of `values`: 0 is dark (worst or least), 1 is bright."""
    at, low, high = (math.log(max(number, 1e-9)) for number in (value, min(values), max(values)))
    part = (at - low) / (high - low) if high > low else 1
    return 1 - part if less_is_better and high > low else part


def find_span(ratios: Sequence[float]) -> float:
    """Return how far a scale of ratios goes from 1 in both directions, as a logarithm; outliers do not stretch it."""
    sizes = sorted(abs(math.log(max(ratio, 1e-9))) for ratio in ratios)
    return min(max(sizes[int(0.9 * (len(sizes) - 1))], math.log(1.1)), math.log(3))


def place_around_one(ratio: float, ratios: Sequence[float]) -> float:
    """Return where a ratio stands on a logarithmic scale with 1.00 in its middle: 0 is slower, 1 faster."""
    return min(max(0.5 + math.log(max(ratio, 1e-9)) / (2 * find_span(ratios)), 0), 1)


def label_around_one(ratios: Sequence[float]) -> dict[float, str]:
    """Return {place: label} for the key of that scale: 1.00, and on each side as far as the ratios reach."""
    span = math.exp(find_span(ratios))
    low, high = min(*ratios, 1), max(*ratios, 1)
    ends = {
        low: "" if low * span >= 1 else f"≤ {1 / span:.2f}",
        high: "" if high <= span else f"≥ {span:.2f}",
    }
    found = {place_around_one(ratio, ratios): label or f"{ratio:.2f}" for ratio, label in ends.items()}
    return {0.5: "1.00"} | {place: label for place, label in found.items() if abs(place - 0.5) >= 0.05}


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation: 1 when both sequences have the same order, NaN where one has no order."""
    ranks = []
    for values in (first, second):
        _, place, counts = numpy.unique(values, return_inverse=True, return_counts=True)
        # equal values share the mean of their ranks
        ranks.append((numpy.cumsum(counts) - (counts - 1) / 2)[place])
    with numpy.errstate(invalid="ignore", divide="ignore"):
        return float(numpy.corrcoef(*ranks)[0, 1])
