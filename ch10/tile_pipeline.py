"""Tiles of two dimensions, moved by tensor maps: a copy, a stencil, a transpose, a sum with an operand that a cluster
shares, and a sum that L2 adds up.

The kernels are in tile_pipeline.cu. Source: PTX ISA, "cp.async.bulk.tensor", "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes
import pathlib
import sys
from dataclasses import dataclass

import torch

from tilelab import build, cuda, device, tensor_map

SOURCE = pathlib.Path(__file__).with_name("tile_pipeline.cu")
KERNELS = {"copy": "tile_copy", "stencil": "stencil", "transpose": "transpose", "add_shared": "add_shared",
           "accumulate": "accumulate"}  # by operation
PRODUCERS = ("thread", "warp")
RINGS = ("copy", "stencil", "accumulate")
UNIT = 16  # bytes; rows of a tensor start at multiples of it, rows of a box take whole ones
MOST_STAGES, MOST_SPAN = 6, 64
LARGEST = (1 << 31) - (1 << 15)  # of an extent: coordinates have 32 bits, and the last CTA's may lie past the end
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers by size: their maps keep all bits


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
                              ("cluster", (1, 2, 4)),
                              ("l2_promotion", tensor_map.PROMOTIONS)):
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
        return ", ".join(parts) + ("" if self.l2_promotion == "128B" else f", L2 {self.l2_promotion}")

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

    def constants(self, itemsize: int = 4) -> dict:
        """What tile_pipeline.cu is compiled with."""
        return _constants(KERNELS[self.op], self.rows, self.columns, itemsize, self.threads, STAGES=self.stages,
                          SPAN=self.span, PRODUCER=PRODUCERS.index(self.producer),
                          SWIZZLE=tensor_map.SWIZZLES[self.swizzle], BLOCK=self.block, RASTER=self.raster,
                          CLUSTER=self.cluster)


def _constants(kernel, rows, columns, itemsize, threads, **rest) -> dict:
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


def copy_spec(x):
    """x (R, C) -> (R, C): the same bits."""
    return x.clone()


def stencil_spec(x, centre: float, edge: float, fill: str = "zero"):
    """x (R, C) -> (R, C) in float64: centre x + edge (up + down + left + right), with `fill` outside of x; the weights
    as the float32 that the kernel takes."""
    centre, edge = (ctypes.c_float(value).value for value in (centre, edge))
    wide = torch.nn.functional.pad(x.double(), (1, 1, 1, 1), value=float("nan") if fill == "nan" else 0.0)
    return centre * x.double() + edge * (wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:])


def transpose_spec(x):
    """x (R, C) -> (C, R): the same bits."""
    return x.T.clone()


def add_shared_spec(x, y):
    """x (B, R, C), y (R, C) -> (B, R, C) in float64: x[b] + y."""
    return x.double() + y.double()


def accumulate_spec(x):
    """x (B, R, C) -> (R, C) in float64: the sum over b of x[b]."""
    return x.double().sum(0)


def job(config: TileConfig, target: str, itemsize: int = 4) -> build.Job:
    """The compilation of `config` for `target`; only the copy takes elements of another size than 4 bytes."""
    return build.Job(f"{SOURCE}:{KERNELS[config.op]}", {}, config.constants(itemsize), target,
                     config.block_threads // 32, smem_bytes=config.smem_bytes(itemsize), name=str(config))


# ---- arguments


def _tensor(name: str, tensor, dimensions: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; it is a {type(tensor).__name__}.")
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)[6:]
        raise ValueError(f"{name} must be dense and of plain numbers; it is {kind}.")
    if tensor.ndim != len(dimensions.split(", ")):
        raise ValueError(f"{name} has the shape ({dimensions}); here it is {tuple(tensor.shape)}.")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is a view that conjugates or negates what memory holds: resolve it first.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which this kernel does not give: detach it.")
    if max(tensor.shape) > LARGEST:
        raise ValueError(f"{name}'s extents are at most {LARGEST:,}; here they are {tuple(tensor.shape)}.")
    return tensor


def _check_layout(name: str, tensor, box, swizzle: str = "none", l2_promotion: str = "128B", fill: str = "zero"):
    """ValueError for what no tensor map describes, or whose rows lie in each other."""
    try:
        tensor_map.check(tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr(), box, swizzle=swizzle,
                         l2_promotion=l2_promotion, fill=fill, floating=tensor.is_floating_point())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    size = tensor.shape[-1]
    for stride, extent in sorted(zip(tensor.stride()[:-1], tensor.shape)):
        if extent > 1 and stride < size:
            raise ValueError(f"the rows of {name} lie in each other: {tuple(tensor.shape)} with strides "
                             f"{tensor.stride()}.")
        size += (extent - 1) * stride


def _memory(tensor) -> tuple[int, int]:
    """The addresses of its first byte, and of the one after its last."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


DIMENSIONS = {"copy": "R, C", "stencil": "R, C", "transpose": "R, C", "add_shared": "B, R, C", "accumulate": "B, R, C"}


def _result_shape(op: str, x) -> tuple[int, ...]:
    return {"transpose": tuple(x.shape[::-1]), "accumulate": tuple(x.shape[1:])}.get(op, tuple(x.shape))


def _checked(config: TileConfig, x, y, out, fill: str, **weights: float) -> None:
    """ValueError with a sentence for what the kernel cannot take."""
    op = config.op
    _tensor("x", x, DIMENSIONS[op])
    shape, given = _result_shape(op, x), {"x": x, "out": out}
    _tensor("out", out, ", ".join({"transpose": "C, R", "accumulate": "R, C"}.get(op, DIMENSIONS[op]).split(", ")))
    if op == "add_shared":
        given["y"] = _tensor("y", y, "R, C")
    elif y is not None:
        raise ValueError(f"only add_shared takes y; here {op} is given one.")
    wanted = {"x": tuple(x.shape), "y": tuple(x.shape[1:]), "out": shape}
    for name, tensor in given.items():
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != (wanted[name], x.dtype, x.device):
            raise ValueError(f"{name} must be {wanted[name]} of {str(x.dtype)[6:]} on {x.device}, as x is "
                             f"{tuple(x.shape)}; it is {tuple(tensor.shape)} of {str(tensor.dtype)[6:]} on "
                             f"{tensor.device}.")
    if op == "copy" and x.element_size() not in BITS:
        raise ValueError(f"copy takes elements of 1, 2, 4 or 8 bytes; those of {str(x.dtype)[6:]} have "
                         f"{x.element_size()}.")
    if op == "transpose" and x.element_size() != 4:
        raise ValueError(f"transpose takes elements of 4 bytes; those of {str(x.dtype)[6:]} have {x.element_size()}.")
    if op not in ("copy", "transpose") and x.dtype != torch.float32:
        raise ValueError(f"{op} takes float32; here it is {str(x.dtype)[6:]}.")
    if fill not in tensor_map.FILLS:
        raise ValueError(f"fill is zero or nan; here it is {fill!r}.")
    if fill != "zero" and op != "stencil":
        raise ValueError(f"only the stencil reads what lies outside; here {op} is to fill it with {fill}.")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or abs(weight) > 3.4e38:
            raise ValueError(f"{name} is a number within float32; here it is {weight!r}.")
    if not all(tensor.numel() for tensor in given.values()):
        return
    blocks = _grid(config, x.shape)
    if blocks >= 1 << 31:
        raise ValueError(f"there are fewer than 2^31 blocks; here are {blocks:,}: take larger tiles.")
    for name, tensor in given.items():
        rows, columns = config.box(x.element_size())
        box = (1,) * (tensor.ndim - 2) + ((rows, columns) if name != "y" else (rows // config.cluster, columns))
        _check_layout(name, tensor, box, config.swizzle, config.l2_promotion)
    begin, end = _memory(out)
    for name in given.keys() - {"out"}:  # tiles are stored while others are still read
        low, high = _memory(given[name])
        if begin < high and low < end:
            raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")


def _chosen(config, op: str) -> TileConfig:
    configs(op)  # said first
    if isinstance(config, TileConfig):
        if config.op != op:
            raise ValueError(f"a TileConfig of {op} is wanted; here is one of {config.op}.")
        return config
    if config == "best":
        return next(iter(configs(op).values()))
    if not isinstance(config, str) or config not in configs(op):
        raise ValueError(f"the variants of {op} are best, {', '.join(configs(op))}, or a TileConfig; "
                         f"here it is {config!r}.")
    return configs(op)[config]


# ---- launches


def _tiles(config: TileConfig, shape) -> tuple[int, int]:
    """Tiles across and down a matrix of x."""
    return -(-shape[-1] // config.columns), -(-shape[-2] // config.rows)


def _grid(config: TileConfig, shape) -> int:
    wide, tall = _tiles(config, shape)
    batches = -(-shape[0] // config.cluster) * config.cluster if len(shape) == 3 else 1
    return -(-wide // config.span) * tall * batches


def _check_current(x) -> None:
    if x.device.index != torch.cuda.current_device():  # a map does not say where its address is
        raise ValueError(f"x lies on {x.device}, and the launch is for cuda:{torch.cuda.current_device()}: make the "
                         "tensors' GPU the current one, with torch.cuda.device.")


def _compiled(kernel: str, constants: dict):
    return cuda.kernel(SOURCE, kernel, tuple(f"-D{name}={value}" for name, value in constants.items()))


def prepare(op: str, x, out, *, y=None, centre: float = 1.0, edge: float = 1.0, fill: str = "zero", config="best"):
    """A function that launches `op`, a key of KERNELS, on torch's current stream.

    copy: out = x; x, out (R, C) of elements of 1, 2, 4 or 8 bytes. stencil: out = centre x + edge (up + down + left +
    right) of float32, with `fill` (zero or nan) outside. transpose: out (C, R) = x (R, C) transposed, elements of 4
    bytes. add_shared: out = x + y of float32, x and out (B, R, C), y (R, C). accumulate: out (R, C) = sum over b of x
    (B, R, C), float32, in an order that differs from run to run.

    CUDA tensors of any extents that start at a multiple of 16 bytes and whose rows do, too, out apart from the
    rest. Where a row of out ends within such a unit, torch makes its last elements, in launches of its own.
    `config` is a variant's name, "best" or a TileConfig of `op`. The function may be captured in a graph, which it
    must outlive. Raises ValueError for what it cannot take and tilelab.device.Unsupported without TMA.
    """
    config = _chosen(config, op)
    _checked(config, x, y, out, fill, centre=centre, edge=edge)
    device.require("has_tma", "a copy by tensor map", "compile it with ch10.tile_pipeline.job and read its SASS")
    if not x.is_cuda:
        raise ValueError(f"x must be on the GPU; it is on {x.device}.")
    _check_current(x)
    needed, most = config.smem_bytes(x.element_size()) + 128, device.current().smem_per_block
    if needed > most:
        raise device.Unsupported(f"{config} needs {needed:,} B of shared memory a block; {device.current().name} has "
                                 f"{most:,} B: take a smaller tile or fewer stages.")
    if not out.numel():
        return lambda: None
    if not x.numel():  # accumulate, of no matrices
        return lambda: out.zero_()
    x, y, out = (tensor if tensor is None else tensor.detach() for tensor in (x, y, out))
    if op in ("copy", "transpose"):
        x, out = (tensor.view(BITS[tensor.element_size()]) for tensor in (x, out))
    itemsize, steps = x.element_size(), []
    # The engine stores whole units of 16 bytes: of a row that ends within one, torch makes the rest.
    whole = out.shape[-1] if op == "stencil" else out.shape[-1] // (UNIT // itemsize) * (UNIT // itemsize)
    if op == "accumulate":
        steps.append(out.zero_)
    if whole:
        kernel = _compiled(KERNELS[op], config.constants(itemsize))
        steps.append(cuda.prepare_launch(kernel, _grid(config, x.shape), config.block_threads,
                                         _arguments(config, x, y, out[..., :whole], centre, edge, fill),
                                         config.smem_bytes(itemsize), config.cluster))
    if whole < out.shape[-1]:
        steps.append(_rest(op, x, y, out, whole))

    def launched(kept_alive=(x, y, out)) -> None:  # the maps only hold addresses
        for step in steps:
            step()

    return launched


@torch.no_grad()
def _rest(op: str, x, y, out, whole: int):
    """A function that lets torch make the columns of out from `whole` on."""
    edge = out[..., whole:]
    if op == "copy":
        return lambda: edge.copy_(x[:, whole:])
    if op == "transpose":
        return lambda: edge.copy_(x[whole:].T)
    if op == "add_shared":
        return lambda: torch.add(x[..., whole:], y[:, whole:], out=edge)
    return lambda: edge.copy_(x[..., whole:].sum(0))


def _arguments(config: TileConfig, x, y, out, centre: float, edge: float, fill: str) -> list:
    """What the kernel of `config.op` takes, in its order."""
    wide, tall = map(ctypes.c_uint32, _tiles(config, x.shape))
    box = config.box(x.element_size())

    def mapped(tensor, box, fill="zero"):
        return tensor_map.tensor_map(tensor, (1,) * (tensor.ndim - 2) + tuple(box), swizzle=config.swizzle,
                                     l2_promotion=config.l2_promotion, fill=fill)

    if config.op == "stencil":
        return [mapped(x, box, fill), out, ctypes.c_uint64(out.stride(0)), ctypes.c_uint32(x.shape[0]),
                ctypes.c_uint32(x.shape[1]), ctypes.c_float(centre), ctypes.c_float(edge)]
    if config.op == "add_shared":
        share = config.rows // config.cluster, config.columns
        return [mapped(x, box), mapped(y, share), mapped(out, box), wide, tall]
    return [mapped(x, box), mapped(out, box), wide] + ([] if config.op == "copy" else [tall])


def empty(shape: tuple[int, ...], dtype: torch.dtype, where) -> torch.Tensor:
    """New memory of this shape, its rows padded to multiples of 16 bytes."""
    unit = max(1, UNIT // dtype.itemsize)
    return torch.empty(*shape[:-1], -(-shape[-1] // unit) * unit, dtype=dtype, device=where)[..., :shape[-1]]


def _new(op: str, x, out):
    if out is not None or not isinstance(x, torch.Tensor) or x.ndim != len(DIMENSIONS[op].split(", ")):
        return out
    return empty(_result_shape(op, x), x.dtype, x.device)


def _run(op: str, x, out, config="best", **rest):
    _tensor("x", x, DIMENSIONS[op])  # said before memory is made for the result
    if x.numel():
        _check_layout("x", x, (1,) * (x.ndim - 1) + (max(1, 16 // x.element_size()),))
    config = _chosen(config, op)
    out = _new(op, x, out)
    prepare(op, x, out, config=config, **rest)()
    return out


def copy(x, out=None, config="best"):
    """A copy of x (R, C), bit for bit, in `out` or in new memory with padded rows. Errors as for `prepare`."""
    return _run("copy", x, out, config=config)


def stencil(x, centre: float, edge: float, out=None, fill: str = "zero", config="best"):
    """centre x + edge (up + down + left + right) of x (R, C), float32, with `fill` outside, in `out` or in new memory
    with padded rows. Errors as for `prepare`."""
    return _run("stencil", x, out, centre=centre, edge=edge, fill=fill, config=config)


def transpose(x, out=None, config="best"):
    """x (R, C) transposed, bit for bit, in `out` (C, R) or in new memory with padded rows. Errors as for `prepare`."""
    return _run("transpose", x, out, config=config)


def add_shared(x, y, out=None, config="best"):
    """x[b] + y for each b, x (B, R, C), y (R, C), float32, in `out` or in new memory with padded rows. Errors as for
    `prepare`."""
    return _run("add_shared", x, out, y=y, config=config)


def accumulate(x, out=None, config="best"):
    """The sum over b of x[b], x (B, R, C), float32, in `out` (R, C) or in new memory with padded rows. Errors as for
    `prepare`."""
    return _run("accumulate", x, out, config=config)


# ---- a box, as it lies in shared memory


def dump_job(box: tuple[int, int], itemsize: int, target: str) -> build.Job:
    """The compilation of the kernel that shows a box of `box` elements of `itemsize` bytes."""
    return build.Job(f"{SOURCE}:dump", {}, _constants("dump", *box, itemsize, 128), target, 4,
                     smem_bytes=box[0] * box[1] * itemsize + 1024, name=f"dump {box[0]} × {box[1]} × {itemsize} B")


def dump_box(x, row: int, column: int, box: tuple[int, int], swizzle: str = "none", fill: str = "zero") -> torch.Tensor:
    """The bytes of shared memory, as uint8 on the GPU, after the box (rows, columns) whose first element is x[row,
    column] has landed there. The box may stick out of x (R, C) on any side: `fill` is what lies outside.

    x is of a dtype in tilelab.tensor_map.DTYPES, and `column` starts at a multiple of 16 bytes. Rows of a swizzled box
    are as long as the swizzle, which leaves no gaps. Raises ValueError for what it cannot take and
    tilelab.device.Unsupported without TMA.
    """
    _tensor("x", x, "R, C")
    if x.dtype not in tensor_map.DTYPES:
        raise ValueError(f"x holds {', '.join(str(dtype)[6:] for dtype in tensor_map.DTYPES)}; here it is "
                         f"{str(x.dtype)[6:]}.")
    if not isinstance(box, (tuple, list)) or len(box) != 2:
        raise ValueError(f"a box has rows and columns; here it is {box!r}.")
    box = tuple(box)
    for name, value in (("row", row), ("column", column)):
        if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"{name} must be a whole number of 32 bits; here it is {value!r}.")
    _check_layout("x", x, box, swizzle, fill=fill)
    if column * x.element_size() % UNIT:
        raise ValueError(f"a box starts at a multiple of 16 bytes of its row ({UNIT // x.element_size()} elements), or "
                         f"the load is an illegal instruction; here at column {column}.")
    span, inner = tensor_map.SWIZZLES[swizzle], box[1] * x.element_size()
    if span and inner != span:
        raise ValueError(f"rows of a box with a swizzle of {swizzle} take {span} bytes here; {box[1]} elements take "
                         f"{inner}.")
    device.require("has_tma", "a copy by tensor map", "compile it with ch10.tile_pipeline.dump_job and read its SASS")
    if not x.is_cuda:
        raise ValueError(f"x must be on the GPU; it is on {x.device}.")
    _check_current(x)
    what = dump_job(box, x.element_size(), device.current().target)
    found = torch.zeros(box[0] * inner, dtype=torch.uint8, device=x.device)
    args = [tensor_map.tensor_map(x, box, swizzle=swizzle, fill=fill), found, ctypes.c_int(column), ctypes.c_int(row)]
    cuda.launch(_compiled("dump", what.constants), 1, 128, args, what.smem_bytes)
    return found


def box_spec(x, row: int, column: int, box: tuple[int, int], fill: str = "zero") -> torch.Tensor:
    """x (R, C) -> box: what a box holds whose first element is x[row, column], with `fill` outside of x."""
    found = torch.full(box, float("nan") if fill == "nan" else 0, dtype=x.dtype, device=x.device)
    top, left = max(row, 0), max(column, 0)
    bottom, right = (max(low, min(first + extent, size)) for low, first, extent, size in
                     zip((top, left), (row, column), box, x.shape))
    found[top - row:bottom - row, left - column:right - column] = x[top:bottom, left:right]
    return found


def unswizzled(found: torch.Tensor, dtype: torch.dtype, box: tuple[int, int], swizzle: str) -> torch.Tensor:
    """The box, row by row, from the bytes that `dump_box` found, as tilelab.tensor_map.swizzled says they lie."""
    order = tensor_map.swizzled(torch.arange(found.numel(), device=found.device), swizzle)
    return found[order].view(dtype).view(box)


if __name__ == "__main__":
    from ch10.tile_cli import main

    sys.exit(main())
