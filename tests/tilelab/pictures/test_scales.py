"""Tests of the scales: the order by rank. What the panel draws with them is tested there."""

import math

import pytest

from tilelab.pictures import scales


def test_rank_correlation():
    assert scales.rank_correlation([1, 2, 3], [10, 20, 300]) == pytest.approx(1)
    assert scales.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert scales.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert math.isnan(scales.rank_correlation([1, 1], [1, 2]))


@pytest.mark.parametrize(
    "ratios, labels",
    [
        ((0.1, 0.2, 0.9, 0.99), {0: "≤ 0.33", 0.5: "1.00"}),
        ((0.8, 1.0, 1.25), {0: "0.80", 0.5: "1.00", 1: "1.25"}),
        ((2.0, 1.5), {0.5: "1.00", 1: "≥ 1.50"}),
        ((1.0, 1.004), {0.5: "1.00"}),
    ],
)
def test_the_key_of_a_scale_around_one_reaches_as_far_as_the_ratios(ratios, labels):
    assert scales.label_around_one(ratios) == pytest.approx(labels)
