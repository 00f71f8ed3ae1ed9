"""Divide the shared memory and the tensor memory (TMEM) of an SM between the stages of A and B, of C, and accumulators.

    smem_planner.plan(Blackwell((256, 128)))  # the stages that CUTLASS's example chooses

The planner only computes: it needs no GPU. The Blackwell rules come from CUTLASS's CuTe-DSL example
examples/python/CuTeDSL/blackwell/dense_blockscaled_gemm_persistent.py (`_setup_attributes`, `_compute_stages`), from
the layouts it uses (cutlass.utils.blackwell_helpers, blockscaled_layout), and from the PTX ISA ("tcgen05").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilelab.runtime import device
from tilelab.runtime.operands import require_one_of

BARRIER_BYTES = 1024  # The example reserves this for mbarriers and the address of its tensor memory.
MIN_C_STAGES, MAX_C_STAGES = 2, 64  # the minimum is set aside before A and B take the rest
COLUMNS = 512  # TMEM has so many columns, with 128 lanes of 32 bits.
SCALES = 4  # tcgen05.cp moves scale factors to TMEM in blocks of 128 rows and 4 columns.
C_ITEMSIZE = {"Float32": 4, "Float16": 2, "BFloat16": 2, "Float8E4M3FN": 1, "Float8E5M2": 1}
ACCUMULATORS = ("rule", "one", "two", "overlapped")


@dataclass(frozen=True)
class Format:
    """Describe an operand: bits per element in shared memory, K of one instruction, speed relative to bf16, scales."""

    bits: int
    instruction_k: int
    speed: int
    scales: tuple[tuple[str, int], ...] = (("Float8E8M0FNU", 32),)


# TMA spreads 16 six-bit elements over 16 bytes (PTX ISA, .b6x16_p32), so shared memory holds them as bytes. The
# instruction reads that layout, but the example has no path for it.
FORMATS = {
    "Float4E2M1FN": Format(4, 64, 4, (("Float8E8M0FNU", 32), ("Float8E8M0FNU", 16), ("Float8E4M3FN", 16))),
    "Float8E4M3FN": Format(8, 32, 2),
    "Float8E5M2": Format(8, 32, 2),
    "Float6E3M2FN": Format(8, 32, 2),
    "Float6E2M3FN": Format(8, 32, 2),
}


@dataclass(frozen=True)
class Blackwell:
    """Describe a tile of the block-scaled GEMM on sm_100a, in the words of the example's command line.

    `mma_tiler_mn` is the tile of one instruction; two CTAs share a tile of 256 rows. `tile_k` defaults to four
    instructions. Stages that are None are planned. `accumulators` is one of ACCUMULATORS: "rule" takes one for N = 256
    and two below. "overlapped" is how later versions of the example fit two at N = 256: both share as many columns as
    the scale factors need. Raises ValueError for what the example does not offer.
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
    rows = 128  # of C that one CTA makes

    def __post_init__(self):
        require_one_of("the tile's M", self.mma_tiler_mn[0], (128, 256))
        require_one_of("the tile's N", self.mma_tiler_mn[1], (64, 128, 192, 256))
        for side in self.cluster_shape_mn:
            require_one_of("a side of a cluster that shares scale factors", side, (1, 2, 4))
        if self.cluster_shape_mn[0] % self.ctas_per_tile:
            why = "a tile of 256 rows is made by two CTAs, so it must be 2 or 4"
            raise ValueError(f"the cluster's M is {self.cluster_shape_mn[0]}; {why}.")
        require_one_of("ab_dtype", self.ab_dtype, FORMATS)
        if type(self.sf_vec_size) is not int or (self.sf_dtype, self.sf_vec_size) not in self.format.scales:
            offered = " or ".join(f"{dtype} over {size}" for dtype, size in self.format.scales)
            given = f"{self.sf_dtype} over {self.sf_vec_size}"
            raise ValueError(f"{self.ab_dtype} takes scales {offered}, not {given}.")
        require_one_of("c_dtype", self.c_dtype, C_ITEMSIZE)
        require_one_of("accumulators", self.accumulators, ACCUMULATORS)
        if self.accumulators == "overlapped" and self.n != 256:
            beside = f"two of {self.n} columns fit side by side"
            raise ValueError(f"accumulators overlap only for N = 256; {beside}.")
        step = math.lcm(self.format.instruction_k, SCALES * self.sf_vec_size)
        is_whole = type(self.tile_k) is int and self.tile_k in range(step, 1025, step)
        if self.tile_k is not None and not is_whole:
            why = "whole instructions, and scale factors four at a time"
            raise ValueError(
                f"tile_k is {self.tile_k!r}; it must be a multiple of {step} up to 1,024 ({why})."
            )
        for name in ("ab_stages", "c_stages"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= 64):
                raise ValueError(f"{name} is {value!r}; it must be None (as many as fit) or from 1 to 64.")

    @property
    def format(self) -> Format:
        return FORMATS[self.ab_dtype]

    @property
    def ctas_per_tile(self) -> int:
        return self.mma_tiler_mn[0] // 128

    @property
    def n(self) -> int:
        return self.mma_tiler_mn[1]

    @property
    def k(self) -> int:
        """Columns of A and B per stage."""
        return self.tile_k or 4 * self.format.instruction_k

    @property
    def scale_blocks(self) -> dict[str, int]:
        """Blocks of 128 rows of scale factors. The last block of B may be partly empty."""
        return {"SFA": 1, "SFB": math.ceil(self.n / 128)}

    def stage_parts(self) -> dict[str, int]:
        """Return the bytes of each part of an A/B stage in one CTA. Two CTAs halve B but not its scale factors."""
        row_bytes, scales = self.k * self.format.bits // 8, 128 * self.k // self.sf_vec_size
        return {"A": self.rows * row_bytes, "B": self.n // self.ctas_per_tile * row_bytes} | {
            name: blocks * scales for name, blocks in self.scale_blocks.items()
        }

    def c_stage_bytes(self) -> int:
        """Return the bytes of a C stage. The epilogue takes 4,096 elements of a row-major tile: 32 columns of 128."""
        return 4096 * C_ITEMSIZE[self.c_dtype]

    def scale_columns(self, packed: bool = False) -> dict[str, int]:
        """Return the TMEM columns of the scale factors, as the example keeps them or packed.

        A block of 128 x 4 takes 4 columns. The example keeps one block per instruction, which leaves columns empty
        where an instruction needs fewer than four scales per row (MX formats).
        """
        per_row = self.k // self.sf_vec_size // SCALES if packed else self.k // self.format.instruction_k
        return {name: 4 * blocks * per_row for name, blocks in self.scale_blocks.items()}

    @property
    def accumulator_scheme(self) -> str:
        """`accumulators` after the rule is applied: one, two or overlapped."""
        return self.accumulators if self.accumulators != "rule" else "one" if self.n == 256 else "two"

    def tmem_parts(self) -> dict[str, int]:
        """Return the TMEM columns of each part. Overlapped accumulators share what the scale factors need."""
        scales = self.scale_columns()
        sums = {"one": self.n, "two": 2 * self.n, "overlapped": 2 * self.n - sum(scales.values())}
        return {"accumulators": sums[self.accumulator_scheme], **scales}

    @property
    def remark(self) -> str:
        """A warning about the operands, empty for standard formats."""
        if self.ab_dtype.startswith("Float6"):
            return " Shared memory holds six bits as a byte; the instruction takes them, the example not."
        if self.sf_vec_size == 16 and self.sf_dtype == "Float8E8M0FNU":
            return " E8M0 over 16 is an option of the example, neither MXFP4 (E8M0 over 32) nor NVFP4 (E4M3 over 16)."
        return ""

    def overflow(self) -> str:
        """Return the reason why TMEM is too small, empty where it is large enough."""
        sums, *scales = self.tmem_parts().values()
        packed = sum(self.scale_columns(packed=True).values())
        if sums + sum(scales) <= COLUMNS:
            return ""
        if_packed = f" ({packed} if packed)" * (packed < sum(scales))
        return (
            f"TMEM has {COLUMNS} columns: {self.accumulator_scheme} accumulators of {self.n} take {sums} and leave "
            f"{max(0, COLUMNS - sums)} to the scale factors, which take {sum(scales)}{if_packed}"
        )

    def describe_accumulators(self) -> str:
        """Describe the use of TMEM in words."""
        sums, *scales = self.tmem_parts().values()
        plural = {"one": "one accumulator", "two": "two accumulators"}
        words = plural.get(self.accumulator_scheme, "two overlapping accumulators")
        return (
            f"TMEM: {words} ({sums} columns) and scale factors ({sum(scales)}), "
            f"{sums + sum(scales)} of {COLUMNS} columns"
        )


@dataclass(frozen=True)
class Plan:
    """Hold the stages of a choice, the bytes of shared memory and the columns of TMEM by what they hold.

    `problem` says why the plan does not fit; it is empty where it fits.
    """

    choice: Blackwell
    ab_stages: int
    c_stages: int
    smem: dict[str, int]
    tmem: dict[str, int]
    problem: str = ""

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def stage_bytes(self) -> int:
        return sum(self.choice.stage_parts().values())

    @property
    def smem_bytes(self) -> int:
        return sum(self.smem.values())

    @property
    def tmem_columns(self) -> int:
        return sum(self.tmem.values())

    @property
    def capacity(self) -> int:
        """Bytes of shared memory that a CTA may have."""
        return device.target_limits(self.choice.target).smem_per_block

    @property
    def sentence(self) -> str:
        if self.problem:
            return f"It does not fit: {self.problem}.{self.choice.remark}"
        return (
            f"It fits: {self.ab_stages} A/B stages of {self.stage_bytes:,} B and {self.c_stages} of C of "
            f"{self.choice.c_stage_bytes():,} B take {self.smem_bytes:,} of {self.capacity:,} B of shared memory; "
            f"{self.choice.describe_accumulators()}.{self.choice.remark}"
        )


def plan(choice: Blackwell) -> Plan:
    """Return the Plan of a choice.

    Where the choice leaves the stages open, C gets its minimum, A and B as many stages as fit, and C what remains.
    """
    capacity = device.target_limits(choice.target).smem_per_block
    stage_parts, c_stage = choice.stage_parts(), choice.c_stage_bytes()
    stage, c_stages = sum(stage_parts.values()), choice.c_stages or MIN_C_STAGES
    room = capacity - BARRIER_BYTES - c_stages * c_stage
    ab_stages = choice.ab_stages or max(0, room // stage)
    unused = room - ab_stages * stage
    if choice.c_stages is None and unused > 0:
        c_stages = min(c_stages + unused // c_stage, MAX_C_STAGES)
    smem = {name: ab_stages * size for name, size in stage_parts.items()}
    smem |= {"C": c_stages * c_stage, "barriers": BARRIER_BYTES}
    problem, total = "", sum(smem.values())
    if ab_stages == 0:
        problem = (
            f"{c_stages} C stages of {c_stage:,} B leave no room for an A/B stage of {stage:,} B in "
            f"{capacity:,} B of shared memory"
        )
    elif total > capacity:
        problem = (
            f"{ab_stages} A/B stages of {stage:,} B, {c_stages} of C of {c_stage:,} B and the barriers take "
            f"{total:,} B of shared memory; there are {capacity:,}"
        )
    problem = "; and ".join(filter(None, [problem, choice.overflow()]))
    return Plan(choice, ab_stages, c_stages, smem, choice.tmem_parts(), problem)
