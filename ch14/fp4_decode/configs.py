"""Name the tile configurations of the decode kernels, and choose one by the tokens and the size of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilelab.runtime import choice, device, spoken

MAX_TOKENS = 64
SLAB = 128  # columns of a step
CTAS = {64: 4, 128: 2, 192: 1, 256: 1}  # of the wgmma kernel per SM, by the rows of their tiles
GROUP = 32  # tokens of a program of the registers kernel at most; more are several groups
FEW = 16  # tokens, up to which the registers kernel is faster than the wgmma kernel

STAGED = 32768  # bf16 elements of x that a program stages at most: 64 KiB of shared memory


PHRASES = {"block_n share": "{}×{}", "num_warps": "{} warps", "num_stages": "{} stages", "kernel": "{}"}


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
            "CTAS": max(1, min(fit, CTAS[self.block_n])),
        }

    def grid(self, n: int, k: int) -> tuple[int, int]:
        """Return the blocks of rows and the shares of K."""
        return -(-n // self.block_n), -(-k // self.share)


def parse(text: str) -> DecodeConfig:
    """Return the configuration of a name, as `DecodeConfig.name` says it."""
    return DecodeConfig(**spoken.read(text, PHRASES))


def padded_tokens(m: int, kernel: str = "registers") -> int:
    """Return the tokens that a program computes for M: a power of two, at least 8, for `plain` at least 16.

    Raise ValueError for an M that `decode` does not take.
    """
    if not 1 <= m <= MAX_TOKENS:
        raise ValueError(
            f"x has {m} tokens; decode takes 1 to {MAX_TOKENS}: for more dequantise the weights and use "
            "torch.mm."
        )
    if kernel == "wgmma":
        return next(tokens for tokens in (8, 16, 32, 48, 64) if m <= tokens)
    tokens = max(16 if kernel == "plain" else 8, 1 << (m - 1).bit_length())
    return min(tokens, GROUP) if kernel == "registers" else tokens


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
    wide = list(wgmma_candidates(m, 8192, 8192, 132).values())[:6:3]
    found = [*wide, *_list_tiles(m)] if m > FEW else [*_list_tiles(m), *wide]
    found += [DecodeConfig("plain", 64, 1024, 4, 4), DecodeConfig("plain", 128, 2048, 4, 2)]
    return {str(config): config for config in found}


def wgmma_candidates(m: int, n: int, k: int, sms: int) -> dict[str, DecodeConfig]:
    """Return configurations of the wgmma kernel for a shape, by the name of their family (tilelab.runtime.choice).

    The CTAs of as many shares of K as possible run at the same time, or those of three quarters or half as many.
    """
    tokens, slabs, found = padded_tokens(m, "wgmma"), k // SLAB, {}
    for rows, ctas in CTAS.items():
        stage = rows * (SLAB // 2 + 4) + tokens * 2 * SLAB + 16
        stages = max(3, min(16, (232448 if ctas == 1 else 233472 // ctas - 1024) // stage))
        most = max(1, min(32, ctas * sms // math.ceil(n / rows), slabs // 4))
        for name, splits in (("most", most), ("more", most * 3 // 4), ("half", most // 2)):
            share = math.ceil(slabs / max(1, splits)) * SLAB
            found[f"{rows} rows, {name} shares"] = DecodeConfig("wgmma", rows, share, rows // 16, stages)
    return found


# The model of `predict_us`, fitted to the times of 17 weights at 24 to 64 tokens on an H200. In microseconds, for no
# tokens and for each of 64: a slab of a row where warps keep an SM busy, and a slab where they are too few.
ROW_US, SLAB_US, L2_BYTES_PER_US = (0.00163, 0.00203), (0.62, 0.39), 9e6
SINGLE = 1.22  # times as long take the rows of a CTA that has an SM for itself


def predict_us(config: DecodeConfig, m: int, n: int, k: int, sms: int) -> float:
    """Return the time for more than FEW tokens that a model expects.

    In the wgmma kernel, the busiest SM decodes and multiplies, beside the traffic of L2. CTAs that fill the GPU leave
    no room for the kernel that arranges the tokens of the next launch. The registers kernel multiplies with
    instructions of few tokens.
    """
    if config.kernel == "registers":
        return 4.5 + n * k / 1e6 * 0.5 * math.ceil(m / GROUP)
    tokens, (tiles, shares) = padded_tokens(m, "wgmma"), config.grid(n, k)
    ctas, resident = tiles * shares, config.constants(tokens)["CTAS"]
    busy = math.ceil(ctas / sms)
    if busy > resident:
        busy = math.ceil(ctas / sms / resident) * resident
    slabs, single = config.share // SLAB, CTAS[config.block_n] == 1
    row, slab = (fixed + more * tokens / 64 for fixed, more in (ROW_US, SLAB_US))
    decode = busy * config.block_n * slabs * row * (SINGLE if single else 1)
    alone = 0 if single else math.ceil(busy / resident) * slabs * slab
    traffic = ctas * slabs * (tokens * 256 + config.block_n * 68) / L2_BYTES_PER_US
    adding = 1.6 + 4.8e-5 * busy * shares * config.block_n * tokens if shares > 1 else 0
    full = (5 if single else 2) if ctas > 0.9 * resident * sms else 0
    return 2.9 + (decode**4 + alone**4 + traffic**4) ** 0.25 + adding + full


def find_best(m: int, n: int, k: int, here: device.Device, aligned: bool = True) -> tuple[DecodeConfig, str]:
    """Return the configuration for a shape, and how it was found. The wgmma kernel needs scales `aligned` to 4 bytes.

    The registers kernel takes up to FEW tokens, a K that is no multiple of SLAB, and small weights. A program of it
    waits for its tokens before it multiplies, and its sums are stored after it. So the busiest SM should have little to
    do, and 16 warps that do it. Many tokens multiply for longer, so the wait counts less, and missing warps more.
    """
    if here.capability is None or here.capability < (9, 0):
        return DecodeConfig("plain", 64, 512, 4, 2), "by the GPU"
    sms, groups = here.sms or 132, math.ceil(m / GROUP)
    wait, idle = (40_000, 0.3) if m <= FEW else (15_000, 0.8)

    def cost(tile: DecodeConfig) -> float:
        busy = math.ceil(math.prod(tile.grid(n, k)) * groups / sms)
        warps = min(busy * tile.num_warps, 16)
        return busy * (tile.block_n * min(tile.share, k) + wait) * (1 + idle * (1 - warps / 16))

    registers = min(_list_tiles(m), key=cost)
    if m <= FEW or k % SLAB or not here.has_wgmma or not aligned:
        return registers, "by the extents"
    found = {"registers": registers} | wgmma_candidates(m, n, k, sms)
    return min(found.values(), key=lambda config: predict_us(config, m, n, k, sms)), "by the model"


def is_bf16_faster(m: int, n: int, k: int, here: device.Device) -> bool:
    """Return whether cuBLAS takes less time with bf16 weights than `find_best`'s configuration does.

    The time of cuBLAS is a fit to 17 weights on an H200: weights come from DRAM, or the steps along a long K decide. In
    doubt it counts as faster. Up to FEW tokens, MXFP4 was always as fast.
    """
    config, how = find_best(m, n, k, here)
    if m <= FEW or how != "by the model":
        return False
    dram_share, _ = choice.find_shares(here.name or "")
    bf16_us = max(3.8 + 2 * n * k / (4.2e6 * dram_share), 3.4 + 1.3e-3 * k)
    return predict_us(config, m, n, k, here.sms or choice.SMS) > 0.95 * bf16_us


def best_config(m: int, n: int, k: int, here: device.Device) -> DecodeConfig:
    """Return the configuration for a shape that `find_best` finds."""
    return find_best(m, n, k, here)[0]


def launch_options(config: DecodeConfig) -> dict:
    """Return Triton's options for the registers kernel: an early start, and registers for two programs per SM."""
    return {"launch_pdl": True, "maxnreg": 128 if config.num_warps >= 8 else 255}
