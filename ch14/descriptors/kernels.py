"""The kernels of `ch14.descriptors`: copy, add and gather of rows, each by three ways to the same bytes.

A kernel that takes the host's descriptors is also what the device's kernel calls with its own.
"""

from __future__ import annotations

import inspect

import triton
import triton.language as tl

from ch14.descriptors.configs import UNIT, TileConfig
from tilelab import build

NUMBERS = ("rows_x", "rows", "columns", "elements", "vectors", "stride_x", "stride_y", "stride_out", "step_x", "step_y",
           "step_out", "tiles", "tiles_n")
any_size = triton.jit(do_not_specialize=NUMBERS)  # one binary for every shape: alignment is in VECTOR, or in the map

# ---- what all of them share


@triton.jit
def share(tiles, SPAN: tl.constexpr):
    # The tiles of a program: SPAN side by side, or every n-th. SPAN 1 leaves no loop; tiles past the end are clipped.
    if SPAN > 0:
        first = tl.program_id(0) * SPAN
        count = SPAN
        step = 1
    else:
        first = tl.program_id(0)
        step = tl.num_programs(0)
        count = tl.cdiv(tiles - first, step)
    return first, count, step


@triton.jit
def added(x, y):
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


# ---- flat: a tensor as one row


@any_size
def flat_host_kernel(x, y, out, tiles, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr):
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        at = tile * BLOCK_N
        if y is None:
            out.store([at], x.load([at]))
        else:
            out.store([at], added(x.load([at]), y.load([at])))


@any_size
def flat_device_kernel(x, y, out, elements, tiles, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr):
    # Before the loop: each is edited in shared memory, copied to the program's scratch in global memory, and fenced.
    x_desc = tl.make_tensor_descriptor(x, [elements], [1], [BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [elements], [1], [BLOCK_N])
    if y is None:
        y_desc = None
    else:
        y_desc = tl.make_tensor_descriptor(y, [elements], [1], [BLOCK_N])
    flat_host_kernel(x_desc, y_desc, out_desc, tiles, BLOCK_N, SPAN, STAGES)


@any_size
def flat_pointers_kernel(x, y, out, vectors, tiles, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
                         VECTOR: tl.constexpr):
    # Sizes come in whole vectors: so the compiler knows that a mask never cuts one, and loads 16 bytes a thread.
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = at < vectors * VECTOR
        value = tl.load(x + at, inside)
        if y is not None:
            value = added(value, tl.load(y + at, inside))
        tl.store(out + at, value, inside)


# ---- tiles of a matrix


@any_size
def tile_host_kernel(x, y, out, tiles, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
                     STAGES: tl.constexpr):
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        # Columns vary fastest over tiles: neighbours in time read neighbouring DRAM pages.
        at = [tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N]
        if y is None:
            out.store(at, x.load(at))
        else:
            out.store(at, added(x.load(at), y.load(at)))


@any_size
def tile_device_kernel(x, y, out, rows, columns, stride_x, stride_y, stride_out, tiles, tiles_n,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x, [rows, columns], [stride_x, 1], [BLOCK_M, BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [rows, columns], [stride_out, 1], [BLOCK_M, BLOCK_N])
    if y is None:
        y_desc = None
    else:
        y_desc = tl.make_tensor_descriptor(y, [rows, columns], [stride_y, 1], [BLOCK_M, BLOCK_N])
    tile_host_kernel(x_desc, y_desc, out_desc, tiles, tiles_n, BLOCK_M, BLOCK_N, SPAN, STAGES)


@any_size
def tile_pointers_kernel(x, y, out, rows, vectors, step_x, step_y, step_out, tiles, tiles_n, BLOCK_M: tl.constexpr,
                         BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr):
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        row = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        column = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (row < rows) & (column < vectors * VECTOR)
        row = row.to(tl.int64)
        value = tl.load(x + row * (step_x * VECTOR) + column, inside)
        if y is not None:
            value = added(value, tl.load(y + row * (step_y * VECTOR) + column, inside))
        tl.store(out + row * (step_out * VECTOR) + column, value, inside)


# ---- rows by their numbers


@any_size
def rows_host_kernel(x, index, out, tiles, tiles_n, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr):
    # A tile is BLOCK_N columns of one row. A row that is not there comes as zeros, like all outside of a tensor.
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        row = tile // tiles_n
        column = tile % tiles_n * BLOCK_N
        source = tl.load(index + row, tile < tiles, -1)
        out.store([row, column], x.load([source, column]))


@any_size
def rows_device_kernel(x, index, out, rows_x, rows, columns, stride_x, stride_out, tiles, tiles_n,
                       BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x, [rows_x, columns], [stride_x, 1], [1, BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [rows, columns], [stride_out, 1], [1, BLOCK_N])
    rows_host_kernel(x_desc, index, out_desc, tiles, tiles_n, BLOCK_N, SPAN, STAGES)


@any_size
def rows_gather4_kernel(x, index, out, rows, tiles, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        SPAN: tl.constexpr, STAGES: tl.constexpr):
    # x is described in boxes of one row; the instruction takes the numbers of four.
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        row = tile // tiles_n * BLOCK_M
        column = tile % tiles_n * BLOCK_N
        at = row + tl.arange(0, BLOCK_M)
        out.store([row, column], x.gather(tl.load(index + at, at < rows, 0), column))


@any_size
def rows_pointers_kernel(x, index, out, rows_x, rows, vectors, step_x, step_out, tiles, tiles_n, BLOCK_M: tl.constexpr,
                         BLOCK_N: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr):
    first, count, step = share(tiles, SPAN)
    for i in tl.range(0, count, num_stages=STAGES):
        tile = first + i * step
        row = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (row < rows)[:, None] & (column < vectors * VECTOR)
        source = tl.load(index + row, row < rows, 0)[:, None]
        there = inside & (source >= 0) & (source < rows_x)
        value = tl.load(x + source.to(tl.int64) * (step_x * VECTOR) + column, there, 0)
        tl.store(out + row.to(tl.int64)[:, None] * (step_out * VECTOR) + column, value, inside)


KERNELS = {"flat": {"host": flat_host_kernel, "device": flat_device_kernel, "pointers": flat_pointers_kernel},
           "tile": {"host": tile_host_kernel, "device": tile_device_kernel, "pointers": tile_pointers_kernel},
           "rows": {"host": rows_host_kernel, "device": rows_device_kernel, "pointers": rows_pointers_kernel,
                    "gather4": rows_gather4_kernel}}


def kernel_of(op: str, config: TileConfig):
    """The kernel, and the names of its parameters."""
    kernel = KERNELS["rows" if op == "gather" else "tile" if config.block_m else "flat"][config.way]
    return kernel, list(inspect.signature(kernel.fn).parameters)


def counts(config: TileConfig, itemsize: int, rows: int, columns: int, rows_x: int, strides: dict[str, int]) -> dict:
    """What kernels take besides tensors, by name: `rows` and `columns` of the result (1 and all of it where tiles are
    flat), rows of x, and the strides of tensors by name."""
    vector = max(1, UNIT // itemsize)
    while any(count % vector for count in (columns, *strides.values())):
        vector //= 2
    tiles_n = -(-columns // config.block_n)
    found = {"rows_x": rows_x, "rows": rows, "columns": columns, "elements": columns, "vectors": columns // vector,
             "tiles": -(-rows // max(config.block_m, 1)) * tiles_n, "tiles_n": tiles_n, "VECTOR": vector,
             "stride_y": 0, "step_y": 0, **config.constants()}
    return found | {f"stride_{name}": stride for name, stride in strides.items()} | {
        f"step_{name}": stride // vector for name, stride in strides.items()}


def job(op: str, config: TileConfig, target: str, element: str = "") -> build.Job:
    """The compilation of `config` for `target`, as `ch14.descriptors` launches it for rows of whole vectors; `element`
    is Triton's type, by default bf16 to add and i16 to move."""
    element = element or ("bf16" if op == "add" else "i16")
    kernel, names = kernel_of(op, config)
    tensors = ("x", "y", "out") if op == "add" else ("x", "out")
    kinds = {**dict.fromkeys(tensors, f"*{element}"), "index": "*i32", **dict.fromkeys(NUMBERS, "i32")}
    if config.way in ("host", "gather4"):
        kinds |= {name: f"tensordesc<{element}{list(config.block_of(name))}>" for name in tensors}
    vector = max(1, UNIT * 8 // int(element.lstrip("bfpiu")))
    given = {"y": None, "VECTOR": vector, **config.constants()}
    signature = {name: kinds[name] for name in names if name in kinds}
    return build.job_for(kernel, signature, {name: given[name] for name in names if name not in kinds}, target,
                         num_warps=config.num_warps, name=str(config),
                         aligned=tuple(name for name, kind in signature.items() if kind.startswith("*")))
