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
    return [x, y, torch.full_like(x, torch.nan)]


def launch(
    kernel, blocks=None, threads: int = 32, tile: int = TILE_BYTES, stages: int = 0, arguments=lambda x: ()
) -> Callable:
    """Return a function that prepares a launch on x and out: by default one block per tile of `tile` bytes."""

    def prepare(x, out):
        tiles = -(-x.nbytes // tile)
        return kernel.prepare(blocks or tiles, threads, (x, out, tiles, *arguments(x)), stages * tile)

    return prepare


def _count_tiles(*counts: int) -> dict[str, int]:
    return {f"{count} tile{'s' * (count > 1)}": count for count in counts}


def check_copy(prepare: Callable, tile_bytes: int = TILE_BYTES) -> str:
    """Run a copy on one tile, a few and many; return "" or what is wrong. `prepare(x, out)` returns the launch."""
    return lesson.check_kernel(
        prepare,
        lambda tiles, where: make_copy_inputs(tiles * tile_bytes, where),
        lambda x, out: out != x,
        _count_tiles(1, 5, 67),
        _count_tiles(4099),
    )


def check_axpy(prepare: Callable) -> str:
    """Run out = A x + y on one tile, a few and many; return "" or what is wrong."""

    def find_wrong(x, y, out):
        error = (out.double() - (A * x.double() + y.double())).abs()
        return ~(error <= 1e-6 * (A * x.abs() + y.abs()).clamp(min=1e-3))

    return lesson.check_kernel(
        prepare,
        lambda tiles, where: make_axpy_inputs(tiles * TILE_BYTES, where),
        find_wrong,
        _count_tiles(1, 5, 41),
        _count_tiles(4099),
    )


def check_ring(kernel, tile_bytes: int = 1024, stages: int = 0) -> None:
    """Raise AssertionError unless `kernel(x, out, tiles)` copies, with 1, 3 and 7 blocks of 32 threads.

    A ring with `stages` gets as many tiles of dynamic shared memory. NotImplementedError for a kernel without a body.
    """
    lesson.require_written(kernel)
    for blocks in (1, 3, 7):
        fault = check_copy(launch(kernel, blocks, tile=tile_bytes, stages=stages), tile_bytes)
        assert not fault, f"with {blocks} block{'s' * (blocks > 1)}, {fault}"


def check_scale(kernel) -> None:
    """Raise AssertionError unless `kernel(a, x, out)` computes a x with 256 floats per block of 256 threads."""
    lesson.require_right(
        kernel,
        lambda x, out: kernel.prepare(13, 256, (A, x, out)),
        lambda tiles, where: [
            torch.randn(tiles * 256, device=where),
            torch.full((tiles * 256,), torch.nan, device=where),
        ],
        lambda x, out: out != A * x,
        _count_tiles(13),
    )
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
