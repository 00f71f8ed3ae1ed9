"""Pictures and views of block-scaled formats: they say what they find, and a notebook keeps a picture and a text."""

import json

import pytest
from cases import cases
from legible import assert_legible, texts

from ch14.mx_formats.lesson import errors, explorer, figures
from ch14.mx_formats.number_formats import E2M1, E4M3, E5M2


@cases(
    "draw",
    figures.strip_picture,
    lambda: figures.code_picture(E4M3, 0x35),
    lambda: figures.code_picture(E2M1, 0),
    lambda: figures.code_picture(E5M2, 0xFC),
    lambda: explorer.block("mxfp4").picture,
    lambda: explorer.block("fp8_1x128", "outliers").picture,
    lambda: explorer.number_line("e5m2", -3e9).picture,
    lambda: explorer.scale_layout().picture,
)
def test_pictures_are_legible(draw):
    assert_legible(draw())


def test_errors_on_one_scale():
    rows = errors.matrix_errors(32, 256)
    names = {"mxfp8_e4m3": "MXFP8, floor", "nvfp4": "NVFP4", "mxfp4": "MXFP4, floor"}
    picture = figures.errors_picture(rows, names)
    assert_legible(picture)
    assert all(label in picture.description for label in names.values())


@cases(
    "element, code, words",
    (E2M1, 5, "code 5 of e2m1, 0 10 1, is 3 (normal, exponent 1); magnitudes beside it: 2 and 4, step 1"),
    (
        E2M1,
        9,
        "code 9 of e2m1, 1 00 1, is -0.5 (subnormal, exponent 0); magnitudes beside it: 0 and 1, step 0.5",
    ),
    (
        E4M3,
        126,
        "code 126 of e4m3, 0 1111 110, is 448 (normal, exponent 8); magnitudes beside it: 416 and nothing, step 32",
    ),
    (E4M3, 127, "code 127 of e4m3, 0 1111 111, is nan"),
    (E5M2, 0xFC, "code 252 of e5m2, 1 11111 00, is -inf"),
    (
        E2M1,
        8,
        "code 8 of e2m1, 1 00 0, is -0 (zero, exponent 0); magnitudes beside it: nothing and 0.5, step 0.5",
    ),
)
def test_a_code_in_words(element, code, words):
    assert figures.describe(element, code) == words


def test_a_code_that_is_none():
    with pytest.raises(ValueError, match="code must be from 0 to 15 for e2m1; it is 16"):
        figures.describe(E2M1, 16)


def test_a_block_states_its_error():
    picture = explorer.block("mxfp4", "ramp").picture
    title = " ".join(texts(picture))
    assert "MXFP4: scale 1 (code 127), error " in title and "became zero" in title
    assert "32 numbers of the block, from 0 to 7" in picture.description
    assert "from 0 to 6" in picture.description


def test_a_notebook_keeps_what_the_views_show():
    line, scales = explorer.number_line("e2m1", 1e9), explorer.scale_layout("nvfp4", (130, 100), 129, 6)
    assert "code 7 of e2m1, 0 11 1, is 6" in repr(line.table)
    assert line.data["start"] == {"element": "e2m1", "value": 1e9}
    assert explorer.number_line("e4m3", float("-inf")).data["start"]["value"] == -448
    found = repr(scales.table).split()[-6:]
    assert found == ["129", "6", "1554", "3", "1", "2"], "two tiles of 4 scales per row"
    view = explorer.block("nvfp4", "weights")
    assert set(view.data["blocks"]) == {*errors.DATA, "ramp"} and "mxfp4" in view.data["formats"]
    assert max(len(json.dumps(each.data)) for each in (line, scales, view)) < 20_000


@cases(
    "make, says",
    (lambda: explorer.number_line("e8m7"), "unknown element 'e8m7'; choose one of e4m3"),
    (lambda: explorer.number_line("e2m1", float("nan")), "e2m1 has no NaN"),
    (lambda: explorer.block("fp8_128x128"), "blocks of one row; choose one of mxfp8_e4m3"),
    (lambda: explorer.block("nvfp4", rule="ceil"), "for E8M0 scales"),
    (lambda: explorer.scale_layout("mxfp6_e2m3"), "choose one of mxfp8_e4m3, mxfp4, nvfp4"),
    (lambda: explorer.scale_layout(scale=9), "below 192 and 8; they are 33 and 9"),
)
def test_what_no_view_shows(make, says):
    with pytest.raises(ValueError, match=says):
        make()
