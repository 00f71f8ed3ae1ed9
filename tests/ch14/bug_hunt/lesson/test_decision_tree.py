"""The decision tree: what its buttons do, what stays, and what it says of a build that nobody has."""

import asyncio

import pytest
from cases import cases

from ch14.bug_hunt import HUNTS, Builds, describe, environments
from ch14.bug_hunt.lesson.decision_tree import Tree

START = {"LOOP": "carry both guarded", "LOADS": "device", "num_warps": 8}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_TRITONS", str(tmp_path))


def tree(**choice):
    return Tree("loop", "3.5.0", "sm_100a", **START | choice)


def test_axis_by_axis_to_the_smallest_trigger():
    one = tree()
    assert one.row["outcome"] == "fails" and one.text.splitlines()[0].startswith("LOOP=carry both guarded")
    for axis in ("num_warps", "BLOCK_K", "LOADS", "num_stages", "LOOP"):
        assert one.bisect(axis).axis == axis and not one.problem
    assert describe(one.config) == "LOOP=carry b, LOADS=pointers, BLOCK_K=32, num_stages=2, num_warps=4"
    assert one.open_axes == ["num_stages", "num_warps"] == list(one.menus["axis"].options)
    assert one.axes["LOOP"].value == "carry b"
    one.bisect("num_stages")
    one.bisect("num_warps")
    assert one.text.startswith("1. num_warps: 2 builds, 4 fails; so 4 is kept\n") and one.open_axes == []
    end = "no axis gets simpler: this is a smallest trigger\n12 builds, as recorded without a GPU"
    assert one.text.endswith(end)


def test_it_can_go_on_by_itself_and_start_over():
    one = tree()
    one.buttons["search"].click()
    assert one.sentence.startswith("Triton 3.5.0, sm_100a") and one.sentence in one.text and one.steps
    one.buttons["again"].click()
    assert one.steps == [] and one.sentence == "" and one.config["LOOP"] == "carry b"


def test_menus_lead_to_other_builds():
    one = tree()
    one.axes["LOOP"].value = "plain"
    assert one.row["outcome"] == "builds" and one.steps == []
    one.buttons["bisect"].click()
    assert one.problem.startswith("there is nothing to bisect") and one.problem in one.status.value
    one.menus["triton"].value = "3.9.0"
    one.menus["hunt"].value = "warp_specialize"
    assert one.menus["target"].value == "sm_90a" and "BLOCK_M" in one.axes and "BLOCK_K" not in one.axes
    assert one.row["outcome"] in HUNTS["warp_specialize"].outcomes and not one.problem


@pytest.mark.compile
def test_builds_of_the_installed_triton_are_live():
    one = Tree("warp_specialize", environments.installed_version(), LOADS="host", BLOCK_M=128)
    assert one.row["outcome"] == "fails" and one.text.endswith("1 build, live") and not one.problem
    assert one.bisect("BLOCK_M").config["BLOCK_M"] == 128


def test_what_nobody_has_built_is_told_and_nothing_is_lost():
    one = tree()
    one.bisect("num_stages")
    one.menus["target"].value = "sm_90a"
    assert "is recorded: make one with python -m ch14.bug_hunt --triton 3.5.0" in one.problem
    assert one.config["num_stages"] == 2 and one.row is None and one.problem in one.text
    one.menus["target"].value = "sm_100a"
    assert one.row["outcome"] == "fails" and not one.problem


def test_an_axis_at_its_simplest():
    assert tree(BLOCK_K=32).bisect("BLOCK_K") is None


@cases(
    "arguments, sentence",
    ({"hunt": "loops"}, "unknown hunt 'loops'; choose one of loop, warp_specialize, dot_scaled"),
    ({"num_warps": 3}, "num_warps must be one of 2, 4, 8, 16; it is 3"),
)
def test_no_choice(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Tree(**{"triton": "3.5.0", **arguments})
    with pytest.raises(ValueError, match="unknown axis 'TILE'; choose one of LOOP"):
        tree().bisect("TILE")


def test_nothing_can_be_pressed_while_it_builds(monkeypatch):
    async def press():
        one, seen, ask = tree(), [], Builds.ask

        def look_and_ask(builds, configs):
            seen.append((one.buttons["bisect"].disabled, "building" in one.status.value))
            return ask(builds, configs)

        monkeypatch.setattr(Builds, "ask", look_and_ask)
        one.menus["axis"].value = "num_stages"
        one.buttons["bisect"].click()
        assert seen and set(seen) == {(True, True)} and not one.buttons["bisect"].disabled
        return one

    one = asyncio.run(press())  # a notebook has an event loop, too
    assert one.config["num_stages"] == 2 and len(one.steps) == 1


def test_what_stays_is_a_picture_and_text():
    one = tree()
    picture, text = one.static_views()
    assert picture.data == "" and text.data == one.text
    one.bisect("num_stages")
    picture, text = one.static_views()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert "1. num_stages: 1 builds, 2 fails; so 2 is kept" in text.data
    assert "num_stages builds at 1 and fails at 2, so 2 is kept." in picture.description
