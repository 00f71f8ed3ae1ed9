"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import functools

import pytest
from cases import cases
from cells import define

from ch14.gemm.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "08_ch14_gemm.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "08_ch14_gemm.ipynb")
ANSWERS = {
    "Exercise 2": ["mended_pointers"],
    "Exercise 3": ["my_gemm"],
    "Exercise 4": ["my_coordinates"],
    "Exercise 5": ["whole_gemm", "prepare_whole"],
}
pytestmark = pytest.mark.compile


def prepare(name, change=("", ""), **options):
    kernel, function = define(VERSIONS, f"gemm_{name}", f"prepare_{name}", change=change)
    return functools.partial(function, **options)


@cases(
    "name, options",
    ("pointers", {}),
    ("descriptors", {"num_stages": 3}),
    ("grouped", {"group_m": 2}),
    ("subtiled", {"epilogue_subtile": 2}),
    ("persistent", {"num_stages": 3, "epilogue_subtile": 4, "programs_per_sm": 2}),
    ("early", {}),
    ("once", {"num_stages": 3, "group_m": 8, "epilogue_subtile": 4, "pdl": True}),
)
def test_the_versions_are_right_and_start_on_hopper(name, options):
    assert exercises.check_version(prepare(name, **options)) == ""
    report = lesson.compile_launch(prepare(name, **options), exercises.make_inputs((256, 256, 256)), "sm_90a")
    assert report.launchable and not report.spills and report.counts["wgmma"], report.reason


@pytest.mark.planted
@cases(
    "name, change",
    ("pointers", ("(rows[:, None] < M) & (at[None, :] < K)", "rows[:, None] < M")),
    ("descriptors", ("tl.program_id(0) % tiles_n", "tl.program_id(0) // tiles_n")),
    ("grouped", ("min(tiles_m - first_m, GROUP_M)", "GROUP_M")),
    ("subtiled", ("n + 3 * width", "n + 2 * width")),
    ("subtiled", ("(0, 2, 1)", "(0, 1, 2)")),
    ("persistent", ("tile_id_c = tl.program_id(0) - PROGRAMS", "tile_id_c = tl.program_id(0)")),
    ("persistent", ("PROGRAMS, flatten=True", "PROGRAMS + 1, flatten=True")),
)
def test_a_wrong_version_fails(name, change):
    assert exercises.check_version(prepare(name, change))


@pytest.mark.planted
@cases(
    "num_stages, epilogue_subtile, reason",
    (3, 1, "1 program per SM"),
    (2, 1, "three stages"),
    (3, 4, "fewer parts"),
    (9, 2, "shared memory"),
)
def test_a_wrong_choice_fails(num_stages, epilogue_subtile, reason):
    options = {"num_stages": num_stages, "epilogue_subtile": epilogue_subtile}
    with pytest.raises(AssertionError, match=reason):
        exercises.check_fit(*define(VERSIONS, "prepare_persistent"), options)


ACC = "        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n        for step"
ONCE = (
    "        if tile_id == tl.program_id(0):\n"
    "            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n        for step"
)
TILES = "tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True)"
RASTER = "within // columns, first_n + within % columns"


@pytest.mark.planted
@cases(
    "exercise, change, reason",
    ("Exercise 2", ("tl.cdiv(N, BLOCK_N)", "N // BLOCK_N"), ""),
    ("Exercise 2", ("(rows[:, None] < M) & (at[None, :] < K)", "at[None, :] < K"), "outside of its tensors|"),
    ("Exercise 3", ("a_desc.load([k, m]).T", "a_desc.load([m, k]).T"), ""),
    ("Exercise 4", ("min(tiles_n - first_n, GROUP_N)", "GROUP_N"), "nobody computes"),
    ("Exercise 4", (RASTER, "tile_id // tiles_n, tile_id % tiles_n"), "first group"),
    ("Exercise 4", (RASTER, "within % tiles_m, first_n + within // tiles_m"), "share row 0"),
    ("Exercise 5", ("tiles_m * tiles_n, PROGRAMS", "tiles_m * tiles_n - 1, PROGRAMS"), "not finite"),
    ("Exercise 5", (TILES, "range(0, tiles_m * tiles_n)"), "several programs compute tile 0"),
    (
        "Exercise 5",
        (TILES, "range(tl.program_id(0) * 4, min(tiles_m * tiles_n, tl.program_id(0) * 4 + 4 * PROGRAMS))"),
        "several programs|not finite",
    ),
    (
        "Exercise 5",
        (TILES, "range(tl.program_id(0) * 4, min(tiles_m * tiles_n, tl.program_id(0) * 4 + 4))"),
        "3 programs must share 9 tiles evenly, but they have 4, 4, 1",
    ),
    ("Exercise 5", ("whole_gemm[(programs,)]", "whole_gemm[(programs + 1,)]"), "several|evenly"),
    ("Exercise 5", (ACC, ONCE), ""),
    ("Exercise 5", ("range(tl.cdiv(K, BLOCK_K))", "range(3)"), "where large sums cancel"),
    ("Exercise 5", ("num_stages=3", "num_stages=1"), "three stages"),
    ("Exercise 5", ("num_stages=3", "num_stages=8"), "shared memory"),
)
def test_a_wrong_answer_fails(exercise, change, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.CHECKS[exercise](*define(SOLUTIONS, *ANSWERS[exercise], change=change))


def test_who_computes_a_tile_is_judged_in_a_process_of_its_own_where_there_is_a_gpu():
    """A process that compiles cannot interpret."""
    wrong = define(SOLUTIONS, *ANSWERS["Exercise 5"], change=(TILES, "range(0, tiles_m * tiles_n)"))
    with pytest.raises(AssertionError, match="several programs compute tile 0, .* .in the interpreter."):
        lesson.check_interpreted(exercises.check_whole, *wrong)
