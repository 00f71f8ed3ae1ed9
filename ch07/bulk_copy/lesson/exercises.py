"""Inputs and checks for the kernels that a reader writes in `notebooks/01_ch07_bulk_copy.ipynb`."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable

import torch

from tilelab import emulator
from tilelab.cells import cuda_magic, lesson
from tilelab.measure.check import make_checker

TILE_BYTES = 8192  # every version of the copy takes whole tiles of at most this size
LARGE = 1 << 30  # bytes of an array that is timed
A = 2.5

lesson.register(
    "ch07_bulk_copy_ladder",
    "01_ch07_bulk_copy",
    "plain_copy",
    "first_copy",
    "one_buffer",
    "two_buffers",
    "ring_copy",
    "counter_copy",
)
lesson.register("ch07_bulk_axpy_ladder", "01_ch07_bulk_copy", "axpy_ring")
lesson.register("ch07_bulk_copy_in_flight", "01_ch07_bulk_copy", "one_buffer", "ring_copy", sweep=True)


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
    copy, inputs = launch(kernel, 2, tile=tile_bytes, stages=stages), make_copy_inputs(17 * tile_bytes, "cpu")
    _require_bulk_copies(copy, inputs, tile_bytes, max(0, stages - 2))


def check_too_early(kernel) -> None:
    """Raise AssertionError unless a copy with two buffers fails, and only because it waits for the older store.

    Print the fault, which is what the exercise asks for.
    """
    wait = r"bulk_wait_read\s*<\s*1\s*>"
    assert re.search(wait, kernel.source), "let the thread wait for the older store only: bulk_wait_read<1>"
    source = re.sub(wait, "bulk_wait_read<0>", kernel.source)
    try:
        check_ring(cuda_magic.find_kernels(source, kernel.options)[kernel.name])
    except AssertionError as error:
        raise AssertionError(f"with bulk_wait_read<0> it must be right, and {error}") from None
    try:
        check_ring(kernel)
    except AssertionError as error:
        print(f"The fault: {error}.")
    else:
        raise AssertionError("it is right: refill the buffer that the store may still be reading")


def check_scale(kernel) -> None:
    """Raise AssertionError unless `kernel(a, x, out)` computes a x with 256 floats per block of 256 threads."""
    for a in (A, -0.375):
        lesson.require_right(
            kernel,
            lambda x, out, a=a: kernel.prepare(x.numel() // 256, 256, (a, x, out)),
            lambda tiles, where: [
                torch.randn(tiles * 256, device=where),
                torch.full((tiles * 256,), torch.nan, device=where),
            ],
            lambda x, out, a=a: out != a * x,
            _count_tiles(1, 13),
        )
    x = torch.randn(3 * 256)
    _require_bulk_copies(lambda x, out: kernel.prepare(3, 256, (A, x, out)), [x, torch.empty_like(x)], 1024)


def _require_bulk_copies(
    prepare: Callable, inputs: list[torch.Tensor], tile_bytes: int, ahead: int = 0
) -> None:
    """Raise AssertionError unless bulk copies move all of x and out, with `ahead` more loads before each store.

    `prepare(x, out)` returns the launch on `inputs`. The engine is as slow as possible, so that every thread has gone
    as far as it can before a tile lands.
    """
    if not emulator.is_available():
        return
    with emulator.trace() as trace, emulator.with_seed(0):
        prepare(*inputs)()
    moved = collections.Counter()  # bytes by kind
    for block in sorted({event.block for event in trace.events}):
        events = [event for event in trace.events if event.block == block]
        total = sum(event.bytes for event in events if event.kind == emulator.Event.LOAD)
        own = collections.Counter()
        for event in events:
            if event.kind == emulator.Event.STORE:
                loaded, stored = own[emulator.Event.LOAD] // tile_bytes, own[event.kind] // tile_bytes
                wanted = min(total // tile_bytes, stored + 1 + ahead)
                assert loaded >= wanted, (
                    f"when a block stores its tile number {stored} it has issued {loaded} load{'s' * (loaded != 1)}; "
                    f"with so many buffers it can have issued {wanted}"
                )
            own[event.kind] += event.bytes
        moved += own
    assert moved[emulator.Event.LOAD] == moved[emulator.Event.STORE] == inputs[-1].nbytes, (
        f"bulk copies load {moved[emulator.Event.LOAD]:,} and store {moved[emulator.Event.STORE]:,} of "
        f"{inputs[-1].nbytes:,} bytes"
    )


def check_rings(kernel) -> None:
    """Check a ring with STAGES as `check_ring` does, with 1, 2, 3 and 5 stages.

    When a block stores a tile, it must have issued the loads of the next `STAGES` - 2 tiles, if there are so many.
    """
    for stages in (1, 2, 3, 5):
        try:
            check_ring(kernel.define(STAGES=stages), stages=stages)
        except AssertionError as error:
            raise AssertionError(f"with {stages} stage{'s' * (stages > 1)}, {error}") from None


CHECKS = {
    "Exercise 1": check_too_early,
    "Exercise 2": check_ring,
    "Exercise 3": check_scale,
    "Exercise 4": check_rings,
}
check = make_checker(CHECKS)
