"""The exercises' checks: the solutions pass, and each planted wrong answer fails; so do faults in the lesson's kernels.

The kernels run in the emulator.
"""

import re

import pytest
from cases import cases

from ch14.attention_gluon.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.runtime import device

pytestmark = [pytest.mark.compile, pytest.mark.skipif(device.current().has_tma, reason="runs without a GPU")]
SOLUTIONS, _, LESSON = NOTEBOOKS = [ROOT / "notebooks" / f"{name}.ipynb" for name in exercises.NOTEBOOKS]


def define(paths, names, change=("", "")):
    """Return names of notebooks' cells; one line is changed."""
    texts = [text for path in paths for text in lesson.notebook_texts(path)]
    text = "\n\n".join(triton_cell.collect(texts, "exercises", *names))
    assert change[0] in text
    return lesson.define(text.replace(*change))


@pytest.fixture(scope="module")
def kernels():
    return exercises.define_kernels()


def test_a_program_per_tile_is_not_persistent(kernels):
    with pytest.raises(AssertionError, match="12 programs for 3 SMs"):
        exercises.check_persistent(kernels["prepare_overlapped"])


@cases(
    "change, said",
    (("1 - use // STAGES % 2", "1 - use % 2"), "stages?, "),
    (
        ("expect(k_full.index(stage), k_desc.block_type.nbytes)", "expect(k_full.index(stage), 2)"),
        "nothing moves|before TMA has landed|one too many",
    ),
    (("v_full.index(stage), v_tiles.index(stage)", "v_full.index(stage), k_tiles.index(stage)"), "stages?, "),
    (
        (
            "    row = blocks * k_desc.block_type.shape[1]",
            "    row = (blocks - 1) * k_desc.block_type.shape[1]",
        ),
        "wrong",
    ),
    (("kv_head, row, 0], k_full", "0, row, 0], k_full"), "wrong"),
    (("    row = blocks *", "    use = 0\n    row = blocks *"), "in `persistent`, "),
)
def test_a_wrong_producer_fails(kernels, change, said):
    with pytest.raises(AssertionError, match=said):
        exercises.check_producer(
            define([SOLUTIONS], ["my_load_blocks"], change)["my_load_blocks"], kernels["with_producer"]
        )


@cases(
    "version, change, said",
    ("one_group", ("mbarrier.wait(full, use % 2)", "mbarrier.wait(full, 0)"), "before TMA has|still lands"),
    ("with_producer", ("mbarrier.arrive(v_empty.index(stage), count=1)", ""), "nothing moves any more"),
    (
        "two_consumers",
        ("make_ring(k_desc, v_desc, STAGES, 2)", "make_ring(k_desc, v_desc, STAGES, 1)"),
        "one too many|overwrites a tile|nothing moves",
    ),
    ("overlapped", ("warpgroup_mma_wait(1, [s])", "warpgroup_mma_wait(2, [s])"), "before warpgroup_mma_wait"),
    (
        "overlapped",
        ("q.store(finish_tile(", "fence_async_shared = lambda: None\n    q.store(finish_tile("),
        "without fence_async_shared",
    ),
    ("persistent", ("mbarrier.arrive(q_empty, count=1)", "pass"), "nothing moves any more"),
    (
        "persistent",
        ("    use += 1\n            q_use += 1\n    tma", "    q_use += 1\n    tma"),
        "in the emulator",
    ),
)
def test_a_fault_in_a_kernel_of_the_lesson_is_found(version, change, said):
    found = define(NOTEBOOKS, [version, f"prepare_{version}"], change)
    assert re.search(said, exercises.check_attention(found[f"prepare_{version}"]))


def test_the_last_kernel_runs_with_one_stage_and_with_three(kernels):
    """The solution has two stages; its check runs that."""
    for stages in (1, 3):

        def prepare(q, k, v, out, causal=False, stages=stages):
            return kernels["launch"](
                kernels["persistent"], q, k, v, out, causal, 128, 128, boxes=2, persistent=True, STAGES=stages
            )

        assert exercises.check_attention(prepare) == "", stages
