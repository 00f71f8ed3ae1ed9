"""The measurements behind the copy of `ch14.descriptors`: check and timing of a configuration against torch's copy_."""

from __future__ import annotations

import dataclasses
import functools

import torch

from ch14 import descriptors
from ch14.descriptors import CopyConfig
from tilelab import bench, build, device, results
from tilelab.space import Roofline, Subject, TargetSpace

SIDE = 16384  # bf16: 512 MiB read and 512 MiB written


def pair(rows: int = SIDE, columns: int = SIDE) -> list[torch.Tensor]:
    """Two random bf16 matrices, to copy one to the other."""
    return [torch.randn(rows, columns, device="cuda").bfloat16() for _ in range(2)]


def measure(config: CopyConfig, rows: int = SIDE, columns: int = SIDE, **timing) -> dict:
    """Copy, compare bit for bit, then time against torch: {status, reason, ms, peer_ms, ratio, gbps}; when not ok
    the first two."""
    source, destination = pair(rows, columns)
    destination.fill_(float("nan"))
    descriptors.copy_tma(source, destination, config)
    if not torch.equal(source.view(torch.int16), destination.view(torch.int16)):
        return {"status": "wrong", "reason": "the bits differ"}
    return {"status": "ok", "reason": ""} | _against_torch([config], rows, columns, **timing)[0]


def _against_torch(chosen: list[CopyConfig], rows: int, columns: int, **timing) -> list[dict]:
    candidates = {"torch": lambda s, d: lambda: d.copy_(s),
                  **{str(c): functools.partial(descriptors.prepare_copy, config=c) for c in chosen}}
    found = bench.compare(candidates, lambda: pair(rows, columns), "torch", nbytes=4 * rows * columns, **timing)
    return [{key: value for key, value in found[str(c)].row().items() if key != "name"} for c in chosen]


def source() -> str:
    """Hash of what is measured."""
    return results.source_hash(descriptors)


def copies() -> results.Record:
    """The field note's copy configurations and the course's, 1 GiB moved, against torch's copy_."""
    def rows():
        return [CopySpace(SIDE, SIDE, which=which).label(config) | measure(config)
                for which in descriptors.SETS for config in descriptors.configs(which)]

    return results.live_or_recorded("ch14_gemm_copy", rows, source())


@dataclasses.dataclass(frozen=True)
class CopySpace(TargetSpace):
    """Copy configurations at one shape."""

    rows: int
    columns: int
    on: str | None = None
    which: str = ""

    def label(self, config):
        return {"name": self.which or "course", "config": str(config), "kernel": str(config),
                "shape": [self.rows, self.columns], "dtype": "bf16"}

    def source(self):
        return source()

    def reject(self, config):
        if device.limits(self.target).has_tma:
            return ""
        return f"{self.target} has no TMA: descriptors need sm_90a or newer."

    def job(self, config):
        tile = f"tensordesc<bf16[{config.block_m}, {config.block_n}]>"
        return build.Job("ch14.descriptors:copy_tma_kernel", {"source": tile, "destination": tile},
                         {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}, self.target, config.num_warps,
                         config.num_stages, name=str(config))

    def warm(self):
        torch.zeros(1, device="cuda")
        return {}

    def measure(self, config):
        return measure(config, self.rows, self.columns, rounds=8, warm_s=0)

    def finals(self, chosen):
        return _against_torch(chosen, self.rows, self.columns)


def _chosen_space(shape: tuple[int, ...], dtype: str, target: str | None) -> CopySpace:
    if len(shape) != 2 or min(shape) < 1 or shape[1] % 8:
        raise ValueError(f"a shape is ROWS,COLUMNS, columns a multiple of 8; here it is {shape}.")
    return CopySpace(*shape, target)


def _roofline(_: str) -> Roofline:
    copy = next(row for row in results.load("ceilings")["rows"] if row["name"] == "copy")
    return Roofline("bytes of a tile", "gbps", "GB/s", lambda config: 2 * config.block_m * config.block_n,
                    {"torch's copy": copy["gbps"]})


SUBJECT = Subject(
    name="TMA copy",
    shapes={"1 GiB moved": (SIDE, SIDE), "64 MiB moved": (4096, 4096)},
    dtypes=("bf16",),
    presets={"the field note's current 5": lambda _: descriptors.configs("conservative"),
             "the field note's proposed 5": lambda _: descriptors.configs("proposed"),
             "the course's 4": lambda _: descriptors.configs("course")},
    axes={"tile": lambda c: f"{c.block_m}×{c.block_n}",
          "warps, stages": lambda c: f"{c.num_warps} warps, {c.num_stages} stages"},
    space=_chosen_space, recorded=lambda: results.recorded("ch14_gemm_copy", source()), roofline=_roofline,
    peer="torch")
