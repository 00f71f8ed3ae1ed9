"""Describe the choice of `smem_planner` on sm_90a, where sums take registers and shared memory holds only A, B and C.

The rules come from the course's own kernels: ch10.wgmma_gemm.configs for bf16, ch14.fp8_gemm for scaled fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

from ch10.wgmma_gemm.configs import REGISTERS_BESIDE_SUMS
from ch14.blockscaled.lesson.smem_planner import C_ITEMSIZE, Format, require_stage_counts
from tilelab.runtime.operands import require_one_of

FORMATS = dict.fromkeys(("BFloat16", "Float16"), Format(16, 16, 1, ()))
FORMATS |= dict.fromkeys(("Float8E4M3FN", "Float8E5M2"), Format(8, 32, 2, ()))
PRODUCER_REGISTERS = 40  # that a thread of the producer keeps


@dataclass(frozen=True)
class Hopper:
    """Describe a tile on sm_90a: of the bf16 kernels, of plain fp8, or (`scaled`) of fp8 with scales of 1 x 128.

    A stage holds 128 bytes of each row of A and B, and with `scaled` a float32 scale per row of A. C is stored in
    `epilogue_subtiles` parts, of which `c_stages` are staged (None: two, and more where room is left). The sums lie in
    the registers of `consumers` warp groups; `scaled` needs a second accumulator of 64 rows. Raises ValueError for what
    cannot be built.
    """

    rows: int = 128
    n: int = 256
    ab_dtype: str = "BFloat16"
    c_dtype: str = "BFloat16"
    epilogue_subtiles: int = 4
    consumers: int = 2
    scaled: bool = False
    ab_stages: int | None = None
    c_stages: int | None = None

    target = "sm_90a"
    gpu = "H200"
    ctas_per_tile = 1
    remark = ""

    def __post_init__(self):
        require_one_of("consumers", self.consumers, (1, 2, 3))
        require_one_of("epilogue_subtiles", self.epilogue_subtiles, (1, 2, 4, 8))
        steps = {"rows": (64 * self.consumers, 384), "n": (16 * self.epilogue_subtiles, 256)}
        for name, (step, limit) in steps.items():
            value = getattr(self, name)
            if type(value) is not int or value not in range(step, limit + 1, step):
                allowed = f"a multiple of {step} up to {limit} (consumers take 64 rows, parts 16 columns)"
                raise ValueError(f"{name} is {value!r}; it must be {allowed}.")
        require_one_of("ab_dtype", self.ab_dtype, FORMATS)
        require_one_of("c_dtype", self.c_dtype, C_ITEMSIZE)
        require_one_of("scaled", self.scaled, (False, True))
        if self.scaled and self.format.bits != 8:
            raise ValueError(f"scales of 1 x 128 belong to fp8, and the operands are {self.ab_dtype}.")
        require_stage_counts(self)

    @property
    def format(self) -> Format:
        return FORMATS[self.ab_dtype]

    @property
    def k(self) -> int:
        """Columns of A and B per stage: 128 bytes, one row of the widest swizzle."""
        return 128 * 8 // self.format.bits

    def stage_parts(self) -> dict[str, int]:
        """Return the bytes of each part of an A/B stage."""
        return {"A": self.rows * 128, "B": self.n * 128} | ({"SFA": self.rows * 4} if self.scaled else {})

    def c_stage_bytes(self) -> int:
        """Return the bytes of one staged part of C."""
        return self.rows * self.n // self.epilogue_subtiles * C_ITEMSIZE[self.c_dtype]

    def tmem_parts(self) -> dict[str, int]:
        return {}

    def barrier_bytes(self, ab_stages: int) -> int:
        return 16 * ab_stages  # two mbarriers per stage

    @property
    def min_c_stages(self) -> int:
        return min(self.epilogue_subtiles, 2)

    @property
    def max_c_stages(self) -> int:
        return self.epilogue_subtiles

    def registers(self) -> tuple[int, int]:
        """Return the registers that a consumer's thread needs, and those it has after the producer gave up its own."""
        sums = self.rows * self.n // self.consumers // 128 + self.scaled * self.n // 2
        threads = 128 * (1 + self.consumers)
        available = min(65536 // threads // 8 * 8, 248) * (self.consumers + 1) - PRODUCER_REGISTERS
        return sums + REGISTERS_BESIDE_SUMS, min(available // self.consumers, 240)

    def overflow(self) -> str:
        """Return the reason why the registers are too few, empty where they are enough."""
        needed, available = self.registers()
        if needed <= available:
            return ""
        sums = f"its sums take {needed - REGISTERS_BESIDE_SUMS} beside about {REGISTERS_BESIDE_SUMS} others"
        return f"a consumer's thread has {available} registers, and {sums}"

    def describe_accumulators(self) -> str:
        """Describe the use of registers in words."""
        needed, available = self.registers()
        return f"registers: about {needed} of {available} per consumer thread"
