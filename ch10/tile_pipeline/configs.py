"""Say how `ch10.tile_pipeline` cuts its tensors: the fields of a TileConfig, their limits, and the course's choices."""

from __future__ import annotations

from dataclasses import dataclass

from tilelab.runtime import operands, spoken, tensor_map

KERNELS = {
    "copy": "tile_copy",
    "stencil": "stencil",
    "transpose": "transpose",
    "add_shared": "add_shared",
    "accumulate": "accumulate",
}  # by operation
DIMENSIONS = {"copy": 2, "stencil": 2, "transpose": 2, "add_shared": 3, "accumulate": 3}  # of x
PRODUCERS = ("thread", "warp")
RINGS = ("copy", "stencil", "accumulate")
MAX_STAGES = 6
LIMITS = {
    "rows": (1, 256),
    "columns": (1, 256),
    "threads": (32, 1024),
    "stages": (1, MAX_STAGES),
    "tiles_per_cta": (1, 64),
    "raster": (1, 1024),
}
CHOICES = {
    "producer": PRODUCERS,
    "swizzle": tuple(tensor_map.SWIZZLES),
    "block": (1, 4),
    "cluster": (1, 2, 4),
    "l2_promotion": tensor_map.PROMOTIONS,
}
# Fields that only some operations have; elsewhere they keep their defaults.
OWN_FIELDS = {
    "stages": RINGS,
    "tiles_per_cta": RINGS,
    "producer": ("stencil",),
    "cluster": ("add_shared",),
    "swizzle": ("transpose",),
    "block": ("transpose",),
    "raster": ("transpose",),
}
# The parts of a configuration's name, in this order.
PHRASES = {
    "op": "{}",
    "rows columns": "{}×{}",
    "threads": "{} threads",
    "stages": "{} stages",
    "tiles_per_cta": "{} tiles per CTA",
    "producer": "a {} loads",
    "swizzle": "swizzle {}",
    "block": "blocks of {}",
    "raster": "bands of {}",
    "cluster": "cluster of {}",
    "l2_promotion": "L2 fetches {}",
}


@dataclass(frozen=True)
class TileConfig:
    """A way to cut tensors: tiles of `rows` x `columns` results and `threads` per CTA.

    A CTA moves `tiles_per_cta` neighbours through a ring of `stages`. The stencil's `producer` is one of its computing
    threads, or a warp on top of `threads`. The transpose has boxes as wide as its `swizzle` (without one, 128 bytes),
    turns `block` x `block` elements per thread at a time, and walks along bands `raster` tiles tall. In add_shared,
    `cluster` CTAs share a tile of y. `l2_promotion` is how much of a row L2 fetches at once.
    """

    op: str
    rows: int
    columns: int
    threads: int = 32
    stages: int = 1
    tiles_per_cta: int = 1
    producer: str = "thread"
    swizzle: str = "none"
    block: int = 1
    raster: int = 1
    cluster: int = 1
    l2_promotion: str = "128B"

    def __post_init__(self):
        if self.op not in KERNELS:
            raise ValueError(f"unknown operation {self.op!r}; choose {', '.join(KERNELS)}.")
        for name, (smallest, largest) in LIMITS.items():
            if not smallest <= getattr(self, name) <= largest:
                raise ValueError(
                    f"{name} must be from {smallest} to {largest}; it is {getattr(self, name)!r}."
                )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be {' or '.join(map(str, allowed))}; it is {getattr(self, name)!r}."
                )
        if self.threads % 32:
            raise ValueError(f"threads must be a multiple of 32; it is {self.threads}.")
        for name, ops in OWN_FIELDS.items():
            if self.op not in ops and getattr(self, name) != getattr(TileConfig, name):
                raise ValueError(f"{name} is for {' and '.join(ops)}; {self.op} has {getattr(self, name)!r}.")
        if self.op == "stencil":
            self._check_stencil()
        elif self.op == "transpose":
            self._check_transpose()
        elif (
            self.rows % self.cluster
            or self.rows * self.columns * 4 // self.cluster % 128
            and self.op == "add_shared"
        ):
            raise ValueError(
                "each CTA of a cluster must load an equal number of rows, a multiple of 128 bytes; "
                f"{self.cluster} CTAs share {self.rows} x {self.columns}."
            )

    def _check_stencil(self):
        # a box, with its halo, is at most 256 x 256
        if self.columns % 32 or self.columns > 224 or self.rows > 254:
            raise ValueError(
                "the stencil's tiles must have up to 254 rows and 32, 64, ... or 224 columns; they are "
                f"{self.rows} x {self.columns}."
            )
        if self.threads % self.columns or self.rows % (self.threads // self.columns):
            raise ValueError(
                "the stencil's threads must be a multiple of its columns, and rows a multiple of that; "
                f"{self.threads} threads compute {self.rows} x {self.columns}."
            )
        if self.block_threads > 1024:
            raise ValueError(f"a block has at most 1,024 threads; it has {self.threads} and a producer warp.")

    def _check_transpose(self):
        if self.rows != self.columns or self.rows % 32:
            raise ValueError(
                f"the transpose's tiles must be squares of a multiple of 32; they are {self.rows} x "
                f"{self.columns}."
            )
        elements, largest = self.rows * self.columns // self.threads, min(128, 65536 // self.threads - 40)
        if elements > largest:  # the tile is turned in registers
            raise ValueError(
                f"a thread of the transpose can hold {largest} elements; {self.threads} threads hold "
                f"{elements} each: take more threads or a smaller tile."
            )

    @property
    def name(self) -> str:
        """The configuration as a person says it; `parse` reads it."""
        own = [field for field, ops in OWN_FIELDS.items() if self.op in ops]
        return spoken.say(self, PHRASES, ["threads", *own])

    def __str__(self) -> str:
        return self.name

    @property
    def block_threads(self) -> int:
        """Threads of a block, including a producer warp."""
        return self.threads + 32 * (self.producer == "warp")

    def box(self, itemsize: int = 4) -> tuple[int, int]:
        """Return the rows and columns of the box that one load of x brings."""
        if self.op == "stencil":  # one row and one unit of 16 bytes more on each side
            return self.rows + 2, self.columns + 8
        if self.op == "transpose":
            return self.rows, tensor_map.SWIZZLES[self.swizzle] // itemsize or self.columns
        return self.rows, self.columns

    def smem_bytes(self, itemsize: int = 4) -> int:
        """Return the dynamic shared memory of a block in bytes, for elements of `itemsize` bytes."""
        if self.op == "transpose":  # with room to start at a multiple of 1,024
            return self.rows * self.columns * itemsize + 1024
        rows, columns = self.box(itemsize)
        return (2 if self.op == "add_shared" else self.stages) * (-(-rows * columns * itemsize // 128) * 128)

    def tiles(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of tiles across and down a matrix of x, which has this shape."""
        return -(-shape[-1] // self.columns), -(-shape[-2] // self.rows)

    def blocks(self, shape: tuple[int, ...]) -> int:
        """Return the number of CTAs of a launch for x of this shape."""
        across, down = self.tiles(shape)
        batches = -(-shape[0] // self.cluster) * self.cluster if len(shape) == 3 else 1
        return -(-across // self.tiles_per_cta) * down * batches

    def constants(self, itemsize: int = 4) -> dict:
        """Return the macros with which tile_pipeline.cu is compiled."""
        return macros(
            KERNELS[self.op],
            self.rows,
            self.columns,
            itemsize,
            self.threads,
            STAGES=self.stages,
            TILES_PER_CTA=self.tiles_per_cta,
            PRODUCER=PRODUCERS.index(self.producer),
            SWIZZLE=tensor_map.SWIZZLES[self.swizzle],
            BLOCK=self.block,
            RASTER=self.raster,
            CLUSTER=self.cluster,
        )


def parse(text: str) -> TileConfig:
    """Return the configuration with this `name`. Raises ValueError for another text."""
    fields = spoken.read(text, PHRASES)
    if not {"op", "rows"} <= fields.keys():
        raise ValueError(f"{text!r:.80} names no configuration; one is copy · 2×256 · 32 threads.")
    return TileConfig(**fields)


def macros(kernel: str, rows: int, columns: int, itemsize: int, threads: int, **others: int) -> dict:
    """Return the macros of a kernel in tile_pipeline.cu; `others` replace their defaults."""
    defaults = {
        "STAGES": 1,
        "TILES_PER_CTA": 1,
        "PRODUCER": 0,
        "SWIZZLE": 0,
        "BLOCK": 1,
        "RASTER": 1,
        "CLUSTER": 1,
    }
    return {
        "KERNEL": kernel.upper(),
        "ROWS": rows,
        "COLUMNS": columns,
        "ITEMSIZE": itemsize,
        "THREADS": threads,
        **defaults,
        **others,
    }


# The first variant of each operation is "best", but a transpose walks along the longer side of x.
VARIANTS = {
    "copy": {
        "single": TileConfig("copy", 2, 256),
        "pair": TileConfig("copy", 1, 256, stages=2, tiles_per_cta=2),
        "ring": TileConfig("copy", 8, 256, stages=4, tiles_per_cta=8),
        "square": TileConfig("copy", 32, 32, stages=2, tiles_per_cta=2),
    },
    "stencil": {
        "single": TileConfig("stencil", 32, 128, 256),
        "warp": TileConfig("stencil", 32, 128, 256, producer="warp"),
        "ring": TileConfig("stencil", 32, 128, 256, stages=2, tiles_per_cta=4),
        "ring_warp": TileConfig("stencil", 32, 128, 256, stages=2, tiles_per_cta=4, producer="warp"),
    },
    "transpose": {
        "down": TileConfig("transpose", 64, 64, 256, block=4, raster=1024),
        "across": TileConfig("transpose", 64, 64, 256, block=4, raster=2),
    },
    "add_shared": {
        "alone": TileConfig("add_shared", 4, 256, 64, l2_promotion="256B"),
        "two": TileConfig("add_shared", 4, 256, 64, cluster=2, l2_promotion="256B"),
        "four": TileConfig("add_shared", 4, 256, 64, cluster=4, l2_promotion="256B"),
    },
    "accumulate": {
        "single": TileConfig("accumulate", 2, 256),
        "pair": TileConfig("accumulate", 1, 256, stages=2, tiles_per_cta=2),
        "ring": TileConfig("accumulate", 4, 256, stages=4, tiles_per_cta=8),
    },
}


def configs(op: str = "copy", shape: tuple[int, ...] = ()) -> dict[str, TileConfig]:
    """Return the variants of an operation by name, the best first: for x of this shape, else for a tall one."""
    if op not in VARIANTS:
        raise ValueError(f"unknown operation {op!r}; choose {', '.join(VARIANTS)}.")
    named = VARIANTS[op]
    is_wide = op == "transpose" and len(shape) == 2 and shape[0] < shape[1]
    return {"across": named["across"], **named} if is_wide else named


def choose_config(op: str, config: str | TileConfig, shape: tuple[int, ...]) -> TileConfig:
    """Return the configuration of `op` that `config` stands for: itself, a variant's name, or "best" for x's shape."""
    named = configs(op, shape)
    config = operands.choose_config(config, named, TileConfig, lambda: next(iter(named.values())), parse)
    if config.op != op:
        raise ValueError(f"config must be for {op}; it is for {config.op}.")
    return config
