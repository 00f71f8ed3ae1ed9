"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import functools

import pytest
from cases import cases
from cells import define

from ch14.fp4_decode.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson
from tilelab.emulator import gluon as gluon_emulator

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "16_ch14_fp4_decode.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "16_ch14_fp4_decode.ipynb")
pytestmark = pytest.mark.compile


def prepare(name, change=("", ""), kernel=None, **options):
    _, function = define(VERSIONS, kernel or name, f"prepare_{name}", change=change)
    return functools.partial(function, **options) if options else function


@cases("change", ("", ""), ("2.0**126", "2.0**127"), ("value_of(byte >> 4)", "value_of(byte)"))
def test_decoding_is_exact(change):
    decode = prepare("decode_once", change, kernel="decode_blocks")
    fault = lesson.check_launch(
        decode,
        {"cpu": [(128, 128, 256)], "cuda": [(128, 128, 256)]},
        exercises.make_packed,
        exercises.multiply_packed,
    )
    assert bool(fault) == bool(change[0]), fault


@cases(
    "change, options",
    (("", ""), {}),
    (("", ""), {"shares": 3}),
    (("low, even.T", "low, odd.T"), {}),
    (("inside & (tokens < M)", "inside & (tokens <= M)"), {}),
    (("(share + 1) // SHARES", "(share + 1) // SHARES - 1"), {"shares": 3}),
)
def test_few_tokens(change, options):
    fault = lesson.check_launch(
        prepare("few_tokens", change, **options),
        exercises.TOKEN_CASES,
        exercises.make_tokens,
        exercises.multiply_tokens,
    )
    assert bool(fault) == bool(change[0]), fault


def test_scaled_dot_decodes_on_hopper():
    report = lesson.compile_launch(
        prepare("scaled_dot"), exercises.make_packed(exercises.EXAMPLE, "cpu"), "sm_90a"
    )
    assert report.launchable and "bf16" in report.ptx.lower(), report.reason


def test_decoding_in_lanes_moves_no_weight():
    lanes = prepare("decode_in_lanes", shares=3)
    report = lesson.compile_launch(lanes, exercises.make_tokens((16, 128, 512), "cpu"), "sm_90a")
    assert report.launchable and report.smem == 4, report.reason  # the count of arrivals
    counts = {name: report.sass.count(name) for name in ("HMMA", "STS", "LDS", "SHFL")}
    assert counts == {"HMMA": 16, "STS": 1, "LDS": 1, "SHFL": 0}


@cases(
    "change",
    ("", ""),
    ("permute([2, 3, 1, 4, 0])", "permute([3, 2, 1, 4, 0])"),
    ("permute([0, 2, 3, 1, 4])", "permute([0, 2, 1, 3, 4])"),
    ("step * 4 + block", "block"),
    ("(share + 1) // SHARES", "(share + 1) // SHARES - 1"),
    ("parts + other * 1024", "parts"),
)
def test_lanes(change):
    gluon_emulator.enable()
    fault = lesson.check_launch(
        prepare("decode_in_lanes", change, shares=2),
        exercises.LANE_CASES,
        exercises.make_tokens,
        exercises.multiply_tokens,
    )
    assert bool(fault) == bool(change[0]), fault


@cases(
    "check, name, change",
    ("places", "my_places", ("[2, 5, 3, 1, 4, 0]", "[2, 4, 3, 1, 5, 0]")),
    ("value", "my_value", ("<< 22", "<< 23")),
    ("value", "my_value", ("(code & 8) != 0", "code > 7")),
    ("decode", "my_decode", ("value_of(byte >> 4)", "value_of(byte)")),
    ("decode", "my_decode", ("tokens[None, :] * N", "tokens[None, :] * BLOCK_N")),
    ("decode", "my_decode", ("odd.T, acc))", "odd.T, acc)).to(tl.bfloat16).to(tl.float32)")),
)
def test_a_wrong_answer_fails(check, name, change):
    lanes = define(VERSIONS, "prepare_decode_in_lanes") if check == "places" else []
    with pytest.raises(AssertionError):
        getattr(exercises, f"check_{check}")(*define(SOLUTIONS, name, change=change), *lanes)
