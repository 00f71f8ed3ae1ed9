"""The solutions of the notebook pass, and each planted wrong answer fails its check."""

import pytest
from cases import cases
from cells import define

from ch14.bug_hunt import loop_ir
from ch14.bug_hunt.lesson import exercises
from tilelab import ROOT
from tilelab.cells import triton_cell

pytestmark = pytest.mark.compile
LESSON, SOLUTIONS = (
    triton_cell.notebook_texts(ROOT / "notebooks" / folder / "10_ch14_bug_hunt.ipynb")
    for folder in ("", "solutions")
)
NAMES = dict(zip(exercises.CHECKS, ("doubled_loop", "same_bug", "smallest")))
CONFIG = {"LOADS": "device", "BLOCK_K": 64, "num_stages": 4, "num_warps": 8}


@cases(
    "exercise, change",
    ("Exercise 1", ("b.load([k, n]) * 2", "b.load([k, n])")),
    ("Exercise 1", ("a.load([m, k])", "a.load([m, 0])")),
    ("Exercise 2", (r're.sub(r"\d+", "#", row.get("message", ""))', 'row.get("message", "")')),
    ("Exercise 2", ('row["outcome"], row.get("stage"), ', "")),
    ("Exercise 2", (r're.sub(r"\d+", "#", row.get("message", ""))', 'len(row.get("message", ""))')),
    ("Exercise 1", ("range(0, K, BLOCK_K)", "tl.range(0, K, BLOCK_K, num_stages=1)")),
    ("Exercise 3", ("while config != before:", "for _ in range(1):")),
    ("Exercise 3", ("same_bug(first, ask(simpler))", 'ask(simpler)["outcome"] == "fails"')),
    (
        "Exercise 3",
        (
            "values[: values.index(config[axis])]",
            "values[max(0, values.index(config[axis]) - 1) : values.index(config[axis])]",
        ),
    ),
    ("Exercise 3", ("values[: values.index(config[axis])]", "values[:1]")),
    ("Exercise 3", ("first, config, before = ask(start), start, None", "return start")),
)
def test_a_wrong_answer_fails(exercise, change):
    with pytest.raises(AssertionError):
        exercises.CHECKS[exercise](*define(SOLUTIONS, NAMES[exercise], change=change))


def test_the_broken_kernel_is_not_yet_right():
    says = "for sm_100a with 4 stages the compiler pass TritonGPUPipeline failed"
    with pytest.raises(AssertionError, match=says):
        exercises.check_doubled(*define(LESSON, "doubled_loop"))


def test_the_pass_gives_latencies_to_loads_that_an_operation_defines():
    """In the plain loop both loads get one. A carried tile is a block argument, and its load gets none."""
    before, after = "TritonGPUAssignLatencies", "TritonGPUScheduleLoops"
    plain, carried = ({"LOOP": loop, **CONFIG} for loop in ("plain", "carry b"))
    assert "latency" not in loop_ir.read_loop(plain, before)
    assert loop_ir.read_loop(plain, after).count("{tt.latency = 3}") == 2
    text = loop_ir.read_loop(carried, after)
    assert text.count("{tt.latency = 3}") == 1
    argument = text.splitlines()[1].split()[-1]
    assert f"({argument} = " in text.splitlines()[0]  # the local_alloc of B takes an argument of the loop


def test_a_pass_that_is_not_there_is_one_sentence():
    with pytest.raises(ValueError, match="the compiler's output has no loop before the pass NoPass"):
        loop_ir.read_loop({"LOOP": "plain", **CONFIG}, "NoPass")
