"""How the choice of a tile is judged in the lesson: figures of records, and counts that a few rows can be read for."""

import pytest

from ch10.wgmma_gemm.lesson import experiments
from ch10.wgmma_schedule.lesson import choices


def test_errors_at_similar_shapes_improve_the_choice():
    alone, corrected = choices.judge_choice().values()
    assert corrected[0] < 0.08 < alone[0] and alone[1] < corrected[1] <= 1 and alone[2] > corrected[2]


def test_a_time_that_was_measured_is_the_prediction_with_its_error():
    shape = choices.TABLE.shapes[0]
    predicted, measured = choices.find_times(shape)
    name = next(iter(predicted))
    assert measured.keys() == predicted.keys() and measured[name] != predicted[name] > 0


def test_the_causes_of_slow_shapes_are_counted():
    learnt, held_out = experiments.measure_layers.load().rows, experiments.measure_held_out.load().rows
    lowest = choices.describe_lowest(held_out)
    ratios = [row["× cuBLAS"] for row in lowest]
    assert len(lowest) == 6 and ratios == sorted(ratios)
    assert ratios[0] == round(min(row["ratio"] for row in held_out), 3)
    said = choices.count_causes(learnt, held_out)
    assert f"{sum(row['ratio'] < 0.95 for row in held_out)} of them have less than 0.95" in said
    mild = [{**held_out[0], "ratio": 1.1, "late_ratio": 1.0}]
    assert choices.count_causes([], mild).startswith("Early launch has 1.100 ×")
    assert not choices.find_slow(mild)
    assert choices.find_slow([{"ratio": 0.9}, {"ratio": 0.8}])[0] == {"ratio": pytest.approx(0.8)}
