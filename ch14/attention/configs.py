"""Tile configurations of `ch14.attention`: the steps of the ladder, the choice for a GPU, and a model of the costs."""

from __future__ import annotations

import dataclasses
import functools
import math

from tilelab.runtime import device, spoken

KERNELS = ("plain", "split", "split_hopper", "hopper")
HEAD_DIMS = (64, 128)
SIZES = (("block_m", 16, 256), ("block_n", 16, 256), ("num_warps", 1, 32))
MOST_SPLITS = 256
HOPPER_TILES = ((128, 128, 8), (192, 128, 12), (256, 64, 16))  # queries, keys, warps that compute


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """A tile of `block_m` queries that meets blocks of `block_n` keys, with `num_stages` blocks in flight.

    In the split kernel the rows of a tile are the queries of all heads that share a key head, and `splits` programs
    share its keys.

    The last three fields are for the hopper kernel, which has two or four warp groups that compute (8 or 16 warps), for
    64 queries each, and one warp that loads. `overlap` runs the product P V under the next softmax. With `ping_pong`
    the groups take turns at the tensor core. A `persistent` kernel has one program per SM, which goes through several
    tiles. ValueError says what is wrong.
    """

    block_m: int = 128
    block_n: int = 128
    num_warps: int = 8
    num_stages: int = 2
    kernel: str = "plain"
    overlap: bool = False
    ping_pong: bool = False
    persistent: bool = False
    splits: int = 1

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(
                f"unknown kernel {self.kernel!r}; choose {', '.join(KERNELS[:-1])} or {KERNELS[-1]}."
            )
        for name, low, high in SIZES:
            value = getattr(self, name)
            if not low <= value <= high or value & (value - 1) and self.kernel != "hopper":
                raise ValueError(f"{name} must be a power of two from {low} to {high}; it is {value}.")
        if self.num_stages < (2 if self.kernel == "hopper" else 1):
            raise ValueError(f"the {self.kernel} kernel cannot have {self.num_stages} stages.")
        if self.kernel != "hopper" and (self.overlap or self.ping_pong or self.persistent):
            raise ValueError(
                f"overlap, ping_pong and persistent need kernel='hopper'; this one is {self.kernel}."
            )
        if not 1 <= self.splits <= (MOST_SPLITS if self.is_split else 1):
            raise ValueError(
                f"splits must be from 1 to {MOST_SPLITS}, and 1 without kernel='split'; it is {self.splits}."
            )
        if self.kernel == "split_hopper" and (self.block_m, self.block_n, self.num_warps) != (128, 128, 8):
            raise ValueError("block_m, block_n, num_warps of the split_hopper kernel must be 128, 128, 8.")
        if self.kernel == "hopper" and (self.block_m, self.block_n, self.num_warps) not in HOPPER_TILES:
            raise ValueError(
                "block_m, block_n, num_warps of the hopper kernel must be 128, 128, 8 or 192, 128, 12 or 256, 64, 16: "
                "two or three warp groups of 64 queries with blocks of 128 keys, or four with blocks of 64."
            )

    @property
    def is_split(self) -> bool:
        """Return whether the rows of a tile come from all heads that share a key head, and programs share the keys."""
        return self.kernel in ("split", "split_hopper")

    @property
    def four_groups(self) -> bool:
        """Return whether this is the form of the hopper kernel with four warp groups, for heads of 64 features."""
        return self.kernel == "hopper" and self.block_m == 256

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×128 · 8 warps · 2 stages · hopper · overlap · persistent"."""
        parts = [f"{self.block_m}×{self.block_n}", spoken.count(self.num_warps, "warps")]
        parts += [spoken.count(self.num_stages, "stages"), self.kernel]
        if self.overlap:
            parts.append("overlap")
        if self.ping_pong:
            parts.append("ping-pong")
        if self.persistent:
            parts.append("persistent")
        if self.splits > 1:
            parts.append(spoken.count(self.splits, "splits"))
        return spoken.SEPARATOR.join(parts)

    def __str__(self) -> str:
        return self.name


PHRASES = {
    "block_m block_n": "{}×{}",
    "num_warps": "{} warps",
    "num_stages": "{} stages",
    "overlap": "overlap",
    "ping_pong": "ping-pong",
    "persistent": "persistent",
    "splits": "{} splits",
    "kernel": "{}",
}


def parse(text: str) -> AttentionConfig:
    """Return the configuration with this name. ValueError for other text."""
    return AttentionConfig(**spoken.read(text, PHRASES))


def configs(d: int = 128) -> dict[str, AttentionConfig]:
    """Return the steps of the ladder for head dimension `d`, by name, from the simplest to the last."""
    roles = AttentionConfig(kernel="hopper")
    overlap = dataclasses.replace(roles, overlap=True)
    steps = {
        "plain": AttentionConfig(num_stages=3) if d > 64 else AttentionConfig(64, 128, 4, 2),
        "roles": roles,
        "overlap": overlap,
        "ping-pong": dataclasses.replace(overlap, ping_pong=True),
        "persistent": dataclasses.replace(overlap, persistent=True),
    }
    if d == 64:
        steps["four groups"] = AttentionConfig(256, 64, 16, 5, "hopper", overlap=True, persistent=True)
    return steps


def best_config(d: int, target: str | None, case: tuple = (), sms: int = 132) -> AttentionConfig:
    """Return the fastest configuration for head dimension `d` on `target`; None is Triton's interpreter.

    `case` is (batch, heads, key heads, queries, keys, head dimension, causal). On Hopper the model of `estimate_us`
    ranks the kernels for whole tiles of a head and, without a mask, the split kernels. Elsewhere up to 64 queries are
    split so that each SM has two programs.
    """
    if target is None or not device.target_limits(target).has_wgmma:
        return _choose_portable(target, case, sms)
    if not case or not all(case[:5]):
        return configs(d)["persistent" if d > 64 else "four groups"]
    # Without a mask up to 64 queries are always split, and more where the model expects a clear gain.
    handicap = 1.0 if case[3] <= 64 else 1.05
    times = {config: handicap * estimate_us(config, case, sms) for config in _list_splits(d, case, sms)}
    if case[3] > 64 or case[6]:
        times |= {config: estimate_us(config, case, sms) for config, *_ in WHOLE_US[d]}
    return min(times, key=lambda config: times[config])


def _choose_portable(target: str | None, case: tuple, sms: int) -> AttentionConfig:
    """Return the configuration for a GPU without wgmma, or for the interpreter, which is fast with small tiles."""
    small = (
        target is not None and device.target_limits(target).smem_per_block < 200_000
    )  # RTX 50, GB10: 99 KB
    if case and not case[6] and case[3] <= 64 and all(case[:5]):
        batch, heads, kv_heads, queries, keys, *_ = case
        rows = queries * heads // kv_heads
        block_m, block_n = (16 if rows <= 16 else 64), (64 if target else 32)
        programs = batch * kv_heads * math.ceil(rows / block_m)
        splits = max(1, min(2 * sms // programs, math.ceil(keys / block_n), MOST_SPLITS))
        return AttentionConfig(block_m, block_n, 4, 2, "split", splits=splits)
    if target is None:
        return AttentionConfig(32, 32, 4, 2)
    return AttentionConfig(128, 64, 8, 2) if small else AttentionConfig()


def _hopper(block_m: int, block_n: int, num_warps: int, num_stages: int, **fields: bool) -> AttentionConfig:
    return AttentionConfig(
        block_m, block_n, num_warps, num_stages, "hopper", overlap=True, persistent=True, **fields
    )


# The costs of each kernel by head dimension, in microseconds on an H200: the launch, a tile's beginning and end, and a
# block of keys. The last two are for all tiles that an SM computes at a time, whose number follows. The costs were
# fitted to the shapes in `lesson.held_out.TUNED` and, for heads of 64, to six more of up to a wave of tiles.
WHOLE_US = {
    128: [
        (_hopper(128, 128, 8, 2), 6.0, 1.0, 1.46, 1),
        (_hopper(128, 128, 8, 2, ping_pong=True), 5.2, 1.0, 1.47, 1),
        (AttentionConfig(64, 64, 4, 3), 3.5, 3.0, 0.98, 2),
    ],
    64: [
        (_hopper(128, 128, 8, 3), 4.9, 0.8, 1.13, 1),
        (_hopper(192, 128, 12, 4), 6.3, 1.25, 1.51, 1),
        (_hopper(256, 64, 16, 5), 6.2, 0.5, 1.08, 1),
        (AttentionConfig(64, 128, 4, 2), 4.0, 2.2, 1.15, 2),
        (AttentionConfig(64, 64, 4, 3), 3.8, 1.0, 0.7, 2),
        (AttentionConfig(64, 64, 4, 2), 3.8, 1.5, 1.5, 4),
    ],
}


@dataclasses.dataclass(frozen=True)
class SplitCosts:
    """Hold the costs of a split kernel in microseconds: the launch, a program's beginning and end, and a block of keys.

    A block costs `block` per program on a busy SM, and `block_alone` if the SM has only one program. The merge has a
    rate in bytes per microsecond.
    """

    launch: float
    start: float
    block: float
    block_alone: float
    merge: float
    merge_rate: float
    programs_per_sm: int


SPLIT_US = {
    (128, AttentionConfig(16, 128, 4, 3, "split")): SplitCosts(3.15, 2.0, 1.0, 1.08, 0.8, 1.6e6, 1),
    (128, AttentionConfig(16, 128, 4, 2, "split")): SplitCosts(5.0, 1.0, 0.71, 2.0, 0.44, 3.6e6, 3),
    (128, AttentionConfig(64, 64, 4, 3, "split")): SplitCosts(1.8, 3.4, 0.55, 0.74, 1.5, 3.0e6, 2),
    (128, AttentionConfig(128, 128, 8, 2, "split_hopper")): SplitCosts(3.0, 3.0, 1.52, 1.52, 1.2, 2.5e6, 1),
    (64, AttentionConfig(16, 128, 4, 2, "split")): SplitCosts(3.0, 1.5, 0.43, 1.2, 1.0, 3.0e6, 3),
    (64, AttentionConfig(64, 128, 4, 3, "split")): SplitCosts(4.0, 1.4, 0.57, 0.9, 0.76, 2.2e6, 2),
    (64, AttentionConfig(128, 128, 8, 2, "split_hopper")): SplitCosts(3.0, 2.3, 1.0, 1.1, 1.06, 2.8e6, 1),
}
READ_RATE = 4.28e6  # bytes per microsecond in which K and V come from DRAM


def _list_splits(d: int, case: tuple, sms: int) -> list[AttentionConfig]:
    """Return each split kernel that suits the rows of a case, with one, two or three programs per SM."""
    batch, heads, kv_heads, queries, keys, _, causal = case
    if causal:
        return []
    rows, found = queries * heads // kv_heads, []
    for of_d, config in SPLIT_US:
        if of_d != d or (config.block_m == 16) != (rows <= 16) or config.block_m < 128 and queries > 64:
            continue
        tiles = batch * kv_heads * math.ceil(rows / config.block_m)
        most = min(math.ceil(keys / config.block_n), MOST_SPLITS)
        counts = {max(1, min(most, programs * sms // tiles)) for programs in (0, 1, 2, 3)}
        found += [dataclasses.replace(config, splits=splits) for splits in sorted(counts)]
    return found


def estimate_us(config: AttentionConfig, case: tuple, sms: int) -> float:
    """Return the microseconds that a configuration of WHOLE_US or SPLIT_US takes on a GPU with so many SMs, by a model.

    The busiest SM decides: it begins its tiles, and goes through their blocks of keys. A split kernel cannot be faster
    than DRAM gives it K and V.
    """
    batch, heads, kv_heads, queries, keys, d, causal = case
    blocks = math.ceil(keys / config.block_n)
    rate = READ_RATE * sms / 132
    if not config.is_split:
        _, launch, start, block, at_a_time = next(row for row in WHOLE_US[d] if row[0] == config)
        tiles, row_blocks = batch * heads, math.ceil(queries / config.block_m)
        places = sms * at_a_time
        if not causal:
            work = math.ceil(tiles * row_blocks / places) * (start + blocks * block)
        else:
            # Row block i meets ceil((i + 1) m / n) blocks of keys, until it meets all. The mean rounding is added.
            m, n, extra = config.block_m, config.block_n, config.kernel == "plain"  # it masks a block more
            growing = min(row_blocks, math.ceil(blocks * n / m))
            met = (
                growing * ((growing + 1) * m + n - math.gcd(m, n)) / (2 * n) + (row_blocks - growing) * blocks
            )
            total = start * row_blocks + block * (met + extra * row_blocks)
            longest = start + block * (min(blocks, math.ceil(row_blocks * m / n)) + extra)
            pairs = math.ceil(row_blocks / 2)
            if config.persistent and use_pairs(row_blocks, tiles, sms):
                work = math.ceil(tiles * pairs / sms) * total / pairs
            else:
                work = max(total * tiles / places + 0.3 * longest, longest)
        return launch + max(work, 4 * d * batch * (heads * queries + kv_heads * keys) / rate)
    costs = SPLIT_US[d, dataclasses.replace(config, splits=1)]
    rows = queries * heads // kv_heads
    programs = batch * kv_heads * math.ceil(rows / config.block_m) * config.splits
    busiest = math.ceil(programs / sms)
    waves = math.ceil(busiest / costs.programs_per_sm)
    work = math.ceil(blocks / config.splits) * max(busiest * costs.block, waves * costs.block_alone)
    read = batch * kv_heads * keys * d * 4 / rate
    merge = costs.merge + batch * kv_heads * rows * config.splits * (d + 2) * 8 / costs.merge_rate
    return costs.launch + costs.start * waves + max(work, read) + merge * (config.splits > 1)


def rejection(config: AttentionConfig, target: str) -> str:
    """Return the reason why `config` cannot run on `target`, in a sentence; empty if it may run."""
    limits = device.target_limits(target)
    if not limits.has_tma:
        return f"{target} has no TMA: descriptors need sm_90a or newer."
    if config.kernel in ("hopper", "split_hopper") and not limits.has_wgmma:
        return f"{target} has no wgmma, Hopper's instruction: use a plain configuration."
    return ""


# Operations per clock of one SM of Hopper. Sources: CUDA C++ Programming Guide, table of arithmetic throughput; H100's
# datasheet (989 TFLOP/s of bf16 on 132 SMs at 1.83 GHz). FlashAttention-3, section 3, counts in the same way.
FLOP_PER_CLOCK, EXP_PER_CLOCK, FP32_PER_CLOCK = 4096, 16, 128


def estimate_clocks(d: int) -> dict[str, float]:
    """Return the clocks of an SM that one score takes in each unit, for head dimension `d`.

    `products` are Q K^T and P V. `float32` is the rest of the softmax: scale, maximum, sum, half a conversion, and the
    rescaling of the output, which happens once per block of 128 keys.
    """
    return {
        "products": 4 * d / FLOP_PER_CLOCK,
        "exponential": 1 / EXP_PER_CLOCK,
        "float32": (3.5 + d / 128) / FP32_PER_CLOCK,
    }


def estimate_balance(row_blocks: int, heads: int, sms: int, paired: bool) -> float:
    """Return the share of the time that `sms` persistent programs are busy under a causal mask, by a model.

    A tile takes as long as the blocks of keys that it meets, and two more for its beginning and end. Programs take the
    tiles of each head longest first or, if `paired`, the pairs of `hopper_kernel.Problem.locate`.
    """
    tiles = [[block + 2] for block in reversed(range(row_blocks))]
    if paired:
        tiles = [tiles[i] + tiles[-1 - i] * (i != row_blocks - 1 - i) for i in range((row_blocks + 1) // 2)]
    items = [sum(item) for item in tiles] * heads
    loads = [sum(items[program::sms]) for program in range(min(sms, len(items)))]
    return sum(items) / (sms * max(loads))


@functools.lru_cache(maxsize=256)
def use_pairs(row_blocks: int, heads: int, sms: int) -> bool:
    """Return whether programs take pairs of tiles under a causal mask, or the longest tiles of all heads first.

    Pairs keep the K and V of a head in L2, and many pairs give every SM the same work. Where there are few, single
    tiles share the work better.
    """
    if row_blocks * heads > 16 * sms:
        return True
    tiles = [block + 2 for block in reversed(range(row_blocks)) for _ in range(heads)]
    loads = [0] * sms
    for number, first in enumerate(range(0, len(tiles), sms)):  # every second round goes backwards
        lengths = (tiles[first : first + sms] + [0] * sms)[:sms]
        loads = [load + length for load, length in zip(loads, lengths[:: -1 if number % 2 else 1])]
    return estimate_balance(row_blocks, heads, sms, paired=True) > 0.97 * sum(tiles) / (sms * max(loads))
