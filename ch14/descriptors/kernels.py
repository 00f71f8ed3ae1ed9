"""The Triton kernels of `ch14.descriptors`: copy, add and gather of rows, each moved in three ways.

Tensors are cut into tiles, flat ones or BLOCK_M x BLOCK_N, numbered row by row. All kernels have the same loop: a
program takes its share of the tile_ids, and loads, computes and stores one tile after the other.

    program 0   program 1   program 2            program 0, 1, 2, 0, 1, 2, ...
    +---+---+---+---+---+---+---+---+---+        +---+---+---+---+---+---+---+---+---+
    | 0   1   2 | 3   4   5 | 6   7   8 |        | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |
    +---+---+---+---+---+---+---+---+---+        +---+---+---+---+---+---+---+---+---+
    TILES_PER_CTA = 3                            TILES_PER_CTA = 0

`*_host_kernel` takes descriptors that the host made. `*_device_kernel` makes its descriptors and then calls the host's
kernel. In `*_pointers_kernel` no tile is described: each thread loads and stores 16 bytes.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl

from ch14.descriptors.configs import UNIT, VARIANTS, TileConfig
from tilelab.runtime import build

NUMBERS = (
    "rows_x",
    "rows",
    "columns",
    "elements",
    "vectors",
    "stride_x",
    "stride_y",
    "stride_out",
    "step_x",
    "step_y",
    "step_out",
    "tiles",
    "tiles_n",
)
# One binary for all shapes: the alignment is in VECTOR, or in the tensor map.
jit_any_size = triton.jit(do_not_specialize=NUMBERS)


# ---- helpers


@triton.jit
def program_tiles(tiles, TILES_PER_CTA: tl.constexpr):
    # With one tile per program no loop is left. Tiles past the end are clipped: by the map, or by a mask.
    if TILES_PER_CTA > 0:
        first = tl.program_id(0) * TILES_PER_CTA
        count = TILES_PER_CTA
        step = 1
    else:
        first = tl.program_id(0)
        step = tl.num_programs(0)
        count = tl.cdiv(tiles - first, step)
    return first, count, step


@triton.jit
def add_in_float32(x, y):
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def load_tile(x, y, at):
    value = x.load(at)
    if y is not None:
        value = add_in_float32(value, y.load(at))
    return value


# ---- flat: a tensor as one row


@jit_any_size
def flat_host_kernel(
    x, y, out, tiles, BLOCK_N: tl.constexpr, TILES_PER_CTA: tl.constexpr, STAGES: tl.constexpr
):
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        at = [tile_id * BLOCK_N]
        out.store(at, load_tile(x, y, at))


@jit_any_size
def flat_device_kernel(
    x, y, out, elements, tiles, BLOCK_N: tl.constexpr, TILES_PER_CTA: tl.constexpr, STAGES: tl.constexpr
):
    # Descriptors are made before the loop: each is edited in shared memory, copied to scratch in global memory, fenced.
    x_desc = tl.make_tensor_descriptor(x, [elements], [1], [BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [elements], [1], [BLOCK_N])
    if y is None:
        y_desc = None
    else:
        y_desc = tl.make_tensor_descriptor(y, [elements], [1], [BLOCK_N])
    flat_host_kernel(x_desc, y_desc, out_desc, tiles, BLOCK_N, TILES_PER_CTA, STAGES)


@jit_any_size
def flat_pointers_kernel(
    x,
    y,
    out,
    vectors,
    tiles,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # Sizes are given in whole vectors: the compiler then knows that a mask never cuts one, and loads 16 bytes at once.
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        at = tile_id * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = at < vectors * VECTOR
        value = tl.load(x + at, inside)
        if y is not None:
            value = add_in_float32(value, tl.load(y + at, inside))
        tl.store(out + at, value, inside)


# ---- tiles of a matrix


@jit_any_size
def tile_host_kernel(
    x,
    y,
    out,
    tiles,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
):
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        # Columns vary fastest over tiles, so that programs which run together read neighbouring DRAM pages.
        at = [tile_id // tiles_n * BLOCK_M, tile_id % tiles_n * BLOCK_N]
        out.store(at, load_tile(x, y, at))


@jit_any_size
def tile_device_kernel(
    x,
    y,
    out,
    rows,
    columns,
    stride_x,
    stride_y,
    stride_out,
    tiles,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
):
    x_desc = tl.make_tensor_descriptor(x, [rows, columns], [stride_x, 1], [BLOCK_M, BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [rows, columns], [stride_out, 1], [BLOCK_M, BLOCK_N])
    if y is None:
        y_desc = None
    else:
        y_desc = tl.make_tensor_descriptor(y, [rows, columns], [stride_y, 1], [BLOCK_M, BLOCK_N])
    tile_host_kernel(x_desc, y_desc, out_desc, tiles, tiles_n, BLOCK_M, BLOCK_N, TILES_PER_CTA, STAGES)


@jit_any_size
def tile_pointers_kernel(
    x,
    y,
    out,
    rows,
    vectors,
    step_x,
    step_y,
    step_out,
    tiles,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        row = tile_id // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        column = tile_id % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (row < rows) & (column < vectors * VECTOR)
        row = row.to(tl.int64)
        value = tl.load(x + row * (step_x * VECTOR) + column, inside)
        if y is not None:
            value = add_in_float32(value, tl.load(y + row * (step_y * VECTOR) + column, inside))
        tl.store(out + row * (step_out * VECTOR) + column, value, inside)


# ---- rows by their numbers


@jit_any_size
def rows_host_kernel(
    x, index, out, tiles, tiles_n, BLOCK_N: tl.constexpr, TILES_PER_CTA: tl.constexpr, STAGES: tl.constexpr
):
    # A tile is BLOCK_N columns of one row. A row that x does not have comes as zeros, like all that lies outside.
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        row = tile_id // tiles_n
        column = tile_id % tiles_n * BLOCK_N
        source = tl.load(index + row, tile_id < tiles, -1)
        out.store([row, column], x.load([source, column]))


@jit_any_size
def rows_device_kernel(
    x,
    index,
    out,
    rows_x,
    rows,
    columns,
    stride_x,
    stride_out,
    tiles,
    tiles_n,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
):
    x_desc = tl.make_tensor_descriptor(x, [rows_x, columns], [stride_x, 1], [1, BLOCK_N])
    out_desc = tl.make_tensor_descriptor(out, [rows, columns], [stride_out, 1], [1, BLOCK_N])
    rows_host_kernel(x_desc, index, out_desc, tiles, tiles_n, BLOCK_N, TILES_PER_CTA, STAGES)


@jit_any_size
def rows_gather4_kernel(
    x,
    index,
    out,
    rows,
    tiles,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The descriptor of x has boxes of one row. One tile::gather4 instruction takes the numbers of four rows.
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        row = tile_id // tiles_n * BLOCK_M
        column = tile_id % tiles_n * BLOCK_N
        at = row + tl.arange(0, BLOCK_M)
        out.store([row, column], x.gather(tl.load(index + at, at < rows, 0), column))


@jit_any_size
def rows_pointers_kernel(
    x,
    index,
    out,
    rows_x,
    rows,
    vectors,
    step_x,
    step_out,
    tiles,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES_PER_CTA: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    first, count, step = program_tiles(tiles, TILES_PER_CTA)
    for i in tl.range(0, count, num_stages=STAGES):
        tile_id = first + i * step
        row = tile_id // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile_id % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        inside = (row < rows)[:, None] & (column < vectors * VECTOR)
        source = tl.load(index + row, row < rows, 0)[:, None]
        exists = inside & (source >= 0) & (source < rows_x)
        value = tl.load(x + source.to(tl.int64) * (step_x * VECTOR) + column, exists, 0)
        tl.store(out + row.to(tl.int64)[:, None] * (step_out * VECTOR) + column, value, inside)


KERNELS = {
    "flat": {"host": flat_host_kernel, "device": flat_device_kernel, "pointers": flat_pointers_kernel},
    "tile": {"host": tile_host_kernel, "device": tile_device_kernel, "pointers": tile_pointers_kernel},
    "rows": {
        "host": rows_host_kernel,
        "device": rows_device_kernel,
        "pointers": rows_pointers_kernel,
        "gather4": rows_gather4_kernel,
    },
}


# ---- which kernel, and its arguments


def find_kernel(op: str, config: TileConfig) -> tuple[Any, list[str]]:
    """Return the kernel, and the names of its parameters."""
    kernel = KERNELS["rows" if op == "gather" else "tile" if config.block_m else "flat"][config.way]
    return kernel, list(inspect.signature(kernel.fn).parameters)


def make_sizes(
    config: TileConfig, itemsize: int, rows: int, columns: int, rows_x: int, strides: dict[str, int]
) -> dict[str, Any]:
    """Return the kernels' arguments besides tensors, by name, from the extents of the result and the tensors' strides.

    Flat tiles have one row. A vector is the largest power of two elements, up to 16 bytes, that divides all sizes.
    """
    vector = max(1, UNIT // itemsize)
    while any(size % vector for size in (columns, *strides.values())):
        vector //= 2
    tiles_n = -(-columns // config.block_n)
    sizes = {
        "rows_x": rows_x,
        "rows": rows,
        "columns": columns,
        "elements": columns,
        "vectors": columns // vector,
        "tiles": -(-rows // max(config.block_m, 1)) * tiles_n,
        "tiles_n": tiles_n,
        "VECTOR": vector,
        "stride_y": 0,
        "step_y": 0,
        **config.constants(),
    }
    return (
        sizes
        | {f"stride_{name}": stride for name, stride in strides.items()}
        | {f"step_{name}": stride // vector for name, stride in strides.items()}
    )


def job(config: TileConfig, target: str, op: str = "", element: str = "") -> build.Job:
    """Return the Job that compiles `config` for `target`, as `ch14.descriptors` launches it for rows of whole vectors.

    `op` is by default the one that has `config` among its variants, or else copy. `element` is Triton's type, by
    default bf16 to add and i16 to move.
    """
    op = op or next((op for op, named in VARIANTS.items() if config in named.values()), "copy")
    element = element or ("bf16" if op == "add" else "i16")
    kernel, names = find_kernel(op, config)
    tensors = ("x", "y", "out") if op == "add" else ("x", "out")
    types = {**dict.fromkeys(tensors, f"*{element}"), "index": "*i32", **dict.fromkeys(NUMBERS, "i32")}
    if config.way in ("host", "gather4"):
        types |= {name: f"tensordesc<{element}{list(config.descriptor_block(name))}>" for name in tensors}
    vector = max(1, UNIT * 8 // int(element.lstrip("bfpiu")))
    constants = {"y": None, "VECTOR": vector, **config.constants()}
    signature = {name: types[name] for name in names if name in types}
    return build.job_for(
        kernel,
        signature,
        {name: constants[name] for name in names if name not in types},
        target,
        num_warps=config.num_warps,
        name=str(config),
        aligned=tuple(name for name, kind in signature.items() if kind.startswith("*")),
    )
