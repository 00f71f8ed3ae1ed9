"""The exercises' checks: the solutions pass, and each planted wrong answer fails with the rule that it breaks."""

import planted
import pytest

from ch07.bulk_copy.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "ch07_bulk_copy.ipynb")


def answer(kernel, change=("", "")):
    return planted.answer(SOLUTIONS, kernel, change)[kernel]


@pytest.mark.parametrize(
    "kernel, check",
    [
        ("mended_ring", exercises.check_ring),
        ("my_ring", exercises.check_rings),
        ("scale_tile", exercises.check_scale),
    ],
)
def test_the_solutions_pass(kernel, check):
    check(answer(kernel))


@pytest.mark.parametrize(
    "kernel, change",
    [
        ("mended_ring", ("use / 2 % 2", "0")),
        ("mended_ring", ("use / 2 % 2", "1")),
        ("mended_ring", ("bulk_wait_read<0>();", "")),
        ("mended_ring", ("load(1);", "")),
        (
            "mended_ring",
            (
                "arrive_expect_tx(shared_address(&full[use % 2]), BYTES)",
                "arrive_expect_tx(shared_address(&full[use % 2]), BYTES / 2)",
            ),
        ),
        ("mended_ring", ("fence_mbarrier_init();", "")),
    ],
)
def test_a_wrong_ring_fails(kernel, change):
    with pytest.raises(AssertionError, match="with . blocks?, "):
        exercises.check_ring(answer(kernel, change))


@pytest.mark.parametrize(
    "change",
    [
        ("use / STAGES % 2", "use % 2"),
        ("load(use + STAGES)", "load(use + 2)"),
        ("load(use);", "load(0);"),
        ("if (tile >= tiles) return;", ""),
    ],
)
def test_a_ring_that_is_right_for_some_stages_only_fails(change):
    with pytest.raises(AssertionError, match="with . stages?, "):
        exercises.check_rings(answer("my_ring", change))


@pytest.mark.parametrize(
    "change",
    [
        ("fence_proxy_async();", ""),
        ("*= a", "*= 2"),
        ("mbarrier_wait(barrier, 0);", ""),
        ("bulk_wait_read<0>();", ""),
        ("blockIdx.x * 256, shared", "0, shared"),
    ],
)
def test_a_wrong_scale_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_scale(answer("scale_tile", change))


def test_what_is_not_written_is_not_solved(capsys):
    kernels = cuda_magic.notebook_kernels(NOTEBOOKS / "ch07_bulk_copy.ipynb")
    exercises.check("Exercise 3", kernels["my_ring"])
    exercises.check("Exercise 2", kernels["broken_ring"])
    said = capsys.readouterr().out
    assert "Exercise 3: not solved yet." in said and "Exercise 2: not yet right" in said
