"""How a GEMM kernel divides an SM: shared memory and tensor memory (TMEM) between stages of A/B, of C, accumulators.

    stages.plan(stages.Blackwell((256, 128)))    # stages as CUTLASS's example chooses them
    stages.plan(stages_hopper.Hopper(128, 256))  # the analogous choice on sm_90a

Arithmetic alone: needs neither torch nor a GPU. The Blackwell rules are those of CUTLASS's CuTe-DSL example
examples/python/CuTeDSL/blackwell/dense_blockscaled_gemm_persistent.py (`_setup_attributes`, `_compute_stages`), of the
layouts it asks for (cutlass.utils.blackwell_helpers, blockscaled_layout), and of the PTX ISA, "tcgen05: tensor memory".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilelab import device

BARRIER_BYTES = 1024  # what the example keeps for mbarriers and the address of its tensor memory
LANES, COLUMNS = 128, 512  # of TMEM, 32 bits each; an allocation is a power of two of columns, 32 to 512
SCALE_ROWS, SCALES = 128, 4  # scale factors lie, and are copied to TMEM, in blocks of 128 rows x 4: 512 bytes
C_ITEMSIZE = {"Float32": 4, "Float16": 2, "BFloat16": 2, "Float8E4M3FN": 1, "Float8E5M2": 1}
ACCUMULATORS = ("rule", "one", "two", "overlapped")


@dataclass(frozen=True)
class Format:
    """An operand: bits of an element in shared memory, K of one instruction, speed in units of bf16's, scales."""

    bits: int
    instruction_k: int
    speed: int
    scales: tuple[tuple[str, int], ...] = (("Float8E8M0FNU", 32),)


# Six bits lie in shared memory as bytes: TMA spreads 16 elements over 16 bytes (PTX ISA, .b6x16_p32). The instruction
# takes them; the example has no path for them.
FORMATS = {"Float4E2M1FN": Format(4, 64, 4, (("Float8E8M0FNU", 32), ("Float8E8M0FNU", 16), ("Float8E4M3FN", 16))),
           "Float8E4M3FN": Format(8, 32, 2), "Float8E5M2": Format(8, 32, 2),
           "Float6E3M2FN": Format(8, 32, 2), "Float6E2M3FN": Format(8, 32, 2)}


def among(name: str, value, allowed) -> None:
    """ValueError unless `value` is one of `allowed`, of the same type: 16.0 is not 16."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise ValueError(f"{name} is one of {', '.join(map(str, allowed))}; here it is {value!r:.40}.")


def check_counts(choice) -> None:
    for name in ("ab_stages", "c_stages"):
        value = getattr(choice, name)
        if value is not None and (type(value) is not int or not 1 <= value <= 64):
            raise ValueError(f"{name} is a whole number from 1 to 64, or None (as many as fit); here it is {value!r}.")


@dataclass(frozen=True)
class Blackwell:
    """A tile of the block-scaled GEMM on sm_100a, in the words of the example's command line.

    `mma_tiler_mn` is the tile of one instruction: with 256 rows two CTAs make it, 128 rows each. `tile_k` None is the
    example's, four instructions. Stages None are as many as fit, A/B first. `accumulators` is one of ACCUMULATORS:
    "rule" takes one for N = 256 and two for less; "overlapped" is how later versions of the example have two at
    N = 256: they share as many columns as the scale factors take. ValueError for what the example does not offer.
    """

    mma_tiler_mn: tuple[int, int] = (256, 128)
    cluster_shape_mn: tuple[int, int] = (2, 1)
    ab_dtype: str = "Float4E2M1FN"
    sf_dtype: str = "Float8E8M0FNU"
    sf_vec_size: int = 16
    c_dtype: str = "Float16"
    tile_k: int | None = None
    ab_stages: int | None = None
    c_stages: int | None = None
    accumulators: str = "rule"

    target = "sm_100a"
    gpu = "B200"

    def __post_init__(self):
        for name in ("mma_tiler_mn", "cluster_shape_mn"):
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2 or any(type(side) is not int for side in pair):
                raise ValueError(f"{name} is a pair of whole numbers (M, N); here it is {pair!r}.")
        among("the tile's M", self.mma_tiler_mn[0], (128, 256))
        among("the tile's N", self.mma_tiler_mn[1], (64, 128, 192, 256))
        for side in self.cluster_shape_mn:
            among("each side of a cluster that shares scale factors", side, (1, 2, 4))
        if self.cluster_shape_mn[0] % self.ctas:
            raise ValueError("a tile of 256 rows is made by two CTAs, so the cluster's M is 2 or 4; here it is "
                             f"{self.cluster_shape_mn[0]}.")
        among("ab_dtype", self.ab_dtype, FORMATS)
        if type(self.sf_vec_size) is not int or (self.sf_dtype, self.sf_vec_size) not in self.format.scales:
            offered = " or ".join(f"{dtype} over {size}" for dtype, size in self.format.scales)
            raise ValueError(f"{self.ab_dtype} takes scales {offered}; here are {self.sf_dtype} over "
                             f"{self.sf_vec_size}.")
        among("c_dtype", self.c_dtype, C_ITEMSIZE)
        among("accumulators", self.accumulators, ACCUMULATORS)
        if self.accumulators == "overlapped" and self.n != 256:
            raise ValueError(f"accumulators overlap where N = 256; two of {self.n} columns lie side by side.")
        step = math.lcm(self.format.instruction_k, SCALES * self.sf_vec_size)
        if self.tile_k is not None and (type(self.tile_k) is not int or not step <= self.tile_k <= 1024
                                        or self.tile_k % step):
            raise ValueError(f"tile_k is a multiple of {step} up to 1,024 (whole instructions, and scale factors four "
                             f"at a time); here it is {self.tile_k!r}.")
        check_counts(self)

    @property
    def format(self) -> Format:
        return FORMATS[self.ab_dtype]

    @property
    def ctas(self) -> int:
        """CTAs that make a tile together."""
        return self.mma_tiler_mn[0] // 128

    @property
    def rows(self) -> int:
        """Rows of C that one CTA makes."""
        return self.mma_tiler_mn[0] // self.ctas

    @property
    def n(self) -> int:
        return self.mma_tiler_mn[1]

    @property
    def k(self) -> int:
        """Columns of A and B a stage."""
        return self.tile_k or 4 * self.format.instruction_k

    @property
    def scaled_columns(self) -> int:
        """N as the scale factors of B have it: whole blocks of 128, in each of two CTAs."""
        return math.ceil(self.n / SCALE_ROWS) * SCALE_ROWS

    def stage(self) -> dict[str, int]:
        """Bytes that one A/B stage holds in one CTA: two CTAs halve B, not its scale factors."""
        scales = self.k // self.sf_vec_size
        return {"A": self.rows * self.k * self.format.bits // 8, "B": self.n // self.ctas * self.k * self.format.bits
                // 8, "SFA": self.rows * scales, "SFB": self.scaled_columns * scales}

    def c_stage(self) -> int:
        """Bytes of one C stage: the epilogue takes the tile (row-major) 4,096 elements at a time, 32 columns."""
        return self.rows * min(self.n, 4096 // self.rows) * C_ITEMSIZE[self.c_dtype]

    def scale_columns(self, packed: bool = False) -> dict[str, int]:
        """TMEM columns of the scale factors: as the example keeps them, 4 an instruction and 128 rows, or packed.

        A block of 128 x 4 takes 4 columns; where an instruction needs fewer than four a row (MX formats), the rest of
        what is kept stays empty.
        """
        held = self.k // self.sf_vec_size // SCALES if packed else self.k // self.format.instruction_k
        return {"SFA": 4 * self.rows // SCALE_ROWS * held, "SFB": 4 * self.scaled_columns // SCALE_ROWS * held}

    @property
    def accumulating(self) -> str:
        """`accumulators`, the rule applied."""
        return self.accumulators if self.accumulators != "rule" else "one" if self.n == 256 else "two"

    def tmem(self) -> dict[str, int]:
        """Columns by what they hold; overlapped accumulators share what the scale factors need."""
        scales = self.scale_columns()
        sums = {"one": self.n, "two": 2 * self.n, "overlapped": 2 * self.n - sum(scales.values())}[self.accumulating]
        return {"accumulators": sums, **scales}

    def barriers(self, ab_stages: int) -> int:
        return BARRIER_BYTES

    def least_c(self) -> int:
        """C stages that are set aside before A/B takes the rest."""
        return 2

    most_c = 64

    @property
    def sums(self) -> str:
        """What C is summed in, for a title."""
        return f"{self.accumulating} accumulator{'s' * (self.accumulating != 'one')} and the scale factors"

    @property
    def remark(self) -> str:
        """What a reader should know of the operands; empty for what is what it seems."""
        if self.ab_dtype.startswith("Float6"):
            return " Six bits lie in shared memory as bytes; the instruction takes them, the example does not."
        if self.sf_vec_size == 16 and self.sf_dtype == "Float8E8M0FNU":
            return " E8M0 over 16 is an option of the example, neither MXFP4 (E8M0 over 32) nor NVFP4 (E4M3 over 16)."
        return ""

    def too_much(self) -> str:
        """Why what lies outside of shared memory does not fit; empty where it does."""
        columns = self.tmem()
        total, sums = sum(columns.values()), columns.pop("accumulators")
        if total <= COLUMNS:
            return ""
        scales, packed = sum(columns.values()), sum(self.scale_columns(packed=True).values())
        least = f" ({packed} if packed)" if packed < scales else ""
        return (f"TMEM has {COLUMNS} columns: {self.accumulating} accumulators of {self.n} take {sums} and leave "
                f"{max(0, COLUMNS - sums)} to the scale factors, which take {scales}{least}")

    def held(self) -> str:
        """What lies outside of shared memory, for a sentence."""
        columns = self.tmem()
        total, sums = sum(columns.values()), columns.pop("accumulators")
        how = {"one": "one accumulator", "two": "two accumulators", "overlapped": "two overlapping accumulators"}
        return (f"TMEM: {how[self.accumulating]} ({sums} columns) and scale factors ({sum(columns.values())}), "
                f"{total} of {COLUMNS} columns")


@dataclass(frozen=True)
class Plan:
    """What a choice comes to: stages, and by what they hold bytes of shared memory and columns of TMEM.

    `problem` says why it does not fit, and is empty where it does; a plan that does not fit says what it would take.
    """

    choice: Blackwell  # or ch14.blockscaled.smem_planner_hopper.Hopper
    ab_stages: int
    c_stages: int
    smem: tuple[tuple[str, int], ...]
    tmem: tuple[tuple[str, int], ...]
    problem: str = ""

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def stage_bytes(self) -> int:
        return sum(self.choice.stage().values())

    @property
    def smem_bytes(self) -> int:
        return sum(size for _, size in self.smem)

    @property
    def tmem_columns(self) -> int:
        return sum(columns for _, columns in self.tmem)

    @property
    def capacity(self) -> int:
        """Bytes of shared memory a CTA may have."""
        return device.limits(self.choice.target).smem_per_block

    @property
    def sentence(self) -> str:
        if self.problem:
            return f"It does not fit: {self.problem}.{self.choice.remark}"
        return (f"It fits: {self.ab_stages} A/B stages of {self.stage_bytes:,} B and {self.c_stages} of C of "
                f"{self.choice.c_stage():,} B take {self.smem_bytes:,} of {self.capacity:,} B of shared memory; "
                f"{self.choice.held()}.{self.choice.remark}")


def plan(choice: Blackwell) -> Plan:
    """Divide an SM as a Blackwell or a stages_hopper.Hopper asks.

    Stages that it leaves open: the least of C, then as many A/B stages as fit, then what is left to C.
    """
    capacity = device.limits(choice.target).smem_per_block
    stage, c_stage = choice.stage(), choice.c_stage()
    size = sum(stage.values())
    fixed = choice.barriers(0)
    each = size + choice.barriers(1) - fixed  # on sm_90a a stage brings its own barriers
    c_stages = choice.c_stages or choice.least_c()
    ab_stages = choice.ab_stages or max(0, (capacity - fixed - c_stages * c_stage) // each)
    left = capacity - fixed - ab_stages * each - c_stages * c_stage
    if choice.c_stages is None and left > 0:
        c_stages = min(c_stages + left // c_stage, max(choice.most_c, c_stages))
    smem = {name: ab_stages * share for name, share in stage.items()} | {
        "C": c_stages * c_stage, "barriers": choice.barriers(ab_stages)}
    total, problems = sum(smem.values()), []
    if ab_stages == 0:
        problems.append(f"{c_stages} C stages of {c_stage:,} B leave no room for an A/B stage of {size:,} B in "
                        f"{capacity:,} B of shared memory")
    elif total > capacity:
        problems.append(f"{ab_stages} A/B stages of {size:,} B, {c_stages} of C of {c_stage:,} B and the barriers take "
                        f"{total:,} B of shared memory; there are {capacity:,}")
    problems += filter(None, [choice.too_much()])
    return Plan(choice, ab_stages, c_stages, tuple(smem.items()), tuple(choice.tmem().items()), "; and ".join(problems))
