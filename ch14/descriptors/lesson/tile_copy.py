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

from tilelab.runtime import spoken
from tilelab.runtime.operands import row_stride


@dataclass(frozen=True)
class CopyConfig:
    """A tile of block_m x block_n elements (powers of two) and two options; `num_stages` has no loop to act on."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return spoken.say(
            self, {"block_m block_n": "{}×{}", "num_warps": "{} warps", "num_stages": "{} stages"}
        )


_TILES = {
    "conservative": ((128, 128, 8, 4), (64, 128, 4, 3), (128, 64, 4, 3), (256, 256, 16, 5), (256, 128, 8, 5)),
    "proposed": ((256, 256, 16, 5), (256, 128, 8, 5), (128, 256, 8, 5), (128, 128, 8, 4), (64, 128, 4, 3)),
    "course": ((32, 128, 4, 1), (64, 64, 4, 1), (8, 1024, 4, 1), (4, 2048, 4, 1)),
}
SETS = {name: [CopyConfig(*tile) for tile in tiles] for name, tiles in _TILES.items()}


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
    """Return a function that copies `source` to `destination`, two (M, N) matrices of one dtype, not checked here.

    Their rows start and end at multiples of 16 bytes.
    """
    rows, columns = source.shape
    grid = triton.cdiv(columns, config.block_n), triton.cdiv(rows, config.block_m)
    tiles = [
        TensorDescriptor(matrix, [rows, columns], [row_stride(matrix), 1], [config.block_m, config.block_n])
        for matrix in (source, destination)
    ]

    def launch():
        copy_tma_kernel[grid](
            *tiles, config.block_m, config.block_n, num_warps=config.num_warps, num_stages=config.num_stages
        )

    return launch
