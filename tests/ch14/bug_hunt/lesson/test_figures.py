"""The pictures of the bug hunt: drawn whole and legibly, from the records."""

import functools

import pytest
from legible import assert_legible, words

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds
from ch14.bug_hunt.lesson import experiments, figures

LOOP = HUNTS["loop"]


@functools.cache
def draw(name):
    if name == "path":
        found = bug_hunt.find(Builds(LOOP, "3.5.0", "sm_100a", experiments.load_record("loop").rows))
        return figures.path_picture(LOOP, found.steps, "To the smallest trigger", "made up")
    if name == "rule":
        rows = [
            row
            for row in experiments.load_record("loop").rows
            if (row["LOADS"], row["num_stages"]) == ("host", 4)
        ]
        return figures.rule_picture(
            rows, lambda row: row["BLOCK_K"] == 64, "LOOP", ("BLOCK_K", "num_warps"), "A rule", "made up"
        )
    if name == "specialized":
        rows = [row for row in experiments.load_record("warp_specialize").rows if row["triton"] == "3.9.0"]
        return figures.matrix_picture(rows, "Loops", "made up", x="LOOP", y="LOADS")
    rows = [row for row in experiments.load_record("matrix").rows if row["hunt"] == name]
    return figures.matrix_picture(rows, "Versions by targets", "made up")


@pytest.mark.parametrize("name", ["path", "rule", "specialized", *HUNTS])
def test_legible(name):
    assert_legible(draw(name))


def test_they_say_what_they_are_given():
    said = [text.get_text() for text in words(draw("path"))]
    assert {"1  LOOP", "carry b", "fails, known", "not asked", "builds"} <= set(said)
    said = " ".join(text.get_text() for text in words(draw("loop")))
    assert "8 fail, AssignLatencies" in said and "12 build" in said and "12 fail, ptxas" in said
    failed = [
        row
        for row in experiments.load_record("loop").rows
        if (row["LOADS"], row["num_stages"], row["outcome"]) == ("host", 4, "fails")
    ]
    assert sum(text.get_text() == "×" for text in words(draw("rule"))) == len(failed) > 0


def test_alternative_texts_count_what_fails():
    assert "8 fail in AssignLatencies (sm_100a)" in draw("loop").description
    assert "1 fails in AccelerateMatmul" in draw("dot_scaled").description
    rows = [
        row
        for row in experiments.load_record("loop").rows
        if (row["LOADS"], row["num_stages"]) == ("host", 4)
    ]
    failed = sum(row["outcome"] == "fails" for row in rows)
    said = draw("rule").description
    assert f"{failed} of {len(rows)} builds fail; by LOOP: 0 at plain" in said
    assert "24 builds are framed" in said
