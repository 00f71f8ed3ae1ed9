"""The command line of ch10.tile_pipeline, as far as it goes without a GPU, and one run of each operation on one."""

import json
import re

import pytest

from ch10.tile_pipeline import __main__ as command
from ch10.tile_pipeline.configs import DIMENSIONS, configs
from ch10.tile_pipeline.lesson import experiments
from tilelab.records import results
from tilelab.runtime import device

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def run(capsys, *arguments):
    """(exit status, standard output, standard error), whether main returns or the parser exits."""
    try:
        status = command.main(list(arguments))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.compile
def test_it_compiles_for_another_gpu(capsys):
    status, out, err = run(capsys, "--op", "add_shared", "--target", "sm_100a", "--json", "-")
    record = json.loads(out)
    assert (
        status == 0
        and not err
        and set(results.KEYS) <= set(record)
        and record["source"] == experiments.source()
    )
    assert [row["name"] for row in record["rows"]] == list(configs("add_shared"))
    for row, config in zip(record["rows"], configs("add_shared").values()):
        assert row["status"] == "ok" and row["target"] == "sm_100a" and row["config"] == str(config)
        assert row["spills"] == 0 and row["UTMALDG"] > 0


@pytest.mark.compile
def test_a_table_is_shown_and_a_file_written(capsys, tmp_path):
    path = tmp_path / "new" / "rows.json"
    status, out, err = run(
        capsys, "--variant", "best", "--shape", "100,200", "--target", "sm_90a", "--json", str(path)
    )
    shown = "ch10_tile_pipeline: compiled for sm_90a", "copy · 2×256", "UTMALDG", "UTMASTG"
    assert status == 0 and not err and all(text in out for text in shown)
    assert all(row["status"] == "ok" for row in json.loads(path.read_text())["rows"])
    (tmp_path / "file").write_text("")
    status, _, err = run(
        capsys, "--variant", "best", "--target", "sm_90a", "--json", str(tmp_path / "file" / "x.json")
    )
    assert status == 2 and len(err.splitlines()) == 1


@pytest.mark.compile
def test_no_kernel_for_ampere_is_two(capsys):
    status, out, _ = run(capsys, "--target", "sm_80", "--variant", "best")
    assert status == 2 and "tile_pipeline.cu does not compile for sm_80" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "6"], "--shape of copy must be R,C, each from 1 to 2,147,450,880; it is 6"),
        (["--shape", "0,4"], "it is 0,4"),
        (["--shape", "4,x"], "it is 4,x"),
        (["--shape=-4,4"], "it is -4,4"),
        (["--op", "accumulate", "--shape", "4,4"], "--shape of accumulate must be B,R,C, .*; it is 4,4"),
        (["--op", "scale"], "argument --op: invalid choice: 'scale'"),
        (["--variant", "ringlet"], "unknown --variant ringlet; choose one of single, .*best, all"),
        (["--target", "sm_90"], "choose sm_90a"),
        (["--target", ""], "unknown target ''"),
        (["--shape", "9" * 4301 + ",4"], "--shape of copy must be R,C, .* it is 9{60}\\.$"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_usage_is_one_line_and_two(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out and len(err.splitlines()) == 1 and re.search(message, err)
    assert err.startswith("python -m ch10.tile_pipeline: ")


def test_a_folder_for_json_is_one_line_and_two(capsys, tmp_path):
    status, out, err = run(capsys, "--json", str(tmp_path))
    assert status == 2 and not out and len(err.splitlines()) == 1 and f"{tmp_path} is a folder" in err


def test_help_names_the_choices(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0 and all(
        name in out for name in ("--target", "--json", "--shape", "best", "all", "add_shared")
    )


def test_without_a_gpu_is_one_line_and_two(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    status, out, err = run(capsys)
    assert status == 2 and not out and len(err.splitlines()) == 1
    assert "needs TMA" in err and "compile it with --target sm_90a" in err


def test_a_wrong_result_is_one_and_not_timed(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr(
        experiments,
        "verify",
        lambda op, config, shape: {
            "status": "ok" if config.stages == 1 else "wrong",
            "reason": "",
            "error": 0.0,
        },
    )
    monkeypatch.setattr(
        experiments,
        "compare_with_torch",
        lambda op, chosen, shape: [
            {"name": name, "status": "ok", "reason": "", "ms": 1.0} for name in chosen
        ],
    )
    status, out, _ = run(capsys, "--json", "-", "--shape", "64,64")
    rows = json.loads(out)["rows"]
    assert status == 1 and {row["name"] for row in rows if "ms" in row} == {"single"}
    assert {row["name"]: row["status"] for row in rows}["ring"] == "wrong"


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op", experiments.OPS)
def test_it_measures(capsys, op):
    shape = "4100,4100" if DIMENSIONS[op] == 2 else "4,2052,2052"
    status, out, _ = run(capsys, "--op", op, "--shape", shape, "--json", "-")
    rows = json.loads(out)["rows"]
    assert status == 0 and all(row["status"] == "ok" and row["gbps"] > 0 for row in rows)
