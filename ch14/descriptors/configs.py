"""How `ch14.descriptors` cuts its tensors: a tile, the way it is moved, and who moves how many of them."""

from __future__ import annotations

from dataclasses import dataclass

from tilelab import device

OPS = ("copy", "add", "gather")
WAYS = ("host", "device", "pointers", "gather4")
MOST_ELEMENTS = 1 << 20  # of a block, in Triton
UNIT = 16  # bytes; what a tensor map counts addresses and strides in, and a vector load of one thread


@dataclass(frozen=True)
class TileConfig:
    """One way to move tiles.

    `way`: `host` and `device` descriptors, `pointers`, or `gather4` (a host descriptor of one row, four rows an
    instruction, sm_100a and newer). A tile is BLOCK_M x BLOCK_N elements, powers of two; block_m 0 is a flat one of
    BLOCK_N. A program takes `span` tiles that lie side by side, or with span 0 every n-th tile to the end, `ctas`
    programs an SM. `stages` tiles are in flight in a program's loop.
    """

    way: str
    block_m: int
    block_n: int
    num_warps: int = 4
    span: int = 1
    stages: int = 1
    ctas: int = 8

    def __post_init__(self):
        if self.way not in WAYS:
            raise ValueError(f"way is one of {', '.join(WAYS)}; here it is {self.way!r}.")
        for name, least in (("block_m", 0), ("block_n", 1), ("num_warps", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two{' or 0' * (not least)}; here it is {value!r}.")
        for name, least in (("span", 0), ("stages", 1), ("ctas", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number from {least}; here it is {value!r}.")
        if self.num_warps > 32:
            raise ValueError(f"a block has at most 32 warps; here are {self.num_warps}.")
        if self.elements > MOST_ELEMENTS:
            raise ValueError(f"a tile has at most {MOST_ELEMENTS:,} elements in Triton; here are {self.elements:,}.")
        if self.way == "gather4" and self.block_m < 8:
            raise ValueError(f"gather4 wants tiles of 8 rows or more; here are {self.block_m}.")

    @property
    def elements(self) -> int:
        return max(self.block_m, 1) * self.block_n

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of the tile."""
        return (self.block_m, self.block_n) if self.block_m else (self.block_n,)

    def block_of(self, name: str) -> tuple[int, ...]:
        """Shape of the block that the descriptor of a tensor has: gather4 takes x row by row."""
        return (1, self.block_n) if self.way == "gather4" and name == "x" else self.block

    @property
    def described(self) -> bool:
        """Whether tiles go through descriptors."""
        return self.way != "pointers"

    def __str__(self):
        spread = f"span {self.span}" if self.span else f"{self.ctas} an SM"
        return (f"{self.way} {' × '.join(map(str, self.block))}, {self.num_warps} warp{'s' * (self.num_warps > 1)}, "
                f"{spread}, {self.stages} stage{'s' * (self.stages > 1)}")

    def constants(self) -> dict:
        """What every kernel is specialised for."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "SPAN": self.span, "STAGES": self.stages}

    def programs(self, tiles: int, sms: int) -> int:
        """How many programs share `tiles` on a GPU of `sms` SMs."""
        return -(-tiles // self.span) if self.span else min(tiles, sms * self.ctas)

    def rejection(self, target: str) -> str:
        """Why it cannot run on `target`, in a sentence; empty when it may."""
        limit = device.target_limits(target)
        if self.described and not limit.has_tma:
            return f"{target} has no TMA: descriptors need sm_90a or newer, pointers run there."
        if self.way == "gather4" and limit.capability < (10, 0):
            return f"{target} has no tile::gather4 (sm_100a and newer have): take rows_host, a load for each row."
        return ""


# The course's choice of each kind, by what a sweep on the H200 found; the first of each is what "best" takes.
VARIANTS = {
    "copy": {
        "tile_host": TileConfig("host", 2, 1024, 4),
        "flat_host": TileConfig("host", 0, 1024, 1),
        "tile_device": TileConfig("device", 2, 1024, 1, span=0, stages=3, ctas=4),
        "flat_device": TileConfig("device", 0, 1024, 1, span=0, stages=3, ctas=8),
        "tile_pointers": TileConfig("pointers", 1, 1024, 4),
        "flat_pointers": TileConfig("pointers", 0, 1024, 4),
    },
    "add": {
        "tile_host": TileConfig("host", 1, 2048, 4),
        "flat_host": TileConfig("host", 0, 1024, 1),
        "tile_device": TileConfig("device", 4, 2048, 1, span=16, stages=3),
        "flat_device": TileConfig("device", 0, 4096, 1, span=16, stages=3),
        "tile_pointers": TileConfig("pointers", 1, 1024, 4),
        "flat_pointers": TileConfig("pointers", 0, 1024, 4),
    },
    "gather": {
        "rows_host": TileConfig("host", 1, 512, 1, span=4, stages=2),
        "rows_device": TileConfig("device", 1, 2048, 1, span=0, stages=3, ctas=8),
        "gather4": TileConfig("gather4", 8, 128, 4),
        "rows_pointers": TileConfig("pointers", 4, 1024, 8),
        "short_pointers": TileConfig("pointers", 16, 256, 8),
    },
}


def configs(op: str) -> dict[str, TileConfig]:
    """The variants of `op` ("copy", "add" or "gather") by name, "best" first."""
    if op not in VARIANTS:
        raise ValueError(f"op is one of {', '.join(OPS)}; here it is {op!r}.")
    return VARIANTS[op]


def chosen(op: str, config) -> TileConfig:
    """The TileConfig that `config`, a variant's name, "best" or a TileConfig, means for `op`; ValueError else."""
    named = configs(op)
    if config == "best":
        return next(iter(named.values()))
    if isinstance(config, str) and config in named:
        return named[config]
    if not isinstance(config, TileConfig):
        raise ValueError(f"the variants of {op} are best, {', '.join(named)}, or a TileConfig; here it is {config!r}.")
    if config.way == "gather4" and op != "gather":
        raise ValueError(f"gather4 only gathers; here it is asked to {op}.")
    if op == "gather" and config.block_m != 1 and config.way in ("host", "device"):
        raise ValueError(f"a descriptor's tile is one row where rows are gathered (block_m 1); here it is "
                         f"{config.block_m}.")
    if op == "gather" and not config.block_m:
        raise ValueError("gather takes rows: block_m is at least 1; here it is 0.")
    return config
