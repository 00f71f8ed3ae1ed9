"""The first copies of `notebooks/00_start.ipynb`: their inputs, their check, and the checks of the exercises."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import torch

from tilelab import emulator
from tilelab.cells import cuda_magic, lesson
from tilelab.measure.check import make_checker
from tilelab.runtime import cuda, device

LARGE = 1 << 29  # bytes of an array that is timed
TILE_BYTES = 4096
STEPS = ("fence_mbarrier_init", "mbarrier_arrive_expect_tx", "mbarrier_wait", "bulk_commit", "bulk_wait_read")

lesson.register("start_first_copy", "00_start", "by_threads", "by_engine")


def make_inputs(nbytes: int = LARGE, where="cuda") -> list[torch.Tensor]:
    """Return x, normally distributed float32, and out, full of NaN."""
    x = torch.randn(nbytes // 4, device=where)
    return [x, torch.full_like(x, torch.nan)]


def launch(kernel, threads: int = 32, tile: int = TILE_BYTES, arguments=lambda *tensors: tensors) -> Callable:
    """Return a function that prepares a launch on x and out, with one block per tile of `tile` bytes."""
    return lambda *tensors: kernel.prepare(tensors[0].nbytes // tile, threads, arguments(*tensors))


def check_tiles(
    prepare: Callable, expected: Callable = lambda x: x, tile_bytes: int = TILE_BYTES, inputs: int = 1
) -> str:
    """Run a kernel on one tile, a few and many, in the emulator and on the GPU; return "" or what is wrong.

    `prepare(*inputs, out)` returns the launch, and `expected(*inputs)` the right output, bit for bit.
    """

    def make_tensors(tiles: int, where: str) -> list[torch.Tensor]:
        tensors = [make_inputs(tiles * tile_bytes, where)[0] for _ in range(inputs)]
        return [*tensors, torch.full_like(expected(*tensors), torch.nan)]

    return lesson.check_kernel(
        prepare,
        make_tensors,
        lambda *tensors: tensors[-1] != expected(*tensors[:-1]),
        {"1 tile": 1, "5 tiles": 5, "12 tiles": 12},
        {"4099 tiles": 4099},
    )


def check_copy(prepare: Callable) -> str:
    """Check a copy of tiles of TILE_BYTES. `prepare(x, out)` returns the launch."""
    return check_tiles(prepare)


def try_size(kernel: cuda_magic.CudaKernel, nbytes: int) -> str:
    """Compile `kernel(x, out)` with tiles of BYTES=`nbytes` bytes and check it; return "" or why it fails."""
    sized = kernel.define(BYTES=nbytes)
    try:
        sized.cubin  # noqa: B018 compiles
        return check_tiles(launch(sized, tile=nbytes), tile_bytes=nbytes)
    except (cuda.CompileError, device.Unsupported) as error:  # of the compiler, or of the launch
        return next((line for line in str(error).splitlines() if "error" in line), str(error))


def leave_out_each_step(kernel: cuda_magic.CudaKernel, steps=STEPS) -> list[dict]:
    """Remove one call at a time from a copy and run the rest in the emulator; return rows {without, what happens}."""
    rows = []
    for step in steps:
        source = re.sub(rf"^ *{step}\b.*\n", "", kernel.source, flags=re.MULTILINE)
        broken = cuda_magic.find_kernels(source, kernel.options, kernel.target)[kernel.name]
        rows.append({"without": step, "what happens": _emulate(broken)})
    return rows


def _emulate(kernel: cuda_magic.CudaKernel) -> str:
    """Return what the emulator says of a copy at each speed of its engine, the first fault it finds."""
    if not emulator.is_available():
        return "not run: the emulator needs g++"
    x, out = make_inputs(5 * TILE_BYTES, "cpu")
    for seed in emulator.SEEDS:
        out.fill_(torch.nan)
        try:
            emulator.run(kernel, 5, 32, (x, out), seed=seed)
        except emulator.EmulationError as error:
            return str(error)
        if wrong := int((out != x).sum()):
            return f"no error, but {wrong:,} of {x.numel():,} elements are wrong"
    return "right"


def check_smallest_tile(solve: Callable) -> None:
    """Raise AssertionError unless `solve(gbps, gflops, element_bytes)` is right: the warm-up."""
    for gbps, gflops, element_bytes, side in (
        (100, 6000, 2, 128),
        (50, 6000, 2, 240),
        (100, 6000, 1, 64),
        (32, 6000, 2, 384),
        (90, 6000, 2, 144),
        *((gbps, 5000, 4, -(-20000 // (16 * gbps)) * 16) for gbps in random.sample(range(40, 400), 3)),
    ):
        found = solve(gbps, gflops, element_bytes)
        assert found == side, (
            f"{gbps} GB/s for {gflops} billion operations per second on elements of {element_bytes} "
            f"bytes ask for a side of {side}, not {found}"
        )


def check_sizes(kernel: cuda_magic.CudaKernel, predictions: dict[int, bool]) -> None:
    """Raise AssertionError unless each prediction {bytes of a tile: whether it is copied} is right."""
    if ... in predictions.values():
        raise NotImplementedError
    for nbytes, predicted in predictions.items():
        reason = try_size(kernel, nbytes)
        assert not reason.startswith("not run"), reason
        assert predicted == (not reason), f"BYTES={nbytes} {f'fails: {reason}' if reason else 'is copied'}"


def _assert_moves(kernel, expected: Callable, arguments: Callable, inputs: int = 1) -> None:
    lesson.require_written(kernel)
    fault = check_tiles(launch(kernel, tile=1024, arguments=arguments), expected, 1024, inputs)
    assert not fault, fault
    assert kernel.counts().get("UBLKCP", 0) >= 2, "the kernel has no bulk load and bulk store"


def check_floats(kernel) -> None:
    """Raise AssertionError unless `kernel(x, out)` copies tiles of 256 floats, one per block of 32 threads."""
    _assert_moves(kernel, lambda x: x, lambda x, out: (x, out))


def check_reversed(kernel) -> None:
    """Raise AssertionError unless `kernel(x, out, tiles)` reverses the order of tiles of 1,024 bytes."""
    _assert_moves(
        kernel, lambda x: x.view(-1, 256).flip(0).reshape(-1), lambda x, out: (x, out, x.nbytes // 1024)
    )


def check_interleaved(kernel) -> None:
    """Raise AssertionError unless `kernel(x, y, out)` puts tiles of x and of y, of 1,024 bytes, in turn into out."""
    _assert_moves(
        kernel,
        lambda x, y: torch.stack([x.view(-1, 256), y.view(-1, 256)], 1).reshape(-1),
        lambda x, y, out: (x, y, out),
        inputs=2,
    )
    for what, pattern in (("mbarriers", "SYNCS.*EXCH"), ("bulk stores", r"UBLKCP\.G")):
        found = len(kernel.sass(pattern))
        assert found == 1, f"the copies are right, but the kernel has {found} {what} instead of one"


CHECKS = {
    "Exercise 1": check_smallest_tile,
    "Exercise 2": check_sizes,
    "Exercise 3": check_floats,
    "Exercise 4": check_reversed,
    "Exercise 5": check_interleaved,
}
check = make_checker(CHECKS)
