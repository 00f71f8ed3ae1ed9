"""Tile configurations of `ch14.gemm`: the named sets, what each needs of a GPU, and which one suits a shape.

Kept apart from the kernels so that a table of configurations needs neither Triton nor a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilelab import device

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp8": 1}
KERNELS = ("plain", "persistent")
SETS = ("conservative", "proposed", "course")


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class GemmConfig:
    """One way to cut C into tiles of BLOCK_M x BLOCK_N and K into steps of BLOCK_K.

    `epilogue_parts` cuts the finished tile into 1, 2 or 4 TMA stores, each staged in its share of shared memory;
    `group_m` rows of tiles sweep the columns together, so that their operands meet in L2; `programs_per_sm` sizes the
    persistent grid; `early_launch` is programmatic dependent launch. BLOCK_N may be 192: 128 + 64, two accumulators.
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
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; here it is {self.kernel!r}.")
        for name in ("block_m", "block_n", "block_k", "num_warps", "num_stages", "epilogue_parts", "group_m",
                     "programs_per_sm"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number from 1; here it is {getattr(self, name)!r}.")
        for name in ("block_m", "block_k", "num_warps"):
            if not _power_of_two(getattr(self, name)):
                raise ValueError(f"{name} must be a power of two; here it is {getattr(self, name)}.")
        if not _power_of_two(self.block_n) and (self.block_n != 192 or self.kernel == "plain"):
            raise ValueError(f"block_n must be a power of two, or 192 for the persistent kernel; it is {self.block_n}.")
        if not 16 <= min(self.block_m, self.block_n, self.block_k) <= max(self.tile[:3]) <= 512:
            raise ValueError(f"a tile is 16 to 512 on each side; here it is {self}.")
        if self.num_warps > 32:
            raise ValueError(f"num_warps must be at most 32 (1,024 threads a block); here it is {self.num_warps}.")
        if not 1 <= self.num_stages <= 16:
            raise ValueError(f"num_stages must be 1 to 16; here it is {self.num_stages}.")
        if self.columns[0] // max(self.epilogue_parts, 1) < 8:
            raise ValueError("epilogue_parts must leave at least 8 columns (16 bytes) a part; here it cuts "
                             f"{self.columns[0]} in {self.epilogue_parts}.")
        if self.epilogue_parts not in (1, 2, 4) or (self.block_n == 192 and self.epilogue_parts != 2):
            raise ValueError(f"epilogue_parts must be 1, 2 or 4, and 2 where block_n is 192; it is "
                             f"{self.epilogue_parts}.")

    def __str__(self):
        return ",".join(map(str, self.tile))

    @property
    def tile(self) -> tuple[int, int, int, int, int]:
        """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages), the notation of the field note."""
        return self.block_m, self.block_n, self.block_k, self.num_warps, self.num_stages

    @property
    def name(self) -> str:
        """The tile and what the field note's notation leaves out: "128,256,64,8,4 persistent /2"."""
        extras = [f"/{self.epilogue_parts}"] * (self.epilogue_parts > 1) + [f"x{self.programs_per_sm}"] * (
            self.programs_per_sm > 1) + ["early"] * self.early_launch
        return " ".join([str(self), self.kernel, *extras])

    def tiles(self, m: int, n: int) -> int:
        """How many tiles C (m, n) falls into."""
        return math.ceil(m / self.block_m) * math.ceil(n / self.block_n)

    @property
    def columns(self) -> tuple[int, int]:
        """BLOCK_N as the kernel takes it: (128, 64) for 192, else (BLOCK_N, 0)."""
        return (128, 64) if self.block_n == 192 else (self.block_n, 0)

    def blocks(self, b_k_major: bool) -> tuple[list[int], list[int], list[int] | None, list[int]]:
        """Shapes of the tiles that descriptors move: of A, of B, of B's rest (192 columns) and of C."""
        first, rest = self.columns

        def of_b(columns):
            return [columns, self.block_k] if b_k_major else [self.block_k, columns]

        return ([self.block_m, self.block_k], of_b(first), of_b(rest) if rest else None,
                [self.block_m, first // self.epilogue_parts])

    def constants(self, sms: int, b_k_major: bool) -> dict:
        """The kernel's constexpr arguments on a GPU with `sms` multiprocessors."""
        first, rest = self.columns
        found = dict(BLOCK_M=self.block_m, BLOCK_N=first, BLOCK_K=self.block_k, B_K_MAJOR=b_k_major,
                     GROUP_M=self.group_m, PARTS=self.epilogue_parts)
        if self.kernel == "persistent":
            found |= dict(N_REST=rest, PROGRAMS=sms * self.programs_per_sm, EARLY_LAUNCH=self.early_launch)
        return found

    def tensor_core(self, target: str) -> str:
        """The instruction family the compiler chooses on `target`: wgmma, tcgen05 or mma.sync."""
        limit = device.target_limits(target)
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
        staged = self.block_m * self.columns[0] * 2 // self.epilogue_parts
        return max(ring, staged) if self.kernel == "plain" else ring + staged


# mbarriers take 8 bytes a stage; on tcgen05 a tile of 64 rows also passes 4 KiB through shared memory to change layout.
SMEM_SLACK = 4352
# Beside its accumulator a thread holds addresses, barrier phases and loop state: ptxas asks for 154 where it is 128.
REGISTERS_BESIDE_ACCUMULATOR = 26


def rejection(config: GemmConfig, target: str, dtype: str) -> str:
    """Why `config` cannot run on `target`, in one sentence; empty when the resource model lets it pass."""
    limit = device.target_limits(target)
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
        return f"{config.programs_per_sm} programs an SM leave {each:,} B of shared memory each; it needs {smem:,} B."
    return ""


_CONSERVATIVE = [(64, 64, 32, 4, 1), (64, 128, 32, 4, 1), (128, 64, 32, 4, 1)]
_PROPOSED = [(256, 256, 128, 16, 5), (256, 128, 128, 16, 4), (128, 256, 128, 16, 4),
             (128, 128, 128, 8, 4), (128, 128, 64, 8, 3), (64, 64, 64, 4, 2)]


def _course(dtype: str) -> list[GemmConfig]:
    """From large tiles (most products a byte moved) to small ones (most tiles to spread over the SMs).

    A row of the A tile is 128 bytes, one swizzle row; thin tiles take two, so that a step is worth its barrier.
    """
    k = 128 // ITEMSIZE[dtype]

    def persistent(*tile, **kwargs):
        return GemmConfig(*tile, kernel="persistent", **kwargs)

    return [
        persistent(128, 256, k, 8, 4, epilogue_parts=2),
        persistent(128, 128, k, 4, 3, epilogue_parts=4, programs_per_sm=2, early_launch=True),
        persistent(128, 128, k, 4, 6, epilogue_parts=2, early_launch=True),
        persistent(128, 192, k, 4, 5, epilogue_parts=2, early_launch=True),
        persistent(64, 128, 128, 4, 4, early_launch=True),
        persistent(64, 64, 128, 4, 6, early_launch=True),
        # For the 99 KB of shared memory a block that GB10 and the GeForce cards have; compiled, not measured there.
        persistent(128, 128, k, 8, 3, epilogue_parts=2),
        persistent(64, 128, k, 4, 4, epilogue_parts=2),
    ]


def configs(which: str = "course", dtype: str = "bf16", target: str | None = None) -> list[GemmConfig]:
    """A named set: the field note's `conservative` (3) and `proposed` (6), for the plain kernel, or the `course`'s.

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
    """GemmConfig from "BM,BN,BK,WARPS,STAGES", one of the named sets' where it has that tile; ValueError otherwise."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 5:
        raise ValueError(f"a configuration is BLOCK_M,BLOCK_N,BLOCK_K,WARPS,STAGES such as 128,256,64,8,3, or one of "
                         f"{', '.join(SETS)}, best; here it is {text!r}.")
    named = [config for which in SETS[::-1] for config in configs(which) if list(config.tile) == numbers]
    return named[0] if named else GemmConfig(*numbers, kernel=kernel, epilogue_parts=2 if numbers[1] == 192 else 1)


@dataclass(frozen=True)
class Rates:
    """What one SM does in a microsecond, and what things cost. Read off the H200's recorded sweep."""

    flops: float = 6.2e6  # two-byte elements; one-byte ones twice that
    bytes_in: float = 120e3  # through its TMA engine, from L2
    latency_us: float = 1.03  # from the issue of a TMA load to its data
    contention: float = 0.15  # of the operands' time is felt although it overlaps with products
    launch_us: float = 2.0  # half of it with early launch
    dram_bytes: float = 4.1e6  # all SMs together


def predicted_ms(config: GemmConfig, m: int, n: int, k: int, dtype: str, sms: int, rates: Rates | None = None) -> float:
    """Predicted time in milliseconds, from waves, the cost of a K step, and DRAM.

    A step takes as long as the slowest of three: its products, its operands' way from L2, and the latency of a load
    spread over the loads in flight (one stage less than there are, on every program that shares the SM).
    """
    rates = rates or Rates()
    size = ITEMSIZE[dtype]
    tiles = config.tiles(m, n)
    products = 2 * config.block_m * config.block_n * config.block_k / (rates.flops * 2 / size)
    operands = (config.block_m + config.block_n) * config.block_k * size / rates.bytes_in
    exposed = rates.latency_us + products * (config.num_stages == 1)  # one stage: nothing overlaps
    resident = _plain_resident(config, dtype) if config.kernel == "plain" else config.programs_per_sm
    steps = math.ceil(k / config.block_k)

    def tile_us(programs):
        hidden = exposed / (max(config.num_stages - 1, 1) * programs)
        # A second program on the SM fills these gaps with two-byte products; one-byte ones leave it no room.
        felt = rates.contention * operands / (programs if size == 2 else 1)
        return steps * max(products + felt, operands, hidden)

    together, left = divmod(math.ceil(tiles / sms), resident)
    busy = together * resident * tile_us(resident) + left * tile_us(max(left, 1))
    if config.kernel == "plain" and resident == 1:  # nobody computes while a program fills its ring
        busy += (together + left) * rates.latency_us
    ends = rates.latency_us + config.block_m * config.block_n * 2 / rates.bytes_in  # first fill, last store
    dram = ((m + n) * k * size + m * n * 2) / rates.dram_bytes
    if config.columns[1]:  # two accumulators: the loops are not fused, each tile pays for its ends
        busy += (together + left - 1) * ends
    return (max(busy, dram) + ends + rates.launch_us / (1 + config.early_launch)) / 1e3


def _plain_resident(config: GemmConfig, dtype: str) -> int:
    """How many programs of the plain kernel share an SM of sm_90a."""
    limit = device.target_limits("sm_90a")
    threads = 32 * config.num_warps
    registers = config.block_m * config.block_n // threads + REGISTERS_BESIDE_ACCUMULATOR
    return max(1, min(limit.smem_per_sm // (config.smem_bytes(dtype, limit.target) + 1024),
                      limit.threads_per_sm // threads, limit.regs_per_sm // (threads * registers)))


def ranked(which: str, m: int, n: int, k: int, dtype: str, target: str, sms: int) -> list[GemmConfig]:
    """The set's configurations that pass the resource model on `target`, the one predicted fastest first."""
    return sorted(configs(which, dtype, target), key=lambda config: predicted_ms(config, m, n, k, dtype, sms))


_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv"}


def job(config: GemmConfig, target: str, dtype: str = "bf16", b_k_major: bool = True, sms: int = 132,
        mnk: tuple[int, int, int] = (1000, 4096, 4096), scaled: bool = False):
    """The `tilelab.build.Job` that compiles `config` for `target` as `ch14.gemm` launches it at `mnk`.

    Triton specialises sizes: multiples of 16 and ones make another kernel than the rest. `scaled` takes the scales of
    float8 inputs, for which the epilogue on sm_100a needs more shared memory than the resource model knows.
    """
    from tilelab.build import Job

    inside, outside = _TYPES[dtype], _TYPES["bf16" if dtype == "fp8" else dtype]
    constants = config.constants(sms, b_k_major)
    scales = ("scale_a_ptr", "scale_b_ptr")
    sizes = dict(zip("MNK", mnk))
    if config.kernel == "plain":
        pointers = {"a_ptr": f"*{inside}", "b_ptr": f"*{inside}", "c_ptr": f"*{outside}"}
        _, n, k = mnk
        sizes |= {"stride_a": k, "stride_b": k if b_k_major else n, "stride_c": n}
    else:
        blocks = config.blocks(b_k_major)
        names = ("a_desc", "b_desc", "b_rest_desc", "c_desc")
        pointers = {name: f"tensordesc<{outside if name == 'c_desc' else inside}{block}>"
                    for name, block in zip(names, blocks) if block}
        constants |= {} if blocks[2] else {"b_rest_desc": None}
    if scaled:
        pointers |= dict.fromkeys(scales, "*fp32")
    else:
        constants |= dict.fromkeys(scales)
    constants |= {name: 1 for name, size in sizes.items() if size == 1}
    signature = pointers | {name: "i32" for name, size in sizes.items() if size > 1}
    aligned = [name for name in signature if sizes.get(name, 16) % 16 == 0 and not name.endswith("desc")]
    return Job(f"ch14.gemm:gemm_{config.kernel}_kernel", signature, constants, target, config.num_warps,
               config.num_stages, tuple(aligned), {"launch_pdl": True} if config.early_launch else {}, config.name)
