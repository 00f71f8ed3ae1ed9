"""Tile configurations of `ch14.gemm`: the named sets, what each needs of a GPU, and the model that ranks them.

This file imports neither Triton nor torch, so that a table of configurations can be made anywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass, replace
from typing import Any

from tilelab.runtime import device, spoken
from tilelab.runtime.build import Job

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp8": 1}
KERNELS = ("plain", "persistent", "split")
SETS = ("conservative", "proposed", "course")
_TILE_SIDES = (16, 32, 64, 128, 256, 512)
_TRITON_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8e4nv"}
# The parts of a configuration's name, in this order: "128×256×64 · 8 warps · 4 stages · persistent · C in 2 parts".
PHRASES = {
    "block_m block_n block_k": "{}×{}×{}",
    "num_warps": "{} warps",
    "num_stages": "{} stages",
    "swap": "swapped",
    "kernel": "{}",
    "splits": "{} ways",
    "epilogue_subtile": "C in {} parts",
    "programs_per_sm": "{} per SM",
    "pdl": "early",
    "group_m": "groups of {}",
    "pointers": "by pointers",
}
# The field note's spelling: "128,256,64,8,4 persistent".
_NOTE_NAME = re.compile(r"(\d{1,9}),(\d{1,9}),(\d{1,9}),(\d{1,9}),(\d{1,9})( [a-z]+)?")


@dataclass(frozen=True)
class GemmConfig:
    """One way to cut C into tiles of block_m x block_n elements and K into steps of block_k.

    `epilogue_subtile` is the number of equal parts in which the first BLOCK_N columns are stored, and each part is
    staged in shared memory alone. `group_m` rows of tiles sweep the columns together, so that their operands meet in
    L2. `programs_per_sm` sizes the persistent grid, and `pdl` asks for programmatic dependent launch. In the kernel
    "split", `splits` programs share the steps of one tile.

    Triton's shapes are powers of two. The persistent and the split kernel make tiles of other widths from two or three
    accumulators: 320 columns are 256 + 64, 144 are 128 + 16, and 208 are 128 + 64 + 16. With `swap` they compute C
    transposed: block_m counts columns of C, and block_n its rows. A part has 16 columns or more, because Triton does
    not use wgmma for eight.

    With `pointers` the threads load and store the same tile themselves, without TMA.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    kernel: str = "plain"
    epilogue_subtile: int = 1
    group_m: int = 8
    programs_per_sm: int = 1
    pdl: bool = False
    splits: int = 1
    swap: bool = False
    pointers: bool = False

    def __post_init__(self):
        allowed = {
            "kernel": KERNELS,
            "block_m": _TILE_SIDES,
            "block_k": _TILE_SIDES,
            **({"block_n": _TILE_SIDES} if self.kernel == "plain" else {}),
            "num_warps": (1, 2, 4, 8, 16, 32),
            "num_stages": range(1, 17),
            "epilogue_subtile": (1, 2, 4),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, values))}; it is {getattr(self, name)!r:.40}."
                )
        if self.block_n % 16 or not 16 <= self.block_n <= 512 or self.block_n.bit_count() > 3:
            raise ValueError(
                "block_n must be a sum of at most three powers of two from 16 to 512, and at most 512; it is "
                f"{self.block_n!r:.40}."
            )
        if self.swap and self.kernel == "plain":
            raise ValueError("swap must be False for the kernel plain, which has no transposed store.")
        if not (2 <= self.splits <= 64 if self.kernel == "split" else self.splits == 1):
            raise ValueError(
                "splits must be from 2 to 64 for the kernel split, and 1 for the others; it is "
                f"{self.splits!r:.40} for the kernel {self.kernel}."
            )
        if min(self.group_m, self.programs_per_sm) < 1:
            raise ValueError(
                "group_m and programs_per_sm must be at least 1; they are "
                f"{self.group_m} and {self.programs_per_sm}."
            )
        main = self.columns[0]
        if main // self.epilogue_subtile < 8:  # a row of a descriptor's box takes at least 16 bytes
            raise ValueError(
                f"epilogue_subtile must leave at least 8 columns per part; it cuts {main} "
                f"columns into {self.epilogue_subtile} parts."
            )

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Return the name that a person can say: the tile, the kernel, and each option that is not its default."""
        return spoken.say(self, PHRASES, always=["kernel"])

    def tiles(self, m: int, n: int) -> int:
        """Return the number of tiles in C (m, n)."""
        rows, columns = (n, m) if self.swap else (m, n)
        return math.ceil(rows / self.block_m) * math.ceil(columns / self.block_n)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Return the widths of the accumulators: (128, 64, 16) for 208 columns, (128, 0, 0) for 128."""
        main = 1 << (self.block_n.bit_length() - 1)
        rest = self.block_n - main
        extra = 1 << (rest.bit_length() - 1) if rest else 0
        return main, extra, rest - extra

    def blocks(self, b_k_major: bool) -> dict[str, list[int] | None]:
        """Return the shapes of the tiles that descriptors move, by the kernel's names; None for one that is not used.

        With `swap`, a_desc reads B and the others called b_ read A, whose rows run along K.
        """
        a_k_major, b_k_major = (b_k_major, True) if self.swap else (True, b_k_major)
        a_block = [self.block_m, self.block_k]
        found: dict[str, list[int] | None] = {"a_desc": a_block if a_k_major else a_block[::-1]}
        names = ("", "_extra", "_last")
        for name, width in zip(names, self.columns):
            b_block = [width, self.block_k]
            found[f"b{name}_desc"] = (b_block if b_k_major else b_block[::-1]) if width else None
        for name, width, parts in zip(names, self.columns, (self.epilogue_subtile, 1, 1)):
            c_block = [self.block_m, width // parts]
            found[f"c{name}_desc"] = (c_block[::-1] if self.swap else c_block) if width else None
        return found

    def constants(self, sms: int, b_k_major: bool) -> dict[str, Any]:
        """Return the kernel's constexpr arguments for a GPU with `sms` multiprocessors."""
        values: dict[str, Any] = dict(
            BLOCK_M=self.block_m,
            BLOCK_N=self.columns[0],
            BLOCK_K=self.block_k,
            B_K_MAJOR=b_k_major or self.swap,
            GROUP_M=self.group_m,
            EPILOGUE_SUBTILE=self.epilogue_subtile,
        )
        if self.kernel == "plain":
            return values | dict(POINTERS=self.pointers)
        values |= dict(EXTRA_N=self.columns[1], LAST_N=self.columns[2], SWAP=self.swap, PDL=self.pdl)
        values |= dict(A_K_MAJOR=b_k_major or not self.swap)
        return values | (dict(PROGRAMS=sms * self.programs_per_sm) if self.kernel == "persistent" else {})

    def tensor_core(self, target: str) -> str:
        """Return the instruction family that Triton chooses on `target`: wgmma, tcgen05 or mma.sync."""
        limit = device.target_limits(target)
        if limit.has_wgmma and self.num_warps % 4 == 0 and self.block_m >= 64:
            return "wgmma"
        # Triton gives tensor memory to kernels of 4 or 8 warps; with 16 it falls back to Ampere's instruction.
        if limit.has_tcgen05 and self.num_warps in (4, 8) and self.block_m >= 64:
            return "tcgen05"
        return "mma.sync"

    def smem_bytes(self, dtype: str, target: str) -> int:
        """Return the bytes of shared memory per program: a ring of A and B tiles, and the staged part of C.

        mma.sync reads its operands from registers, so its last stage leaves the ring. The plain kernel stages C (two
        bytes per element) in the ring, which is empty by then, and so does the split one; a persistent one is already
        filling the ring for the next tile. The compiler adds up to SMEM_SLACK bytes.
        """
        buffers = self.num_stages if self.tensor_core(target) != "mma.sync" else max(self.num_stages - 1, 1)
        ring = buffers * (self.block_m + self.block_n) * self.block_k * ITEMSIZE[dtype]
        main, *others = self.columns
        staged = (
            self.block_m * 2 * sum({main // self.epilogue_subtile, *others})
        )  # parts of one width share a buffer
        return ring + staged if self.kernel == "persistent" else max(ring, staged)


# An mbarrier takes 8 bytes per stage; on tcgen05 a tile of 64 rows also passes 4 KiB through shared memory to change
# its layout.
SMEM_SLACK = 4352
# Beside its accumulator a thread holds addresses, phases and loop state: ptxas asks for 154 where the former is 128.
REGISTERS_BESIDE_ACCUMULATOR = 26


def apply_switch(config: GemmConfig) -> GemmConfig:
    """Return a configuration as the environment variable TILES_TMA wants it: with 0, its tile moves by pointers."""
    switch = os.environ.get("TILES_TMA") or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"TILES_TMA must be 0 (move tiles by pointers) or 1 (by TMA); it is {switch!r:.40}.")
    return config if switch == "1" else replace(config, pointers=True)


def rejection(config: GemmConfig, target: str, dtype: str) -> str:
    """Return why `config` cannot run on `target`, in one sentence; empty when the resource model lets it pass."""
    limit = device.target_limits(target)
    if not limit.has_tma:
        return f"{target} has no TMA: descriptors need sm_90a or newer."
    unit = config.tensor_core(target)
    threads = 32 * config.num_warps
    accumulator = config.block_m * config.block_n
    if unit == "wgmma":  # the accumulator lives in registers, and this instruction cannot spill it
        available = min(limit.regs_per_thread, limit.regs_per_sm // (threads * config.programs_per_sm))
        needed = accumulator // threads + REGISTERS_BESIDE_ACCUMULATOR
        if needed > available:
            return (
                f"{threads} threads have at most {available} registers each and need about {needed}, "
                f"{accumulator // threads} of them for the accumulator."
            )
    if unit == "tcgen05" and accumulator // 128 > 512:
        return f"the accumulator needs {accumulator // 128} columns of tensor memory; {target} has 512."
    smem = config.smem_bytes(dtype, target)
    if smem > limit.smem_per_block:
        return f"it needs {smem:,} B of shared memory per block; {target} has {limit.smem_per_block:,} B."
    each = limit.smem_per_sm // config.programs_per_sm - 1024  # the driver keeps 1 KiB per block
    if smem > each:
        return f"{config.programs_per_sm} programs per SM leave {each:,} B of shared memory each; it needs {smem:,} B."
    return ""


_NOTE = {
    "conservative": [(64, 64, 32, 4, 1), (64, 128, 32, 4, 1), (128, 64, 32, 4, 1)],
    "proposed": [
        (256, 256, 128, 16, 5),
        (256, 128, 128, 16, 4),
        (128, 256, 128, 16, 4),
        (128, 128, 128, 8, 4),
        (128, 128, 64, 8, 3),
        (64, 64, 64, 4, 2),
    ],
}


def _course(dtype: str) -> list[GemmConfig]:
    """Return the course's set, from large tiles (most products per byte) to small tiles (enough for all SMs).

    A row of the A tile is 128 bytes, one swizzle row. Thin tiles have rows of two, so that a step is worth its barrier.
    """
    k = 128 // ITEMSIZE[dtype]

    def persistent(*tile, **options):
        return GemmConfig(*tile, kernel="persistent", **options)

    return [
        persistent(128, 256, k, 8, 4, epilogue_subtile=2),
        persistent(128, 128, k, 4, 3, epilogue_subtile=4, programs_per_sm=2, pdl=True),
        persistent(128, 128, k, 4, 6, epilogue_subtile=2, pdl=True),
        persistent(128, 192, k, 4, 5, epilogue_subtile=2, pdl=True),
        persistent(64, 128, 128, 4, 4, pdl=True),
        persistent(64, 64, 128, 4, 6, pdl=True),
        # For GB10 and the GeForce cards, which have 99 KB of shared memory per block; compiled, not measured there.
        persistent(128, 128, k, 8, 3, epilogue_subtile=2),
        persistent(64, 128, k, 4, 4, epilogue_subtile=2),
    ]


def configs(
    which: str | None = None, dtype: str = "bf16", target: str | None = None
) -> dict[str, GemmConfig]:
    """Return a dict of configurations by name: one set, or all three.

    The sets are the field note's `conservative` (3) and `proposed` (6), for the plain kernel, and the `course`'s (8).
    With `target` only those that pass the resource model there; `rejection` gives the reasons of the others.
    """
    if dtype not in ITEMSIZE:
        raise ValueError(f"unknown dtype {dtype!r}; choose {', '.join(ITEMSIZE)}.")
    if which not in (None, *SETS):
        raise ValueError(f"unknown set {which!r}; choose {', '.join(SETS)}.")
    sets = {name: [GemmConfig(*tile) for tile in tiles] for name, tiles in _NOTE.items()} | {
        "course": _course(dtype)
    }
    members = [config for name in ([which] if which else SETS) for config in sets[name]]
    return {config.name: config for config in members if not target or not rejection(config, target, dtype)}


def parse(text: str, dtype: str = "bf16") -> GemmConfig:
    """Return the configuration that `text` names, as `GemmConfig.name` or as the field note spells it.

    Without a kernel, as in "128×256×64 · 8 warps · 4 stages" or "128,256,64,8,4", the text means the configuration in
    `configs()` with this tile, or else the persistent kernel. ValueError for other text, and for a tile that several
    configurations share.
    """
    fields: dict[str, Any] = {}
    if note := _NOTE_NAME.fullmatch(text):
        text = "{}×{}×{} · {} warps · {} stages".format(*note.groups()) + (note[6] or "").replace(" ", " · ")
    with contextlib.suppress(ValueError):
        fields = spoken.read(text, PHRASES)
    if not {"block_m", "num_warps", "num_stages"} <= fields.keys():
        raise ValueError(
            f"unknown configuration {text[:60]!r}; choose best, a set ({', '.join(SETS)}), a name from configs(), or a "
            "tile such as 128×256×64 · 8 warps · 3 stages or 128,256,64,8,3."
        )
    named = [config for config in configs(dtype=dtype).values() if fields.items() <= vars(config).items()]
    if "kernel" in fields or not named:
        return GemmConfig(**{"kernel": "persistent"} | fields)
    if len(named) > 1:
        raise ValueError(f"several configurations are {text}; choose {' or '.join(map(str, named))}.")
    return named[0]


@dataclass(frozen=True)
class Rates:
    """Throughputs per microsecond, of one SM unless it says otherwise, and fixed costs.

    All are fitted to the recorded sweep of the H200.
    """

    flops_per_us: float = 6.2e6  # for two-byte elements; twice as many for one byte
    l2_bytes_per_us: float = 120e3  # from L2, through the SM's TMA engine
    latency_us: float = 1.03  # from the issue of a TMA load to its data
    contention: float = 0.15  # the fraction of the operands' time that also delays the products beside it
    launch_us: float = 2.0  # programmatic dependent launch hides half of this time
    dram_bytes_per_us: float = 4.1e6  # for all SMs together
    split_us: float = 3.0  # from the first program's part to the sum of all


def predict_us(config: GemmConfig, m: int, n: int, k: int, dtype: str = "bf16", sms: int = 132) -> float:
    """Return the predicted time in microseconds, from waves of tiles, the cost of a step of K, and DRAM.

    A step takes as long as the slowest of three: its products, the loads of its operands from L2, and the latency of
    one load divided by the number of loads in flight. Every program has a load in flight per stage, but for the stage
    in use.
    """
    rates, size = Rates(), ITEMSIZE[dtype]
    products = 2 * config.block_m * config.block_n * config.block_k / (rates.flops_per_us * 2 / size)
    operands = (config.block_m + config.block_n) * config.block_k * size / rates.l2_bytes_per_us
    exposed = rates.latency_us + products * (config.num_stages == 1)  # with one stage nothing overlaps
    resident = (
        config.programs_per_sm if config.kernel == "persistent" else count_programs_per_sm(config, dtype)
    )
    steps = math.ceil(k / config.block_k / config.splits)

    def tile_us(programs):
        latency = exposed / (max(config.num_stages - 1, 1) * programs)
        # A second program on the SM fills these gaps with two-byte products; one-byte ones leave it no room.
        felt = rates.contention * operands / (programs if size == 2 else 1)
        return steps * max(products + felt, operands, latency)

    together, left = divmod(math.ceil(config.tiles(m, n) * config.splits / sms), resident)
    busy = together * resident * tile_us(resident) + left * tile_us(max(left, 1))
    if config.kernel != "persistent" and resident == 1:  # nobody computes while this program fills its ring
        busy += (together + left) * rates.latency_us
    # the first fill, the last store
    ends = rates.latency_us + config.block_m * config.block_n * 2 / rates.l2_bytes_per_us
    dram = ((m + n) * k * size + m * n * 2) / rates.dram_bytes_per_us
    if config.columns[1]:  # with two accumulators the loops are not fused, so each tile pays for its ends
        busy += (together + left - 1) * ends
    if config.splits > 1:  # each part of C is written and read in float32, mostly in L2, by all SMs together
        busy += rates.split_us + config.splits * m * n * 8 / rates.l2_bytes_per_us / sms
    return max(busy, dram) + ends + rates.launch_us / (1 + config.pdl)


def count_programs_per_sm(config: GemmConfig, dtype: str) -> int:
    """Return how many programs of a kernel that is not persistent run on an SM of sm_90a at a time."""
    limit = device.target_limits("sm_90a")
    threads = 32 * config.num_warps
    registers = config.block_m * config.block_n // threads + REGISTERS_BESIDE_ACCUMULATOR
    return max(
        1,
        min(
            limit.smem_per_sm // (config.smem_bytes(dtype, limit.target) + 1024),
            limit.threads_per_sm // threads,
            limit.regs_per_sm // (threads * registers),
        ),
    )


def rank_configs(which: str, m: int, n: int, k: int, dtype: str, target: str, sms: int) -> list[GemmConfig]:
    """Return the set's configurations that pass the resource model on `target`, the one predicted fastest first."""
    return sorted(
        configs(which, dtype, target).values(), key=lambda config: predict_us(config, m, n, k, dtype, sms)
    )


def job(
    config: GemmConfig,
    target: str,
    dtype: str = "bf16",
    b_k_major: bool = True,
    sms: int = 132,
    mnk: tuple[int, int, int] = (1000, 4096, 4096),
    scaled: bool = False,
) -> Job:
    """Return the `tilelab.runtime.build.Job` that compiles `config` for `target` as `ch14.gemm` launches it at `mnk`.

    Triton compiles a different plain kernel when a size is 1 or a multiple of 16, so pass the real `mnk`. `scaled` adds
    the scales of float8 inputs, for which the epilogue on sm_100a needs more shared memory than the resource model
    knows.
    """
    element, of_c = _TRITON_TYPES[dtype], _TRITON_TYPES["bf16" if dtype == "fp8" else dtype]
    constants = config.constants(sms, b_k_major)
    scales = ("scale_a_ptr", "scale_b_ptr")
    (_, n, k), sizes = mnk, dict(zip("MNK", mnk))
    of_b = k if b_k_major else n
    strides = {"stride_a": of_b, "stride_b": k} if config.swap else {"stride_a": k, "stride_b": of_b}
    strides |= {"stride_c": n}
    specialised = {}
    if config.kernel == "plain":
        pointers = {"a_ptr": f"*{element}", "b_ptr": f"*{element}", "c_ptr": f"*{of_c}"}
        specialised = sizes = sizes | strides
    else:
        blocks = config.blocks(b_k_major)
        pointers = {}
        for name, block in blocks.items():
            kind = of_c if name.startswith("c") else element
            pointers |= (
                {name: f"*{kind}" if config.pointers else f"tensordesc<{kind}{block}>"} if block else {}
            )
        constants |= {name: None for name, block in blocks.items() if not block}
        if config.pointers:
            specialised, sizes = strides, sizes | strides
            constants["ALIGNMENT"] = math.gcd(16, n, k)
        else:
            constants |= dict.fromkeys(strides) | {"ALIGNMENT": 1}
        if config.kernel == "split":
            pointers |= {"parts_ptr": "*fp32", "arrivals_ptr": "*i32"}
            sizes |= {"splits": config.splits}
    if scaled:
        pointers |= dict.fromkeys(scales, "*fp32")
    else:
        constants |= dict.fromkeys(scales)
    constants |= {name: 1 for name, size in specialised.items() if size == 1}
    signature = pointers | {name: "i32" for name in sizes if name not in constants}
    aligned = [
        *(name for name, kind in pointers.items() if kind.startswith("*")),
        *(x for x in specialised if sizes[x] % 16 == 0),
    ]
    return Job(
        f"ch14.gemm.kernels:gemm_{config.kernel}_kernel",
        signature,
        constants,
        target,
        config.num_warps,
        config.num_stages,
        tuple(aligned),
        {"launch_pdl": True} if config.pdl else {},
        config.name,
    )
