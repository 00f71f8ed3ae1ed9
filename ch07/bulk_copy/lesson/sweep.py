"""The sweep of `ch07.bulk_copy`: a grid of configurations, its Space, and the rows and axes of the panel."""

import dataclasses
import itertools

from ch07 import bulk_copy
from ch07.bulk_copy import OPS, BulkConfig, configs
from ch07.bulk_copy.lesson.experiments import DTYPE, ELEMENT, LARGE, QUICK, compare_with_torch, source, verify
from tilelab.records import results
from tilelab.runtime import device
from tilelab.sweeps.space import Space, make_copy_roofline
from tilelab.sweeps.sweep import record_rows


def grid(op: str) -> list[BulkConfig]:
    """Return the configurations to sweep: every kernel over chunk size, stages and chunks per CTA."""
    threads = 32 if op == "copy" else 256
    found = [
        BulkConfig("loads", each, 16 * each * vectors)
        for each in (128, 256, 512, 1024)
        for vectors in (1, 2, 4)
        if each * vectors <= 2048
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


@dataclasses.dataclass(frozen=True)
class BulkSpace(Space):
    """Configurations of the operator `dtype` ("copy", "axpy") for arrays of `shape` bytes each."""

    title = "bulk copy"
    shapes = {"512 MiB per array": (LARGE // 2,), "64 MiB per array": (1 << 26,)}
    dtypes = OPS
    presets = {"the course's": lambda op: list(configs(op).values()), "the grid": grid}
    axes = {
        "chunk": lambda c: f"{c.chunk_bytes} B",
        "stages": lambda c: f"{c.stages}",
        "kernel": lambda c: c.kernel,
        "chunks per CTA": lambda c: f"{c.chunks_per_cta}",
    }
    record = "ch07_bulk_sweep"
    peer = "torch"

    def check_shape(self):
        if len(self.shape) != 1 or self.shape[0] < 1 or self.shape[0] % 4:
            raise ValueError(
                f"the shape is {self.shape}; it must be the BYTES of each array, a positive multiple of 4."
            )

    def label(self, config):
        return super().label(config) | {"name": config.kernel}

    @classmethod
    def source(cls):
        return source()

    def reject(self, config):
        if device.target_limits(self.target).has_tma:
            return ""
        return f"{self.target} has no TMA: bulk copies need sm_90a or newer."

    def job(self, config):
        return bulk_copy.job(config, self.target, ELEMENT[self.dtype])

    def measure(self, config):
        row = verify(self.dtype, config, DTYPE[self.dtype], 3_000_017, 1)
        if row["status"] != "ok":
            return row
        return row | compare_with_torch(self.dtype, {config.kernel: config}, *self.shape, **QUICK)[0]

    def measure_finalists(self, chosen):
        return compare_with_torch(self.dtype, {str(config): config for config in chosen}, *self.shape)

    @classmethod
    def roofline(cls, dtype):
        return make_copy_roofline(
            "bytes in flight per CTA", lambda config: config.stages * config.chunk_bytes
        )


@results.experiment("ch07_bulk_sweep", source)
def measure_sweep():
    """Measure the grid and the course's configurations of both operators with the sweep engine."""
    return [
        row
        for op in OPS
        for row in record_rows([*grid(op), *configs(op).values()], BulkSpace((LARGE // 2,), op))
    ]
