"""Name the tile configurations of the fp8 kernel, and model which of them suits a shape."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from dataclasses import dataclass

from tilelab.runtime import spoken

BLOCK = 128  # A scale covers so many columns of K and of B. The widest swizzle has rows of 128 bytes.
ACTIVATIONS = (None, "silu", "gelu")
MAX_SPLITS = 64
FLOPS_PER_CLOCK = 8192  # of a Hopper SM in fp8, twice the rate of bf16
LEAST_STEPS = 6  # of K per split: fewer do not fill the ring
TILE = ("block_m block_n", "num_stages", "consumers", "scratch")  # always part of the name
PHRASES = {
    "block_m block_n": "{}×{}",
    "num_stages": "{} stages",
    "consumers": "{} consumers",
    "scratch": "{} scratch",
    "cluster": "cluster {}",
    "epilogue_warps": "{} warps for the epilogue",
    "splits": "{} splits",
    "group_m": "group {}",
    "pdl": "early",
}


@dataclass(frozen=True)
class Fp8Config:
    """Hold the tile and the ring of the fp8 kernel; raise ValueError for what Hopper cannot hold.

    A tile has 64 x `consumers` rows and `block_n` columns. Each consumer is a warp group that multiplies into `scratch`
    accumulators alternately. The ring has `num_stages` of 128 columns of K. `splits` CTAs share the K steps of a tile.
    The raster keeps `group_m` rows of tiles together. `pdl` starts the kernel while the one before it drains. With
    `epilogue_warps`, so many warps beside the producer apply bias and activation and store C, in bf16 and without
    splits; with 0, the consumers do.
    """

    consumers: int = 2
    scratch: int = 2
    num_stages: int = 5
    block_n: int = 128
    splits: int = 1
    group_m: int = 8
    pdl: bool = False
    epilogue_warps: int = 0
    cluster: int = 1

    def __post_init__(self):
        for name, lowest, highest in (
            ("consumers", 1, 3),
            ("scratch", 1, 2),
            ("num_stages", 3, 16),
            ("splits", 1, MAX_SPLITS),
            ("group_m", 1, 4096),
            ("epilogue_warps", 0, 7),
        ):
            value = getattr(self, name)
            if type(value) is not int or not lowest <= value <= highest:
                raise ValueError(
                    f"{name} is {value!r:.40}; it must be a whole number from {lowest} to {highest:,}."
                )
        if type(self.block_n) is not int or self.block_n not in range(64, 161, 16):
            raise ValueError(f"block_n is {self.block_n!r:.40}; it must be a multiple of 16 from 64 to 160.")
        if self.block_n > 128 and (self.scratch == 2 or self.consumers == 3):
            raise ValueError(
                f"{self.block_n} columns have registers for one scratch and two consumers at most."
            )
        if self.cluster not in (1, 2, 4) or self.block_n % (8 * self.cluster):
            raise ValueError(
                f"cluster is {self.cluster!r:.40}; it must be 1, 2 or 4, and block_n, here {self.block_n}, a multiple "
                "of 8 per CTA."
            )
        if self.consumers == 3 and self.scratch == 2:
            raise ValueError("three consumers have registers for one scratch each, not for two.")
        if self.epilogue_warps and self.splits > 1:
            raise ValueError("epilogue warps cannot add the sums of splits: splits must be 1.")
        if self.epilogue_warps > (3 if self.consumers == 3 else 4 * self.consumers):
            raise ValueError(
                f"{self.consumers} consumers have work for four epilogue warps each, and three leave registers for "
                f"three; epilogue_warps is {self.epilogue_warps}."
            )
        if self.smem_bytes > 232448:
            raise ValueError(
                f"{self} needs {self.smem_bytes:,} B of shared memory per block; Hopper has 232,448: take "
                "fewer stages."
            )

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def subtile_columns(self) -> int:
        """The columns of C that a store brings: they divide block_n, so that no store reaches into the next tile."""
        return math.gcd(self.block_n, 64)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers + (self.epilogue_warps > 3))

    @property
    def smem_bytes(self) -> int:
        """The ring with scales and barriers, and per consumer two subtiles of C and a flag.

        With epilogue warps, 16 rows of C twice for each, and for each warp of the consumers a slot with two barriers.
        """
        stage, warps = (self.block_m + self.block_n) * BLOCK + 4 * self.block_m + 16, 4 * self.consumers
        staged = self.consumers * 2 * 8192
        if self.epilogue_warps:
            staged = self.epilogue_warps * 2 * 2048 + warps * (16 * self.block_n * 4 + 16)
        return self.num_stages * stage + staged + 4 * self.consumers

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of C, with those that complete the clusters."""
        return math.ceil(m / self.block_m / self.cluster) * self.cluster * math.ceil(n / self.block_n)

    def traits(self, m: int, n: int, sms: int) -> tuple[float, float]:
        """Return how often the CTAs of a product fill the GPU, and the octaves by which tiles are larger than C."""
        tiles, slots = self.tiles(m, n), max(sms // self.cluster, 1) * self.cluster
        return tiles * self.splits / slots, math.log2(tiles * self.block_m * self.block_n / (m * n))

    def grid(self, m: int, n: int, sms: int) -> int:
        """Return the CTAs of a launch: at most one per SM, because each is persistent, and whole clusters."""
        return max(min(self.tiles(m, n) * self.splits, sms // self.cluster * self.cluster), self.cluster)

    def constants(self, bias: bool = False, activation: str | None = None, mx: bool = False) -> dict:
        """Return the -D constants of fp8.cu; raise ValueError for an epilogue that it does not have."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r:.40}; choose None, silu or gelu.")
        if mx and self.block_n != 128:
            raise ValueError(f"an MXFP8 output needs tiles of 128 columns; {self} has {self.block_n}.")
        if mx and self.epilogue_warps:
            raise ValueError("epilogue warps store bf16: for an MXFP8 output, epilogue_warps must be 0.")
        return {
            "BLOCK_N": self.block_n,
            "CONSUMERS": self.consumers,
            "SCRATCH": self.scratch,
            "STAGES": self.num_stages,
            "SPLIT": int(self.splits > 1),
            "GROUP_M": self.group_m,
            "BIAS": int(bias),
            "ACTIVATION": ACTIVATIONS.index(activation),
            "MX": int(mx),
            "CLUSTER": self.cluster,
            "EPILOGUE_WARPS": self.epilogue_warps,
        }

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×128 · 5 stages · 2 consumers · 2 scratch · early"."""
        return spoken.say(self, PHRASES, always=TILE)

    def __str__(self) -> str:
        return self.name


def parse(text: str) -> Fp8Config:
    """Return the configuration of a name, as `Fp8Config.name` says it."""
    fields = spoken.read(text, PHRASES)
    rows, config = fields.pop("block_m", 128), Fp8Config(**fields)
    if rows != config.block_m:
        raise ValueError(
            f"{config.consumers} consumers have a tile of {config.block_m} rows; {text[:60]!r} says {rows}."
        )
    return config


SQUARE, TALL, LOW, THIN = Fp8Config(), Fp8Config(3, 1, 4), Fp8Config(2, 2, 7, 64), Fp8Config(1, 2, 11, 64)


def configs() -> dict[str, Fp8Config]:
    """Return configurations by name. `candidates` lists more."""
    return {"square": SQUARE, "tall": TALL, "low": LOW, "thin": THIN}


# Tiles as (consumers, scratch, columns). Widths other than 64 and 128 can avoid a wave in which few SMs work.
TILES = (
    *((1, 2, columns) for columns in (64, 80, 96, 112, 128)),
    (1, 1, 160),
    *((2, 2, columns) for columns in (64, 96, 112, 128)),
    *((2, 1, columns) for columns in (144, 160)),
    *((3, 1, columns) for columns in (64, 96, 112, 128)),
)


def choose_epilogue_warps(block_m: int) -> int:
    """Return how many epilogue warps suit a tile of `block_m` rows best, where the consumers do not store C themselves.

    A tile of 64 rows has work for four. Of 128 rows, five store faster than four, and more are not faster. Beside the
    three consumers of 192 rows there are registers for three.
    """
    return {64: 4, 128: 5, 192: 3}[block_m]


@functools.cache
def fill_ring(consumers: int, scratch: int, block_n: int, **fields: int) -> Fp8Config:
    """Return an early configuration with as many stages as fit into shared memory."""
    for stages in range(16, 2, -1):
        with contextlib.suppress(ValueError):  # too much shared memory
            return Fp8Config(consumers, scratch, stages, block_n, pdl=True, **fields)
    raise ValueError(f"no ring of {consumers} consumers and {block_n} columns fits into shared memory.")


def candidates(m: int, n: int, k: int, sms: int, mx: bool = False) -> dict[str, Fp8Config]:
    """Return the configurations that "best" chooses from, by the name of their family: "128×96, cluster 2, split".

    `tilelab.runtime.choice` says what a family is. Where there are few tiles, splits of K share the SMs.
    """
    found, group = {}, 16 if m >= 4096 else 8
    for consumers, scratch, columns in TILES:
        rows = math.ceil(m / 64 / consumers)
        for cluster in (1, 2):  # clusters of four that need an SM each do not fit on all SMs
            if consumers > math.ceil(m / 64) or cluster > max(rows, 1) or columns % (8 * cluster):
                continue
            if mx and columns != 128 or cluster > 1 and columns == 80:
                continue
            fields = {"group_m": max(1, group // cluster), "cluster": cluster}
            whole = fill_ring(consumers, scratch, columns, **fields)
            name = f"{whole.block_m}×{columns}" + f", cluster {cluster}" * (cluster > 1)
            found[name] = whole
            splits = min(sms // whole.tiles(m, n), k // BLOCK // LEAST_STEPS, MAX_SPLITS)
            if splits > 1 and columns not in (80, 144):
                found[f"{name}, split"] = dataclasses.replace(whole, splits=splits)
            if (consumers, columns) == (2, 128) and m >= 512 and not mx:
                found[f"{name}, epilogue warps"] = fill_ring(2, 2, 128, epilogue_warps=3, **fields)
    return found


def best_config(m: int, n: int, k: int, sms: int, mx: bool = False) -> Fp8Config:
    """Return the configuration for a shape on `sms` SMs that `predict_us` expects to be fastest.

    An MXFP8 output (`mx`) needs 128 columns.
    """
    return min(candidates(m, n, k, sms, mx).values(), key=lambda config: predict_us(config, m, n, k, sms))


# The model of `predict_us`, fitted to 7,000 times of 250 shapes on an H200. In clocks of CLOCK_GHZ: a CTA multiplies
# with this share of the tensor core's rate (by the number of scratches). L2 delivers so many bytes per clock to an SM,
# and to all of them. A tile takes so long to begin and, per element, to store; the same for adding splits.
CLOCK_GHZ, RATE_SHARE, L2_BYTES_PER_CLOCK, ALL_L2_BYTES_PER_CLOCK = 1.6, {1: 0.802, 2: 1.056}, 58.2, 6140
TILE_CLOCKS, STORE_CLOCKS, SPLIT_CLOCKS, PART_CLOCKS = 567, 0.0664, 9480, 0.0512
DRAM_BYTES_PER_US, LAUNCH_US, CLUSTER_US, BLEND = 3.49e6, 1.62, 0.24, 3.58


def predict_us(config: Fp8Config, m: int, n: int, k: int, sms: int) -> float:
    """Return the time of a product in microseconds that a model of waves of tiles expects.

    `BLEND` is the exponent of a norm that decides how far waves and the traffic of DRAM overlap.
    """
    element = config.block_m * config.block_n
    ctas, slots = config.tiles(m, n) * config.splits, max(sms // config.cluster, 1) * config.cluster
    multiply = 2 * element * BLOCK / FLOPS_PER_CLOCK / RATE_SHARE[config.scratch]
    rate = min(L2_BYTES_PER_CLOCK, ALL_L2_BYTES_PER_CLOCK / min(ctas, slots))
    load = (min(config.block_m, m) + config.block_n) * BLOCK / rate
    step = (multiply**4 + load**4) ** 0.25
    fixed = TILE_CLOCKS + STORE_CLOCKS * element
    fixed += (config.splits > 1) * (SPLIT_CLOCKS + PART_CLOCKS * config.splits * element)
    steps = math.ceil(k / BLOCK / config.splits)
    busy = math.ceil(ctas / slots) * (steps * step + fixed) / CLOCK_GHZ / 1e3
    memory = operand_bytes(m, n, k) / DRAM_BYTES_PER_US
    return (busy**BLEND + memory**BLEND) ** (1 / BLEND) + LAUNCH_US + CLUSTER_US * (config.cluster > 1)


def operand_bytes(m: int, n: int, k: int) -> int:
    """Return the bytes that a product moves at least: fp8 operands and their scales once, C in bf16 once."""
    return (m + n) * k + 4 * (m + math.ceil(n / BLOCK)) * (k // BLOCK) + 2 * m * n
