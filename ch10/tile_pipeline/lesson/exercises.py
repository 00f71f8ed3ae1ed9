"""Inputs, launches and checks for the kernels that a reader writes in `notebooks/03_ch10_tile_pipeline.ipynb`.

All kernels take float32. Matrices have rows of whole units of 16 bytes, because a store writes whole units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ch10.tile_pipeline.lesson import figures
from ch10.tile_pipeline.lesson.experiments import CENTRE, EDGE, LARGE
from tilelab import emulator
from tilelab.cells import lesson
from tilelab.cells.cuda_magic import make_tensor_map
from tilelab.measure.check import make_checker

# Rows and columns: less than a tile, ragged in both directions, many tiles. The last is for a GPU only.
SHAPES = (4, 8), (68, 36), (100, 1000), (1028, 2052)
HALO_TILE = 32, 128  # rows and columns that a block of a stencil computes

lesson.register("ch10_tile_copies", "03_ch10_tile_pipeline", "tile_copy", "tile_ring")
lesson.register("ch10_tile_ring_stages", "03_ch10_tile_pipeline", "tile_ring", sweep=True)
lesson.register("ch10_tile_stencils", "03_ch10_tile_pipeline", "plain_stencil", "fill_stencil")
lesson.register(
    "ch10_tile_transposes",
    "03_ch10_tile_pipeline",
    "padded_transpose",
    "tile_transpose",
    "swizzled_transpose",
)


# ---- inputs, whose outputs are all wrong


def make_matrices(shape=LARGE, where="cuda", transposed: bool = False) -> list[torch.Tensor]:
    """Return x, normally distributed, and out of the same or the transposed shape, full of NaN."""
    return [
        torch.randn(shape, device=where),
        torch.full(shape[::-1] if transposed else shape, float("nan"), device=where),
    ]


# ---- launches: functions that prepare a launch


def by_tile(
    kernel, tile: tuple[int, int], threads: int, arguments: Callable, blocks: tuple[int, int] | None = None
) -> Callable:
    """Return a function that prepares a launch on `arguments(x, out)`: one block per `tile` of x, its columns first.

    With `blocks` only so many run.
    """

    def prepare(x, out):
        tiles = -(-x.shape[1] // tile[1]), -(-x.shape[0] // tile[0])
        return kernel.prepare(blocks or tiles, threads, arguments(x, out))

    return prepare


def by_box(kernel, box: tuple[int, int]) -> Callable:
    """Return a function that prepares a launch on maps of x and out with this box: one block per box."""
    return by_tile(kernel, box, 32, lambda x, out: (make_tensor_map(x, box), make_tensor_map(out, box)))


def by_pointer(kernel) -> Callable:
    """Return a function that prepares a launch with 256 threads per 64 rows and 32 columns of x, without maps."""
    return by_tile(kernel, (64, 32), 256, lambda x, out: (x, out, *x.shape))


def by_halo(kernel, box: tuple[int, int], blocks: tuple[int, int] | None = None) -> Callable:
    """Return a function that prepares a launch with 256 threads per 32 x 128 results; x's map has boxes of `box`."""
    return by_tile(
        kernel, HALO_TILE, 256, lambda x, out: (make_tensor_map(x, box), out, *x.shape, x.stride(0)), blocks
    )


# ---- checks


def _check_cases(cases: Sequence[tuple], run_case: Callable[[tuple, str], str]) -> str:
    """Run each case where it can run, the last only on a GPU; return "" or the first case that is wrong, and why."""

    def run(where: str) -> str:
        for case in cases[:-1] if where == "cpu" else cases:
            if fault := run_case(case, where):
                return f"{' x '.join(map(str, case))}: {fault}"
        return ""

    return lesson.run_everywhere(run)


def make_check(
    cases: Sequence[tuple], make_inputs: Callable, spec: Callable, tolerance: Callable = lambda *given: 0
) -> Callable[[Callable], str]:
    """Return a check: it runs a kernel on inputs of each case in guarded memory and returns "" or what is wrong.

    `make_inputs(case, where)` returns the inputs, the last of which is out. `spec` and `tolerance` take the others.
    """

    def check(prepare: Callable) -> str:
        def run_case(case: tuple, where: str) -> str:
            memory = lesson.LaunchMemory(make_inputs(case, where))
            prepare(*memory.tensors)()
            error = (memory.tensors[-1].double() - spec(*memory.given)).abs()
            return memory.find_fault(~(error <= tolerance(*memory.given)))

        return _check_cases(cases, run_case)

    return check


def stencil_spec(x: torch.Tensor) -> torch.Tensor:
    """Return CENTRE x + EDGE (up + down + left + right) in float64, with zero outside of x."""
    return CENTRE * x.double() + EDGE * _add_neighbours(x, 1)


def _add_neighbours(x: torch.Tensor, distance: int) -> torch.Tensor:
    """Return up + down + left + right at a distance, in float64, with zero outside of x."""
    padded = torch.nn.functional.pad(x.double(), (distance,) * 4)
    rows, columns = (slice(distance, -distance),) * 2
    near, far = slice(None, -2 * distance), slice(2 * distance, None)
    return padded[near, columns] + padded[far, columns] + padded[rows, near] + padded[rows, far]


def check_stencil(prepare: Callable, spec: Callable = stencil_spec) -> str:
    """Run a stencil on several shapes; return "" or what is wrong."""
    return make_check(SHAPES, make_matrices, spec, lambda x: 1e-6 * spec(x.abs()) + 1e-9)(prepare)


# Each takes `prepare`, which returns a launch on the inputs, and returns "" or what is wrong.
check_copy = make_check(SHAPES, make_matrices, lambda x: x)
check_transpose = make_check(SHAPES, functools.partial(make_matrices, transposed=True), torch.t)


# ---- ladders


def make_ladders() -> tuple[lesson.Ladder, ...]:
    """Return the ladders of the copy, the stencil and the transpose, whose peer is torch's copy of as many bytes."""

    def prepare_copy(x, out):
        source, target = x.view(-1), out.view(-1)
        return lambda: target.copy_(source)

    both = 2 * LARGE[0] * LARGE[1] * 4
    turned = functools.partial(make_matrices, transposed=True)
    return tuple(
        lesson.Ladder(f"ch10_tile_{name}", "torch copy_", prepare_copy, make_inputs, check, nbytes=both)
        for name, make_inputs, check in (
            ("copies", make_matrices, check_copy),
            ("stencils", make_matrices, check_stencil),
            ("transposes", turned, check_transpose),
        )
    )


def show_sweep(
    ladder: lesson.Ladder, experiment: str, kernel, launch: Callable, constant: str, values: Sequence[int]
) -> Callable:
    """Time a kernel with each value of a constant, where `launch(kernel, value)` is the `prepare` of a version.

    Return a function of a label, a title `find(rows)` and the options of `figures.draw_curve`, which returns the curve,
    or only the record's label where it was never timed.
    """
    versions = {(value,): kernel.define(**{constant: value}) for value in values}
    versions = {key: (version, launch(version, *key)) for key, version in versions.items()}
    record = ladder.sweep(experiment, versions, (constant.lower(),))

    def draw(label: str, find: Callable[[dict[int, dict]], str], **options):
        if any("ratio" not in row for row in record.rows):
            return record.label()
        rows = {row[constant.lower()]: row for row in record.rows}
        return figures.draw_curve(record, constant.lower(), label, find(rows), **options)

    return draw


def show_stages(ladder: lesson.Ladder, kernel, launch: Callable):
    """Time a ring with 2 to 12 stages and return the curve. `launch(kernel, stages)` is the `prepare` of a version."""
    return show_sweep(ladder, "ch10_tile_ring_stages", kernel, launch, "STAGES", (2, 3, 4, 8, 12))(
        "stages of 8 KiB",
        lambda rows: (
            f"One block per SM: two stages reach {rows[2]['ratio']:.2f} of torch's copy, "
            f"eight {rows[8]['ratio']:.2f}"
        ),
    )


# ---- exercises


def _wide_spec(x: torch.Tensor) -> torch.Tensor:
    """Return 0.25 (up + down + left + right) of the neighbours at distance two, in float64, with zero outside."""
    return 0.25 * _add_neighbours(x, 2)


def raise_fault(fault: str) -> None:
    assert not fault, fault


def _check_halo(kernel, box: tuple[int, int], spec: Callable) -> None:
    """Raise AssertionError unless a stencil is right, and some of its blocks alone write whole tiles."""
    raise_fault(check_stencil(by_halo(kernel, box), spec))

    def make_parts(shape, where):  # of wider matrices, so that the stride is not the number of columns
        return [matrix[:, : shape[1]] for matrix in make_matrices((shape[0], shape[1] + 8), where)]

    def find_wrong(x, out):
        wrong = ~((out - spec(x)).abs() <= 1e-6 * spec(x.abs()) + 1e-9)
        for top in range(0, len(out), HALO_TILE[0]):
            for left in range(0, out.shape[1], HALO_TILE[1]):
                tile = slice(top, top + HALO_TILE[0]), slice(left, left + HALO_TILE[1])
                if out[tile].isnan().all():  # of a block that did not run
                    wrong[tile] = False
        return wrong

    for blocks in (
        (3, 3),
        (1, 1),
        (2, 1),
        (1, 2),
    ):  # no neighbour repairs what a block writes beside its tile
        case = {f"{blocks[0]} x {blocks[1]} of 3 x 3 blocks, rows with a stride": (68, 300)}
        raise_fault(lesson.check_kernel(by_halo(kernel, box, blocks), make_parts, find_wrong, case))


def check_wide(kernel) -> None:
    """Raise AssertionError unless a kernel computes `_wide_spec` from boxes of 36 x 136."""
    lesson.require_written(kernel)
    _check_halo(kernel, (36, 136), _wide_spec)
    assert kernel.counts().get("UTMALDG", 0) >= 1, "the kernel has no load by tensor map"


def _require_each_box_once(prepare: Callable) -> None:
    """Raise AssertionError unless the boxes of a transpose load and store each element once."""
    if not emulator.is_available():
        return
    x, out = make_matrices((128, 64), "cpu", transposed=True)
    with emulator.trace() as trace:
        prepare(x, out)()
    for kind, what in ((emulator.Event.LOAD, "load"), (emulator.Event.STORE, "store")):
        moved = sum(event.bytes for event in trace.events if event.kind == kind)
        assert moved == x.nbytes, f"its boxes {what} {moved:,} bytes of a matrix of {x.nbytes:,}"


def check_narrow(kernel) -> None:
    """Raise AssertionError unless a kernel transposes boxes of 64 x 16 that are swizzled by 64 bytes."""
    if "return 0;" in kernel.source:
        raise NotImplementedError

    def make_maps(x, out):
        return make_tensor_map(x, (64, 16), swizzle="64B"), make_tensor_map(out, (16, 64))

    prepare = by_tile(kernel, (64, 16), 256, make_maps)
    raise_fault(check_transpose(prepare))
    _require_each_box_once(prepare)


def check_turned(kernel) -> None:
    """Raise AssertionError unless a kernel transposes by boxes of 64 x 32, swizzled by 128 bytes, in and out."""
    lesson.require_written(kernel)

    def make_maps(x, out):
        return make_tensor_map(x, (64, 32), swizzle="128B"), make_tensor_map(out, (32, 64))

    prepare = by_tile(kernel, (64, 32), 256, make_maps)
    raise_fault(check_transpose(prepare))
    missing = {"UTMALDG", "UTMASTG"} - kernel.counts().keys()
    assert not missing, (
        f"the kernel moves no boxes both ways: its machine code lacks {', '.join(sorted(missing))}"
    )
    _require_each_box_once(prepare)


CHECKS = {
    "Exercise 2": lambda kernel: _check_halo(kernel, (34, 136), stencil_spec),
    "Exercise 3": check_wide,
    "Exercise 4": check_narrow,
    "Exercise 5": check_turned,
}
check = make_checker(CHECKS)
