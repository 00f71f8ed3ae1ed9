"""The measurements behind `ch14.descriptors.tile_copy`: check and time a configuration against torch's copy_."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ch14.descriptors import tile_copy
from ch14.descriptors.tile_copy import SETS, CopyConfig
from tilelab import bench, build, device, results
from tilelab.tunable import Roofline, TargetSpace, TunableKernel, load_ceiling

SIDE = 16384  # bf16: 512 MiB read and 512 MiB written


def make_pair(rows: int = SIDE, columns: int = SIDE) -> list[torch.Tensor]:
    """Return two random bf16 matrices, to copy one to the other."""
    return [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(2)]


def measure(config: CopyConfig, rows: int = SIDE, columns: int = SIDE, **timing) -> dict:
    """Copy, compare bit for bit, then time against torch.

    Return {status, reason}, and when the status is ok also {ms, peer_ms, ratio, gbps}.
    """
    source, destination = make_pair(rows, columns)
    destination.fill_(float("nan"))
    tile_copy.copy_tma(source, destination, config)
    if not torch.equal(source.view(torch.int16), destination.view(torch.int16)):
        return {"status": "wrong", "reason": "the bits differ"}
    return {"status": "ok", "reason": ""} | _time_against_torch([config], rows, columns, **timing)[0]


def _time_against_torch(chosen: list[CopyConfig], rows: int, columns: int, **timing) -> list[dict]:
    candidates = {"torch": lambda s, d: lambda: d.copy_(s),
                  **{str(c): functools.partial(tile_copy.prepare_copy, config=c) for c in chosen}}
    timings = bench.compare(candidates, lambda: make_pair(rows, columns), "torch", nbytes=4 * rows * columns, **timing)
    return [{key: value for key, value in timings[str(c)].row().items() if key != "name"} for c in chosen]


def source() -> str:
    """Return the hash of what is measured."""
    return results.source_hash(tile_copy)


@results.experiment("ch14_gemm_copy", source)
def measure_copies() -> list[dict]:
    """Measure the field note's copy configurations and the course's, with 1 GiB moved, against torch's copy_."""
    every = dict.fromkeys(config for chosen in SETS.values() for config in chosen)
    build.compile_ahead(map(CopySpace(SIDE, SIDE).job, every))
    return [CopySpace(SIDE, SIDE, which=which).label(config) | measure(config)
            for which, chosen in SETS.items() for config in chosen]


@dataclasses.dataclass(frozen=True)
class CopySpace(TargetSpace):
    """Copy configurations at one shape."""

    rows: int
    columns: int
    compile_for: str | None = None
    which: str = ""

    def label(self, config):
        return {"name": self.which or "course", "config": str(config), "kernel": str(config),
                "shape": [self.rows, self.columns], "dtype": "bf16"}

    def source(self):
        return source()

    def reject(self, config):
        if device.target_limits(self.target).has_tma:
            return ""
        return f"{self.target} has no TMA: descriptors need sm_90a or newer."

    def job(self, config):
        tile = f"tensordesc<bf16[{config.block_m}, {config.block_n}]>"
        return build.Job("ch14.descriptors.tile_copy:copy_tma_kernel", {"source": tile, "destination": tile},
                         {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}, self.target, config.num_warps,
                         config.num_stages, name=str(config))

    def warm_up(self):
        torch.zeros(1, device="cuda")
        return {}

    def measure(self, config):
        return measure(config, self.rows, self.columns, rounds=8, warm_s=0)

    def measure_finalists(self, chosen):
        return _time_against_torch(chosen, self.rows, self.columns)


def check_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of bf16 matrices that descriptors take; ValueError for another."""
    if len(shape) != 2 or min(shape) < 1 or shape[1] % 8:
        raise ValueError(f"a shape is ROWS,COLUMNS, columns a multiple of 8; it is {shape}.")
    return shape


def make_roofline(tile_bytes: Callable[[Any], int]) -> Callable[[str], Roofline]:
    """Return a function that gives the axes of a copy's plot, with torch's copy as its roof."""
    def roofline(_: str) -> Roofline:
        return Roofline("bytes per tile", "gbps", "GB/s", tile_bytes, {"torch's copy": load_ceiling("copy", "gbps")[0]})

    return roofline


TUNABLE_KERNEL = TunableKernel(
    name="TMA copy",
    shapes={"1 GiB moved": (SIDE, SIDE), "64 MiB moved": (4096, 4096)},
    dtypes=("bf16",),
    presets={"the field note's current 5": lambda _: SETS["conservative"],
             "the field note's proposed 5": lambda _: SETS["proposed"], "the course's 4": lambda _: SETS["course"]},
    axes={"tile": lambda c: f"{c.block_m}×{c.block_n}",
          "warps, stages": lambda c: f"{c.num_warps} warps, {c.num_stages} stage{'s' * (c.num_stages > 1)}"},
    space=lambda shape, dtype, target: CopySpace(*check_shape(shape), target),
    load_record=lambda: results.load_record("ch14_gemm_copy", source()),
    roofline=make_roofline(lambda config: 2 * config.block_m * config.block_n), peer="torch")
