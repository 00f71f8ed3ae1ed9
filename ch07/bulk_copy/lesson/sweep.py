"""The sweep of `ch07.bulk_copy`: a grid of configurations, its Space, and the rows and axes of the panel."""

import dataclasses
import itertools

from ch07 import bulk_copy
from ch07.bulk_copy import OPS, BulkConfig, configs
from ch07.bulk_copy.lesson.experiments import DTYPE, ELEMENT, LARGE, QUICK, compare_with_torch, source, verify
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
class BulkSpace(TargetSpace):
    """Configurations of `op` for arrays of `nbytes` each."""

    op: str
    nbytes: int
    compile_for: str | None = None

    def label(self, config):
        return {
            "name": config.kernel,
            "config": str(config),
            "kernel": str(config),
            "shape": [self.nbytes],
            "dtype": self.op,
        }

    def source(self):
        return source()

    def reject(self, config):
        if device.target_limits(self.target).has_tma:
            return ""
        return f"{self.target} has no TMA: bulk copies need sm_90a or newer."

    def job(self, config):
        return bulk_copy.job(config, self.target, ELEMENT[self.op])

    def measure(self, config):
        row = verify(self.op, config, DTYPE[self.op], 3_000_017, 1)
        if row["status"] != "ok":
            return row
        return row | compare_with_torch(self.op, {config.kernel: config}, self.nbytes, **QUICK)[0]

    def measure_finalists(self, chosen):
        return compare_with_torch(self.op, {str(config): config for config in chosen}, self.nbytes)


def grid(op: str) -> list[BulkConfig]:
    """Return the configurations to sweep: every kernel over chunk size, stages and chunks per CTA."""
    threads = 32 if op == "copy" else 256
    found = [
        BulkConfig("loads", each, 16 * each * vectors)
        for each in (128, 256, 512, 1024)
        for vectors in (1, 2, 4)
    ]
    for chunk_bytes, stages, chunks in itertools.product(
        (2048, 4096, 8192, 16384), (1, 2, 4, 8), (0, 1, 2, 8, 32)
    ):
        if stages * chunk_bytes > 65536 or 0 < chunks < stages:
            continue
        ctas = 1 if chunks else max(1, min(16, 32768 // (stages * chunk_bytes)))
        found.append(BulkConfig("bulk", threads, chunk_bytes, stages, chunks, ctas))
        if stages > 1 and chunk_bytes in (2048, 4096):
            found.append(BulkConfig("cp_async", 128, chunk_bytes, stages, chunks, ctas))
    return found


@results.experiment("ch07_bulk_sweep", source)
def measure_sweep():
    """Measure the grid of both operators with the sweep engine."""
    return [
        {key: row[key] for key in RECORDED if key in row}
        for op in OPS
        for row in Sweep(grid(op), BulkSpace(op, LARGE // 2)).finish()
    ]


def list_fastest(record: results.Record, count: int = 8) -> list[dict]:
    """Return the `count` fastest rows with their `operation`, the highest ratio first.

    The sweep engine selects rows by the key `dtype`, under which this space keeps the operation.
    """
    rows = sorted((row for row in record.rows if row["status"] == "ok"), key=lambda row: -row["ratio"])[
        :count
    ]
    return [
        {"operation": row["dtype"], **{key: row[key] for key in ("config", "gbps", "ratio", "registers")}}
        for row in rows
    ]


def _choose_space(shape: tuple[int, ...], dtype: str, target: str | None) -> BulkSpace:
    if len(shape) != 1 or shape[0] < 1 or shape[0] % 4:
        raise ValueError(
            f"the shape is {shape}; it must be the BYTES of each array, a positive multiple of 4."
        )
    return BulkSpace(dtype, shape[0], target)


def _roofline(_: str) -> Roofline:
    return Roofline(
        "bytes in flight per CTA",
        "gbps",
        "GB/s",
        lambda config: config.stages * config.chunk_bytes,
        {"torch's copy": load_ceiling("copy", "gbps")[0]},
    )


TUNABLE_KERNEL = TunableKernel(
    name="bulk copy",
    shapes={"512 MiB per array": (LARGE // 2,), "64 MiB per array": (1 << 26,)},
    dtypes=OPS,
    presets={"the course's": lambda op: list(configs(op).values()), "the grid": grid},
    axes={
        "chunk": lambda c: f"{c.chunk_bytes} B",
        "stages": lambda c: f"{c.stages}",
        "kernel": lambda c: c.kernel,
        "chunks per CTA": lambda c: f"{c.chunks_per_cta}",
    },
    space=_choose_space,
    load_record=lambda: results.load_record("ch07_bulk_sweep", source()),
    roofline=_roofline,
    peer="torch",
)
