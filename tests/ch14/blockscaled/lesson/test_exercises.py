"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import functools

import pytest
from cases import cases
from cells import define

from ch14.blockscaled.lesson import exercises
from ch14.fp8_gemm.lesson.verification import fp8_operands
from tilelab import ROOT
from tilelab.cells import lesson

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "15_ch14_blockscaled.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "15_ch14_blockscaled.ipynb")
pytestmark = pytest.mark.compile


def prepare(name, change=("", ""), kernel=None, **options):
    _, function = define(VERSIONS, kernel or name, f"prepare_{name}", change=change)
    return functools.partial(function, **options) if options else function


@cases(
    "name, options",
    ("by_block", {}),
    ("by_block", {"block_m": 64, "warps": 4}),
    ("scratch_ahead", {}),
    ("scales_by_tma", {}),
    ("split_k", {}),
    ("split_k", {"splits": 3}),
)
def test_the_versions_are_right_and_start_on_hopper(name, options):
    assert exercises.check_version(prepare(name, **options)) == ""
    report = lesson.compile_launch(
        prepare(name, **options), fp8_operands(*exercises.EXAMPLE, "cpu"), "sm_90a"
    )
    assert report.launchable and not report.spills and report.counts["wgmma"], report.reason


@cases(
    "name, change, options",
    ("by_block", ("n // 128 * stride_b", "0 * stride_b"), {}),
    ("by_block", ("acc += scratch * (row_scale * tile_scale)[:, None]", "acc += scratch * tile_scale"), {}),
    ("scratch_ahead", ("    acc += last * last_scale[:, None]  # +\n    c_desc", "    c_desc"), {}),
    ("scales_by_tma", ("scale_a_desc.load([step, m])", "scale_a_desc.load([0, m])"), {}),
    ("split_k", ("* (split + 1) // SPLITS", "// SPLITS * (split + 1)"), {"splits": 3}),
)
def test_a_wrong_version_fails(name, change, options):
    assert exercises.check_version(prepare(name, change, **options))


@cases(
    "change",
    ("", ""),
    ("tl.maximum(tl.max(tl.abs(elements), 1), 1e-4)", "tl.max(tl.abs(elements), 1)"),
    ("block * stride + rows, tl", "block + rows * 2, tl"),
)
def test_the_quantiser_has_the_bits_of_the_definition(change):
    (kernel,) = define(VERSIONS, "quantise_rows", change=change)
    if not change[0]:
        assert "definition" in exercises.check_rows_quantiser(kernel)
        return
    with pytest.raises(AssertionError):
        exercises.check_rows_quantiser(kernel)


def test_two_launches_of_a_split_give_the_same():
    """The counters are set back, and the parts are added in one order."""
    operands = exercises.make_products((70, 256, 640), exercises._where())
    launch = prepare("split_k", splits=3)(*operands)
    launch()
    first = operands[-1].clone()
    operands[-1].fill_(float("nan"))
    launch()
    assert (first == operands[-1]).all()


@cases(
    "change",
    ("", ""),
    ("bias + n +", "bias +"),
    ("n // 32 + tl", "0 + tl"),
    (">> 23) - 8", ">> 23) - 6"),
    ("(254 - scale)", "(253 - scale)"),
    ("x / (1 + tl.exp(-x))", "x / (1 + tl.exp(x))"),
)
def test_the_epilogue_quantises(change):
    fault = exercises.check_epilogue(prepare("fused", change))
    assert bool(fault) == bool(change[0]), fault


def test_passes_give_what_the_epilogue_gives():
    assert exercises.check_epilogue(prepare("passes", kernel="scales_by_tma")) == ""


def test_six_programs_are_four_and_more():
    options = {"block_m": 64, "block_n": 32, "warps": 4, "stages": 3}
    exercises.check_fit(*define(SOLUTIONS, "prepare_by_block"), options)


@cases(
    "options, reason",
    ({"block_m": 64, "warps": 4}, "3 programs per SM"),
    ({"warps": 4}, "spilled"),
    ({"block_m": 64, "block_n": 64, "warps": 4, "stages": 2}, "three stages"),
    ({"block_m": 64, "block_n": 64, "warps": 4, "stages": 6}, "programs per SM"),
    ({"stages": 9}, "shared memory"),
)
def test_a_wrong_choice_fails(options, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.check_fit(*define(VERSIONS, "prepare_by_block"), options)


@cases(
    "check, name, change",
    ("index", "mended_block", ("n // 128 * stride_b", "tile_n * stride_b")),
    ("index", "mended_block", ("n // 128 * stride_b", "tile_m * stride_b")),
    ("rows", "my_scales", ("step * stride_b + columns", "step * stride_b + n // 128")),
    (
        "rows",
        "my_scales",
        ("row_scale[:, None] * column_scale[None, :]", "row_scale[None, :] * column_scale[:, None]"),
    ),
    ("split", "my_split", ("steps * (split + 1) // SPLITS", "steps // SPLITS * (split + 1)")),
    (
        "split",
        "my_split",
        (
            "range(steps * split // SPLITS, steps * (split + 1) // SPLITS)",
            "range(0, steps if split == 0 else 0)",
        ),
    ),
    ("split", "my_split", ("(split * M + rows[:, None])", "(split * BLOCK_M + rows[:, None])")),
    ("gated", "my_gated", ("gate, value = ", "value, gate = ")),
    ("gemm", "my_gemm", ("acc += scratch *", "acc = acc + scratch; acc *=")),
    ("gemm", "my_gemm", ("n // 128 * stride_b", "n // BLOCK_N * stride_b")),
    ("gemm", "my_gemm", ("step * stride_a + rows", "step + rows * stride_a")),
    ("gemm", "my_gemm", ("scratch * (row", "scratch.to(tl.bfloat16).to(tl.float32) * (row")),
    ("gemm", "my_gemm", ("c_desc.store([m, n]", "c_desc.store([n, m]")),
)
def test_a_wrong_answer_fails(check, name, change):
    with pytest.raises(AssertionError):
        getattr(exercises, f"check_{check}")(*define(SOLUTIONS, name, change=change))
