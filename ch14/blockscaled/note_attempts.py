"""The field note's two reverted attempts as arithmetic: what each asks for, what it gets, and what hides the latency.

Source of the cases: the note "Blackwell BlockScaled GEMM Kernel Optimizations", attempts 1 and 2. Speeds are those of
datasheets (`tilelab.device.KNOWN`), so times here are floors; the latency is what chapter 10 read off an H200.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ch10.wgmma_gemm.configs import Rates
from ch14.blockscaled import smem_planner
from ch14.blockscaled.smem_planner import Blackwell, Plan
from tilelab import device

LATENCY_US = Rates.latency_us  # from the order of a load to its data, on an H200; no figure of a B200 is at hand
TARGET = {"ab_stages": 5, "c_stages": 4}  # attempt 2


@dataclass(frozen=True)
class Case:
    """One of the note's tests: M, N, K, L, its tile and cluster, and microseconds before and with attempt 2 (None: it
    crashed). The note names no cluster for test 2; (2, 1) is the least that its tile allows."""

    name: str
    mnkl: tuple[int, int, int, int]
    tile: tuple[int, int]
    cluster: tuple[int, int]
    before_us: float | None
    after_us: float | None

    def choice(self, **changes) -> Blackwell:
        """The case as the planner's input: fp4, E8M0 over 16, C in fp16."""
        return Blackwell(self.tile, self.cluster, **changes)

    @property
    def slower(self) -> float | None:
        """The loss of speed that the note reports for attempt 2, as a fraction."""
        return 1 - self.before_us / self.after_us if self.before_us and self.after_us else None


CASES = (Case("test 1", (8192, 8192, 1024, 1), (256, 128), (2, 1), 45.65, 49.36),
         Case("test 2", (8192, 8192, 1024, 1), (256, 256), (2, 1), None, None),
         Case("test 3", (2048, 2048, 512, 1), (128, 128), (1, 1), 38.88, 39.72))


def attempt_1(choice: Blackwell) -> Blackwell:
    """Always two accumulators."""
    return dataclasses.replace(choice, accumulators="two")


def attempt_2(choice: Blackwell) -> Blackwell:
    """5 A/B and 4 C stages, what is left over to C; where they do not fit, the same, for the plan to say so."""
    asked = dataclasses.replace(choice, **TARGET)
    more = dataclasses.replace(choice, **TARGET | {"c_stages": None})
    return more if smem_planner.plan(asked).fits and smem_planner.plan(more).c_stages > TARGET["c_stages"] else asked


def same(one: Plan, other: Plan) -> bool:
    """Whether two plans of one tile are one and the same kernel."""
    return (one.ab_stages, one.c_stages, one.tmem) == (other.ab_stages, other.c_stages, other.tmem)


@dataclass(frozen=True)
class Flight:
    """Little's law for a ring: one stage is multiplied while the others are on their way.

    `step_us` is the tensor core's time for a stage at the datasheet's dense rate; the stages in flight, `in_flight`
    bytes, hide `hidden_us`. `memory_bytes` an SM in flight keep all of DRAM busy. `for_tensor_core` and `for_memory`
    stages would hide the latency from either. Bytes from L2 or a neighbour in the cluster ask less of DRAM.
    """

    latency_us: float
    step_us: float
    hidden_us: float
    in_flight: int
    memory_bytes: float
    for_tensor_core: int
    for_memory: int

    @property
    def speed(self) -> float:
        """The most that a loop without end reaches, as a fraction of the tensor core's rate."""
        return min(1.0, self.hidden_us / self.latency_us)


def flight(plan: Plan, latency_us: float = LATENCY_US) -> Flight:
    """What the stages of a plan hide. ValueError for a latency that is not positive and finite."""
    if not 0 < latency_us < math.inf:
        raise ValueError(f"latency_us is a positive, finite number of microseconds; here it is {latency_us!r}.")
    choice, gpu = plan.choice, device.KNOWN[plan.choice.gpu]
    flops = 2 * choice.rows * choice.n * choice.k
    step = flops / (gpu.bf16_tflops * 1e6 * choice.format.speed / gpu.sms)
    memory = gpu.peak_gbps * 1e3 * latency_us / gpu.sms
    flying = max(plan.ab_stages - 1, 0)
    return Flight(latency_us, step, flying * step, flying * plan.stage_bytes, memory,
                  math.ceil(latency_us / step) + 1, math.ceil(memory / plan.stage_bytes) + 1)


@dataclass(frozen=True)
class Work:
    """What a persistent kernel has to do: tiles, those of the busiest CTA, its steps of K, and two floors."""

    tiles: int
    tiles_a_cta: int
    steps_a_tile: int
    tensor_core_us: float
    memory_us: float

    @property
    def steps_a_cta(self) -> int:
        """Stages that the busiest CTA loads from first to last."""
        return self.tiles_a_cta * self.steps_a_tile

    @property
    def floor_us(self) -> float:
        return max(self.tensor_core_us, self.memory_us)


def work(choice: Blackwell, mnkl: tuple[int, int, int, int]) -> Work:
    """The work of C (m, n) = A (m, k) B (n, k), l times over, on the choice's GPU with one CTA an SM."""
    gpu, (m, n, k, batch) = device.KNOWN[choice.gpu], mnkl
    cluster = math.prod(choice.cluster_shape_mn)
    down, across = choice.cluster_shape_mn[0] * choice.rows, choice.cluster_shape_mn[1] * choice.n
    tiles = math.ceil(m / down) * math.ceil(n / across) * batch  # one a cluster and round
    flops = 2 * m * n * k * batch
    operands = (m + n) * k * batch * (choice.format.bits / 8 + 1 / choice.sf_vec_size)
    bytes_ = operands + m * n * batch * smem_planner.C_ITEMSIZE[choice.c_dtype]
    return Work(tiles * cluster // choice.ctas, math.ceil(tiles / (gpu.sms // cluster)), math.ceil(k / choice.k),
                flops / (gpu.bf16_tflops * 1e6 * choice.format.speed), bytes_ / gpu.peak_gbps / 1e3)


def _stages(plan: Plan) -> str:
    return f"{plan.ab_stages} + {plan.c_stages}"


def accumulator_rows() -> list[dict]:
    """Attempt 1 a test: accumulators before and with it, columns, and what came of it."""
    rows = []
    for case in CASES:
        before, after = smem_planner.plan(case.choice()), smem_planner.plan(attempt_1(case.choice()))
        rows.append({"test": case.name, "tile": "{} × {}".format(*case.tile), "before": before.choice.accumulating,
                     "with attempt 1": after.choice.accumulating, "columns": after.tmem_columns, "of": smem_planner.COLUMNS,
                     "verdict": "the same kernel" if same(before, after) else
                     "another kernel" if after.fits else f"{after.tmem_columns - smem_planner.COLUMNS} columns too many"})
    return rows


def stage_rows(latency_us: float = LATENCY_US) -> list[dict]:
    """Attempt 2 a test: A/B + C stages before and with it, what they hide, the steps there are, the loss reported."""
    rows = []
    for case in CASES:
        before, after = smem_planner.plan(case.choice()), smem_planner.plan(attempt_2(case.choice()))
        flights, load = [flight(each, latency_us) for each in (before, after)], work(case.choice(), case.mnkl)
        rows.append({"test": case.name, "greedy": _stages(before), "attempt 2": _stages(after),
                     "same kernel": same(before, after), "hidden us": flights[0].hidden_us,
                     "with attempt 2": flights[1].hidden_us, "stages to hide": flights[0].for_tensor_core,
                     "for memory": flights[0].for_memory, "steps a tile": load.steps_a_tile,
                     "steps a CTA": load.steps_a_cta, "floor us": load.floor_us, "note us": case.before_us,
                     "note says": f"{case.slower:.1%} slower" if case.slower else "crash"})
    return rows


def sentence_1(choice: Blackwell) -> str:
    """What attempt 1 does to a tile."""
    before, after = smem_planner.plan(choice), smem_planner.plan(attempt_1(choice))
    if same(before, after):
        return (f"Attempt 1 changes nothing at N = {choice.n}: the rule has two accumulators there already, so a "
                "measured difference is noise.")
    if after.fits:
        return f"Attempt 1 fits at N = {choice.n}: {after.choice.held()}."
    shared = smem_planner.plan(dataclasses.replace(choice, accumulators="overlapped"))
    sums = shared.tmem[0][1]
    return (f"Attempt 1 does not fit: {after.choice.too_much()}. The example allocates all {smem_planner.COLUMNS} columns "
            f"whatever it needs and would put the scale factors at column {after.tmem[0][1]}, past the last. Two that "
            f"share columns do fit: {sums} and {shared.tmem_columns - sums} make {shared.tmem_columns}.")


def sentence_2(choice: Blackwell, latency_us: float = LATENCY_US) -> str:
    """What attempt 2 does to a tile."""
    before, after = smem_planner.plan(choice), smem_planner.plan(attempt_2(choice))
    if not after.fits:
        return f"Attempt 2 does not fit: {after.problem}."
    if same(before, after):
        return (f"Attempt 2 changes nothing here: as many A/B stages as fit are {before.ab_stages} already, and C gets "
                f"{before.c_stages} from what is left.")
    one, two = flight(before, latency_us), flight(after, latency_us)
    return (f"Attempt 2 turns {before.ab_stages} A/B stages into {after.ab_stages} and {before.c_stages} of C into "
            f"{after.c_stages}: in flight are {two.in_flight:,} B instead of {one.in_flight:,}, which hide "
            f"{two.hidden_us:.2f} us instead of {one.hidden_us:.2f} at the tensor core's rate; a latency of "
            f"{latency_us:g} us needs {two.for_tensor_core} stages there, and {two.for_memory} to keep DRAM busy.")


def hopper_rows(rows: list[dict], tile: str = "128 × 128") -> list[dict]:
    """Measured on sm_90a: what a step of K takes with each number of A/B stages, beside Little's law.

    `rows` are those of ch10_gemm_sweep; kept is the fastest without a cluster of each number of stages, by its ratio to
    the peer beside it: the clock moves during a sweep. The model's rates are ch10.wgmma_gemm.configs.Rates, read off the
    same sweep, so this is a description, not a prediction.
    """
    rates, found = Rates(), {}
    for row in rows:
        words = row["config"].split(", ")
        if row["status"] == "ok" and words[0] == f"specialised {tile}" and "cluster 2" not in words:
            found.setdefault(int(words[1].split()[0]), []).append(row)
    told = []
    for count, these in sorted(found.items()):
        row = max(these, key=lambda row: row["ratio"])
        (high, wide), (m, n, k) = map(int, tile.split(" × ")), row["shape"]
        steps = math.ceil(math.ceil(m / high) * math.ceil(n / wide) / device.KNOWN["H200"].sms) * math.ceil(k / 64)
        told.append({"stages": count, "bytes in flight": (count - 1) * (high + wide) * 128, "ms": row["ms"],
                     "ratio": row["ratio"], "step_us": row["ms"] * 1e3 / steps,
                     "model_us": max(2 * high * wide * 64 / rates.flops, rates.latency_us / (count - 1))})
    return told
