"""Inputs and checks for the kernels that a reader writes in `notebooks/06_ch10_wgmma_schedule.ipynb`."""

from __future__ import annotations

import re

import torch

from ch10.wgmma_gemm.lesson.exercises import (
    check_gemm,
    find_fault,
    find_wrong,
    launch,
    register_ladder,
    require_overlap,
    trace_small,
)
from tilelab import emulator
from tilelab.cells import lesson
from tilelab.cells.cuda_magic import make_tensor_map
from tilelab.measure.check import make_checker

NOTEBOOKS = "05_ch10_wgmma_gemm", "06_ch10_wgmma_schedule"
VERSIONS = (
    ("two_consumers", {"BLOCK_N": 256}),
    ("persistent", {}),
    ("persistent", {"GROUP_M": 16}),
    ("tma_store", {}),
    ("tma_store", {}),
)
register_ladder("ch10_gemm_schedule", VERSIONS, *NOTEBOOKS)
lesson.register("ch10_gemm_bands", NOTEBOOKS[1], "persistent", sweep=True)


def check_one_box(kernel) -> None:
    """Raise AssertionError unless `tma_store` with one box of C for each consumer, instead of two, is right."""
    assert "i % 2" not in kernel.source, "the kernel still has two boxes of C for each consumer"
    fault = check_gemm(launch(kernel, 256, consumers=2, one_per_sm=True, c_by_tma=True))
    assert not fault, fault


def check_persistent(kernel) -> None:
    """Raise AssertionError unless a persistent kernel of two warp groups is right, with 1, 2 and 3 CTAs."""
    for ctas in (1, 2, 3):
        fault = find_fault(kernel, ctas=ctas)
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


def check_whole(kernel) -> None:
    """Raise AssertionError unless a persistent kernel of two warp groups that stores by TMA is right, and overlaps.

    It runs with 1 and 3 CTAs, 2 and 4 stages, and one box of C. Two steps overlap, and the producer loads the next tile
    before this one is stored. NotImplementedError for a kernel without a body.
    """
    lesson.require_written(kernel)
    for ctas in (1, 3):
        for stages in (2, 4):
            fault = find_fault(kernel.define(STAGES=stages), stages=stages, ctas=ctas, boxes_of_c=1)
            assert not fault, f"with {ctas} CTA{'s' * (ctas > 1)} and {stages} stages, {fault}"
    assert kernel.counts().get("HGMMA", 0) >= 4, "the kernel has no wgmma"
    events = trace_small(kernel, tiles=2, boxes_of_c=1)
    kinds = [event.kind for event in events]
    stored = kinds.count(emulator.Event.STORE)
    assert stored == 2, f"the sums are right, but {stored} bulk stores write two tiles: store each box once"
    loaded = kinds[: kinds.index(emulator.Event.STORE)].count(emulator.Event.LOAD) // 2 - 6
    assert loaded == 4, (
        f"the sums are right, but {max(loaded, 0)} of 4 stages hold boxes of the next tile when the first one is "
        "stored: release the last stage before the store, and let the producer run ahead"
    )
    half = len([kind for kind in kinds if kind == emulator.Event.PRODUCT]) // 2
    products = [event for event in events if event.kind == emulator.Event.PRODUCT]
    for tile in (products[:half], products[half:]):
        require_overlap(tile)


CHECKS = {
    "Exercise 1": check_one_box,
    "Exercise 2": check_persistent,
    "Exercise 3": check_epilogue,
    "Exercise 4": check_whole,
}
check = make_checker(CHECKS)
