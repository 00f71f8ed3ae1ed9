"""The exercises' checks: the solutions pass, and each planted wrong answer fails with the rule that it breaks."""

import pytest
import torch

from ch10.wgmma_gemm.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic
from tilelab.records import results

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "ch10_wgmma_gemm.ipynb")
LESSON = cuda_magic.notebook_kernels(NOTEBOOKS / "ch10_wgmma_gemm.ipynb")


def answer(kernel, *changes):
    """Return a solution in which texts are replaced by others."""
    source = SOLUTIONS[kernel].source
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return cuda_magic.find_kernels(source, SOLUTIONS[kernel].options)[kernel]


@pytest.mark.parametrize(
    "kernel, check",
    [
        ("counted", exercises.check_counts),
        ("mended_release", exercises.check_consumer),
        ("kept_place", exercises.check_persistent),
        ("my_consumer", exercises.check_consumer),
        ("my_epilogue", exercises.check_epilogue),
    ],
)
def test_the_solutions_pass(kernel, check):
    check(answer(kernel))


@pytest.mark.parametrize("full, empty", [(1, 256), (3, 256), (2, 8), (2, 128), (2, 384)])
def test_wrong_counts_fail(full, empty):
    with pytest.raises(AssertionError, match="mbarrier"):
        exercises.check_counts(answer("counted").define(FULL=full, EMPTY=empty))


@pytest.mark.parametrize(
    "change",
    [
        ("wgmma_wait<1>();", "wgmma_wait<2>();"),
        ("(step - 1) % STAGES * 8", "8 * state.stage"),
        ("if (step > 0 && threadIdx.x % 32 == 0)", "if (step > 0 && threadIdx.x % 128 == 0)"),
        ("mbarrier_wait(full + 8 * state.stage, state.phase);", "mbarrier_wait(full + 8 * state.stage, 0);"),
        ("mbarrier_wait(full + 8 * state.stage, state.phase);", ""),
        ("multiply<64>(d, a, a + BOX_BYTES, step > 0);", "multiply<64>(d, a, a, step > 0);"),
        ("multiply<64>(d, a, a + BOX_BYTES, step > 0);", "multiply<64>(d, a, a + BOX_BYTES, true);"),
        ("wgmma_fence();", ""),
        ("        wgmma_wait<0>();\n", ""),
    ],
)
def test_a_wrong_consumer_fails(change):
    with pytest.raises(AssertionError, match="with . stages, "):
        exercises.check_consumer(answer("my_consumer", change))


ARRIVE = (
    "            if (step > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(empty + (step - 1) % STAGES * 8);"
)
RELEASE_AT_ONCE = "            if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * state.stage);"


@pytest.mark.parametrize(
    "change, count",
    [
        ([("wgmma_wait<1>();", "wgmma_wait<0>();")], 6),
        ([("wgmma_wait<1>();", "wgmma_wait<0>();"), (ARRIVE, RELEASE_AT_ONCE)], 6),
        ([("wgmma_wait<1>();", "if (step % 2) wgmma_wait<0>(); else wgmma_wait<1>();")], 3),
    ],
)
def test_two_steps_must_overlap(change, count):
    with pytest.raises(AssertionError, match=f"the sums are right, but {count} of 6 steps wait"):
        exercises.check_consumer(answer("my_consumer", *change))


@pytest.mark.parametrize(
    "change", [(f"            wgmma_wait<1>();\n{ARRIVE}", f"{ARRIVE}\n            wgmma_wait<1>();")]
)
def test_a_stage_is_not_released_before_its_products_have_read_it(change):
    with pytest.raises(AssertionError, match="with . stages, "):
        exercises.check_consumer(answer("my_consumer", change))


@pytest.mark.parametrize(
    "change",
    [
        ("state.phase);", "0);"),
        (
            "    Ring<STAGES> state;  // mended: once, for all tiles\n",
            "    u32 use = 0;\n"
            "    struct { u32 stage, phase; __device__ void advance() { stage = 0; } } state = {0, 0};\n",
        ),
        ("state.phase ^ 1", "state.phase"),
        ("wgmma_wait<0>();", ""),
    ],
)
def test_a_persistent_kernel_that_loses_its_place_fails(change):
    with pytest.raises(AssertionError, match="with . CTAs?, "):
        exercises.check_persistent(answer("kept_place", change))


@pytest.mark.parametrize(
    "change, fault",
    [
        # the order of the matrices, and of the two sums in a register
        (
            ("pack_bf16x2(sums[2], sums[3])", "pack_bf16x2(sums[4], sums[5])"),
            "row 8, column 0, holds the sum of row 0, column 8",
        ),
        (
            ("pack_bf16x2(sums[0], sums[1])", "pack_bf16x2(sums[1], sums[0])"),
            "row 0, column 0, holds the sum of row 0, column 1",
        ),
        (
            (
                "row = threadIdx.x / 32 * 16 + threadIdx.x % 16, half = threadIdx.x % 32 / 16",
                "row = threadIdx.x / 32 * 16 + threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, "
                "half = threadIdx.x % 16 / 8",
            ),
            "row 0, column 8, holds the sum of row 8, column 0",
        ),
        # the swizzle: none, the 64-byte swizzle, and one with the wrong bits of the row
        ((" ^ (row % 8)", ""), "row 1, column 0, holds the sum of row 1, column 8"),
        ((" ^ (row % 8)", " ^ (row / 2 % 4)"), "row 1, column 0, holds the sum of"),
        ((" ^ (row % 8)", " ^ (row / 8)"), "row 1, column 0, holds the sum of"),
        # rows: all warps write to the first 16; a lane passes the row of its registers; a row has 64 bytes
        (("threadIdx.x / 32 * 16 + ", ""), "stmatrix: writes shared address .*: a data race"),
        (("threadIdx.x % 16, half", "threadIdx.x % 32 / 4, half"), "stmatrix: writes .*: a data race"),
        (("row * 128", "row * 64"), "stmatrix: writes .*: a data race"),
        # units and registers
        (("(2 * j + half)", "(j + half)"), "holds the sum of"),
        (("d + 8 * j", "d + 4 * j"), "row 0, column 16, holds the sum of row 0, column 8"),
        (("j < 4", "j < 3"), "1,024 of 4,096 .* row 0, column 48, holds .* instead of"),
        (("stmatrix_x4(", "stmatrix_x4_trans("), "row 0, column 1, holds the sum of row 1, column 0"),
        (("unit * 16", "unit * 8"), "no multiple of 16"),
        (("box + row", "box + 4096 + row"), "leaves shared memory"),
        (("    stmatrix_x4(", "    if (threadIdx.x % 32 == 0) stmatrix_x4("), "waits for ever in stmatrix"),
        # what is given: the fence, the barrier, and the end of the store
        (("    fence_proxy_async();  //", "    //"), "without fence_proxy_async"),
        (("    __syncthreads();      // all 128", "    // all 128"), "and no barrier lies between"),
        ((", bulk_commit(), bulk_wait_read<0>()", ""), "had not yet read its shared memory"),
    ],
)
def test_a_wrong_epilogue_fails_and_says_which_sum_is_where(change, fault):
    with pytest.raises(AssertionError, match=f"{fault}.*emulator"):
        exercises.check_epilogue(answer("my_epilogue", change))


@pytest.mark.parametrize("dead", ["", "if (box == 1) stmatrix_x4(box, 0, 0, 0, 0);"])
def test_an_epilogue_needs_stmatrix(dead):
    begin, end = (
        SOLUTIONS["my_epilogue"].source.index(mark) for mark in ("        stmatrix_x4(", "    }\n}\n")
    )
    with_stores = """
        const u32 r = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        unsigned char* const bytes = memory_of_box + r * 128 + threadIdx.x % 4 * 4;
        for (int side = 0; side < 2; ++side)
            for (int below = 0; below < 2; ++below)
                *reinterpret_cast<u32*>(bytes + 1024 * below + ((2 * j + side ^ r % 8) * 16)) =
                    pack_bf16x2(sums[4 * side + 2 * below], sums[4 * side + 2 * below + 1]);
"""
    source = SOLUTIONS["my_epilogue"].source
    source = (
        (source[:begin] + dead + with_stores + source[end:])
        .replace("write_box(u32 box,", "write_box(unsigned char* memory_of_box, u32 box,")
        .replace("write_box(c, d)", "write_box(memory + 2 * BOX_BYTES, c, d)")
    )
    with pytest.raises(AssertionError, match="the sums are right, but stmatrix does not write all"):
        exercises.check_epilogue(cuda_magic.find_kernels(source)["my_epilogue"])


def test_the_kernel_around_the_epilogue_is_the_same_in_the_solution():
    given, solved = (kernels["my_epilogue"].source for kernels in (LESSON, SOLUTIONS))
    body = given.index("    // your")
    assert solved.startswith(given[:body]) and solved.endswith(given[given.index("\n}", body) :])
    assert solved.count("\n") - given.count("\n") < 8


def test_what_is_not_solved_says_so(capsys):
    for number, name in enumerate(
        ("counted", "early_release", "lost_place", "my_consumer", "my_epilogue"), 1
    ):
        exercises.check(f"Exercise {number}", LESSON[name])
    said = capsys.readouterr().out.splitlines()
    assert [line[:24] for line in said] == [
        f"Exercise {number}: not yet right"[:24] for number in (1, 2, 3)
    ] + [f"Exercise {number}: not solved y" for number in (4, 5)]


# ---- the lesson itself


def test_the_lessons_kernels_are_short_and_fit_the_registers():
    for name in dict(exercises.VERSIONS):
        kernel = LESSON[name]
        assert len(kernel.source.splitlines()) <= 60 and max(map(len, kernel.source.splitlines())) <= 120, (
            name
        )
        assert not kernel.resources()["spills"] and kernel.counts()["HGMMA"], name


@pytest.mark.parametrize(
    "change",
    [
        ("fence_proxy_async();", ""),
        ("bulk_wait_read<1>();", "bulk_wait_read<2>();"),
        ("        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * previous_stage);\n", ""),
    ],
)
def test_the_lessons_check_finds_a_fault_in_its_last_kernel(change):
    kernel = LESSON["tma_store"]
    assert change[0] in kernel.source
    broken = cuda_magic.find_kernels(kernel.source.replace(*change), kernel.options)["tma_store"]

    def prepare(a, b, out):
        maps = [
            cuda_magic.make_tensor_map(each, (rows, 64), swizzle="128B")
            for each, rows in ((a, 128), (b.T, 256), (out, 64))
        ]
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
    rows = [
        {"kernel": name, "stages": stages, "ratio": ratio}
        for name, stages, ratio in (("ring", 2, 0.4), ("ring", 3, 0.7), ("roles", 2, 0.5))
    ]
    record = results.Record(results.make_record("ch10_gemm_depth", rows, ""), live=False)
    text = str(exercises.table_of(record, "kernel", "stages"))
    assert "2 stages" in text and "0.4" in text and "roles" in text
