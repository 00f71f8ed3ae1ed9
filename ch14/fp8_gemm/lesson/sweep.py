"""List the configurations that the tuner tries for the fp8 kernel: tiles, rasters, and splits of K for few tiles."""

from __future__ import annotations

import dataclasses
import functools
import math

from ch14 import fp8_gemm
from ch14.fp8_gemm.configs import BLOCK, MAX_SPLITS, TILES, Fp8Config, fill_ring
from ch14.fp8_gemm.lesson import experiments
from tilelab.runtime import device
from tilelab.sweeps.space import Space

LEAST_STEPS = 4  # of a split: fewer do not fill the ring


@functools.cache
def tuned_configs() -> tuple[Fp8Config, ...]:
    """Return the unsplit configurations that the tuner knows, for any shape."""
    return tuple(fill_ring(*tile, group_m=group) for tile in TILES for group in (4, 8, 16))


def choose_splits(config: Fp8Config, m: int, n: int, k: int, sms: int) -> list[int]:
    """Return the splits worth trying for the tile of `config`: all that give each SM at most one split of a tile.

    More than one wave of CTAs was never worth splitting: the time for the sums of so many tiles exceeds what a fuller
    last wave saves.
    """
    return list(range(1, max(1, min(MAX_SPLITS, k // BLOCK // LEAST_STEPS, sms // config.tiles(m, n))) + 1))


def find_candidates(m: int, n: int, k: int, most: int = 32) -> list[Fp8Config]:
    """Return at most `most` configurations for C (m, n) with inner extent k: what "best" is, then the others.

    The others start early and come in the order of their predicted times. Rasters differ only where there are several
    rows of tiles.
    """
    sms = device.current().sms or 132
    found: dict[Fp8Config, None] = {}
    for tile in tuned_configs():
        rows = math.ceil(m / tile.block_m)
        if rows <= tile.group_m // 2 and tile.group_m > 4 or tile.block_m >= 2 * max(m, 64):
            continue  # the same raster as a smaller group; or half of the tile would be empty
        for splits in choose_splits(tile, m, n, k, sms):
            found[dataclasses.replace(tile, splits=splits)] = None
    default = fp8_gemm.best_config(m, n, k, sms)
    ranked = sorted(found, key=lambda config: fp8_gemm.predict_us(config, m, n, k, sms))
    return list(dict.fromkeys([default, *ranked]))[:most]


@dataclasses.dataclass(frozen=True)
class Fp8Space(Space):
    """C = A B of the shape (M, N, K) in e4m3 with block scales, beside torch's scaled_mm."""

    peer = "scaled_mm"
    needs = "has_wgmma"
    table = "fp8"
    table_dtype = "fp8"
    multiples = fp8_gemm.N_MULTIPLE, BLOCK
    share = 1.0  # `find_candidates` lists few

    dtype: str = "fp8"

    @classmethod
    def source(cls):
        return fp8_gemm.tuned_source()

    def predict_us(self, config):
        return fp8_gemm.predict_us(config, *self.shape, device.current().sms or 132)

    def job(self, config):
        return fp8_gemm.job(config)

    def measure(self, config):
        return self.measure_quickly(config)

    def candidates(self):
        return find_candidates(*self.shape)

    def make_inputs(self):
        a, b, scale_a, scale_b, out = experiments.fp8_operands(*self.shape)
        return a, b, out, scale_a, scale_b

    def prepare(self, config, a, b, out, scale_a, scale_b):
        return fp8_gemm.prepare(a, b, scale_a, scale_b, out=out, config=config)

    def prepare_peer(self, a, b, out, scale_a, scale_b):
        """Multiply by torch's scaled_mm. It takes no out, so `out` gets its result here, untimed."""
        run = experiments.prepare_torch(a, b, scale_a, scale_b, out)
        out.copy_(run())
        return run
