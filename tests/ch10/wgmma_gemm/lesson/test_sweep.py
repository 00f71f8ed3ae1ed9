"""What the sweep shows and the tuner tries for the WGMMA GEMM."""

import pytest
from cases import cases

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.choice import candidates
from ch10.wgmma_gemm.configs import WgmmaConfig
from ch10.wgmma_gemm.lesson.sweep import WgmmaSpace
from tilelab.runtime import build


@cases(
    "shape, tile, tiles",
    ((4096, 1032, 4104), (192, 176), 144),
    ((192, 10240, 5120), (192, 192), 54),
    ((64, 10240, 5120), (64, 64), 160),
)
def test_a_tile_that_suits_the_shape_is_tried(shape, tile, tiles):
    found = [
        config
        for config in WgmmaSpace(shape).candidates()
        if (config.block_m, config.block_n) == tile
        and config.kernel == "specialised"
        and config.cluster_size == 1
    ]
    assert tiles in {config.tiles(*shape[:2]) for config in found}


def test_few_tiles_may_be_split():
    split = [config for config in WgmmaSpace((240, 5120, 32768)).candidates() if config.kernel == "split"]
    assert (128, 240, 3) in {(config.block_m, config.block_n, config.cluster) for config in split}


@pytest.mark.compile
def test_the_widest_sums_do_not_spill():
    wide = sorted(candidates(2048, 4096, 4096).values(), key=lambda config: -config.accumulators)
    jobs = {(config.block_m, config.swap): config for config in reversed(wide)}.values()
    turns = WgmmaConfig("specialised", 64, 40, 6, cluster=2, cluster_n=2, swap=True, persistent=True)
    for report in build.build(map(wgmma_gemm.job, (*jobs, turns))):
        assert report.launchable and report.spills == 0, (report.job.name, report.reason)
