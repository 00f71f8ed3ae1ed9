"""The sweep of `ch07.bulk_copy`: a grid of configurations, their Space, and what the panel shows of them."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from ch07 import bulk_copy
from ch07.bulk_copy import BulkConfig, configs
from ch07.bulk_copy.experiments import LARGE, OPS, QUICK, against_torch, source, verify
from tilelab import device, results
from tilelab.sweep import Sweep
from tilelab.tunable import Roofline, TargetSpace, TunableKernel


@dataclasses.dataclass(frozen=True)
class BulkSpace(TargetSpace):
    """Configurations of `op` for arrays of `nbytes` each."""

    op: str
    nbytes: int
    compile_for: str | None = None

    def label(self, config):
        return {"name": config.kernel, "config": str(config), "kernel": str(config), "shape": [self.nbytes],
                "dtype": self.op}

    def source(self):
        return source()

    def reject(self, config):
        limit, needed = device.target_limits(self.target), config.smem_bytes(OPS.index(self.op) + 1)
        if not limit.has_tma:
            return f"{self.target} has no TMA: bulk copies need sm_90a or newer."
        if needed + 2048 > limit.smem_per_block:  # the barriers, and what the system keeps
            return f"it needs {needed:,} B of shared memory a block; {self.target} has {limit.smem_per_block:,} B."
        return ""

    def job(self, config):
        return bulk_copy.job(config, self.target, "u8" if self.op == "copy" else "float")

    def warm_up(self):
        torch.zeros(1, device="cuda")
        return {}

    def measure(self, config):
        checked = verify(self.op, config, torch.uint8 if self.op == "copy" else torch.float32, 3_000_017, 1)
        if checked["status"] != "ok":
            return checked
        return {**checked, **_figures(against_torch(self.op, {"it": config}, self.nbytes, **QUICK)[0])}

    def measure_finalists(self, chosen):
        rows = against_torch(self.op, {str(config): config for config in chosen}, self.nbytes)
        return [_figures(row) for row in rows]


def _figures(row: dict) -> dict:
    return {key: row[key] for key in ("status", "reason", "ms", "peer", "peer_ms", "ratio", "gbps") if key in row}


def grid(op: str) -> list[BulkConfig]:
    """What is swept: every kernel over chunk, stages and span."""
    threads = 32 if op == "copy" else 256
    found = [BulkConfig("loads", each, 16 * each * vectors) for each in (128, 256, 512, 1024) for vectors in (1, 2, 4)]
    for chunk, stages, span in itertools.product((2048, 4096, 8192, 16384), (1, 2, 4, 8), (0, 1, 2, 8, 32)):
        if stages * chunk > 65536 or 0 < span < stages:
            continue
        ctas = max(1, min(16, 32768 // (stages * chunk)))
        found.append(BulkConfig("bulk", threads, chunk, stages, span, ctas if span == 0 else 1))
        if stages > 1 and chunk in (2048, 4096):
            found.append(BulkConfig("cp_async", 128, chunk, stages, span, ctas if span == 0 else 1))
    return found


@results.experiment("ch07_bulk_sweep", source)
def swept():
    """The grid of both operations, through the engine."""
    kept = ("name", "config", "kernel", "shape", "dtype", "status", "reason", "ms", "peer_ms", "ratio", "gbps",
            "registers", "smem", "final_ms", "final_ratio")
    rows = []
    for op in OPS:
        space = BulkSpace(op, LARGE // 2)
        rows += [{key: row[key] for key in kept if key in row} for row in Sweep(grid(op), space).finish()]
    return rows


def _chosen_space(shape: tuple[int, ...], dtype: str, target: str | None) -> BulkSpace:
    if len(shape) != 1 or shape[0] < 1 or shape[0] % 4:
        raise ValueError(f"a shape is BYTES of each array, a multiple of 4; here it is {shape}.")
    return BulkSpace(dtype, shape[0], target)


def _roofline(_: str) -> Roofline:
    copy = next(row for row in results.load("ceilings")["rows"] if row["name"] == "copy")
    return Roofline("bytes in flight a CTA", "gbps", "GB/s", lambda config: config.stages * config.chunk,
                    {"torch's copy": copy["gbps"]})


TUNABLE_KERNEL = TunableKernel(
    name="bulk copy", shapes={"512 MiB an array": (LARGE // 2,), "64 MiB an array": (1 << 26,)},
    dtypes=OPS,
    presets={"the course's": lambda dtype: list(configs(dtype).values()),
             "the grid": grid},
    axes={"chunk": lambda c: f"{c.chunk} B", "stages": lambda c: f"{c.stages}",
          "kernel": lambda c: c.kernel, "span": lambda c: f"span {c.span}"},
    space=_chosen_space, load_record=lambda: results.load_record("ch07_bulk_sweep", source()), roofline=_roofline,
    peer="torch")
