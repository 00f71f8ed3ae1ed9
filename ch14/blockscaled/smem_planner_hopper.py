"""The choice of `ch14.blockscaled.smem_planner` on sm_90a: no TMEM, so the sums take registers, and A/B stages compete with C alone.

The rules are those of the course's own kernels: ch10.wgmma_gemm.configs for bf16, ch14.blockscaled.fp8 for scaled fp8.
"""

from __future__ import annotations

from dataclasses import dataclass

from ch10.wgmma_gemm.configs import REGISTERS_BESIDE_SUMS as BESIDE_SUMS
from ch14.blockscaled.smem_planner import C_ITEMSIZE, Format, among, check_counts

FORMATS = {"BFloat16": Format(16, 16, 1, ()), "Float16": Format(16, 16, 1, ()),
           "Float8E4M3FN": Format(8, 32, 2, ()), "Float8E5M2": Format(8, 32, 2, ())}
PRODUCER = 40  # registers that a thread of the producer keeps


@dataclass(frozen=True)
class Hopper:
    """A tile on sm_90a: the chapters' bf16 kernels, plain fp8, and (`scaled`) fp8 with 1 x 128 scales.

    A stage is 128 bytes of each row of A and B deep, and `scaled` holds a float32 scale a row of A. C is stored in
    `parts`, of which `c_stages` (None: two, and more where room is left over) are staged. Sums lie in the registers of
    `consumers` warp groups; `scaled` needs a second accumulator of 64 rows. ValueError for what cannot be built.
    """

    block_m: int = 128
    block_n: int = 256
    ab_dtype: str = "BFloat16"
    c_dtype: str = "BFloat16"
    parts: int = 4
    consumers: int = 2
    scaled: bool = False
    ab_stages: int | None = None
    c_stages: int | None = None

    target = "sm_90a"
    gpu = "H200"
    ctas = 1
    sums = "the sums in registers"
    remark = ""

    def __post_init__(self):
        among("consumers", self.consumers, (1, 2, 3))
        among("parts", self.parts, (1, 2, 4, 8))
        for name, step in (("block_m", 64 * self.consumers), ("block_n", 16 * self.parts)):
            value = getattr(self, name)
            if type(value) is not int or not step <= value <= 384 - 128 * (name == "block_n") or value % step:
                raise ValueError(f"{name} is a multiple of {step} (consumers take 64 rows, parts 16 columns) up to "
                                 f"{384 - 128 * (name == 'block_n')}; here it is {value!r}.")
        among("ab_dtype", self.ab_dtype, FORMATS)
        among("c_dtype", self.c_dtype, C_ITEMSIZE)
        among("scaled", self.scaled, (False, True))
        if self.scaled and self.format.bits != 8:
            raise ValueError(f"scales of 1 x 128 belong to fp8; here the operands are {self.ab_dtype}.")
        check_counts(self)

    @property
    def format(self) -> Format:
        return FORMATS[self.ab_dtype]

    @property
    def rows(self) -> int:
        return self.block_m

    @property
    def n(self) -> int:
        return self.block_n

    @property
    def k(self) -> int:
        """Columns of A and B a stage: 128 bytes, one row of the widest swizzle."""
        return 128 * 8 // self.format.bits

    def stage(self) -> dict[str, int]:
        """Bytes of one A/B stage."""
        return {"A": self.block_m * 128, "B": self.block_n * 128} | ({"SFA": self.block_m * 4} if self.scaled else {})

    def c_stage(self) -> int:
        """Bytes of one staged part of C."""
        return self.block_m * self.block_n // self.parts * C_ITEMSIZE[self.c_dtype]

    def tmem(self) -> dict[str, int]:
        """Hopper has none."""
        return {}

    def barriers(self, ab_stages: int) -> int:
        """Two mbarriers a stage."""
        return 16 * ab_stages

    def least_c(self) -> int:
        return min(self.parts, 2)

    @property
    def most_c(self) -> int:
        return self.parts

    def registers(self) -> tuple[int, int]:
        """What a consumer's thread needs, and what it has once the producer has handed over what it can spare."""
        sums = self.block_m * self.block_n // self.consumers // 128 + self.scaled * self.block_n // 2
        threads = 128 * (1 + self.consumers)
        spare = min(65536 // threads // 8 * 8, 248) * (self.consumers + 1) - PRODUCER
        return sums + BESIDE_SUMS, min(spare // self.consumers, 240)

    def too_much(self) -> str:
        needed, there = self.registers()
        return "" if needed <= there else (f"a consumer's thread has {there} registers, and its sums take "
                                           f"{needed - BESIDE_SUMS} beside about {BESIDE_SUMS} others")

    def held(self) -> str:
        needed, there = self.registers()
        return f"registers: about {needed} of {there} a consumer's thread"
