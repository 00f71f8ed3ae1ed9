"""Profile the fp8 kernel and its isolated parts with Nsight Compute.

`python -m ch14.fp8_gemm.lesson.profile` is what the profiler watches; `python -m ch14.fp8_gemm --mode profile` runs it.
"""

from __future__ import annotations

import functools
import sys

from ch14.fp8_gemm.lesson import isolated
from ch14.fp8_gemm.lesson.experiments import FP8_SOURCES, operand_bytes, prepare_course
from ch14.fp8_gemm.lesson.verification import fp8_operands
from tilelab.measure import profiler
from tilelab.records import results
from tilelab.runtime import provenance

# What a stalled warp waits for: all reasons that ncu counts on Hopper, except `not_selected` (the warp could go on).
METRIC_OF = {"branch": "branch_resolving", "dispatch": "dispatch_stall", "math pipe": "math_pipe_throttle"}
METRIC_OF["instruction cache"] = "no_instruction"
REASONS = "barrier, branch, dispatch, drain, GMMA, instruction cache, LG throttle, long scoreboard, math pipe, membar"
REASONS += ", MIO throttle, short scoreboard, sleeping, wait"
STALLS = {}
for reason in REASONS.split(", "):
    metric = METRIC_OF.get(reason, reason.lower().replace(" ", "_"))
    STALLS[f"stalled, {reason}"] = f"smsp__average_warps_issue_stalled_{metric}_per_issue_active.ratio"
METRICS = {
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "ns": "gpu__time_duration.sum",
    **STALLS,
}


def find_cases() -> list[tuple[str, tuple[int, int, int]]]:
    """Return (name, shape) of what is profiled: the kernel and its parts at each of `isolated.SHAPES`."""
    return [(name, shape) for shape in isolated.SHAPES for name in ("whole kernel", *isolated.PARTS)]


def make_launch(name: str, shape: tuple[int, int, int]):
    """Return a launch of the kernel, or of one of `isolated.PARTS`, on random operands on the GPU."""
    prepare = prepare_course() if name == "whole kernel" else isolated.prepare_part(name)
    return prepare(*fp8_operands(*shape))


@profiler.experiment(
    "ch14_blockscaled_profile",
    functools.partial(provenance.source_hash, *FP8_SOURCES, make_launch, isolated.prepare_part),
)
def profile_parts():
    """Profile one launch of every case, with an empty L2 cache at its start.

    A row has the METRICS. A stall is the number of clocks that warps waited for this reason per issued instruction.
    `least_bytes` are moved if every element of the operands and of C moves once.
    """
    cases = find_cases()
    rows = profiler.profile_launches(
        [sys.executable, "-m", "ch14.fp8_gemm.lesson.profile"], [name for name, _ in cases], METRICS
    )
    return [
        {**row, "shape": list(shape), "status": "ok", "least_bytes": operand_bytes(*shape)}
        for row, (_, shape) in zip(rows, cases)
    ]


def tabulate(record: results.Record) -> results.Table:
    """Return a table of the counters with the three longest stalls of each launch of `profile_parts`."""
    rows = []
    for row in record.rows:
        longest = sorted(STALLS, key=lambda name: -row[name])[:3]
        stalls = ", ".join(f"{name.removeprefix('stalled, ')} {row[name]:.1f}" for name in longest)
        shown = {"shape": row["shape"], "name": row["name"], "longest stalls, clocks per instruction": stalls}
        shown |= {"tensor pipe %": row["tensor_percent"], "bank conflicts": row["conflicts"]}
        moved = row["read_bytes"] + row["written_bytes"]
        rows.append(shown | {"wavefronts": row["wavefronts"], "DRAM × least": moved / row["least_bytes"]})
    return results.table(rows, record.label(), list(rows[0]))


def launch_all() -> None:
    """Launch every case once for the profiler to watch."""
    for name, shape in find_cases():
        profiler.launch_watched(make_launch(name, shape))


if __name__ == "__main__":
    launch_all()
