"""The sweep of `ch10.tile_pipeline`: a grid of configurations, their Space, and their description for the panel."""

from __future__ import annotations

import dataclasses

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import DIMENSIONS, PRODUCERS, TileConfig, configs
from ch10.tile_pipeline.lesson import experiments
from ch10.tile_pipeline.lesson.experiments import LARGE, OPS, UNEVEN, WIDE
from tilelab.records import results
from tilelab.runtime import device
from tilelab.sweeps.space import Space, make_copy_roofline
from tilelab.sweeps.sweep import record_rows


def grid(op: str) -> list[TileConfig]:
    """Return the configurations that are swept: tiles, rings and the other fields of the operation."""
    rings = ((1, 1), (2, 2), (2, 8), (4, 8))
    if op in ("copy", "accumulate"):
        tiles = ((1, 256), (2, 256), (16, 256), (16, 64), (32, 32))
        return [
            TileConfig(op, *tile, 32, *ring, l2_promotion=width)
            for tile in tiles
            for ring in rings
            for width in ("128B", "256B")
        ]
    if op == "stencil":
        tiles = ((32, 64, 128), (16, 128, 128), (32, 128, 128), (64, 128, 256), (32, 128, 256))
        tiles += ((16, 192, 192),)
        return [
            TileConfig(op, *tile, *ring, producer)
            for tile in tiles
            for ring in rings
            for producer in PRODUCERS
        ]
    if op == "transpose":
        return [
            TileConfig(op, tile, tile, threads, swizzle=swizzle, block=4, raster=raster)
            for tile in (32, 64, 96)
            for threads in (128, 256)
            for raster in (2, 16, 1024)
            for swizzle in ("none", "128B")
        ]
    return [
        TileConfig(op, *tile, threads, cluster=cluster)
        for tile in ((4, 256), (8, 256), (16, 128))
        for threads in (64, 128)
        for cluster in (1, 2, 4)
    ]


@dataclasses.dataclass(frozen=True)
class TileSpace(Space):
    """Configurations of the operation `dtype` ("copy", "stencil", ...) for x of this shape, float32."""

    title = "tiles by tensor map"
    shapes = {f"{rows} rows of {columns}": (rows, columns) for rows, columns in (LARGE, WIDE, UNEVEN)}
    dtypes = tuple(op for op in OPS if DIMENSIONS[op] == 2)  # which share their shapes
    presets = {"the course's": lambda op: list(configs(op).values()), "the grid": grid}
    axes = {
        "tile": lambda c: f"{c.rows} × {c.columns}",
        "stages": lambda c: f"{c.stages}",
        "tiles per CTA": lambda c: f"{c.tiles_per_cta} per CTA",
        "threads": lambda c: f"{c.block_threads}",
    }
    record = "ch10_tile_sweep"
    peer = "torch"

    def check_shape(self):
        if len(self.shape) != DIMENSIONS[self.dtype] or min(self.shape) < 1:
            raise ValueError(
                f"a shape of {self.dtype} must be {DIMENSIONS[self.dtype]} numbers from 1; it is {self.shape}."
            )

    def label(self, config):
        return super().label(config) | {"name": config.op}

    @classmethod
    def source(cls):
        return experiments.source()

    def reject(self, config):
        limit, needed = device.target_limits(self.target), config.smem_bytes()
        if not limit.has_tma:
            return f"{self.target} has no TMA: tensor maps need sm_90a or newer."
        needed += 128  # barriers
        if needed > limit.smem_per_block:
            return f"it needs {needed:,} B of shared memory per block; {self.target} has {limit.smem_per_block:,} B."
        return ""

    def job(self, config):
        return tile_pipeline.job(config, self.target)

    def warm_up(self):
        torch.zeros(1, device="cuda")
        return {}

    def measure(self, config):
        shape = (257, 1003) if DIMENSIONS[self.dtype] == 2 else (5, 100, 513)
        row = experiments.verify(self.dtype, config, shape)
        if row["status"] == "ok":
            row |= self._compare({self.dtype: config}, **experiments.QUICK)[0]
        return row

    def measure_finalists(self, configs):
        return self._compare({str(config): config for config in configs})[: len(configs)]

    def _compare(self, named, **timing):
        return experiments.compare_with_torch(self.dtype, named, self.shape, **timing)

    @classmethod
    def roofline(cls, dtype):
        return make_copy_roofline("bytes in flight per CTA", lambda config: config.smem_bytes())


@results.experiment("ch10_tile_sweep", experiments.source)
def measure_sweep():
    """Sweep the grids and the course's configurations of copy, stencil and transpose."""
    return [
        row
        for op in ("copy", "stencil", "transpose")
        for row in record_rows([*grid(op), *configs(op).values()], TileSpace(LARGE, op))
    ]
