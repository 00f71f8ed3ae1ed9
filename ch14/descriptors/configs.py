"""Say how `ch14.descriptors` cuts its tensors: the shape of a tile, how it is moved, and how many one program moves."""

from __future__ import annotations

from dataclasses import dataclass

from tilelab.runtime import device, spoken
from tilelab.runtime.operands import choose_config, require_whole_numbers

OPS = ("copy", "add", "gather")
WAYS = ("host", "device", "pointers", "gather4")
MAX_ELEMENTS = 1 << 20  # Triton's limit for a block
# Bytes: a tensor map counts addresses and strides in this unit, and one thread loads one unit at once.
UNIT = 16


@dataclass(frozen=True)
class TileConfig:
    """One way to move tiles.

    `way` is `host` or `device` (where descriptors are made), `pointers`, or `gather4` (a host descriptor of one row and
    four rows per instruction, on sm_100a and newer). A tile is block_m x block_n elements, powers of two, or a flat
    one of block_n when block_m is 0. A program moves `tiles_per_cta` neighbouring tiles. When that is 0, `ctas_per_sm`
    programs per SM take every n-th tile to the end. A program's loop loads `stages` - 1 tiles ahead.
    """

    way: str
    block_m: int
    block_n: int
    num_warps: int = 4
    tiles_per_cta: int = 1
    stages: int = 1
    ctas_per_sm: int = 8

    def __post_init__(self):
        if self.way not in WAYS:
            raise ValueError(f"unknown way {self.way!r}; choose {', '.join(WAYS)}.")
        require_whole_numbers(self)
        for name, smallest in (("block_m", 0), ("block_n", 1), ("num_warps", 1)):
            value = getattr(self, name)
            if value < smallest or value & (value - 1):
                raise ValueError(f"{name} must be a power of two; it is {value}.")
        for name, smallest in (("tiles_per_cta", 0), ("stages", 1), ("ctas_per_sm", 1)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} must be at least {smallest}; it is {getattr(self, name)}.")
        if self.num_warps > 32:
            raise ValueError(f"num_warps must be at most 32 (1,024 threads); it is {self.num_warps}.")
        if self.elements > MAX_ELEMENTS:
            raise ValueError(
                f"a tile must have at most {MAX_ELEMENTS:,} elements in Triton; it has {self.elements:,}."
            )
        if self.way == "gather4" and self.block_m < 8:
            raise ValueError(f"block_m must be at least 8 for gather4; it is {self.block_m}.")

    @property
    def elements(self) -> int:
        return max(self.block_m, 1) * self.block_n

    @property
    def block(self) -> tuple[int, ...]:
        """The shape of the tile."""
        return (self.block_m, self.block_n) if self.block_m else (self.block_n,)

    def descriptor_block(self, name: str) -> tuple[int, ...]:
        """Return the block shape of a tensor's descriptor; gather4 takes x row by row."""
        return (1, self.block_n) if self.way == "gather4" and name == "x" else self.block

    @property
    def uses_descriptors(self) -> bool:
        return self.way != "pointers"

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Return the name that a person can say: "host · 2×1024 · 4 warps · 1 tile per CTA · 1 stage"."""
        warps, stages = spoken.count(self.num_warps, "warps"), spoken.count(self.stages, "stages")
        tile = "×".join(map(str, self.block))
        return spoken.SEPARATOR.join([self.way, tile, warps, self.describe_loop(), stages])

    def describe_loop(self) -> str:
        """Return how many tiles a program moves, or how many programs share all tiles, in words."""
        if self.tiles_per_cta:
            return spoken.count(self.tiles_per_cta, "tiles per CTA")
        return spoken.count(self.ctas_per_sm, "CTAs per SM")

    def constants(self) -> dict:
        """Return the constexpr arguments that all kernels take."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "TILES_PER_CTA": self.tiles_per_cta,
            "STAGES": self.stages,
        }

    def programs(self, tiles: int, sms: int) -> int:
        """Return the number of programs that share `tiles` on a GPU of `sms` SMs."""
        return -(-tiles // self.tiles_per_cta) if self.tiles_per_cta else min(tiles, sms * self.ctas_per_sm)

    def rejection(self, target: str) -> str:
        """Return why it cannot run on `target`, in a sentence; empty when it may."""
        limit = device.target_limits(target)
        if self.uses_descriptors and not limit.has_tma:
            return f"{target} has no TMA: descriptors need sm_90a or newer, pointers run there."
        if self.way == "gather4" and limit.capability < (10, 0):
            return f"{target} has no tile::gather4 (sm_100a and newer have): take rows_host, a load for each row."
        return ""


# The course's choice of each kind, from a sweep on the H200. "best" takes the first of each operation.
VARIANTS = {
    "copy": {
        "tile_host": TileConfig("host", 2, 1024, 4),
        "flat_host": TileConfig("host", 0, 1024, 1),
        "tile_device": TileConfig("device", 2, 1024, 1, tiles_per_cta=0, stages=3, ctas_per_sm=4),
        "flat_device": TileConfig("device", 0, 1024, 1, tiles_per_cta=0, stages=3, ctas_per_sm=8),
        "tile_pointers": TileConfig("pointers", 1, 1024, 4),
        "flat_pointers": TileConfig("pointers", 0, 1024, 4),
    },
    "add": {
        "tile_host": TileConfig("host", 1, 2048, 4),
        "flat_host": TileConfig("host", 0, 1024, 1),
        "tile_device": TileConfig("device", 4, 2048, 1, tiles_per_cta=16, stages=3),
        "flat_device": TileConfig("device", 0, 4096, 1, tiles_per_cta=16, stages=3),
        "tile_pointers": TileConfig("pointers", 1, 1024, 4),
        "flat_pointers": TileConfig("pointers", 0, 1024, 4),
    },
    "gather": {
        "rows_host": TileConfig("host", 1, 512, 1, tiles_per_cta=4, stages=2),
        "rows_device": TileConfig("device", 1, 2048, 1, tiles_per_cta=0, stages=3, ctas_per_sm=8),
        "gather4": TileConfig("gather4", 8, 128, 4),
        "rows_pointers": TileConfig("pointers", 4, 1024, 8),
        "short_pointers": TileConfig("pointers", 16, 256, 8),
    },
}


def configs(op: str | None = None) -> dict[str, TileConfig]:
    """Return the variants of `op` by name, the best first; without `op` all variants, named as "copy tile_host"."""
    if op is None:
        return {f"{op} {name}": config for op, named in VARIANTS.items() for name, config in named.items()}
    if op not in VARIANTS:
        raise ValueError(f"unknown op {op!r}; choose {', '.join(OPS)}.")
    return VARIANTS[op]


def choose_variant(op: str, config: str | TileConfig) -> TileConfig:
    """Return the TileConfig that `config` (a variant's name, "best" or a TileConfig) means for `op`, or ValueError."""
    named = configs(op)
    config = choose_config(config, named, TileConfig, lambda: next(iter(named.values())))
    if config.way == "gather4" and op != "gather":
        raise ValueError(f"gather4 only gathers; it cannot {op}.")
    if op == "gather" and (config.block_m != 1 if config.way in ("host", "device") else not config.block_m):
        raise ValueError(
            f"block_m must be 1 to gather by descriptors of rows, and at least 1 by pointers; it is "
            f"{config.block_m}."
        )
    return config
