"""The simulations keep the rules that they show, in any order in which the roles move."""

import json
import random

import pytest
from cases import cases
from legible import assert_legible

from tilelab import ROOT, views
from tilelab.views import mechanisms, stepper


def move_at_random(pipeline, seed):
    chance = random.Random(seed)
    return pipeline.run("".join(chance.choices("pe" + "01"[: len(pipeline.consumers)], k=60)))


@pytest.mark.parametrize("make", [mechanisms.make_ring, mechanisms.make_roles])
def test_a_wait_returns_at_once_exactly_if_its_phase_has_ended(make):
    seen = set()
    for seed in range(100):
        pipeline = make()
        move_at_random(pipeline, seed)
        for _, barrier, phase, awaited, passes in pipeline.waits:
            assert passes == (phase > awaited) and phase - awaited in (0, 1), (seed, barrier)
            seen.add((barrier[:4], passes))
    assert len(seen) == 4


@pytest.mark.parametrize("make", [mechanisms.make_ring, mechanisms.make_roles])
def test_nobody_touches_a_stage_beside_another_kind_of_role(make):
    for seed in range(100):
        for state in move_at_random(make(), seed):
            for holders in state["holders"]:
                assert len({role.split()[0] for role in holders}) <= 1, state["say"]


def test_a_state_shows_the_barriers_as_its_sentence_counts_them():
    announced, landed, arrived, ended = (mechanisms.run_ring()[step] for step in (2, 6, 12, 13))
    pending = [(state[name][0].arrivals, state[name][0].nbytes) for state, name in (
        (announced, "full"), (landed, "full"), (arrived, "empty"), (ended, "empty"))]  # fmt: skip
    assert pending == [(0, 4096), (0, 2048), (1, 0), (2, 0)]
    assert arrived["say"].endswith("arrives on empty[0]. Arrivals pending: 1.")
    assert ended["empty"][0].phase == 1


def test_a_barrier_counts_arrivals_and_bytes():
    barrier = mechanisms.Barrier(2)
    assert barrier.lets_pass(1) and not barrier.lets_pass(0)
    barrier.arrive(announced=8)
    barrier.arrive()
    assert (barrier.phase, barrier.arrivals, barrier.nbytes) == (0, 0, 8)
    with pytest.raises(RuntimeError, match="1 arrivals are too many; 0 are pending"):
        barrier.arrive()
    barrier.land(8)
    assert (barrier.phase, barrier.arrivals) == (1, 2) and barrier.lets_pass(0) and not barrier.lets_pass(1)


@cases(
    "passes, said", (True, "too many|overwrites|before it has landed"), (False, "nobody can move any more")
)
def test_waits_that_ignore_the_parity_are_found(monkeypatch, passes, said):
    monkeypatch.setattr(mechanisms.Barrier, "lets_pass", lambda self, parity: passes)
    for order in ("", "ppeepp", "ppeeppee"):
        with pytest.raises(RuntimeError, match=said):
            mechanisms.make_ring().run(order)


@cases("run, consumer", (mechanisms.run_ring, "consumer"), (mechanisms.run_roles, "consumer 0"))
def test_producer_and_consumer_are_each_shown_to_pass_and_to_block(run, consumer):
    seen = {(role, status) for state in run() for role, (status, _) in state["doing"].items()}
    for role in ("producer", consumer):
        assert {(role, "returns at once"), (role, "blocks"), (role, "goes on")} <= seen


def test_the_raster_covers_every_tile_once_and_never_loads_what_l2_holds():
    for group_m in (1, mechanisms.GROUP_M, 48):
        waves = mechanisms.load_waves(group_m)
        tiles = [tile for wave in waves for tile in wave["tiles"]]
        assert sorted(tiles) == [(row, column) for row in range(64) for column in range(64)]
        for wave in waves[1:]:
            assert wave["wave"] <= (wave["A"] + wave["B"]) * mechanisms.STRIP_MIB
            assert sum(wave["held"].values()) * mechanisms.STRIP_MIB <= mechanisms.L2_MIB
    first = [mechanisms.load_waves(group_m)[1]["wave"] for group_m in (1, mechanisms.GROUP_M)]
    assert first == [(5 + 64) * 2, (8 + 33) * 2]  # 264 tiles: 4 rows and a bit, or 8 rows of 33


def test_a_large_l2_loads_every_strip_once(monkeypatch):
    monkeypatch.setattr(mechanisms, "L2_MIB", 1e6)
    assert {mechanisms.load_waves(group_m)[-1]["loaded"] for group_m in (1, 8)} == {2 * 64 * 2.0}


def test_softmax_in_pieces_is_softmax():
    scores = [score for block in mechanisms.SCORES for score in block]
    rows = [row for block in mechanisms.VALUES for row in block]
    weights = [2**score / sum(2**other for other in scores) for score in scores]
    last = mechanisms.run_softmax()[-1]
    assert last["weights"] == pytest.approx(weights)
    found = last["values"]["output"]
    assert found == pytest.approx([sum(w * row[d] for w, row in zip(weights, rows)) for d in (0, 1)])


def test_programs_store_each_row_of_each_expert_once():
    *_, last = mechanisms.run_experts()
    tiles = [*last["done"], *filter(None, last["now"])]
    assert (
        sorted(tile["tile_id"] for tile in tiles) == list(range(sum(last["tiles"])))
        and last["now"][2] is None
    )
    stored = [
        (row, tile["column"])
        for tile in tiles
        for row in range(tile["row"], min(tile["row"] + 128, tile["end"]))
    ]
    assert sorted(stored) == [
        (row, column) for row in range(sum(mechanisms.EXPERT_ROWS)) for column in (0, 1)
    ]


@pytest.mark.parametrize("name", stepper.MECHANISMS)
def test_a_still_can_be_read_and_shows_steps_that_exist(name):
    picture = stepper.draw_still(name)
    assert_legible(picture)
    said = [step["say"] for step in stepper.make_data(name)["steps"]]
    assert all(said[at] in picture.description for at in stepper.MECHANISMS[name].still)


def test_an_unknown_mechanism_is_named():
    says = "unknown mechanism 'rings'; choose one of ring, roles, raster, softmax, experts."
    with pytest.raises(ValueError, match=says):
        stepper.show("rings")


def test_notebooks_hold_the_steps_of_today():
    wanted = {
        stepper.MECHANISMS[name].title: json.loads(json.dumps(stepper.make_data(name)))
        for name in stepper.MECHANISMS
    }
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for stored in (output.get("data", {}).get(views.MIME) for output in cell.get("outputs", [])):
                if stored and stored["view"] == "stepper":
                    data = views.read_stored(stored)[1]
                    expected = wanted[data["title"]]
                    assert data == expected, f"{path.stem}: run the cell of {data['title']} again"
