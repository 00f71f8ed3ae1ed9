"""Tiles of two dimensions, moved by tensor maps: a copy, a stencil, a transpose, a sum with an operand that a cluster
shares, and a sum over a batch that L2 adds up.

Start with tile_pipeline.cu, which walks through the kernels. configs.py holds their tiles. box_dump.py shows a box in
shared memory. Source: PTX ISA, "cp.async.bulk.tensor", "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes
import pathlib
from typing import Any

import torch

from ch10.tile_pipeline.configs import DIMENSIONS, KERNELS, TileConfig, choose_config, configs
from tilelab.runtime import build, cuda, device, operands, tensor_map

__all__ = [
    "spec",
    "copy",
    "stencil",
    "transpose",
    "add_shared",
    "accumulate",
    "prepare",
    "configs",
    "job",
    "TileConfig",
]

SOURCE = pathlib.Path(__file__).with_name("tile_pipeline.cu")
UNIT = 16  # bytes: rows of tensors and boxes are whole units
LARGEST_EXTENT = (1 << 31) - (1 << 15)  # coordinates have 32 bits, and the last CTA may start past the end
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # maps of integers keep all bits
INSTEAD = "compile it with ch10.tile_pipeline.job and read its SASS"


def spec(
    op: str,
    x: torch.Tensor,  # (R, C), or (B, R, C) for add_shared and accumulate
    *,
    y: torch.Tensor | None = None,  # (R, C), for add_shared
    centre: float = 1.0,
    edge: float = 1.0,
    fill: str = "zero",
) -> torch.Tensor:  # the shape of `result_shape`
    """Return what `op` means in torch: the same bits for copy and transpose, else float64.

    The stencil takes its weights as float32, as the kernel does, and `fill` (zero or nan) outside of x.
    """
    if op == "copy":
        return x.clone()
    if op == "transpose":
        return x.T.clone()
    if op == "add_shared":
        return x.double() + y.double()  # type: ignore[union-attr]
    if op == "accumulate":
        return x.double().sum(0)
    centre, edge = (ctypes.c_float(value).value for value in (centre, edge))
    padded = torch.nn.functional.pad(x.double(), (1, 1, 1, 1), value=float("nan") if fill == "nan" else 0.0)
    return centre * x.double() + edge * (
        padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    )


def job(config: TileConfig, target: str, itemsize: int = 4) -> build.Job:
    """Return the compilation of `config` for `target`; only the copy takes elements of another size than 4 bytes."""
    return build.Job(
        f"{SOURCE}:{KERNELS[config.op]}",
        {},
        config.constants(itemsize),
        target,
        config.block_threads // 32,
        smem_bytes=config.smem_bytes(itemsize),
        name=str(config),
    )


def load_kernel(kernel: str, macros: dict[str, Any]) -> Any:
    """Return a kernel of SOURCE, compiled for the current GPU."""
    return cuda.load_kernel(SOURCE, kernel, tuple(f"-D{name}={value}" for name, value in macros.items()))


def result_shape(op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of out for x of this shape."""
    return {"transpose": tuple(shape[::-1]), "accumulate": tuple(shape[1:])}.get(op, tuple(shape))


def empty_padded(shape: tuple[int, ...], dtype: torch.dtype, where: str | torch.device) -> torch.Tensor:
    """Return new memory of this shape, with rows padded to multiples of 16 bytes."""
    unit = max(1, UNIT // dtype.itemsize)
    return torch.empty(*shape[:-1], -(-shape[-1] // unit) * unit, dtype=dtype, device=where)[..., : shape[-1]]


def _check_operands(op: str, x, y, out, fill: str) -> None:
    any_dtype, sizes = op in ("copy", "transpose"), tuple(BITS) if op == "copy" else (4,)
    operands.require_tensor("x", x, op, ndim=DIMENSIONS[op], dtype=None if any_dtype else torch.float32)
    if x.element_size() not in sizes:
        raise ValueError(
            f"x must have elements of {', '.join(map(str, sizes))} bytes for {op}; they have "
            f"{x.element_size()}."
        )
    if max(x.shape) > LARGEST_EXTENT:
        raise ValueError(f"the extents of x must be at most {LARGEST_EXTENT:,}; they are {tuple(x.shape)}.")
    if op == "add_shared":
        operands.require_tensor("y", y, op, dtype=x.dtype, shape=x.shape[1:], on=x.device)
    elif y is not None:
        raise ValueError(f"y is for add_shared; {op} takes none.")
    if fill != "zero" and op != "stencil":
        raise ValueError(f"fill is for the stencil, which alone reads outside of x; {op} has {fill!r}.")
    if out is not None:
        operands.require_tensor("out", out, op, dtype=x.dtype, shape=result_shape(op, x.shape), on=x.device)
        operands.require_disjoint({"out": out}, {"x": x, "y": y})
    for name, tensor in {"x": x, "y": y, "out": out}.items():
        if tensor is not None and tensor.numel():
            operands.require_rows(name, tensor if tensor.ndim == 2 else tensor[0], UNIT)
            operands.require_no_self_overlap(name, tensor)
    operands.require_gpu(x, "a copy by tensor map", "has_tma", INSTEAD)


def prepare(
    op: str,
    x: torch.Tensor,  # (R, C), or (B, R, C) for add_shared and accumulate
    *,
    y: torch.Tensor | None = None,  # (R, C), for add_shared
    centre: float = 1.0,
    edge: float = 1.0,
    fill: str = "zero",
    out: torch.Tensor | None = None,  # the shape of `result_shape`
    config: str | TileConfig = "best",
) -> operands.Launch:
    """Check the operands, choose a configuration, and return a launch of `op` on torch's current stream.

    - copy: out = x, both (R, C), with elements of 1, 2, 4 or 8 bytes.
    - stencil: out = centre x + edge (up + down + left + right), float32, with `fill` (zero or nan) outside.
    - transpose: out (C, R) = x (R, C) transposed, with elements of 4 bytes.
    - add_shared: out[b] = x[b] + y, float32, x and out (B, R, C), y (R, C).
    - accumulate: out (R, C) = sum over b of x (B, R, C), float32. The order of the terms differs from run to run.

    Tensors are on the GPU, of any extents; their rows start at multiples of 16 bytes. New memory for `out` has padded
    rows. TMA stores whole units of 16 bytes, so torch computes the last columns of a row that ends within one, in
    launches of its own. `config` is a variant's name, "best" or a TileConfig. The launch may be captured in a graph,
    which it must outlive. Raises ValueError for operands that the kernel cannot take and Unsupported
    for a GPU without TMA or with too little shared memory.
    """
    config = choose_config(op, config, getattr(x, "shape", ()))
    for name, weight in {"centre": centre, "edge": edge}.items():
        largest = torch.finfo(torch.float32).max
        operands.require_number(name, weight, -largest, largest, "within float32")
    _check_operands(op, x, y, out, fill)
    needed, available = config.smem_bytes(x.element_size()) + 128, device.current().smem_per_block
    if needed > available:  # the driver refuses to encode the map of such a box without saying why
        raise device.Unsupported(
            f"{config} needs {needed:,} B of shared memory per block; {device.current().name} has "
            f"{available:,} B: take a smaller tile or fewer stages."
        )
    result = empty_padded(result_shape(op, x.shape), x.dtype, x.device) if out is None else out
    if not result.numel() or not x.numel():  # the sum of no matrices is zero
        return operands.Launch(result.zero_, result, config)
    source, target = x.detach(), result.detach()
    y = None if y is None else y.detach()
    if op in ("copy", "transpose"):
        source, target = (tensor.view(BITS[tensor.element_size()]) for tensor in (source, target))
    itemsize, columns, steps = x.element_size(), result.shape[-1], []
    whole = columns if op == "stencil" else columns // (UNIT // itemsize) * (UNIT // itemsize)
    if op == "accumulate":
        steps.append(target.zero_)
    if whole:
        kernel = load_kernel(KERNELS[op], config.constants(itemsize))
        arguments = _kernel_arguments(config, source, y, target[..., :whole], centre, edge, fill)
        steps.append(
            cuda.prepare_launch(
                kernel,
                config.blocks(x.shape),
                config.block_threads,
                arguments,
                config.smem_bytes(itemsize),
                config.cluster,
            )
        )
    if whole < columns:
        steps.append(_last_columns(op, source, y, target, whole))

    def run() -> None:
        for step in steps:
            step()

    return operands.Launch(run, result, config, keep_alive=(x, y))


@torch.no_grad()
def _last_columns(op: str, x, y, out, whole: int):
    """Return a function with which torch computes the columns of out from `whole` on."""
    last = out[..., whole:]
    if op == "copy":
        return lambda: last.copy_(x[:, whole:])
    if op == "transpose":
        return lambda: last.copy_(x[whole:].T)
    if op == "add_shared":
        return lambda: torch.add(x[..., whole:], y[:, whole:], out=last)
    return lambda: last.copy_(x[..., whole:].sum(0))


def _kernel_arguments(config: TileConfig, x, y, out, centre: float, edge: float, fill: str) -> list:
    across, down = map(ctypes.c_uint32, config.tiles(x.shape))
    box = config.box(x.element_size())

    def make_map(tensor, box, fill="zero"):
        return tensor_map.make_tensor_map(
            tensor,
            (1,) * (tensor.ndim - 2) + tuple(box),
            swizzle=config.swizzle,
            l2_promotion=config.l2_promotion,
            fill=fill,
        )

    if config.op == "stencil":
        return [
            make_map(x, box, fill),
            out,
            ctypes.c_uint64(out.stride(0)),
            ctypes.c_uint32(x.shape[0]),
            ctypes.c_uint32(x.shape[1]),
            ctypes.c_float(centre),
            ctypes.c_float(edge),
        ]
    if config.op == "add_shared":
        share = config.rows // config.cluster, config.columns
        return [make_map(x, box), make_map(y, share), make_map(out, box), across, down]
    return [make_map(x, box), make_map(out, box), across] + ([] if config.op == "copy" else [down])


def copy(
    x: torch.Tensor,  # (R, C)
    *,
    out: torch.Tensor | None = None,  # (R, C)
    config: str | TileConfig = "best",
) -> torch.Tensor:  # (R, C)
    """Return a copy of x, bit for bit. `prepare` describes arguments and errors."""
    return prepare("copy", x, out=out, config=config)()


def stencil(
    x: torch.Tensor,  # (R, C), float32
    centre: float,
    edge: float,
    *,
    fill: str = "zero",
    out: torch.Tensor | None = None,  # (R, C)
    config: str | TileConfig = "best",
) -> torch.Tensor:  # (R, C)
    """Return centre x + edge (up + down + left + right) of x, with `fill` outside."""
    return prepare("stencil", x, centre=centre, edge=edge, fill=fill, out=out, config=config)()


def transpose(
    x: torch.Tensor,  # (R, C)
    *,
    out: torch.Tensor | None = None,  # (C, R)
    config: str | TileConfig = "best",
) -> torch.Tensor:  # (C, R)
    """Return x transposed, bit for bit."""
    return prepare("transpose", x, out=out, config=config)()


def add_shared(
    x: torch.Tensor,  # (B, R, C), float32
    y: torch.Tensor,  # (R, C)
    *,
    out: torch.Tensor | None = None,  # (B, R, C)
    config: str | TileConfig = "best",
) -> torch.Tensor:  # (B, R, C)
    """Return x[b] + y for each b."""
    return prepare("add_shared", x, y=y, out=out, config=config)()


def accumulate(
    x: torch.Tensor,  # (B, R, C), float32
    *,
    out: torch.Tensor | None = None,  # (R, C)
    config: str | TileConfig = "best",
) -> torch.Tensor:  # (R, C)
    """Return the sum over b of x[b]."""
    return prepare("accumulate", x, out=out, config=config)()
