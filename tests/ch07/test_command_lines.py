"""The command lines of chapter 7, as far as they go without a GPU, and one run of each on one."""

import json
import re
import shutil

import pytest

from ch07 import bulk_copy, resample
from ch07.bulk_copy.lesson import experiments
from ch07.bulk_copy.lesson.command import COMMAND as command
from ch07.resample import __main__ as resample_command
from ch07.resample.lesson import experiments as resample_experiments
from tilelab.records import results
from tilelab.runtime import device

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def run(capsys, cli, *arguments):
    """(exit status, standard output, standard error), whether main returns or the parser exits."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.compile
@pytest.mark.parametrize("op", bulk_copy.OPS)
def test_bulk_copy_compiles_without_a_gpu(capsys, op):
    status, out, err = run(capsys, command, "--op", op, "--target", "sm_90a", "--json", "-")
    record = json.loads(out)
    assert (
        status == 0
        and not err
        and set(results.KEYS) <= set(record)
        and record["source"] == experiments.source()
    )
    assert [row["name"] for row in record["rows"]] == list(bulk_copy.configs(op))
    for row, config in zip(record["rows"], bulk_copy.configs(op).values()):
        assert row["status"] == "ok" and row["target"] == "sm_90a" and row["config"] == str(config)
        assert row["spills"] == 0 and (row["UBLKCP"] > 0) == (config.kernel == "bulk")


@pytest.mark.compile
def test_resample_compiles_for_another_gpu(capsys):
    # Not for sm_121a: the disassembler of Triton 3.6 cannot read its SASS, so the rows would have no counts.
    status, out, err = run(capsys, resample_command, "--kernel", "all", "--target", "sm_120a", "--json", "-")
    record = json.loads(out)
    assert status == 0 and not err and record["source"] == resample_experiments.source()
    assert [row["kernel"] for row in record["rows"]] == list(resample.LADDER)
    assert {row["kernel"] for row in record["rows"] if row.get("UBLKCP")} == {"bulk_rows"}


@pytest.mark.compile
@pytest.mark.parametrize(
    "cli, arguments, shown",
    [
        (command, ["--variant", "best"], ["ch07_bulk_copy: ", "loads 256 × 4096 B", "UBLKCP"]),
        (command, ["--variant", "bulk_ring", "--op", "axpy"], ["bulk 256 × 2048 B, 3 stages, 6 per CTA"]),
        (
            resample_command,
            ["--kernel", "vectors,bulk_rows"],
            ["ch07_resample: ", "vectors", "bulk_rows", "registers"],
        ),
        (resample_command, ["--dtype", "float32", "--shape", "512,1024,2048,128"], ["vectors", "ok"]),
    ],
)
def test_a_table_is_shown_and_a_file_written(capsys, tmp_path, cli, arguments, shown):
    path = tmp_path / "new" / "rows.json"
    status, out, err = run(capsys, cli, *arguments, "--target", "sm_90a", "--json", str(path))
    assert status == 0 and not err and all(text in out for text in shown)
    assert all(row["status"] == "ok" for row in json.loads(path.read_text())["rows"])


@pytest.mark.compile
@pytest.mark.parametrize("cli, arguments", [(command, ["--variant", "best"]), (resample_command, [])])
def test_no_kernel_for_ampere_is_two(capsys, cli, arguments):
    status, out, _ = run(capsys, cli, *arguments, "--target", "sm_80", "--json", "-")
    (row,) = json.loads(out)["rows"]
    assert status == 2 and row["status"] == "failed"
    assert re.match(
        r"\w+\.cu does not compile for sm_80: ptxas: .* requires .*sm_90 or higher\.$", row["reason"]
    )


@pytest.mark.parametrize(
    "cli, arguments, message",
    [
        (command, ["--bytes", "6"], "--bytes: it must be a positive multiple of 4, below 2.40; it is 6"),
        (command, ["--bytes", "0"], "it must be a positive multiple of 4, below 2.40; it is 0"),
        (command, ["--bytes", f"{1 << 70}"], "below 2.40; it is 1180591620717411303424"),
        (command, ["--bytes", "many"], "argument --bytes: invalid int value: 'many'"),
        (command, ["--op", "scale"], "argument --op: invalid choice: 'scale'"),
        (command, ["--variant", "ring"], "--variant: it must be one of loads, .*best, all; it is 'ring'"),
        (command, ["--target", "sm_90"], "sm_90 lacks .* choose sm_90a"),
        (command, ["--fast"], "unrecognized arguments: --fast"),
        (
            resample_command,
            ["--kernel", "fast"],
            "unknown --kernel fast; choose best, all or of search_a_thread, ",
        ),
        (resample_command, ["--kernel", "vectors,slow"], "unknown --kernel vectors,slow"),
        (
            resample_command,
            ["--shape", "1,2,3"],
            "argument --shape: '1,2,3' is no shape; give B,S,T,D, four positive",
        ),
        (resample_command, ["--shape", "1,0,3,4"], "'1,0,3,4' is no shape"),
        (resample_command, ["--shape", "1,2,3,x"], "'1,2,3,x' is no shape"),
        (resample_command, ["--dtype", "float64"], "argument --dtype: invalid choice: 'float64'"),
        (resample_command, ["--mode", "fast"], "argument --mode: invalid choice: 'fast'"),
        (resample_command, ["--target", "sm_42"], "unknown target 'sm_42'"),
        (resample_command, ["--iterations", "1"], "'1' is not a whole number from 2 to 10,000"),
        (resample_command, ["--iterations", "9" * 40], "is not a whole number"),
        (resample_command, ["--report", "kept"], "--report keeps the profiler's report; add --mode ncu"),
        (resample_command, ["--mode", "ncu", "--report", "/dev/null/kept"], "--report takes a file"),
    ],
)
def test_bad_usage_is_one_line_and_two(capsys, cli, arguments, message):
    status, out, err = run(capsys, cli, *arguments)
    assert status == 2 and not out and len(err.splitlines()) == 1 and re.search(message, err)
    assert err.startswith(f"python -m ch07.{'bulk_copy' if cli is command else 'resample'}: ")


@pytest.mark.parametrize(
    "cli, arguments",
    [(command, []), *((resample_command, ["--mode", mode]) for mode in resample_command.MODES)],
)
def test_without_a_gpu_is_one_line_and_two(capsys, monkeypatch, cli, arguments):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    status, out, err = run(capsys, cli, *arguments)
    assert status == 2 and not out and len(err.splitlines()) == 1
    assert "needs TMA" in err and "compile it with --target sm_90a" in err


def test_without_a_profiler_is_one_line_and_two(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr("shutil.which", lambda tool: None)
    status, out, err = run(capsys, resample_command, "--mode", "ncu")
    assert status == 2 and not out and len(err.splitlines()) == 1 and "ncu is not on the PATH" in err


@pytest.mark.parametrize("statuses, expected", [(["ok", "ok"], 0), (["ok", "wrong"], 1), (["wrong"], 1)])
def test_a_wrong_result_is_one(capsys, monkeypatch, statuses, expected):
    monkeypatch.setattr(device, "current", lambda: H200)
    left = iter(statuses)
    monkeypatch.setattr(
        resample_experiments,
        "verify",
        lambda *args, **rest: {"status": next(left), "reason": "", "ulps": 0.5},
    )
    kernels = ",".join(list(resample.LADDER)[: len(statuses)])
    status, out, _ = run(capsys, resample_command, "--kernel", kernels, "--json", "-")
    assert status == expected and [row["status"] for row in json.loads(out)["rows"]] == statuses


def test_a_wrong_copy_is_one_and_not_timed(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr(
        experiments,
        "verify",
        lambda op, config, *rest: {
            "status": "ok" if config.kernel == "loads" else "wrong",
            "reason": "",
            "ulps": 0.0,
        },
    )
    monkeypatch.setattr(
        experiments,
        "compare_with_torch",
        lambda op, chosen, nbytes: [
            {"name": name, "status": "ok", "reason": "", "ms": 1.0} for name in chosen
        ],
    )
    status, out, _ = run(capsys, command, "--json", "-")
    rows = json.loads(out)["rows"]
    assert status == 1 and {row["name"] for row in rows if "ms" in row} == {"loads"}
    assert {row["name"]: row["status"] for row in rows}["bulk_ring"] == "wrong"


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op", bulk_copy.OPS)
def test_bulk_copy_measures(capsys, op):
    status, out, _ = run(capsys, command, "--op", op, "--bytes", str(1 << 26), "--json", "-")
    rows = json.loads(out)["rows"]
    assert status == 0 and all(row["status"] == "ok" and row["ratio"] > 0 and row["gbps"] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not on the PATH")
def test_the_profilers_report_is_kept(capsys, tmp_path):
    status, out, err = run(
        capsys,
        resample_command,
        "--mode",
        "ncu",
        "--shape",
        "2,8,8,128",
        "--report",
        str(tmp_path / "kept"),
        "--json",
        "-",
    )
    if "may not read the GPU's counters" in err:
        pytest.skip("this user may not read the GPU's counters")
    assert status == 0 and (tmp_path / "kept.ncu-rep").stat().st_size > 1000
    assert json.loads(out)["rows"][0]["dram_percent"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["correctness", "performance", "single_run"])
def test_resample_runs(capsys, mode):
    status, out, _ = run(
        capsys,
        resample_command,
        "--mode",
        mode,
        "--kernel",
        "vectors,bulk_rows",
        "--shape",
        "64,256,512,128",
        "--json",
        "-",
    )
    rows = json.loads(out)["rows"]
    assert status == 0 and [row["kernel"] for row in rows] == ["vectors", "bulk_rows"]
    assert all(row["status"] == "ok" for row in rows)
