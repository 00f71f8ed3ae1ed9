"""The exercises' checks: the solutions pass, and each planted wrong answer fails with the rule that it breaks."""

import cells
import pytest
import torch
from cases import cases

from ch10.wgmma_gemm.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic
from tilelab.records import results

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "05_ch10_wgmma_gemm.ipynb")
LESSON = cuda_magic.notebook_kernels(NOTEBOOKS / "05_ch10_wgmma_gemm.ipynb")


def answer(kernel, *changes):
    """Return a solution in which texts are replaced by others."""
    return cells.change_kernel(SOLUTIONS[kernel], *changes)


@pytest.mark.parametrize("full, empty", [(1, 256), (2, 8), (2, 384)])
def test_wrong_counts_fail(full, empty):
    with pytest.raises(AssertionError, match="mbarrier"):
        exercises.check_counts(answer("counted").define(FULL=full, EMPTY=empty))


WAIT = "mbarrier_wait(full + 8 * stage, use % 2);"
RELEASE = "mbarrier_wait(empty + 8 * stage, (use + 1) % 2);"


@cases(
    "change",
    ("wgmma_wait<1>();", "wgmma_wait<2>();"),
    ("(step - 1) % STAGES * 8", "8 * stage"),
    (WAIT, "mbarrier_wait(full + 8 * stage, 0);"),
    ("full + 8 * stage, STAGE_BYTES", "full + 8 * stage, BOX_BYTES"),
    ("b_map, step * 64, column", "b_map, step * 64, row"),
)
def test_a_wrong_kernel_fails(change):
    with pytest.raises(AssertionError, match="with . stages, "):
        exercises.check_whole(answer("my_gemm", change))


@cases(
    "change, count",
    ([("wgmma_wait<1>();", "wgmma_wait<0>();")], 6),
    ([("wgmma_wait<1>();", "if (step % 2) wgmma_wait<0>(); else wgmma_wait<1>();")], 3),
)
def test_two_steps_must_overlap(change, count):
    with pytest.raises(AssertionError, match=f"the sums are right, but {count} of 6 steps wait"):
        exercises.check_whole(answer("my_gemm", *change))


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_producer_must_run_ahead(ahead):
    wait = f"if (step >= {ahead}) mbarrier_wait(full + (step - {ahead}) % STAGES * 8, (step - {ahead}) / STAGES % 2);\n"
    source = answer("my_gemm", (RELEASE, f"{RELEASE}\n            {wait}"))
    with pytest.raises(AssertionError, match=f"has asked for {2 * ahead} of 8 stages"):
        exercises.check_whole(source)


def test_the_lessons_kernels_fit_the_registers():
    for name in dict(exercises.VERSIONS):
        kernel = LESSON[name]
        assert not kernel.resources()["spills"] and kernel.counts()["HGMMA"], name


def test_a_wrong_element_is_found():
    a, b, out = exercises.make_inputs(70, 72, 200, "cpu")
    out.copy_(a.double() @ b.double())
    assert not exercises.find_wrong(out, a, b).any()
    missing = (a[:, :199].double() @ b[:199].double()).bfloat16()
    assert exercises.find_wrong(missing, a, b).float().mean() > 0.5
    out[3, 5] = torch.nan
    assert exercises.find_wrong(out, a, b).nonzero().tolist() == [[3, 5]]


def test_a_sweep_becomes_a_table():
    rows = [
        {"kernel": name, "stages": stages, "ratio": ratio}
        for name, stages, ratio in (("ring", 2, 0.4), ("ring", 3, 0.7), ("roles", 2, 0.5))
    ]
    record = results.Record(results.make_record("ch10_gemm_depth", rows, ""), live=False)
    text = str(exercises.table_of(record, "kernel", "stages"))
    assert "2 stages" in text and "0.4" in text and "roles" in text
    assert "rings of 2" in str(exercises.table_of(record, "kernel", "stages", "rings of {}"))
