"""Claims of the field note "TMA Configuration Fix Proposal": six aggressive tiles in place of three cautious ones."""

from __future__ import annotations

import collections

from ch14.gemm.configs import parse
from claims import builds
from claims.judge import (
    ABOUT,
    ARITHMETIC,
    BUILT,
    QUICK_MARGIN,
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
    "TMA Configuration Fix Proposal",
    "B200",
    "The note proposes six large tile configurations for a Triton GEMM on a B200 in place of three cautious "
    "ones, "
    "and "
    'larger tiles for a copy. It is signed "AI Performance Engineering Analysis" and dated 28 October 2025.',
)
CLAIMED = {2048: 1.52, 4096: 1.84, 8192: 1.92}  # the aggressive tiles' speed over the cautious ones', by size
REPORT, GUIDE = "[SM 10.0] TMA descriptor compilation fails with deep pipelines", "TMA Setup Guide for GB10"
MEASURE, COPY = ("ch14_gemm", "Measure the claim"), ("ch14_gemm", "And the copy?")


def get_ratio(row: dict) -> float:
    """Return a row's speed over cuBLAS in the pass that timed every configuration at full length.

    Only some rows were timed a second time, so that second pass would compare unlike with like.
    """
    return row["ratio"]


def fastest(evidence, name: str) -> list[dict]:
    """Return the fastest configuration of one kind at each size."""
    rows = evidence("ch14_gemm_claim", name=name, status="ok")
    chosen = []
    for n in CLAIMED:
        here = [row for row in rows if row["shape"] == [n] * 3]
        chosen.append(max(here, key=get_ratio))
    return chosen


def find_gains(evidence, name: str) -> list[float]:
    """Return the speed of one kind of configuration over the cautious ones, at each size.

    Both were timed against cuBLAS beside them, so the ratios are compared and not the times: the clock moves.
    """
    return [
        get_ratio(new) / get_ratio(old)
        for new, old in zip(fastest(evidence, name), fastest(evidence, "conservative"))
    ]


def find_final_gains(evidence) -> list[float]:
    """Return the proposed tiles' speed over the cautious ones' in the second pass, at each size.

    The second pass interleaved the fastest few of each size, some of either kind.
    """
    gains = []
    for n in CLAIMED:
        new, old = (
            max(
                row["final_ratio"]
                for row in evidence("ch14_gemm_claim", name=name, shape=[n] * 3)
                if row.get("final_ratio")
            )
            for name in ("proposed", "conservative")
        )
        gains.append(new / old)
    return gains


def format_gains(gains: list[float]) -> str:
    return ", ".join(f"{gain:.2f}" for gain in gains) + " × at 2048³, 4096³ and 8192³"


@NOTE.claim(
    "The six proposed GEMM configurations are tested and work.",
    (
        Quote("All proposed configs verified working", "Low Risk"),
        Quote("aggressive TMA configurations now compile and execute successfully", "1. Bug Status"),
    ),
    ("ch14_gemm", "Build all nine, for five GPU generations"),
    "all six fit into the shared memory and registers of a B200 and of an H200",
    BUILT,
    "sm_100a (B200) and sm_90a (H200), installed Triton",
    about="",
)
def tested_and_working(evidence):
    rows = evidence("ch14_gemm_claim", name="proposed")
    on_h200 = {row["config"] for row in rows if row["status"] == "ok"}
    reasons = builds.proposed_on_b200()
    return decide(
        not any(reasons.values()) and len(on_h200) == len(reasons),
        f"{sum(not reason for reason in reasons.values())} of {len(reasons)} can be launched on a B200 and "
        f"{len(on_h200)} of {len({row['config'] for row in rows})} on an H200. The others exceed "
        "the shared memory or the registers of a block.",
    )


@NOTE.claim(
    "The aggressive configurations are 1.52, 1.84 and 1.92 times as fast as the cautious ones.",
    Quote("+52% to +92% (matrix size dependent)", "Expected Benefits"),
    MEASURE,
    "the gain is at least the claimed one at each of the three sizes, where each is timed beside cuBLAS and "
    "where the fastest are interleaved",
)
def speedup(evidence):
    gains, final = find_gains(evidence, "proposed"), find_final_gains(evidence)
    return decide(
        all(map(is_at_least, gains + final, [*CLAIMED.values()] * 2)),
        f"The fastest that starts gains {format_gains(gains)} (interleaved "
        f"{', '.join(f'{gain:.2f}' for gain in final)}).",
    )


@NOTE.claim(
    "Larger matrices gain more from the aggressive configurations.",
    Quote("Larger matrices benefit more (1.5x → 1.9x)", "2. Performance Impact"),
    MEASURE,
    "the gain grows from each size to the next by more than the margin",
)
def larger_gain_more(evidence):
    gains = find_gains(evidence, "proposed")
    return decide(
        all(is_better(after, before) for before, after in zip(gains, gains[1:])),
        f"The gain is {format_gains(gains)}.",
    )


@NOTE.claim(
    "The aggressive configurations bring Triton closer to cuBLAS.",
    Quote("Closer to cuBLAS/CUTLASS performance levels", "Competitiveness"),
    MEASURE,
    "they are nearer to cuBLAS's speed than the cautious ones at each size",
)
def closer_to_cublas(evidence):
    before, after, best = (
        [get_ratio(row) for row in fastest(evidence, name)] for name in ("conservative", "proposed", "best")
    )
    return decide(
        all(map(is_better, after, before)),
        f"The cautious ones reach {format_range(before)} × cuBLAS, those of the note that start "
        f"{format_range(after)}, and the tiles of this course {format_range(best)}.",
    )


@NOTE.claim(
    "The cautious configurations cost a factor of about 1.5 to 2.",
    (
        Quote("Current Performance Loss: 1.5-2x slower than optimal", "Executive Summary"),
        Quote("~2x slower than hardware capability", "Performance Degradation", REPORT),
        Quote(
            "This is ~2x slower than optimal, but required to avoid crash",
            "1. Triton 3.5 Compiler Bug",
            GUIDE,
        ),
    ),
    MEASURE,
    f"the best configuration is 1.5 to 2 times as fast, or up to {2 * (1 + ABOUT):g} since the notes say about",
)
def cost_of_caution(evidence):
    gains = find_gains(evidence, "best")
    return decide(
        all(is_within(gain, 1.5, 2 * (1 + ABOUT)) for gain in gains),
        f"Relative to the cautious ones, this course's best tiles run at {format_gains(gains)}.",
    )


@NOTE.claim(
    "A B200 reaches 175 to 209 TFLOP/s with the cautious configurations and 265 to 402 with the aggressive "
    "ones.",
    (
        Quote("401.9 TFLOPS", "2. Performance Impact"),
        Quote("200-210 TFLOPS (conservative config)", "Performance Degradation", REPORT),
    ),
    MEASURE,
    "a B200 gives these figures",
)
def figures_of_a_b200(evidence):
    before, after = (
        format_range((2 * row["shape"][0] ** 3 / row["ms"] / 1e9 for row in fastest(evidence, name)), ".0f")
        for name in ("conservative", "proposed")
    )
    return Finding(UNTESTED, f"An H200 reaches {before} and {after} TFLOP/s.", "no B200 was measured")


@NOTE.claim(
    "The aggressive configurations make no small matrix slower.",
    Quote("Confirm no regressions on small matrices", "Phase 1: Validation"),
    MEASURE,
    "they are not slower than the cautious ones at any size below 2048³, within the margin",
)
def small_matrices(evidence):
    best = collections.defaultdict(dict)
    for row in evidence("ch14_gemm_claim", status="ok"):
        if max(row["shape"]) < min(CLAIMED):
            kinds = best[max(row["shape"])]
            kinds[row["name"]] = max(kinds.get(row["name"], 0), get_ratio(row))
    if not best:
        return Finding(
            UNTESTED,
            "The smallest recorded size is 2048³, the smallest of the note's table.",
            "no smaller size was measured",
        )
    gains = {n: kinds["proposed"] / kinds["conservative"] for n, kinds in sorted(best.items())}
    figures = ", ".join(f"{n}³ {gain:.2f}" for n, gain in gains.items())
    return decide(
        all(is_at_least(gain, 1) for gain in gains.values()), f"Speed over the cautious ones: {figures} ×."
    )


@NOTE.claim(
    "The share of memory bandwidth shows what larger tiles gain for a GEMM: it doubles from 2.5 to 4.7 %.",
    Quote("Bandwidth utilization doubles (2.5% → 4.7% for 4K)", "2. Performance Impact"),
    MEASURE,
    "a 4096³ product takes longer for its bytes than for its operations, so that bandwidth is its limit",
    ARITHMETIC,
    "B200, datasheet rates",
)
def utilisation_is_the_measure(evidence):
    b200 = device.KNOWN["B200"]
    roof = bench.Ceilings(b200.peak_gbps, b200.bf16_tflops)
    compute, memory = (
        1e3 * bench.floor_ms(roof, flops=2 * 4096**3),
        1e3 * bench.floor_ms(roof, nbytes=6 * 4096**2),
    )
    return decide(
        memory > compute,
        f"On a B200 the tensor cores need at least {compute:.0f} µs and memory "
        f"{memory:.0f} µs, so the tensor cores are the limit and a share of bandwidth measures something "
        "else.",
    )


def count_dram(evidence) -> dict[tuple[str, int], dict]:
    """Return the DRAM counters of the fastest tile of each kind, by kind and size; {} where none were recorded."""
    fastest = {}
    for row in evidence.find("ch14_gemm_dram"):
        key = row["name"], row["shape"][0]
        if key not in fastest or row["ns"] < fastest[key]["ns"]:
            fastest[key] = row
    return fastest


@NOTE.claim(
    "The aggressive configurations use 70 to 90 % of the memory bandwidth, where 30 to 50 % were used before.",
    Quote("30-50% → 70-90% utilization", "Resource Utilization"),
    MEASURE,
    "the profiler counts these shares of the DRAM's peak for the fastest tile of either kind at each size",
)
def bandwidth_used(evidence):
    copy, product = evidence("ceilings")
    counted = count_dram(evidence)
    if not counted:
        roof = bench.Ceilings(copy["gbps"], product["tflops"])
        shares = [
            100 * bench.floor_ms(roof, nbytes=6 * n**2) / bench.floor_ms(roof, flops=2 * n**3)
            for n in CLAIMED
        ]
        return Finding(
            UNTESTED,
            f"On an H200 the bytes that must move take {format_range(shares, '.0f')} % of a "
            "copy's bandwidth at cuBLAS's speed. The same note reports 4.7 %.",
            "the DRAM traffic has not been counted",
        )
    before, after = (
        [counted[name, n]["dram_percent"] for n in CLAIMED] for name in ("conservative", "proposed")
    )
    as_claimed = [
        *(is_within(share, 30, 50) for share in before),
        *(is_within(share, 70, 90) for share in after),
    ]
    return decide(
        all(as_claimed),
        f"The cautious ones use {format_range(before, '.0f')} % of an H200's bandwidth and "
        f"the proposed ones that start {format_range(after, '.0f')} %. The same note reports 4.7 %.",
    )


def compare_warps(evidence) -> dict[tuple, float]:
    """Return, for each tile, depth and size that was timed with 4 and with 8 warps, the speed of 8 over that of 4."""
    by_tile = collections.defaultdict(dict)
    for row in evidence("ch14_gemm_sweep", status="ok"):
        each = parse(row["kernel"])
        tile = each.block_m, each.block_n, each.block_k, each.num_stages, row["shape"][0]
        by_tile[tile][each.num_warps] = row["ratio"]
    return {tile: by[8] / by[4] for tile, by in by_tile.items() if {4, 8} <= by.keys()}


@NOTE.claim(
    "More warps saturate the tensor core better.",
    Quote("Better saturation with more warps", "Resource Utilization"),
    ("ch14_gemm", "Search"),
    "the same tile with the same stages is faster with 8 warps than with 4, in most cases by more than 5 %",
)
def more_warps(evidence):
    gains = compare_warps(evidence)
    faster = sum(is_better(gain, 1, QUICK_MARGIN) for gain in gains.values())
    slower = sum(is_better(1, gain, QUICK_MARGIN) for gain in gains.values())
    best = {
        warps: [
            max(
                row["ratio"]
                for row in evidence("ch14_gemm_sweep", status="ok", shape=[n] * 3)
                if parse(row["kernel"]).num_warps == warps
            )
            for n in CLAIMED
        ]
        for warps in (4, 8)
    }
    return decide(
        faster > len(gains) / 2,
        f"8 warps are faster than 4 in {faster} of {len(gains)} cases and slower in "
        f"{slower}. Larger tiles, which only 8 warps have the registers for, reach "
        f"{format_range(best[8])} × "
        f"cuBLAS, and the best tiles of 4 warps {format_range(best[4])}.",
        "the tile does not fit the registers of 4 warps",
        all(map(is_better, best[8], best[4])),
    )


@NOTE.claim(
    "Deeper pipelines overlap loads and products better.",
    Quote("Better overlap from deeper pipelines", "Performance"),
    ("ch14_gemm", "Step 2: stages"),
    "each added stage makes a 4096³ product of the lesson's kernel faster",
)
def deeper_pipelines(evidence):
    speed = {row["stages"]: row["ratio"] for row in evidence("ch14_gemm_stages", kernel="descriptors")}
    listed = ", ".join(f"{ratio:.2f} with {stages}" for stages, ratio in sorted(speed.items()))
    gains = [is_better(speed[stages + 1], speed[stages]) for stages in sorted(speed) if stages + 1 in speed]
    return decide(
        all(gains),
        f"It runs at these multiples of cuBLAS's speed: {listed} stages.",
        "the stages do not yet cover the latency of a load",
        gains[0],
    )


@NOTE.claim(
    "Larger tiles improve the occupancy of the multiprocessors.",
    Quote("Improved with larger tile sizes", "Resource Utilization"),
    MEASURE,
    "the proposed configurations keep more warps per multiprocessor than the cautious ones",
)
def occupancy(evidence):
    warps = {
        name: {
            row["config"]: row["programs_per_sm"] * row["threads"] // 32
            for row in evidence("ch14_gemm_claim", name=name, status="ok")
        }
        for name in ("conservative", "proposed")
    }
    return decide(
        min(warps["proposed"].values()) > max(warps["conservative"].values()),
        "Of 64 warps per multiprocessor, the cautious ones keep "
        f"{format_range(warps['conservative'].values(), 'd')} "
        f"and the proposed ones that start {format_range(warps['proposed'].values(), 'd')}.",
    )


@NOTE.claim(
    "If a configuration fails, Triton's autotuner goes on with the others.",
    Quote("If a config fails, Triton falls back to alternatives", "Low Risk"),
    ("ch14_sweep", "The same faults and triton.autotune"),
    "the autotuner survives every planted fault",
    about="",
)
def autotune_fallback(evidence):
    faults, caught = evidence("sweep_autotune_faults"), builds.autotuner_catches()
    survived = sum("the right one" in row["autotune"] for row in faults)
    # Triton raises OutOfResources for shared memory, and ptxas refuses a kernel with too few registers.
    own = {
        row["config"]: "OutOfResources" if "shared memory" in row["reason"] else "PTXASError"
        for row in evidence("ch14_gemm_claim", name="proposed", status="rejected")
    }
    own_caught = sum(kind in caught for kind in own.values())
    return decide(
        survived == len(faults),
        f"It catches {', '.join(caught)}, the kinds of {own_caught} of the "
        f"{len(own)} proposed configurations that do not start. Of {len(faults)} planted faults of other "
        f"kinds ({', '.join(row['fault'] for row in faults)}) it survives {survived}.",
        "the failure is one of the kinds that it catches",
        own_caught == len(own),
    )


@NOTE.claim(
    "The failure of the latency assignment pass is fixed in Triton 3.5.",
    Quote("appears resolved in current Triton 3.5", "1. Bug Status"),
    ("ch14_bug_hunt", "Which versions, which GPUs"),
    "no build with Triton 3.5 fails in this pass",
    BUILT,
    "sm_100a, Triton 3.5.0 and 3.5.1",
)
def fixed_in_3_5(evidence):
    failed = {row["triton"] for row in evidence("ch14_bug_hunt_matrix", stage="TritonGPUAssignLatencies")}
    rows = [row for row in evidence("ch14_bug_hunt_loop") if row["triton"].startswith("3.5")]
    failures = [row for row in rows if row["outcome"] == "fails"]
    carried = sum(row["LOOP"].startswith("carry") for row in failures)
    plain = sum(row["LOOP"] == "plain" for row in failures)
    return decide(
        not any(version.startswith("3.5") for version in failed),
        f"It fails in {' and '.join(sorted(failed)) or 'none'}: {len(failures)} of {len(rows)} builds with "
        f"3.5.1, of which {carried} are of loops that carry a tile and {plain} of the loop that the notes "
        "show.",
    )


@NOTE.claim(
    "Large tiles are the best for a copy.",
    Quote("Large tile configs for bulk transfers (optimal for HBM3e)", "Update TMA Copy Configs"),
    COPY,
    "256 × 256 is faster than every smaller tile by more than the margin",
)
def large_copies(evidence):
    rows = sorted(evidence("ch14_gemm_copy", status="ok"), key=lambda row: -row["ratio"])
    large = max(row["ratio"] for row in rows if row["config"].startswith("256×256"))
    others = [row for row in rows if not row["config"].startswith("256×256")]
    tile = others[0]["config"].partition(" ")[0].replace("×", " × ")
    return decide(
        is_better(large, others[0]["ratio"]),
        f"256 × 256 reaches {large:.3f} of torch's copy and {tile} "
        f"reaches {others[0]['ratio']:.3f}. All tiles lie between "
        f"{format_range((row['ratio'] for row in rows), '.3f').replace(' to ', ' and ')}.",
    )


@NOTE.claim(
    "The proposed list of copy configurations is faster than the present one.",
    Quote("Blackwell B200 optimized TMA copy configurations", "Update TMA Copy Configs"),
    COPY,
    "the fastest of the new list beats the fastest of the present list by more than the margin",
)
def copy_fix(evidence):
    old, new = (
        max(evidence("ch14_gemm_copy", name=name, status="ok"), key=lambda row: row["ratio"])
        for name in ("conservative", "proposed")
    )
    same = "the same configuration" if old["config"] == new["config"] else "another one"
    return decide(
        is_better(new["ratio"], old["ratio"]),
        f"The fastest of the present list reaches {old['ratio']:.3f} "
        f"of torch's copy, that of the new list {new['ratio']:.3f}; it is {same}.",
    )


@NOTE.claim(
    "The number of stages matters to the copy; five are proposed.",
    Quote("'BLOCK_N': 256}, num_warps=16, num_stages=5", "Update TMA Copy Configs"),
    COPY,
    "1 and 5 stages compile to different PTX",
    BUILT,
    "sm_100a (B200), installed Triton",
)
def copy_stages(evidence):
    differ = builds.copy_depends_on_stages()
    return decide(
        differ,
        f"1 and 5 stages compile to {'different' if differ else 'the same'} PTX"
        f"{'' if differ else ', because the kernel has no loop'}.",
    )
