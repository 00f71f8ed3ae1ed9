"""Configurations of the WGMMA GEMM: what they need, the ladder that the chapter climbs, and which one a shape gets."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

KERNELS = ("one_group", "specialised", "split")
BREAKS = ("nothing", "phase", "proxy_fence", "expect_less", "release_early")
BOX_K = 64  # columns of A and B a box: 128 bytes, one row of the widest swizzle


@dataclass(frozen=True)
class WgmmaConfig:
    """A tile of `block_m` x `block_n` elements of C, and how a kernel of wgmma_gemm.cu makes it.

    `consumers` warp groups multiply, from a ring of `stages`, each `depth` boxes of 64 columns deep. `cluster` CTAs
    share tiles of B or, in `split`, the K steps of a tile. A persistent kernel starts as many CTAs as fit, `ctas`
    an SM. C is staged in `parts`, two at a time; the raster keeps `group` rows of tiles together; `swap` computes C
    transposed, so that block_m counts columns of C; `early` lets the kernel start while the one before it drains.
    `leaves_out` (one of BREAKS) makes a kernel that is wrong on purpose.
    """

    kernel: str
    block_m: int
    block_n: int
    stages: int
    consumers: int = 1
    cluster: int = 1
    persistent: bool = False
    ctas: int = 1
    parts: int = 1
    group: int = 1
    swap: bool = False
    early: bool = False
    depth: int = 1
    leaves_out: str = "nothing"

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"the kernels are {', '.join(KERNELS)}; here it is {self.kernel!r}.")
        if self.leaves_out not in BREAKS:
            raise ValueError(f"leaves_out is one of {', '.join(BREAKS)}; here it is {self.leaves_out!r}.")
        for name, most in (("block_m", 256), ("block_n", 256), ("stages", 16), ("consumers", 2), ("cluster", 8),
                           ("ctas", 8), ("parts", 16), ("group", 4096), ("depth", 4)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} is a whole number from 1 to {most:,}; here it is {value!r}.")
        for name in ("persistent", "swap", "early"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} is True or False; here it is {getattr(self, name)!r}.")
        if self.block_m % (64 * self.consumers):
            raise ValueError(f"each of {self.consumers} consumers takes a multiple of 64 rows, as a product does; "
                             f"block_m is {self.block_m}.")
        if self.block_n % (16 * self.parts):
            raise ValueError(f"block_n is a multiple of 16 in each of its {self.parts} parts; it is {self.block_n}.")
        if self.swap and self.parts != 1:
            raise ValueError(f"a transposed C is staged whole: parts is 1; here it is {self.parts}.")
        if self.kernel == "one_group" and (self.consumers, self.cluster, self.persistent, self.early) != (1, 1, 0, 0):
            raise ValueError("one_group has one consumer, no cluster, and neither persists nor starts early.")
        if self.kernel != "one_group" and self.stages < 2:
            raise ValueError(f"{self.kernel} has 2 stages at least: one is free only when the next is multiplied.")
        if self.kernel == "specialised" and self.cluster > 2:
            raise ValueError(f"specialised has clusters of 1 or 2; here of {self.cluster}.")
        if self.kernel == "split" and (self.cluster not in (2, 4, 8) or self.persistent or self.parts > 1):
            raise ValueError("split has clusters of 2, 4 or 8, is not persistent and stores C in one part.")
        if self.kernel == "split" and self.leaves_out == "proxy_fence":
            raise ValueError("split has no proxy fence to leave out: threads store its C.")

    @property
    def accumulators(self) -> int:
        """Sums that a thread of a consumer holds in registers."""
        return self.block_m * self.block_n // self.consumers // 128

    @property
    def threads(self) -> int:
        return 128 if self.kernel == "one_group" else 128 * (1 + self.consumers)

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * BOX_K * self.depth * 2

    @property
    def box(self) -> int:
        """Columns of the boxes in which C is stored: those of a swizzle, of which a part takes a whole number."""
        return next(width for width in (64, 32, 16) if self.swap or self.block_n // self.parts % width == 0)

    def steps(self, k: int) -> int:
        """Stages that K columns take."""
        return math.ceil(k / (BOX_K * self.depth))

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: the ring, C as it is staged, the barriers; the sums of `split` lie in the
        ring."""
        ring, barriers = self.stages * self.stage_bytes, 8 * self.stages * (1 + (self.kernel != "one_group"))
        if self.kernel == "split":
            lines, line = (self.block_n, self.block_m) if self.swap else (self.block_m, self.block_n)
            return barriers + max(ring, lines * (line + 8) * 4)
        return barriers + ring + self.block_m * self.block_n * 2 // self.parts * min(self.parts, 2)

    def constants(self) -> dict:
        """What wgmma_gemm.cu is compiled with."""
        return {"KERNEL": self.kernel.upper(), "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "STAGES": self.stages,
                "DEPTH": self.depth, "CONSUMERS": self.consumers,
                "CLUSTER": self.cluster, "CTAS": self.ctas, "PARTS": self.parts, "GROUP": self.group,
                "SWAP": int(self.swap),
                "BREAK": BREAKS.index(self.leaves_out), "TIMELINE": 0}

    def __str__(self):
        words = [f"{self.kernel} {self.block_m} × {self.block_n}", f"{self.stages} stage{'s' * (self.stages > 1)}"]
        if self.kernel != "one_group":
            words.append(f"{self.consumers} consumer{'s' * (self.consumers > 1)}")
        words += [f"{64 * self.depth} deep"] * (self.depth > 1)
        words += [f"cluster {self.cluster}"] * (self.cluster > 1) + ["persistent"] * self.persistent
        words += [f"{self.ctas} an SM"] * (self.ctas > 1) + [f"{self.parts} parts"] * (self.parts > 1)
        words += [f"group {self.group}"] * (self.group > 1) + ["swapped"] * self.swap + ["early"] * self.early
        words += [f"without {self.leaves_out}"] * (self.leaves_out != "nothing")
        return ", ".join(words)

    def tiles(self, m: int, n: int) -> int:
        """How many tiles cover C, in whole clusters."""
        if self.swap:
            m, n = n, m
        below = self.cluster if self.kernel == "specialised" else 1
        return math.ceil(m / (self.block_m * below)) * below * math.ceil(n / self.block_n)

    def grid(self, m: int, n: int, sms: int) -> int:
        """CTAs of a launch."""
        tiles = self.tiles(m, n)
        if self.kernel == "split":
            return tiles * self.cluster
        return min(tiles, sms * self.ctas // self.cluster * self.cluster) if self.persistent else tiles


def _steps() -> dict[str, WgmmaConfig]:
    tile = WgmmaConfig("one_group", 128, 128, 1)
    roles = WgmmaConfig("specialised", 128, 128, 4)
    pair = dataclasses.replace(roles, consumers=2)
    wide = dataclasses.replace(pair, block_n=256, parts=4)
    cluster = dataclasses.replace(wide, cluster=2)
    persistent = dataclasses.replace(cluster, persistent=True)
    early = dataclasses.replace(persistent, early=True)
    return {"tile": tile, "ring": dataclasses.replace(tile, stages=4), "roles": roles, "pair": pair, "wide": wide,
            "cluster": cluster, "persistent": persistent, "early": early,
            "raster": dataclasses.replace(early, group=4)}


# The ladder: one idea a step, the tile chosen by shape ("best") as its last.
STEPS = _steps()


REGISTERS_BESIDE_SUMS = 40  # addresses, barrier phases, loop state; with fewer ptxas spills


def rejection(config: WgmmaConfig, smem_per_block: int = 232448, smem_per_sm: int = 233472) -> str:
    """Why `config` cannot run on sm_90a, in one sentence; empty when it may."""
    needed = config.smem_bytes
    if needed > smem_per_block:
        return f"it needs {needed:,} B of shared memory a block; sm_90a has {smem_per_block:,} B."
    each = smem_per_sm // config.ctas - 1024  # the driver keeps 1 KiB a block
    if needed > each:
        return f"{config.ctas} CTAs an SM leave {each:,} B of shared memory each; it needs {needed:,} B."
    share = 65536 // config.ctas // config.threads // 8 * 8
    handed = (min(share, 248) * (config.consumers + 1) - 40) // config.consumers
    available = min(share if config.kernel == "one_group" else handed, 240)
    if available < config.accumulators + REGISTERS_BESIDE_SUMS:
        return (f"a consumer's threads have {available} registers each and need about {REGISTERS_BESIDE_SUMS} beside "
                f"their {config.accumulators} sums.")
    needed = config.block_n // 2 + 26  # one product names all its sums at once, before the registers are handed over
    if share < needed:
        return f"a product of {config.block_n} columns needs {needed} registers; a thread starts with {share}."
    return ""


def candidates() -> list[WgmmaConfig]:
    """The configurations among which `choose` looks, large tiles first."""
    def persistent(*tile, **rest):
        return WgmmaConfig("specialised", *tile, persistent=True, early=True, **{"group": 16, **rest})

    large = [persistent(128, 256, 4, consumers=2, parts=4, group=4), persistent(128, 224, 4, consumers=2, parts=7),
             persistent(128, 192, 4, consumers=2), persistent(128, 128, 6, consumers=2)]
    # Few tiles: what counts is how many bytes are on their way; with depth=2 they are asked for in rows of 256 bytes.
    thin = [persistent(64, 64, 6, depth=2), persistent(64, 128, 8)]
    thin += [WgmmaConfig("split", 64, 192, 6, cluster=2, early=True),
             WgmmaConfig("split", 64, 128, 8, cluster=2, early=True)]
    # Few rows of C: they become its columns, of which a product may have as few as 16.
    thin += [persistent(64, 16, 10, depth=2, swap=True), persistent(64, 32, 8, depth=2, swap=True)]
    return [*large, *thin]


@dataclass(frozen=True)
class Rates:
    """What one SM does in a microsecond, and what things cost; read off the H200's sweep."""

    flops: float = 5.65e6  # with random data, which keeps the clock below its highest
    bytes_in: float = 130e3  # from L2 through its copy engine
    latency_us: float = 1.0  # from the issue of a load to its data
    dram_bytes: float = 4.1e6  # all SMs together
    launch_us: float = 3.5  # with a first fill and a last store, where nothing overlaps
    start_us: float = 1.0  # of a CTA that is not persistent
    store_us: float = 0.5  # of a tile, in boxes of 64 columns, while nobody multiplies
    split_us: float = 2.0  # sums through the cluster's shared memory
    overlap: float = 0.07  # of the shorter of two things that go on at one time, which is felt


def resident(config: WgmmaConfig) -> int:
    """CTAs that share an SM of sm_90a."""
    if config.persistent or config.kernel != "one_group":
        return config.ctas
    registers = config.accumulators + 40
    return max(1, min(233472 // (config.smem_bytes + 1024), 65536 // (config.threads * registers)))


def predicted_us(config: WgmmaConfig, m: int, n: int, k: int, sms: int, rates: Rates | None = None) -> float:
    """Predicted time in microseconds: waves of tiles, or DRAM's time where that is more.

    A step takes as long as the slowest of three: its products, its operands' way from L2, and the latency of a load
    spread over the loads in flight. Between tiles a CTA that is not persistent starts, fills its ring and stores.
    """
    rates, split = rates or Rates(), config.cluster if config.kernel == "split" else 1
    together = resident(config)
    waves = math.ceil(config.tiles(m, n) * split / (sms * together))
    products = 2 * config.block_m * config.block_n * BOX_K * config.depth / rates.flops
    shared = config.block_n * (1 - 1 / config.cluster) if config.kernel == "specialised" else 0  # loaded by a neighbour
    operands = config.stage_bytes * (1 - shared / (config.block_m + config.block_n)) / rates.bytes_in
    operands *= 1 if k % BOX_K == 0 else 1.5  # rows that begin within a line of 128 bytes: a box's row touches two
    if config.kernel == "one_group" and config.stages == 1:
        waited = (rates.latency_us + products) / together
    else:
        waited = rates.latency_us / (config.stages - 1) / together
    ends = rates.store_us * 64 / config.box + (0 if config.persistent else rates.start_us + rates.latency_us)
    ends = 0 if together > 1 and not config.persistent else ends  # the other CTAs go on
    step = max(products, operands, waited) + rates.overlap * min(products, operands)
    busy = waves * (math.ceil(config.steps(k) / split) * step * together + ends)
    dram = ((m + n) * k + m * n) * 2 / rates.dram_bytes
    return max(busy, dram) + rates.overlap * min(busy, dram) + rates.launch_us + rates.split_us * (split > 1)


def choose(m: int, n: int, k: int, sms: int) -> WgmmaConfig:
    """The configuration that is predicted to be fastest for C (m, n) with inner extent k."""
    def fits(config):
        if config.kernel == "split" and config.cluster > config.steps(k):
            return False
        return not config.swap or m <= config.block_n  # with more rows it would read B again

    return min(filter(fits, candidates()), key=lambda config: predicted_us(config, m, n, k, sms))


def parse(text: str) -> WgmmaConfig:
    """WgmmaConfig from "specialised,128,256,4,consumers=2,cluster=2,persistent=1"; ValueError says how."""
    fields = {field.name: field.type for field in dataclasses.fields(WgmmaConfig)}
    names, given = list(fields), {}
    for index, part in enumerate(text.split(",")):
        name, equals, value = part.partition("=")
        name, value = (name.strip(), value) if equals else (names[index] if index < 4 else "", name)
        kind = fields.get(name)
        try:
            if name in given or name == "leaves_out" or not value.isascii():
                raise ValueError(name)
            given[name] = {"str": str, "int": int, "bool": {"0": False, "1": True}.__getitem__}[kind](value.strip())
        except (KeyError, ValueError):
            given = {}
            break
    if not {"kernel", "block_m", "block_n", "stages"} <= set(given):
        raise ValueError("a configuration is KERNEL,BLOCK_M,BLOCK_N,STAGES and NAME=NUMBER for "
                         f"{', '.join(names[4:-1])}, such as specialised,128,256,4,consumers=2,parts=2; here it is "
                         f"{text[:80]!r}.")
    return WgmmaConfig(**given)
