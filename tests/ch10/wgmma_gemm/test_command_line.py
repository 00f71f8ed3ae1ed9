"""What the command of ch10.wgmma_gemm compiles and measures; tests/test_commands.py has what all commands share."""

import commands
import pytest

from ch10.wgmma_gemm.configs import STEPS
from tilelab.runtime import build, device

MODULE = "ch10.wgmma_gemm"


@pytest.mark.compile
def test_all_takes_every_step_and_the_best(capsys):
    status, record = commands.run_json(capsys, MODULE, "--compile --step all")
    assert status == 0 and [row["name"] for row in record["rows"]] == ["best", *STEPS]
    assert all(row["HGMMA"] and row["registers"] for row in record["rows"])


def test_a_compiler_s_refusal_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(build, "build", lambda *_: (_ for _ in ()).throw(RuntimeError("no\nmore")))
    status, out, err = commands.run(capsys, MODULE, "--compile")
    assert status == 2 and err == "python -m ch10.wgmma_gemm: no.\n" and not out


@pytest.mark.gpu
@pytest.mark.skipif(not device.current().has_wgmma, reason="needs a GPU with WGMMA")
def test_on_the_gpu_it_checks_and_times(capsys):
    status, record = commands.run_json(capsys, MODULE, "--mnk 512,512,512 --step best")
    (row,) = record["rows"]
    assert status == 0 and row["ms"] > 0 and row["error"] <= 1.5 * row["peer_error"]
