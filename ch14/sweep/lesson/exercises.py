"""The checks of the exercises of the notebook `09_ch14_sweep`, among them one of a check and one of a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ch14.sweep.lesson import held_out
from tilelab.sweeps import faults
from tilelab.sweeps.sweep import Sweep

BLOCK = 64
ASKED = 0.92  # of the best measured speed; the nearest row's best reaches 0.89
SLOWER = 1.5  # how much longer a cluster takes on the second GPU, and all else on the third
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


def check_contenders(contenders: Callable[..., list[str]]) -> None:
    """Raise AssertionError unless `contenders(rows, margin)` names all rows that may be the fastest right one."""
    rows = [
        {"kernel": "c", "status": "ok", "ms": 1.02},
        {"kernel": "a", "status": "ok", "ms": 1.0},
        {"kernel": "d", "status": "wrong", "ms": 0.5},
        {"kernel": "b", "status": "ok", "ms": 1.009},
        {"kernel": "e", "status": "rejected"},
    ]
    assert sorted(contenders(rows)) == ["a", "b"], "one per cent of the fastest that is right"
    assert sorted(contenders(rows, 0.05)) == ["a", "b", "c"], "a wider margin takes one more"
    for factor in (40, 0.001):  # a margin is a share, whatever the times are
        scaled = [row | {"ms": factor * row["ms"]} if "ms" in row else row for row in rows]
        assert sorted(contenders(scaled)) == ["a", "b"], (
            f"the margin is a share; here the fastest takes {factor} ms"
        )
    assert contenders(rows, margin=0) == ["a"], "without a margin there is one"


def check_reject(space: Any) -> None:
    """Raise AssertionError unless `space.reject(config)` refuses what has more than 1,024 elements, with a reason."""
    for block in (256, 1024):
        assert space.reject(faults.Config(block)) == "", f"{block:,} elements are fine"
    for block in (2048, 4096):
        reason = space.reject(faults.Config(block))
        assert (
            reason.endswith(".") and f"{block:,}" in reason and "1,024" in reason.replace(f"{block:,}", "", 1)
        ), f"for {block:,} elements say what it is and what is allowed"
    rows = Sweep([faults.Config(1024), faults.Config(2048)], space).finish()
    assert [row["status"] for row in rows] == ["ok", "rejected"] and "registers" not in rows[1]


def check_judge(is_right: Callable[[Callable], bool]) -> None:
    """Raise AssertionError unless `is_right(run)` accepts the kernel that is right and no other."""
    assert is_right(make_run()), "it refuses the kernel that is right"
    for fault, hint in FAULTS.items():
        assert not is_right(make_run(fault)), f"it accepts a kernel that {fault}: {hint}"


def slow_down(times: held_out.Times, clusters: float, others: float) -> held_out.Times:
    """Return the times of a GPU that needs these multiples for configurations with and without a cluster."""
    return {
        shape: {
            family: us * (clusters if held_out.candidates(shape)[family].cluster_size > 1 else others)
            for family, us in of_shape.items()
        }
        for shape, of_shape in times.items()
    }


def check_choice(choose: held_out.Choose) -> None:
    """Raise AssertionError unless `choose` is good at layers that it has not seen, on three GPUs.

    A choice that holds constants, or that has seen the held-out times, fails on a GPU whose rows differ.
    """
    gpus = {
        "here": (1, 1),
        f"where clusters take {SLOWER} times as long, as its rows say": (SLOWER, 1),
        f"where all but clusters takes {SLOWER} times as long, as its rows say": (1, SLOWER),
    }
    for where, factors in gpus.items():
        rows, measured = (slow_down(times, *factors) for times in held_out.read_times())
        found = held_out.summarise({"": held_out.judge(choose, rows, measured)})[0]
        said = (
            f"{found['geometric mean']:.3f} of the best measured speed, lowest {found['lowest']:.2f}, "
            f"{found['share below 0.95']:.0%} of shapes below 0.95"
        )
        print(f"{where}: {said}")
        assert found["geometric mean"] >= ASKED, f"{where}: {said}; {ASKED} is asked for"
