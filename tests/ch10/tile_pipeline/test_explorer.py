"""The swizzle explorer: known banks and conflicts, pictures that say what they find, widgets that lose nothing."""

import warnings

import numpy
import pytest
import torch
from legible import assert_legible

from ch10.tile_pipeline import box_dump, explorer
from tilelab import tensor_map


def test_banks_of_rows_of_128_bytes():
    plain = explorer.banks(32, 32, 4)
    assert plain.shape == (32, 32) and numpy.issubdtype(plain.dtype, numpy.integer)
    assert (plain == numpy.arange(32)).all()
    shuffled = explorer.banks(32, 32, 4, "128B")
    assert shuffled[:9, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 0]
    assert shuffled[1, :8].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert (numpy.sort(shuffled, axis=1) == plain).all(), "a row stays in its line"
    assert explorer.banks(4, 32, 4, "32B")[:, 0].tolist() == [0, 4, 0, 4]
    assert explorer.banks(5, 32, 4, "64B")[:, 0].tolist() == [0, 4, 8, 12, 0]


def test_banks_of_narrow_rows_and_of_other_elements():
    assert explorer.banks(9, 8, 4, "32B")[:, 0].tolist() == [0, 8, 16, 24, 4, 12, 20, 28, 0]
    assert explorer.banks(5, 16, 4, "64B")[:, 0].tolist() == [0, 16, 4, 20, 8]
    assert explorer.banks(1, 16, 1)[0].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert explorer.banks(1, 17, 8)[0].tolist() == [*range(0, 32, 2), 0]


@pytest.mark.parametrize("swizzle, column, matrix", [("none", 32, 8), ("32B", 16, 4), ("64B", 8, 2), ("128B", 4, 1)])
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
    assert "32 lanes in 8 banks, no conflict" in explorer.describe_read(1, 32, 1, "none", "row")
    assert explorer.conflicts(32, 1, 1, "none", "column") == 1, "rows of a byte: a column is four lanes a word"


def test_eight_bytes_go_by_half_warps():
    assert explorer.conflicts(1, 32, 8, "none", "row") == 1
    assert explorer.conflicts(32, 16, 8, "none", "column") == 16
    assert explorer.describe_read(1, 32, 8, "none", "row").endswith("no conflict in each of 2 half warps")


@pytest.mark.parametrize("arguments, sentence", [
    ((32, 32, 4, "none", "column"), "a column of 32 rows: 32 lanes in 1 bank, 32-way conflict"),
    ((32, 32, 4, "128B", "column"), "a column of 32 rows: 32 lanes in 8 banks, 4-way conflict"),
    ((32, 64, 2, "128B", "matrix"), "a matrix of 8 rows × 16 bytes: 8 lanes in 32 banks, no conflict"),
    ((1, 4, 4, "none", "column"), "a column of 1 row: 1 lane in 1 bank, no conflict")])
def test_pictures_say_what_they_find(arguments, sentence):
    assert explorer.describe_read(*arguments) == sentence
    figure = explorer.draw(*arguments)
    assert figure.get_suptitle().replace("\n", " ") == sentence[0].upper() + sentence[1:]
    assert_legible(figure)
    assert len(figure.axes[1].patches) == len(explorer.elements_read(*arguments[:3], arguments[4]))


def test_numbers_where_there_is_room():
    def texts(*arguments):
        return [text.get_text() for text in explorer.draw(*arguments).axes[1].texts]
    assert texts(2, 32, 4, "none") == [str(bank) for bank in range(32)] * 2
    assert texts(2, 64, 2, "128B") == [*"01234567", *"10325476"]
    assert texts(256, 256, 1, "none") == []


@pytest.mark.parametrize("arguments", [(), (32, 64, 2, "matrix"), (8, 32, 4, "row"), (32, 4, 4, "column")])
def test_all_swizzles_side_by_side(arguments):
    figure = explorer.draw_all(*arguments)
    assert len(figure.axes) == 5, "four boxes and the key"
    assert_legible(figure)
    if not arguments:
        assert figure.get_suptitle() == ("A column, rows of 128 bytes: 32-way without a swizzle, "
                                         "4-way with 128B")


@pytest.mark.parametrize("arguments, words", [
    ((32, 3, 4, "none", "row"), "a multiple of 16 bytes; 3 elements take 12"),
    ((32, 32, 4, "64B", "row"), "with the swizzle 64B"),
    ((257, 32, 4, "none", "row"), "1 to 256 elements"),
    ((32, 32, 4, "16B", "row"), "unknown swizzle"),
    ((32, 32, 4, "none", "diagonal"), "unknown access .*; choose row, column, matrix"),
    ((32, 32, 3, "none", "row"), "itemsize must be 1 or 2 or 4 or 8; it is 3")])
def test_what_cannot_be_drawn(arguments, words):
    with pytest.raises(ValueError, match=words):
        explorer.draw(*arguments)
    with pytest.raises(ValueError, match="it is 0 x 4"):
        explorer.banks(0, 4, 4)


def test_a_box_on_the_tensor():
    assert explorer.count_outside((48, 96), (0, 0), (32, 32)) == 0
    assert explorer.count_outside((48, 96), (-8, 80), (32, 32)) == 32 * 32 - 24 * 16
    assert explorer.count_outside((48, 96), (500, 0), (32, 32)) == 32 * 32
    figure = explorer.draw_box((48, 96), (-8, 80), (32, 32), 4)
    assert figure.get_suptitle() == "2,560 of 4,096 bytes lie outside; the barrier expects 4,096"
    assert "All of the box" in explorer.draw_box((48, 96), (-100, 0), (32, 32), 4).get_suptitle()
    assert "whole box lies on" in explorer.draw_box((48, 96), (0, 0), (32, 32), 4).get_suptitle()
    assert_legible(figure)


@pytest.mark.parametrize("dtype, column", [(torch.uint8, 8), (torch.float16, -4), (torch.float32, -1),
                                           (torch.float64, 1)])
def test_a_box_within_a_unit_is_refused_in_the_words_of_the_launcher(dtype, column):
    box = 8, 32 // dtype.itemsize
    with pytest.raises(ValueError, match="column must be a multiple of") as said:
        explorer.draw_box((48, 96), (0, column), box, dtype.itemsize)
    with pytest.raises(ValueError) as launcher:
        box_dump.dump_box(torch.zeros(48, 96, dtype=dtype), 0, column, box)
    assert str(said.value) == str(launcher.value)
    for aligned in (-16, 0, 16, 112):
        assert_legible(explorer.draw_box((48, 96), (0, aligned), box, dtype.itemsize))


def test_the_arrows_of_x_step_by_units():
    shown = explorer.explorer()
    steps = [shown.menus["x"].step]
    for itemsize in (1, 8):
        shown.menus["itemsize"].value = itemsize
        steps.append(shown.menus["x"].step)
    assert steps == [4, 16, 2]


def test_widgets_answer_and_lose_nothing():
    shown = explorer.explorer()
    before = shown.bank_picture.value, shown.tensor_picture.value
    assert all(bytes(picture).startswith(b"\x89PNG") for picture in before) and not shown.problem.value
    for name, value in (("swizzle", "128B"), ("access", "matrix"), ("rows", 16), ("itemsize", 2), ("x", -8),
                        ("y", 40), ("tensor_rows", 64), ("tensor_columns", 104)):
        last = shown.bank_picture.value, shown.tensor_picture.value
        shown.menus[name].value = value
        assert (shown.bank_picture.value, shown.tensor_picture.value) != last, f"{name} changes nothing"
    for name, bad, words in (("columns", 30, "a multiple of 16 bytes; 30 elements take 60"),
                             ("columns", 72, "the swizzle 128B the innermost"), ("rows", 260, "1 to 256 elements"),
                             ("tensor_columns", 101, "pad its rows"),
                             ("x", 13, "olumn must be a multiple of 8 elements (16 bytes)")):
        settings, picture = {key: menu.value for key, menu in shown.menus.items()}, shown.bank_picture.value
        shown.menus[name].value = bad
        assert words in shown.problem.value and shown.pictures.layout.display == "none"
        assert {key: menu.value for key, menu in shown.menus.items()} == {**settings, name: bad}
        shown.menus[name].value = settings[name]
        assert not shown.problem.value and shown.pictures.layout.display == "flex"
        assert shown.bank_picture.value == picture


def test_the_largest_box_and_every_swizzle_draw_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for swizzle, span in tensor_map.SWIZZLES.items():
            explorer.draw(256, span or 256, 1, swizzle, "matrix")._repr_png_()


def test_rows_narrower_than_the_swizzle_begin_a_swizzle_apart():
    narrow, whole = (explorer.banks(16, columns, 4, "128B") for columns in (8, 32))
    assert (narrow == whole[:, :8]).all()
    assert explorer.conflicts(32, 8, 4, "128B", "column") == explorer.conflicts(32, 32, 4, "128B", "column") == 4
