"""A kernel that computes y = 2 x, or goes wrong in one of four ways; `tilelab.sweeps.faults` sweeps over them."""

from tilelab.runtime import device

device.interpret_without_gpu()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    twice = 2 * tl.load(x + at, mask=at < n)
    if FAULT == "wrong result":  # the last element is left out
        tl.store(y + at, twice, mask=at < n - 1)
    elif FAULT == "illegal memory access":  # a terabyte past y
        tl.store(y + (at.to(tl.int64) + (1 << 38)), twice, mask=at < n)
    elif FAULT == "hang":
        while tl.load(x, volatile=True) == tl.load(x, volatile=True):
            tl.store(y + tl.program_id(0), 0.0)
    elif FAULT == "failing compiler pass":  # Triton's pass that flattens loops does not expect the branch
        for i in tl.range(tl.program_id(0), n, 8, flatten=True):
            total = 0.0
            for j in range(n):
                total += j * 1.0
            if i % 3 == 0:
                tl.store(y + i, total)
            else:
                tl.store(y + i, -total)
    else:
        tl.store(y + at, twice, mask=at < n)
