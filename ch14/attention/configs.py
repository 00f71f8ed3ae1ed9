"""Tile configurations of `ch14.attention`: the ladder, the choice, how each is built, what the instructions cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tilelab import build, device

KERNELS = ("plain", "hopper")
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class AttentionConfig:
    """A tile of `block_m` queries that meets blocks of `block_n` keys, `num_stages` of them in flight.

    For the hopper kernel (two warp groups, 8 warps and one that loads): `overlap` runs the product with V under the
    next softmax, with `ping_pong` the groups take turns at the tensor core, and a `persistent` program an SM walks over
    the tiles.
    """

    block_m: int = 128
    block_n: int = 128
    num_warps: int = 8
    num_stages: int = 2
    kernel: str = "plain"
    overlap: bool = False
    ping_pong: bool = False
    persistent: bool = False

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; here it is {self.kernel!r}.")
        for name in ("block_m", "block_n", "num_warps", "num_stages"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number from 1; here it is {getattr(self, name)!r}.")
        for name in ("block_m", "block_n", "num_warps"):
            if getattr(self, name) & (getattr(self, name) - 1):
                raise ValueError(f"{name} must be a power of two; here it is {getattr(self, name)}.")
        if not 16 <= min(self.block_m, self.block_n) <= max(self.block_m, self.block_n) <= 256:
            raise ValueError(f"block_m and block_n are 16 to 256; here they are {self.block_m} and {self.block_n}.")
        if self.num_warps > 32 or self.num_stages > 16:
            raise ValueError(f"num_warps is at most 32 and num_stages 16; here they are {self.num_warps} and "
                             f"{self.num_stages}.")
        if self.kernel == "plain" and (self.overlap or self.ping_pong or self.persistent):
            raise ValueError("overlap, ping_pong and persistent are the hopper kernel's; this configuration is plain.")
        if self.kernel == "hopper" and (self.block_m, self.block_n, self.num_warps) != (128, 128, 8):
            raise ValueError("the hopper kernel has two warp groups of 64 queries, and blocks of 128 keys, so that one "
                             f"crosses the diagonal: 128,128,8; here it is {self.block_m},{self.block_n},"
                             f"{self.num_warps}.")
        if self.kernel == "hopper" and self.num_stages < 2:
            raise ValueError(f"the hopper kernel needs 2 stages at least; here it is {self.num_stages}.")

    def __str__(self):
        tile = f"{self.block_m},{self.block_n},{self.num_warps},{self.num_stages} {self.kernel}"
        return tile + " overlap" * self.overlap + " ping-pong" * self.ping_pong + " persistent" * self.persistent


def configs(d: int) -> dict[str, AttentionConfig]:
    """The ladder for head dimension `d`, step by step, by name."""
    roles = AttentionConfig(kernel="hopper")
    overlap = dataclasses.replace(roles, overlap=True)
    return {"plain": AttentionConfig(num_stages=3) if d > 64 else AttentionConfig(64, 128, 4, 2), "roles": roles,
            "overlap": overlap, "ping-pong": dataclasses.replace(overlap, ping_pong=True),
            "persistent": dataclasses.replace(overlap, persistent=True)}


def best(d: int, target: str | None) -> AttentionConfig:
    """The configuration for head dimension `d` on `target`; None: the interpreter, which wants small tiles."""
    if target is None:
        return AttentionConfig(32, 32, 4, 2)
    limits = device.target_limits(target)
    if limits.smem_per_block < 200_000:  # RTX 50, GB10
        return AttentionConfig(128, 64, 8, 2)
    if not limits.has_wgmma:
        return AttentionConfig()
    return configs(d)["plain" if d == 64 else "persistent"]


def rejection(config: AttentionConfig, target: str) -> str:
    """Why `config` cannot run on `target`, in a sentence; empty when it may."""
    limits = device.target_limits(target)
    if not limits.has_tma:
        return f"{target} has no TMA: descriptors need sm_90a or newer."
    if config.kernel == "hopper" and not limits.has_wgmma:
        return f"{target} has no wgmma, Hopper's instruction: use a plain configuration."
    return ""


def job(config: AttentionConfig, target: str, d: int, causal: bool = False, dtype: str = "bf16") -> build.Job:
    """How it is compiled for `target`, as `attention` launches it."""
    hopper = config.kernel == "hopper"
    layout = ""
    if hopper:
        from ch14.attention.hopper_kernel import TILE_LAYOUT  # here: a table of configurations needs no Triton
        layout = f",{TILE_LAYOUT!r}"
    queries, keys = (f"tensordesc<{dtype}[1, 1, {rows}, {d}]{layout}>"
                     for rows in (config.block_m // 2 if hopper else config.block_m, config.block_n))
    signature = {"q_desc": queries, "k_desc": keys, "v_desc": keys, "o_desc": queries, "scale": "fp32",
                 **dict.fromkeys(("KEYS", "row_blocks", "heads", "heads_per_kv"), "i32")}
    constants = {"CAUSAL": causal, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    if hopper:
        signature["items"] = "i32"
        constants |= {"STAGES": config.num_stages, "OVERLAP": config.overlap, "PING_PONG": config.ping_pong}
        return build.Job("ch14.attention.hopper_kernel:attention_hopper_kernel", signature, constants, target, 4, 3,
                         name=str(config))
    return build.Job("ch14.attention:attention_plain_kernel", signature, constants, target, config.num_warps,
                     config.num_stages, name=str(config))


# Of one SM of Hopper, a clock: CUDA C++ Programming Guide, table of arithmetic throughput; and 989 TFLOP/s of bf16 on
# 132 SMs at 1.83 GHz (H100's datasheet). FlashAttention-3, section 3, makes the same count.
FLOP_A_CLOCK, EXP_A_CLOCK, FP32_A_CLOCK = 4096, 16, 128


def clocks(d: int) -> dict[str, float]:
    """Clocks of an SM for one score: both products, the exponential, and what else the softmax takes in float32: scale,
    maximum, sum, half a conversion, and its share of the rescaling of the output once a block of 128 keys."""
    return {"products": 4 * d / FLOP_A_CLOCK, "exponential": 1 / EXP_A_CLOCK,
            "float32": (3.5 + d / 128) / FP32_A_CLOCK}


def balance(row_blocks: int, heads: int, sms: int, paired: bool) -> float:
    """Share of the time that `sms` persistent programs are busy under a causal mask, when a tile takes as long as the
    blocks that it meets, and one for its beginning and end: tiles dealt out longest first, head by head, or in the
    pairs of `attention_hopper.tiles_of`."""
    tiles = [[block + 2] for block in reversed(range(row_blocks))]
    if paired:
        tiles = [tiles[i] + tiles[-1 - i] * (i != row_blocks - 1 - i) for i in range((row_blocks + 1) // 2)]
    items = [sum(item) for item in tiles] * heads
    loads = [sum(items[program::sms]) for program in range(min(sms, len(items)))]
    return sum(items) / (sms * max(loads))
