"""Tile configurations of `ch14.attention`: the steps of the ladder, the choice for a GPU, and a model of the costs."""

from __future__ import annotations

import dataclasses
import math
import re

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
    """Return the configuration with this name, also in the old spelling "128,128,8,2 hopper overlap"."""
    if old := re.fullmatch(r"(\d+),(\d+),(\d+),(\d+)((?: [a-z-]+)*)", text):
        tile = f"{old[1]}×{old[2]} · {old[3]} warps · {old[4]} stages"
        text = tile + old[5].replace(" ", spoken.SEPARATOR)
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

    `case` is (batch, heads, key heads, queries, keys, head dimension, causal). With few queries the keys are split
    (`split_config`). On Hopper at D = 64 the case decides too: if the kernel with four groups would leave more than an
    eighth of the SMs without work, small tiles fill the GPU better. Its unit of work is a tile of 256 queries, or a
    pair of tiles under a causal mask.
    """
    if case and (few := split_config(d, target, case, sms)):
        return few
    if target is None:
        return AttentionConfig(32, 32, 4, 2)  # the interpreter is fast with small tiles
    limits = device.target_limits(target)
    if limits.smem_per_block < 200_000:  # RTX 50 and GB10 have 99 KB
        return AttentionConfig(128, 64, 8, 2)
    if not limits.has_wgmma:
        return AttentionConfig()
    if d != 64:
        return configs(d)["persistent"]
    four_groups = configs(d)["four groups"]
    if case:
        batch, heads, _, queries, _, _, causal = case
        rows = four_groups.block_m * (2 if causal else 1)
        if 8 * batch * heads * math.ceil(queries / rows) < 7 * sms:
            return configs(d)["plain"]
    return four_groups


SPLIT_TILES = {16: (64, 4, 4), 32: (64, 4, 4), 64: (64, 4, 3), 128: (64, 8, 2)}  # rows: keys, warps, stages
PROGRAMS_PER_SM = {16: 3, 32: 2, 64: 2, 128: 1}


def split_config(d: int, target: str | None, case: tuple, sms: int = 132) -> AttentionConfig | None:
    """Return a configuration of the split kernel where a case has few queries for many keys, else None."""
    batch, heads, kv_heads, queries, keys, _, causal = case
    if causal or queries > 64 or not all(case[:5]):
        return None
    group = heads // kv_heads
    block_m = next((rows for rows in SPLIT_TILES if rows >= queries * group), 128)
    block_n, warps, stages = SPLIT_TILES[block_m] if target else (32, 4, 2)
    if target and device.target_limits(target).smem_per_block < 200_000:
        stages = 2
    box_heads = min(1 << (group - 1).bit_length(), block_m)
    tiles = batch * kv_heads * math.ceil(queries * box_heads / block_m) * math.ceil(group / box_heads)
    splits = min(sms * PROGRAMS_PER_SM[block_m] // tiles, math.ceil(keys / block_n), MOST_SPLITS)
    return AttentionConfig(block_m, block_n, warps, stages, "split", splits=max(1, splits))


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
