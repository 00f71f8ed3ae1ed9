"""The experiments of `15_ch14_blockscaled`, as far as they go without a GPU."""

import pytest

from ch14.blockscaled.lesson import experiments, verification
from ch14.fp4_decode.lesson.experiments import measure_decode
from ch14.fp8_gemm.lesson import experiments as fp8_experiments
from ch14.fp8_gemm.lesson import impacts
from tilelab.runtime import device

EXPERIMENTS = (
    fp8_experiments.measure_shapes,
    fp8_experiments.measure_thin_products,
    experiments.measure_emulated,
    measure_decode,
    experiments.run_sanitizers,
    impacts.measure_epilogue,
    impacts.measure_impacts,
    fp8_experiments.measure_peers,
)


def test_paths_are_checked_without_a_gpu():
    if device.current().capability:
        pytest.skip("the whole of it is the GPU test")
    rows = verification.check_correctness()
    assert {row["path"] for row in rows} == {"emulated", "decode"}
    assert [r for r in rows if r["status"] != "ok"] == []


@pytest.mark.gpu
def test_all_paths_are_right():
    assert [row for row in verification.check_correctness() if row["status"] != "ok"] == []


def test_sources_are_told_apart():
    hashes = {experiment.__name__: experiment.source() for experiment in EXPERIMENTS}
    assert all(len(each) == 16 for each in hashes.values())
    assert hashes["measure_shapes"] == hashes["measure_thin_products"] == hashes["measure_impacts"]
    found = len(
        {
            hashes[name]
            for name in (
                "measure_shapes",
                "measure_emulated",
                "measure_decode",
                "measure_epilogue",
                "run_sanitizers",
            )
        }
    )
    assert found == 5


def test_an_experiment_that_was_never_recorded_says_so(monkeypatch, tmp_path):
    if device.current().has_wgmma:
        pytest.skip("here it would be measured")
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    for experiment in EXPERIMENTS:
        with pytest.raises(FileNotFoundError, match="no record of ch14_blockscaled_"):
            experiment()
