"""The held-out layers are of no other model, and the times behind a table come back."""

import math

import pytest

from ch10.wgmma_gemm.choice import predict_us
from ch14.sweep.lesson import held_out
from tilelab.runtime import choice


def test_no_layer_is_in_both_sets():
    learning, unseen = held_out.read_times()
    assert len(learning) > 300 and len(unseen) > 100
    assert not {shape[1:] for shape in learning} & {shape[1:] for shape in unseen}


def test_times_are_the_model_s_times_its_errors():
    table = choice.load("wgmma_gemm", held_out.GPU)
    shape, times = next(iter(held_out.read_times()[0].items()))
    errors = table.errors[table.shapes.index(shape)]
    for family, us in times.items():
        expected = predict_us(held_out.candidates(shape)[family], *shape, held_out.SMS)
        assert us == pytest.approx(expected * math.exp(errors[table.places[family]]))


def test_a_choice_is_judged_by_the_best_measured_time():
    shape = (16, 6144, 4096)
    fast, slow = list(held_out.candidates(shape))[:2]
    measured = {shape: {fast: 10.0, slow: 16.0}}
    row = held_out.judge(lambda shape, candidates, rows: slow, {}, measured)[0]
    assert row == {"shape": list(shape), "ratio": 0.625}
    assert held_out.summarise({"a": [row]})[0]["lowest"] == 0.625
    with pytest.raises(AssertionError, match="none of the candidates"):
        held_out.judge(lambda shape, candidates, rows: "fastest", {}, measured)


def test_a_corrected_model_is_perfect_at_its_own_rows_and_good_at_others():
    learning, unseen = held_out.read_times()
    choose = held_out.correct_model(learning)
    sets = {
        "own": held_out.judge(choose, learning, learning),
        "unseen": held_out.judge(choose, learning, unseen),
    }
    means = [row["geometric mean"] for row in held_out.summarise(sets)]
    assert means[0] > 0.999 and 0.96 < means[1] < 0.99
    picture = held_out.draw(sets, held_out.load_ratios())
    share = held_out.summarise(sets)[1]["share below 0.95"]
    assert len(picture.axes) == 2
    assert f"unseen: {share:.0%} of the shapes are below 0.95" in picture.description
