"""The sweep of `ch14.descriptors` over a grid of configurations, and what the panel shows of it."""

from __future__ import annotations

import dataclasses

import torch

from ch14.descriptors.configs import OPS, TileConfig, configs
from ch14.descriptors.kernels import job
from ch14.descriptors.lesson.experiments import LARGE, SHAPES, source, time_against_torch, verify
from tilelab.records import results
from tilelab.sweeps.space import Space, make_copy_roofline
from tilelab.sweeps.sweep import record_rows

# Enough to find the fastest few, which are then timed again.
QUICK = {"rounds": 6, "warm_s": 0, "burst_ms": 2}
TIMED = ("status", "reason", "ms", "peer", "peer_ms", "ratio", "gbps")


def grid(op: str) -> list[TileConfig]:
    """Return tiles from 0.5 to 16 KiB, moved in every way that all GPUs have, in loops short, long and to the end."""
    if op == "gather":
        looped = tiles = [(1, width) for width in (256, 512, 1024, 2048, 4096)]
        by_threads = [(1, 1024, 4), (1, 2048, 8), (1, 4096, 8), (2, 1024, 8), (4, 256, 4), (4, 512, 8)]
        by_threads += [(4, 1024, 8), (16, 256, 8)]
    else:
        tiles = [(1, 1024), (1, 2048), (2, 512), (2, 1024), (4, 256), (4, 512), (4, 2048), (8, 256)]
        tiles += [(8, 1024), (64, 64), *((0, width) for width in (512, 1024, 2048, 4096))]
        looped = [(2, 1024), (4, 256), (4, 2048), (0, 1024), (0, 4096)]
        by_threads = [(1, 1024, 4), (1, 2048, 8), (1, 2048, 4), (1, 4096, 8), (2, 2048, 8), (8, 256, 8)]
        by_threads += [(0, 1024, 4), (0, 2048, 8), (0, 2048, 4), (0, 4096, 8), (0, 8192, 8)]
    # Tiles per CTA, stages, CTAs per SM. A program that makes its own maps needs many tiles to pay for them.
    loops = {
        "host": [(0, 3, 4), (0, 3, 16), (4, 2, 1), (16, 3, 1)],
        "device": [(0, 3, 4), (0, 3, 8), (0, 2, 16), (16, 3, 1), (64, 3, 1)],
    }
    return [
        *(TileConfig("host", *tile, warps) for tile in tiles for warps in (1, 4)),
        *(TileConfig(way, *tile, 1, *loop) for way in loops for tile in looped for loop in loops[way]),
        *(TileConfig("pointers", *tile) for tile in by_threads),
    ]


@dataclasses.dataclass(frozen=True)
class DescriptorSpace(Space):
    """Configurations of the operation `dtype` ("copy", "gather", ...) for bf16 matrices (rows, columns)."""

    title = "descriptors"
    shapes = {
        "512 MiB per array": LARGE,
        "512 MiB, rows of 16 KiB": SHAPES["gather"][0],
        "512 MiB, rows of 512 B": SHAPES["gather"][1],
        "32 MiB per array": (4096, 4096),
    }
    dtypes = OPS
    presets = {"the course's": lambda op: list(configs(op).values()), "the grid": grid}
    axes = {
        "tile": lambda c: " × ".join(map(str, c.block)),
        "way": lambda c: f"{c.way}, {c.num_warps} warp{'s' * (c.num_warps > 1)}",
        "loop": lambda c: c.describe_loop(),
        "stages": lambda c: f"{c.stages} stage{'s' * (c.stages > 1)}",
    }
    record = "ch14_descriptors_sweep"
    peer = "torch"

    def check_shape(self):
        if len(self.shape) != 2 or min(self.shape) < 1 or self.shape[1] % 8:
            raise ValueError(f"a shape is ROWS,COLUMNS, columns a multiple of 8; it is {self.shape}.")

    @property
    def operation(self) -> str:
        """Return the operation; the engine selects rows by `dtype`, under which this space keeps it."""
        return self.dtype

    def label(self, config):
        return super().label(config) | {"name": getattr(config, "way", "course")}

    @classmethod
    def source(cls):
        return source()

    def reject(self, config):
        return config.rejection(self.target)

    def job(self, config):
        return job(config, self.target, self.operation)

    def warm_up(self):
        torch.zeros(1, device="cuda")
        return {}

    def measure(self, config):
        op, columns = self.operation, self.shape[1]
        verdict = verify(op, config, 257, columns, n=257 if op == "gather" else None)
        return verdict | self._time([config], **QUICK)[0] if verdict["status"] == "ok" else verdict

    def measure_finalists(self, chosen):
        return self._time(chosen)

    def _time(self, chosen, **timing):
        named = {str(config): config for config in chosen}
        rows = time_against_torch(self.operation, named, *self.shape, **timing)
        return [{key: row[key] for key in TIMED if key in row} for row in rows]

    @staticmethod
    def count_bytes(config) -> int:
        """Return the bytes of a tile, by which the roofline orders configurations."""
        return 2 * config.elements

    @classmethod
    def roofline(cls, dtype):
        return make_copy_roofline("bytes per tile", cls.count_bytes)


@results.experiment("ch14_descriptors_sweep", source)
def measure_sweep():
    """Measure the grid of every operation, at each of its shapes, through the engine."""
    spaces = [DescriptorSpace(shape, op) for op in OPS for shape in SHAPES[op]]
    return [row for space in spaces for row in record_rows(grid(space.dtype), space)]
