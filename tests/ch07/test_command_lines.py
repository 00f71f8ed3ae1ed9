"""What the commands of chapter 7 compile, check and time; tests/test_commands.py has what all commands share."""

import shutil

import commands
import pytest
from cases import cases

from ch07 import bulk_copy, resample
from ch07.resample.lesson import experiments as resample_experiments
from tilelab.records import results
from tilelab.runtime import device

BULK, RESAMPLE = "ch07.bulk_copy", "ch07.resample"


@pytest.mark.compile
@cases(
    "arguments, kernels",
    ("--kernel vectors,bulk_rows --dtype float32 --target sm_120a", ["vectors", "bulk_rows"]),
    ("--target sm_90a", ["vectors"]),
)
def test_resample_compiles(capsys, arguments, kernels):
    status, record = commands.run_json(capsys, RESAMPLE, arguments)
    assert status == 0 and [row["kernel"] for row in record["rows"]] == kernels
    assert [bool(row.get("UBLKCP")) for row in record["rows"]] == [name == "bulk_rows" for name in kernels]


def test_all_kernels_are_those_that_can_take_the_rows():
    for shape, kernels in (("1,2,3,8", [*resample.LADDER]), ("1,2,3,5", [*resample.LADDER][:-1])):
        arguments = ["--kernel", "all", "--shape", shape, "--target", "sm_90a"]
        assert commands.find(RESAMPLE).parse(arguments).kernel == kernels


def test_without_a_profiler_is_one_line_and_two(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: commands.H200)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    status, out, err = commands.run(capsys, RESAMPLE, "--mode ncu")
    assert status == 2 and not out and len(err.splitlines()) == 1 and "ncu is not on the PATH" in err


@pytest.mark.parametrize("statuses, expected", [(["ok", "ok"], 0), (["ok", "wrong"], 1), (["wrong"], 1)])
def test_a_wrong_result_is_one(capsys, monkeypatch, statuses, expected):
    left = iter(statuses)
    monkeypatch.setattr(device, "current", lambda: commands.H200)
    monkeypatch.setattr(
        resample_experiments,
        "verify",
        lambda *args, **rest: {"status": next(left), "reason": "", "ulps": 0.5},
    )
    kernels = ",".join(list(resample.LADDER)[: len(statuses)])
    status, record = commands.run_json(capsys, RESAMPLE, f"--kernel {kernels}")
    assert status == expected and [row["status"] for row in record["rows"]] == statuses


@pytest.mark.gpu
@pytest.mark.parametrize("op", bulk_copy.OPS)
def test_bulk_copy_measures(capsys, op):
    status, record = commands.run_json(capsys, BULK, f"--op {op} --bytes {1 << 26}")
    assert status == 0
    assert all(row["status"] == "ok" and row["ratio"] > 0 and row["gbps"] > 0 for row in record["rows"])


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not on the PATH")
def test_the_profilers_report_is_kept(capsys, tmp_path):
    arguments = f"--mode ncu --shape 2,8,8,128 --report {tmp_path / 'kept'} --json {tmp_path / 'rows'}"
    status, out, err = commands.run(capsys, RESAMPLE, arguments)
    if "may not read the GPU's counters" in err:
        pytest.skip("this user may not read the GPU's counters")
    assert status == 0 and (tmp_path / "kept.ncu-rep").stat().st_size > 1000
    assert results.read(tmp_path / "rows")["rows"][0]["dram_percent"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["correctness", "performance", "single_run"])
def test_resample_runs(capsys, mode):
    status, record = commands.run_json(
        capsys, RESAMPLE, f"--mode {mode} --kernel vectors,bulk_rows --shape 64,256,512,128"
    )
    assert status == 0 and [row["kernel"] for row in record["rows"]] == ["vectors", "bulk_rows"]
    assert all(row["status"] == "ok" for row in record["rows"])
