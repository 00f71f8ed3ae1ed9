"""A box as it lies in shared memory: the bytes that a load by tensor map puts there, and what they should be.

The kernel is `dump` in tile_pipeline.cu. Source: PTX ISA, "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline import checks
from ch10.tile_pipeline.configs import macros
from tilelab import build, cuda, device, tensor_map


def dump_job(box: tuple[int, int], itemsize: int, target: str) -> build.Job:
    """The compilation of the kernel that shows a box of `box` elements of `itemsize` bytes."""
    return build.Job(f"{tile_pipeline.SOURCE}:dump", {}, macros("dump", *box, itemsize, 128), target, 4,
                     smem_bytes=box[0] * box[1] * itemsize + 1024, name=f"dump {box[0]} × {box[1]} × {itemsize} B")


def dump_box(x, row: int, column: int, box: tuple[int, int], swizzle: str = "none", fill: str = "zero") -> torch.Tensor:
    """The bytes of shared memory, as uint8 on the GPU, after the box (rows, columns) whose first element is x[row,
    column] has landed there. The box may stick out of x (R, C) on any side: `fill` is what lies outside.

    x is of a dtype in tilelab.tensor_map.DTYPES, and `column` starts at a multiple of 16 bytes. Rows of a swizzled box
    are as long as the swizzle, which leaves no gaps. Raises ValueError for what it cannot take and
    tilelab.device.Unsupported without TMA.
    """
    checks.check_tensor("x", x, "R, C")
    if x.dtype not in tensor_map.DTYPES:
        raise ValueError(f"x holds {', '.join(str(dtype)[6:] for dtype in tensor_map.DTYPES)}; here it is "
                         f"{str(x.dtype)[6:]}.")
    if not isinstance(box, (tuple, list)) or len(box) != 2:
        raise ValueError(f"a box has rows and columns; here it is {box!r}.")
    box = tuple(box)
    for name, value in (("row", row), ("column", column)):
        if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"{name} must be a whole number of 32 bits; here it is {value!r}.")
    checks.check_layout("x", x, box, swizzle, fill=fill)
    if column * x.element_size() % tile_pipeline.UNIT:
        raise ValueError("a box starts at a multiple of 16 bytes of its row "
                         f"({tile_pipeline.UNIT // x.element_size()} elements), or the load is an illegal instruction; "
                         f"here at column {column}.")
    span, inner = tensor_map.SWIZZLES[swizzle], box[1] * x.element_size()
    if span and inner != span:
        raise ValueError(f"rows of a box with a swizzle of {swizzle} take {span} bytes here; {box[1]} elements take "
                         f"{inner}.")
    checks.check_gpu(x, "ch10.tile_pipeline.box_dump.dump_job")
    what = dump_job(box, x.element_size(), device.current().target)
    found = torch.zeros(box[0] * inner, dtype=torch.uint8, device=x.device)
    args = [tensor_map.make_tensor_map(x, box, swizzle=swizzle, fill=fill), found, ctypes.c_int(column), ctypes.c_int(row)]
    cuda.launch(tile_pipeline.compiled("dump", what.constants), 1, 128, args, what.smem_bytes)
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
    """The box, row by row, from the bytes that `dump_box` found, as tilelab.tensor_map.swizzle_offset says they lie."""
    order = tensor_map.swizzle_offset(torch.arange(found.numel(), device=found.device), swizzle)
    return found[order].view(dtype).view(box)
