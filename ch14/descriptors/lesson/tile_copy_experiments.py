"""The field note's copy configurations, and the course's, against torch's copy_, and their entry in the sweep panel."""

from __future__ import annotations

import dataclasses

from ch14.descriptors.lesson import tile_copy
from ch14.descriptors.lesson.experiments import LARGE, time_against_torch, verify
from ch14.descriptors.lesson.sweep import DescriptorSpace
from ch14.descriptors.lesson.tile_copy import SETS
from tilelab.records import results
from tilelab.runtime import build, device, provenance


def source() -> str:
    """Return the hash of what is measured."""
    return provenance.source_hash(tile_copy)


@results.experiment("ch14_gemm_copy", source)
def measure_copies() -> list[dict]:
    """Measure the field note's copy configurations and the course's, with 1 GiB moved, against torch's copy_."""
    space = CopySpace(LARGE)
    chosen = {str(config): config for tiles in SETS.values() for config in tiles}
    build.compile_ahead(map(space.job, chosen.values()))
    timings = dict(zip(chosen, time_against_torch("copy", chosen, *LARGE)))
    return [
        {**timings[str(config)], **verify("copy", config, *LARGE), **space.label(config), "name": name}
        for name, tiles in SETS.items()
        for config in tiles
    ]


@dataclasses.dataclass(frozen=True)
class CopySpace(DescriptorSpace):
    """Configurations of `tile_copy` at one shape."""

    title = "TMA copy"
    shapes = {"1 GiB moved": LARGE, "64 MiB moved": (4096, 4096)}
    dtypes = ("bf16",)
    presets = {
        "the field note's current 5": lambda _: SETS["conservative"],
        "the field note's proposed 5": lambda _: SETS["proposed"],
        "the course's 4": lambda _: SETS["course"],
    }
    axes = {
        "tile": lambda c: f"{c.block_m}×{c.block_n}",
        "warps, stages": lambda c: f"{c.num_warps} warps, {c.num_stages} stage{'s' * (c.num_stages > 1)}",
    }
    record = "ch14_gemm_copy"
    operation = "copy"

    @classmethod
    def source(cls):
        return source()

    def reject(self, config):
        if device.target_limits(self.target).has_tma:
            return ""
        return f"{self.target} has no TMA: descriptors need sm_90a or newer."

    def job(self, config):
        tile = f"tensordesc<bf16[{config.block_m}, {config.block_n}]>"
        kernel, signature = (
            "ch14.descriptors.lesson.tile_copy:copy_tma_kernel",
            dict(source=tile, destination=tile),
        )
        constants = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        options = (self.target, config.num_warps, config.num_stages)
        return build.Job(kernel, signature, constants, *options, name=str(config))

    @staticmethod
    def count_bytes(config) -> int:
        return 2 * config.block_m * config.block_n
