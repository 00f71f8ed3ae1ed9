"""The command line of the bug hunt."""

import json
import re

import pytest

from ch14.bug_hunt import HUNTS, environments, experiments
from ch14.bug_hunt import __main__ as command
from tilelab import results

INSTALLED = environments.installed_version()
WARPS = ["--hunt", "warp_specialize", "--start", "num_warps=8"]


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


def test_a_hunt_with_report_and_json(run, tmp_path):
    report, rows = tmp_path / "report.md", tmp_path / "rows.json"
    status, out, err = run("--hunt", "warp_specialize", "--report", str(report), "--json", str(rows))
    assert status == 0 and not err
    for part in ("LOADS: pointers fails elsewhere, device real; so host", "the smallest trigger: LOOP=over K, LOADS=",
                 f"Triton {INSTALLED}, sm_90a", "random configurations behave as this says", "nothing was sent"):
        assert part in out, part
    record = json.loads(rows.read_text())
    assert set(record) == set(results.KEYS) and record["source"] == experiments.source()
    assert record["device"]["name"] == "no GPU" and record["experiment"] == "ch14_bug_hunt"
    trigger, = [row for row in record["rows"] if "sentence" in row]
    assert trigger["status"] == "failed" and trigger["sentence"] in out and trigger["sentence"] in report.read_text()


def test_json_alone_on_standard_output(run):
    status, out, err = run(*WARPS, "--reach", "0", "--json", "-")
    record = json.loads(out)
    assert status == 0 and not err and record["rows"][0]["outcome"] == "ignored"
    assert {row["hunt"] for row in record["rows"]} == {"warp_specialize"}


def test_nothing_found(run):
    status, out, err = run("--start", "num_warps=4", "--reach", "0")
    assert status == 0 and not err
    assert out.startswith(f"Triton {INSTALLED}, sm_100a, a GEMM loop: nothing found within 0 changes of LOOP=plain, ")


@pytest.mark.parametrize("arguments, message", [
    (["--hunt", "bug"], "argument --hunt: invalid choice: 'bug'"),
    (["--target", "sm_90"], "argument --target: invalid choice: 'sm_90'"),
    (["--triton", "3.5"], "a Triton version must be three numbers such as 3.5.1; it is '3.5'"),
    (["--start", "TILE=3"], "--start takes LOOP=..., LOADS=..., .*; it is 'TILE=3'"),
    (["--start", "num_warps=3"], r"--start takes num_warps=2\|4\|8\|16; it is 'num_warps=3'"),
    (["--start", "num_warps"], r"--start takes num_warps=2\|4\|8\|16; it is 'num_warps'"),
    (["--reach", "-1"], "--reach must be 0 or more; it is -1"),
    (["--reach", "far"], "argument --reach: invalid int value: 'far'"),
    (["--report", "."], "--report takes a file; . is a folder"),
    (["--report", ""], "--report takes a file; it is empty"),
    (["--json", ""], "--json takes a file or -"),
    (["--matrix", "all"], "argument --matrix: invalid choice: 'all'"),
    (["--matrix", "--triton", "3.4.0"], "--triton must be one of 3.5.0, .*, 3.9.0 for matrix; it is 3.4.0"),
    (["--bisect"], "unrecognized arguments: --bisect")])
def test_bad_usage_is_one_line_and_two(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2 and not out
    assert re.fullmatch(rf"python -m ch14.bug_hunt: {message}.*\n", err), err


def test_a_triton_that_cannot_be_had(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    status, out, err = run("--triton", "3.5.1")
    said = err.splitlines()
    assert status == 2 and not out and len(said) == 2 and said[0].startswith("installing Triton 3.5.1 into ")
    assert said[1].startswith("python -m ch14.bug_hunt: Triton 3.5.1 cannot be installed: the package index has ")


@pytest.fixture
def small(monkeypatch):
    """The matrix, but two cells of it."""
    cells = [(INSTALLED, "sm_90a", "warp_specialize", HUNTS["warp_specialize"].start | {"LOADS": loads})
             for loads in ("host", "device")]
    monkeypatch.setitem(experiments.EXPERIMENTS, "matrix", lambda: cells)


def test_the_matrix_again(run, small, monkeypatch):
    status, out, err = run("--matrix")
    assert (status, out, err) == (0, f"matrix, Triton {INSTALLED}: 2 builds, 2 as recorded\n", "")
    record = results.load("ch14_bug_hunt_matrix")
    row = next(row for row in record["rows"] if (row["hunt"], row["triton"], row["target"], row.get("LOADS")) == (
        "warp_specialize", INSTALLED, "sm_90a", "host"))
    row |= {"outcome": "real", "message": ""}
    monkeypatch.setattr(results, "load", lambda name: record)
    status, out, err = run("--matrix", "--json", "-")
    assert status == 1 and len(json.loads(out)["rows"]) == 2
    status, out, err = run("--matrix")
    assert status == 1 and "2 builds, 1 as recorded" in out and "outcome was 'real', is 'fails'; message was ''" in out


def test_the_matrix_is_kept_whole_or_not_at_all(run, small, monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_RECORD", "1")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path / "results"))
    assert run("--matrix", "--triton", INSTALLED)[0] == 2 and not (tmp_path / "results").exists()
    assert run("--matrix") == (0, f"matrix, Triton {INSTALLED}: 2 builds\n", "")
    record, = (tmp_path / "results").rglob("*.json")
    assert record.parent.name == "no-gpu" and len(json.loads(record.read_text())["rows"]) == 2
    assert experiments.load_record("matrix").label().startswith("recorded without a GPU, 2")


def test_cancelled(run, monkeypatch):
    def cancel(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.bug_hunt, "find", cancel)
    assert run() == (130, "", "python -m ch14.bug_hunt: cancelled.\n")
