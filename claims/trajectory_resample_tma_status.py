"""Claims of the field note "TMA Optimization Implementation Status": resampling trajectories on an H100, in phases."""

from __future__ import annotations

import dataclasses

import torch

from ch07.resample.lesson import figures
from claims import builds
from claims.audits import resample as audit
from claims.judge import (
    ARITHMETIC,
    BUILT,
    MEASURED,
    UNTESTED,
    Finding,
    Note,
    Quote,
    decide,
    format_range,
    is_at_least,
    is_better,
    is_within,
)
from tilelab.measure import bench
from tilelab.runtime import device

NOTE = Note(
    "TMA Optimization Implementation Status (trajectory resampling)",
    "H100",
    "The note plans a faster interpolation between samples for an H100 in three phases. The first phase is "
    "written, "
    "and nothing has been measured yet. The note is unsigned and dated 5 November 2025.",
)
LANE_BYTES, FORMAT = 2, torch.bfloat16  # of a load in the note's listing, and of its features
COUNTERS, VERSION_2 = (
    ("ch07_resample", "What the counters say"),
    ("ch07_resample", "Step 2: the note's version 2"),
)
SEARCH, COALESCED = "2. Warp-Level Binary Search with __shfl_sync", "4. Coalesced Memory Access Pattern"


def get_steps(evidence) -> dict[str, dict]:
    """Return the rows of the module's kernels at D = 128, by name."""
    return {row["name"]: row for row in evidence("ch07_resample_ladder") if row["shape"][3] == 128}


def get_versions(evidence) -> dict[str, float]:
    """Return the speed of the lesson's versions over torch's copy, by name."""
    return {row["name"]: row["ratio"] for row in evidence("ch07_resample_versions")}


def get_counters(evidence) -> dict[str, dict]:
    """Return the counters of Nsight Compute, by kernel."""
    return {row["kernel"]: row for row in evidence("ch07_resample_ncu")}


def get_searches(evidence) -> dict[tuple[str, str], float]:
    """Return the speed of the variants that differ in their search alone, by who searches and where the times are."""
    rows = evidence.find("ch07_resample_searches", order=audit.NEIGHBOURS, status="ok")
    return {(row["searches"], row["times"]): row["ratio"] for row in rows if " searches, " in row["name"]}


def share_written(warps: int, depth: int = 128) -> float:
    """Return the share of the outputs that the two printed parts write in a block of `warps` warps.

    Each warp owns a target, as in the note's search, and visits every feature d = tid, tid + blockDim.x, …
    """
    visited = sum((d // 32) % warps == warp for warp in range(warps) for d in range(depth))
    return visited / (warps * depth)


@NOTE.claim(
    "The kernel of Phase 1 is complete.",
    (
        Quote("Phase 1 (Warp Optimizations): Complete", "Current Status"),
        Quote("for (int d = tid; d < D; d += blockDim.x)", COALESCED),
    ),
    ("ch07_resample", "Check before timing"),
    "the search and the loop over features, as printed, write every output together for any size of a block",
    ARITHMETIC,
    "the two listings",
)
def complete(evidence):
    shares = {warps: share_written(warps) for warps in (1, 8, 32)}
    written = ", ".join(
        f"{100 * share:.0f} % with {warps} warps" for warps, share in shares.items() if warps > 1
    )
    return decide(
        min(shares.values()) == 1,
        "The note prints parts of its kernel and no size of a block. The search "
        "gives each warp a target, and the loop steps through its features by all threads of the block. "
        f"Together they write {written}.",
        "a block is a single warp",
        shares[1] == 1,
    )


@NOTE.claim(
    "A search by lane 0 alone reads shared memory 32 times less.",
    Quote("Reduces shared memory reads by 32x per warp", SEARCH),
    VERSION_2,
    "the same kernel takes 32 times the wavefronts of shared memory where all lanes search",
    MEASURED,
    "NVIDIA H200, Nsight Compute",
    about="",
)
def fewer_reads(evidence):
    wavefronts = {row["name"]: row["shared_load_wavefronts"] for row in evidence.find("ch07_resample_reads")}
    serves = "A wavefront serves any number of lanes that read one word."
    if not wavefronts:
        all_lanes, lane_0 = figures.count_wavefronts([511] * 32), figures.count_wavefronts([511] + [-1] * 31)
        found = decide(
            is_at_least(all_lanes, 32 * lane_0),
            f"{serves} A read by 32 lanes takes {all_lanes}, and a read by lane 0 takes {lane_0}.",
        )
        return dataclasses.replace(found, evidence=f"{ARITHMETIC}: the 32 banks of shared memory")
    all_lanes, lane_0 = wavefronts["warp_search"], wavefronts["note_v2, a block per chunk"]
    return decide(
        is_at_least(all_lanes, 32 * lane_0),
        f"{serves} Loads take {all_lanes / 1e6:.1f} million wavefronts "
        f"where all lanes search and {lane_0 / 1e6:.1f} million where lane 0 does, "
        f"{all_lanes / lane_0:.2f} times.",
    )


@NOTE.claim(
    "A search by lane 0 gains 1.2 to 1.5 times over a search by every lane.",
    (
        Quote("1.2-1.5x improvement from reduced redundant work", SEARCH),
        Quote("Eliminates redundant binary search across 32 threads", SEARCH),
    ),
    VERSION_2,
    "with the times in shared memory and a block per chunk in both, lane 0's search is 1.2 to 1.5 times as "
    "fast as a search by all 32 lanes",
)
def warp_search(evidence):
    speed, variants = get_versions(evidence), get_searches(evidence)
    if not variants:
        gain = speed["note_v2, a block per chunk"] / speed["warp_search"]
        return decide(
            is_within(gain, 1.2, 1.5),
            f"It runs at {gain:.2f} × the speed of the same kernel in which all lanes search.",
        )
    over_lanes, over_threads, over_lanes_in_global = (
        variants[audit.LANE_0, where] / variants[who, where]
        for who, where in (
            (audit.EVERY_LANE, audit.SHARED),
            (audit.EVERY_THREAD, audit.SHARED),
            (audit.EVERY_LANE, audit.GLOBAL),
        )
    )
    return decide(
        is_within(over_lanes, 1.2, 1.5),
        f"It runs at {over_lanes:.2f} × the speed of the same kernel in "
        f"which all lanes search ({over_lanes_in_global:.2f} × with the times in global memory), and at "
        f"{over_threads:.2f} × that of one in which every thread searches again for each element.",
        "every thread searched again for each element before",
        is_within(over_threads, 1.2, 1.5),
    )


@NOTE.claim(
    "Phase 1 as a whole makes the kernel 1.5 to 2 times as fast.",
    (
        Quote("Warp optimizations: 1.5-2x speedup", "Realistic Expectations"),
        Quote("Warp optimizations: 1.2-1.5x speedup", "Realistic Expectations"),
    ),
    VERSION_2,
    "the note's version 2 on its grid is 1.5 to 2 times as fast as a kernel in which every thread searches",
)
def phase_one_gain(evidence):
    speed = get_versions(evidence)
    whole, chunks = (
        speed[name] / speed["search_per_thread"] for name in ("note_v2", "note_v2, a block per chunk")
    )
    return decide(
        is_within(whole, 1.5, 2),
        f"It gains {whole:.2f} ×, within the note's worst case of 1.2 to 1.5. With "
        f"a block per chunk it gains {chunks:.2f} ×."
        if is_within(whole, 1.2, 1.5)
        else f"It gains {whole:.2f} ×. With a block per chunk it gains {chunks:.2f} ×.",
        "there is a block per chunk",
        is_within(chunks, 1.5, 2),
    )


@NOTE.claim(
    "A persistent grid of two blocks per multiprocessor is faster than a block per piece of work.",
    Quote(
        "Better SM occupancy (fixed block count matches hardware)", "1. Persistent Thread Block Architecture"
    ),
    VERSION_2,
    "the note's kernel is faster on the note's grid than with a block per chunk",
)
def persistent(evidence):
    speed, steps = get_versions(evidence), get_steps(evidence)
    gain = speed["note_v2"] / speed["note_v2, a block per chunk"]
    best = steps["persistent"]["ratio"] / steps["vectors"]["ratio"]
    return decide(
        is_better(gain, 1),
        f"The note's kernel runs at {gain:.2f} × the speed that it has with a block per "
        f"chunk, and the fastest kernel of this course at {best:.2f} ×. Either way there is one launch.",
    )


@NOTE.claim(
    "32 lanes × 2 bytes × 2 loads make transactions of 128 bytes.",
    Quote("32 threads × 2 bytes BF16 × 2 loads = 128B", COALESCED),
    ("ch07_resample", "Step 5: 16-byte vectors"),
    "one of the requests of a warp is 128 bytes long",
    ARITHMETIC,
    "the listing",
)
def transactions(evidence):
    requests = [32 * LANE_BYTES] * 2  # the left row and the right row are two places in memory
    return decide(
        max(requests) >= 128,
        f"The two loads go to two rows, so they are {len(requests)} requests of "
        f"{requests[0]} bytes. Loads of 16 bytes per lane make requests of {32 * 16}.",
    )


@NOTE.claim(
    "Coalescing gains 1.5 to 2 times.",
    Quote("1.5-2x improvement from memory coalescing", COALESCED),
    ("ch07_resample", "Step 5: 16-byte vectors"),
    "the kernel in which neighbouring lanes read neighbouring elements is 1.5 to 2 times as fast as the same "
    "kernel with lanes that read every fourth element, or that each read a row",
)
def coalescing(evidence):
    steps = get_steps(evidence)
    speed = {
        row["order"]: row["ratio"]
        for row in evidence.find("ch07_resample_searches", searches="one thread", status="ok")
    }
    if not speed:
        gain = steps["vectors"]["ratio"] / steps["shared_search"]["ratio"]
        return Finding(
            UNTESTED,
            "Every recorded kernel is coalesced. Loads of 16 bytes per lane, where 2 were loaded "
            f"before, gain {gain:.2f} ×.",
            "no kernel with scattered loads has been recorded",
        )
    gains = {
        "every fourth element": speed[audit.NEIGHBOURS] / speed[audit.EVERY_FOURTH],
        "a row each": speed[audit.NEIGHBOURS] / speed[audit.A_ROW_PER_LANE],
    }
    inside = [what for what, gain in gains.items() if is_within(gain, 1.5, 2)]
    listed = " and ".join(f"{gain:.2f} × over lanes that read {what}" for what, gain in gains.items())
    return decide(
        len(inside) == len(gains),
        f"It gains {listed}.",
        f"the lanes read {' and '.join(inside)} before",
        bool(inside),
    )


@NOTE.claim(
    "The warp-level search brings DRAM to 35 to 45 % of its peak.",
    (
        Quote("DRAM BW: 35-45% (1.5-2x improvement from coalescing)", "Validation Plan"),
        Quote("DRAM BW: 35-40%", "Realistic Expectations"),
    ),
    COUNTERS,
    "the profiler counts 35 to 45 % for the kernel with the note's search and grid",
)
def phase_one(evidence):
    percent = get_counters(evidence)["lane0_search"]["dram_percent"]
    return decide(is_within(percent, 35, 45), f"It reaches {percent:.0f} % of an H200's peak.")


@NOTE.claim(
    "The warp-level search brings the multiprocessors to 8 to 12 % and the L1 cache to 10 to 15 % utilisation.",
    (
        Quote("SM Util: 8-12% (still memory-bound, but better)", "Validation Plan"),
        Quote("L1 Cache: 10-15%", "Validation Plan"),
    ),
    COUNTERS,
    "the profiler counts both within these bands for the kernel with the note's search and grid",
)
def phase_one_units(evidence):
    row = get_counters(evidence)["lane0_search"]
    return decide(
        is_within(row["sm_percent"], 8, 12) and is_within(row["l1_percent"], 10, 15),
        f"The multiprocessors reach {row['sm_percent']:.0f} % and L1 {row['l1_percent']:.0f} %.",
    )


@NOTE.claim(
    "Resampling can reach 60 to 80 % of the peak DRAM bandwidth.",
    Quote("Target 60-80% is aggressive but achievable", "Comparison to Flash Attention 3"),
    COUNTERS,
    "the profiler counts at least 60 % for a kernel of this course",
)
def target(evidence):
    plain, tma = (get_counters(evidence)[name]["dram_percent"] for name in ("vectors", "bulk_rows"))
    return decide(
        is_at_least(max(plain, tma), 60),
        f"Plain 16-byte loads reach {plain:.0f} % and rows by TMA {tma:.0f} %.",
    )


@NOTE.claim(
    "TMA is needed to reach 60 to 80 % of the peak DRAM bandwidth.",
    Quote("TMA investment required for target 60-80%", "Realistic Expectations"),
    COUNTERS,
    "no kernel without TMA reaches 60 %",
)
def tma_required(evidence):
    percent, steps = get_counters(evidence)["vectors"]["dram_percent"], get_steps(evidence)
    gain = steps["bulk_rows"]["ratio"] / steps["vectors"]["ratio"]
    return decide(
        not is_at_least(percent, 60),
        f"Plain loads reach {percent:.0f} %. The same kernel with rows by TMA "
        "runs "
        f"at {gain:.2f} × their speed.",
    )


@NOTE.claim(
    "Resampling is bound by memory by its nature.",
    Quote("Lower arithmetic intensity (memory-bound by nature)", "Comparison to Flash Attention 3"),
    COUNTERS,
    "with the note's search, DRAM is nearer to its peak than the issue slots are to theirs",
)
def memory_bound(evidence):
    counters = get_counters(evidence)
    steps = {
        "the note's search": counters["lane0_search"],
        "a shared search and 16-byte loads": counters["vectors"],
    }
    figure = "; ".join(
        f"with {what} DRAM reaches {row['dram_percent']:.0f} % and the issue slots "
        f"{row['issue_percent']:.0f} %"
        for what, row in steps.items()
    )
    first, last = (row["dram_percent"] > row["issue_percent"] for row in steps.values())
    return decide(first, f"{figure[0].upper()}{figure[1:]}.", "searches are shared and loads are wide", last)


def compare_pointwise(evidence) -> dict[str, tuple[float, float]]:
    """Return {function: (% of DRAM's peak without TMA, gain of TMA)} of the functions that torch.compile built twice.

    Each function does a few operations per element, so bytes are its limit. A function without TMA in either kernel is
    left out, and so is one that moves less than 64 MiB, where a launch takes as long as the bytes.
    """
    rows = [
        row
        for row in evidence.find("ch14_compiled_pointwise", status="ok")
        if row["tma_loads"] + row["tma_stores"] and row["mib"] >= 64
    ]
    return {
        row["case"]: (100 * row["gbps"] / row["ratio"] / device.KNOWN["H200"].peak_gbps, row["ratio"])
        for row in rows
    }


@NOTE.claim(
    "TMA pays where a kernel is bound by memory and uses less than 50 % of the DRAM bandwidth.",
    Quote("Warp optimizations achieve <50% DRAM BW", "Decision Criteria"),
    COUNTERS,
    "TMA makes each measured kernel to which both conditions apply faster, and no other one",
)
def decision_rule(evidence):
    counters, steps = get_counters(evidence), get_steps(evidence)
    gain = steps["bulk_rows"]["ratio"] / steps["vectors"]["ratio"]
    cases = {
        name: (row["dram_percent"], steps["bulk_rows"]["ratio"] / steps[name]["ratio"])
        for name, row in counters.items()
        if name != "bulk_rows"
        and row["issue_percent"] < row["dram_percent"]
        and (name == "vectors" or row["dram_percent"] < 50)
    }  # only vectors differs from bulk_rows in TMA alone
    cases |= compare_pointwise(evidence)
    advised = [gain for percent, gain in cases.values() if percent < 50]
    others = [gain for percent, gain in cases.values() if percent >= 50]
    figure = (
        f"The rule advises against TMA for plain 16-byte loads, and rows by TMA run at {gain:.2f} × their speed, "
        "so this advice is right."
    )
    if not advised:
        return Finding(UNTESTED, figure, "no measured kernel meets both conditions")
    right = [sum(is_better(gain, 1) for gain in advised), sum(not is_better(gain, 1) for gain in others)]
    below, above = (f"{count} kernel{'s' * (count != 1)}" for count in map(len, (advised, others)))
    return decide(
        right == [len(advised), len(others)],
        f"Of {below} below 50 %, TMA makes {right[0]} faster "
        f"({format_range(advised)} ×). Of {above} at 50 % or more, {right[1]} "
        f"{'does' if right[1] == 1 else 'do'} not gain ({format_range(others)} ×)."
        if others
        else f"Of {below} below 50 %, TMA makes {right[0]} faster ({format_range(advised)} ×).",
    )


@NOTE.claim(
    "The kernel takes 138 µs before Phase 1, and 70 to 90 µs after it.",
    (
        Quote("Latency: ~138 µs", "Validation Plan"),
        Quote("Latency: 70-90 µs (1.5-2x speedup)", "Validation Plan"),
    ),
    ("ch07_resample", "The note's shapes"),
    "the note's two kernels take that long at the note's shape",
)
def latency(evidence):
    times = format_range((row["us"] for row in evidence("ch07_resample_note", name="lane0_search")), ".0f")
    return Finding(
        UNTESTED,
        f"The note's search takes {times} µs on an H200 at four shapes of its benchmark as published.",
        "the note names no shape, and its first kernel is not in it",
    )


@NOTE.claim(
    "1e-5 is the limit of bf16's precision.",
    Quote("Tolerance: 1e-5 (BF16 precision limit)", "NCU Profiling Infrastructure"),
    ("ch07_resample", "Check before timing"),
    "rounding to bf16 changes a number by at most 1e-5 of it",
    ARITHMETIC,
    "the format bf16",
)
def tolerance(evidence):
    half = torch.finfo(FORMAT).eps / 2
    return decide(
        half <= 1e-5,
        f"Rounding alone changes a number by up to {half:.4f} of it, {half / 1e-5:.0f} times as much.",
    )


@NOTE.claim(
    "The instruction of Option A loads a tile by TMA.",
    Quote(
        "cp.async.bulk.tensor.2d.shared.global [%0], [%1, {%2, %3}];",
        "Option A: CP.ASYNC.BULK (Hopper Native)",
    ),
    ("ch07_resample", "Step 7: the note's options"),
    "ptxas accepts the line",
    BUILT,
    "sm_90a (H100, H200), ptxas",
)
def option_a(evidence):
    error = builds.option_a_error()
    return decide(
        not error,
        f'ptxas says "{error}". A load by tensor map must name the mbarrier that it signals, '
        "and the "
        "line names none."
        if error
        else "ptxas accepts it.",
    )


@NOTE.claim(
    "Option B, the pipeline of CUDA's library, still gets TMA on Hopper.",
    Quote("Still gets TMA acceleration on Hopper", "Option B: CUDA 12.x Pipeline API"),
    ("ch07_resample", "Step 7: the note's options"),
    "its machine code holds an instruction of TMA",
    BUILT,
    "sm_90a (H100, H200), NVRTC",
)
def option_b(evidence):
    counts = builds.option_b_instructions()
    return decide(
        counts["TMA"] > 0,
        f"Its machine code holds {counts['TMA']} instructions of TMA and "
        f"{counts['LDGSTS']} "
        "LDGSTS, the copy by single threads that Ampere introduced.",
    )


@NOTE.claim(
    "FlashAttention-3 uses more than 80 % of the DRAM bandwidth.",
    Quote("Flash Attention 3 (80%+ DRAM BW)", "Comparison to Flash Attention 3"),
    ("ch14_attention", "The situation"),
    "in the forward pass the bytes that must move take 80 % of the tensor cores' least time, for 512 to "
    "16,384 tokens",
    ARITHMETIC,
    "H100, datasheet rates",
)
def attention_bandwidth(evidence):
    h100 = device.KNOWN["H100 SXM"]
    roof = bench.Ceilings(h100.peak_gbps, h100.bf16_tflops)
    heads, depth = 64, 128

    def percent(tokens):  # Q, K, V and the output in bf16 against the two products
        moved = bench.floor_ms(roof, nbytes=4 * heads * tokens * depth * 2)
        return min(100.0, 100 * moved / bench.floor_ms(roof, flops=4 * heads * tokens**2 * depth))

    shares = {tokens: percent(tokens) for tokens in (512, 1024, 8192, 16384)}
    listed = ", ".join(f"{share:.0f} % at {tokens:,} tokens" for tokens, share in shares.items())
    return decide(
        min(shares.values()) >= 80,
        "The bytes that must move keep DRAM busy for at most these "
        f"shares of the time: {listed}. For longer sequences the tensor cores are the limit.",
        "sequences are short",
        max(shares.values()) >= 80,
    )
