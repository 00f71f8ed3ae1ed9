"""How `ch10.tile_pipeline` cuts its tensors: what a TileConfig may be, what it needs, the course's choices."""

from __future__ import annotations

from dataclasses import dataclass

from tilelab import tensor_map

KERNELS = {"copy": "tile_copy", "stencil": "stencil", "transpose": "transpose", "add_shared": "add_shared",
           "accumulate": "accumulate"}  # by operation
PRODUCERS = ("thread", "warp")
RINGS = ("copy", "stencil", "accumulate")
MOST_STAGES, MOST_SPAN = 6, 64


@dataclass(frozen=True)
class TileConfig:
    """How a kernel cuts its tensors: tiles of `rows` x `columns` results, `span` neighbours a CTA of `threads`, through
    a ring of `stages`.

    The stencil's `producer` is one of its computing threads or a warp of its own, on top of `threads`. The
    transpose has boxes as wide as its `swizzle` (without one, 128 bytes), `block` x `block` elements a thread, and
    walks bands `raster` tiles tall. In add_shared `cluster` CTAs share a tile. `l2_promotion` is how much of a row
    L2 fetches at once.
    """

    op: str
    rows: int
    columns: int
    threads: int = 32
    stages: int = 1
    span: int = 1
    producer: str = "thread"
    swizzle: str = "none"
    block: int = 1
    raster: int = 1
    cluster: int = 1
    l2_promotion: str = "128B"

    def __post_init__(self):
        if not isinstance(self.op, str) or self.op not in KERNELS:
            raise ValueError(f"the operations are {', '.join(KERNELS)}; here it is {self.op!r}.")
        for name, least, most in (("rows", 1, 256), ("columns", 1, 256), ("threads", 32, 1024),
                                  ("stages", 1, MOST_STAGES), ("span", 1, MOST_SPAN), ("raster", 1, 32)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} must be a whole number from {least} to {most}; here it is {value!r}.")
        for name, allowed in (("producer", PRODUCERS), ("swizzle", tuple(tensor_map.SWIZZLES)), ("block", (1, 4)),
                              ("cluster", (1, 2, 4)), ("l2_promotion", tensor_map.PROMOTIONS)):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ValueError(f"{name} is one of {', '.join(map(str, allowed))}; here it is {value!r}.")
        if self.threads % 32:
            raise ValueError(f"threads must be a multiple of 32; here it is {self.threads}.")
        for names, ops in ((("stages", "span"), RINGS), (("producer",), ("stencil",)),
                           (("cluster",), ("add_shared",)), (("swizzle", "block", "raster"), ("transpose",))):
            for name in names:
                if self.op not in ops and getattr(self, name) not in (1, "thread", "none"):
                    raise ValueError(f"only {' and '.join(ops)} can choose {name}; here {self.op} has "
                                     f"{getattr(self, name)!r}.")
        getattr(self, f"_check_{self.op}", lambda: None)()

    def _check_stencil(self):
        if self.columns % 32 or self.columns > 224 or self.rows > 254:  # a box, halo included, has at most 256
            raise ValueError("the stencil's tiles are 1 to 254 rows and a multiple of 32 up to 224 columns; "
                             f"here they are {self.rows} x {self.columns}.")
        if self.threads % self.columns or self.rows % (self.threads // self.columns):
            raise ValueError("the stencil's threads are a multiple of its columns, and the rows a multiple of that; "
                             f"here are {self.threads} threads for {self.rows} x {self.columns}.")
        if self.block_threads > 1024:
            raise ValueError(f"a block has at most 1,024 threads; here are {self.threads} and a producer's warp.")

    def _check_transpose(self):
        if self.rows != self.columns or self.rows % 32:
            raise ValueError("the transpose's tiles are squares of a multiple of 32; "
                             f"here they are {self.rows} x {self.columns}.")
        held, most = self.rows * self.columns // self.threads, min(128, 65536 // self.threads - 40)
        if held > most:  # the tile is turned in registers
            raise ValueError(f"a thread of the transpose holds at most {most} elements; here {self.threads} threads "
                             f"hold {held} each: take more or a smaller tile.")

    def _check_add_shared(self):
        share = self.rows * self.columns * 4 // self.cluster
        if self.rows % self.cluster or share % 128:
            raise ValueError("each CTA of a cluster loads an equal number of whole rows, together a multiple of 128 "
                             f"bytes; here {self.cluster} share {self.rows} x {self.columns}.")

    def __str__(self):
        parts = [f"{self.op} {self.rows} × {self.columns}, {self.threads} threads"]
        if self.op in RINGS:
            parts += [f"{self.stages} stage{'s' * (self.stages > 1)}", f"span {self.span}"]
        if self.op == "stencil":
            parts.append(f"a {self.producer} loads")
        if self.op == "transpose":
            parts += [f"swizzle {self.swizzle}", f"{self.block} × {self.block} a thread", f"bands of {self.raster}"]
        if self.op == "add_shared":
            parts.append(f"cluster of {self.cluster}")
        if self.l2_promotion != "128B":
            parts.append("no promotion" if self.l2_promotion == "none" else f"L2 {self.l2_promotion}")
        return ", ".join(parts)

    @property
    def block_threads(self) -> int:
        """Threads of a block, a producer's warp included."""
        return self.threads + 32 * (self.producer == "warp")

    def box(self, itemsize: int = 4) -> tuple[int, int]:
        """Rows and columns of the box that one load of x takes."""
        if self.op == "stencil":  # a row, and a unit of 16 bytes, more on each side
            return self.rows + 2, self.columns + 8
        if self.op == "transpose":
            return self.rows, (tensor_map.SWIZZLES[self.swizzle] or 128) // itemsize
        return self.rows, self.columns

    def smem_bytes(self, itemsize: int = 4) -> int:
        """Dynamic shared memory of a block, for elements of `itemsize` bytes."""
        if self.op == "transpose":  # and room to start at a multiple of 1,024
            return self.rows * self.columns * itemsize + 1024
        rows, columns = self.box(itemsize)
        return (2 if self.op == "add_shared" else self.stages) * (-(-rows * columns * itemsize // 128) * 128)

    def tiles(self, shape) -> tuple[int, int]:
        """Tiles across and down a matrix of x, which has this shape."""
        return -(-shape[-1] // self.columns), -(-shape[-2] // self.rows)

    def blocks(self, shape) -> int:
        """CTAs of a launch for x of this shape."""
        wide, tall = self.tiles(shape)
        batches = -(-shape[0] // self.cluster) * self.cluster if len(shape) == 3 else 1
        return -(-wide // self.span) * tall * batches

    def constants(self, itemsize: int = 4) -> dict:
        """What tile_pipeline.cu is compiled with."""
        return macros(KERNELS[self.op], self.rows, self.columns, itemsize, self.threads, STAGES=self.stages,
                      SPAN=self.span, PRODUCER=PRODUCERS.index(self.producer),
                      SWIZZLE=tensor_map.SWIZZLES[self.swizzle], BLOCK=self.block, RASTER=self.raster,
                      CLUSTER=self.cluster)


def macros(kernel: str, rows: int, columns: int, itemsize: int, threads: int, **rest) -> dict:
    """What tile_pipeline.cu is compiled with: of the rest, what is not given is one, or none."""
    plain = {"STAGES": 1, "SPAN": 1, "PRODUCER": 0, "SWIZZLE": 0, "BLOCK": 1, "RASTER": 1, "CLUSTER": 1}
    return {"KERNEL": kernel.upper(), "ROWS": rows, "COLUMNS": columns, "ITEMSIZE": itemsize, "THREADS": threads,
            **plain, **rest}


# The course's choice of each kind; the first of each operation is the one taken for "best".
VARIANTS = {
    "copy": {
        "single": TileConfig("copy", 2, 256),
        "pair": TileConfig("copy", 1, 256, stages=2, span=2),
        "ring": TileConfig("copy", 8, 256, stages=4, span=8),
        "square": TileConfig("copy", 32, 32, stages=2, span=2),
    },
    "stencil": {
        "single": TileConfig("stencil", 32, 128, 256),
        "warp": TileConfig("stencil", 32, 128, 256, producer="warp"),
        "ring": TileConfig("stencil", 32, 128, 256, stages=2, span=4),
        "ring_warp": TileConfig("stencil", 32, 128, 256, stages=2, span=4, producer="warp"),
    },
    "transpose": {
        "swizzled": TileConfig("transpose", 64, 64, 256, swizzle="128B", block=4, raster=2, l2_promotion="256B"),
        "blocks": TileConfig("transpose", 64, 64, 256, block=4, raster=2, l2_promotion="256B"),
        "scalar_swizzled": TileConfig("transpose", 64, 64, 256, swizzle="128B", raster=2, l2_promotion="256B"),
        "scalar": TileConfig("transpose", 64, 64, 256, raster=2, l2_promotion="256B"),
        "small": TileConfig("transpose", 32, 32, 64, swizzle="128B", block=4, raster=2),
    },
    "add_shared": {
        "alone": TileConfig("add_shared", 4, 256, 64, l2_promotion="256B"),
        "two": TileConfig("add_shared", 4, 256, 64, cluster=2, l2_promotion="256B"),
        "four": TileConfig("add_shared", 4, 256, 64, cluster=4, l2_promotion="256B"),
    },
    "accumulate": {
        "single": TileConfig("accumulate", 2, 256),
        "pair": TileConfig("accumulate", 1, 256, stages=2, span=2),
        "ring": TileConfig("accumulate", 4, 256, stages=4, span=8),
    },
}


def configs(op: str) -> dict[str, TileConfig]:
    """The variants of `op`, a key of KERNELS, by name; the best first."""
    if not isinstance(op, str) or op not in VARIANTS:
        raise ValueError(f"the operations are {', '.join(KERNELS)}; here it is {op!r}.")
    return VARIANTS[op]


def chosen(op: str, config) -> TileConfig:
    """The TileConfig that `config`, a variant's name, "best" or a TileConfig, means for `op`; ValueError else."""
    named = configs(op)
    if isinstance(config, TileConfig):
        if config.op != op:
            raise ValueError(f"a TileConfig of {op} is wanted; here is one of {config.op}.")
        return config
    if config == "best":
        return next(iter(named.values()))
    if not isinstance(config, str) or config not in named:
        raise ValueError(f"the variants of {op} are best, {', '.join(named)}, or a TileConfig; here it is {config!r}.")
    return named[config]
