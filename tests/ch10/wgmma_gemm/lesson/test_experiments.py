"""What is measured and swept: events in order, spaces that reject, and how a broken kernel ends."""

import sys

import pytest

from ch10 import wgmma_gemm
from ch10.wgmma_gemm import choice
from ch10.wgmma_gemm.configs import rejection
from ch10.wgmma_gemm.lesson import experiments, sweep
from ch10.wgmma_gemm.lesson.sweep import WgmmaSpace
from tilelab.measure import bench, peers
from tilelab.measure.patch import patched_source
from tilelab.records import results
from tilelab.runtime import build, device, provenance


def test_the_grid_and_the_widths_hold_what_they_say():
    grid = sweep.grid()
    assert len(grid) == 144 == len({str(config) for config in grid})
    assert 100 < sum(not rejection(config) for config in grid) < 144
    widths = [experiments._most_stages(columns) for columns in (128, 160, 192, 208, 224, 256)]
    assert [config.num_stages for config in widths] == [6, 5, 4, 4, 4, 4] and not any(map(rejection, widths))


def test_a_space_rejects_what_cannot_run():
    config = experiments.STEPS["raster"]
    found = WgmmaSpace((64, 64, 64), compile_for="sm_100a").reject(config)
    assert found == "sm_100a has no wgmma; only sm_90a has it."
    assert "too few K steps to share: 1" in WgmmaSpace((64, 64, 64), compile_for="sm_90a").reject(
        choice.candidates(8, 4096, 4096)["split 64×tokens+0, cluster 2×1, 2 boxes"]
    )
    space = WgmmaSpace((4096, 4096, 4096), compile_for="sm_90a")
    assert space.reject(config) == "" and not space.can_measure and 150 < space.predict_us(config) < 250


@pytest.mark.parametrize("shape", [(1, 2), (8, 7, 8), (8, 8, 12), (0, 8, 8), (1 << 31, 8, 8)])
def test_a_bad_shape_of_the_panel_is_one_sentence(shape):
    with pytest.raises(ValueError, match="give M,N,K below 2"):
        WgmmaSpace(shape)


def test_the_subject_offers_what_exists():
    subject = sweep.WgmmaSpace
    for preset in subject.presets.values():
        for config in preset("bf16"):
            assert all(isinstance(axis(config), str) for axis in subject.axes.values())
    found = subject.roofline("bf16").intensity(experiments.STEPS["tile_128x256"])
    assert found == pytest.approx(128 * 256 / 384)


def test_only_the_source_of_what_is_measured_counts():
    found = experiments.check_correctness.source()
    assert experiments.source() == found != provenance.source_hash(wgmma_gemm)


FAKE = r"""#!/bin/sh
case $2 in
*\'nothing\'*) printf 'begun\n{"status": "ok", "reason": "right"}\n';;
*\'phase\'*) echo begun; exec sleep 60;;
*\'expect_less\'*)
  echo begun; printf '  raise it\ntorch.AcceleratorError: CUDA error: gone\nSearch for it\n' >&2; exit 1;;
*) exit 3;;
esac
"""


def test_a_patch_that_no_longer_matches_is_found():
    with (
        pytest.raises(AssertionError, match="contains 'no such line' 0 times, not 1 times"),
        patched_source(wgmma_gemm.SOURCE, ("no such line", "", 1)),
    ):
        pass


@pytest.mark.fault
def test_how_a_broken_kernel_ended(monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    found = {
        fault: experiments.run_fault(fault, 0.3)
        for fault in ("nothing", "phase", "proxy_fence", "expect_less")
    }
    assert found == {
        "nothing": {"status": "ok", "reason": "right"},
        "phase": {"status": "failed", "reason": "no answer within 0.3 s"},
        "expect_less": {"status": "failed", "reason": "CUDA error: gone"},
        "proxy_fence": {"status": "failed", "reason": "exit status 3"},
    }


RIGHT = {"status": "ok", "reason": "", "error": 1.0, "peer_error": 1.0}


def test_rows_are_those_of_the_record(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    monkeypatch.setattr(build, "compile_ahead", list)
    monkeypatch.setattr(
        experiments, "verify", lambda config, *shape: RIGHT | {"name": str(config), "shape": [*shape]}
    )
    monkeypatch.setattr(experiments, "measure_bursts", lambda *shape: {"name": "best", "shape": list(shape)})
    monkeypatch.setattr(
        bench,
        "compare",
        lambda candidates, make_inputs, peer, **_: {
            name: bench.Timing(name, 1.0, peer, 2.0) for name in candidates
        },
    )
    for measure, record in (
        (experiments.check_correctness, "check"),
        (experiments.measure_squares, "squares"),
        (experiments.measure_width, "width"),
    ):
        rows, recorded = measure.__wrapped__(), results.load(f"ch10_gemm_{record}", results.PREFERRED)
        of_choice = ("name", "predicted_ms", "cluster", "group")
        of_shape = ("shape", "how", "columns", "waves", "useful")
        is_old = results.stale_reason(recorded, experiments.source())
        if is_old and record == "check":  # of the configurations that an earlier version chose among
            continue
        for row, kept in zip(rows, recorded["rows"], strict=True):
            for key in of_shape if is_old else of_choice + of_shape:
                assert row.get(key) == kept.get(key), (record, key)


@pytest.mark.parametrize("missing", [True, False])
def test_each_peer_has_a_row_at_each_square(monkeypatch, missing):
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", (9, 0), "sm_90a", 132))
    monkeypatch.setattr(build, "compile_ahead", list)
    monkeypatch.setattr(experiments, "verify", lambda config, *shape: RIGHT | {"name": str(config)})
    monkeypatch.setattr(experiments, "find_fault", lambda side, prepare: "")
    monkeypatch.setattr(
        bench,
        "compare",
        lambda candidates, make_inputs, peer, **_: {
            name: bench.Timing(name, 2.0 if name == peer else 1.0, peer, 2.0) for name in candidates
        },
    )
    for module in ("quack", "deep_gemm"):
        monkeypatch.setitem(sys.modules, module, None)
    if not missing:
        monkeypatch.setattr(peers, "find", lambda name: peers.KINDS[name](peers.KINDS[name].NAME, "1.0"))
    rows = experiments.measure_peers().rows
    assert [(*row["shape"], row["peer"]) for row in rows] == [
        (side, side, side, peer) for side in experiments.SQUARES for peer in ("cuBLAS", "quack", "DeepGEMM")
    ]
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["peer"] for row in failed} == ({"quack", "DeepGEMM"} if missing else set())
    assert all("TILES_PEERS" in row["reason"] for row in failed)
    assert all(row["ratio"] == 0.5 and row["error"] == 1.0 for row in rows if row["status"] == "ok")
    assert results.EXPERIMENTS["ch10_gemm_peers"].source() != experiments.source()


def test_a_product_is_held_against_float64(monkeypatch):
    import torch

    def make_inputs(m, n, k):
        a, weight = (torch.randn(rows, k).bfloat16() for rows in (m, n))
        return a, weight.T, torch.empty(m, n).bfloat16()

    monkeypatch.setattr(experiments, "make_inputs", make_inputs)
    assert experiments.find_fault(64, experiments.prepare_cublas) == ""
    assert "is above" in experiments.find_fault(64, lambda a, b, out: lambda: torch.mm(a, 2 * b, out=out))
    assert "never written" in experiments.find_fault(64, lambda a, b, out: lambda: out)
