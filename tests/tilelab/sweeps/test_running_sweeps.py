"""A panel takes over the sweep that an earlier panel of its cell has left running."""

import types

import pytest

from ch14.descriptors.lesson import tile_copy_experiments
from tilelab.sweeps import running_sweeps
from tilelab.views import panel

COPY = tile_copy_experiments.CopySpace


class FakeSweep:
    """A sweep that runs until it is cancelled."""

    def __init__(self, *keys):
        self.configs, self.running, self.cancelled = dict.fromkeys(keys), True, False

    def cancel(self):
        self.running, self.cancelled = False, True


def add(sweep, cell, release=lambda: None):
    return running_sweeps.add(sweep, cell, release)


@pytest.fixture(autouse=True)
def no_sweeps(tmp_path, monkeypatch):
    monkeypatch.setattr(running_sweeps, "_followed", [])
    monkeypatch.setenv("TILES_SWEEPS", str(tmp_path))


def test_a_panel_adopts_the_sweep_of_its_configurations_and_cancels_the_others():
    wanted, other = add(FakeSweep("k1", "k2"), "a"), add(FakeSweep("k1"), "a")
    elsewhere = add(FakeSweep("k1"), "b")
    assert running_sweeps.claim(["k2", "k1"], "a") is wanted
    assert other.cancelled and not wanted.cancelled and not elsewhere.cancelled
    add(wanted, "a")
    assert running_sweeps.claim(["k3"], "a") is None and wanted.cancelled and not elsewhere.cancelled
    assert running_sweeps.claim(["k1", "k2"], "a") is None, "a cancelled sweep is not adopted"


def test_the_earlier_panel_releases_the_sweep_once():
    released = []
    sweep = add(FakeSweep("k1"), "a", lambda: released.append("first"))
    assert running_sweeps.claim(["k1"], "a") is sweep and released == ["first"]
    assert running_sweeps.claim(["k1"], "a") is None and not sweep.cancelled, "nobody has added it again"
    add(sweep, "a", lambda: released.append("second"))
    assert running_sweeps.claim(["k1"], "a") is sweep and released == ["first", "second"]


def test_nothing_is_claimed_where_cells_have_no_name():
    sweep = add(FakeSweep("k1"), "")
    assert running_sweeps.claim(["k1"], "") is None and not sweep.cancelled


def test_finished_sweeps_are_forgotten():
    add(FakeSweep("k1"), "a").running = False
    add(FakeSweep("k2"), "a")
    assert len(running_sweeps._followed) == 1


@pytest.mark.parametrize(
    "parent, cell", [({"metadata": {"cellId": "ab12"}}, "ab12"), ({"metadata": {}}, ""), ({}, "")]
)
def test_find_cell(monkeypatch, parent, cell):
    monkeypatch.setattr(
        running_sweeps, "get_ipython", lambda: types.SimpleNamespace(get_parent=lambda: parent)
    )
    assert running_sweeps.find_cell() == cell


def test_there_is_no_cell_outside_a_notebook(monkeypatch):
    monkeypatch.setattr(running_sweeps, "get_ipython", lambda: None)
    assert running_sweeps.find_cell() == ""


@pytest.mark.compile
def test_a_cell_that_is_executed_again_shows_its_sweep_and_the_old_panel_stops_drawing(monkeypatch, tmp_path):
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", str(tmp_path / "cache")
    )  # what is built already would be too quick
    monkeypatch.setattr(running_sweeps, "find_cell", lambda: "the cell")
    monkeypatch.setattr(running_sweeps, "DRAW_S", 0.01)
    choice = {"preset": "the course's 4", "target": "sm_90a", "shape": "512,512"}
    first = panel.Panel(COPY, **choice)
    first.run()
    begun = first._owner.sweep
    sent = []
    again = panel.Panel(COPY, **choice)
    monkeypatch.setattr(first.box, "send", sent.append)
    assert again.running and again._owner.sweep is begun
    first.wait()  # the thread that followed the sweep ends before the sweep does
    assert begun.running and not first.running and not sent
    assert "a newer panel of this cell shows this sweep" in first.state()["status"]
    third = panel.Panel(COPY, **choice)
    assert third._owner.sweep is begun and not again.running
    other = panel.Panel(COPY, **{**choice, "target": "sm_100a"})
    third.wait()
    assert begun.cancelled and not other.running and "cancelled after" in third.state()["status"]
