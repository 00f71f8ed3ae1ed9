"""The notebook's kernels and the solution pass their checks, and each planted wrong answer fails."""

import json
import re

import planted
import pytest
import torch
from cases import cases

from ch10.tile_sharing.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic
from tilelab.cells.cuda_magic import make_tensor_map

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
NOTEBOOK = NOTEBOOKS / "04_ch10_tile_sharing.ipynb"
KERNELS = cuda_magic.notebook_kernels(NOTEBOOK)
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "04_ch10_tile_sharing.ipynb")


def changed(kernel, *changes, among=KERNELS, **constants):
    return planted.answer(among, kernel, *changes, **constants)[kernel]


def find_launch(change=("", "")):
    """Return the notebook's function that prepares a launch of the search, with a text replaced."""
    names = {"make_tensor_map": make_tensor_map}
    cells = ("".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"])
    text = next(text for text in cells if "def launch_search" in text)
    exec(re.search(r"(?ms)^def launch_search\(.*?^    return prepare$", text)[0].replace(*change), names)
    return names["launch_search"]


def run_check(kernel, launch=None, **options):
    """Return what the ladder's check says of a version of the notebook."""
    if kernel.name.startswith("nearest"):
        cluster = options.get("cluster", 1 if kernel.name == "nearest" else 2)
        shared = options.get("shared", cluster > 1)
        threads = 288 if kernel.name == "nearest_released" else 256
        return exercises.check_search((launch or find_launch())(kernel, cluster, shared, threads))
    share = options.get("share", 1 if kernel.name == "add_each" else 64)
    return exercises.check_sum(exercises.by_share(kernel, share))


@cases(
    "kernel, constants, options",
    ("nearest_multicast", {"CLUSTER": 4}, {"cluster": 4}),
    ("nearest_multicast", {"SHARED": 0}, {"shared": False}),
    ("nearest_released", {"CLUSTER": 4}, {"cluster": 4}),
    ("nearest_released", {"SHARED": 0}, {"shared": False}),
    ("add_partial", {"SHARE": 4}, {"share": 4}),
)
def test_the_other_constants_pass(kernel, constants, options):
    assert run_check(changed(kernel, **constants), **options) == ""


@cases(
    "kernel, change",
    ("nearest", ("unit ^ threadIdx.x % 8", "unit")),
    ("nearest_multicast", ("if (tile > 0) cluster_wait();", "")),
    ("nearest_multicast", ("if (FENCE)", "if (!FENCE)")),
    ("nearest_multicast", ("BYTES);  //", "ROWS * 128);  //")),
    ("nearest_multicast", ("place + part * ROWS * 128", "place")),
    ("nearest_released", ("8 * CLUSTER", "8")),
    ("add_partial", ("i / STAGES % 2", "0")),
)
def test_a_wrong_version_fails(kernel, change):
    assert run_check(changed(kernel, change))


def test_a_fill_of_zero_would_be_a_row_of_the_table():
    assert run_check(KERNELS["nearest"], find_launch(('"nan"', '"zero"')))


# A wrong multicast is a race as well, which the emulator may name before the wrong score is known.
RACE = "may still be landing|where a load of the copy engine writes|initialises without a barrier between"
# The four parts of the solution of exercise 5 that wrong answers change.
FIRST = "    __syncwarp();\n    cluster_arrive();\n    cluster_wait();\n"
REFILL = """        __syncwarp();
        if (tile > 0) cluster_wait();
        if (leader && tile > 0) load(tile - 1 + STAGES);
        __syncwarp();
        cluster_arrive();
"""
LAST = "    }\n    cluster_wait();\n"
AT_ONCE = """        {}
            __syncwarp();
            cluster_arrive();
            cluster_wait();
            if (leader) load(tile + STAGES);
        }}
"""
HAS_NO_BARRIER = (
    "block 1 of the cluster has initialised no mbarrier .*: cluster_arrive and cluster_wait are missing"
)


@cases(
    "changes, fault",
    # the announced bytes
    ([("(barrier, BYTES)", "(barrier, SHARE)")], "the score of no row: its row|4096 bytes were not"),
    ([("(barrier, BYTES)", "(barrier, CLUSTER * BYTES)")], "waits for ever .* still lacks 8192 bytes"),
    # the mask: the own block, right for two blocks only, one too many
    ([("(1 << CLUSTER) - 1", "1 << rank")], "waits for ever .* still lacks 4096 bytes"),
    ([("(1 << CLUSTER) - 1", "3")], "4 queries, 40 rows: (line [0-9]+: )?block 2, .* still lacks 8192 bytes"),
    ([("(1 << CLUSTER) - 1", "(2 << CLUSTER) - 1")], "names block 2 of a cluster of 2"),
    # the place in the stage
    ([("stage + rank * SHARE", "stage")], r"out\[0\]\[0\], is .*, the score of row 32"),
    ([("stage + rank * SHARE", "stage + rank * BYTES")], "the score of no row: its row was not in its place"),
    # the row of the table
    ([(" + rank * (ROWS / CLUSTER)", "")], r"out\[0\]\[32\], is .*, the score of row 0"),
    # before the first load: only the own block, after the load
    ([(FIRST, "    __syncthreads();\n")], HAS_NO_BARRIER),
    ([(FIRST, ""), ("++tile) load(tile);\n", "++tile) load(tile);\n" + FIRST)], HAS_NO_BARRIER),
    # before a refill: no wait, the wait behind the load, the tile that is being read, no refill
    (
        [("if (leader && tile > 0) load(tile - 1 + STAGES)", "if (leader) load(tile + STAGES)")],
        "the score of row 288: its stage was refilled before",
    ),
    # at the end: a wait too many
    ([(REFILL + LAST, AT_ONCE.format("{") + LAST)], "calls cluster_wait without cluster_arrive"),
    # what is given: the parity
    # who calls: one thread of each block meets the cluster; every thread loads
    ([(FIRST, "    __syncwarp();\n    if (leader) cluster_arrive(), cluster_wait();\n")], "waits for ever"),
    ([("leader && tile < STAGES", "tile < STAGES")], "gets more arrivals in a phase"),
)
def test_a_wrong_multicast_fails_and_says_what_is_wrong(changes, fault):
    torch.manual_seed(0)  # with other numbers, two rows could have the same score
    with pytest.raises(AssertionError, match=rf"^CLUSTER=\d, .*({fault}|{RACE}).* \(in the emulator\)"):
        exercises.check_scores(changed("score_rows", *changes, among=SOLUTIONS))


@cases(
    "change",
    (REFILL + LAST, AT_ONCE.format("{") + "    }\n"),
    (LAST, "    }\n"),  # a block may end before its multicast has landed elsewhere
    (REFILL + LAST, AT_ONCE.format("if (tile + STAGES < tiles) {") + "    }\n" + FIRST),
)
def test_a_multicast_may_refill_at_once(change):
    exercises.check_scores(changed("score_rows", change, among=SOLUTIONS))


def test_scores_without_a_multicast_do_not_count():
    source = SOLUTIONS["score_rows"].source
    begin, end = source.index("        tma_load_2d_multicast"), source.index("    };\n")
    loads = """
        for (int part = 0; part < CLUSTER; ++part)
            tma_load_2d(stage + part * SHARE, table, 0, tile * ROWS + part * (ROWS / CLUSTER), barrier);
"""
    with pytest.raises(AssertionError, match="the scores are right, but no load is a multicast"):
        exercises.check_scores(changed("score_rows", (source[begin:end], loads), among=SOLUTIONS))


def test_scores_run_nowhere_without_the_emulator(monkeypatch):
    monkeypatch.setattr(emulator, "is_available", lambda: False)
    with pytest.raises(AssertionError, match=r"not run: the emulator needs g\+\+"):
        exercises.check_scores(SOLUTIONS["score_rows"])


def test_the_lesson_gives_the_signature_of_the_solution():
    given, solved = (kernels["score_rows"].source for kernels in (KERNELS, SOLUTIONS))
    begin = solved.index('extern "C"')
    signature = solved[begin : solved.index("{", begin) + 1]
    found = given.partition('extern "C"')[2]
    assert found == signature.partition('extern "C"')[2] + "\n    // your kernel\n}"
    assert len(solved.splitlines()) <= 50
    assert SOLUTIONS["score_rows"].sass("UTMALDG.*MULTICAST") and SOLUTIONS["score_rows"].sass("UCGABAR_WAIT")


def test_a_block_that_announces_only_its_own_share_reads_too_early():
    own_share = changed("nearest_multicast", ("expect_tx(barrier, BYTES)", "expect_tx(barrier, ROWS * 128)"))
    assert re.search("were not announced|may still be landing", run_check(own_share))
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    said = next(
        cell["outputs"][0]["text"] for cell in cells if "launch_search(own_share" in "".join(cell["source"])
    )
    assert "ended although 16384 bytes were not announced" in "".join(said)  # as the exercise says


def test_the_sweep_of_the_gemm_says_for_how_many_a_multicast_is_faster(monkeypatch):
    speeds = {"a · spec": 1.0, "a · spec · cluster of 2": 1.1, "b · spec": 0.8}
    speeds |= {"b · spec · cluster of 2": 0.6, "c": 0.9}
    rows = [{"config": name, "ratio": ratio} for name, ratio in speeds.items()]
    found = {"rows": rows, "device": {"name": "H", "capability": [9, 0]}, "recorded": "2026-11-28"}
    monkeypatch.setattr(exercises.results, "load", lambda name: found)
    said = exercises.describe_gemm_clusters()
    assert "faster in 1 of 2 configurations, 0.75 to 1.10 × the same without (the largest gain has a)" in said
    assert "the fastest with 1.10 × cuBLAS, without 1.00 ×; recorded on H, 2026-11-28" in said
