"""The swizzle explorer: known banks and conflicts, pictures that say what they find, widgets that lose nothing."""

import numpy
import pytest
import torch
from legible import assert_legible, texts

from ch10.tile_pipeline import box_dump, explorer
from tilelab import plots


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
    assert explorer.conflicts(32, 1, 1, "none", "column") == 1, "rows of a byte: a column is four lanes per word"


def test_eight_bytes_go_by_half_warps():
    assert explorer.conflicts(1, 32, 8, "none", "row") == 1
    assert explorer.conflicts(32, 16, 8, "none", "column") == 16
    assert explorer.describe_read(1, 32, 8, "none", "row").endswith("no conflict in each of 2 half warps")


@pytest.mark.parametrize("arguments, sentence", [
    ((32, 32, 4, "none", "column"), "column of 32 × 4 bytes: 32 lanes touch 1 of 32 banks, 32-way conflict"),
    ((32, 32, 4, "128B", "column"), "column of 32 × 4 bytes: 32 lanes touch 8 of 32 banks, 4-way conflict"),
    ((32, 64, 2, "128B", "matrix"), "matrix of 8 × 16 bytes: 8 lanes touch 32 of 32 banks, no conflict"),
    ((1, 32, 1, "none", "row"), "row of 32 × 1 bytes: 32 lanes touch 8 of 32 banks, no conflict")])
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
    assert numbers(explorer.draw(256, 256, 1, "row", ["none"]).axes[1]) == [], "there is no room"


def test_all_swizzles_side_by_side():
    figure = explorer.draw(9, 32, 4)
    assert figure.get_suptitle() == "Wavefronts for a column: 9 (none), 2 (32B), 2 (64B), 2 (128B)"
    assert len(figure.axes) == 5, "four boxes and the key"
    assert_legible(figure)


@pytest.mark.parametrize("arguments, words", [
    ((32, 3, 4, "row", ["none"]), "a multiple of 16 bytes; 3 elements take 12"),
    ((257, 32, 4, "row", ["none"]), "1 to 256 elements")])
def test_what_cannot_be_drawn(arguments, words):
    with pytest.raises(ValueError, match=words):
        explorer.draw(*arguments)


def test_a_box_on_the_tensor():
    figure = explorer.draw_box((48, 96), (-8, 80), (32, 32), 4)
    assert figure.get_suptitle() == "2,560 of 4,096 bytes lie outside; the barrier expects 4,096"
    assert_legible(figure)
    assert "All of the box" in explorer.draw_box((48, 96), (-100, 0), (32, 32), 4).get_suptitle()
    assert "whole box lies on" in explorer.draw_box((48, 96), (0, 0), (32, 32), 4).get_suptitle()


def test_a_box_within_a_unit_is_refused_in_the_words_of_the_launcher():
    for dtype, column in (torch.uint8, 8), (torch.float16, -4), (torch.float32, -1), (torch.float64, 1):
        box = 8, 32 // dtype.itemsize
        with pytest.raises(ValueError, match="column must be a multiple of") as said:
            explorer.draw_box((48, 96), (0, column), box, dtype.itemsize)
        with pytest.raises(ValueError) as launcher:
            box_dump.dump_box(torch.zeros(48, 96, dtype=dtype), 0, column, box)
        assert str(said.value) == str(launcher.value)


@pytest.fixture
def menus(monkeypatch):
    """Return the explorer, whose pictures are the texts in them, and its menus by description."""
    monkeypatch.setattr(plots.Picture, "_repr_png_", lambda self: repr(texts(self)).encode())
    explorer._draw_png.cache_clear()
    shown = explorer.explorer()
    yield shown, {menu.description: menu for row in shown.children[:3] for menu in row.children}
    explorer._draw_png.cache_clear()


def test_widgets_answer_and_lose_nothing(menus):
    shown, menus = menus
    *_, problem, pictures = shown.children

    def seen():
        return [bytes(picture.value) for picture in pictures.children]

    steps = [menus["box at x"].step]
    for name, value in (("box rows", 4), ("swizzle", "128B"), ("read of a", "matrix"), ("bytes each", 2),
                        ("box at x", -8), ("y", 40), ("tensor rows", 64), ("columns", 104)):
        last = seen()
        menus[name].value = value
        assert seen() != last, f"{name} changes nothing"
    assert [*steps, menus["box at x"].step] == [4, 8], "the arrows of x step by units of 16 bytes"
    for name, bad, words in (("box columns", 30, "a multiple of 16 bytes; 30 elements take 60"),
                             ("box columns", 72, "the swizzle 128B the innermost"),
                             ("box rows", 260, "1 to 256 elements"), ("columns", 101, "pad its rows"),
                             ("box at x", 13, "column must be a multiple of 8 elements (16 bytes)")):
        settings, last = {key: menu.value for key, menu in menus.items()}, seen()
        menus[name].value = bad
        assert words in problem.value and pictures.children[0].layout.display == "none"
        assert {key: menu.value for key, menu in menus.items()} == {**settings, name: bad}
        menus[name].value = settings[name]
        assert not problem.value and pictures.children[0].layout.display == "flex" and seen() == last


def test_rows_narrower_than_the_swizzle_begin_a_swizzle_apart():
    narrow, whole = (banks(16, columns, 4, "128B") for columns in (8, 32))
    assert (narrow == whole[:, :8]).all()
    assert explorer.conflicts(32, 8, 4, "128B", "column") == explorer.conflicts(32, 32, 4, "128B", "column") == 4
