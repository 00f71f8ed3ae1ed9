"""Inputs and checks for the kernels that a reader writes in `notebooks/ch07_bulk_copy.ipynb`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.cells import lesson
from tilelab.measure.check import check_exercise

TILE_BYTES = 8192  # every version of the copy takes whole tiles of at most this size
LARGE = 1 << 30  # bytes of an array that is timed
A = 2.5

lesson.register(
    "ch07_bulk_copy_ladder",
    "ch07_bulk_copy",
    "plain_copy",
    "first_copy",
    "one_buffer",
    "two_buffers",
    "ring_copy",
    "counter_copy",
)
lesson.register("ch07_bulk_axpy_ladder", "ch07_bulk_copy", "axpy_ring")
lesson.register("ch07_bulk_copy_in_flight", "ch07_bulk_copy", "one_buffer", "ring_copy", sweep=True)


def make_copy_inputs(nbytes: int = LARGE, where="cuda") -> list[torch.Tensor]:
    """Return x, random bytes, and out, in which every byte is wrong."""
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=where)
    return [x, ~x]


def make_axpy_inputs(nbytes: int = LARGE // 2, where="cuda") -> list[torch.Tensor]:
    """Return x and y, normally distributed float32, and out, full of NaN."""
    x, y = (torch.randn(nbytes // 4, device=where) for _ in range(2))
    return [x, y, torch.full_like(x, float("nan"))]


def check_copy(prepare: Callable, tile_bytes: int = TILE_BYTES) -> str:
    """Run a copy on one tile, a few and many; return "" or what is wrong. `prepare(x, out)` returns the launch."""

    def run(where: str) -> str:
        for tiles in (1, 5, 67 if where == "cpu" else 4099):
            x, wrong = make_copy_inputs(tiles * tile_bytes, where)
            out, buffer = lesson.make_guarded(wrong)
            prepare(x, out)()
            if fault := lesson.find_fault(out, buffer, out != x):
                return f"{tiles} tiles: {fault}"
        return ""

    return lesson.run_everywhere(run)


def check_axpy(prepare: Callable) -> str:
    """Run out = A x + y on one tile, a few and many; return "" or what is wrong."""

    def run(where: str) -> str:
        for tiles in (1, 5, 41 if where == "cpu" else 4099):
            x, y, nan = make_axpy_inputs(tiles * TILE_BYTES, where)
            out, buffer = lesson.make_guarded(nan)
            prepare(x, y, out)()
            error = (out.double() - (A * x.double() + y.double())).abs()
            if fault := lesson.find_fault(
                out, buffer, ~(error <= 1e-6 * (A * x.abs() + y.abs()).clamp(min=1e-3))
            ):
                return f"{tiles} tiles: {fault}"
        return ""

    return lesson.run_everywhere(run)


def check_ring(kernel, tile_bytes: int = 1024, stages: int = 0) -> None:
    """Raise AssertionError unless `kernel(x, out, tiles)` copies, with 1, 3 and 7 blocks of 32 threads.

    A ring with `stages` gets as many tiles of dynamic shared memory. NotImplementedError for a kernel without a body.
    """
    lesson.require_written(kernel)
    for blocks in (1, 3, 7):

        def prepare(x, out, blocks=blocks):
            return kernel.prepare(blocks, 32, (x, out, x.numel() // tile_bytes), stages * tile_bytes)

        fault = check_copy(prepare, tile_bytes)
        assert not fault, f"with {blocks} block{'s' * (blocks > 1)}, {fault}"


def check_scale(kernel) -> None:
    """Raise AssertionError unless `kernel(a, x, out)` computes a x with 256 floats per block of 256 threads."""
    lesson.require_written(kernel)

    def run(where: str) -> str:
        x, wrong = torch.randn(13 * 256, device=where), torch.full((13 * 256,), float("nan"), device=where)
        out, buffer = lesson.make_guarded(wrong)
        kernel.prepare(13, 256, (A, x, out))()
        return lesson.find_fault(out, buffer, out != A * x)

    fault = lesson.run_everywhere(run)
    assert not fault, fault
    assert kernel.counts().get("UBLKCP", 0) >= 2, "the kernel has no bulk load and bulk store"


def check_rings(kernel) -> None:
    """Check a ring with STAGES as `check_ring` does, with 1, 2, 3 and 5 stages."""
    for stages in (1, 2, 3, 5):
        try:
            check_ring(kernel.define(STAGES=stages), stages=stages)
        except AssertionError as error:
            raise AssertionError(f"with {stages} stage{'s' * (stages > 1)}, {error}") from None


CHECKS = {
    "Exercise 1": check_ring,
    "Exercise 2": check_ring,
    "Exercise 3": check_rings,
    "Exercise 4": check_scale,
}


def check(exercise: str, kernel) -> None:
    """Print whether a reader's kernel solves an exercise."""
    check_exercise(exercise, lambda: CHECKS[exercise](kernel))
