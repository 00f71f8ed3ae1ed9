"""The notebook's kernels and the solutions pass their checks, and each planted wrong answer fails."""

import json
import re

import planted
import pytest
from cases import cases

from ch10.tile_pipeline.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic
from tilelab.cells.cuda_magic import make_tensor_map

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
NOTEBOOK = NOTEBOOKS / "03_ch10_tile_pipeline.ipynb"
KERNELS = cuda_magic.notebook_kernels(NOTEBOOK)
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "03_ch10_tile_pipeline.ipynb")


def changed(kernel, *changes, among=KERNELS, **constants):
    return planted.answer(among, kernel, *changes, **constants)[kernel]


@pytest.fixture(scope="module")
def launches():
    """The functions of the notebook's cells that prepare launches."""
    names = {"make_tensor_map": make_tensor_map, "SMS": 4}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        for function in re.findall(r"(?ms)^def launch_\w+\(.*?^    return prepare$", "".join(cell["source"])):
            exec(function, names)
    return names


def run_check(kernel, launches, **options):
    """Return what the ladder's check says of a version of the notebook."""
    if kernel.name == "tile_copy":
        return exercises.check_copy(exercises.by_box(kernel, options.get("box", (4, 256))))
    if kernel.name == "tile_ring":
        return exercises.check_copy(launches["launch_ring"](kernel, options.get("stages", 8)))
    if kernel.name.endswith("stencil"):
        box = () if kernel.name == "plain_stencil" else ((34, 136),)
        return exercises.check_stencil(launches["launch_stencil"](kernel, *box))
    if kernel.name == "padded_transpose":
        return exercises.check_transpose(exercises.by_pointer(kernel))
    if kernel.name.endswith("transpose"):
        swizzle = options.get("swizzle", "128B" if kernel.name == "swizzled_transpose" else "none")
        return exercises.check_transpose(launches["launch_transpose"](kernel, swizzle))


@cases(
    "kernel, constants, options",
    ("tile_copy", {"ROWS": 32, "COLUMNS": 32}, {"box": (32, 32)}),
    ("tile_ring", {"STAGES": 2}, {"stages": 2}),
)
def test_the_other_constants_pass(kernel, constants, options, launches):
    assert run_check(changed(kernel, **constants), launches, **options) == ""


@cases(
    "kernel, change, options",
    ("tile_copy", ("x, column, row,", "x, row, column,"), {}),
    ("tile_copy", ("bulk_wait_read<0>();", ""), {}),
    ("tile_copy", ("", ""), {"box": (8, 128)}),
    ("tile_ring", ("use / STAGES % 2", "use % 2"), {}),
    ("fill_stencil", ("left - 4", "left - 1"), {}),
    ("tile_transpose", ("fence_proxy_async();", ""), {}),
    ("swizzled_transpose", ("row % 8", "row % 4"), {}),
    ("swizzled_transpose", ("", ""), {"swizzle": "none"}),
)
def test_a_wrong_version_fails(kernel, change, options, launches):
    assert run_check(changed(kernel, change), launches, **options)


WIDE_END = "out[(long long)row * stride + column] = 0.25f * sum;"


@cases(
    "exercise, kernel, change",
    ("Exercise 2", "mended_stencil", ("sizeof box);", "sizeof box + 16);")),
    ("Exercise 2", "mended_stencil", ("from[-WIDE]", "from[0]")),
    ("Exercise 3", "wide_stencil", ("left - 4", "left - 2")),
    ("Exercise 3", "wide_stencil", ("here[-2] + here[2]", "here[-1] + here[1]")),
    # The first pixel of the neighbour, with its value and without; a block that writes all but its first column.
    (
        "Exercise 3",
        "wide_stencil",
        (
            WIDE_END,
            WIDE_END + " if (!threadIdx.x && left + 128 < columns) out[top * stride + left + 128] = 0;",
        ),
    ),
    (
        "Exercise 3",
        "wide_stencil",
        (
            WIDE_END,
            WIDE_END
            + " if (i % 128 == 127 && row < rows && column + 1 < columns) out[(long long)row * stride + "
            "column + 1] = 0.25f * (here[1 - 2 * WIDE] + here[1 + 2 * WIDE] + here[-1] + here[3]);",
        ),
    ),
    ("Exercise 4", "narrow_transpose", ("row / 2 % 4", "row % 4")),
    ("Exercise 5", "my_transpose", ("column / 4 ^ row % 8", "column / 4")),
    ("Exercise 5", "my_transpose", ("sizeof tile);", "sizeof tile / 2);")),
    ("Exercise 5", "my_transpose", ("tma_store_2d(out,", "if (!blockIdx.x) tma_store_2d(out,")),
    (
        "Exercise 5",
        "my_transpose",
        ("if (threadIdx.x == 0) {\n        tma_store", "if (threadIdx.x < 2) {\n        tma_store"),
    ),
)
def test_a_wrong_answer_fails(exercise, kernel, change):
    with pytest.raises(AssertionError):
        exercises.CHECKS[exercise](changed(kernel, change, among=SOLUTIONS))
