"""Count with the profiler what a GEMM costs where the rows of A and B do not begin at a line of 128 bytes.

`python -m ch10.wgmma_gemm.lesson.audit` is what the profiler watches.
"""

from __future__ import annotations

import pathlib
import sys

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.lesson import experiments
from tilelab.measure import profiler
from tilelab.runtime import provenance

SHAPES = ((4096, 4096, 4096), (4096, 4096, 4104))  # rows of 8,192 and of 8,208 bytes
METRICS = {
    "requests": "lts__t_requests_srcunit_tex_op_read.sum",
    "sectors": "lts__t_sectors_srcunit_tex_op_read.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "ns": "gpu__time_duration.sum",
}


def source() -> str:
    """Return the hash of what is counted and of how it is counted."""
    return provenance.source_hash(pathlib.Path(__file__), wgmma_gemm.SOURCE)


def find_cases() -> list[tuple[str, tuple[int, int, int]]]:
    """Return (kernel, shape) of each launch in its order."""
    return [(name, shape) for shape in SHAPES for name in ("cuBLAS", "WGMMA")]


@profiler.experiment("ch10_gemm_lines", source)
def count_lines():
    """Count the requests and the sectors of 32 bytes that the SMs read from L2, for aligned and unaligned rows."""
    cases, command = find_cases(), [sys.executable, "-m", "ch10.wgmma_gemm.lesson.audit"]
    rows = profiler.profile_launches(command, [name for name, _ in cases], METRICS)
    return [
        {
            **row,
            "shape": list(shape),
            "us": row["ns"] / 1e3,
            "row_bytes": 2 * shape[2],
            "sectors_per_request": row["sectors"] / row["requests"],
        }
        for row, (_, shape) in zip(rows, cases)
    ]


def launch_all() -> None:
    """Launch every case once for the profiler to watch."""
    for name, shape in find_cases():
        a, b, out = experiments.make_inputs(*shape)
        own = name == "WGMMA"
        profiler.launch_watched(
            wgmma_gemm.prepare(a, b, out=out) if own else experiments.prepare_cublas(a, b, out)
        )


if __name__ == "__main__":
    launch_all()
