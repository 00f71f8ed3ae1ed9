"""The exercise that writes a check: the solution passes, and each check that lacks one precaution fails."""

import functools
import math
import re
import statistics

import pytest
import torch
from cases import cases

from ch10.wgmma_gemm.choice import predict_us
from ch14.sweep.lesson import exercises, held_out
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.runtime import choice, device
from tilelab.sweeps import faults

SOLUTIONS = ROOT / "notebooks" / "solutions" / "09_ch14_sweep.ipynb"


def define_judge(*change):
    """Return the solution's `is_right`, in which one piece of text is changed."""
    cell = next(text for text in lesson.notebook_texts(SOLUTIONS) if "def is_right" in text)
    text = cell.partition("check.check_exercise")[0]
    names = {"torch": torch, "DEVICE": "cuda" if device.current().has_tma else "cpu"}
    assert not change or change[0] in text
    exec(text.replace(*change) if change else text, names)
    return names["is_right"]


def define(name, *change):
    """Return a function or class of the solutions, in which one piece of text is changed."""
    cell = next(
        text for text in lesson.notebook_texts(SOLUTIONS) if re.search(rf"^(def|class) {name}\b", text, re.M)
    )
    text = cell.partition("check.check_exercise")[0]
    assert not change or change[0] in text
    names = {"faults": faults}
    exec(text.replace(*change) if change else text, names)
    return names[name]


@cases(
    "check, name, change, says",
    # a margin in milliseconds, none, one of the slowest; what is not right counts; one name only
    ("contenders", "contenders", ("fastest * (1 + margin)", "fastest + margin"), "the margin is a share"),
    ("contenders", "contenders", ("fastest * (1 + margin)", "fastest * 1.01"), "a wider margin"),
    ("contenders", "contenders", ('row["status"] == "ok"', '"ms" in row'), "one per cent"),
    # a constant text, another limit, no full stop, every configuration
    ("reject", "Careful", ("{config.block:,} elements", "2,048 elements"), "for 4,096 elements"),
    ("reject", "Careful", ("enough.", "enough"), "for 2,048 elements"),
)
def test_a_wrong_answer_fails(check, name, change, says):
    answer = define(name, *change)
    with pytest.raises(AssertionError, match=says):
        getattr(exercises, f"check_{check}")(answer(compile_for="sm_90a") if check == "reject" else answer)


@cases(
    "change, says",
    (('float("nan")', "0.0"), "refuses"),
    (("torch.randn", "torch.rand"), "takes the sign off"),
    (("1000", "1024"), "leaves out the rest"),
    (("area[n:].isnan().all()", "True"), "one element past the end"),
    (("torch.equal(area[:n], 2 * x)", "torch.allclose(area[:n], 2 * x, rtol=1e-3)"), "a little less"),
)
def test_a_check_without_one_precaution_fails(change, says):
    with pytest.raises(AssertionError, match=says):
        exercises.check_judge(define_judge(*change))


@functools.cache
def define_choice(*changes):
    """Return the solution's `choose`, in which pieces of text are changed."""
    cell = next(text for text in lesson.notebook_texts(SOLUTIONS) if "def choose" in text)
    text = cell.partition("check.check_exercise")[0]
    names = {"math": math, "statistics": statistics, "held_out": held_out}
    for change in changes:
        assert change[0] in text
        text = text.replace(*change)
    exec(text, names)
    return names["choose"]


def look_up(shape, candidates, rows):
    near = min(rows, key=lambda known: held_out.measure_distance(known, shape))
    return min(candidates, key=lambda name: rows[near].get(name, math.inf))


def read_the_answers(shape, candidates, rows):
    times = held_out.read_times()[1][shape]
    return min(times, key=times.get)


def hedge(shape, candidates, rows):
    """Return a choice by the held-out times that avoids clusters a little."""
    times = held_out.read_times()[1][shape]
    return min(times, key=lambda name: times[name] * (1.25 if candidates[name].cluster_size > 1 else 1))


def ask_the_product(shape, candidates, rows):
    """Return what chapter 10's GEMM chooses: its table holds the held-out rows."""
    predicted = {name: predict_us(config, *shape, 132) for name, config in candidates.items()}
    return choice.rank("wgmma_gemm", held_out.GPU, predicted, *shape)[0][0]


def model_alone(shape, candidates, rows):
    return min(candidates, key=lambda name: predict_us(candidates[name], *shape, 132))


# The solution with chapter 10's model in place of its own.
WITH_THEIR_MODEL = (
    ("expect_us(held", "predict_us(held"),
    ("expect_us(candidates[name], *shape)", "predict_us(candidates[name], *shape, 132)"),
    ("[name], *known)", "[name], *known, 132)"),
    ("def choose", "from ch10.wgmma_gemm.choice import predict_us\n\n\ndef choose"),
)


@pytest.mark.parametrize("choose", [define_choice(), define_choice(*WITH_THEIR_MODEL)])
def test_a_choice_that_learns_passes(choose):
    exercises.check_choice(choose)


def test_a_choice_may_change_its_rows():
    def choose(shape, candidates, rows):
        for times in rows.values():
            times.pop("none", None)
            times["none"] = math.inf
        return look_up(shape, candidates, rows)

    with pytest.raises(AssertionError, match="0.92 is asked for"):
        exercises.check_choice(choose)
    assert not any("none" in times for times in held_out.read_times()[0].values())


@cases(
    "choose, where",
    (lambda shape, candidates, rows: next(iter(candidates)), "here"),
    (lambda shape, candidates, rows: "128×128", "none of the candidates"),
    (look_up, "here"),
    (define_choice(("+ statistics.mean(errors) ", "")), "here"),
    (define_choice(("waves * ", "")), "here"),
    (model_alone, "where clusters take"),
    (read_the_answers, "where clusters take"),
    (hedge, "where all but clusters takes"),
    (ask_the_product, "where clusters take"),
)
def test_a_choice_that_does_not_learn_fails(choose, where):
    with pytest.raises(AssertionError, match=where):
        exercises.check_choice(choose)
