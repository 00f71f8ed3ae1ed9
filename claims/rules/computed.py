"""Rules that compute: from datasheets, formats, rules of the hardware and the notes' own figures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ch14.blockscaled.lesson import note_attempts
from ch14.fp8_gemm.lesson import impacts as blockscaled_impacts
from claims.judge import Evidence, Ruling, decide, leave_open, rule
from tilelab.course import doctor
from tilelab.measure import bench
from tilelab.runtime import device, tensor_map

# ---- datasheets and documentation


@rule
def has_memory(evidence: Evidence, gpu: str, memory: str, gbps: float, reached: list[float]) -> Ruling:
    """Judge whether the datasheet names this kind of memory with at least this bandwidth."""
    sheet = device.KNOWN[gpu]
    holds = sheet.memory == memory and sheet.peak_gbps >= gbps
    return decide(holds, sheet=sheet, times=[rate / sheet.peak_gbps for rate in reached])


@rule
def rate_to_expect(evidence: Evidence, gpu: str, tflops: list[float]) -> Ruling:
    """Judge whether these rates are to be expected. No B200 was measured; their share of the datasheet's is known."""
    sheet = device.KNOWN[gpu]
    return leave_open(percent=[100 * rate / sheet.bf16_tflops for rate in tflops], sheet=sheet)


@rule
def sheet_allows(evidence: Evidence, fp4_sparse_tflops: float, tflops: float) -> Ruling:
    """Judge whether the datasheet's rate of FP4 with sparsity allows this dense rate of bf16."""
    dense = fp4_sparse_tflops / 2 / 2 / 2  # without sparsity, in fp8, in bf16
    return decide(dense >= tflops, dense=dense)


@rule
def documentation_names(evidence: Evidence, documented: list[str], any_of: list[str]) -> Ruling:
    """Judge whether one of these words is in what the documentation lists."""
    return decide(any(word in listed for word in any_of for listed in documented))


@rule
def driver_is_new_enough(evidence: Evidence, driver: int) -> Ruling:
    """Judge whether CUDA 13 asks for this driver or an older one."""
    return decide(doctor.MIN_DRIVER <= driver, least=doctor.MIN_DRIVER)


@rule
def shares_follow(evidence: Evidence, n: int, tflops: list[float], gbps: float) -> Ruling:
    """Judge whether the shares of a bandwidth double. No B200 was measured; what the note's rates give is known."""
    found = [8 * n**2 / (2 * n**3 / (rate * 1e12)) / 1e9 / gbps * 100 for rate in tflops]
    counters = sorted(evidence("ch14_gemm_dram", shape=[n] * 3), key=lambda row: -row["ns"])
    counted = {row["name"]: row["dram_percent"] for row in counters}  # the fastest is last
    return leave_open(found=found, times=found[1] / found[0], counted=counted)


@rule
def attention_bandwidth(evidence: Evidence, gpu: str, tokens: list[int], heads: int, depth: int) -> Ruling:
    """Judge whether attention uses so much bandwidth. Nobody counted it; the least that it must move is known."""
    sheet = device.KNOWN[gpu]
    roof = bench.Ceilings(sheet.peak_gbps, sheet.bf16_tflops)
    shares = {}
    for count in tokens:  # Q, K, V and the output in bf16 against the two products
        memory = bench.floor_ms(roof, nbytes=4 * heads * count * depth * 2)
        compute = bench.floor_ms(roof, flops=4 * heads * count**2 * depth)
        shares[count] = min(100.0, 100 * memory / compute)
    return leave_open(listed=[f"{share:.0f} % at {count:,} tokens" for count, share in shares.items()])


@rule
def dram_lies_in_band(evidence: Evidence, n: int, tile: int, tflops: float, gbps: float) -> Ruling:
    """Judge whether the traffic of a B200 lies in the note's band. It was not counted; its two ends are known."""
    counted = [row["dram_percent"] for row in evidence("ch14_gemm_dram", name="conservative", shape=[n] * 3)]
    seconds = 2 * n**3 / (tflops * 1e12)
    moved = {"least": 3 * 2 * n**2, "most": (n // tile) ** 2 * 2 * tile * n * 2}
    percents = {name: 100 * nbytes / seconds / 1e9 / gbps for name, nbytes in moved.items()}
    return leave_open(counted=counted, **percents)


# ---- formats, listings and maps


@rule
def rounds_within(evidence: Evidence, dtype: str, limit: float) -> Ruling:
    """Judge whether rounding to the format changes a number by at most this share of it."""
    half = torch.finfo(getattr(torch, dtype)).eps / 2
    return decide(half <= limit, half=half, times=half / limit)


@rule
def requests_are_as_long(evidence: Evidence, rows: int, lane_bytes: int, nbytes: int) -> Ruling:
    """Judge whether one of a warp's requests, one per row that it reads, is so long."""
    return decide(32 * lane_bytes >= nbytes, request=32 * lane_bytes, vector=32 * 16)


def share_written(warps: int, depth: int = 128) -> float:
    """Return the share of the outputs that the two printed parts write in a block of `warps` warps.

    Each warp owns a target, as in the note's search, and visits every feature d = tid, tid + blockDim.x, …
    """
    visited = sum((d // 32) % warps == warp for warp in range(warps) for d in range(depth))
    return visited / (warps * depth)


@rule
def writes_every_output(evidence: Evidence, warps: list[int]) -> Ruling:
    """Judge whether the kernel writes every output. The note prints parts of it; what these may write is known."""
    return leave_open(written=[f"{100 * share_written(count):.0f} % with {count} warps" for count in warps])


@rule
def box_of_one_dimension_fails(evidence: Evidence, box: int) -> Ruling:
    """Judge whether the note's program, which it lacks, fails although it keeps the rules of a descriptor."""
    try:
        tensor_map.check_describable((65536,), (1,), 4, 4096, (box,))
    except ValueError as error:
        return leave_open(error=str(error).rstrip("."))
    return leave_open("accepted")


# ---- the two attempts and four bands of the note on block-scaled GEMMs


def find_attempt(test: str) -> dict:
    """Return what the second attempt changes in one of the note's tests."""
    return next(row for row in note_attempts.stage_rows() if row["test"] == test)


@rule
def exceeds_tensor_memory(evidence: Evidence, n: int) -> Ruling:
    """Judge whether two accumulators and their scale factors take more columns than there are."""
    row = next(row for row in note_attempts.accumulator_rows() if row["tile"].endswith(str(n)))
    return decide(row["columns"] > row["of"], row=row)


@rule
def accumulators_cost(evidence: Evidence) -> Ruling:
    """Judge whether the first attempt costs speed in all tests. The note does not say which they were."""
    rows = note_attempts.accumulator_rows()
    same = [row["tile"] for row in rows if row["verdict"] == "the same kernel"]
    return leave_open(same=len(same), tests=len(rows), tiles=same)


@rule
def grows_by(evidence: Evidence, before: float, after: float, percent: str) -> Ruling:
    """Judge whether the time grows by so much, or the speed falls by it, to the digit given."""
    time, speed = 100 * (after / before - 1), 100 * (1 - before / after)
    return decide(f"{time:.1f}" == percent, f"{speed:.1f}" == percent, time=time, speed=speed)


@rule
def describe_attempt(evidence: Evidence, test: str) -> Ruling:
    """Judge what the second attempt did in a test. The note lacks its code; the example's rule is known."""
    return leave_open(row=find_attempt(test), latency_us=note_attempts.LATENCY_US)


@rule
def stages_hide_latency(evidence: Evidence) -> Ruling:
    """Judge whether the time stops falling at so many stages. The latency of a B200 is not known; an H200's is."""
    rows = note_attempts.stage_rows()
    return leave_open(
        memory=max(row["for memory"] for row in rows), tensor_core=[row["stages to hide"] for row in rows]
    )


def saves(evidence: Evidence, percent: float, gain: Sequence[float]) -> bool:
    """Return whether so much time is saved. Speeds are compared, since the margin is one of timings."""
    return evidence.agrees(1 / (1 - percent / 100), gain=[1 / (1 - share / 100) for share in gain])


@rule
def saves_time(evidence: Evidence, claim: str, gain: Sequence[float] = (), then: str = "") -> Ruling:
    """Judge whether every measured case saves so much time, or those at `then` do; without `gain`, show the cases."""
    records = [evidence(f"ch14_blockscaled_{name}") for name in ("impacts", "epilogue", "thin")]
    bf16 = note_attempts.hopper_rows(evidence("ch10_gemm_sweep"))
    rows = [row for row in blockscaled_impacts.verdicts(*records, bf16) if row["claim"] == claim]
    cases = "; ".join(
        f"{row['time saved'].replace('%', ' %')} ({row['where']}; from “{row['from']}” to “{row['to']}” at "
        f"{' × '.join(map(str, row['shape']))})"
        for row in rows
    )
    if not gain:
        return leave_open(cases=cases)
    saved = {row["where"]: float(row["time saved"].rstrip("%")) for row in rows}
    return decide(
        all(saves(evidence, each, gain) for each in saved.values()),
        saves(evidence, saved[then], gain),
        cases=cases,
    )


@rule
def epilogue_warps_save(evidence: Evidence, gain: Sequence[float]) -> Ruling:
    """Judge whether the best number of epilogue warps saves so much of the time of four, for each tile and shape."""
    cases = blockscaled_impacts.compare_with_four(evidence("ch14_blockscaled_tile_warps"))
    saved = [case["saved_percent"] for case in cases]
    return decide(
        all(saves(evidence, each, gain) for each in saved),
        saved=saved,
        cases=len(cases),
        lost=max(100 * (1 - case["chosen"] / case["best"]) for case in cases if case["held_out"]),
        none=[case["none"] for case in cases],
    )
