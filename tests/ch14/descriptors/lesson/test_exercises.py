"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import pytest
import torch
import triton
from cases import cases

from ch14.descriptors.lesson import exercises
from tilelab import ROOT
from tilelab.cells import triton_cell
from tilelab.runtime import device

NOTEBOOKS = ROOT / "notebooks"
IMPORTS = (
    "import functools\nimport torch\nimport triton\nimport triton.language as tl\n"
    "from triton.tools.tensor_descriptor import TensorDescriptor\nSMS = 4\n"
)
ANSWERS = {
    "Exercise 2": "copy_padded:prepare_padded",
    "Exercise 3": "row_max:prepare_row_max",
    "Exercise 4": "scatter_rows:prepare_scatter",
    "Exercise 5": "transpose:prepare_transpose",
}


def define(names: str, change=("", ""), solved: bool = False) -> list:
    """Return functions of the notebook's cells, or of its solutions', in which one line is changed."""
    path = NOTEBOOKS / ("solutions" if solved else "") / "07_ch14_descriptors.ipynb"
    text = "\n\n".join(triton_cell.collect(triton_cell.notebook_texts(path), *names.split(":")))
    assert change[0] in text
    found = triton_cell.define(IMPORTS + text.replace(*change))
    return [found[name] for name in names.split(":")]


@pytest.fixture(autouse=True)
def allocator():
    """As the notebook sets it, for the maps that a program makes."""
    if device.current().capability:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )


@pytest.mark.planted
@cases(
    "check, names, change",
    (
        exercises.check_copy,
        "copy_pointers:prepare_pointers",
        ("(column < columns)", "(column < columns - 1)"),
    ),
    (exercises.check_copy, "copy_host:prepare_host", ("tl.program_id(1) * BLOCK_M", "tl.program_id(1)")),
    (exercises.check_copy, "copy_tiles:prepare_host_loop", ("tile % across", "tile // across")),
    (exercises.check_sum, "add_tiles:prepare_add", ("+ y.load(corner).to(tl.float32)", "")),
    (exercises.check_gather, "gather_rows:prepare_gather_rows", ("tl.load(index + row)", "row")),
)
def test_a_wrong_version_fails(check, names, change):
    assert check(define(names, change)[1])


@pytest.mark.compile
def test_the_number_of_boxes_must_be_right():
    boxes, copy_host, prepare = define("boxes:copy_host:prepare_host", solved=True)
    exercises.check_boxes(boxes, copy_host, prepare)
    with pytest.raises(AssertionError, match="a block of 8 × 256 takes 4 loads; boxes returns 1"):
        exercises.check_boxes(
            lambda block_m, block_n: -(-block_m // 256) * -(-block_n // 256), copy_host, prepare
        )


@pytest.mark.planted
@pytest.mark.compile
@cases(
    "exercise, change",
    ("Exercise 2", ("[stride_x, 1]", "[columns, 1]")),
    ("Exercise 2", ("[stride_out, 1]", "[stride_x * 2, 1]")),
    ("Exercise 2", ("[stride_x, 1]", "[stride_out, 1]")),
    ("Exercise 2", ("out, [rows, columns]", "out, [rows, stride_out]")),
    # a zero that stands in the matrix is an element; the rest of a row is not
    (
        "Exercise 3",
        (
            'tl.where(exists, x.load([row, column]), -float("inf"))',
            'x.load([row, column]); tile = tl.where(tile == 0, -float("inf"), tile)',
        ),
    ),
    ("Exercise 3", ("range(0, columns, BLOCK_N)", "range(0, columns - BLOCK_N + 1, BLOCK_N)")),
    (
        "Exercise 3",
        (
            "tl.store(out + row, largest)",
            "tl.store(out + row, largest); tl.store(out + row + 1, largest, mask=row == 0)",
        ),
    ),
    (
        "Exercise 4",
        (
            "[tl.load(index + row), column], x.load([row, column])",
            "[row, column], x.load([tl.load(index + row), column])",
        ),
    ),
    ("Exercise 5", (".T)", ".T * 2)")),
    ("Exercise 5", ("out.store([column, row]", "out.store([column, column]")),
    (
        "Exercise 5",
        ("x.load([row, column]).T)", "x.load([row, column]).T); x.store([row, column], x.load([0, 0]))"),
    ),
)
def test_a_wrong_answer_fails(exercise, change):
    with pytest.raises(AssertionError):
        exercises.CHECKS[exercise](*define(ANSWERS[exercise], change, solved=True))


@pytest.mark.compile
def test_a_row_by_pointers_gives_up_the_descriptor():
    text = """
@triton.jit
def row_max(x, out, columns, BLOCK_N: tl.constexpr):
    at = tl.arange(0, BLOCK_N)
    row = tl.load(x + tl.program_id(0) * columns + at, mask=at < columns, other=-float("inf"))
    tl.store(out + tl.program_id(0), tl.max(row, 0))


def prepare_row_max(x, out):
    block = triton.next_power_of_2(x.shape[1])
    return lambda: row_max[x.shape[0],](x, out, x.shape[1], BLOCK_N=block)
"""
    found = triton_cell.define(IMPORTS + text)
    with pytest.raises(AssertionError, match="the rows must come by the descriptor"):
        exercises.check_row_max(found["row_max"], found["prepare_row_max"])
    unmasked = triton_cell.define(IMPORTS + text.replace(', mask=at < columns, other=-float("inf")', ""))
    with pytest.raises(AssertionError, match="elements are wrong|outside of its tensors|not finite"):
        exercises.check_row_max(unmasked["row_max"], unmasked["prepare_row_max"])
