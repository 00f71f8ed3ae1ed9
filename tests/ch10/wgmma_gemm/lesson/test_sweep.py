"""What the tuner tries for the WGMMA GEMM: the tiles that cover a shape in one wave, and nothing that is a waste."""

import pytest

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import WgmmaConfig, rejection
from ch10.wgmma_gemm.lesson.sweep import WgmmaSpace, tuned_configs
from tilelab.runtime import build

SPACE = tuned_configs()


@pytest.mark.parametrize(
    "shape, tile, tiles",
    [
        ((4096, 1032, 4104), (192, 176, 1), 132),
        ((192, 18944, 3584), (192, 144, 1), 132),
        ((1000, 5000, 5000), (256, 160, 2), 128),
        ((1000, 1032, 4104), (64, 160, 4), 112),
        ((256, 2880, 4096), (64, 96, 4), 120),
        ((64, 10240, 5120), (64, 80, 1), 128),
    ],
)
def test_a_tile_that_covers_the_shape_in_one_wave_is_tried(shape, tile, tiles):
    found = [
        config
        for config in WgmmaSpace(shape).candidates()
        if (config.block_m, config.block_n, config.cluster) == tile and config.kernel == "specialised"
    ]
    assert found and {config.tiles(*shape[:2]) for config in found} == {tiles}
    assert all(config.grid(*shape[:2], 132) == tiles for config in found)


def test_what_is_not_tried():
    assert not [
        config
        for config in WgmmaSpace((96, 4096, 4096)).candidates()
        if config.block_m >= 192 and config.kernel == "specialised"
    ]
    assert not [
        config
        for config in WgmmaSpace((4096, 4096, 4096)).candidates()
        if config.cluster == 4 and config.kernel == "specialised"
    ]


def test_two_waves_that_are_poorly_filled_may_be_split():
    """160 tiles of 128 x 256 fill 132 SMs and then 28; 320 halves of tiles fill them twice and then 56."""
    wide = [config for config in WgmmaSpace((4096, 1032, 4104)).candidates() if config.kernel == "split"]
    assert any((config.block_m, config.block_n, config.cluster) == (128, 256, 2) for config in wide)


def test_three_consumers_leave_their_ring_four_stages():
    three = [config for config in SPACE if config.consumers == 3]
    assert {config.block_n for config in three} == {96, 112, 128, 144, 160, 176, 192}
    assert all(config.num_stages >= 4 and not rejection(config) for config in three)


@pytest.mark.compile
def test_the_widest_sums_do_not_spill():
    configs = [
        WgmmaConfig("specialised", 192, 192, 4, consumers=3, cluster=2, epilogue_subtile=6, persistent=True),
        WgmmaConfig("specialised", 256, 192, 3, consumers=2, cluster=2, epilogue_subtile=6, persistent=True),
        WgmmaConfig("specialised", 128, 192, 4, consumers=2, cluster=4, persistent=True),
    ]
    for report in build.build(map(wgmma_gemm.job, configs)):
        assert report.launchable and report.spills == 0, (report.job.name, report.reason)
