"""Notebooks under trouble: the tier `trouble` meets all of them; a short sample belongs to every test run."""

import os
import subprocess

import nbformat
import pytest
import troubles

from tilelab.runtime import device, files
from tilelab.sweeps.journal import Journal

NO_SPACE = "results/x.json cannot be written (No space left on device)"
EVERY = sorted(path.stem for path in (troubles.ROOT / "notebooks").glob("*.ipynb"))


def meet(name, stems, tmp_path):
    if name == "memory" and device.current().capability is None:
        pytest.skip(f"needs a GPU: {device.current().describe()}")
    if name in ("read-only", "full"):
        try:
            with troubles.mount(tmp_path / "trial", "ro"):
                pass
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs to mount a file system: {getattr(error, 'stderr', error)}")
    row = troubles.meet(name, stems, tmp_path)
    assert row["status"] == "ok" and row["runs"] and not row["neither"], row["reason"]
    return row


@pytest.mark.trouble
@pytest.mark.parametrize("name", troubles.TROUBLES)
def test_trouble(name, tmp_path):
    row = meet(name, list(troubles.TROUBLES[name][2] or EVERY), tmp_path)
    if os.environ.get("TILES_RECORD") == "1":
        troubles.keep_row(row)


@pytest.mark.fault
def test_a_sample_of_the_troubles(tmp_path):
    assert meet("full", [troubles.SWEEP], tmp_path)["one sentence"] == 1


def test_a_run_ends_right_or_with_one_sentence():
    for said, words, ending in (
        (NO_SPACE, "No space left", "one sentence"),
        (NO_SPACE, "", "neither"),
        (NO_SPACE, "Read-only", "neither"),
        (f"{NO_SPACE}\n{NO_SPACE}", "No space left", "neither"),
        (NO_SPACE + "x" * 300, "No space left", "neither"),
        ("", ".*", "neither"),
    ):
        assert troubles.judge({"kind": "OSError", "said": said}, words)[0] == ending
    assert troubles.judge(None)[0] == "right" and troubles.judge(None, "", True)[0] == "neither"


def test_a_fact_that_changes_is_named():
    def make(text, *tags):
        output = nbformat.v4.new_output("stream", text=text)
        return {"cells": [nbformat.v4.new_code_cell("x", outputs=[output], metadata={"tags": list(tags)})]}

    fact = "nbval-check-output"
    assert troubles.find_changed_fact(make("1\n", fact), make("1", fact)) == ""
    assert troubles.find_changed_fact(make("1"), make("2")) == ""
    found = troubles.find_changed_fact(make("1", fact), make("2", fact))
    assert found == "cell 0 prints ['2'] instead of ['1']"


def test_damage_is_named(tmp_path):
    for path in ("tuned/b200/gemm.json", "notebooks/a.ipynb", "results/b200/x.json"):
        files.write_atomically(tmp_path / path, '{"rows": []}')
    for key in "ab":
        Journal(tmp_path / "sweeps" / "s.jsonl").append({"key": key})
    before = troubles.take_snapshot(tmp_path)
    Journal(tmp_path / "sweeps" / "s.jsonl").append({"key": "c"})
    assert len(before) == 4 and troubles.find_damage(before, tmp_path) == []
    (tmp_path / "notebooks" / "a.ipynb").write_text('{"rows": [1]}')
    assert troubles.find_damage(before, tmp_path, ["notebooks/a.ipynb"]) == []
    (tmp_path / "tuned" / "b200" / "gemm.json").write_text('{"ro')
    (tmp_path / "results" / "b200" / "x.json").write_text("{}")
    (tmp_path / "results" / "b200" / "y.json").write_text("{")
    (tmp_path / "sweeps" / "s.jsonl").write_text("")
    expected = ["notebooks/a.ipynb has changed", "results/b200/x.json is damaged:"]
    expected += ["results/b200/y.json is damaged:", "sweeps/s.jsonl has lost"]
    expected += ["tuned/b200/gemm.json is damaged:"]
    assert sorted(" ".join(line.split()[:3]) for line in troubles.find_damage(before, tmp_path)) == expected
    (tmp_path / "notebooks" / "a.ipynb").unlink()
    assert "notebooks/a.ipynb is gone" in troubles.find_damage(before, tmp_path)


def test_the_page_is_that_of_the_records():
    page, (first, *sections) = troubles.PAGE.read_text(), troubles.make_page().split("\n## ")
    if device.current().capability is not None:  # who has just recorded this GPU need not write the page
        sections = [section for section in sections if f"\n## {section.splitlines()[0]}\n" in page]
    assert page == "\n## ".join([first, *sections]), "run python tests/troubles.py"
