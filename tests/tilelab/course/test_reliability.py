"""The judge of the reliability run, on pretended outcomes, and one real trouble: a full disk."""

import asyncio
import json
import os
import subprocess
import sys

import nbformat
import pytest

from tilelab.course import notebook, reliability
from tilelab.records import results
from tilelab.runtime import device, files
from tilelab.sweeps.journal import Journal

RECORD = {
    "experiment": "x",
    "device": {"name": "NVIDIA B200", "capability": [10, 0], "target": "sm_100a"},
    "versions": {},
    "recorded": "2026-11-23T00:00:00Z",
    "source": "0" * 16,
    "rows": [{"ms": 1.0}],
}
NO_SPACE = "results/x.json cannot be written (No space left on device)"


@pytest.mark.parametrize(
    "error, words, must_fail, ending",
    [
        (None, "", False, "right"),
        (None, "Kernel died", True, "neither"),
        ({"kind": "OSError", "said": NO_SPACE}, "No space left", False, "one sentence"),
        ({"kind": "OSError", "said": NO_SPACE}, "", False, "neither"),
        ({"kind": "OSError", "said": NO_SPACE}, "Read-only", False, "neither"),
        ({"kind": "OSError", "said": f"{NO_SPACE}\n{NO_SPACE}"}, "No space left", False, "neither"),
        ({"kind": "OSError", "said": NO_SPACE + "x" * 300}, "No space left", False, "neither"),
        ({"kind": "KeyError", "said": ""}, ".*", False, "neither"),
    ],
)
def test_a_run_ends_right_or_with_one_sentence(error, words, must_fail, ending):
    assert reliability.judge(error, words, must_fail)[0] == ending


def test_a_fact_that_changes_is_named():
    def make(text, *tags):
        output = nbformat.v4.new_output("stream", text=text)
        return {"cells": [nbformat.v4.new_code_cell("x", outputs=[output], metadata={"tags": list(tags)})]}

    fact = "nbval-check-output"
    assert reliability.find_changed_fact(make("1\n", fact), make("1", fact)) == ""
    assert reliability.find_changed_fact(make("1"), make("2")) == ""
    assert (
        reliability.find_changed_fact(make("1", fact), make("2", fact))
        == "cell 0 prints ['2'] instead of ['1']"
    )


@pytest.fixture
def kept_files(tmp_path):
    """A folder with a record of another GPU, a table, a notebook and a journal of two rows; and its snapshot."""
    results.save(RECORD, tmp_path / "results")
    for path in ("tuned/b200/gemm.json", "notebooks/a.ipynb"):
        files.write_atomically(tmp_path / path, '{"rows": []}')
    for key in "ab":
        Journal(tmp_path / "sweeps" / "s.jsonl").append({"key": key})
    return tmp_path, reliability.take_snapshot(tmp_path)


def test_no_damage(kept_files):
    folder, before = kept_files
    assert len(before) == 4 and reliability.find_damage(before, folder) == []
    Journal(folder / "sweeps" / "s.jsonl").append({"key": "c"})
    files.write_atomically(folder / "notebooks" / "a.ipynb", '{"rows": [1]}')
    assert reliability.find_damage(before, folder, ["notebooks/a.ipynb"]) == []


@pytest.mark.parametrize(
    "path, content, said",
    [
        ("notebooks/a.ipynb", '{"rows": [1]}', "has changed"),
        ("tuned/b200/gemm.json", None, "is gone"),
        ("tuned/b200/gemm.json", '{"ro', "is damaged: Unterminated string"),
        ("results/nvidia-b200/x.json", "{}", "is damaged: results/nvidia-b200/x.json is not a record"),
        ("results/nvidia-b200/x.json", json.dumps(RECORD), "has changed"),
        ("results/nvidia-b200/y.json", json.dumps(RECORD), "is new"),
        ("sweeps/s.jsonl", "", "has lost 2 of 2 rows"),
    ],
)
def test_damage_is_named(kept_files, path, content, said):
    folder, before = kept_files
    if content is None:
        (folder / path).unlink()
    else:
        (folder / path).write_text(content)
    (found,) = reliability.find_damage(before, folder)
    assert found.startswith(f"{path} {said}")


def test_records_of_this_machine_may_be_made_anew_and_must_be_whole(kept_files):
    folder, before = kept_files
    results.save({**RECORD, "rows": []}, folder / "results")
    results.save({**RECORD, "experiment": "y"}, folder / "results")
    assert reliability.find_damage(before, folder, ["results/nvidia-b200/"]) == []
    (folder / "results" / "nvidia-b200" / "x.json").write_text("{")
    assert len(reliability.find_damage(before, folder, ["results/nvidia-b200/"])) == 1


def test_unknown_names():
    assert reliability.choose(None, ["full"]) == {"full": list(reliability.TROUBLES["full"].notebooks)}
    assert reliability.choose(None, ["twice"])["twice"][0] == reliability.LONGEST[0]
    with pytest.raises(ValueError, match="^unknown notebook ch99; choose from 00_start, .*a sweep$"):
        reliability.choose(["ch99"], None)
    with pytest.raises(ValueError, match="^unknown trouble fire; choose from twice, together, "):
        reliability.choose(None, ["fire"])


def test_the_page_shows_every_record(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA B200", (10, 0), "sm_100a"))
    runs = [
        {"notebook": "a", "ending": "right", "said": ""},
        {"notebook": "b", "ending": "one sentence", "said": "No."},
    ]
    row = reliability._make_row("full", ["a", "b"], runs, 7, [], 1.0)
    assert (
        row["status"] == "ok" and reliability._make_row("full", ["a"], runs, 7, ["x is gone"], 1.0)["reason"]
    )
    results.save(results.make_record("reliability", [row], reliability.source()))
    page = reliability.make_page()
    assert "Not recorded yet: twice, together, killed, read-only, memory.\n" in page
    assert (
        "\n## B200\n" in page and "| a, b | 2 | 1 | 1 | 0 | 7 | 0 |\n" in page and "\n- *full*: No.\n" in page
    )


def test_troubles_of_the_last_hour_stay_in_the_record(monkeypatch, tmp_path):
    async def pretend(chosen):
        return [reliability._make_row(name, stems, [], 7, [], 1.0) for name, stems in chosen.items()]

    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setattr(reliability, "_meet_all", pretend)
    assert reliability.main(["--only", "full"]) == 0 and not list(tmp_path.iterdir())
    monkeypatch.setenv("TILES_RECORD", "1")
    for name in ("full", "twice", "full"):
        assert reliability.main(["--only", name]) == 0
    assert [row["trouble"] for row in results.load("reliability")["rows"]] == ["twice", "full"]


def test_the_page_is_that_of_the_records():
    page = reliability.PAGE.read_text(encoding="utf-8")
    first, *sections = reliability.make_page().split("\n## ")
    if device.current().capability is not None:  # who has just recorded this GPU need not write the page
        sections = [section for section in sections if f"\n## {section.splitlines()[0]}\n" in page]
    assert page == "\n## ".join([first, *sections]), "run python -m tilelab.course.reliability --write"


def test_runs_are_spread_over_the_gpus(tmp_path):
    async def take(slots):
        return [slots.get_nowait() for _ in range(slots.qsize())]

    assert asyncio.run(take(reliability.make_slots(3, {"GPU-a": 80.0, "GPU-b": 80.0}))) == [
        "GPU-a",
        "GPU-b",
        "GPU-a",
    ]
    assert asyncio.run(take(reliability.make_slots(9, {"GPU-a": 1.0, "GPU-b": 25.0}))) == [
        "GPU-a",
        "GPU-b",
        "GPU-b",
    ]
    assert asyncio.run(take(reliability.make_slots(2, {}))) == [None, None]
    runner = reliability.Runner("twice", tmp_path / "twice" / "repository")
    there = runner.on_gpu("GPU-b")
    assert there.env["CUDA_VISIBLE_DEVICES"] == "GPU-b" and there.runs is runner.runs
    assert runner.on_gpu(None).env == runner.env


WRITES = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
calls = {"read": (folder / "old").read_text, "write": lambda: (folder / "new").write_text("x"),
         "append": lambda: print("x", file=open(folder / "old", "a"), flush=True),
         "keep folder": lambda: folder.mkdir(exist_ok=True), "new folder": (folder / "below").mkdir,
         "remove": (folder / "old").unlink, "elsewhere": lambda: (folder.parent / "beside").write_text("x")}
for name, call in calls.items():
    try:
        call()
    except OSError as error:
        print(name, error.strerror, sep=": ")
"""


@pytest.mark.compile
@pytest.mark.parametrize(
    "refusal, refused",
    [
        (
            "read-only",
            [f"{call}: Read-only file system" for call in ("write", "append", "new folder", "remove")],
        ),
        ("full", ["write: No space left on device", "append: No space left on device"]),
    ],
)
def test_folders_that_refuse(tmp_path, refusal, refused):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "old").write_text("x")
    env = {**os.environ, **reliability.make_refusing_env(tmp_path, refusal, folder)}
    done = subprocess.run(
        [sys.executable, "-c", WRITES, folder], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == refused


@pytest.mark.fault
def test_a_recording_on_a_full_disk(monkeypatch, tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    for name in ("tilelab", "results"):
        os.symlink(reliability.ROOT / name, tmp_path / name)
    save = f"from tilelab.records import results\nresults.save({RECORD!r})"
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(save)], metadata=notebook.METADATA)
    nbformat.write(made, tmp_path / "notebooks" / "small.ipynb")
    monkeypatch.setattr(reliability, "ROOT", tmp_path)
    row = asyncio.run(reliability.meet("full", ["small"], tmp_path / "full", reliability.make_slots(1, {})))
    assert row["status"] == "ok" and row["one sentence"] == row["runs"] == 1 and row["files"] > 70, row
    assert row["sentences"] == [
        "OSError: [Errno 28] results/nvidia-b200/x.json cannot be written (No space left on "
        "device); nothing that it held is lost"
    ]
    assert not (reliability.ROOT / "results" / "nvidia-b200").exists()
