"""Inputs, ladders and checks for the kernels that a reader writes in `04_ch10_tile_sharing`: float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from IPython.display import display

from ch10.tile_pipeline.lesson.exercises import make_check, raise_fault, show_sweep
from tilelab import emulator
from tilelab.cells import lesson
from tilelab.cells.cuda_magic import make_tensor_map
from tilelab.measure.check import make_checker
from tilelab.records import results

ROW = 32  # floats of a row of the table, and of a query
QUERIES, TABLE_ROWS = 512, 1 << 15  # of the search that is timed
SEARCHES = (4, 1), (4, 256), (8, 1500), (40, 5000)  # queries and rows of the table
BATCHED = (8192, 64, 256)  # matrices, rows, columns of the sum that is timed
SUMS = (1, 8, 128), (3, 10, 132), (70, 5, 260), (300, 64, 256)

SEARCH_KERNELS = "nearest", "nearest_multicast", "nearest_released"
lesson.register("ch10_tile_searches", "04_ch10_tile_sharing", *SEARCH_KERNELS)
lesson.register("ch10_tile_clusters", "04_ch10_tile_sharing", *SEARCH_KERNELS, sweep=True)
lesson.register("ch10_tile_sums", "04_ch10_tile_sharing", "add_each", "add_partial")
lesson.register("ch10_tile_shares", "04_ch10_tile_sharing", "add_partial", sweep=True)


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


def search_spec(table: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the distance of each query to the nearest row of a table."""
    return (queries.double()[:, None] - table.double()).abs().sum(-1).amin(1)


# Each takes `prepare`, which returns a launch on the inputs, and returns "" or what is wrong.
check_search = make_check(
    SEARCHES,
    lambda case, where: make_search(*case, where),
    search_spec,
    lambda *given: 1e-5 * search_spec(*given) + 1e-6,
)
check_sum = make_check(
    SUMS, make_batch, lambda x: x.double().sum(0), lambda x: 1e-6 * x.double().abs().sum(0)
)


def make_ladders() -> tuple[lesson.Ladder, lesson.Ladder]:
    """Return the ladders of the search and of the sum."""
    searched = QUERIES * TABLE_ROWS * ROW * 4  # bytes that reach the SMs
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
    return searches, sums


def compare_waits(ladder: lesson.Ladder, launch: Callable, alone, multicast, released) -> results.Table | str:
    """Time the search by how blocks wait for each other, by whose loads they use, with 1, 2 and 4 blocks per cluster.

    `launch(kernel, cluster, shared, threads)` is the `prepare` of a version. Return a table of speeds over `alone`, the
    kernel whose blocks know nothing of each other. Before it was timed, return the record's label.
    """
    kernels = {
        "nearest": (alone, 256),
        "nearest_multicast": (multicast, 256),
        "nearest_multicast, no fence": (multicast.define(FENCE=0), 256),
        "nearest_released": (released, 288),
    }
    versions = {
        (name, loads, blocks): (kernel.define(CLUSTER=blocks, SHARED=int(loads == "shared")), threads)
        for name, (kernel, threads) in kernels.items()
        for loads in ("own", "shared")
        for blocks in (1, 2, 4)
        if loads == "own" or (blocks > 1 and kernel is not alone)
    }
    versions = {
        key: (version, launch(version, key[2], key[1] == "shared", threads))
        for key, (version, threads) in versions.items()
    }
    record = ladder.sweep("ch10_tile_clusters", versions, ("kernel", "loads", "blocks"))
    if any("ratio" not in row for row in record.rows):
        return record.label()
    speed = {(row["kernel"], row["loads"], row["blocks"]): row["ratio"] for row in record.rows}
    rows = [
        {"kernel": name, "loads of a tile": loads}
        | {
            f"{blocks} per cluster": speed[name, loads, blocks] / speed["nearest", "own", 1]
            for blocks in (1, 2, 4)
            if (name, loads, blocks) in speed
        }
        for name, loads in dict.fromkeys(key[:2] for key in speed)
    ]
    return results.table(rows, f"speed over nearest alone, by blocks per cluster; {record.label()}")


def describe_gemm_clusters() -> str:
    """Return for how many configurations of the recorded sweep of the GEMM a multicast to two blocks is faster."""
    record = results.Record(results.load("ch10_gemm_sweep"), live=False)
    speed = {row["config"]: row["ratio"] for row in record.rows if row.get("ratio")}
    gains = {
        name: speed[name] / speed[alone]
        for name in speed
        if (alone := name.replace(" · cluster of 2", "")) != name and alone in speed
    }
    best, worst = max(gains, key=gains.get), min(gains.values())
    return (
        f"quick sweep of the GEMM at 4096³, clusters of two: faster in {sum(gain > 1 for gain in gains.values())} "
        f"of {len(gains)} configurations, {worst:.2f} to {gains[best]:.2f} × the same without "
        f"(the largest gain has {best.partition(' · spec')[0]}); "
        f"the fastest with {max(map(speed.get, gains)):.2f} × cuBLAS, without "
        f"{max(ratio for name, ratio in speed.items() if 'cluster' not in name):.2f} ×; {record.label()}"
    )


def show_shares(ladder: lesson.Ladder, kernel):
    """Take the step of the sum with 64 tiles per block, then time 1 to 8,192 tiles per block and return the curve."""
    display(ladder.step(kernel, by_share(kernel, 64)))
    return show_sweep(ladder, "ch10_tile_shares", kernel, by_share, "SHARE", (1, 8, 64, 512, 8192))(
        "tiles that a block adds up",
        lambda rows: (
            f"L2 adds every tile: {rows[1]['ratio']:.2f} of torch's sum; the best share: "
            f"{max(row['ratio'] for row in rows.values()):.2f}"
        ),
        logarithmic=True,
    )


STAGES, TILE_ROWS = 4, 64  # of the ring of exercise 2
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

    raise_fault(lesson.run_everywhere(run))
    assert kernel.sass("UTMALDG.*MULTICAST"), "the scores are right, but no load is a multicast"


check = make_checker({"Exercise 2": check_scores})
