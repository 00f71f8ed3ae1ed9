"""In a test the contenders search a part of the grid, and have more time where others use the GPU."""

import pytest

from ch14.gemm.configs import rejection
from ch14.gemm.lesson import sweep as gemm_sweep
from ch14.sweep.lesson import experiments
from tilelab.runtime import device
from tilelab.sweeps import faults

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132)


def test_the_grid_of_a_test_is_a_part_that_can_still_be_cancelled(monkeypatch):
    monkeypatch.delenv("TILES_QUICK", raising=False)
    whole = experiments.grid()
    assert len(whole) == 96 and whole == gemm_sweep.grid()
    monkeypatch.setenv("TILES_QUICK", "1")
    part = experiments.grid()
    assert len(part) == 32 and set(part) < set(whole)
    # `measure_cancel` waits for the eleventh configuration that is right.
    assert all(
        sum(not rejection(config, target, "bf16") for config in part) > 11 for target in ("sm_90a", "sm_100a")
    )


@pytest.mark.parametrize("quick, here, limit_s", [("1", H200, 20), ("1", device.Device(), 5), ("", H200, 5)])
def test_limits_are_longer_in_a_test_on_a_gpu(monkeypatch, quick, here, limit_s):
    monkeypatch.setenv("TILES_QUICK", quick)
    monkeypatch.setattr(device, "current", lambda: here)
    engine = experiments.Sweep([], faults.FaultSpace(compile_for="sm_90a"), limit_s=5)
    assert engine.limit_s == limit_s
    engine.finish()
