"""Pictures and explorer of block-scaled formats: they say what they find, and lose nothing."""

import pytest
from legible import assert_legible, texts

from ch14.mx_formats import errors, explorer, figures
from ch14.mx_formats.number_formats import E2M1, E4M3, E5M2


@pytest.mark.parametrize("draw", [
    figures.block_picture, figures.number_line_picture, figures.rounding_picture, figures.rules_picture,
    figures.program_picture, figures.packing_picture, figures.scales_picture, figures.strip_picture,
    lambda: figures.code_picture(E4M3, 0x35),
    lambda: figures.code_picture(E2M1, 0), lambda: figures.code_picture(E5M2, 0xFC),
    lambda: explorer.draw_block("mxfp4", "floor", "outliers", 0),
    lambda: explorer.draw_block("fp8_1x128", "floor", "outliers", 0)])
def test_pictures_are_legible(draw):
    assert_legible(draw())


def test_errors_on_one_scale():
    rows = errors.matrix_errors(32, 256)
    names = {"mxfp8_e4m3": "MXFP8, floor", "nvfp4": "NVFP4", "mxfp4": "MXFP4, floor"}
    picture = figures.errors_picture(rows, names)
    assert_legible(picture)
    assert all(label in picture.description for label in names.values())


@pytest.mark.parametrize("element, code, words", [
    (E2M1, 5, "e2m1 5: 0 10 1 is 3 (normal, exponent 1); magnitudes beside it: 2 and 4, step 1"),
    (E2M1, 9, "e2m1 9: 1 00 1 is -0.5 (subnormal, exponent 0); magnitudes beside it: 0 and 1, step 0.5"),
    (E4M3, 126, "e4m3 126: 0 1111 110 is 448 (normal, exponent 8); magnitudes beside it: 416 and nothing, step 32"),
    (E4M3, 127, "e4m3 127: 0 1111 111 is nan"), (E5M2, 0xFC, "e5m2 252: 1 11111 00 is -inf"),
    (E2M1, 8, "e2m1 8: 1 00 0 is -0 (zero, exponent 0); magnitudes beside it: nothing and 0.5, step 0.5")])
def test_a_code_in_words(element, code, words):
    assert figures.describe(element, code) == words


def test_a_code_that_is_none():
    with pytest.raises(ValueError, match="code must be from 0 to 15 for e2m1; it is 16"):
        figures.describe(E2M1, 16)


def test_a_block_states_its_error():
    title = " ".join(texts(explorer.draw_block("mxfp4", "floor", "ramp", 0)))
    assert "mxfp4: scale 1 (code 127), error " in title and "became zero" in title


def test_widgets_answer_and_explain(capsys):
    values, codes, blocks = explorer.explore().children

    def change(panel, **settings):
        capsys.readouterr()
        for menu in panel.children[:-1]:
            if menu.description in settings:
                menu.value = settings[menu.description]
        return capsys.readouterr().out

    assert "e2m1 4: 0 10 0 is 2 (normal" in change(values, value=2.4) and "Figure(" in change(values, value=2.6)
    assert "e2m1 7" in change(values, value=1e9), "it saturates"
    assert "has no NaN" in change(values, value=float("nan"))
    assert "e4m3 127: 0 1111 111 is nan" in change(values, element="e4m3")
    assert "code must be from 0 to 15 for e2m1; it is 127" in change(codes, code=127)
    assert "e4m3 127: 0 1111 111 is nan" in change(codes, element="e4m3")
    for name, value in (("format", "nvfp4"), ("data", "activations"), ("seed", 3)):
        assert "Figure(" in change(blocks, **{name: value}), name
    assert "for E8M0 scales" in change(blocks, rule="ceil")
    assert "Figure(" in change(blocks, format="mxfp4")
