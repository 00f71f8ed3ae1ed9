"""A copy through tensor descriptors, one TMA load and one TMA store per tile: the field note's copy.

The launcher makes host descriptors once. Triton stores each tile from the shared memory that it was loaded into.
Source: Triton's tensor-descriptor API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.descriptors.configs import UNIT
from tilelab.runtime import spoken
from tilelab.runtime.operands import require_disjoint, require_gpu, require_rows, require_tensor, row_stride

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)


@dataclass(frozen=True)
class CopyConfig:
    """A tile of block_m x block_n elements (powers of two) and two options; `num_stages` has no loop to act on."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two; it is {value!r:.40}.")

    def __str__(self) -> str:
        return spoken.say(
            self, {"block_m block_n": "{}×{}", "num_warps": "{} warps", "num_stages": "{} stages"}
        )


SETS = {
    name: [CopyConfig(*tile) for tile in tiles]
    for name, tiles in {
        "conservative": [
            (128, 128, 8, 4),
            (64, 128, 4, 3),
            (128, 64, 4, 3),
            (256, 256, 16, 5),
            (256, 128, 8, 5),
        ],
        "proposed": [
            (256, 256, 16, 5),
            (256, 128, 8, 5),
            (128, 256, 8, 5),
            (128, 128, 8, 4),
            (64, 128, 4, 3),
        ],
        "course": [(32, 128, 4, 1), (64, 64, 4, 1), (8, 1024, 4, 1), (4, 2048, 4, 1)],
    }.items()
}


@triton.jit
def copy_tma_kernel(source, destination, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # Columns vary fastest over the programs, so that programs which run together read neighbouring DRAM pages.
    row = tl.program_id(1) * BLOCK_M
    column = tl.program_id(0) * BLOCK_N
    destination.store([row, column], source.load([row, column]))


def prepare_copy(
    source: torch.Tensor,  # (M, N)
    destination: torch.Tensor,  # (M, N)
    config: CopyConfig,
) -> Callable[[], None]:
    """Return a function that copies `source` to `destination`, two (M, N) matrices of one of DTYPES.

    Raises ValueError for what a descriptor cannot take (rows that are not contiguous, or not whole 16 bytes), for
    memory that overlaps and for more than 65,535 rows of tiles; tilelab.runtime.device.Unsupported without TMA.
    """
    require_tensor("source", source, "copy_tma", dtype=DTYPES, ndim=2, not_empty=True)
    require_tensor(
        "destination", destination, "copy_tma", dtype=source.dtype, shape=source.shape, on=source.device
    )
    for name, matrix in (("source", source), ("destination", destination)):
        require_rows(name, matrix)
    rows, columns = source.shape
    if columns * source.element_size() % UNIT:  # a store writes whole units, past the end of a ragged row too
        raise ValueError(
            f"a row must end at a multiple of {UNIT} bytes; it has {columns * source.element_size()}."
        )
    require_disjoint({"destination": destination}, {"source": source})
    require_gpu(
        source,
        "copy_tma",
        instead="use torch's copy_",
        interpreted=not isinstance(copy_tma_kernel, triton.JITFunction),
    )
    grid = (triton.cdiv(columns, config.block_n), triton.cdiv(rows, config.block_m))
    if grid[1] > 65535:
        raise ValueError(f"at most 65,535 rows of tiles fit; source has {grid[1]}: use a taller tile.")
    tiles = [
        TensorDescriptor(matrix, [rows, columns], [row_stride(matrix), 1], [config.block_m, config.block_n])
        for matrix in (source, destination)
    ]

    def launch():
        copy_tma_kernel[grid](
            *tiles, config.block_m, config.block_n, num_warps=config.num_warps, num_stages=config.num_stages
        )

    return launch


def copy_tma(
    source: torch.Tensor,  # (M, N)
    destination: torch.Tensor,  # (M, N)
    config: CopyConfig | None = None,
) -> torch.Tensor:  # (M, N)
    """Copy `source` to `destination` and return it. Arguments and errors as for `prepare_copy`."""
    prepare_copy(source, destination, config or SETS["course"][0])()
    return destination
