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
from tilelab.sweeps.sweep import Sweep
from tilelab.sweeps.tunable import Roofline, TargetSpace, TunableKernel, load_ceiling

RECORDED = (
    "name",
    "config",
    "kernel",
    "shape",
    "dtype",
    "status",
    "reason",
    "ms",
    "peer_ms",
    "ratio",
    "gbps",
    "registers",
    "smem",
    "final_ms",
    "final_ratio",
)


@dataclasses.dataclass(frozen=True)
class TileSpace(TargetSpace):
    """Configurations of `op` for x of this shape, float32."""

    op: str
    shape: tuple[int, ...]
    compile_for: str | None = None

    def label(self, config):
        return {
            "name": config.op,
            "config": str(config),
            "kernel": str(config),
            "shape": list(self.shape),
            "dtype": self.op,
        }

    def source(self):
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
        shape = (257, 1003) if DIMENSIONS[self.op] == 2 else (5, 100, 513)
        row = experiments.verify(self.op, config, shape)
        if row["status"] == "ok":
            row |= experiments.compare_with_torch(
                self.op, {self.op: config}, self.shape, **experiments.QUICK
            )[0]
        return row

    def measure_finalists(self, configs):
        named = {str(config): config for config in configs}
        return experiments.compare_with_torch(self.op, named, self.shape)[: len(configs)]


def grid(op: str) -> list[TileConfig]:
    """Return the configurations that are swept: tiles, rings and the other fields of the operation."""
    rings = ((1, 1), (2, 2), (2, 8), (4, 8))
    if op in ("copy", "accumulate"):
        tiles = ((1, 256), (2, 256), (4, 256), (16, 256), (16, 64), (32, 32))
        return [
            TileConfig(op, *tile, 32, *ring, l2_promotion=width)
            for tile in tiles
            for ring in rings
            for width in ("128B", "256B")
        ]
    if op == "stencil":
        tiles = (
            (32, 64, 128),
            (16, 128, 128),
            (32, 128, 128),
            (64, 128, 256),
            (32, 128, 256),
            (16, 192, 192),
        )
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


@results.experiment("ch10_tile_sweep", experiments.source)
def measure_sweep():
    """Sweep the grids of copy, stencil and transpose."""
    return [
        {key: row[key] for key in RECORDED if key in row}
        for op in ("copy", "stencil", "transpose")
        for row in Sweep(grid(op), TileSpace(op, LARGE)).finish()
    ]


def _make_space(shape: tuple[int, ...], dtype: str, target: str | None) -> TileSpace:
    if len(shape) != DIMENSIONS[dtype] or min(shape) < 1:
        raise ValueError(f"a shape of {dtype} must be {DIMENSIONS[dtype]} numbers from 1; it is {shape}.")
    return TileSpace(dtype, tuple(shape), target)


def _roofline(_: str) -> Roofline:
    return Roofline(
        "bytes in flight per CTA",
        "gbps",
        "GB/s",
        lambda config: config.smem_bytes(),
        {"torch's copy": load_ceiling("copy", "gbps")[0]},
    )


TUNABLE_KERNEL = TunableKernel(
    name="tiles by tensor map",
    shapes={f"{rows} rows of {columns}": (rows, columns) for rows, columns in (LARGE, WIDE, UNEVEN)},
    dtypes=tuple(op for op in OPS if DIMENSIONS[op] == 2),  # which share their shapes
    presets={"the course's": lambda dtype: list(configs(dtype).values()), "the grid": grid},
    axes={
        "tile": lambda c: f"{c.rows} × {c.columns}",
        "stages": lambda c: f"{c.stages}",
        "tiles per CTA": lambda c: f"{c.tiles_per_cta} per CTA",
        "threads": lambda c: f"{c.block_threads}",
    },
    space=_make_space,
    load_record=lambda: results.load_record("ch10_tile_sweep", experiments.source()),
    roofline=_roofline,
    peer="torch",
)
