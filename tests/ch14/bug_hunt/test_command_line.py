"""The command line of the bug hunt. `test_report.py` runs a whole hunt through it."""

import json
import re

import pytest

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, environments
from ch14.bug_hunt.lesson import experiments
from ch14.bug_hunt.lesson.command import COMMAND as command
from tilelab.records import results

INSTALLED = environments.installed_version()


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """A function of arguments: (exit status, standard output, standard error). No environment is at hand."""
    monkeypatch.setenv("TILES_TRITONS", str(tmp_path / "none"))
    monkeypatch.delenv("TILES_RECORD", raising=False)

    def run(*arguments):
        try:
            status = command.main(list(arguments))
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.compile
def test_nothing_found_as_text_and_as_json(run):
    arguments = "--start", "num_warps=4,BLOCK_K=32", "--reach", "0"
    status, out, err = run(*arguments)
    assert status == 0 and not err
    assert out.startswith(
        f"Triton {INSTALLED}, sm_100a, a GEMM loop: nothing found within 0 changes of LOOP=plain, "
    )
    status, out, err = run(*arguments, "--json", "-")
    (row,) = json.loads(out)["rows"]
    assert status == 0 and not err and (row["hunt"], row["outcome"]) == ("loop", "builds")


@pytest.mark.fault
def test_an_empty_environment_is_no_triton_and_one_that_cannot_be_had_is_a_sentence(
    run, monkeypatch, tmp_path
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    environments._path("3.5.1").mkdir(parents=True)  # as an interrupted clean-up leaves it
    status, out, err = run("--triton", "3.5.1")
    said = err.splitlines()
    assert status == 2 and not out and len(said) == 2 and said[0].startswith("installing Triton 3.5.1 into ")
    assert re.search(
        "Triton 3.5.1 cannot be installed: (the package index has|this Python has no pip)", said[1]
    )


@pytest.mark.compile
def test_the_matrix_is_built_as_recorded_compared_and_kept(run, monkeypatch, tmp_path):
    """Some cells of each hunt, for a target that builds them quickly, from an empty cache."""
    if INSTALLED not in experiments.VERSIONS:
        pytest.fail(f"Triton {INSTALLED} is not recorded: TILES_RECORD=1 python -m ch14.bug_hunt --matrix")
    chosen = {
        ("loop", "sm_100a"): {"LOADS": "device", "LOOP": "carry b"},
        ("warp_specialize", "sm_90a"): {"LOOP": "over K"},
        ("dot_scaled", "sm_100a"): {"BLOCK_M": 128, "FORMAT": "mxfp4"},
    }
    cells = [
        cell
        for cell in experiments.EXPERIMENTS["matrix"]()
        if cell[0] == INSTALLED and chosen.get((cell[2], cell[1]), {"LOOP": ""}).items() <= cell[3].items()
    ]
    assert {cell[2] for cell in cells} == set(HUNTS) and len(cells) == 4
    monkeypatch.setitem(experiments.EXPERIMENTS, "matrix", lambda: cells)
    built = experiments.build_now("matrix", INSTALLED)
    monkeypatch.setattr(experiments, "build_now", lambda name, version: built)
    assert run("--matrix") == (0, f"matrix, Triton {INSTALLED}: 4 builds, 4 as recorded\n", "")

    record = results.load("ch14_bug_hunt_matrix")
    wanted = experiments.row_key(next(row for row in built if row["hunt"] == "warp_specialize"))
    row = next(row for row in record["rows"] if experiments.row_key(row) == wanted)
    row["outcome"] = "another"
    monkeypatch.setattr(results, "load", lambda name: record)
    status, out, err = run("--matrix", "--json", "-")
    assert status == 1 and len(json.loads(out)["rows"]) == 4
    status, out, err = run("--matrix")
    assert status == 1 and "4 builds, 3 as recorded" in out and "outcome was 'another', is " in out
    monkeypatch.undo()

    monkeypatch.setitem(experiments.EXPERIMENTS, "matrix", lambda: cells)
    monkeypatch.setattr(experiments, "build_now", lambda name, version: built)
    monkeypatch.setenv("TILES_RECORD", "1")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path / "results"))
    assert run("--matrix", "--triton", INSTALLED)[0] == 2 and not (tmp_path / "results").exists()
    assert run("--matrix") == (0, f"matrix, Triton {INSTALLED}: 4 builds\n", "")
    (record,) = (tmp_path / "results").rglob("*.json")
    assert record.parent.name == "no-gpu" and len(json.loads(record.read_text())["rows"]) == 4
    assert experiments.load_record("matrix").label().startswith("recorded without a GPU, 2")


def test_a_difference_is_a_sentence():
    row = next(row for row in experiments.load_record("matrix").rows if row["outcome"] == "builds")
    (said,) = experiments.list_differences("matrix", [row | {"outcome": "fails"}])
    assert said.endswith("outcome was 'builds', is 'fails'") and said.startswith("loop, 3.5.0, sm_90a, plain")
    assert experiments.list_differences("matrix", [row | {"triton": "1.0.0"}])[0].endswith(": not recorded")


def test_cancelled(run, monkeypatch):
    def cancel(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bug_hunt, "find", cancel)
    assert run() == (130, "", "python -m ch14.bug_hunt: cancelled.\n")
