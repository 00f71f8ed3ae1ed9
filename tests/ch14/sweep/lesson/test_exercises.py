"""The exercise that writes a check: the solution passes, and each check that lacks one precaution fails."""

import json
import re

import pytest
import torch

from ch14.sweep.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.runtime import device
from tilelab.sweeps import faults

SOLUTIONS = ROOT / "notebooks" / "solutions" / "ch14_sweep.ipynb"


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
    names = {"json": json, "faults": faults}
    exec(text.replace(*change) if change else text, names)
    return names[name]


FOR = "for line in text.splitlines():"


@pytest.mark.parametrize(
    "check, name, change, says",
    [
        # a margin in milliseconds, none, one of the slowest; what is not right counts; one name only
        ("contenders", "contenders", ("fastest * (1 + margin)", "fastest + margin"), "the margin is a share"),
        ("contenders", "contenders", ("fastest * (1 + margin)", "fastest * 1.01"), "a wider margin"),
        ("contenders", "contenders", ("<= fastest", "< fastest"), "without a margin"),
        ("contenders", "contenders", ('row["status"] == "ok"', '"ms" in row'), "one per cent"),
        ("contenders", "contenders", ("min(", "max("), "one per cent"),
        # the last line always dropped, the first row kept, keys without rows
        ("journal", "rows_of", (FOR, "for line in text.splitlines()[:-1]:"), "the last row is whole"),
        ("journal", "rows_of", (FOR, 'for line in text.split("\\n")[:-1]:'), "without the end of its line"),
        (
            "journal",
            "rows_of",
            ('found[row["key"]] = row', 'found.setdefault(row["key"], row)'),
            "half a row",
        ),
        # a constant text, another limit, no full stop, every configuration
        ("reject", "Careful", ("{config.block:,} elements", "2,048 elements"), "for 4,096 elements"),
        ("reject", "Careful", ("> 1024", ">= 1024"), "1,024 elements are fine"),
        ("reject", "Careful", ("> 1024", "> 2048"), "for 2,048 elements"),
        ("reject", "Careful", ("enough.", "enough"), "for 2,048 elements"),
        ("reject", "Careful", ("config.block:,", "config.block"), "for 2,048 elements"),
    ],
)
def test_a_wrong_answer_fails(check, name, change, says):
    answer = define(name, *change)
    with pytest.raises(AssertionError, match=says):
        getattr(exercises, f"check_{check}")(answer(compile_for="sm_90a") if check == "reject" else answer)


@pytest.mark.compile
def test_the_other_solutions_pass():
    exercises.check_contenders(define("contenders"))
    exercises.check_journal(define("rows_of"))
    exercises.check_reject(define("Careful")(compile_for="sm_90a"))


def test_the_solution_passes():
    exercises.check_judge(define_judge())


@pytest.mark.parametrize(
    "change, says",
    [
        (('float("nan")', "0.0"), "refuses"),
        (("torch.randn", "torch.rand"), "takes the sign off"),
        (("1000", "1024"), "leaves out the rest"),
        (("area[n:].isnan().all()", "True"), "one element past the end"),
        (("torch.equal(area[:n], 2 * x)", "torch.allclose(area[:n], 2 * x, rtol=1e-3)"), "a little less"),
    ],
)
def test_a_check_without_one_precaution_fails(change, says):
    with pytest.raises(AssertionError, match=says):
        exercises.check_judge(define_judge(*change))
