"""The command line of ch10.wgmma_gemm, as far as it goes without a GPU, and one run on one."""

import json

import pytest

from ch10.wgmma_gemm import __main__ as command
from ch10.wgmma_gemm.configs import STEPS
from ch10.wgmma_gemm.lesson import experiments
from tilelab.records import results
from tilelab.runtime import device


def run(capsys, *arguments):
    try:
        status = command.main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.compile
def test_it_compiles_into_a_table_and_json(capsys, tmp_path):
    path = tmp_path / "rows.json"
    status, out, err = run(capsys, "--compile", "--step", "ring", "--json", str(path))
    record = json.loads(path.read_text())
    assert status == 0 and not err and "HGMMA" in out and record["rows"][0]["registers"]
    assert set(results.KEYS) <= set(record) and record["source"] == experiments.source()


def test_all_takes_every_step_and_the_best(capsys, monkeypatch):
    monkeypatch.setattr(
        experiments,
        "compile_steps",
        lambda configs: [
            {"name": name, "status": "ok", "config": str(config)} for name, config in configs.items()
        ],
    )
    status, out, err = run(capsys, "--compile", "--step", "all", "--json", "-")
    assert status == 0 and not err and [row["name"] for row in json.loads(out)["rows"]] == ["best", *STEPS]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--mnk", "1,2"], "--mnk must be M,N,K, each from 1 to 2,147,482,624; it is 1,2."),
        (["--mnk", "8,8,9"], "N and K of --mnk must be multiples of 8; they are 8 and 9."),
        (["--mnk", "9" * 4301 + ",8,8"], f"it is {'9' * 60}."),
        (["--step", "nix"], "unknown --step nix; choose one of best, tile, ring, "),
        (["--json", ""], "--json takes a file"),
        (["--json", "."], "--json takes a file; . is a folder."),
        (["--stepp", "x"], "unrecognized arguments"),
    ],
)
def test_bad_usage_is_one_line_and_two(capsys, arguments, said):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out and len(err.splitlines()) == 1 and said in err


def test_without_wgmma_it_is_one_line_and_two(capsys, monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))
    status, out, err = run(capsys)
    assert status == 2 and not out and "needs WGMMA" in err and len(err.splitlines()) == 1


def test_a_compiler_s_refusal_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(
        experiments, "compile_steps", lambda *_: (_ for _ in ()).throw(RuntimeError("no\nmore"))
    )
    status, out, err = run(capsys, "--compile")
    assert status == 2 and err == "python -m ch10.wgmma_gemm: no.\n" and not out


@pytest.mark.gpu
@pytest.mark.skipif(not device.current().has_wgmma, reason="needs a GPU with WGMMA")
def test_on_the_gpu_it_checks_and_times(capsys):
    status, out, err = run(capsys, "--mnk", "512,512,512", "--step", "best", "--json", "-")
    (row,) = json.loads(out)["rows"]
    assert status == 0 and not err and row["ms"] > 0 and row["error"] <= 1.5 * row["peer_error"]
