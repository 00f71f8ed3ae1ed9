"""Inputs, launches and checks for the kernels that a reader writes in `notebooks/ch10_tile_pipeline.ipynb`.

All kernels take float32. Matrices have rows of whole units of 16 bytes, because a store writes whole units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from IPython.display import display

from ch10.tile_pipeline.lesson import figures
from ch10.tile_pipeline.lesson.banks import count_wavefronts
from ch10.tile_pipeline.lesson.experiments import CENTRE, EDGE, LARGE
from tilelab import emulator
from tilelab.cells import lesson
from tilelab.cells.cuda_magic import make_tensor_map
from tilelab.measure import bench
from tilelab.measure.check import check_exercise
from tilelab.records import results
from tilelab.runtime import tensor_map

# Rows and columns: less than a tile, ragged in both directions, many tiles. The last is for a GPU only.
SHAPES = (4, 8), (68, 36), (100, 1000), (1028, 2052)
HALO_TILE = 32, 128  # rows and columns that a block of a stencil computes
ROW = 32  # floats of a row of the table, and of a query
QUERIES, TABLE_ROWS = 512, 1 << 15  # of the search that is timed
SEARCHES = (4, 1), (4, 256), (8, 1500), (40, 5000)  # queries and rows of the table
BATCHED = (8192, 64, 256)  # matrices, rows, columns of the sum that is timed
CLOCK_GHZ = 1.98  # the highest clock of an H200, as nvidia-smi reports it
SUMS = (1, 8, 128), (3, 10, 132), (70, 5, 260), (300, 64, 256)

lesson.register("ch10_tile_copies", "ch10_tile_pipeline", "tile_copy", "line_copy", "tile_ring")
lesson.register("ch10_tile_ring_stages", "ch10_tile_pipeline", "tile_ring", sweep=True)
lesson.register("ch10_tile_stencils", "ch10_tile_pipeline", "plain_stencil", "fill_stencil")
lesson.register(
    "ch10_tile_transposes", "ch10_tile_pipeline", "padded_transpose", "tile_transpose", "swizzled_transpose"
)
lesson.register("ch10_tile_searches", "ch10_tile_pipeline", "nearest", "nearest_multicast")
lesson.register("ch10_tile_clusters", "ch10_tile_pipeline", "nearest_multicast", sweep=True)
lesson.register("ch10_tile_sums", "ch10_tile_pipeline", "add_each", "add_partial")
lesson.register("ch10_tile_shares", "ch10_tile_pipeline", "add_partial", sweep=True)


# ---- inputs, whose outputs are all wrong


def make_matrices(shape=LARGE, where="cuda", transposed: bool = False) -> list[torch.Tensor]:
    """Return x, normally distributed, and out of the same or the transposed shape, full of NaN."""
    return [
        torch.randn(shape, device=where),
        torch.full(shape[::-1] if transposed else shape, float("nan"), device=where),
    ]


def make_search(queries: int = QUERIES, rows: int = TABLE_ROWS, where="cuda") -> list[torch.Tensor]:
    """Return a table (rows, ROW), queries (queries, ROW), both normally distributed, and out (queries,) of NaN."""
    return [
        torch.randn(rows, ROW, device=where),
        torch.randn(queries, ROW, device=where),
        torch.full((queries,), float("nan"), device=where),
    ]


def make_batch(shape=BATCHED, where="cuda") -> list[torch.Tensor]:
    """Return x (matrices, rows, columns), normally distributed, and out (rows, columns), full of NaN."""
    return [torch.randn(shape, device=where), torch.full(shape[1:], float("nan"), device=where)]


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


def by_line(kernel, boxes: int) -> Callable:
    """Return a function that prepares a launch on x and out as vectors: one block per `boxes` boxes of 256."""

    def prepare(x, out):
        maps = [make_tensor_map(tensor.view(-1), (256,)) for tensor in (x, out)]
        return kernel.prepare(-(-x.numel() // (256 * boxes)), 32, maps)

    return prepare


def by_share(kernel, share: int) -> Callable:
    """Return a function that prepares out = 0 and a launch with 256 threads per 8 x 128 results and `share` matrices.

    The kernel takes maps of x and out, with boxes of 8 x 128 of one matrix, and the number of matrices.
    """

    def prepare(x, out):
        matrices, rows, columns = x.shape
        maps = make_tensor_map(x, (1, 8, 128)), make_tensor_map(out, (8, 128))
        blocks = -(-columns // 128), -(-rows // 8), -(-matrices // share)
        launch = kernel.prepare(blocks, 256, (*maps, matrices))

        def run():
            out.zero_()
            launch()

        return run

    return prepare


# ---- checks


def _check_cases(cases: Sequence[tuple], run_case: Callable[[tuple, str], str]) -> str:
    """Run each case where it can run, the last only on a GPU; return "" or the first case that is wrong, and why."""

    def run(where: str) -> str:
        for case in cases[:-1] if where == "cpu" else cases:
            if fault := run_case(case, where):
                return f"{' x '.join(map(str, case))}: {fault}"
        return ""

    return lesson.run_everywhere(run)


def _make_check(
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


def search_spec(table: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the distance of each query to the nearest row of a table."""
    return (queries.double()[:, None] - table.double()).abs().sum(-1).amin(1)


def check_stencil(prepare: Callable, spec: Callable = stencil_spec) -> str:
    """Run a stencil on several shapes; return "" or what is wrong."""
    return _make_check(SHAPES, make_matrices, spec, lambda x: 1e-6 * spec(x.abs()) + 1e-9)(prepare)


# Each takes `prepare`, which returns a launch on the inputs, and returns "" or what is wrong.
check_copy = _make_check(SHAPES, make_matrices, lambda x: x)
check_transpose = _make_check(SHAPES, functools.partial(make_matrices, transposed=True), torch.t)
check_search = _make_check(
    SEARCHES,
    lambda case, where: make_search(*case, where),
    search_spec,
    lambda *given: 1e-5 * search_spec(*given) + 1e-6,
)
check_sum = _make_check(
    SUMS, make_batch, lambda x: x.double().sum(0), lambda x: 1e-6 * x.double().abs().sum(0)
)


# ---- ladders


def make_ladders() -> tuple[lesson.Ladder, ...]:
    """Return the ladders of the copy, the stencil, the transpose, the search and the sum.

    The peer of the first three is torch's copy of as many bytes.
    """

    def prepare_copy(x, out):
        source, target = x.view(-1), out.view(-1)
        return lambda: target.copy_(source)

    both = 2 * LARGE[0] * LARGE[1] * 4
    searched = QUERIES * TABLE_ROWS * ROW * 4  # bytes that reach the SMs
    turned = functools.partial(make_matrices, transposed=True)
    of_matrices = (
        lesson.Ladder(f"ch10_tile_{name}", "torch copy_", prepare_copy, make_inputs, check, nbytes=both)
        for name, make_inputs, check in (
            ("copies", make_matrices, check_copy),
            ("stencils", make_matrices, check_stencil),
            ("transposes", turned, check_transpose),
        )
    )
    searches = lesson.Ladder(
        "ch10_tile_searches",
        "torch cdist",
        lambda table, queries, out: lambda: torch.amin(torch.cdist(queries, table, p=1), 1, out=out),
        make_search,
        check_search,
        nbytes=searched,
    )
    sums = lesson.Ladder(
        "ch10_tile_sums",
        "torch sum",
        lambda x, out: lambda: torch.sum(x, 0, out=out),
        make_batch,
        check_sum,
        nbytes=4 * BATCHED[0] * BATCHED[1] * BATCHED[2],
    )
    return (*of_matrices, searches, sums)


def _show_sweep(
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
    return _show_sweep(ladder, "ch10_tile_ring_stages", kernel, launch, "STAGES", (2, 3, 4, 8, 12))(
        "stages of 8 KiB",
        lambda rows: (
            f"One block per SM: two stages reach {rows[2]['ratio']:.2f} of torch's copy, "
            f"eight {rows[8]['ratio']:.2f}"
        ),
    )


def show_clusters(ladder: lesson.Ladder, kernel, launch: Callable):
    """Time a search with clusters of 1, 2 and 4 and return the curve. `launch(kernel, cluster)` is the `prepare`."""
    return _show_sweep(ladder, "ch10_tile_clusters", kernel, launch, "CLUSTER", (1, 2, 4))(
        "blocks of a cluster",
        lambda rows: (
            f"Tiles sent to two blocks: {rows[1]['ms'] / rows[2]['ms']:.2f} × one block, "
            f"to four: {rows[1]['ms'] / rows[4]['ms']:.2f} ×"
        ),
    )


def show_shares(ladder: lesson.Ladder, kernel):
    """Take the step of the sum with 64 tiles per block, then time 1 to 8,192 tiles per block and return the curve."""
    display(ladder.step(kernel, by_share(kernel, 64)))
    return _show_sweep(ladder, "ch10_tile_shares", kernel, by_share, "SHARE", (1, 8, 64, 512, 8192))(
        "tiles that a block adds up",
        lambda rows: (
            f"L2 adds every tile: {rows[1]['ratio']:.2f} of torch's sum; the best share: "
            f"{max(row['ratio'] for row in rows.values()):.2f}"
        ),
        logarithmic=True,
    )


def wavefront_table() -> results.Table:
    """Return the wavefronts that each transpose of the notebook needs per 128 bytes, beside the clocks it has."""
    roofs = bench.measured_roofs()
    clocks = CLOCK_GHZ * roofs.device["sms"] * 128 / (roofs.rows[0]["gbps"] / 2)
    rows = []
    for name, swizzle, pitch in (
        ("padded_transpose", "none", 132),
        ("tile_transpose", "none", 128),
        ("swizzled_transpose", "128B", 128),
    ):
        read = count_wavefronts([tensor_map.swizzle_offset(row * pitch, swizzle) for row in range(32)], 4)
        engine = 0 if name == "padded_transpose" else 2
        rows.append(
            {
                "version": name,
                "read a column": read,
                "write a row": 1,
                "engine: load, store": engine,
                "wavefronts per 128 bytes": read + 1 + engine,
            }
        )
    return results.table(
        rows,
        f"torch's copy ({roofs.rows[0]['gbps']:.0f} GB/s, {roofs.label()}) leaves each SM "
        f"{clocks:.1f} clocks per 128 bytes at {CLOCK_GHZ} GHz, the highest clock of an H200",
    )


# ---- exercises


def _wide_spec(x: torch.Tensor) -> torch.Tensor:
    """Return 0.25 (up + down + left + right) of the neighbours at distance two, in float64, with zero outside."""
    return 0.25 * _add_neighbours(x, 2)


def _raise(fault: str) -> None:
    assert not fault, fault


def _check_halo(kernel, box: tuple[int, int], spec: Callable) -> None:
    """Raise AssertionError unless a stencil is right, and some of its blocks alone write whole tiles."""
    _raise(check_stencil(by_halo(kernel, box), spec))

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
        _raise(lesson.check_kernel(by_halo(kernel, box, blocks), make_parts, find_wrong, case))


def check_wide(kernel) -> None:
    """Raise AssertionError unless a kernel computes `_wide_spec` from boxes of 36 x 136."""
    lesson.require_written(kernel)
    _check_halo(kernel, (36, 136), _wide_spec)
    assert kernel.counts().get("UTMALDG", 0) >= 1, "the kernel has no load by tensor map"


def check_narrow(kernel) -> None:
    """Raise AssertionError unless a kernel transposes boxes of 64 x 16 that are swizzled by 64 bytes."""
    if "return 0;" in kernel.source:
        raise NotImplementedError

    def make_maps(x, out):
        return make_tensor_map(x, (64, 16), swizzle="64B"), make_tensor_map(out, (16, 64))

    prepare = by_tile(kernel, (64, 16), 256, make_maps)
    _raise(check_transpose(prepare))
    if not emulator.is_available():
        return
    with emulator.trace() as trace:
        prepare(*make_matrices((64, 32), "cpu", transposed=True))()
    stores = sum(event.kind == emulator.Event.STORE for event in trace.events)
    assert stores == 2, (
        f"out is right, but two blocks have issued {stores} stores: one thread stores the tile"
    )


STAGES, TILE_ROWS = 4, 64  # of the ring of exercise 5
# Queries and rows of its table: one tile, fewer tiles than stages, as many, more. The last is for a GPU only.
SCORES = (4, 40), (4, 190), (4, 256), (4, 620), (264, 5000)


def _make_whole(*shape: int, where: str) -> torch.Tensor:
    """Return random whole numbers, so small that float32 holds every sum of 32 products exactly."""
    return torch.randint(-512, 512, shape, device=where).float()


def _describe_wrong_scores(out: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str:
    """Return how many scores are wrong, and which row's score stands in the place of the first one, and why."""
    query, row = wrong.nonzero()[0].tolist()
    held = out[query, row].item()
    rows = (expected[query] == held).nonzero().flatten().tolist()
    if held == 0:
        why = ", as if its row lay outside of the table"
    elif len(rows) != 1:
        why = ", the score of no row: its row was not in its place when it was read"
    else:
        why = f", the score of row {rows[0]}"
        uses, rest = divmod(rows[0] - row, STAGES * TILE_ROWS)
        if rest == 0:
            why += (
                ": its stage was refilled before all threads had read it"
                if uses > 0
                else ": its stage was read before the new tile had landed"
            )
    return (
        f"{int(wrong.sum()):,} of {out.numel():,} scores are wrong; the first, out[{query}][{row}], is {held:.8g} "
        f"instead of {expected[query, row]:.8g}{why}"
    )


def check_scores(kernel) -> None:
    """Raise AssertionError unless a kernel whose blocks share their loads is right with 1, 2 and 4 blocks per cluster.

    NotImplementedError for a kernel that sends nothing yet. A wrong barrier would stop a GPU for ever, so nothing runs
    there before the emulator has passed it.
    """
    if "// your " in kernel.source and "tma_load_2d_multicast(" not in kernel.source:
        raise NotImplementedError
    assert emulator.is_available(), "not run: the emulator needs g++"

    def run_case(case, where):
        cluster, queries, rows = case
        table, given = _make_whole(rows, ROW, where=where), _make_whole(queries, ROW, where=where)
        expected = given.double() @ table.double().T
        memory = lesson.LaunchMemory([table, given, torch.full((queries, rows), float("nan"), device=where)])
        table, given, out = memory.tensors
        boxes, broken_rule = make_tensor_map(table, (TILE_ROWS // cluster, ROW), swizzle="128B"), ""
        try:
            kernel.define(CLUSTER=cluster, STAGES=STAGES).prepare(
                queries, TILE_ROWS, (boxes, given, out, rows), cluster=cluster
            )()
        except emulator.EmulationError as error:
            broken_rule = str(error)
        wrong = (out != expected) & ~(
            out.isnan() & bool(broken_rule)
        )  # after an error, only what was written counts
        said = _describe_wrong_scores(out, expected, wrong) if wrong.any() else ""
        return "; ".join(filter(None, (broken_rule, said))) or memory.find_fault(wrong)

    def run(where):
        for cluster in (2, 4, 1):
            for case in SCORES[:-1] if where == "cpu" else SCORES:
                if fault := run_case((cluster, *case), where):
                    return f"CLUSTER={cluster}, {case[0]} queries, {case[1]:,} rows: {fault}"
        return ""

    _raise(lesson.run_everywhere(run))
    assert kernel.sass("UTMALDG.*MULTICAST"), "the scores are right, but no load is a multicast"


CHECKS = {
    "Exercise 2": lambda kernel: _check_halo(kernel, (34, 136), stencil_spec),
    "Exercise 3": check_wide,
    "Exercise 4": check_narrow,
    "Exercise 5": check_scores,
}


def check(exercise: str, kernel) -> None:
    """Print whether a reader's kernel solves an exercise."""
    check_exercise(exercise, lambda: CHECKS[exercise](kernel))
