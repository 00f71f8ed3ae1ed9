"""The doctor's copy in Triton: each program loads one tile by TMA and stores it by TMA, through host descriptors.

It imports Triton at the top, so the doctor imports this module only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 64, 64


@triton.jit
def copy_tma_kernel(source, destination, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M
    column = tl.program_id(1) * BLOCK_N
    destination.store([row, column], source.load([row, column]))


def copy_tma(source, destination) -> None:
    """Copy `source` to `destination`, bf16 tensors (M, N) whose rows take a multiple of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    grid = (triton.cdiv(source.shape[0], BLOCK_M), triton.cdiv(source.shape[1], BLOCK_N))
    tiles = [TensorDescriptor.from_tensor(tensor, [BLOCK_M, BLOCK_N]) for tensor in (source, destination)]
    copy_tma_kernel[grid](*tiles, BLOCK_M, BLOCK_N)
