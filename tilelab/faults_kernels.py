"""Kernels that compute y = 2 x, or go wrong in a way of their own; `tilelab.faults` sweeps over them."""

from tilelab import device

device.interpret_without_gpu()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def right_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def wrong_kernel(x, y, n, BLOCK: tl.constexpr):
    # Writes its last block one element short.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n - 1)


@triton.jit
def wild_kernel(x, y, n, BLOCK: tl.constexpr):
    # Writes a terabyte past its output.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + (at.to(tl.int64) + (1 << 38)), 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def endless_kernel(x, y, n, BLOCK: tl.constexpr):
    # Waits for another program to write y, which none does.
    while tl.load(x, volatile=True) == tl.load(x, volatile=True):
        tl.store(y + tl.program_id(0), 0.0)
