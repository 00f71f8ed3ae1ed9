"""The exercises' checks: the solutions pass, and each planted wrong answer fails, in Triton's interpreter."""

import pytest
from cases import cases

from ch14.attention.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.runtime import device

pytestmark = [pytest.mark.compile, pytest.mark.skipif(device.current().has_tma, reason="runs without a GPU")]
SOLUTIONS = ROOT / "notebooks" / "solutions" / "12_ch14_attention.ipynb"
LAUNCH = exercises.define_launch()


def define(path, name, change=("", "")):
    """Return a kernel of a notebook's cells; one line is changed."""
    text = "\n\n".join(triton_cell.collect(lesson.notebook_texts(path), "exercises", name))
    assert change[0] in text
    return lesson.define(text.replace(*change))[name]


def prepare(kernel):
    return lambda q, k, v, out, causal=False: LAUNCH(kernel, q, k, v, out, causal, block_m=64, block_n=64)


@cases(
    "change",
    ("acc * rescale[:, None]", "acc"),
    ("row_max - new_max", "new_max - row_max"),
    ("tl.max(s, 1) * scale", "tl.max(s, 1)"),
    # the maximum over scores that the mask removes, a fixed one, and none
    ("tl.max(s, 1) * scale", "tl.max(tl.dot(q, k.T), 1) * scale"),
)
def test_a_wrong_kernel_fails(change):
    with pytest.raises(AssertionError, match="wrong|not finite"):
        exercises.check_kernel(prepare(define(SOLUTIONS, "my_attention", change)))


@cases(
    "change",
    ("* second_factor[:, None]", ""),
    ("first_max - new_max", "new_max - first_max"),
    ("tl.load(sum_a + rows) * first_factor", "tl.load(sum_a + rows)"),
    ("acc / row_sum[:, None]", "acc"),
    # without the common maximum, with one that is too small, and with a mean
    (
        "tl.exp2(first_max - new_max), tl.exp2(second_max - new_max)",
        "tl.exp2(first_max), tl.exp2(second_max)",
    ),
    ("tl.maximum(first_max, second_max)", "first_max"),
    (
        "first_factor, second_factor = tl.exp2(first_max - new_max), tl.exp2(second_max - new_max)",
        "first_factor, second_factor = new_max * 0 + 1, new_max * 0 + 1",
    ),
)
def test_a_wrong_merge_fails(change):
    with pytest.raises(AssertionError, match="relative error"):
        exercises.check_merge(define(SOLUTIONS, "my_merge", change))


def test_low_start_of_the_maximum():
    """Exercise 1: -inf is right from the first block on, and NaN where a row sees no key of its first block."""
    minus_inf = "row_max = tl.full((BLOCK_M,), float('-inf'), tl.float32)"
    change = ("row_max = tl.full((BLOCK_M,), -3e38, tl.float32)", minus_inf)
    assert exercises.check_attention(prepare(define(exercises.NOTEBOOK, "first", change))) == ""
    text = "\n\n".join(triton_cell.collect(lesson.notebook_texts(exercises.NOTEBOOK), "exercises", "first"))
    loop = "for column in range(0, KEYS, BLOCK_N):"
    assert loop in text
    blocks = "tl.cdiv(KEYS, BLOCK_N)"
    last_first = f"for block in range(0, {blocks}):\n        column = ({blocks} - 1 - block) * BLOCK_N"
    backwards = text.replace(loop, last_first)
    wrong = exercises.check_attention(prepare(lesson.define(backwards.replace(*change))["first"]))
    assert "causal" in wrong and "not finite" in wrong
