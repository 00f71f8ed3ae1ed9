"""The command line of the GEMM, as far as it goes without a GPU."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest

from ch14.gemm.lesson import command, experiments
from tilelab.course import notebook
from tilelab.runtime import device
from tilelab.sweeps.sweep import Sweep


def test_command_line_rejected_tile(capsys):
    status, out, _ = commands.run(capsys, "ch14.gemm", "--target sm_90a --config 256,256,128,16,5")
    assert status == 2 and "registers" in out


@pytest.mark.gpu
def test_command_line_measures(capsys):
    status, record = commands.run_json(capsys, "ch14.gemm", "--mnk 1024,1024,1024")
    row = record["rows"][0]
    assert status == 0 and row["status"] == "ok" and row["ratio"] > 0
    assert row["error"] <= 1.5 * row["peer_error"]


@pytest.mark.skipif(device.current().has_tma, reason="this GPU measures it anew")
def test_the_note_s_benchmark_has_a_bandwidth(capsys):
    status, out, err = commands.run(capsys, "ch14.gemm", "--claim")
    assert status == 0 and not err and "recorded on NVIDIA H200" in out
    assert all(column in out for column in ("tflops", "gbps", "floor_percent", "peak_mib", "256 x 256 x 256"))


def test_bandwidth_counts_each_matrix_once():
    row = {"shape": [4096, 4096, 4096], "dtype": "bf16", "ms": 0.1}
    found = experiments.add_bandwidth(row, "NVIDIA H200")
    assert found["gbps"] == pytest.approx(3 * 4096**2 * 2 / 1e-4 / 1e9)
    assert found["floor_percent"] == pytest.approx(found["gbps"] / 48)
    fp8 = experiments.add_bandwidth({"shape": [128, 256, 512], "dtype": "fp8", "ms": 1.0}, "some GPU")
    assert fp8["gbps"] == pytest.approx((128 * 512 + 256 * 512 + 128 * 256 * 2) / 1e6)
    assert "floor_percent" not in fp8
    rejected = {"shape": [1, 1, 1], "dtype": "bf16", "status": "rejected"}
    assert experiments.add_bandwidth(rejected, "") == rejected


def test_a_timed_row_shows_its_bandwidth(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200"))
    timed = {"ms": 0.2, "tflops": 687.0, "ratio": 1.0, "error": 1e-3, "peer_error": 1e-3}
    row = {"kernel": "k", "status": "ok", "shape": [4096] * 3, "dtype": "bf16", **timed}
    assert "503 GB/s (10 % of the datasheet's)" in command.format_row(row)


@pytest.mark.parametrize(
    "statuses, status",
    [("ok wrong", 1), ("rejected wrong", 1), ("ok rejected failed", 0), ("rejected failed", 2)],
)
def test_a_wrong_result_is_status_one_and_no_result_is_two(monkeypatch, capsys, statuses, status):
    """Configurations of a set that cannot run are part of the answer; a wrong result never is."""
    rows = [
        {"kernel": "a tile", "status": each, "reason": each, "registers": 0, "smem": 0, "spills": 0}
        for each in statuses.split()
    ]
    monkeypatch.setattr(Sweep, "__iter__", lambda self: iter(rows))
    monkeypatch.setattr(Sweep, "finish", lambda self: rows)
    assert commands.run(capsys, "ch14.gemm", "--target sm_90a --config 256,256,128,16,5")[0] == status


@pytest.mark.fault
def test_an_interrupted_sweep_says_what_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "ch14.gemm", "--sweep", "--target", "sm_103a", "--journal", str(path)]
    running = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[3],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=notebook.child_env(TRITON_CACHE_DIR=str(tmp_path)),
        # What runs in the background ignores the signal, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not path.exists() and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=300)
    assert running.returncode == 130 and len(err.splitlines()) == 1
    assert re.search(r"cancelled; .*rows.jsonl keeps \d+ rows, and the same command goes on from there", err)
