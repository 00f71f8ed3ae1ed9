"""Explain why a transpose that walks along the rows of x is slower than a copy, and one that walks down is not as slow.

The evidence is counters of the profiler, and kernels that do one half of the work.

`python -m ch10.tile_pipeline.lesson.audit` is what the profiler watches.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import TileConfig, configs
from ch10.tile_pipeline.lesson import experiments
from tilelab.measure import bench, profiler
from tilelab.measure.patch import patched_source

SHAPE = (16384, 16384)  # a square, so that a tile may also be stored where it came from
METRICS = {
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ns": "gpu__time_duration.sum",
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "l2_sectors_written": "lts__t_sectors_op_write.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
KEEP_ELEMENTS = "if (block >= BLOCKS) break;", "break;", 2  # no thread touches the tile
KEEP_PLACE = (
    "out, tile + box * BOX_BYTES, row + box * BOX_COLUMNS, column)",
    "out, tile + box * BOX_BYTES, column + box * BOX_COLUMNS, row)",
    1,
)


def _prepare(op: str, config: TileConfig, *changes: tuple[str, str, int]):
    """Return a candidate for bench.compare: `op`, compiled from the source with `changes`."""

    def prepare(x, out):
        if not changes:
            return tile_pipeline.prepare(op, x, out=out, config=config)
        original = tile_pipeline.SOURCE
        with patched_source(original, *changes) as tile_pipeline.SOURCE:
            try:
                return tile_pipeline.prepare(op, x, out=out, config=config)
            finally:
                tile_pipeline.SOURCE = original

    return prepare


def list_candidates() -> dict:
    """Return what is compared, by name. The first is an elementwise kernel of torch, which moves as many bytes as a
    copy; torch's own copy is not a kernel that the profiler sees."""
    across, down = (configs("transpose")[name] for name in ("across", "down"))
    swizzled = dataclasses.replace(across, swizzle="128B")
    return {
        "torch.neg": lambda x, out: lambda: torch.neg(x, out=out),
        "copy": _prepare("copy", next(iter(configs("copy").values()))),
        "elements turned, tiles stay": _prepare("transpose", across, KEEP_PLACE),
        "tiles move, elements stay": _prepare("transpose", across, KEEP_ELEMENTS),
        "walk across": _prepare("transpose", across),
        "walk across, swizzled": _prepare("transpose", swizzled),
        "walk down": _prepare("transpose", down),
    }


def make_inputs() -> list[torch.Tensor]:
    """Return x and out, float32, of SHAPE."""
    return [torch.randn(SHAPE, device="cuda"), torch.empty(SHAPE, device="cuda")]


def split_gap(copy: dict, other: dict) -> dict:
    """Return how much longer `other` takes than `copy` (`gap`, a factor less 1), and `bytes_share`, the share of the
    gap that its additional DRAM bytes explain. The rest is a lower rate. Factors multiply, so shares are of logarithms.
    """
    gap, more = (math.log(other[key] / copy[key]) for key in ("ms", "dram_bytes"))
    return {"gap": math.expm1(gap), "bytes_share": more / gap if gap > 0.005 else None}


@profiler.experiment("ch10_tile_audit", lambda: experiments.source(pathlib.Path(__file__)))
def count_transpose():
    """Count DRAM bytes, L2 sectors and bank conflicts of every candidate, and time all candidates interleaved.

    `ms`, `ratio` and `dram_gbps` are from launches without the profiler. `ns` and the counters are from one launch that
    starts with an empty L2 cache.
    """
    candidates = list_candidates()
    counted = profiler.profile_launches(
        [sys.executable, "-m", "ch10.tile_pipeline.lesson.audit"], list(candidates), METRICS
    )
    timed = bench.compare(
        experiments.torch_candidates("copy") | candidates,
        make_inputs,
        "torch copy_",
        nbytes=experiments.bytes_moved("copy", SHAPE),
        rounds=8,
        warm_s=0.1,
    )
    for row in counted:
        row |= timed[row["name"]].row() | {
            "shape": list(SHAPE),
            "dram_bytes": row["read_bytes"] + row["written_bytes"],
        }
        row["dram_gbps"] = row["dram_bytes"] / row["ms"] / 1e6
    copy = next(row for row in counted if row["name"] == "copy")
    return [row | split_gap(copy, row) for row in counted]


def launch_all() -> None:
    """Launch every candidate once for the profiler to watch."""
    x, out = make_inputs()
    for candidate in list_candidates().values():
        profiler.launch_watched(candidate(x, out))


if __name__ == "__main__":
    launch_all()
