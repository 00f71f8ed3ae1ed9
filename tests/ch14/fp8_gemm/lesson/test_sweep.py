"""What the tuner may choose from for the fp8 kernel."""

import pytest

from ch14 import fp8_gemm
from ch14.fp8_gemm.configs import SQUARE
from ch14.fp8_gemm.lesson import experiments, sweep
from tilelab.sweeps import tune

SHAPES = [(m, n, k) for n, k in experiments.DEEPSEEK for m in (1, 64, 256, 2048, 8192)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_begin_with_the_default_and_leave_no_split_empty(shape):
    found = sweep.find_candidates(*shape)
    assert found[0] == fp8_gemm.best_config(*shape, 132) and len(set(found)) == len(found) <= 32
    assert all(shape[2] // fp8_gemm.BLOCK >= config.splits for config in found)
    assert len(found) >= 3


def test_a_product_of_few_tiles_is_split():
    assert any(
        config.splits > 1 and config.block_m == 64 for config in sweep.find_candidates(64, 1024, 16384)[:3]
    )


def test_splits_are_tried_up_to_one_per_sm():
    assert sweep.choose_splits(SQUARE, 256, 4096, 7168, 132) == [1, 2]  # 64 tiles on 132 SMs
    assert sweep.choose_splits(SQUARE, 1024, 2176, 7168, 132) == [1]  # 136 tiles
    assert sweep.choose_splits(SQUARE, 256, 4096, 512, 132) == [1]  # K is short


def test_every_candidate_compiles_as_a_job():
    for config in sweep.tuned_configs():
        assert config.smem_bytes <= 232448 and fp8_gemm.job(config).target == "sm_90a"


def test_the_tuner_also_times_what_best_is_without_a_table():
    for shape in SHAPES:
        found = fp8_gemm.best_config(*shape, 132)
        assert found in tune.choose_candidates(sweep.Fp8Space(shape), sweep.Fp8Space.share)
