"""The kernels of the notebook compile to native instructions, the solutions pass, and wrong answers fail."""

import functools

import pytest
from cases import cases

from ch14.blackwell_plan.lesson import exercises
from ch14.blockscaled.lesson import figures, smem_planner
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.runtime import device

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "17_ch14_blackwell_plan.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "17_ch14_blackwell_plan.ipynb")
pytestmark = pytest.mark.compile


def define(texts, *names, change=("", "")):
    """Return functions of the cells, in which one text is changed, with all that they use."""
    code = "\n\n\n".join(triton_cell.collect(texts, *names))
    assert change[0] in code
    return [lesson.define(code.replace(*change), {"exercises": exercises})[name] for name in names]


def prepare(texts, name, **options):
    _, function = define(texts, f"scaled_{name}", f"prepare_{name}")
    return functools.partial(function, **options) if options else function


def test_what_the_compiler_makes_of_each_version():
    versions = {
        (name, form): (prepare(VERSIONS, name, **options), form, "sm_100a")
        for form in ("mxfp8_e4m3", "mxfp4", "nvfp4")
        for name, options in (("rows", {}), ("tiles", {}), ("loop", {"block_n": 128}))
    }
    rows = {
        (row["name"], row["format"]): row for row in exercises.compile_versions(versions, ["name", "format"])
    }
    for (name, _), row in rows.items():
        assert row["status"] == "ok" and "block_scale" in row["instruction"], row
        assert bool(row["scales copied"]) == (name != "rows")
        assert row["TMEM columns"] == (512 if name == "loop" else 256)


def test_two_wide_accumulators_do_not_fit():
    versions = {
        (form,): (prepare(VERSIONS, "loop"), form, "sm_100a") for form in ("mxfp8_e4m3", "mxfp4", "nvfp4")
    }
    rows = exercises.compile_versions(versions, ["format"])
    assert [row["status"] for row in rows] == ["rejected"] * 3
    assert all("columns" in row["reason"] for row in rows)


def test_pictures_say_what_they_show():
    rows = [{"test": "test 1", "plan": "greedy", "hidden us": 0.8, "latency us": 1.0}]
    assert figures.draw_in_flight(rows).description


@cases(
    "options, reason",
    ({"stages": 3}, "columns"),
    ({"stages": 4}, "shared memory"),
    ({"block_n": 128, "stages": 3}, "four stages"),
)
def test_a_wrong_choice_fails(options, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.check_two_accumulators(prepare(VERSIONS, "loop"), options)


def test_one_accumulator_is_not_two():
    with pytest.raises(AssertionError, match="one accumulator"):
        exercises.check_two_accumulators(prepare(VERSIONS, "tiles"), {"stages": 4})


@cases(
    "check, name, change",
    ("load", "mended_scales", ("trans(0, 3, 2, 1, 4)", "trans(0, 2, 3, 1, 4)")),
    ("load", "mended_scales", ("group // 4", "group")),
    ("store", "my_store", ("trans(0, 3, 2, 1, 4)", "trans(0, 3, 1, 2, 4)")),
    ("load", "mended_scales", ("row // 128, group", "0, group")),
    ("store", "my_store", ("group // 4", "0")),
)
def test_a_wrong_answer_fails(check, name, change):
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, TypeError)):
        getattr(exercises, f"check_{check}")(*define(SOLUTIONS, name, change=change))


@cases(
    "change, reason",
    (("n, k // GROUP, BLOCK_N", "m, k // GROUP, BLOCK_N"), "wrong"),
    (("% (N // BLOCK_N)", "% (N // BLOCK_M)"), "not finite"),
    (("FORMAT, acc)", "FORMAT, acc).to(tl.bfloat16).to(tl.float32)"), "mxfp4: .* wrong"),
)
def test_a_wrong_gemm_fails(change, reason):
    if device.current().has_tma and "// BLOCK_M" in change[1]:
        pytest.skip("on a GPU the tiles are square")
    with pytest.raises(AssertionError, match=reason):
        exercises.check_gemm(*define(SOLUTIONS, "my_gemm", change=change))


def test_a_wrong_plan_fails():
    with pytest.raises(AssertionError, match="widest"):
        exercises.check_widest(lambda ab_stages, **formats: (256, 128))
    tiles = [(m, n) for m in (128, 256) for n in (64, 128, 192, 256)]

    def find_widest(stages, tiles, **formats):
        options = dict(formats, ab_stages=stages, c_stages=2)
        return [t for t in tiles if smem_planner.plan(smem_planner.Blackwell(t, (2, 1), **options)).fits][-1]

    exercises.check_widest(lambda stages, **formats: list(find_widest(stages, tiles, **formats)))
    for widest in (
        lambda stages, **formats: find_widest(8, tiles, **formats),
        lambda stages, **formats: find_widest(stages, tiles),
        lambda stages, **formats: find_widest(stages, [t for t in tiles if t[1] != 192], **formats),
    ):
        with pytest.raises(AssertionError, match="widest"):
            exercises.check_widest(widest)
    with pytest.raises(AssertionError, match="columns"):
        exercises.check_scale_columns(lambda n, k, group, instruction_k: 16 * (1 + -(-n // 128)))
    with pytest.raises(AssertionError, match="columns"):
        exercises.check_scale_columns(lambda n, k, group, instruction_k: 8 * (k // instruction_k))
    with pytest.raises(AssertionError, match="columns"):
        exercises.check_scale_columns(
            lambda n, k, group, instruction_k: 4 * (1 + n // 128) * (k // instruction_k)
        )
    assert "not" in exercises.check_plan(lambda n, ctas, k, bits, group, c_bytes: (5, 4))
