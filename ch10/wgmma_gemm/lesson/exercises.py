"""Inputs and checks for the kernels that a reader writes in `notebooks/ch10_wgmma_gemm.ipynb`."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic, lesson
from tilelab.cells.cuda_magic import make_tensor_map
from tilelab.measure.check import check_exercise
from tilelab.records import results

SIDE = 4096  # of the product that the steps are timed with
# Shapes (M, N, K) that no tile divides. With three CTAs in the emulator, a persistent CTA makes more than one tile.
SHAPES = {
    "cpu": ((130, 264, 328),),
    "cuda": ((1, 8, 8), (130, 264, 200), (517, 1032, 1000), (3000, 4104, 520)),
}

NOTEBOOK = "ch10_wgmma_gemm"
# The rows of the ladder: kernels of the notebook's cells, and constants that differ from those of the cell.
VERSIONS = (
    ("k_loop", {}),
    ("ring", {}),
    ("warp_specialized", {}),
    ("two_consumers", {}),
    ("two_consumers", {"BLOCK_N": 256}),
    ("persistent", {}),
    ("persistent", {"GROUP_M": 16}),
    ("tma_store", {}),
    ("tma_store", {}),
)


def ladder_source() -> str:
    """Return the hash of the ladder's record, from the kernels of the notebook's cells."""
    found = cuda_magic.notebook_kernels(ROOT / "notebooks" / f"{NOTEBOOK}.ipynb")
    return lesson.ladder_hash([found[name].define(**constants).source_hash() for name, constants in VERSIONS])


results.register(
    "ch10_gemm_steps", lambda: results.load_record("ch10_gemm_steps", ladder_source()), ladder_source
)
lesson.register("ch10_gemm_depth", NOTEBOOK, "ring", "warp_specialized", sweep=True)
lesson.register("ch10_gemm_bands", NOTEBOOK, "persistent", sweep=True)


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


def table_of(record: results.Record, line: str, column: str) -> results.Table:
    """Return a table of ratios with a row for each value of `line` and a column for each value of `column`."""
    lines, columns = (list(dict.fromkeys(row[key] for row in record.rows)) for key in (line, column))
    ratio = {(row[line], row[column]): row.get("ratio") for row in record.rows}
    names = {each: f"{each} {column}" for each in columns}
    rows = [{line: each} | {names[other]: ratio.get((each, other)) for other in columns} for each in lines]
    return results.table(rows, f"speed over cuBLAS, {record.label()}", [line, *names.values()])


# ---- exercises: tiles of 64 columns, 64 rows per consumer

EXERCISE_SHAPES = {
    "cpu": ((70, 72, 72), (64, 64, 648)),
    "cuda": ((70, 72, 72), (64, 64, 648), (1000, 520, 4104)),
}


def _prepare(kernel, rows: int, warp_groups: int, stages: int, ctas: int = 0) -> Callable:
    """Return a function that prepares a launch with tiles of `rows` x 64 and at most `ctas` CTAs."""

    def prepare(a, b, out):
        (m, k), n = a.shape, b.shape[1]
        maps = [
            make_tensor_map(each, (extent, 64), swizzle="128B") for each, extent in ((a, rows), (b.T, 64))
        ]
        tiles = -(-m // rows) * -(-n // 64)
        return kernel.prepare(
            min(tiles, ctas or tiles),
            128 * warp_groups,
            (*maps, out, m, n, k),
            stages * (rows + 64) * 128 + 16 * stages,
        )

    return prepare


def _check(kernel, rows: int = 64, warp_groups: int = 2, stages: int = 4, ctas: int = 0) -> str:
    """Check a kernel with tiles of `rows` x 64; `ctas` limits the grid. Return "" or what is wrong.

    A wrong barrier would stop a GPU for ever, so nothing runs before the emulator has passed it.
    """
    if not emulator.is_available():
        return "not run: the emulator needs g++"
    shapes = (
        {where: ((130, 136, 200), *rest) for where, rest in EXERCISE_SHAPES.items()}
        if ctas
        else EXERCISE_SHAPES
    )
    return check_gemm(_prepare(kernel, rows, warp_groups, stages, ctas), shapes)


def check_counts(kernel) -> None:
    """Raise AssertionError unless the counts FULL and EMPTY of the kernel's barriers are right."""
    fault = _check(kernel, rows=128, warp_groups=3)
    assert not fault, fault


def check_consumer(kernel) -> None:
    """Raise AssertionError unless a kernel with a producer and a consumer of 64 x 64 is right with 2, 4 and 5 stages.

    The products of a step must be issued while those of the step before may still run. NotImplementedError for a kernel
    in which the consumer is missing.
    """
    if "// your " in kernel.source:
        raise NotImplementedError
    for stages in (2, 4, 5):
        fault = _check(kernel.define(STAGES=stages), stages=stages)
        assert not fault, f"with {stages} stages, {fault}"
    assert kernel.counts().get("HGMMA", 0) >= 4, "the kernel has no wgmma"
    with emulator.trace() as trace, emulator.with_seed(0):
        _prepare(kernel.define(STAGES=4), 64, 2, 4)(*make_inputs(64, 64, 64 * 6, "cpu"))()
    products = [event.pending for event in trace.events if event.kind == emulator.Event.PRODUCT]
    alone = len(products) - sum(pending > 0 for pending in products)
    assert alone <= 4, (
        f"the sums are right, but {alone // 4} of {len(products) // 4} steps wait for the products of the step before "
        "ahead of their own: let two steps overlap"
    )


def check_persistent(kernel) -> None:
    """Raise AssertionError unless a persistent kernel of two warp groups is right, with 1, 2 and 3 CTAs."""
    for ctas in (1, 2, 3):
        fault = _check(kernel, ctas=ctas)
        assert not fault, f"with {ctas} CTA{'s' * (ctas > 1)}, {fault}"


def _make_distinct(where: str) -> torch.Tensor:
    """Return 64 x 64 different bf16 numbers, ±2^e (1 + m / 64), in random order. `find_wrong` tells any two apart."""
    positive = torch.outer(2.0 ** torch.arange(32), 1 + torch.arange(64) / 64).flatten()
    return torch.cat([positive, -positive])[torch.randperm(4096)].view(64, 64).bfloat16().to(where)


def _describe_wrong(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> str:
    """Return how many elements of `out` differ from a b, where the first one is, and which sum it holds instead."""
    wrong, expected = find_wrong(out, a, b), a.double() @ b.double()
    row, column = wrong.nonzero()[0].tolist()
    found = (expected == out[row, column]).nonzero().tolist()
    held = (
        "the sum of row {}, column {}".format(*found[0])
        if len(found) == 1
        else f"{out[row, column]:.5g} instead of {expected[row, column]:.5g}"
    )
    return (
        f"{int(wrong.sum()):,} of {out.numel():,} elements are wrong; the first, at row {row}, column {column}, "
        f"holds {held}"
    )


def check_epilogue(kernel) -> None:
    """Raise AssertionError unless a kernel of one product of 64 x 64 writes its sums to the box of C with stmatrix.

    The first B is the identity, so that C holds the different numbers of A, and a sum in a wrong place can be named.
    NotImplementedError for a kernel in which the body of a function is still a comment. A wrong stmatrix could stop a
    GPU, so nothing runs there before the emulator has passed it.
    """
    if re.search(r"{\s*// your [^\n]*\s*}", kernel.source):
        raise NotImplementedError
    assert emulator.is_available(), "not run: the emulator needs g++"

    def run(where: str) -> str:
        for a, weight in (
            (_make_distinct(where), torch.eye(64, device=where).bfloat16()),
            [torch.randn(64, 64, device=where).bfloat16() for _ in range(2)],
        ):
            nan = torch.full((64, 64), float("nan"), dtype=torch.bfloat16, device=where)
            memory = lesson.LaunchMemory([a, weight, nan])
            maps = [make_tensor_map(each, (64, 64), swizzle="128B") for each in memory.tensors]
            kernel.prepare(1, 128, maps, 3 * 64 * 128 + 8)()
            wrong = find_wrong(memory.tensors[-1], a, weight.T)
            if fault := memory.find_fault(wrong):
                return _describe_wrong(memory.tensors[-1], a, weight.T) if wrong.any() else fault
        return ""

    fault = lesson.run_everywhere(run)
    assert not fault, fault
    with emulator.trace() as trace:
        run("cpu")
    issued = sum(event.kind == emulator.Event.STORE for event in trace.events)
    assert issued == 2, f"the sums are right, but {issued // 2} threads store the box: one is enough"
    stores = kernel.sass(r"\bST(S|\b)")  # to shared memory, or to an address that may lie there
    assert stores and all("STSM" in store for store in stores), (
        "the sums are right, but stmatrix does not write all"
    )


CHECKS = {
    "Exercise 1": check_counts,
    "Exercise 2": check_consumer,
    "Exercise 3": check_persistent,
    "Exercise 4": check_consumer,
    "Exercise 5": check_epilogue,
}


def check(exercise: str, kernel) -> None:
    """Print whether a reader's kernel solves an exercise."""
    check_exercise(exercise, lambda: CHECKS[exercise](kernel))
