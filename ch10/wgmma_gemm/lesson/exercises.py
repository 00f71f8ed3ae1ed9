"""Inputs and checks for the kernels that a reader writes in `notebooks/05_ch10_wgmma_gemm.ipynb`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic, lesson
from tilelab.cells.cuda_magic import make_tensor_map
from tilelab.measure.check import make_checker
from tilelab.records import results
from tilelab.runtime import device

SIDE = 4096  # of the product that the steps are timed with
# Shapes (M, N, K) that no tile divides. With three CTAs in the emulator, a persistent CTA makes more than one tile.
SHAPES = {
    "cpu": ((130, 264, 328),),
    "cuda": ((1, 8, 8), (130, 264, 200), (517, 1032, 1000), (3000, 4104, 520)),
}

NOTEBOOK = "05_ch10_wgmma_gemm"
Versions = Sequence[
    tuple[str, dict]
]  # kernels of the notebook's cells, and constants that differ from the cell's
VERSIONS: Versions = (
    ("k_loop", {}),
    ("ring", {}),
    ("warp_specialized", {}),
    ("two_consumers", {}),
    ("two_consumers", {"BLOCK_N": 256}),
)


def find_kernels(*notebooks: str) -> dict[str, cuda_magic.CudaKernel]:
    """Return the kernels of the cells of notebooks, by name."""
    found = (cuda_magic.notebook_kernels(ROOT / "notebooks" / f"{name}.ipynb") for name in notebooks)
    return functools.reduce(dict.__or__, found)


def register_ladder(experiment: str, versions: Versions, *notebooks: str) -> None:
    """Make known which kernels of notebooks the rows of a ladder measure, so that its record can be found stale."""

    def source() -> str:
        found = find_kernels(*notebooks)
        return lesson.ladder_hash(
            [found[name].define(**constants).source_hash() for name, constants in versions]
        )

    results.register(experiment, lambda: results.load_record(experiment, source()), source)


register_ladder("ch10_gemm_steps", VERSIONS, NOTEBOOK)
lesson.register("ch10_gemm_depth", NOTEBOOK, "ring", "warp_specialized", sweep=True)


def make_operand(x: torch.Tensor, rows: int):
    """Return a tensor map of x with boxes of `rows` rows of 64 columns, which is 128 bytes, the widest swizzle."""
    return make_tensor_map(x, (rows, 64), swizzle="128B", l2_promotion="128B")


def launch(
    kernel, block_n=128, stages=4, consumers=0, one_per_sm=False, c_by_tma=False, **options
) -> Callable:
    """Return a function that prepares a launch on a, b and out: one CTA per tile of 128 x block_n, or per SM.

    Shared memory holds the stages, with `c_by_tma` four boxes of 64 x 64 elements of C, and two barriers per stage.
    """

    def prepare(a, b, out):
        (m, k), n, c = a.shape, b.shape[1], make_operand(out, 64) if c_by_tma else out
        tiles = -(-m // 128) * -(-n // block_n)
        sms = device.current().sms if a.is_cuda else 3  # 3 in the emulator
        smem = stages * (128 + block_n) * 128 + c_by_tma * 4 * 64 * 128 + stages * 16
        arguments = make_operand(a, 128), make_operand(b.T, block_n), c, m, n, k
        return kernel.prepare(
            min(tiles, sms) if one_per_sm else tiles, 128 * (1 + consumers), arguments, smem, **options
        )

    return prepare


def make_ladder(experiment: str = "ch10_gemm_steps", side: int = SIDE, repeats: bool = True) -> lesson.Ladder:
    """Return a ladder that times products of `side` cubed beside cuBLAS."""
    return lesson.Ladder(
        experiment,
        "cuBLAS",
        lambda a, b, out: lambda: torch.mm(a, b, out=out),
        lambda: make_inputs(side, side, side),
        check_gemm,
        flops=2 * side**3,
        repeats=repeats,
    )


def make_inputs(m: int = SIDE, n: int = SIDE, k: int = SIDE, where="cuda") -> list[torch.Tensor]:
    """Return random normal a (m, k) and b (k, n), the latter by columns, and out (m, n), full of NaN; all bf16."""
    a, weight = (torch.randn(rows, k, device=where).bfloat16() for rows in (m, n))
    return [a, weight.T, torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=where)]


def find_wrong(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return which elements of `out` differ from a b in float64 by more than the rounding of bf16 and of the sums."""
    expected = a.double() @ b.double()
    return ~((out.double() - expected).abs() <= expected.abs() / 256 + 2e-3)


def check_gemm(prepare: Callable, shapes: dict = SHAPES) -> str:
    """Run a product on each shape; return "" or what is wrong. `prepare(a, b, out)` returns the launch."""

    def run(where: str) -> str:
        for shape in shapes[where]:
            memory = lesson.LaunchMemory(make_inputs(*shape, where))
            prepare(*memory.tensors)()
            if fault := memory.find_fault(find_wrong(memory.tensors[-1], *memory.given)):
                return f"{' × '.join(map(str, shape))}: {fault}"
        return ""

    return lesson.run_everywhere(run)


def check_product(kernel) -> str:
    """Run `one_product` with 16 and with 64 columns of A and B; return how large its error is, or what is wrong."""
    errors = []

    def run(where: str) -> str:
        a, b = (torch.randn(64, 64, device=where).bfloat16() for _ in range(2))
        maps = [make_tensor_map(each, (64, 64), swizzle="128B") for each in (a, b)]
        for columns in (16, 64):
            c = torch.full((64, 64), float("nan"), device=where)
            kernel.define(COLUMNS=columns).prepare(1, 128, (*maps, c), 2 * 64 * 128 + 8)()
            error = (c.double() - a[:, :columns].double() @ b[:, :columns].double().T).abs().max().item()
            if not error < 1e-3:
                return f"with {columns} columns the largest error is {error:.2g}"
            errors.append(error)
        return ""

    return lesson.run_everywhere(run) or f"16 and 64 columns: largest error against float64 {max(errors):.1e}"


def table_of(record: results.Record, line: str, column: str, name: str = "") -> results.Table:
    """Return a table of ratios with a row for each value of `line` and a column for each value of `column`.

    `name` is a heading with {} for the value, by default the value and `column`.
    """
    lines, columns = (list(dict.fromkeys(row[key] for row in record.rows)) for key in (line, column))
    ratio = {(row[line], row[column]): row.get("ratio") for row in record.rows}
    names = {each: (name or f"{{}} {column}").format(each) for each in columns}
    rows = [{line: each} | {names[other]: ratio.get((each, other)) for other in columns} for each in lines]
    return results.table(rows, f"speed over cuBLAS, {record.label()}", [line, *names.values()])


# ---- exercises: tiles of 64 columns, 64 rows per consumer

EXERCISE_SHAPES = {
    "cpu": ((70, 136, 72), (64, 64, 648)),  # 2 × 3 tiles, so that rows and columns of tiles are not mistaken
    "cuda": ((70, 136, 72), (64, 64, 648), (1000, 520, 4104)),
}


def prepare_small(
    kernel, rows: int, warp_groups: int, stages: int, ctas: int = 0, boxes_of_c: int = 0
) -> Callable:
    """Return a function that prepares a launch with tiles of `rows` x 64 and at most `ctas` CTAs.

    With `boxes_of_c` a CTA has as many boxes of 64 x 64 elements, and the kernel takes a map of C.
    """

    def prepare(a, b, out):
        (m, k), n = a.shape, b.shape[1]
        maps = [
            make_tensor_map(each, (extent, 64), swizzle="128B") for each, extent in ((a, rows), (b.T, 64))
        ]
        c = make_tensor_map(out, (64, 64), swizzle="128B") if boxes_of_c else out
        tiles = -(-m // rows) * -(-n // 64)
        smem = stages * (rows + 64) * 128 + boxes_of_c * 64 * 128 + 16 * stages
        return kernel.prepare(min(tiles, ctas or tiles), 128 * warp_groups, (*maps, c, m, n, k), smem)

    return prepare


def find_fault(
    kernel, rows: int = 64, warp_groups: int = 2, stages: int = 4, ctas: int = 0, boxes_of_c: int = 0
) -> str:
    """Check a kernel with tiles of `rows` x 64; `ctas` limits the grid. Return "" or what is wrong.

    A wrong barrier would stop a GPU for ever, so nothing runs before the emulator has passed it.
    """
    if not emulator.is_available():
        return "not run: the emulator needs g++"
    shapes = (
        {where: ((70, 136, 200), *rest) for where, rest in EXERCISE_SHAPES.items()}
        if ctas
        else EXERCISE_SHAPES
    )
    return check_gemm(prepare_small(kernel, rows, warp_groups, stages, ctas, boxes_of_c), shapes)


def check_counts(kernel) -> None:
    """Raise AssertionError unless the counts FULL and EMPTY of the kernel's barriers are right."""
    fault = find_fault(kernel, rows=128, warp_groups=3)
    assert not fault, fault


def trace_small(
    kernel, stages: int = 4, steps: int = 6, tiles: int = 1, boxes_of_c: int = 0
) -> list[emulator.Event]:
    """Return what one CTA issues for tiles of 64 x 64 and `steps` steps, where the engine is as slow as possible."""
    with emulator.trace() as trace, emulator.with_seed(0):
        prepare = prepare_small(kernel.define(STAGES=stages), 64, 2, stages, 1, boxes_of_c)
        prepare(*make_inputs(64, 64 * tiles, 64 * steps, "cpu"))()
    return trace.events


def check_consumer(kernel) -> None:
    """Raise AssertionError unless a kernel with a producer and a consumer of 64 x 64 is right with 2, 4 and 5 stages.

    The products of a step must be issued while those of the step before may still run.
    """
    for stages in (2, 4, 5):
        fault = find_fault(kernel.define(STAGES=stages), stages=stages)
        assert not fault, f"with {stages} stages, {fault}"
    assert kernel.counts().get("HGMMA", 0) >= 4, "the kernel has no wgmma"
    require_overlap(trace_small(kernel))


def require_overlap(events: list[emulator.Event]) -> None:
    """Raise AssertionError unless the products of a step are issued while those of the step before may run."""
    products = [event.pending for event in events if event.kind == emulator.Event.PRODUCT]
    alone = len(products) - sum(pending > 0 for pending in products)
    assert alone <= 4, (
        f"the sums are right, but {alone // 4} of {len(products) // 4} steps wait for the products of the step before "
        "ahead of their own: let two steps overlap"
    )


def check_whole(kernel) -> None:
    """Raise AssertionError unless `check_consumer` passes a kernel, and its producer fills the ring ahead of products.

    NotImplementedError for a kernel without a body.
    """
    lesson.require_written(kernel)
    check_consumer(kernel)
    kinds = [event.kind for event in trace_small(kernel, stages=8, steps=9)]
    filled = kinds[: kinds.index(emulator.Event.PRODUCT)].count(emulator.Event.LOAD) // 2
    assert filled == 8, (
        f"the sums are right, but the producer has asked for {filled} of 8 stages before the first products: let it "
        "run ahead until no stage is empty"
    )


CHECKS = {"Exercise 1": check_counts, "Exercise 2": check_consumer, "Exercise 3": check_whole}
check = make_checker(CHECKS)
