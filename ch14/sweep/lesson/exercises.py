"""The exercise of the notebook `ch14_sweep` in which a reader writes the check that a sweep needs before it times."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

BLOCK = 64
# Each way to be wrong, and what finds it.
FAULTS = {
    "leaves out the last element": "compare every element",
    "writes one element past the end": "let y be the front of a longer tensor, and look at what follows it",
    "takes the sign off": "draw random numbers of both signs",
    "leaves out the rest after whole blocks": "try a length that no power of two divides",
    "adds to what y held": "fill y with NaN before the launch, so that what it held cannot help",
    "computes a little less than 2 x": "compare with 2 x to the last bit: doubling is exact",
}


@triton.jit
def double_kernel(x, y, n, writable, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    twice = 2 * tl.load(x + at, mask=at < n, other=0.0)
    if FAULT == "leaves out the last element":
        tl.store(y + at, twice, mask=at < n - 1)
    elif FAULT == "writes one element past the end":
        tl.store(y + at, twice, mask=at < min(n + 1, writable))
    elif FAULT == "takes the sign off":
        tl.store(y + at, tl.abs(twice), mask=at < n)
    elif FAULT == "leaves out the rest after whole blocks":
        tl.store(y + at, twice, mask=at < n // BLOCK * BLOCK)
    elif FAULT == "adds to what y held":
        tl.store(y + at, twice + 0 * tl.load(y + at, mask=at < n), mask=at < n)
    elif FAULT == "computes a little less than 2 x":
        tl.store(y + at, twice * 0.9999, mask=at < n)
    else:
        tl.store(y + at, twice, mask=at < n)


def make_run(fault: str = "") -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return a function `run(x, y)` that writes 2 x to y, with one of FAULTS.

    Both tensors are float32, contiguous and of one length. It writes past y only within the tensor that y is a part
    of, so that a wrong kernel harms no other memory.
    """

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        n = x.numel()
        writable = y.untyped_storage().nbytes() // y.element_size() - y.storage_offset()
        double_kernel[(triton.cdiv(n + 1, BLOCK),)](x, y, n, writable, fault, BLOCK)

    return run


def check_judge(is_right: Callable[[Callable], bool]) -> None:
    """Raise AssertionError unless `is_right(run)` accepts the kernel that is right and no other."""
    assert is_right(make_run()), "it refuses the kernel that is right"
    for fault, hint in FAULTS.items():
        assert not is_right(make_run(fault)), f"it accepts a kernel that {fault}: {hint}"
