"""Tile configurations of `ch14.gemm`: the named sets, what each needs of a GPU, and which one suits a shape.

Kept apart from the kernels so that a table of configurations needs neither Triton nor a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from tilelab import device

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp8": 1}
KERNELS = ("plain", "persistent", "stream_k")


@dataclass(frozen=True)
class GemmConfig:
    """One way to cut C into tiles of BLOCK_M x BLOCK_N and K into steps of BLOCK_K.

    `epilogue_parts` cuts the finished tile into 1, 2 or 4 TMA stores, each staged in BLOCK_M x BLOCK_N / parts elements
    of shared memory; `group_m` rows of tiles share a column sweep so that their operands meet in L2;
    `programs_per_sm` sizes the persistent grid; `early_launch` is programmatic dependent launch.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    kernel: str = "plain"
    epilogue_parts: int = 1
    group_m: int = 8
    programs_per_sm: int = 1
    early_launch: bool = False

    def __post_init__(self):
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two; here it is {value}.")
        if min(self.block_m, self.block_n, self.block_k) < 16:
            raise ValueError(f"a tensor-core tile is at least 16 on each side; here it is {self}.")
        if self.num_warps > 32:
            raise ValueError(f"num_warps must be at most 32 (1,024 threads a block); here it is {self.num_warps}.")
        if not 1 <= self.num_stages <= 16:
            raise ValueError(f"num_stages must be 1 to 16; here it is {self.num_stages}.")
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; here it is {self.kernel!r}.")
        if self.epilogue_parts not in (1, 2, 4):
            raise ValueError(f"epilogue_parts must be 1, 2 or 4; here it is {self.epilogue_parts}.")

    def __str__(self):
        return ",".join(map(str, self.tile))

    @property
    def tile(self) -> tuple[int, int, int, int, int]:
        """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), the notation of the field note."""
        return self.block_m, self.block_n, self.block_k, self.num_warps, self.num_stages

    def tiles(self, m: int, n: int) -> int:
        """How many tiles C (m, n) falls into."""
        return math.ceil(m / self.block_m) * math.ceil(n / self.block_n)

    def tensor_core(self, target: str) -> str:
        """The instruction family the compiler chooses on `target`: wgmma, tcgen05 or mma.sync."""
        limit = device.limits(target)
        if limit.has_wgmma and self.num_warps % 4 == 0 and self.block_m >= 64:
            return "wgmma"
        # Triton gives tensor memory to kernels of 4 or 8 warps; with 16 it falls back to Ampere's instruction.
        if limit.has_tcgen05 and self.num_warps in (4, 8) and self.block_m >= 64:
            return "tcgen05"
        return "mma.sync"

    def smem_bytes(self, dtype: str, target: str) -> int:
        """Shared memory a program needs: a ring of A and B tiles, and the staged part of C (two bytes an element).

        mma.sync reads registers, so its last stage leaves the ring. The plain kernel stages C in the ring, drained by
        then; a persistent one is already filling it for the next tile. The compiler adds up to SMEM_SLACK bytes.
        """
        buffers = self.num_stages if self.tensor_core(target) != "mma.sync" else max(self.num_stages - 1, 1)
        ring = buffers * (self.block_m + self.block_n) * self.block_k * ITEMSIZE[dtype]
        staged = self.block_m * self.block_n * 2 // self.epilogue_parts
        return max(ring, staged) if self.kernel == "plain" else ring + staged


# mbarriers take 8 bytes a stage; on tcgen05 a tile of 64 rows also passes 4 KiB through shared memory to change layout.
SMEM_SLACK = 4352
# Beside its accumulator a thread holds addresses, barrier phases and loop state: ptxas asks for 154 where it is 128.
REGISTERS_BESIDE_ACCUMULATOR = 26


def rejection(config: GemmConfig, target: str, dtype: str) -> str:
    """Why `config` cannot run on `target`, in one sentence; empty when the resource model lets it pass."""
    limit = device.limits(target)
    if not limit.has_tma:
        return f"{target} has no TMA: descriptors need sm_90a or newer."
    unit = config.tensor_core(target)
    threads = 32 * config.num_warps
    accumulator = config.block_m * config.block_n
    if unit == "wgmma":  # the accumulator lives in registers, and this instruction cannot spill it
        available = min(limit.regs_per_thread, limit.regs_per_sm // threads)
        needed = accumulator // threads + REGISTERS_BESIDE_ACCUMULATOR
        if needed > available:
            return (f"{threads} threads have at most {available} registers each and need about {needed}, "
                    f"{accumulator // threads} of them for the accumulator.")
    if unit == "tcgen05" and accumulator // 128 > 512:
        return f"the accumulator needs {accumulator // 128} columns of tensor memory; {target} has 512."
    smem = config.smem_bytes(dtype, target)
    if smem > limit.smem_per_block:
        return f"it needs {smem:,} B of shared memory a block; {target} has {limit.smem_per_block:,} B."
    each = limit.smem_per_sm // config.programs_per_sm - 1024  # the driver keeps 1 KiB a block
    if smem > each:
        return f"{config.programs_per_sm} programs an SM leave {each:,} B of shared memory each and it needs {smem:,} B."
    return ""


_CONSERVATIVE = [(64, 64, 32, 4, 1), (64, 128, 32, 4, 1), (128, 64, 32, 4, 1)]
_PROPOSED = [(256, 256, 128, 16, 5), (256, 128, 128, 16, 4), (128, 256, 128, 16, 4),
             (128, 128, 128, 8, 4), (128, 128, 64, 8, 3), (64, 64, 64, 4, 2)]


def _course(dtype: str) -> list[GemmConfig]:
    """A ladder from large tiles (most products a byte of shared memory) to small ones (most tiles to spread).

    BLOCK_K is 128 bytes, one swizzle row, except for the thin tile, where a step must be worth its barrier.
    """
    k = 128 // ITEMSIZE[dtype]

    def persistent(*tile, **kwargs):
        return GemmConfig(*tile, kernel="persistent", **kwargs)

    return [
        persistent(128, 256, k, 8, 4, epilogue_parts=2),
        persistent(256, 128, k, 8, 4, epilogue_parts=2),
        persistent(128, 128, k, 4, 3, epilogue_parts=4, programs_per_sm=2, early_launch=True),
        persistent(128, 128, k, 4, 6, epilogue_parts=2, early_launch=True),
        GemmConfig(128, 128, k, 8, 6, kernel="stream_k", early_launch=True),
        persistent(64, 128, 128, 4, 4, early_launch=True),
        persistent(64, 64, 128, 4, 6, early_launch=True),
        # For the 99 KB of shared memory a block that GB10 and the GeForce cards have; compiled, not measured there.
        persistent(128, 128, k, 8, 3, epilogue_parts=2),
        persistent(64, 128, k, 4, 4, epilogue_parts=2),
    ]


SETS = ("conservative", "proposed", "course")


def configs(which: str = "course", dtype: str = "bf16", target: str | None = None) -> list[GemmConfig]:
    """A named set: the field note's `conservative` (3) and `proposed` (6), both for the plain kernel, or the `course`'s.

    With `target` only those that pass the resource model there; `rejection` gives the reasons of the others.
    """
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}; here it is {dtype!r}.")
    if which not in SETS:
        raise ValueError(f"the sets are {', '.join(SETS)}; here it is {which!r}.")
    if which == "course":
        found = _course(dtype)
    else:
        found = [GemmConfig(*tile) for tile in (_CONSERVATIVE if which == "conservative" else _PROPOSED)]
    return [config for config in found if not target or not rejection(config, target, dtype)]


def parse(text: str, kernel: str = "persistent") -> GemmConfig:
    """GemmConfig from "BM,BN,BK,WARPS,STAGES"; ValueError says what is wrong."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 5:
        raise ValueError(f"a configuration is BLOCK_M,BLOCK_N,BLOCK_K,WARPS,STAGES such as 128,256,64,8,3, or one of "
                         f"{', '.join(SETS)}, best; here it is {text!r}.")
    return GemmConfig(*numbers, kernel=kernel)


@dataclass(frozen=True)
class _Rates:
    """What `predicted_ms` takes an SM to do. Fitted to the H200's recorded sweep; relative order is what matters."""

    flops_per_clock: int  # dense, per SM, two bytes an element
    clock_ghz: float
    dram_gbps: float
    sm_gbps: float  # what one SM pulls through its TMA engine
    launch_us: float = 3.0
    tile_us: float = 0.6  # fill of the ring and the last store, not overlapped


_RATES = _Rates(flops_per_clock=8192, clock_ghz=1.45, dram_gbps=4200, sm_gbps=75)


def predicted_ms(config: GemmConfig, m: int, n: int, k: int, dtype: str, sms: int) -> float:
    """Rough time in milliseconds: the busiest SM's tiles, each bound by its tensor core or by its operand traffic.

    Coarse on purpose: it ranks the `course` set, it does not forecast. The notebook shows it beside measurements.
    """
    size = ITEMSIZE[dtype]
    tiles = config.tiles(m, n)
    share = tiles / sms if config.kernel == "stream_k" else math.ceil(tiles / sms)
    steps = math.ceil(k / config.block_k) * config.block_k
    compute = 2 * config.block_m * config.block_n * steps / (_RATES.flops_per_clock * 2 / size * _RATES.clock_ghz * 1e3)
    # An instruction of 64 x N reads 64 + N rows from shared memory for 64 x N products: narrow tiles starve it.
    compute *= 1 + 6 / min(config.block_n, 256) + 2 / config.block_m
    traffic = (config.block_m + config.block_n) * steps * size / (_RATES.sm_gbps * 1e3)
    if config.num_stages == 1:
        compute += traffic  # nothing overlaps
    alone = 0 if config.programs_per_sm > 1 or tiles < sms else _RATES.tile_us * (config.kernel == "plain")
    fix_up = 3.0 if config.kernel == "stream_k" and tiles % sms else 0.0
    busy = share * (max(compute, traffic) + alone) + _RATES.tile_us + fix_up
    dram = (m * k + n * k) * size + m * n * 2
    return (max(busy, dram / (_RATES.dram_gbps * 1e3)) + _RATES.launch_us) / 1e3


def ranked(which: str, m: int, n: int, k: int, dtype: str, target: str, sms: int) -> list[GemmConfig]:
    """The set's configurations that pass the resource model on `target`, the one predicted fastest first."""
    return sorted(configs(which, dtype, target), key=lambda config: predicted_ms(config, m, n, k, dtype, sms))


def with_options(config: GemmConfig, **changes) -> GemmConfig:
    """A copy with some fields changed."""
    return dataclasses.replace(config, **changes)
