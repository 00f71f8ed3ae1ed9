"""The checks of the first exercises: the solutions pass, and each planted wrong answer fails."""

import planted
import pytest
from cases import cases

from ch07.start.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic

NOTEBOOKS = ROOT / "notebooks"
KERNELS = cuda_magic.notebook_kernels(NOTEBOOKS / "00_start.ipynb")
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "00_start.ipynb")
SIZES = {16: True, 1000: False, 4000: True, 32768: True, 262144: False}

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]


def answer(kernel, *changes):
    return planted.answer(SOLUTIONS, kernel, *changes)[kernel]


@cases(
    "check, kernel, change",
    (exercises.check_floats, "copy_floats", ("expect_tx(barrier, 4 * COUNT)", "expect_tx(barrier, COUNT)")),
    (exercises.check_reversed, "reverse_tiles", ("tiles - 1 - blockIdx.x", "blockIdx.x")),
    (exercises.check_reversed, "reverse_tiles", ("mbarrier_wait(barrier, 0);", "")),
    (
        exercises.check_interleaved,
        "interleave",
        ("expect_tx(barrier, 2 * BYTES)", "expect_tx(barrier, BYTES)"),
    ),
    (exercises.check_interleaved, "interleave", ("y + place", "x + place")),
)
def test_a_wrong_kernel_fails(check, kernel, change):
    with pytest.raises(AssertionError):
        check(answer(kernel, change))


def test_two_stores_do_not_count_as_one():
    stores = """for (int half = 0; half < 2; ++half)
        bulk_store(out + 2 * place + half * BYTES, shared_address(both + half * BYTES), BYTES);"""
    change = ("bulk_store(out + 2 * place, shared_address(both), 2 * BYTES);", stores)
    with pytest.raises(AssertionError, match="the copies are right, but the kernel has 2 bulk stores"):
        exercises.check_interleaved(answer("interleave", change))


def test_two_barriers_do_not_count_as_one():
    changes = (
        ("u64 arrived;", "u64 arrived, other;"),
        (
            "mbarrier_init(barrier, 1);",
            "u32 second = shared_address(&other); mbarrier_init(second, 1); mbarrier_init(barrier, 1);",
        ),
        (
            "expect_tx(barrier, 2 * BYTES);",
            "expect_tx(barrier, BYTES), mbarrier_arrive_expect_tx(second, BYTES);",
        ),
        ("y + place, BYTES, barrier", "y + place, BYTES, second"),
        ("mbarrier_wait(barrier, 0);", "mbarrier_wait(barrier, 0), mbarrier_wait(second, 0);"),
    )
    says = "copies are right, but the kernel has 2 mbarriers instead of one"
    with pytest.raises(AssertionError, match=says):
        exercises.check_interleaved(answer("interleave", *changes))


def test_a_size_is_not_judged_where_nothing_runs(monkeypatch):
    monkeypatch.setattr(
        exercises, "check_tiles", lambda *_, **__: "not run: that needs a GPU with TMA, or g++"
    )
    with pytest.raises(AssertionError, match="^not run"):
        exercises.check_sizes(answer("by_engine"), dict.fromkeys(SIZES, False))


def test_a_kernel_without_bulk_copies_fails():
    source = (
        'extern "C" __global__ void copy_floats(const float* x, float* out) {\n'
        "    for (int i = threadIdx.x; i < 256; i += 32)\n"
        "        out[blockIdx.x * 256 + i] = x[blockIdx.x * 256 + i];\n}\n"
    )
    with pytest.raises(AssertionError, match="no bulk load"):
        exercises.check_floats(cuda_magic.find_kernels(source)["copy_floats"])


def test_sizes_must_be_predicted_rightly():
    exercises.check_sizes(answer("by_engine"), SIZES)
    for nbytes, text in (
        (1000, "BYTES=1000 fails"),
        (4000, "BYTES=4000 is copied"),
        (262144, "BYTES=262144 fails"),
    ):
        with pytest.raises(AssertionError, match=text):
            exercises.check_sizes(answer("by_engine"), {nbytes: not SIZES[nbytes]})


def test_the_warm_up_wants_multiples_of_16_that_are_large_enough():
    exercises.check_smallest_tile(lambda gbps, gflops, size: -(-size * gflops // (16 * gbps)) * 16)
    for wrong in (
        lambda gbps, gflops, size: size * gflops // gbps,
        lambda gbps, gflops, size: size * gflops // (16 * gbps) * 16,
        lambda gbps, gflops, size: -(-2 * gflops // (16 * gbps)) * 16,
    ):
        with pytest.raises(AssertionError, match="ask for a side of"):
            exercises.check_smallest_tile(wrong)
    with pytest.raises(AssertionError, match="for 5000 billion"):  # the first five cases by heart
        exercises.check_smallest_tile(
            lambda gbps, _, size: {100: 64 * size, 50: 240, 32: 384, 90: 144}.get(gbps)
        )


def test_every_call_of_the_first_copy_is_needed():
    rows = exercises.leave_out_each_step(KERNELS["by_engine"])
    assert [row["without"] for row in rows] == list(exercises.STEPS)
    assert not [row for row in rows if row["what happens"] == "right"]


@pytest.mark.parametrize("name, threads", [("by_threads", 256), ("by_engine", 32)])
def test_both_first_copies_are_right(name, threads):
    assert exercises.check_copy(exercises.launch(KERNELS[name], threads)) == ""
