"""The exercises' checks: the solutions pass, and each planted wrong answer fails with the rule that it breaks."""

import pathlib

import pytest
import torch

from ch10.wgmma_gemm import exercises
from tilelab import cuda_magic, emulator, results

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = pathlib.Path(__file__).parents[3] / "notebooks"
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "ch10_wgmma_gemm.ipynb")
LESSON = cuda_magic.notebook_kernels(NOTEBOOKS / "ch10_wgmma_gemm.ipynb")


def answer(kernel, change=("", "")):
    """Return a solution in which one line is changed."""
    assert change[0] in SOLUTIONS[kernel].source
    found = cuda_magic.find_kernels(SOLUTIONS[kernel].source.replace(*change), SOLUTIONS[kernel].options)
    return found[kernel]


@pytest.mark.parametrize("kernel, check", [("counted", exercises.check_counts),
                                           ("mended_release", exercises.check_consumer),
                                           ("kept_place", exercises.check_persistent),
                                           ("my_consumer", exercises.check_consumer)])
def test_the_solutions_pass(kernel, check):
    check(answer(kernel))


@pytest.mark.parametrize("full, empty", [(1, 256), (3, 256), (2, 8), (2, 128), (2, 384)])
def test_wrong_counts_fail(full, empty):
    with pytest.raises(AssertionError, match="mbarrier"):
        exercises.check_counts(answer("counted").define(FULL=full, EMPTY=empty))


@pytest.mark.parametrize("change", [
    ("wgmma_wait<1>();", "wgmma_wait<2>();"),
    ("(step - 1) % STAGES * 8", "8 * at.stage"),
    ("if (step > 0 && threadIdx.x % 32 == 0)", "if (step > 0 && threadIdx.x % 128 == 0)"),
    ("mbarrier_wait(full + 8 * at.stage, at.phase);", "mbarrier_wait(full + 8 * at.stage, 0);"),
    ("mbarrier_wait(full + 8 * at.stage, at.phase);", ""),
    ("multiply<64>(d, a, a + BOX_BYTES, step > 0);", "multiply<64>(d, a, a, step > 0);"),
    ("multiply<64>(d, a, a + BOX_BYTES, step > 0);", "multiply<64>(d, a, a + BOX_BYTES, true);"),
    ("wgmma_fence();", ""),
    ("        wgmma_wait<0>();\n", "")])
def test_a_wrong_consumer_fails(change):
    with pytest.raises(AssertionError, match="with . stages, "):
        exercises.check_consumer(answer("my_consumer", change))


@pytest.mark.parametrize("change", [
    ("at.phase);", "0);"),
    ("    Ring<STAGES> at;  // mended: once, for all tiles\n", "    u32 use = 0;\n    struct { u32 stage, phase; void "
     "advance() { stage = 0; } } at = {0, 0};\n"),
    ("at.phase ^ 1", "at.phase"),
    ("wgmma_wait<0>();", "")])
def test_a_persistent_kernel_that_loses_its_place_fails(change):
    with pytest.raises(AssertionError, match="with . CTAs?, "):
        exercises.check_persistent(answer("kept_place", change))


def test_what_is_not_solved_says_so(capsys):
    for number, name in enumerate(("counted", "early_release", "lost_place", "my_consumer"), 1):
        exercises.check(f"Exercise {number}", LESSON[name])
    said = capsys.readouterr().out.splitlines()
    assert [line[:24] for line in said] == [f"Exercise {number}: not yet right"[:24] for number in (1, 2, 3)] + [
        "Exercise 4: not solved y"]


# ---- the lesson itself


def test_the_lessons_kernels_are_short_and_fit_the_registers():
    for name in dict(exercises.VERSIONS):
        kernel = LESSON[name]
        assert len(kernel.source.splitlines()) <= 60 and max(map(len, kernel.source.splitlines())) <= 120, name
        assert not kernel.resources()["spills"] and kernel.counts()["HGMMA"], name


@pytest.mark.parametrize("change", [
    ("fence_proxy_async();", ""),
    ("bulk_wait_read<1>();", "bulk_wait_read<2>();"),
    ("        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * before);\n", "")])
def test_the_lessons_check_finds_a_fault_in_its_last_kernel(change):
    kernel = LESSON["tma_store"]
    assert change[0] in kernel.source
    broken = cuda_magic.find_kernels(kernel.source.replace(*change), kernel.options)["tma_store"]

    def prepare(a, b, out):
        maps = [cuda_magic.make_tensor_map(each, (rows, 64), swizzle="128B")
                for each, rows in ((a, 128), (b.T, 256), (out, 64))]
        return broken.prepare(3, 384, (*maps, *out.shape, a.shape[1]), 4 * 49152 + 32768 + 64)

    assert "emulator" in exercises.check_gemm(prepare, {"cpu": exercises.SHAPES["cpu"]})


def test_a_wrong_element_is_found():
    a, b, out = exercises.make_inputs(70, 72, 200, "cpu")
    out.copy_(a.double() @ b.double())
    assert not exercises.find_wrong(out, a, b).any()
    missing = (a[:, :199].double() @ b[:199].double()).bfloat16()
    assert exercises.find_wrong(missing, a, b).float().mean() > 0.5
    out[3, 5] = torch.nan
    assert exercises.find_wrong(out, a, b).nonzero().tolist() == [[3, 5]]


def test_a_sweep_becomes_a_table():
    rows = [{"kernel": name, "stages": stages, "ratio": ratio} for name, stages, ratio in
            (("ring", 2, 0.4), ("ring", 3, 0.7), ("roles", 2, 0.5))]
    record = results.Record(results.make_record("ch10_gemm_depth", rows, ""), live=False)
    text = str(exercises.table_of(record, "kernel", "stages"))
    assert "2 stages" in text and "0.4" in text and "roles" in text
