"""List what the tuner may choose from for the WGMMA GEMM: a wide set of tiles, rings, clusters and splits."""

from __future__ import annotations

import functools

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import WgmmaConfig, candidates, predict_us, rejection
from ch10.wgmma_gemm.lesson import experiments
from tilelab.runtime import device
from tilelab.sweeps.tune import Tunable

MOST_STAGES = 10


def _with_most_stages(**fields) -> WgmmaConfig | None:
    """Return the configuration with as many stages as fit into shared memory, or None if two do not fit."""
    for stages in range(MOST_STAGES, 1, -1):
        config = WgmmaConfig(num_stages=stages, pdl=True, **fields)
        if not rejection(config):
            return config
    return None


def _with_fitting_parts(**fields) -> WgmmaConfig | None:
    """Return the configuration with at least four stages, or else with the most, and with the widest boxes of C."""
    found = [
        _with_most_stages(epilogue_subtile=parts, **fields)
        for parts in range(1, 13)
        if fields["block_n"] % (16 * parts) == 0
    ]
    return max(
        filter(None, found),
        key=lambda each: (min(each.num_stages, 4), each.box, -each.epilogue_subtile),
        default=None,
    )


@functools.cache
def search_space() -> tuple[WgmmaConfig, ...]:
    """Return all configurations that the tuner knows, for any shape."""
    found: list[WgmmaConfig | None] = list(candidates())
    persistent = functools.partial(_with_most_stages, kernel="specialised", persistent=True)
    subtiles = {256: 4, 224: 7}
    widths = {128: (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256), 256: (64, 96, 112, 128)}
    for block_m, block_n in ((rows, columns) for rows in widths for columns in widths[rows]):
        rasters = (4, 16) if block_m * block_n >= 128 * 192 else (8,)
        found += [
            persistent(
                block_m=block_m,
                block_n=block_n,
                consumers=2,
                cluster=cluster,
                group_m=group,
                epilogue_subtile=4 if block_m == 256 and block_n == 128 else subtiles.get(block_n, 1),
            )
            for cluster in (1, 2)
            for group in rasters
        ]
    # Tiles of three consumers, and of 256 rows and up to 192 columns: large ones that cover some shapes in one wave.
    large = functools.partial(_with_fitting_parts, kernel="specialised", persistent=True)
    for cluster, group in ((1, 8), (2, 4), (2, 16)):
        found += [
            large(block_m=192, block_n=columns, consumers=3, cluster=cluster, group_m=group)
            for columns in range(96, 208, 16)
        ]
        found += [
            large(block_m=256, block_n=columns, consumers=2, cluster=cluster, group_m=group)
            for columns in (144, 160, 176, 192)
        ]
    # Clusters of small tiles: with few rows of C, most of the traffic from L2 is B.
    found += [
        large(block_m=64, block_n=columns, cluster=cluster, group_m=8)
        for cluster in (2, 4)
        for columns in (64, 96, 128, 160, 192)
    ]
    found += [
        large(block_m=128, block_n=columns, consumers=2, cluster=4, group_m=8)
        for columns in (64, 96, 128, 160, 192)
    ]
    found += [
        persistent(block_m=64, block_n=columns, boxes_per_stage=boxes, group_m=8)
        for columns in (80, 112, 144, 160)
        for boxes in (1, 2)
    ]
    for block_n in (16, 32, 64, 96, 128, 192, 256):
        found += [
            persistent(block_m=64, block_n=block_n, boxes_per_stage=boxes, group_m=8) for boxes in (1, 2)
        ]
    # A C of few rows is computed transposed: wgmma takes 64 rows, but as few as 16 columns.
    found += [
        persistent(block_m=64, block_n=columns, boxes_per_stage=2, swap=True, group_m=8)
        for columns in (16, 32, 64, 128)
    ]
    found += [
        persistent(block_m=128, block_n=columns, consumers=2, boxes_per_stage=boxes, swap=True, group_m=8)
        for columns in (16, 32, 64, 128, 192)
        for boxes in (1, 2)
    ]
    found += [persistent(block_m=64, block_n=columns, swap=True, group_m=8) for columns in (192, 256)]
    # In a swapped product the CTAs of a cluster share rows of A.
    found += [
        persistent(block_m=64, block_n=columns, cluster=cluster, boxes_per_stage=2, swap=True, group_m=8)
        for cluster in (2, 4)
        for columns in (16, 32, 64, 128)
        if columns % (8 * cluster) == 0
    ]
    found += [
        persistent(block_m=128, block_n=columns, consumers=2, cluster=cluster, swap=True, group_m=8)
        for cluster in (2, 4)
        for columns in (32, 64, 128, 192)
    ]
    split = functools.partial(_with_most_stages, kernel="split", group_m=8)
    for cluster in (2, 3, 4, 5, 6, 8):
        found += [
            split(block_m=64, block_n=columns, cluster=cluster, boxes_per_stage=1 + (columns <= 64))
            for columns in (64, 128, 192, 256)
        ]
        found += [
            split(block_m=128, block_n=columns, consumers=2, cluster=cluster)
            for columns in (96, 128, 160, 192, 224, 256)
        ]
        found += [
            split(block_m=64, block_n=columns, cluster=cluster, swap=True, boxes_per_stage=2)
            for columns in (16, 32, 64, 128)
        ]
        found += [
            split(block_m=128, block_n=columns, consumers=2, cluster=cluster, swap=True)
            for columns in (64, 128, 256)
        ]
    return tuple(dict.fromkeys(filter(None, found)))


def suits(config: WgmmaConfig, m: int, n: int, k: int, sms: int) -> bool:
    """Return whether a configuration is worth trying: a shape with many tiles needs no split, and so on."""
    tiles = config.tiles(m, n)
    if config.kernel == "specialised" and config.block_m * (config.cluster - 1) >= (n if config.swap else m):
        return False  # a whole CTA of each cluster would have nothing to do
    if config.kernel == "split":
        return (
            tiles <= 1.5 * sms and tiles * config.cluster <= 3 * sms and config.steps(k) >= 3 * config.cluster
        )
    if config.cluster == 4 and tiles > config.grid(m, n, sms):
        return False  # a second wave
    if config.swap:
        return m <= 256 or config.block_n >= 192 and m <= 2048
    if config.block_m == 64:
        return m <= 64 or tiles <= 8 * sms
    return m > 64 and config.block_m < 2 * m and config.block_n <= 2 * n


def find_candidates(m: int, n: int, k: int) -> list[WgmmaConfig]:
    """Return the configurations that the tuner tries for C (m, n) with inner extent k."""
    sms = device.current().sms or 132
    return [config for config in search_space() if suits(config, m, n, k, sms)]


TUNABLE = Tunable(
    "wgmma_gemm",
    "cuBLAS",
    find_candidates,
    lambda config, m, n, k: predict_us(config, m, n, k, device.current().sms or 132),
    experiments.make_inputs,
    lambda config, a, b, out: wgmma_gemm.prepare(a, b, out=out, config=config),
    experiments.prepare_cublas,
    lambda config, m, n, k: wgmma_gemm.job(config),
    wgmma_gemm.tuned_source,
    needs="has_wgmma",
)
