"""The exercise that writes a check: the solution passes, and each check that lacks one precaution fails."""

import pytest
import torch

from ch14.sweep.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.runtime import device

SOLUTIONS = ROOT / "notebooks" / "solutions" / "ch14_sweep.ipynb"


def define_judge(*change):
    """Return the solution's `is_right`, in which one piece of text is changed."""
    cell = next(text for text in lesson.notebook_texts(SOLUTIONS) if "def is_right" in text)
    text = cell.partition("check.check_exercise")[0]
    names = {"torch": torch, "DEVICE": "cuda" if device.current().has_tma else "cpu"}
    assert not change or change[0] in text
    exec(text.replace(*change) if change else text, names)
    return names["is_right"]


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
