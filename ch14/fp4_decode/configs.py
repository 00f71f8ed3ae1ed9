"""Name the tile configurations of the decode kernels, and choose one by the tokens and the size of the weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tilelab.runtime import device, spoken

MAX_TOKENS = 64
SLAB = 128  # columns of a step

STAGED = 32768  # bf16 elements of x that a program stages at most: 64 KiB of shared memory


PHRASES = {"block_n share": "{}×{}", "num_warps": "{} warps", "num_stages": "{} stages", "kernel": "{}"}
_OLD_NAME = re.compile(
    r"(?P<kernel>[a-z]+),(?P<block_n>\d+),(?P<share>\d+),(?P<num_warps>\d+),(?P<num_stages>\d+)"
)


@dataclass(frozen=True)
class DecodeConfig:
    """Hold a program's tile, which is `block_n` rows of W and `share` columns. Raise ValueError for impossible values.

    `kernel` is "wgmma" (CUDA C++), whose ring has `num_stages` slabs of 128 columns, and where each of `num_warps`
    warps decodes 16 rows; "registers" (Gluon), which keeps `num_stages` slabs in registers; or "plain" (Triton), which
    has `num_stages` stages.
    """

    kernel: str
    block_n: int
    share: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        if self.kernel not in ("wgmma", "registers", "plain"):
            raise ValueError(f"unknown kernel {self.kernel!r:.40}; choose wgmma, registers or plain.")
        if self.kernel == "wgmma":
            for name, allowed in (
                ("block_n", range(64, 257, 64)),
                ("share", range(SLAB, 2**24 + 1, SLAB)),
                ("num_stages", range(3, 17)),
                ("num_warps", (self.block_n // 16,) if type(self.block_n) is int else ()),
            ):
                if type(getattr(self, name)) is not int or getattr(self, name) not in allowed:
                    words = (
                        f"{allowed[0]}"
                        if len(allowed) == 1
                        else f"one of {', '.join(map(str, allowed[:4]))}, ..."
                    )
                    raise ValueError(f"{name} is {getattr(self, name)!r}; for wgmma it must be {words}.")
            return
        for name, low, high in (
            ("block_n", 16, 512),
            ("share", 128, 4096),
            ("num_warps", 1, 16),
            ("num_stages", 1, 8),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high or value & (value - 1):
                raise ValueError(f"{name} is {value!r}; it must be a power of two from {low} to {high}.")
        if self.kernel == "registers" and self.block_n < 16 * self.num_warps:
            raise ValueError(
                f"block_n is {self.block_n}; {self.num_warps} warps need {16 * self.num_warps} rows."
            )
        if self.kernel == "registers" and 128 * self.num_stages > self.share:
            raise ValueError(f"{self.num_stages} slabs of 128 columns are more than a share of {self.share}.")

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×2048 · 8 warps · 4 stages · registers"."""
        return spoken.say(self, PHRASES)

    def __str__(self) -> str:
        return self.name

    @property
    def threads(self) -> int:
        """The threads of a CTA of the wgmma kernel: four warps load, and the others multiply."""
        return 32 * (4 + self.num_warps)

    def smem_bytes(self, tokens: int) -> int:
        """Return the bytes of a CTA of the wgmma kernel: the ring with its barriers, and a flag per warp group."""
        stage = self.block_n * (SLAB // 2 + 4) + tokens * 2 * SLAB + 16
        return self.num_stages * stage + self.num_warps

    def constants(self, tokens: int) -> dict[str, int]:
        """Return the -D constants of decode.cu."""
        fit = 233472 // (
            self.smem_bytes(tokens) + 1024
        )  # an SM's shared memory; 1 KiB of each CTA is the driver's
        return {
            "TOKENS": tokens,
            "CONSUMERS": self.block_n // 64,
            "STAGES": self.num_stages,
            "CTAS": max(1, min(fit, {64: 4, 128: 2}.get(self.block_n, 1))),
        }

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Return the blocks of rows and the shares of K."""
        return -(-n // self.block_n), -(-k // self.share)


def parse(text: str) -> DecodeConfig:
    """Return the configuration of a name, as `DecodeConfig.name` says it or in the old spelling with commas."""
    return DecodeConfig(**spoken.read(text, PHRASES, _OLD_NAME))


def padded_tokens(m: int, kernel: str = "registers") -> int:
    """Return the tokens that a kernel computes for M: a power of two, at least 8, for `plain` at least 16.

    Raise ValueError for an M that `decode` does not take.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise ValueError(
            f"x has {m} tokens; decode takes 1 to {MAX_TOKENS}: for more dequantise the weights and use "
            "torch.mm."
        )
    if kernel == "wgmma":
        return next(tokens for tokens in (8, 16, 32, 48, 64) if m <= tokens)
    return max(16 if kernel == "plain" else 8, 1 << (m - 1).bit_length())


# block_n, share, num_warps, num_stages: first the fastest on an H200 at 8192 x 8192, then smaller tiles for smaller
# weights. Each token takes registers for its sums, so more tokens leave room for fewer slabs or rows. Up to 16 tokens,
# 256 rows halve what the warps read of the tokens.
SMALLER = ((128, 1024, 8, 4), (64, 1024, 4, 4), (64, 512, 4, 4))

TILES = {
    8: ((128, 2048, 8, 4), *SMALLER),
    16: ((256, 1024, 8, 2), *SMALLER),
    MAX_TOKENS: ((128, 1024, 8, 2), *SMALLER),
}


def _list_tiles(m: int) -> list[DecodeConfig]:
    """Return the tiles for M tokens, the largest first. Their shares fit into shared memory, and slabs into shares."""
    most = STAGED // padded_tokens(m)
    tiles = next(tiles for tokens, tiles in TILES.items() if m <= tokens)
    return [
        DecodeConfig("registers", rows, min(share, most), warps, stages)
        for rows, share, warps, stages in tiles
    ]


def configs(m: int = 16) -> dict[str, DecodeConfig]:
    """Return configurations for M tokens by name, which is their text, the most promising first."""
    found = [*_list_tiles(m), DecodeConfig("plain", 64, 1024, 4, 4), DecodeConfig("plain", 128, 2048, 4, 2)]
    return {str(config): config for config in found}


def best_config(m: int, n: int, k: int, here: device.Device) -> DecodeConfig:
    """Return the configuration for a shape: the largest tile that makes enough programs for the GPU.

    A program waits for its tokens before it multiplies and for its sums to be stored after it, so an SM needs a second
    program that computes meanwhile. If no tile makes enough, the smallest makes most.
    """
    if here.capability is None or here.capability < (9, 0):
        return DecodeConfig("plain", 64, 512, 4, 2)
    tiles = _list_tiles(m)
    return next((tile for tile in tiles if math.prod(tile.grid(n, k)) >= 1.5 * here.sms), tiles[-1])


def launch_options(config: DecodeConfig, m: int) -> dict:
    """Return Triton's options for the registers kernel: an early start, and registers for two programs per SM.

    The sums of more than 32 tokens do not fit into so few registers.
    """
    return {"launch_pdl": True, "maxnreg": 128 if config.num_warps >= 8 and m <= 32 else 255}
