"""The pictures of the bug hunt: drawn whole and legibly, from the records."""

import pytest
from legible import assert_legible, words

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, experiments, figures

LOOP = HUNTS["loop"]


def path():
    rows = experiments.load_record("loop").rows
    found = bug_hunt.find(Builds(LOOP, "3.5.1", "sm_100a", rows))
    return figures.path_picture(LOOP, found.steps, "To the smallest trigger", "made up")


def matrix(hunt):
    rows = [row for row in experiments.load_record("matrix").rows if row["hunt"] == hunt]
    return figures.matrix_picture(rows, "Versions by targets", "made up")


def specialized():
    rows = [row for row in experiments.load_record("warp_specialize").rows if row["triton"] == "3.9.0"]
    return figures.matrix_picture(rows, "Loops", "made up", x="LOOP", y="LOADS")


def rule():
    rows = [row for row in experiments.load_record("loop").rows if row["LOADS"] == "device"]
    return figures.rule_picture(rows, lambda row: row["BLOCK_K"] == 64, "LOOP", (
        "BLOCK_K", "num_stages", "num_warps"), "A rule", "made up")


@pytest.mark.parametrize("draw", [figures.loops_picture, path, rule, specialized, lambda: matrix("loop"),
                                  lambda: matrix("dot_scaled"), lambda: matrix("warp_specialize")])
def test_legible(draw):
    assert_legible(draw())


def test_they_say_what_they_are_given():
    said = [text.get_text() for text in words(path())]
    assert {"1  LOOP", "carry b", "fails, known", "not asked", "builds"} <= set(said)
    said = " ".join(text.get_text() for text in words(matrix("loop")))
    assert "8 fails, AssignLatencies" in said and "12 builds" in said and "12 fails, ptxas" in said
    assert sum(text.get_text() == "×" for text in words(rule())) == 72


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="steps must not be empty"):
        figures.path_picture(LOOP, [], "", "")
    with pytest.raises(ValueError, match="rows must not be empty"):
        figures.matrix_picture([], "", "")
