"""The exercises' checks: the solutions pass, and each planted wrong answer fails with the rule that it breaks."""

import cells
import pytest
from cases import cases

from ch10.wgmma_gemm.lesson.exercises import SHAPES, check_gemm, launch
from ch10.wgmma_schedule.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "06_ch10_wgmma_schedule.ipynb")
LESSON = cuda_magic.notebook_kernels(NOTEBOOKS / "06_ch10_wgmma_schedule.ipynb")


def answer(kernel, *changes):
    """Return a solution in which texts are replaced by others."""
    return cells.change_kernel(SOLUTIONS[kernel], *changes)


def one_box(*changes):
    source = LESSON["tma_store"].source.replace("2 * consumer + i % 2", "consumer")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return cuda_magic.find_kernels(source, LESSON["tma_store"].options)["tma_store"]


def test_one_box_needs_the_wait_for_the_last_store():
    with pytest.raises(AssertionError, match="still has two boxes"):
        exercises.check_one_box(LESSON["tma_store"])
    with pytest.raises(AssertionError, match="may still read"):
        exercises.check_one_box(one_box())
    exercises.check_one_box(one_box(("bulk_wait_read<1>", "bulk_wait_read<0>")))


@cases(
    "change, fault",
    (("    Ring<STAGES> state;\n    if", "    if"), ""),
    (("if (leader) bulk_wait_read<0>();  // the", "// the"), "may still"),
    (("fence_proxy_async();\n        named_barrier_sync(1, 128);\n", "fence_proxy_async();\n"), ""),
    (("(tile_id, tiles_m, tiles_n, 16)", "(tile_id, tiles_n, tiles_m, 16)"), "wrong"),
    (("tile.n * 64, tile.m * 64)", "tile.m * 64, tile.n * 64)"), ""),
    (
        ("bulk_commit();\n    }\n    if (leader) bulk_wait_read<0>();", "bulk_commit();\n    }"),
        "had not yet read",
    ),
)
def test_a_wrong_persistent_kernel_fails(change, fault):
    if "Ring" in change[0]:  # each role makes its ring anew for each tile
        ring = "const Tile tile = tile_coordinates(tile_id, tiles_m, tiles_n, 16);"
        kernel = answer("my_persistent", change, (ring, f"{ring} Ring<STAGES> state;"))
    else:
        kernel = answer("my_persistent", change)
    with pytest.raises(AssertionError, match=f"with . CTAs? and . stages, .*{fault}"):
        exercises.check_whole(kernel)


RELEASE_LAST = "        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * previous_stage);\n"


@cases(
    "changes, fault",
    ([("wgmma_wait<1>();", "wgmma_wait<0>();")], "6 of 6 steps wait"),
    ([(RELEASE_LAST, ""), ("bulk_commit();\n", f"bulk_commit();\n{RELEASE_LAST}")], "3 of 4 stages hold"),
    ([("if (leader)", "if (threadIdx.x % 128 < 2)")], "4 bulk stores"),
)
def test_a_persistent_kernel_overlaps(changes, fault):
    with pytest.raises(AssertionError, match=f"the sums are right, but {fault}"):
        exercises.check_whole(answer("my_persistent", *changes))


@cases(
    "change",
    ("state.phase);", "0);"),
    (
        "    Ring<STAGES> state;  // mended: once, for all tiles\n",
        "    u32 use = 0;\n"
        "    struct { u32 stage, phase; __device__ void advance() { stage = 0; } } state = {0, 0};\n",
    ),
)
def test_a_persistent_kernel_that_loses_its_place_fails(change):
    with pytest.raises(AssertionError, match="with . CTAs?, "):
        exercises.check_persistent(answer("kept_place", change))


@cases(
    "change, fault",
    # the order of the matrices, and of the two sums in a register
    (
        ("pack_bf16x2(sums[2], sums[3])", "pack_bf16x2(sums[4], sums[5])"),
        "row 8, column 0, .* row 0, column 8",
    ),
    (
        ("pack_bf16x2(sums[0], sums[1])", "pack_bf16x2(sums[1], sums[0])"),
        "row 0, column 0, .* row 0, column 1",
    ),
    # the swizzle: none, the 64-byte swizzle, and one with the wrong bits of the row
    ((" ^ (row % 8)", ""), "row 1, column 0, holds the sum of row 1, column 8"),
    ((" ^ (row % 8)", " ^ (row / 2 % 4)"), "row 1, column 0, holds the sum of"),
    # rows: all warps write to the first 16; a lane passes the row of its registers; a row has 64 bytes
    (("threadIdx.x / 32 * 16 + ", ""), "stmatrix: writes shared address .*: a data race"),
    (("threadIdx.x % 16, half", "threadIdx.x % 32 / 4, half"), "stmatrix: writes .*: a data race"),
    # units and registers
    (("(2 * j + half)", "(j + half)"), "holds the sum of"),
    (("d + 8 * j", "d + 4 * j"), "row 0, column 16, holds the sum of row 0, column 8"),
    # a few sums may be by chance what the box held before
    (("j < 4", "j < 3"), r"1,0[12]\d of 4,096 .* row 0, column 48, holds .* instead of"),
    (("stmatrix_x4(", "stmatrix_x4_trans("), "row 0, column 1, holds the sum of row 1, column 0"),
    (("unit * 16", "unit * 8"), "no multiple of 16"),
    (("box + row", "box + 4096 + row"), "leaves shared memory"),
    (("    stmatrix_x4(", "    if (threadIdx.x % 32 == 0) stmatrix_x4("), "waits for ever in stmatrix"),
    # what is given: the fence, the barrier, and the end of the store
    ((", bulk_commit(), bulk_wait_read<0>()", ""), "had not yet read its shared memory"),
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


def test_the_lessons_kernels_fit_the_registers():
    for name in ("persistent", "tma_store"):
        kernel = LESSON[name]
        assert not kernel.resources()["spills"] and kernel.counts()["HGMMA"], name


@cases("change", ("fence_proxy_async();", ""), ("bulk_wait_read<1>();", "bulk_wait_read<2>();"))
def test_the_lessons_check_finds_a_fault_in_its_last_kernel(change):
    kernel = LESSON["tma_store"]
    assert change[0] in kernel.source
    broken = cuda_magic.find_kernels(kernel.source.replace(*change), kernel.options)["tma_store"]

    prepare = launch(broken, 256, consumers=2, one_per_sm=True, c_by_tma=True)
    assert "emulator" in check_gemm(prepare, {"cpu": SHAPES["cpu"]})
