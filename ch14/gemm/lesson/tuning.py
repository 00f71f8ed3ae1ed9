"""List what the tuner may choose from for the Triton GEMM: tiles from 16 x 32 to 256 x 192, whole or split along K."""

from __future__ import annotations

import functools
import itertools

from ch14 import gemm
from ch14.gemm import kernels
from ch14.gemm.configs import GemmConfig, configs, job, predict_us, rejection
from ch14.gemm.lesson import experiments
from tilelab.runtime import device, provenance
from tilelab.sweeps.tune import Tunable

MOST_STAGES = 8


def _with_most_stages(*tile, num_warps: int, kernel: str = "persistent", **options) -> GemmConfig | None:
    """Return the configuration with as many stages as fit into Hopper's shared memory, or None if two do not fit."""
    for stages in range(MOST_STAGES, 1, -1):
        config = GemmConfig(*tile, num_warps, stages, kernel=kernel, pdl=True, **options)
        if not rejection(config, "sm_90a", "bf16"):
            return config
    return None


@functools.cache
def search_space() -> tuple[GemmConfig, ...]:
    """Return all configurations that the tuner knows, for any shape."""
    found: list[GemmConfig | None] = list(configs("course").values())
    for block_m, block_n, block_k in itertools.product((16, 32), (32, 64, 128), (128, 256)):
        found.append(_with_most_stages(block_m, block_n, block_k, num_warps=4))
    for block_n, block_k, programs in itertools.product((16, 32, 64, 128), (64, 128), (1, 2)):
        found.append(_with_most_stages(64, block_n, block_k, num_warps=4, programs_per_sm=programs))
    for block_n, programs, group_m in itertools.product((32, 64, 128), (1, 2), (4, 16)):
        found += [
            _with_most_stages(
                128,
                block_n,
                64,
                num_warps=warps,
                programs_per_sm=programs,
                group_m=group_m,
                epilogue_subtile=4 if block_n == 128 and programs == 2 else 1 + (block_n == 128),
            )
            for warps in (4, 8)
        ]
    for block_n, group_m in itertools.product((192, 256), (4, 8, 16)):
        found += [
            _with_most_stages(128, block_n, 64, num_warps=warps, epilogue_subtile=2, group_m=group_m)
            for warps in (4, 8)
        ]
    for block_n, group_m in itertools.product((64, 128), (4, 16)):
        found.append(_with_most_stages(256, block_n, 64, num_warps=8, epilogue_subtile=2, group_m=group_m))
    found.append(_with_most_stages(64, 256, 64, num_warps=4, epilogue_subtile=2))
    for (block_n, parts), block_m in itertools.product(((80, 4), (96, 2), (160, 4)), (64, 128)):
        found += [
            _with_most_stages(block_m, block_n, block_k, num_warps=warps, epilogue_subtile=parts)
            for block_k, warps in (((64, 4), (64, 8)) if block_m == 128 else ((64, 4), (128, 4)))
        ]
    for block_n, parts in ((80, 4), (96, 2), (160, 4), (192, 2)):
        found += [
            _with_most_stages(256, block_n, 64, num_warps=8, epilogue_subtile=parts, group_m=group_m)
            for group_m in (4, 16)
        ]
    found += [
        _with_most_stages(128, 320, 64, num_warps=8, epilogue_subtile=4, group_m=group_m)
        for group_m in (4, 16)
    ]
    found += [
        _with_most_stages(64, block_n, block_k, num_warps=4, epilogue_subtile=parts)
        for (block_n, parts), block_k in itertools.product(((192, 2), (320, 4)), (64, 128))
    ]
    for splits in (2, 3, 4, 5, 6, 8):
        split = functools.partial(_with_most_stages, kernel="split", splits=splits)
        found += [
            split(16, 64, 256, num_warps=4),
            split(32, 64, 128, num_warps=4),
            split(64, 64, 128, num_warps=4),
            split(64, 128, 64, num_warps=4),
            split(64, 128, 128, num_warps=4),
            split(64, 256, 64, num_warps=4),
            split(128, 128, 64, num_warps=8),
            split(128, 256, 64, num_warps=8),
        ]
    return tuple(dict.fromkeys(filter(None, found)))


def suits(config: GemmConfig, m: int, n: int, k: int, sms: int) -> bool:
    """Return whether a configuration is worth trying for C (m, n) with inner extent k."""
    if config.kernel == "split":
        tiles = config.tiles(m, n)
        if tiles > 1.5 * sms or tiles * config.splits > 4 * sms or k < 3 * config.splits * config.block_k:
            return False
    if config.block_m < 64:
        return m <= 4 * config.block_m
    if config.block_m == 64:
        return m <= 64 or config.tiles(m, n) <= 8 * sms
    return m > 64 and config.block_m < 2 * m


def find_candidates(m: int, n: int, k: int) -> list[GemmConfig]:
    """Return the configurations that the tuner tries for C (m, n) with inner extent k."""
    return [config for config in search_space() if suits(config, m, n, k, device.current().sms or 132)]


TUNABLE = Tunable(
    "gemm",
    "cuBLAS",
    find_candidates,
    lambda config, m, n, k: predict_us(config, m, n, k, "bf16", device.current().sms or 132),
    lambda m, n, k: experiments.make_inputs(m, n, k)[:3],
    lambda config, a, b, out: gemm.prepare(a, b, out=out, config=config),
    experiments.prepare_cublas,
    lambda config, m, n, k: job(config, "sm_90a", sms=device.current().sms or 132, mnk=(m, n, k)),
    lambda: provenance.source_hash(kernels),
)
