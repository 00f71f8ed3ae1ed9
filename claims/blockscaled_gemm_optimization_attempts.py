"""Claims of the field note "Blackwell BlockScaled GEMM Kernel Optimizations": two attempts that failed, and four bands.

The attempts are arithmetic (`ch14.blockscaled.lesson.smem_planner`). The bands were measured on Hopper, and
`ch14.fp8_gemm.lesson.impacts` decides whether a measurement lies in its band.
"""

from __future__ import annotations

from ch14.blockscaled.lesson import note_attempts
from ch14.fp8_gemm.lesson import impacts as blockscaled_impacts
from claims.judge import ARITHMETIC, UNTESTED, Finding, Note, Quote, decide, format_range

NOTE = Note(
    "Blackwell BlockScaled GEMM Kernel Optimizations",
    "a Blackwell GPU",
    "The note reports two attempts to speed up an example of CUTLASS. Both made it slower. The note also "
    "estimates "
    "what "
    "four other changes would gain. The note is unsigned and undated.",
)
ATTEMPTS = ("ch14_blackwell_plan", "The two attempts")
HIDE, BANDS = ("ch14_blackwell_plan", "How much five stages hide"), ("ch14_blockscaled", "The four impacts")
FIRST, SECOND = (
    "Attempt 1: Increased ACC (Accumulator) Staging",
    "Attempt 2: Rebalanced SMEM Stage Allocation",
)
BOTTLENECKS, PLANNER = "Actual Bottlenecks (For Future Work)", "the example's rule, B200 (sm_100a)"


@NOTE.claim(
    "Two accumulators at N = 256 need more tensor memory than there is.",
    Quote("2 ACC stages require more TMEM columns than optimal", FIRST),
    ATTEMPTS,
    "accumulators and scale factors together take more than the 512 columns",
    ARITHMETIC,
    PLANNER,
)
def tensor_memory(evidence):
    row = next(row for row in note_attempts.accumulator_rows() if row["tile"].endswith("256"))
    return decide(row["columns"] > row["of"], f"They take {row['columns']} columns of {row['of']}.")


@NOTE.claim(
    "Two accumulators everywhere are 2 to 7 % slower in all tests.",
    Quote("2-7% performance **regression** across all test cases", FIRST),
    ATTEMPTS,
    "the change makes another kernel in every test, so that a difference can come from it",
    ARITHMETIC,
    PLANNER,
)
def accumulators_slower(evidence):
    rows = note_attempts.accumulator_rows()
    same = [row["tile"] for row in rows if row["verdict"] == "the same kernel"]
    return decide(
        not same,
        f"In {len(same)} of the note's {len(rows)} tests, with tiles of {' and '.join(same)}, the "
        "example has two "
        "accumulators already. The change makes the same kernel there and cannot make it slower.",
    )


def attempt_2(test: str) -> dict:
    return next(row for row in note_attempts.stage_rows() if row["test"] == test)


@NOTE.claim(
    "5 stages of A and B with 4 or more of C make test 3 slower by 2.1 %.",
    Quote("**2.1% slower** (38.88μs → 39.72μs)", SECOND),
    ATTEMPTS,
    "the change makes another kernel in test 3, so that a difference can come from it",
    ARITHMETIC,
    PLANNER,
)
def balanced_stages(evidence):
    row = attempt_2("test 3")
    return decide(
        not row["same kernel"],
        f"The example has {row['greedy']} stages there before the change and "
        f"{row['attempt 2']} with it, so the kernel is the same. By the datasheet's rates, the product "
        f"needs at least {row['floor us']:.1f} of its {row['note us']} µs.",
    )


@NOTE.claim(
    "Test 1 is 7.5 % slower, from 45.65 to 49.36 µs.",
    Quote("**7.5% slower** (45.65μs → 49.36μs)", SECOND),
    ATTEMPTS,
    "the time grows by 7.5 %, to the digit given",
    ARITHMETIC,
    "the two times of the note",
)
def slower_by(evidence):
    before, after = 45.65, 49.36
    time, speed = 100 * (after / before - 1), 100 * (1 - before / after)
    return decide(
        f"{time:.1f}" == "7.5",
        f"The time grows by {time:.1f} % and the speed falls by {speed:.1f} %.",
        "the loss of speed is meant",
        f"{speed:.1f}" == "7.5",
    )


@NOTE.claim(
    "Fewer stages of A and B hide less latency, which makes test 1 slower by 7.5 %.",
    Quote("5 AB stages is insufficient to fully hide TMA latency for some configurations", SECOND),
    HIDE,
    "a B200 loses that much with 5 stages in place of 7, in the same kernel",
    ARITHMETIC,
    "Little's law with the latency of an H200",
)
def fewer_stages(evidence):
    row = attempt_2("test 1")
    return Finding(
        UNTESTED,
        f"{row['greedy']} stages hide {row['hidden us']:.2f} µs at most and {row['attempt 2']} "
        "hide "
        f"{row['with attempt 2']:.2f}, of a latency of {note_attempts.LATENCY_US:g} µs on an H200. That "
        "fewer "
        f"hide less does not say how much time is lost: the product needs {row['floor us']:.0f} µs and took "
        f"{row['note us']}.",
        "no B200 was measured",
    )


@NOTE.claim(
    "Scaling the stages down to fit the memory made test 2 crash.",
    Quote("The scaling-down logic for tight memory had bugs", SECOND),
    ATTEMPTS,
    "the note's code asks for more memory than there is in test 2",
    ARITHMETIC,
    PLANNER,
)
def crash(evidence):
    row = attempt_2("test 2")
    figure = (
        f"By the rule there are {row['greedy']} stages before the change and {row['attempt 2']} with it, so "
        f"{'nothing' if row['same kernel'] else 'something'} has to be scaled down."
    )
    return Finding(UNTESTED, figure, "the code is not in the note")


@NOTE.claim(
    "6 to 8 stages of A and B are needed to hide the latency of TMA.",
    Quote("Need 6-8 AB stages to fully hide global→SMEM transfer latency", BOTTLENECKS),
    HIDE,
    "on a B200 the time stops falling at 6 to 8 stages",
    ARITHMETIC,
    "Little's law with the latency of an H200",
)
def six_to_eight(evidence):
    rows = note_attempts.stage_rows()
    return Finding(
        UNTESTED,
        "With an H200's latency and a B200's rates, the memory needs "
        f"{max(row['for memory'] for row in rows)} "
        f"stages and the tensor core {format_range((row['stages to hide'] for row in rows), 'd')}, by the "
        "tile.",
        "the latency of a B200 is not known",
    )


def judge_band(evidence, claim: str, where: str = "") -> Finding:
    """Judge a band by every place in which `ch14.fp8_gemm.lesson.impacts` measured the impact, or by those at `where`."""
    impacts, epilogue, thin = (
        evidence(f"ch14_blockscaled_{name}") for name in ("impacts", "epilogue", "thin")
    )
    bf16 = note_attempts.hopper_rows(evidence("ch10_gemm_sweep"))
    workers = evidence.find("ch14_blockscaled_epilogue_warps") if claim == "warps" else []
    rows = [
        row
        for row in blockscaled_impacts.verdicts(impacts, epilogue, thin, bf16, workers)
        if row["claim"] == claim and row["where"].startswith(where)
    ]
    figure = "; ".join(
        f"{row['time saved'].replace('%', ' %')} ({row['where']}; from “{row['from']}” to "
        f"“{row['to']}” at "
        f"{' × '.join(map(str, row['shape']))})"
        for row in rows
    )
    inside = [row["where"] for row in rows if row["verdict"] == "as claimed"]
    return decide(
        len(inside) == len(rows),
        f"Time saved: {figure}.",
        f"the case is “{'” or “'.join(inside)}”",
        bool(inside),
    )


@NOTE.claim(
    "Hiding the latency of TMA is worth 40 to 50 %.",
    Quote("TMA Latency Hiding** (40-50% impact)", BOTTLENECKS),
    BANDS,
    "the time saved from the fewest stages to the best number lies in this band in every measured case",
)
def latency_band(evidence):
    return judge_band(evidence, "latency")


@NOTE.claim(
    "The number of warps in the epilogue is worth 20 to 30 %.",
    Quote("Warp Utilization** (20-30% impact)", BOTTLENECKS),
    BANDS,
    "the time saved from one epilogue warp to the best number lies in this band in every measured case",
)
def warps_band(evidence):
    if evidence.find("ch14_blockscaled_epilogue_warps"):
        return judge_band(evidence, "warps", "warps of the epilogue")
    return Finding(
        UNTESTED,
        f"Where the multiplying warps and the tile vary together: {judge_band(evidence, 'warps').figure}",
        "the warps of the epilogue alone were not varied",
    )


@NOTE.claim(
    "Fusing work into the epilogue is worth 15 to 25 %.",
    Quote("Epilogue Fusion** (15-25% impact)", BOTTLENECKS),
    BANDS,
    "the time saved by fusing lies in this band in every measured case",
)
def epilogue_band(evidence):
    return judge_band(evidence, "epilogue")


@NOTE.claim(
    "Split-K is worth 10 to 20 % for K above 4096.",
    Quote("Split-K** (10-20% impact for large K)", BOTTLENECKS),
    BANDS,
    "the time saved lies in this band in every measured case, all with K above 4096",
)
def split_k_band(evidence):
    return judge_band(evidence, "split-K")


@NOTE.claim(
    "Timing a kernel against itself gives a speedup of 1.000.",
    Quote("Speedup: 1.000x (+0.0%)", "Benchmark Results (Current = Baseline)"),
    ("ch14_gemm", "Measure the claim"),
    "two timings of one kernel agree to three digits after the point",
)
def same_kernel_twice(evidence):
    spread = [
        100 * abs(row["final_ratio"] / row["ratio"] - 1)
        for row in evidence("ch14_gemm_claim", status="ok")
        if row.get("final_ratio")
    ]
    return decide(
        max(spread) < 0.05,
        f"The first and the last timing of {len(spread)} configurations in one run, each "
        f"relative to cuBLAS beside it, differ by {format_range(spread, '.1f')} %.",
    )
