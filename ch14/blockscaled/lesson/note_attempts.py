"""Compute what the field note's two reverted attempts ask for, what they get, and how much latency their stages hide.

Source of the cases: the note "Blackwell BlockScaled GEMM Kernel Optimizations", attempts 1 and 2. Speeds come from
datasheets (`tilelab.runtime.device.KNOWN`), so times are floors. The latency is a fit of chapter 10 to a sweep on an
H200.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from dataclasses import dataclass

from ch10.wgmma_gemm.configs import parse
from ch14.blockscaled.lesson import smem_planner
from ch14.blockscaled.lesson.smem_planner import COLUMNS, Blackwell, Plan
from tilelab.runtime import device

# Read off the sweep of 128 × 128 tiles on an H200; no figures for a B200 are at hand.
LATENCY_US = 1.0  # from a TMA load to its data
FLOPS_PER_US = 5.65e6  # of an SM
ATTEMPT_2 = {"ab_stages": 5, "c_stages": 4}
Flight = namedtuple("Flight", "step_us hidden_us in_flight speed memory_bytes for_tensor_core for_memory")
Work = namedtuple("Work", "steps_per_tile steps_per_cta tensor_core_us memory_us")


@dataclass(frozen=True)
class Case:
    """Describe one of the note's tests: M, N, K, L, tile, cluster, and microseconds before and with attempt 2.

    None stands for the test that crashed. Its cluster, which the note does not name, is the smallest possible.
    """

    name: str
    mnkl: tuple[int, int, int, int]
    tile: tuple[int, int]
    cluster: tuple[int, int]
    before_us: float | None
    after_us: float | None

    def choice(self, **changes) -> Blackwell:
        """Return the planner's input: fp4, E8M0 over 16, C in fp16, with `changes`."""
        return Blackwell(self.tile, self.cluster, **changes)

    @property
    def slower(self) -> float | None:
        """The loss of speed that the note reports for attempt 2, as a fraction."""
        return 1 - self.before_us / self.after_us if self.after_us else None


CASES = (
    Case("test 1", (8192, 8192, 1024, 1), (256, 128), (2, 1), 45.65, 49.36),
    Case("test 2", (8192, 8192, 1024, 1), (256, 256), (2, 1), None, None),
    Case("test 3", (2048, 2048, 512, 1), (128, 128), (1, 1), 38.88, 39.72),
)


def attempt_1(choice: Blackwell) -> Blackwell:
    """Return the choice with two accumulators, whatever N is."""
    return dataclasses.replace(choice, accumulators="two")


def attempt_2(choice: Blackwell) -> Blackwell:
    """Return the choice with 5 A/B stages and 4 C stages, or more of C where room is left."""
    asked = dataclasses.replace(choice, **ATTEMPT_2)
    more = dataclasses.replace(asked, c_stages=None)
    has_room = smem_planner.plan(asked).fits and smem_planner.plan(more).c_stages > asked.c_stages
    return more if has_room else asked


def same_kernel(one: Plan, other: Plan) -> bool:
    """Return whether two plans of one tile are the same kernel."""
    return (one.ab_stages, one.c_stages, one.tmem) == (other.ab_stages, other.c_stages, other.tmem)


def _tensor_core_us(choice: Blackwell, m: int, n: int, k: int) -> float:
    """Return the time that all tensor cores of the choice's GPU take for C (M, N), in microseconds."""
    return 2 * m * n * k / (device.KNOWN[choice.gpu].bf16_tflops * 1e6 * choice.format.speed)


def compute_flight(plan: Plan) -> Flight:
    """Return Little's law for the ring of a plan: one stage is multiplied while the others are on their way.

    `step_us` is the tensor core's time per stage at the datasheet's dense rate. The stages in flight are `in_flight`
    bytes and hide `hidden_us` of the latency; `speed` is the fraction of the tensor core's rate that an endless loop
    reaches at most. `memory_bytes` in flight per SM keep DRAM busy. `for_tensor_core` and `for_memory` are the stages
    that would hide the latency from either. Bytes from L2 ask less of DRAM.
    """
    choice, gpu = plan.choice, device.KNOWN[plan.choice.gpu]
    step_us = _tensor_core_us(choice, choice.rows, choice.n, choice.k) * gpu.sms
    memory_bytes = gpu.peak_gbps * 1e3 * LATENCY_US / gpu.sms
    flying = max(plan.ab_stages - 1, 0)
    hidden_us, in_flight = flying * step_us, flying * plan.stage_bytes
    needed = [math.ceil(each) + 1 for each in (LATENCY_US / step_us, memory_bytes / plan.stage_bytes)]
    return Flight(step_us, hidden_us, in_flight, min(1.0, hidden_us / LATENCY_US), memory_bytes, *needed)


def compute_work(choice: Blackwell, mnkl: tuple[int, int, int, int]) -> Work:
    """Return what a persistent kernel has to do for C (M, N) = A (M, K) B (K, N), L times, with one CTA per SM.

    Work holds the K steps of a tile and of the busiest CTA, and the floors that the tensor cores and DRAM set.
    """
    gpu, (m, n, k, batch) = device.KNOWN[choice.gpu], mnkl
    cluster_m, cluster_n = choice.cluster_shape_mn[0] * choice.rows, choice.cluster_shape_mn[1] * choice.n
    cluster_tiles = math.ceil(m / cluster_m) * math.ceil(n / cluster_n) * batch
    tiles_per_cta = math.ceil(cluster_tiles / (gpu.sms // math.prod(choice.cluster_shape_mn)))
    operands = (m + n) * k * (choice.format.bits / 8 + 1 / choice.sf_vec_size)
    moved = batch * (operands + m * n * smem_planner.C_ITEMSIZE[choice.c_dtype])
    steps = math.ceil(k / choice.k)
    tensor_core_us = batch * _tensor_core_us(choice, m, n, k)
    return Work(steps, tiles_per_cta * steps, tensor_core_us, moved / gpu.peak_gbps / 1e3)


def plan_with(choice: Blackwell, attempt) -> tuple[Plan, Plan]:
    """Return the plan of a choice before an attempt, and with it."""
    return smem_planner.plan(choice), smem_planner.plan(attempt(choice))


def accumulator_rows() -> list[dict]:
    """Return a row per test for attempt 1: accumulators before and with it, TMEM columns, and the verdict."""
    rows = []
    for case in CASES:
        before, after = plan_with(case.choice(), attempt_1)
        verdict = "another kernel" if after.fits else f"{after.tmem_columns - COLUMNS} columns too many"
        verdict = "the same kernel" if same_kernel(before, after) else verdict
        row = {"test": case.name, "tile": "{} × {}".format(*case.tile)}
        row |= {"before": before.choice.accumulator_scheme, "with attempt 1": after.choice.accumulator_scheme}
        rows.append(row | {"columns": after.tmem_columns, "of": COLUMNS, "verdict": verdict})
    return rows


def stage_rows() -> list[dict]:
    """Return a row per test for attempt 2: stages, hidden latency, K steps, and the loss that the note reports."""
    rows = []
    for case in CASES:
        before, after = plans = plan_with(case.choice(), attempt_2)
        flight, load = compute_flight(before), compute_work(case.choice(), case.mnkl)
        stages = [f"{plan.ab_stages} + {plan.c_stages}" for plan in plans]
        row = {
            "test": case.name,
            "greedy": stages[0],
            "attempt 2": stages[1],
            "same kernel": same_kernel(*plans),
        }
        row |= {"hidden us": flight.hidden_us, "with attempt 2": compute_flight(after).hidden_us}
        row |= {"stages to hide": flight.for_tensor_core, "for memory": flight.for_memory}
        row |= {"steps per tile": load.steps_per_tile, "steps per CTA": load.steps_per_cta}
        row |= {"floor us": max(load.tensor_core_us, load.memory_us), "note us": case.before_us}
        rows.append(row | {"note says": f"{case.slower:.1%} slower" if case.slower else "crash"})
    return rows


def flight_rows() -> list[dict]:
    """Return a row per test and plan, or one for both where they are the same: what the stages in flight hide."""
    rows = []
    for case in CASES:
        plans = dict(zip(("greedy", "attempt 2"), plan_with(case.choice(), attempt_2)))
        if same_kernel(*plans.values()):
            plans = {"both": plans["greedy"]}
        for name, plan in plans.items():
            flight = compute_flight(plan)
            row = {"test": case.name, "plan": name, "A/B stages": plan.ab_stages, "step, µs": flight.step_us}
            row |= {"hidden us": flight.hidden_us, "latency us": LATENCY_US}
            rows.append(row | {"for full rate": flight.for_tensor_core, "for DRAM": flight.for_memory})
    return rows


def describe_attempt_1(choice: Blackwell) -> str:
    """Describe the effect of attempt 1 on a tile in a sentence."""
    before, after = plan_with(choice, attempt_1)
    if same_kernel(before, after):
        return (
            f"Attempt 1 changes nothing at N = {choice.n}: the rule has two accumulators there already, so a "
            "measured difference is noise."
        )
    if after.fits:
        return f"Attempt 1 fits at N = {choice.n}: {after.choice.describe_accumulators()}."
    shared = smem_planner.plan(dataclasses.replace(choice, accumulators="overlapped"))
    sums = shared.tmem["accumulators"]
    return (
        f"Attempt 1 does not fit: {after.choice.overflow()}. The example allocates all {COLUMNS} columns whatever "
        f"it needs and would put the scale factors at column {after.tmem['accumulators']}, past the last. Two that "
        f"share columns do fit: {sums} and {shared.tmem_columns - sums} make {shared.tmem_columns}."
    )


def describe_attempt_2(choice: Blackwell) -> str:
    """Describe the effect of attempt 2 on a tile in a sentence."""
    before, after = plan_with(choice, attempt_2)
    if not after.fits:
        return f"Attempt 2 does not fit: {after.problem}."
    if same_kernel(before, after):
        return (
            f"Attempt 2 changes nothing here: as many A/B stages as fit are {before.ab_stages} already, and C gets "
            f"{before.c_stages} from what is left."
        )
    one, two = compute_flight(before), compute_flight(after)
    return (
        f"Attempt 2 turns {before.ab_stages} A/B stages into {after.ab_stages} and {before.c_stages} of C into "
        f"{after.c_stages}: in flight are {two.in_flight:,} B instead of {one.in_flight:,}, which hide "
        f"{two.hidden_us:.2f} us instead of {one.hidden_us:.2f} at the tensor core's rate; a latency of "
        f"{LATENCY_US:g} us needs {two.for_tensor_core} stages there, and {two.for_memory} to keep DRAM busy."
    )


def hopper_rows(rows: list[dict], tile: str = "128 × 128") -> list[dict]:
    """Return the time of a K step on sm_90a for each number of A/B stages, beside Little's law.

    `rows` come from the record ch10_gemm_sweep. The fastest specialised configuration without a cluster is kept for
    each number of stages, by its ratio to the peer beside it, because the clock moves during a sweep. The model's two
    rates were fitted to the same sweep, so the model describes and does not predict.
    """
    by_stages: dict[int, list[dict]] = {}
    for row in rows:
        config = parse(row["config"])
        same_tile = f"{config.block_m} × {config.block_n}" == tile and config.cluster == 1
        if row["status"] == "ok" and same_tile and config.kernel == "specialised":
            by_stages.setdefault(config.num_stages, []).append(row)
    found = []
    for stages, candidates in sorted(by_stages.items()):
        row = max(candidates, key=lambda row: row["ratio"])
        (tile_m, tile_n), (m, n, k) = map(int, tile.split(" × ")), row["shape"]
        waves = math.ceil(math.ceil(m / tile_m) * math.ceil(n / tile_n) / device.KNOWN["H200"].sms)
        steps = waves * math.ceil(k / 64)
        model_us = max(2 * tile_m * tile_n * 64 / FLOPS_PER_US, LATENCY_US / (stages - 1))
        in_flight, step_us = (stages - 1) * (tile_m + tile_n) * 128, row["ms"] * 1e3 / steps
        shown = {"stages": stages, "bytes in flight": in_flight, "ms": row["ms"], "ratio": row["ratio"]}
        found.append(shown | {"step_us": step_us, "model_us": model_us})
    return found
