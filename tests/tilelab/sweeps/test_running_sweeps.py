"""The sweep of a panel ends when its cell is executed again."""

import types

import pytest
from cases import cases

from ch14.descriptors.lesson import tile_copy_experiments
from tilelab.sweeps import running_sweeps
from tilelab.views import panel

COPY = tile_copy_experiments.CopySpace


@pytest.fixture(autouse=True)
def no_sweeps(tmp_path, monkeypatch):
    monkeypatch.setattr(running_sweeps, "_running", {})
    monkeypatch.setenv("TILES_SWEEPS", str(tmp_path))


@cases("parent, cell", ({"metadata": {"cellId": "ab12"}}, "ab12"), ({"metadata": {}}, ""), ({}, ""))
def test_find_cell(monkeypatch, parent, cell):
    monkeypatch.setattr(
        running_sweeps, "get_ipython", lambda: types.SimpleNamespace(get_parent=lambda: parent)
    )
    assert running_sweeps.find_cell() == cell


def test_there_is_no_cell_outside_a_notebook(monkeypatch):
    monkeypatch.setattr(running_sweeps, "get_ipython", lambda: None)
    assert running_sweeps.find_cell() == ""


@pytest.mark.compile
@pytest.mark.parametrize("cell", ["the cell", ""])
def test_a_cell_that_is_executed_again_cancels_its_sweep(monkeypatch, tmp_path, cell):
    # what is built already would be too quick
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(running_sweeps, "find_cell", lambda: cell)
    monkeypatch.setattr(running_sweeps, "DRAW_S", 0.01)
    choice = {"preset": "the course's 4", "target": "sm_90a", "shape": "512,512"}
    first = panel.Panel(COPY, **choice)
    first.run()
    begun = first._owner.sweep
    again = panel.Panel(COPY, **choice)
    assert begun.cancelled == bool(cell) and not again.running
    first.wait()
    assert ("cancelled after" in first.state()["status"]) == bool(cell)
    again.run()  # goes on
    again.wait()
    assert "4 of 4 done here" in again.state()["status"]
