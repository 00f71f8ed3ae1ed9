"""Inputs, launches and checks for the kernels that a reader writes in `notebooks/02_ch07_resample.ipynb`.

The kernels of its cells take float32 features (B, S, DEPTH) with at least two source times, at most TIMES.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from ch07.resample import EXAMPLE, compulsory_bytes, spec
from ch07.resample.lesson import experiments, figures, published_kernel
from tilelab import emulator
from tilelab.cells import lesson
from tilelab.measure.check import make_checker

DEPTH, TIMES, CHUNK = 128, 1024, 64  # features per row, most source times, targets per chunk
MOST_STEPS = 200  # basic blocks of a kernel that all threads of a block execute per target of a search
# B, S, T: a short chunk; two sources; all of shared memory; chunks that end with their batch, and those that do not.
SMALL = ((2, 33, 70), (1, 2, 5), (1, TIMES, 65), (3, 100, 64))
VERSIONS = ("search_per_thread", "warp_search", "ballot_search", "shared_search", "wide_loads", "bulk_rows")

lesson.register("ch07_resample_versions", "02_ch07_resample", *VERSIONS)


def make_inputs(shape=EXAMPLE, where="cuda", odd: bool = False) -> list[torch.Tensor]:
    """Return float32 features, ascending source times, target times, and out, full of NaN. See experiments."""
    given = experiments.make_inputs(*shape, torch.float32, odd, where)
    return [*given, torch.full((shape[0], shape[2], shape[3]), torch.nan, device=where)]


@functools.cache
def count_bytes(shape=EXAMPLE) -> int:
    """Return the bytes that every kernel must move for a problem of `shape`, from a sample of 32 batches."""
    generator = torch.Generator().manual_seed(0)
    batches, sources, targets, depth = shape
    source_times, target_times = (
        torch.rand(32, count, generator=generator).sort(1).values for count in (sources, targets)
    )
    sample = compulsory_bytes(
        torch.empty(32, sources, 1).expand(32, sources, depth), source_times, target_times
    )
    return sample * batches // 32


def prepare_copy(features, source_times, target_times, out) -> Callable[[], torch.Tensor]:
    """Return torch's copy of as many bytes as a problem of these tensors must move."""
    return lesson.prepare_copy(count_bytes((*source_times.shape, *out.shape[1:])))


def by_element(kernel) -> Callable:
    """Return a function that prepares a launch with a thread per element, in blocks of 256 threads."""

    def prepare(features, source_times, target_times, out):
        (batches, sources), targets = source_times.shape, target_times.shape[1]
        return kernel.prepare(
            -(-out.numel() // 256),
            256,
            (features, source_times, target_times, out, sources, targets, batches * targets),
        )

    return prepare


def by_chunk(kernel, blocks: int = 0, smem_bytes: int = 0) -> Callable:
    """Return a function that prepares a launch with a block of 256 threads per chunk, or with `blocks` blocks.

    The arguments are the four tensors, then the numbers of sources, targets, chunks per batch and chunks in all, as
    many of them as the kernel takes.
    """

    def prepare(features, source_times, target_times, out):
        (batches, sources), targets = source_times.shape, target_times.shape[1]
        chunks = -(-targets // CHUNK)
        sizes = (sources, targets, chunks, batches * chunks)[: len(kernel.parameters) - 4]
        arguments = (features, source_times, target_times, out, *sizes)
        return kernel.prepare(blocks or batches * chunks, 256, arguments, smem_bytes)

    return prepare


def find_left(source_times, target_times) -> torch.Tensor:
    """Return the index of the last source time at or before each target, at least 0 and at most sources - 2."""
    left = torch.searchsorted(source_times, target_times, right=True) - 1
    return left.clamp(0, source_times.shape[1] - 2)


def find_wrong(features, source_times, target_times, out) -> torch.Tensor:
    """Return where `out` differs from `spec` by more than a few roundings of the larger neighbour."""
    expected = spec(features, source_times, target_times)
    left = find_left(source_times, target_times)
    scale = sum(features.abs().gather(1, index[..., None].expand_as(out)) for index in (left, left + 1))
    return ~((out.double() - expected).abs() <= 1e-6 * scale)


def _name_cases(*shapes) -> dict[str, tuple]:
    """Return each (B, S, T) with plain and, from three sources on, with odd times, by name."""
    return {
        f"B, S, T = {', '.join(map(str, shape))}{', odd times' * odd}": (*shape, odd)
        for shape in shapes
        for odd in (False, True)
        if shape[1] > 2 or not odd
    }


CASES = _name_cases(*SMALL)


def _make_case(case: tuple, where: str) -> list[torch.Tensor]:
    batches, sources, targets, odd = case
    return make_inputs((batches, sources, targets, DEPTH), where, odd)


def find_fault(prepare: Callable, where: str) -> str:
    """Run a version on small problems, in the emulator ("cpu") or on "cuda"; return "" or what is wrong."""
    return lesson.run_cases(prepare, _make_case, find_wrong, CASES, where)


def check_version(prepare: Callable) -> str:
    """Run a version on small problems with plain and with odd times, everywhere; return "" or what is wrong.

    `prepare(features, source_times, target_times, out)` returns the launch.
    """
    return lesson.check_kernel(prepare, _make_case, find_wrong, CASES, _name_cases((16, TIMES, 2048)))


def read_places(kernel) -> list[int]:
    """Return place(0), …, place(TIMES - 1) of the cell of `kernel`, which writes them to `places`."""
    places = torch.full((TIMES,), -1, dtype=torch.int32)

    def run(where: str) -> str:
        found = places.to(where)
        kernel.prepare(1, TIMES, (found,))()
        places.copy_(found)
        return ""

    fault = lesson.run_everywhere(run)
    assert not fault, fault
    return places.tolist()


def check_places(places_kernel, kernel) -> None:
    """Raise AssertionError unless a ballot search is right and no step takes more than two wavefronts.

    `places_kernel(places)` writes the word of shared memory that holds each source time.
    """
    places = read_places(places_kernel)
    assert len(set(places)) == len(places), "two source times share a word of shared memory"
    most = max(
        figures.count_wavefronts([places[time] if time >= 0 else -1 for time in step])
        for target in range(0, TIMES - 1, 37)
        for step in figures.ballot_search_reads(TIMES, target + 0.5)
    )
    assert most <= 2, f"one step takes {most} wavefronts"
    check_mended(kernel)


def check_mended(kernel) -> None:
    """Raise AssertionError unless a version with a block per chunk is right, also where only some blocks run."""
    fault = check_version(by_chunk(kernel)) or _check_first_blocks(
        lambda blocks: by_chunk(kernel, blocks), _make_case, find_wrong
    )
    assert not fault, fault


def _check_first_blocks(prepare_with: Callable, make_case: Callable, find_wrong: Callable) -> str:
    """Run only the blocks of the first batch of three; return "" or what they have written wrongly.

    What a block writes beside its own chunk is often written over by a later block, or by an earlier one. `prepare_with
    (blocks)` returns a `prepare`.
    """

    def find_written(*tensors):
        out = tensors[-1]
        return find_wrong(*tensors) & ~(out.isnan() if out.is_floating_point() else out == -1)

    case = 3, 40, 70, False
    prepare = prepare_with(-(-case[2] // CHUNK))
    return lesson.check_kernel(prepare, make_case, find_written, {"the first blocks alone": case})


def check_search(kernel) -> None:
    """Raise AssertionError unless `kernel(source_times, target_times, left, sources, targets, chunks)` searches.

    It runs with a block of 256 threads per chunk of 64 targets. left (B, T) gets the result of `find_left`.
    """

    def make_case(case, where):
        *_, source_times, target_times, _ = _make_case(case, where)
        return source_times, target_times, torch.full_like(target_times, -1, dtype=torch.int32)

    def prepare_with(blocks, kernel=kernel):
        def prepare(source_times, target_times, left):
            (batches, sources), targets = source_times.shape, target_times.shape[1]
            chunks = -(-targets // CHUNK)
            arguments = (source_times, target_times, left, sources, targets, chunks)
            return kernel.prepare(blocks or batches * chunks, 256, arguments)

        return prepare

    def find_wrong(source_times, target_times, left):
        return left != find_left(source_times, target_times)

    lesson.require_right(kernel, prepare_with(0), make_case, find_wrong, CASES)
    fault = _check_first_blocks(prepare_with, make_case, find_wrong)
    assert not fault, fault
    assert kernel.resources()["smem_static"] >= 4 * TIMES, "the source times are not in shared memory"
    if emulator.is_available():
        counting = dataclasses.replace(kernel, options=(*kernel.options, emulator.COUNT_STEPS))
        steps = []
        for targets in (1, CHUNK):  # the first also has what is done once per block
            with emulator.trace() as trace:
                prepare_with(1, counting)(*make_case((1, TIMES, targets, False), "cpu"))()
            steps.append(trace.steps)
        per_target = (steps[1] - steps[0]) / (CHUNK - 1)
        assert per_target <= MOST_STEPS, (
            f"left is right, but the threads of a block take {per_target:,.0f} steps in all per target; one thread "
            "that halves the range takes about 30"
        )


def check_blend(kernel) -> None:
    """Raise AssertionError unless `kernel(features, left, weights, out, targets)` blends rows of one bulk copy.

    It runs with a block of 256 threads per 16 targets and 64 rows of dynamic shared memory. `left` ascends and spans
    fewer than 64 rows per block.
    """

    def make_case(targets, where):
        features, weights = torch.randn(90, DEPTH, device=where), torch.rand(targets, device=where)
        left = torch.randint(0, 89, (targets,), device=where).sort().values.int()
        first = left[torch.arange(targets, device=where) // 16 * 16]  # of the target's block
        out = torch.full((targets, DEPTH), torch.nan, device=where)
        return features, torch.minimum(left, first + 62), weights, out

    def prepare(features, left, weights, out):
        blocks = -(-len(left) // 16)
        return kernel.prepare(blocks, 256, (features, left, weights, out, len(left)), 64 * DEPTH * 4)

    def find_wrong(features, left, weights, out):
        before, after, w = features[left.long()], features[left.long() + 1], weights[:, None]
        return ~((out - ((1 - w) * before + w * after)).abs() <= 1e-6 * (before.abs() + after.abs()))

    cases = {f"{targets} targets": targets for targets in (16, 5, 70)}
    lesson.require_right(kernel, prepare, make_case, find_wrong, cases)
    assert kernel.counts().get("UBLKCP", 0) >= 1, "the kernel has no bulk copy"
    if emulator.is_available():
        features, left, weights, out = make_case(70, "cpu")
        with emulator.trace() as trace:
            prepare(features, left, weights, out)()
        read = emulator.count_read_bytes(kernel.parameters[0][1])
        assert not read, (
            f"the blend reads {read:,} bytes of the features in global memory, beside the bulk copies"
        )
        for block, first in enumerate(range(0, 70, 16)):
            loads = [event.bytes for event in trace.events if event.block == block]
            rows = int(left[first : first + 16][-1] + 2 - left[first])
            assert len(loads) == 1, f"a block has {len(loads)} bulk copies instead of one"
            assert rows * DEPTH * 4 <= loads[0], (
                f"a block needs {rows} rows, and its bulk copy brings {loads[0] // (DEPTH * 4)}"
            )


def check_test(is_wrong: Callable) -> None:
    """Raise AssertionError unless `is_wrong(kernel)` catches each error of the published kernel and no right kernel.

    NotImplementedError where it catches none.
    """
    assert not is_wrong(published_kernel.correct_kernel), "it must pass the right kernel"
    missed = [name for name, flawed in published_kernel.FLAWED_KERNELS.items() if not is_wrong(flawed)]
    if len(missed) == len(published_kernel.FLAWED_KERNELS):
        raise NotImplementedError
    assert not missed, f"not caught: {', '.join(missed)}"


def check_whole(kernel) -> None:
    """Raise AssertionError unless a resampling kernel is right and keeps the source times in shared memory."""
    lesson.require_written(kernel)
    check_mended(kernel)
    assert kernel.resources()["smem_static"] >= 4 * TIMES, "the source times are not in shared memory"


CHECKS = {
    "Exercise 1": check_places,
    "Exercise 2": check_mended,
    "Exercise 3": check_search,
    "Exercise 4": check_blend,
    "Exercise 5": check_test,
    "Exercise 6": check_whole,
}
check = make_checker(CHECKS)
