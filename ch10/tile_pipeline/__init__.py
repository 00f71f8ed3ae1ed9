"""Tiles of two dimensions, moved by tensor maps: a copy, a stencil, a transpose, a sum with an operand that a cluster
shares, and a sum that L2 adds up.

The kernels are in tile_pipeline.cu, how they cut their tensors in tile_configs.py, what they mean in tile_spec.py, what
they take in tile_arguments.py; tile_dump.py shows a box in shared memory. Source: PTX ISA, "cp.async.bulk.tensor",
"Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes
import pathlib

import torch

from ch10.tile_pipeline import checks
from ch10.tile_pipeline.configs import KERNELS, TileConfig, chosen, configs
from ch10.tile_pipeline.reference import accumulate_spec, add_shared_spec, copy_spec, stencil_spec, transpose_spec
from tilelab import build, cuda, device, tensor_map

__all__ = ["copy", "stencil", "transpose", "add_shared", "accumulate", "prepare", "empty", "configs", "TileConfig",
           "job", "copy_spec", "stencil_spec", "transpose_spec", "add_shared_spec", "accumulate_spec"]

SOURCE = pathlib.Path(__file__).with_name("tile_pipeline.cu")
UNIT = 16  # bytes; rows of a tensor start at multiples of it, rows of a box take whole ones


def job(config: TileConfig, target: str, itemsize: int = 4) -> build.Job:
    """The compilation of `config` for `target`; only the copy takes elements of another size than 4 bytes."""
    return build.Job(f"{SOURCE}:{KERNELS[config.op]}", {}, config.constants(itemsize), target,
                     config.block_threads // 32, smem_bytes=config.smem_bytes(itemsize), name=str(config))


def compiled(kernel: str, constants: dict):
    """A kernel of SOURCE, compiled for the GPU here."""
    return cuda.load_kernel(SOURCE, kernel, tuple(f"-D{name}={value}" for name, value in constants.items()))


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
    config = chosen(op, config)
    checks.check(config, x, y, out, fill, centre=centre, edge=edge)
    checks.check_gpu(x, "ch10.tile_pipeline.job")
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
        x, out = (tensor.view(checks.BITS[tensor.element_size()]) for tensor in (x, out))
    itemsize, steps = x.element_size(), []
    # The engine stores whole units of 16 bytes: of a row that ends within one, torch makes the rest.
    whole = out.shape[-1] if op == "stencil" else out.shape[-1] // (UNIT // itemsize) * (UNIT // itemsize)
    if op == "accumulate":
        steps.append(out.zero_)
    if whole:
        kernel = compiled(KERNELS[op], config.constants(itemsize))
        steps.append(cuda.prepare_launch(kernel, config.blocks(x.shape), config.block_threads,
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
    wide, tall = map(ctypes.c_uint32, config.tiles(x.shape))
    box = config.box(x.element_size())

    def mapped(tensor, box, fill="zero"):
        return tensor_map.make_tensor_map(tensor, (1,) * (tensor.ndim - 2) + tuple(box), swizzle=config.swizzle,
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


def _run(op: str, x, out, config="best", **rest):
    checks.check_tensor("x", x, checks.DIMENSIONS[op])  # said before memory is made for the result
    if x.numel():
        checks.check_layout("x", x, (1,) * (x.ndim - 1) + (max(1, 16 // x.element_size()),))
    config = chosen(op, config)
    if out is None:
        out = empty(checks.result_shape(op, x), x.dtype, x.device)
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
