"""A box as it lies in shared memory: the bytes that a load by tensor map puts there.

The kernel is `dump` in tile_pipeline.cu. Source: PTX ISA, "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import macros
from tilelab.runtime import build, cuda, operands, tensor_map


def dump_job(box: tuple[int, int], itemsize: int, target: str) -> build.Job:
    """Return the compilation of the kernel that dumps a box of `box` elements of `itemsize` bytes."""
    return build.Job(
        f"{tile_pipeline.SOURCE}:dump",
        {},
        macros("dump", *box, itemsize, 128),
        target,
        4,
        smem_bytes=box[0] * box[1] * itemsize + 1024,
        name=f"dump {box[0]} × {box[1]} × {itemsize} B",
    )


def check_corner(column: int, itemsize: int) -> None:
    """Raise ValueError for a box that would start within a unit of 16 bytes."""
    if column * itemsize % tile_pipeline.UNIT:
        raise ValueError(
            f"column must be a multiple of {tile_pipeline.UNIT // itemsize} elements (16 bytes), or the "
            f"load is an illegal instruction; it is {column}."
        )


def dump_box(
    x, row: int, column: int, box: tuple[int, int], swizzle: str = "none", fill: str = "zero"
) -> torch.Tensor:
    """Load the box (rows, columns) whose first element is x[row, column], and return its bytes in shared memory.

    The result is uint8 on the GPU. x (R, C) has a dtype in tilelab.runtime.tensor_map.DTYPES. A box that sticks
    out of x holds `fill` there. Rows of a swizzled box must be as long as the swizzle, which leaves no gaps.
    Raises ValueError for what the kernel cannot take and Unsupported without TMA.
    """
    operands.require_tensor("x", x, "dump_box", dtype=tuple(tensor_map.DTYPES), ndim=2)
    operands.require_rows("x", x, tile_pipeline.UNIT)
    tensor_map.check_describable(
        x.shape,
        x.stride(),
        x.element_size(),
        x.data_ptr(),
        box,
        swizzle=swizzle,
        fill=fill,
        floating=x.is_floating_point(),
    )
    for name, value in (("row", row), ("column", column)):
        if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"{name} must be a whole number of 32 bits; it is {value!r:.40}.")
    check_corner(column, x.element_size())
    width, row_bytes = tensor_map.SWIZZLES[swizzle], box[1] * x.element_size()
    if width and row_bytes != width:
        raise ValueError(f"rows of a box with swizzle {swizzle} must take {width} bytes, not {row_bytes}.")
    operands.require_gpu(x, "a copy by tensor map", "has_tma", "compile it with dump_job and read its SASS")
    job = dump_job(box, x.element_size(), "sm_90a")
    found = torch.zeros(box[0] * row_bytes, dtype=torch.uint8, device=x.device)
    arguments = [
        tensor_map.make_tensor_map(x, box, swizzle=swizzle, fill=fill),
        found,
        ctypes.c_int(column),
        ctypes.c_int(row),
    ]
    cuda.launch(tile_pipeline.load_kernel("dump", job.constants), 1, 128, arguments, job.smem_bytes)
    return found
