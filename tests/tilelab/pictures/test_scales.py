"""Tests of the scales: the order by rank. What the panel draws with them is tested there."""

import math

import pytest

from tilelab.pictures import scales


def test_rank_correlation():
    assert scales.rank_correlation([1, 2, 3], [10, 20, 300]) == pytest.approx(1)
    assert scales.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert scales.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert math.isnan(scales.rank_correlation([1, 1], [1, 2]))
