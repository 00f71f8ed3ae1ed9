"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import re

import pytest
import torch
from cases import cases
from cells import define

from ch14.mx_formats import number_formats
from ch14.mx_formats.lesson import exercises, figures
from tilelab import ROOT
from tilelab.cells import lesson

NOTEBOOKS = ROOT / "notebooks"
CELLS = lesson.notebook_texts(NOTEBOOKS / "14_ch14_mx_formats.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "14_ch14_mx_formats.ipynb")
FORMATS = {version: format for format, versions in exercises.LADDERS.values() for version in versions}
ANSWERS = {"Exercise 1": "my_ceil", "Exercise 2": "broken_rounding", "Exercise 3": "broken_tiles"}
ANSWERS |= {"Exercise 4": "pack_six", "Exercise 5": "unpack_mxfp4", "Exercise 6": "my_mxfp8"}


def check_version(name, change=("", "")):
    return exercises.check_quantiser(FORMATS[name], *define(CELLS, f"prepare_{name}", change=change))


@pytest.mark.planted
@cases(
    "name, change, reason",
    ("block_per_program", (">> 23) - 8", ">> 23) - 7"), "scales: "),
    ("block_per_program", ("448.0", "480.0"), "codes: "),
    ("many_blocks", (", mask=inside[:, None])  # +\n", ")\n"), "outside of"),
    ("converted", ("254 - scale", "253 - scale"), "codes: "),
    ("tiled_scales", ("groups + 3", "groups"), "scales: |different values"),
    ("mxfp4_split", ("low | high << 4", "high | low << 4"), "codes: "),
    (
        "mxfp4_split",
        (
            "tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - 2, 0)",
            "(amax.to(tl.int32, bitcast=True) >> 23) - 2",
        ),
        "scales: ",
    ),
    ("mxfp4_integer", ("(bits >> 22 & 1)", "1"), "codes: "),
    ("mxfp4_integer", ("6 * 2.0**-126", "8 * 2.0**-126"), "codes: "),
    ("nvfp4", ("amax * (1 / 6)", "amax * 0.25"), "scales: "),
    ("nvfp4_own_scale", ("amax.zero_()", "amax.fill_(1e9)"), "scales: "),
)
def test_a_wrong_version_fails(name, change, reason):
    assert re.search(reason, check_version(name, change))


@pytest.mark.planted
@cases(
    "exercise, change",
    ("Exercise 1", ("+ 0x3FFFFF", "+ 0x400000")),  # six itself takes the larger scale
    ("Exercise 1", ("+ 0x3FFFFF", "+ 0x1FFFFF")),  # the rule "even"
    # one larger after the clamp, and always one larger
    ("Exercise 1", ("+ 0x3FFFFF) >> 23) - 2", ") >> 23) - 1")),
    ("Exercise 2", ("tl.minimum(tl.abs(scaled), 6 * 2.0**-126)", "tl.abs(scaled)")),
    ("Exercise 2", ("(scaled.to(tl.uint32, bitcast=True) >> 28 & 0x8)", "tl.where(scaled < 0, 8, 0)")),
    ("Exercise 2", ("(bits >> 22 & 1)", "0")),  # ties go down
    ("Exercise 2", (">> 22\n", ">> 23\n")),
    ("Exercise 3", ("(groups + 3) // 4", "groups // 4")),
    ("Exercise 3", ("row % 128 // 32", "row // 32")),
    ("Exercise 3", ("(groups + 3) // 4", "(groups // 4 + 1)")),
    ("Exercise 3", ("mask=inside), mask=inside)", "mask=inside))")),  # what fills a tile up is written
    ("Exercise 4", ("(8 * k)", "(16 - 8 * k)")),
    ("Exercise 4", (".to(tl.int32)\n", "\n")),  # in eight bits
    ("Exercise 4", ("second << 6", "second << 8")),
    ("Exercise 4", ("first | second << 6", "second | first << 6")),
    ("Exercise 5", ("element % 2", "1 - element % 2")),
    ("Exercise 5", ("| (code >> 3) << 31", "")),
    ("Exercise 5", ("((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126", "(code & 7) * 0.5")),
    ("Exercise 5", ("tl.load(scales + block,", "tl.load(scales + block // BLOCKS * BLOCKS,")),
    ("Exercise 6", (">> 23) - 8, 0)", ">> 23) - 7, 0)")),
    ("Exercise 6", ("tl.max(tl.abs(elements), 1)", "tl.max(elements, 1)")),
    ("Exercise 6", ("(254 - scale)", "(253 - scale)")),
    ("Exercise 6", ("multiplier[:, None]).to(tl.float8e4nv)", "multiplier[:, None]).to(tl.float8e5)")),
)
def test_a_wrong_answer_fails(exercise, change):
    with pytest.raises(AssertionError):
        exercises.CHECKS[exercise](*define(SOLUTIONS, ANSWERS[exercise], change=change))


@cases(
    "exercise, change",
    (
        "Exercise 1",
        ("tl.minimum(tl.abs(scaled), 6.0)", "tl.abs(scaled)"),
    ),  # nothing exceeds 6 under rule ceil
    ("Exercise 3", ("((groups + 3) // 4)", "tl.cdiv(groups, 4)")),
    ("Exercise 4", ("first | second << 6 | third << 12", "first + second * 64 + third * 4096")),
    (
        "Exercise 6",
        ("elements * multiplier[:, None]", "elements * tl.exp2((127 - scale).to(tl.float32))[:, None]"),
    ),
    (
        "Exercise 5",
        (
            "(tl.load(scales + block, mask=inside, other=1).to(tl.int32) << 23).to(tl.float32, bitcast=True)",
            "tl.exp2(tl.load(scales + block, mask=inside, other=1).to(tl.float32) - 127)",
        ),
    ),
)
def test_another_right_answer_passes(exercise, change):
    exercises.CHECKS[exercise](*define(SOLUTIONS, ANSWERS[exercise], change=change))


def test_rounding_is_checked_at_every_midpoint():
    def truncate(a, mantissa_bits, emin):
        return (a.view(torch.int32) >> 23 - mantissa_bits << 23 - mantissa_bits).view(torch.float32)

    def search(a, mantissa_bits, emin):
        element = next(
            each
            for each in number_formats.ELEMENTS.values()
            if (each.mantissa_bits, each.emin) == (mantissa_bits, emin)
        )
        return number_formats.decode(number_formats.encode(a, element), element)

    assert exercises.check_rounding_everywhere(search).startswith(
        "e2m1: 29 of 29 right; e4m3: 505 of 505 right"
    )
    assert not exercises.check_rounding_everywhere(truncate).startswith("e2m1: 29 of 29")
    assert exercises.count_tile_bytes(lambda row, group: row % 64 * 4 + group) == 256


def test_the_errors_of_the_picture_are_in_the_order_of_the_whole():
    """What the picture of 64 numbers shows must be what the table of all numbers says."""
    rms = {
        name: float(strip.square().mean().sqrt()) for name, strip in figures.strip_errors("gaussian").items()
    }
    assert 3 * rms["mxfp8_e4m3"] < rms["nvfp4"] < 0.9 * min(rms["fp4_e8m0_16"], rms["mxfp4"])
    assert abs(rms["fp4_e8m0_16"] / rms["mxfp4"] - 1) < 0.1
