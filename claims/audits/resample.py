"""Measurements for claims of the field note on resampling: who searches, and which elements a warp reads at once.

The lesson's versions differ in several things at once. The variants of resample.cu differ in one. All are timed in one
comparison. A second experiment counts what they read: the profiler watches `python -m claims.audits.resample`.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import torch

from ch07.resample import EXAMPLE
from ch07.resample.lesson import exercises
from tilelab import ROOT
from tilelab.cells import cuda_magic, lesson
from tilelab.measure import bench, profiler
from tilelab.records import results
from tilelab.runtime import device, provenance

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
NOTEBOOK = ROOT / "notebooks" / "02_ch07_resample.ipynb"
NOTE = SOURCE.with_name("note_v2.cu")
BESIDE = ("search_per_thread", "warp_search", "note_v2")  # kernels of its cells, and of the note
EVERY_THREAD, EVERY_LANE, LANE_0 = "every thread", "every lane", "lane 0"
SHARED, GLOBAL = "shared memory", "global memory"
NEIGHBOURS, EVERY_FOURTH, A_ROW_PER_LANE = "neighbours", "every fourth", "a row per lane"
SEARCHES = [(who, where) for who in (EVERY_THREAD, EVERY_LANE, LANE_0) for where in (GLOBAL, SHARED)]
ORDERS = (NEIGHBOURS, EVERY_FOURTH, A_ROW_PER_LANE)
PEER = "torch copy"
METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "shared_loads": "smsp__inst_executed_op_shared_ld.sum",  # instructions of a warp
    "shared_load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",  # of 32 bytes
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "ns": "gpu__time_duration.sum",
}


def find_variant(**constants: str | int) -> cuda_magic.CudaKernel:
    """Return a kernel of resample.cu, compiled with these -D constants and the lesson's DEPTH, TIMES and CHUNK."""
    named = {"DEPTH": exercises.DEPTH, "TIMES": exercises.TIMES, "CHUNK": exercises.CHUNK, **constants}
    kernels = cuda_magic.find_kernels(
        SOURCE.read_text(), [f"-D{key}={value}" for key, value in named.items()]
    )
    return kernels["search_variant" if "SEARCHES" in constants else "order_variant"]


def find_kernels() -> dict[str, cuda_magic.CudaKernel]:
    """Return the kernels of the lesson and the note's version 2, by name."""
    constants = ("-DDEPTH=128", "-DTIMES=1024", "-DCHUNK=64")
    return cuda_magic.notebook_kernels(NOTEBOOK) | cuda_magic.find_kernels(NOTE.read_text(), constants)


def _in_no_order(prepare: Callable) -> Callable:
    """Return a candidate that gets the targets of each batch in no order, so that neighbours need distant rows."""

    def prepare_shuffled(features, source_times, target_times, out):
        order = torch.randperm(target_times.shape[1], device=target_times.device)
        return prepare(features, source_times, target_times[:, order].contiguous(), out)

    return prepare_shuffled


def make_candidates(sms: int) -> dict[str, tuple[dict, Callable]]:
    """Return {name: (fields of its row, function of the lesson's tensors that returns a launch)}.

    `searches` says who searches for a target, `times` where the source times are read, `order` which elements a warp
    reads at once, and `grid` how many blocks there are. `sms` is for the note's grid.
    """
    cells = find_kernels()
    by_chunk, note_grid = exercises.by_chunk, f"{2 * sms} blocks"
    rows = {
        "note_v2": (LANE_0, SHARED, NEIGHBOURS, note_grid, by_chunk(cells["note_v2"], 2 * sms)),
        "note_v2, a block per chunk": (LANE_0, SHARED, NEIGHBOURS, "", by_chunk(cells["note_v2"])),
        "warp_search": (EVERY_LANE, SHARED, NEIGHBOURS, "", by_chunk(cells["warp_search"])),
        "search_per_thread": (
            EVERY_THREAD,
            GLOBAL,
            NEIGHBOURS,
            "a block per 256 elements",
            exercises.by_element(cells["search_per_thread"]),
        ),
    }
    for who, where in SEARCHES:
        kernel = find_variant(
            SEARCHES=who.upper().replace(" ", "_"), **({"TIMES": 0} if where == GLOBAL else {})
        )
        rows[f"{who} searches, times in {where}"] = (who, where, NEIGHBOURS, "", by_chunk(kernel))
    for order in ORDERS:
        prepare = by_chunk(find_variant(ORDER=order.upper().replace(" ", "_")))
        rows[f"shared search, {order}"] = ("one thread", SHARED, order, "", prepare)
        if order != EVERY_FOURTH:
            rows[f"shared search, {order}, targets in no order"] = (
                "one thread",
                SHARED,
                f"{order}, targets in no order",
                "",
                _in_no_order(prepare),
            )
    keys = ("searches", "times", "order", "grid")
    return {
        name: (dict(zip(keys, (*fields[:3], fields[3] or "a block per chunk"))), prepare)
        for name, (*fields, prepare) in rows.items()
    }


def source() -> str:
    """Return the hash of the variants and of the kernels beside them."""
    cells = find_kernels()
    ours = provenance.source_hash(SOURCE, find_variant, make_candidates, _in_no_order)
    return lesson.ladder_hash([ours, *(cells[name].source_hash() for name in BESIDE)])


@results.experiment("ch07_resample_searches", source)
def compare_searches():
    """Check every candidate, then time all of them interleaved, beside torch's copy of the bytes that must move."""
    candidates = make_candidates(device.current().sms)
    # The last two kernels get their targets in no order when they are timed. The check covers that by its odd times.
    faults = {
        name: exercises.find_fault(prepare, "cuda")
        for name, (_, prepare) in candidates.items()
        if not _is_shuffled(name)
    }
    right = {name: prepare for name, (_, prepare) in candidates.items() if not faults.get(name)}
    timed = bench.compare(
        {PEER: exercises.prepare_copy, **right}, exercises.make_inputs, PEER, nbytes=exercises.count_bytes()
    )
    rows = []
    for name, (fields, _) in candidates.items():
        row = timed[name].row() if name in right else {"status": "wrong", "reason": faults[name]}
        rows.append({"name": name, **fields, "shape": list(EXAMPLE), **row})
    return rows


def _is_shuffled(name: str) -> bool:
    return name.endswith("in no order")


@profiler.experiment("ch07_resample_reads", source)
def count_reads():
    """Count what every candidate reads and writes, by the profiler."""
    candidates = make_candidates(device.current().sms)
    rows = profiler.profile_launches(
        [sys.executable, "-m", "claims.audits.resample"], list(candidates), METRICS
    )
    return [{**row, **candidates[row["name"]][0], "shape": list(EXAMPLE), "status": "ok"} for row in rows]


def launch_all() -> None:
    """Launch every candidate once for the profiler to watch."""
    given = exercises.make_inputs()
    for _, prepare in make_candidates(device.current().sms).values():
        profiler.launch_watched(prepare(*given))


if __name__ == "__main__":
    launch_all()
