"""A box as it lies in shared memory: the bytes that a load by tensor map puts there.

The kernel is `dump` in tile_pipeline.cu. Source: PTX ISA, "Tensors" (tiled mode, swizzling modes).
"""

from __future__ import annotations

import ctypes

import torch

from ch10 import tile_pipeline
from ch10.tile_pipeline.configs import macros
from tilelab.runtime import build, cuda, tensor_map


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


def dump_box(
    x, row: int, column: int, box: tuple[int, int], swizzle: str = "none", fill: str = "zero"
) -> torch.Tensor:
    """Load the box (rows, columns) whose first element is x[row, column], and return its bytes in shared memory.

    The result is uint8 on the GPU. x (R, C) is on a GPU with TMA. A box that sticks out of x holds `fill` there. The
    rules of boxes are not checked: broken_programs.py shows what happens to those who break them.
    """
    job = dump_job(box, x.element_size(), "sm_90a")
    found = torch.zeros(box[0] * box[1] * x.element_size(), dtype=torch.uint8, device=x.device)
    arguments = [
        tensor_map.make_tensor_map(x, box, swizzle=swizzle, fill=fill),
        found,
        ctypes.c_int(column),
        ctypes.c_int(row),
    ]
    cuda.launch(tile_pipeline.load_kernel("dump", job.constants), 1, 128, arguments, job.smem_bytes)
    return found
