"""Claims of the field note "[SM 10.0] TMA descriptor compilation fails with deep pipelines", about Triton 3.5.0.

Builds need no GPU. The records hold 864 builds of Triton 3.5.1 for sm_100a, and twelve loops per Triton and target.
"""

from __future__ import annotations

import collections

from claims import builds
from claims.judge import (
    ARGUMENT,
    ARITHMETIC,
    BUILT,
    DATASHEET,
    UNTESTED,
    Finding,
    Note,
    Quote,
    decide,
    format_range,
)
from tilelab.runtime import device

NOTE = Note(
    "[SM 10.0] TMA descriptor compilation fails with deep pipelines",
    "B200",
    "The note reports a bug: Triton 3.5.0 fails to compile a GEMM with descriptors for a B200, and a rule of "
    "three "
    "thresholds says when. The note is unsigned and undated.",
)
PASS = "TritonGPUAssignLatencies"
RULE, VERSIONS = (
    ("ch14_bug_hunt", "The note's rule against every build"),
    ("ch14_bug_hunt", "Which versions, which GPUs"),
)
BUILDS, THRESHOLDS = "sm_100a (B200), Triton 3.5.1", "Threshold Observations"


def find_failures(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["outcome"] == "fails"]


def carries(row: dict) -> bool:
    """Return whether the loop carries a tile from one iteration to the next; the loop that the note shows does not."""
    return row["LOOP"].startswith("carry")


def expect_builds(rows: list[dict]) -> Finding:
    """Judge a claim that such builds succeed."""
    failures = find_failures(rows)
    carried = sum(map(carries, failures))
    where = (
        f", {carried} of them with a loop that carries a tile, which the note does not show"
        if failures
        else ""
    )
    return decide(
        not failures,
        f"{len(failures)} of {len(rows)} such builds fail{where}.",
        "the loop carries no tile to the next iteration",
        carried == len(failures),
    )


@NOTE.claim(
    "The compiler pass that fails is `tritongpu-assign-latencies`.",
    Quote("Compilation crashes in `tritongpu-assign-latencies` pass", "Summary"),
    RULE,
    "every build that fails does so in this pass",
    BUILT,
    BUILDS,
)
def the_pass(evidence):
    rows = evidence("ch14_bug_hunt_loop")
    failures = find_failures(rows)
    named = [row for row in failures if row["stage"] == PASS]
    return decide(
        failures and named == failures,
        f"It is the pass of {len(named)} of {len(failures)} failures, out of {len(rows)} builds.",
    )


@NOTE.claim(
    "The failure is specific to Blackwell.",
    Quote("This appears to be Blackwell-specific", "SM 9.0 (Hopper) Comparison"),
    VERSIONS,
    "the pass fails for no target but Blackwell's",
    BUILT,
    "five targets, Triton 3.5 to 3.9",
)
def blackwell_only(evidence):
    failing = sorted({row["target"] for row in evidence("ch14_bug_hunt_matrix", stage=PASS)})
    others = sorted({row["target"] for row in evidence("ch14_bug_hunt_matrix")} - set(failing))
    return decide(
        failing and all(target.startswith("sm_1") for target in failing),
        f"The pass fails for {' and '.join(failing)} and not for {', '.join(others)}.",
    )


@NOTE.claim(
    "Similar code works on Hopper with the aggressive configuration.",
    Quote("works on Hopper (SM 9.0) with aggressive configs", "SM 9.0 (Hopper) Comparison"),
    ("ch14_gemm", "Build all nine, for five GPU generations"),
    "the tile of 128 × 128 × 128 with 4 stages and 16 warps fits a Hopper GPU",
    BUILT,
    "sm_90a (H100, H200), Triton 3.5.0 and the installed one",
)
def works_on_hopper(evidence):
    reason = builds.aggressive_on_hopper()
    rows = evidence(
        "ch14_bug_hunt_matrix", target="sm_90a", hunt="loop", triton="3.5.0", LOADS="device", LOOP="plain"
    )
    smaller = [row["outcome"] for row in rows]
    return decide(
        not reason,
        f"That tile cannot be launched: {reason} With BLOCK_K = 64, 4 stages and 8 warps the "
        "loop "
        f"{'builds' if set(smaller) == {'builds'} else 'fails'}."
        if reason
        else "It builds.",
        "the tile is smaller",
        set(smaller) == {"builds"},
    )


@NOTE.claim(
    "The loop that the note shows fails with BLOCK_K = 128, 4 stages and 16 warps.",
    Quote("Compiler crash in tritongpu-assign-latencies", "Configuration That FAILS (Optimal for Blackwell)"),
    ("ch14_bug_hunt", "Ask a Triton that is not installed"),
    "the loop fails with these settings",
    BUILT,
    BUILDS,
)
def its_example(evidence):
    (row,) = evidence(
        "ch14_bug_hunt_loop", LOOP="plain", LOADS="device", BLOCK_K=128, num_stages=4, num_warps=16
    )
    plain = [row["outcome"] for row in evidence("ch14_bug_hunt_loop", LOOP="plain")]
    return decide(
        row["outcome"] == "fails",
        f"It {row['outcome']}, as {plain.count('builds')} of {len(plain)} builds of this loop do.",
    )


@NOTE.claim(
    "The note's program fails every time on a B200.",
    Quote("100% on B200 with provided reproducer", "References"),
    VERSIONS,
    "its program fails on a B200",
    ARGUMENT,
    "the field notes",
)
def reproducer(evidence):
    return Finding(
        UNTESTED,
        "The field note *TMA Configuration Fix Proposal* runs a program of the same name with "
        "Triton 3.5 and BLOCK_K = 128, and reports success.",
        "the program is not in the note",
    )


@NOTE.claim(
    "Compilation succeeds if BLOCK_K is at most 32.",
    Quote("BLOCK_K <= 32", THRESHOLDS),
    RULE,
    "no such build fails",
    BUILT,
    BUILDS,
)
def small_k(evidence):
    return expect_builds(evidence("ch14_bug_hunt_loop", BLOCK_K=32))


@NOTE.claim(
    "Compilation succeeds if there is one stage.",
    Quote("num_stages == 1", THRESHOLDS),
    RULE,
    "no such build fails",
    BUILT,
    BUILDS,
)
def one_stage(evidence):
    return expect_builds(evidence("ch14_bug_hunt_loop", num_stages=1))


@NOTE.claim(
    "Compilation succeeds with at most four warps.",
    Quote("num_warps <= 4", THRESHOLDS),
    RULE,
    "no such build fails",
    BUILT,
    BUILDS,
)
def few_warps(evidence):
    return expect_builds([row for row in evidence("ch14_bug_hunt_loop") if row["num_warps"] <= 4])


@NOTE.claim(
    "Compilation fails if BLOCK_K is at least 64, with at least 4 stages and 8 warps.",
    Quote("Compilation fails when", THRESHOLDS),
    RULE,
    "every such build fails",
    BUILT,
    BUILDS,
)
def threshold(evidence):
    rows = [
        row
        for row in evidence("ch14_bug_hunt_loop")
        if row["BLOCK_K"] >= 64 and row["num_stages"] >= 4 and row["num_warps"] >= 8
    ]
    carried = [row for row in rows if carries(row)]
    return decide(
        len(find_failures(rows)) == len(rows),
        f"{len(find_failures(rows))} of {len(rows)} such builds fail: "
        f"{len(find_failures(carried))} of {len(carried)} with a loop that carries a tile, and none of the "
        "loop "
        "that the note shows.",
        "the loop carries a tile to the next iteration",
        len(find_failures(carried)) == len(carried),
    )


@NOTE.claim(
    "The failure needs TMA descriptors.",
    Quote("the issue is specifically with TMA + GEMM (dot operations)", "Copy Operations vs GEMM"),
    RULE,
    "no build that loads by pointers fails",
    BUILT,
    BUILDS,
)
def descriptors_needed(evidence):
    counts = collections.Counter(row["LOADS"] for row in find_failures(evidence("ch14_bug_hunt_loop")))
    return decide(
        not counts["pointers"],
        f"{counts['pointers']} builds that load by pointers fail, "
        f"{counts['device']} with "
        f"descriptors made on the device and {counts['host']} with those of the "
        "host.",
    )


@NOTE.claim(
    "Register pressure causes the failure: larger tiles and deeper pipelines exceed a threshold.",
    Quote("exceeds some threshold in the latency assignment pass", "Hypothesis"),
    RULE,
    "more builds fail with a larger BLOCK_K",
    BUILT,
    BUILDS,
)
def registers(evidence):
    rows = find_failures(evidence("ch14_bug_hunt_loop"))
    by_k = sorted(collections.Counter(row["BLOCK_K"] for row in rows).items())
    failures = [count for _, count in by_k]
    return decide(
        all(before < after for before, after in zip(failures, failures[1:])),
        "Failures at BLOCK_K "
        + ", ".join(f"{k}: {count}" for k, count in by_k)
        + f". All {sum(map(carries, rows))} of {len(rows)} are in loops that carry a tile.",
    )


@NOTE.claim(
    "A copy by descriptor works with tiles of 256 × 256, 16 warps and 5 stages.",
    Quote("This WORKS with larger tiles and deeper pipelines", "Copy Operations vs GEMM"),
    ("ch14_gemm", "And the copy?"),
    "the copy with these settings runs and is right",
)
def copies_work(evidence):
    row = evidence("ch14_gemm_copy", config="256×256 · 16 warps · 5 stages")[0]
    return decide(
        row["status"] == "ok",
        f"It runs at {row['ratio']:.2f} × torch's copy." if row["status"] == "ok" else row["reason"],
    )


@NOTE.claim(
    "16 warps saturate Blackwell's tensor core.",
    Quote("Should be 16 for tensor core saturation", "Workaround"),
    ("ch14_bug_hunt", "What 16 warps do"),
    "builds with 16 warps use Blackwell's instruction, tcgen05",
    BUILT,
    BUILDS,
)
def sixteen_warps(evidence):
    rows = evidence("ch14_bug_hunt_loop", num_warps=16, outcome="builds")
    new, old = (sum(name in row for row in rows) for name in ("tcgen05", "mma_sync"))
    return decide(
        new == len(rows),
        f"{new} of {len(rows)} builds use it and {old} use mma.sync, an instruction of "
        "older "
        "GPUs. Triton 3.5.1 leaves Blackwell's tensor core instruction at 16 warps.",
    )


@NOTE.claim(
    "350 to 400 TFLOP/s is the performance to expect of a B200.",
    Quote("350-400 TFLOPS on B200", "Performance Degradation"),
    ("00_start", "Ask for capabilities, not for names"),
    "400 TFLOP/s is at least half of the datasheet's dense bf16 rate",
    DATASHEET,
    "NVIDIA B200",
)
def b200_speed(evidence):
    b200 = device.KNOWN["B200"]
    return decide(
        400 >= 0.5 * b200.bf16_tflops,
        f"It is {40000 / b200.bf16_tflops:.0f} % of the {b200.bf16_tflops:,} TFLOP/s in the {b200.source}.",
    )


@NOTE.claim(
    "The cautious GEMM uses 60 to 63 % of 7.8 TB/s.",
    Quote("~60-63% utilization", "Bandwidth Utilization"),
    ("ch14_gemm", "Measure the claim"),
    "the DRAM traffic of a B200 lies in this band",
    ARITHMETIC,
    "8192³ at 205 TFLOP/s with tiles of 64 × 64",
)
def bandwidth_utilisation(evidence):
    counted = [
        row["dram_percent"] for row in evidence.find("ch14_gemm_dram", name="conservative", shape=[8192] * 3)
    ]
    h200 = f" An H200's profiler counts {format_range(counted, '.0f')} % of its 4.8 TB/s." if counted else ""
    n, tile, peak_gbps = 8192, 64, 7800
    seconds = 2 * n**3 / 205e12
    least, most = 3 * 2 * n**2, (n // tile) ** 2 * 2 * tile * n * 2
    low, high = (100 * nbytes / seconds / 1e9 / peak_gbps for nbytes in (least, most))
    return Finding(
        UNTESTED,
        f"It is {low:.0f} % if every element moves once, and {high:.0f} % if no tile is ever "
        "found in "
        "the L2 cache. The field note *TMA Configuration Fix Proposal* reports 2.5 % for the same tiles."
        f"{h200}",
        "the DRAM traffic of a B200 was not counted",
    )
