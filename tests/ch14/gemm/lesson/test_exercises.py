"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import functools

import pytest

from ch14.gemm.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell

NOTEBOOKS = ROOT / "notebooks"
VERSIONS = lesson.notebook_texts(NOTEBOOKS / "ch14_gemm.ipynb")
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "ch14_gemm.ipynb")
pytestmark = pytest.mark.compile


def define(texts, *names, change=("", "")):
    """Return functions of the cells, in which one text is changed, with all that they use."""
    code = "\n\n\n".join(triton_cell.collect(texts, *names))
    assert change[0] in code
    return [lesson.define(code.replace(*change))[name] for name in names]


def prepare(name, change=("", ""), **options):
    kernel, function = define(VERSIONS, f"gemm_{name}", f"prepare_{name}", change=change)
    return functools.partial(function, **options)


@pytest.mark.parametrize(
    "name, options",
    [
        ("pointers", {}),
        ("descriptors", {"num_stages": 3}),
        ("grouped", {"group_m": 2}),
        ("subtiled", {"epilogue_subtile": 2}),
        ("subtiled", {}),
        ("persistent", {}),
        ("persistent", {"num_stages": 3, "epilogue_subtile": 4, "programs_per_sm": 2}),
        ("early", {}),
        ("once", {}),
        ("once", {"num_stages": 3, "group_m": 8, "epilogue_subtile": 4, "pdl": True}),
    ],
)
def test_the_versions_are_right_and_start_on_hopper(name, options):
    assert exercises.check_version(prepare(name, **options)) == ""
    report = lesson.compile_launch(prepare(name, **options), exercises.make_inputs((256, 256, 256)), "sm_90a")
    assert report.launchable and not report.spills and report.counts["wgmma"], report.reason


@pytest.mark.planted
@pytest.mark.parametrize(
    "name, change",
    [
        ("pointers", ("(rows[:, None] < M) & (at[None, :] < K)", "rows[:, None] < M")),
        ("pointers", ("mask=(rows[:, None] < M) & (columns[None, :] < N))", "mask=rows[:, None] < M)")),
        ("descriptors", ("tl.program_id(0) % tiles_n", "tl.program_id(0) // tiles_n")),
        ("grouped", ("min(tiles_m - first_m, GROUP_M)", "GROUP_M")),
        ("subtiled", ("n + 3 * width", "n + 2 * width")),
        ("subtiled", ("(0, 2, 1)", "(0, 1, 2)")),
        ("persistent", ("tile_id_c = tl.program_id(0) - PROGRAMS", "tile_id_c = tl.program_id(0)")),
        ("persistent", ("PROGRAMS, flatten=True", "PROGRAMS + 1, flatten=True")),
        ("early", ("tile_id_c += PROGRAMS", "tile_id_c += 1")),
    ],
)
def test_a_wrong_version_fails(name, change):
    assert exercises.check_version(prepare(name, change))


def test_the_solutions_pass():
    exercises.check_fit(*define(SOLUTIONS, "prepare_persistent"), {"num_stages": 3, "epilogue_subtile": 2})
    exercises.check_masks(*define(SOLUTIONS, "mended_pointers"))
    exercises.check_loop(*define(SOLUTIONS, "my_gemm"))
    exercises.check_raster(*define(SOLUTIONS, "my_coordinates"))
    exercises.check_persistent(*define(SOLUTIONS, "my_persistent"))


@pytest.mark.planted
@pytest.mark.parametrize(
    "options, reason",
    [
        ({"num_stages": 3, "epilogue_subtile": 1}, "1 program per SM"),
        ({"num_stages": 2, "epilogue_subtile": 1}, "three stages"),
        ({"num_stages": 4, "epilogue_subtile": 2}, "1 program per SM"),
        ({"num_stages": 3, "epilogue_subtile": 4}, "fewer parts"),
        ({"num_stages": 9, "epilogue_subtile": 2}, "shared memory"),
    ],
)
def test_a_wrong_choice_fails(options, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.check_fit(*define(VERSIONS, "prepare_persistent"), options)


@pytest.mark.planted
@pytest.mark.parametrize(
    "change",
    [
        ("tl.cdiv(N, BLOCK_N)", "N // BLOCK_N"),
        ("(rows[:, None] < M) & (at[None, :] < K)", "rows[:, None] < M"),
        ("(at[None, :] < K), other=0)", "(at[None, :] <= K), other=0)"),
    ],
)
def test_masks_that_are_not_mended_fail(change):
    with pytest.raises(AssertionError):
        exercises.check_masks(*define(SOLUTIONS, "mended_pointers", change=change))


@pytest.mark.planted
@pytest.mark.parametrize(
    "change",
    [
        ("a_desc.load([k, m]).T", "a_desc.load([m, k]).T"),
        (", acc)", ")"),
        ("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K, BLOCK_K)"),
        ("[m, n], acc", "[n, m], acc"),
    ],
)
def test_a_wrong_loop_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_loop(*define(SOLUTIONS, "my_gemm", change=change))


@pytest.mark.planted
@pytest.mark.parametrize(
    "change, reason",
    [
        (("min(tiles_n - first_n, GROUP_N)", "GROUP_N"), "nobody computes"),
        (
            ("within // columns, first_n + within % columns", "tile_id // tiles_n, tile_id % tiles_n"),
            "first group",
        ),
        (
            (
                "within // columns, first_n + within % columns",
                "within % tiles_m, first_n + within // tiles_m",
            ),
            "share row 0",
        ),
    ],
)
def test_a_wrong_raster_fails(change, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.check_raster(*define(SOLUTIONS, "my_coordinates", change=change))


@pytest.mark.planted
@pytest.mark.parametrize(
    "change",
    [
        ("tiles_n, PROGRAMS)", "tiles_n - 1, PROGRAMS)"),
        ("tl.program_id(0), tl.cdiv", "0, tl.cdiv"),
        (
            "        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n        for k",
            "        if tile_id == tl.program_id(0):\n            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n        for k",
        ),
        ("tile_id // tiles_n * BLOCK_M", "tl.program_id(0) // tiles_n * BLOCK_M"),
    ],
)
def test_a_wrong_persistent_loop_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_persistent(*define(SOLUTIONS, "my_persistent", change=change))


@pytest.mark.parametrize(
    "check, name",
    [
        (exercises.check_loop, "my_gemm"),
        (exercises.check_raster, "my_coordinates"),
        (exercises.check_persistent, "my_persistent"),
    ],
)
def test_a_stub_is_not_solved_yet(check, name):
    with pytest.raises(NotImplementedError):
        check(*define(VERSIONS, name))
