"""The swizzle explorer: known banks and conflicts, pictures that say what they find, and what a notebook keeps."""

import json

import numpy
import pytest
from cases import cases
from legible import assert_legible

from ch10.tile_pipeline.lesson import explorer


def banks(*box):
    return explorer.addresses(*box) // 4 % 32


def test_banks_of_rows_of_128_bytes():
    plain = banks(32, 32, 4)
    assert plain.shape == (32, 32) and numpy.issubdtype(plain.dtype, numpy.integer)
    assert (plain == numpy.arange(32)).all()
    shuffled = banks(32, 32, 4, "128B")
    assert shuffled[:9, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 0]
    assert shuffled[1, :8].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert (numpy.sort(shuffled, axis=1) == plain).all(), "a row stays in its line"
    assert banks(4, 32, 4, "32B")[:, 0].tolist() == [0, 4, 0, 4]
    assert banks(5, 32, 4, "64B")[:, 0].tolist() == [0, 4, 8, 12, 0]


def test_banks_of_narrow_rows_and_of_other_elements():
    assert banks(9, 8, 4, "32B")[:, 0].tolist() == [0, 8, 16, 24, 4, 12, 20, 28, 0]
    assert banks(5, 16, 4, "64B")[:, 0].tolist() == [0, 16, 4, 20, 8]
    assert banks(1, 16, 1)[0].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert banks(1, 17, 8)[0].tolist() == [*range(0, 32, 2), 0]


@cases("swizzle, column, matrix", ("none", 32, 8), ("32B", 16, 4), ("64B", 8, 2), ("128B", 4, 1))
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_conflicts_in_rows_of_128_bytes(itemsize, swizzle, column, matrix):
    assert explorer.conflicts(32, 128 // itemsize, itemsize, swizzle, "column") == column
    assert explorer.conflicts(32, 128 // itemsize, itemsize, swizzle, "matrix") == matrix
    assert explorer.conflicts(32, 128 // itemsize, itemsize, swizzle, "row") == 1


@pytest.mark.parametrize("swizzle, span", [("32B", 32), ("64B", 64), ("128B", 128)])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_a_box_as_wide_as_its_swizzle_reads_matrices_without_conflict(swizzle, span, itemsize):
    assert explorer.conflicts(8, span // itemsize, itemsize, swizzle, "matrix") == 1


def test_a_word_comes_once_for_all_lanes_that_read_it():
    assert explorer.conflicts(1, 32, 1, "none", "row") == 1
    found = explorer.conflicts(32, 1, 1, "none", "column")
    assert found == 1, "rows of a byte: a column is four lanes per word"


def test_eight_bytes_go_by_half_warps():
    assert explorer.conflicts(1, 32, 8, "none", "row") == 1
    assert explorer.conflicts(32, 16, 8, "none", "column") == 16
    assert explorer.describe_read(1, 32, 8, "none", "row").endswith("no conflict in each of 2 half warps")


@cases(
    "arguments, sentence",
    ((32, 32, 4, "none", "column"), "column of 32 × 4 bytes: 32 lanes touch 1 of 32 banks, 32-way conflict"),
    ((32, 64, 2, "128B", "matrix"), "matrix of 8 × 16 bytes: 8 lanes touch 32 of 32 banks, no conflict"),
)
def test_a_read_is_described(arguments, sentence):
    assert explorer.describe_read(*arguments) == sentence


def numbers(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_a_picture_shows_what_is_read_and_numbers_the_units():
    figure = explorer.draw(8, 32, 4, "column", ["128B"])
    assert figure.get_suptitle() == "Column of 8 × 4 bytes: 8 lanes touch 8 of 32 banks, no conflict"
    assert_legible(figure)
    _, box = figure.axes
    assert len(box.patches) == 8 and numbers(box)[:16] == [*"01234567", *"10325476"]
    assert "numbers: 16-byte unit" in figure.texts[-1].get_text()
    figure = explorer.draw(256, 256, 8, "row", ["none"])
    assert numbers(figure.axes[1]) == [], "there is no room"
    assert figure.texts[-1].get_text() == "drawn: the first 32 of 256 rows\noutlined: what is read"


def test_all_swizzles_side_by_side():
    figure = explorer.draw(9, 32, 4)
    assert figure.get_suptitle() == "Wavefronts for a column: 9 (none), 2 (32B), 2 (64B), 2 (128B)"
    assert len(figure.axes) == 5, "four boxes and the key"
    assert_legible(figure)


def test_lanes_read_vectors_from_any_place():
    found = explorer.elements_read(32, 32, 4, "column", 16, (4, 8))
    assert found == ([(4 + lane, 8) for lane in range(28)], 4)
    assert explorer.elements_read(32, 32, 4, "row", 8) == ([(0, 2 * lane) for lane in range(16)], 2)
    found = explorer.elements_read(8, 16, 8, "row", 4)
    assert found == ([(0, lane) for lane in range(16)], 1), "at least an element"
    assert explorer.elements_read(6, 64, 2, "matrix", 4, (2, 8)) == ([(2 + lane, 8) for lane in range(4)], 8)
    with pytest.raises(ValueError, match="starts at a multiple of 4 elements; column is 6"):
        explorer.elements_read(32, 32, 4, "column", 16, (0, 6))


@pytest.mark.parametrize("swizzle, ways, total", [("none", 8, 32), ("128B", 1, 4)])
def test_a_column_of_16_bytes_goes_by_quarter_warps(swizzle, ways, total):
    column = 32, 32, 4, swizzle, "column", 16
    assert explorer.conflicts(*column) == ways and explorer.wavefronts(*column) == total
    assert explorer.describe_read(*column).endswith("in each of 4 quarter warps")


def test_the_wavefronts_of_a_read_are_those_of_all_its_groups():
    assert explorer.wavefronts(32, 16, 8, "none", "column") == 32
    assert explorer.wavefronts(1, 32, 8, "none", "row") == 2
    assert explorer.wavefronts(32, 32, 4, "none", "column") == 32
    assert explorer.wavefronts(8, 4, 4, "none", "column", 16, (8, 0)) == 0, "no lane fits"


def test_a_notebook_keeps_a_picture_a_table_and_little_data():
    view = explorer.microscope("bfloat16", (64, 128), (32, 64), (0, 64), "128B", "matrix")
    assert_legible(view.picture)
    assert "64B" in view.picture.get_suptitle() and "a matrix" in repr(view.table)
    assert view.name == "microscope"
    assert view.data["start"]["corner"] == [0, 64]
    assert view.data["dtypes"]["bfloat16"] == {"bytes": 2, "floating": True}
    assert view.data["targets"]["sm_120a"]["smem"] == 101_376 and "sm_80" not in view.data["targets"]
    assert len(json.dumps(view.data)) < 2000
    with pytest.raises(ValueError, match="3 elements take 12"):
        explorer.microscope(box=(32, 3))


def test_rows_narrower_than_the_swizzle_begin_a_swizzle_apart():
    narrow, whole = (banks(16, columns, 4, "128B") for columns in (8, 32))
    assert (narrow == whole[:, :8]).all()
    found = explorer.conflicts(32, 32, 4, "128B", "column")
    assert explorer.conflicts(32, 8, 4, "128B", "column") == found == 4
