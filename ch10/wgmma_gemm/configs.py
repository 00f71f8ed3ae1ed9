"""Configurations of the WGMMA GEMM: limits, the steps of the ladder, and their names."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tilelab.runtime import spoken

KERNELS = ("one_group", "specialised", "split")
BOX_K = 64  # columns of A and B in a box: 128 bytes, the widest swizzle
# The parts of a configuration's name, in this order.
PHRASES = {
    "block_m block_n block_k": "{}×{}×{}",
    "num_stages": "{} stages",
    "kernel": "{}",
    "consumers": "{} consumers",
    "cluster": "cluster of {}",
    "cluster_n": "{} wide",
    "persistent": "persistent",
    "epilogue_subtile": "C in {} parts",
    "group_m": "groups of {}",
    "swap": "swapped",
    "pdl": "early",
}
LIMITS = {
    "block_m": 256,
    "block_n": 256,
    "num_stages": 16,
    "consumers": 3,
    "cluster": 8,
    "cluster_n": 2,
    "epilogue_subtile": 16,
    "group_m": 4096,
    "boxes_per_stage": 4,
}


@dataclass(frozen=True)
class WgmmaConfig:
    """A tile of `block_m` x `block_n` elements of C, and how a kernel of wgmma_gemm.cu computes it.

    `consumers` warp groups multiply the contents of a ring of `num_stages`. A stage holds `boxes_per_stage` boxes of 64
    columns of A and of B. `cluster` CTAs (1, 2 or 4) share tiles of B, and `cluster_n` columns of such CTAs (1 or 2)
    share tiles of A; in the kernel `split`, `cluster` CTAs share the K steps of one tile. A `persistent` kernel starts
    only one CTA per SM. The epilogue stores C in `epilogue_subtile` parts; at most two are in shared memory at a time.
    The raster walks over bands of `group_m` rows of tiles. With `swap`, the kernel computes C transposed, and block_m
    counts columns of C. With `pdl` (programmatic dependent launch), CTAs may start while the previous kernel in the
    stream still runs.
    """

    kernel: str
    block_m: int
    block_n: int
    num_stages: int
    consumers: int = 1
    cluster: int = 1
    cluster_n: int = 1
    persistent: bool = False
    epilogue_subtile: int = 1
    group_m: int = 1
    swap: bool = False
    pdl: bool = False
    boxes_per_stage: int = 1

    def __post_init__(self):
        if self.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {self.kernel!r}; choose {', '.join(KERNELS)}.")
        for name, largest in LIMITS.items():
            if not 1 <= getattr(self, name) <= largest:
                raise ValueError(f"{name} must be from 1 to {largest:,}; it is {getattr(self, name)!r}.")
        if self.block_m % (64 * self.consumers):
            raise ValueError(
                f"block_m must be a multiple of 64 for each of {self.consumers} consumers, because wgmma "
                f"takes 64 rows; it is {self.block_m}."
            )
        columns = 8 if self.swap else 16  # that stmatrix stores at least
        if self.block_n % (columns * self.epilogue_subtile):
            raise ValueError(
                f"block_n must be a multiple of {columns} in each of {self.epilogue_subtile} subtiles; it is "
                f"{self.block_n}."
            )
        alone = (self.consumers, self.cluster_size, self.persistent, self.pdl) == (1, 1, False, False)
        if self.kernel == "one_group" and not alone:
            raise ValueError(
                "consumers and cluster must be 1, and persistent and pdl False, for the kernel one_group; "
                f"they are {self.consumers}, {self.cluster}, {self.persistent} and {self.pdl}."
            )
        if self.kernel != "one_group" and self.num_stages < 2:
            raise ValueError(
                f"the kernel {self.kernel} needs 2 stages, because it releases one only while the next is "
                "multiplied."
            )
        if self.kernel == "specialised" and self.cluster not in (1, 2, 4):
            raise ValueError(f"cluster must be 1, 2 or 4 for the kernel specialised; it is {self.cluster}.")
        if self.kernel == "split" and self.cluster < 2:
            raise ValueError("cluster must be at least 2 for the kernel split; it is 1.")
        if self.kernel == "split" and (self.persistent or self.epilogue_subtile > 1 or self.cluster_n > 1):
            raise ValueError(
                "persistent must be False, epilogue_subtile and cluster_n 1 for the kernel split; they are "
                f"{self.persistent}, {self.epilogue_subtile} and {self.cluster_n}."
            )

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster * self.cluster_n

    @property
    def accumulators(self) -> int:
        """Sums that a thread of a consumer holds in registers."""
        return self.block_m * self.block_n // self.consumers // 128

    @property
    def threads(self) -> int:
        return 128 if self.kernel == "one_group" else 128 * (1 + self.consumers)

    @property
    def stage_bytes(self) -> int:
        return (self.block_m + self.block_n) * self.block_k * 2

    @property
    def box(self) -> int:
        """Columns of the boxes in which C is stored: the widest swizzle that divides a subtile."""
        return next(
            width for width in (64, 32, 16) if self.swap or self.block_n // self.epilogue_subtile % width == 0
        )

    @property
    def boxes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of a box of A, of B and of C, which their tensor maps describe."""
        shares = self.cluster if self.kernel == "specialised" else 1
        if self.block_n % (8 * shares):
            shares = 1  # the CTAs of a cluster take turns in loading whole boxes
        c_rows = self.block_n // self.epilogue_subtile if self.swap else 64
        return (self.block_m // self.cluster_n, BOX_K), (self.block_n // shares, BOX_K), (c_rows, self.box)

    def steps(self, k: int) -> int:
        """Return the number of stages that K columns fill."""
        return math.ceil(k / self.block_k)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA: ring, staged C and barriers. The sums of `split` replace the ring."""
        ring = self.num_stages * self.stage_bytes
        barriers = 8 * self.num_stages * (1 + (self.kernel != "one_group"))
        if self.kernel == "split":
            lines, line = (self.block_n, self.block_m) if self.swap else (self.block_m, self.block_n)
            return barriers + max(ring, lines * (line + 8) * 4)
        staged = self.block_m * self.block_n * 2 // self.epilogue_subtile * min(self.epilogue_subtile, 2)
        return barriers + ring + staged

    def constants(self) -> dict:
        """Return the macros with which wgmma_gemm.cu is compiled."""
        return {
            "KERNEL": self.kernel.upper(),
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STAGES": self.num_stages,
            "BOXES_PER_STAGE": self.boxes_per_stage,
            "CONSUMERS": self.consumers,
            "CLUSTER": self.cluster,
            "CLUSTER_N": self.cluster_n,
            "EPILOGUE_SUBTILE": self.epilogue_subtile,
            "GROUP_M": self.group_m,
            "SWAP": int(self.swap),
        }

    @property
    def block_k(self) -> int:
        """Columns of A and of B in a stage."""
        return BOX_K * self.boxes_per_stage

    @property
    def name(self) -> str:
        """The configuration as a person says it; `parse` reads it."""
        always = ["block_m block_n block_k"] + ["consumers"] * (self.kernel != "one_group")
        return spoken.say(self, PHRASES, always)

    def __str__(self) -> str:
        return self.name

    def tiles(self, m: int, n: int) -> int:
        """Return the number of tiles that cover C (m, n), in whole clusters."""
        if self.swap:
            m, n = n, m
        below = self.cluster if self.kernel == "specialised" else 1
        rows, columns = math.ceil(m / (self.block_m * below)), math.ceil(n / (self.block_n * self.cluster_n))
        return rows * below * columns * self.cluster_n

    def grid(self, m: int, n: int, sms: int) -> int:
        """Return the number of CTAs of a launch for C (m, n) on a GPU with `sms` SMs."""
        tiles = self.tiles(m, n)
        if self.kernel == "split":
            return tiles * self.cluster
        usable = count_usable_sms(self.cluster_size, sms)
        return min(tiles, usable) if self.persistent else tiles


# A cluster lies in one GPC, and GPCs have different numbers of SMs. These are how many of 132 SMs clusters of a size
# filled on seven H200s: with more CTAs than that, the median time of split products jumped to 1.3 to 1.8 times. The
# figure for six is between those of its neighbours. Other chips may fill a cluster more or less.
USABLE = {1: 132, 2: 132, 3: 117, 4: 116, 5: 110, 6: 102, 8: 104}


def count_usable_sms(cluster: int, sms: int) -> int:
    """Return how many of a GPU's SMs clusters of this size can fill at the same time, at least one cluster's."""
    share = USABLE.get(cluster, USABLE[8]) / USABLE[1]
    return max(int(sms * share) // cluster * cluster, cluster)


def parse(text: str) -> WgmmaConfig:
    """Return the configuration with this `name`. Raises ValueError for another text."""
    fields: dict[str, Any] = {"block_k": BOX_K, "kernel": "specialised"}
    fields |= spoken.read(text, PHRASES)
    if not {"block_m", "num_stages"} <= fields.keys():
        raise ValueError(f"{text!r:.80} names no configuration; one is 128×256×64 · 4 stages · 2 consumers.")
    return WgmmaConfig(boxes_per_stage=fields.pop("block_k") // BOX_K, **fields)


def _ladder() -> dict[str, WgmmaConfig]:
    tile = WgmmaConfig("one_group", 128, 128, 1)
    warp_specialized = WgmmaConfig("specialised", 128, 128, 4)
    two_consumers = dataclasses.replace(warp_specialized, consumers=2)
    tile_128x256 = dataclasses.replace(two_consumers, block_n=256, epilogue_subtile=4)
    cluster = dataclasses.replace(tile_128x256, cluster=2)
    persistent = dataclasses.replace(cluster, persistent=True)
    pdl = dataclasses.replace(persistent, pdl=True)
    return {
        "tile": tile,
        "ring": dataclasses.replace(tile, num_stages=4),
        "warp_specialized": warp_specialized,
        "two_consumers": two_consumers,
        "tile_128x256": tile_128x256,
        "cluster": cluster,
        "persistent": persistent,
        "pdl": pdl,
        "raster": dataclasses.replace(pdl, group_m=4),
    }


STEPS = _ladder()  # each step adds one idea to the step before it


def configs() -> dict[str, WgmmaConfig]:
    """Return the steps of the ladder by name, in their order."""
    return STEPS


SMEM_BYTES = 232448  # that a block may have on sm_90a
REGISTERS_BESIDE_SUMS = 40  # addresses, barrier phases, loop state; with fewer ptxas spills


def rejection(config: WgmmaConfig) -> str:
    """Return in one sentence why `config` cannot run on sm_90a, or an empty string if it can."""
    if config.smem_bytes > SMEM_BYTES:
        return f"it needs {config.smem_bytes:,} B of shared memory per block; sm_90a has {SMEM_BYTES:,} B."
    share = 65536 // config.threads // 8 * 8
    after_transfer = (min(share, 248) * (config.consumers + 1) - 40) // config.consumers // 8 * 8
    registers = min(share if config.kernel == "one_group" else after_transfer, 240)
    if registers < config.accumulators + REGISTERS_BESIDE_SUMS:
        return (
            f"a consumer's thread has {registers} registers; it needs about {REGISTERS_BESIDE_SUMS} beside its "
            f"{config.accumulators} sums."
        )
    needed = config.block_n // 2 + 26  # ptxas allocates one wgmma's sums before setmaxnreg raises the limit
    if share < needed:
        return f"a wgmma of {config.block_n} columns needs {needed} registers; a thread starts with {share}."
    return ""


def fits(config: WgmmaConfig, k: int) -> bool:
    """Return whether there are K steps for each CTA of a split."""
    return config.kernel != "split" or config.cluster <= config.steps(k)
