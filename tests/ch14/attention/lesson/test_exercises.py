"""The exercises' checks: the solutions pass, and each planted wrong answer fails; so do faults in the lesson's kernels.

The Gluon kernels run in the emulator, the Triton kernels in Triton's interpreter.
"""

import re

import pytest

from ch14.attention.lesson import exercises
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.runtime import device

pytestmark = [pytest.mark.compile, pytest.mark.skipif(device.current().has_tma, reason="runs without a GPU")]
SOLUTIONS = ROOT / "notebooks" / "solutions" / "ch14_attention.ipynb"


def define(path, names, change=("", "")):
    """Return names of a notebook's cells; one line is changed."""
    text = "\n\n".join(triton_cell.collect(lesson.notebook_texts(path), "exercises", *names))
    assert change[0] in text
    return lesson.define(text.replace(*change))


@pytest.fixture(scope="module")
def kernels():
    return exercises.define_kernels()


def my_prepare(kernels, change=("", "")):
    mine = define(SOLUTIONS, ["my_attention"], change)["my_attention"]
    return lambda q, k, v, out, causal=False: kernels["launch"](
        mine, q, k, v, out, causal, block_m=64, block_n=64
    )


def test_the_solutions_pass(kernels):
    for name in ("mended_load_blocks", "my_load_blocks"):
        exercises.check_producer(define(SOLUTIONS, [name])[name], kernels["with_producer"])
    exercises.check_kernel(my_prepare(kernels))
    exercises.check_merge(define(SOLUTIONS, ["my_merge"])["my_merge"])


@pytest.mark.parametrize(
    "change, said",
    [
        (("1 - use // STAGES % 2", "use // STAGES % 2"), "nothing moves any more"),
        (("1 - use // STAGES % 2", "1 - use % 2"), "stages?, "),
        (("mbarrier.wait(k_empty.index(stage), read_before)", ""), "overwrites a tile|one too many"),
        (("mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)", ""), "nothing moves any more"),
        (
            ("expect(k_full.index(stage), k_desc.block_type.nbytes)", "expect(k_full.index(stage), 2)"),
            "nothing moves|before TMA has landed|one too many",
        ),
        (
            ("v_full.index(stage), v_tiles.index(stage)", "v_full.index(stage), k_tiles.index(stage)"),
            "stages?, ",
        ),
        (
            (
                "    row = blocks * k_desc.block_type.shape[1]",
                "    row = (blocks - 1) * k_desc.block_type.shape[1]",
            ),
            "wrong",
        ),
        (("kv_head, row, 0], k_full", "0, row, 0], k_full"), "wrong"),
        (("        use += 1", "        use = use"), "stages?, "),
        (("    row = blocks *", "    use = 0\n    row = blocks *"), "in `persistent`, "),
        (("    return use", "    return use + 1"), "in `persistent`, "),
        (("    return use", "    return blocks"), "in `persistent`, "),
        (("use % STAGES", "0"), "with 2 stages, "),
        (("row -= k_desc.block_type.shape[1]", "row -= 2 * k_desc.block_type.shape[1]"), "wrong"),
        (("mbarrier.wait(v_empty.index(stage), read_before)", ""), "another load still lands in"),
        (("mbarrier.wait(k_empty", "mbarrier.wait(k_full"), "still being read|nothing moves"),
    ],
)
def test_a_wrong_producer_fails(kernels, change, said):
    with pytest.raises(AssertionError, match=said):
        exercises.check_producer(
            define(SOLUTIONS, ["my_load_blocks"], change)["my_load_blocks"], kernels["with_producer"]
        )


@pytest.mark.parametrize(
    "change",
    [
        ("keys < KEYS", "keys <= KEYS"),
        ("keys <= queries", "keys < queries"),
        ("if CAUSAL:", "if not CAUSAL:"),
        ("acc * rescale[:, None]", "acc"),
        ("row_sum * rescale", "row_sum"),
        ("row_max - new_max", "new_max - row_max"),
        ("row_max = new_max", "row_max = row_max"),
        ("tl.max(s, 1) * scale", "tl.max(s, 1)"),
        # the maximum over scores that the mask removes, a fixed one, and none
        ("tl.max(s, 1) * scale", "tl.max(tl.dot(q, k.T), 1) * scale"),
        ("tl.maximum(row_max, tl.max(s, 1) * scale)", "tl.zeros_like(row_max)"),
        ('s = tl.where(keys < KEYS, s, float("-inf"))', "s = tl.where(keys < KEYS, s, 0)"),
        ('s = tl.where(keys <= queries, s, float("-inf"))', "s = tl.where(keys <= queries, s, -1)"),
    ],
)
def test_a_wrong_middle_of_the_loop_fails(kernels, change):
    with pytest.raises(AssertionError, match="wrong|not finite"):
        exercises.check_kernel(my_prepare(kernels, change))


@pytest.mark.parametrize(
    "change",
    [
        ("* second_factor[:, None]", ""),
        ("first_max - new_max", "new_max - first_max"),
        ("tl.load(sum_a + rows) * first_factor", "tl.load(sum_a + rows)"),
        ("acc / row_sum[:, None]", "acc"),
        # without the common maximum, with one that is too small, and with a mean
        (
            "tl.exp2(first_max - new_max), tl.exp2(second_max - new_max)",
            "tl.exp2(first_max), tl.exp2(second_max)",
        ),
        ("tl.maximum(first_max, second_max)", "tl.minimum(first_max, second_max)"),
        ("tl.maximum(first_max, second_max)", "first_max"),
        ("tl.maximum(first_max, second_max)", "(first_max + second_max) / 2"),
        (
            "first_factor, second_factor = tl.exp2(first_max - new_max), tl.exp2(second_max - new_max)",
            "first_factor, second_factor = new_max * 0 + 1, new_max * 0 + 1",
        ),
    ],
)
def test_a_wrong_merge_fails(change):
    with pytest.raises(AssertionError, match="relative error"):
        exercises.check_merge(define(SOLUTIONS, ["my_merge"], change)["my_merge"])


def test_what_is_not_written_is_not_solved(kernels, capsys):
    stubs = define(exercises.NOTEBOOK, ["broken_load_blocks", "my_load_blocks", "my_merge"])
    exercises.check("Exercise 3", stubs["my_load_blocks"], kernels["with_producer"])
    exercises.check("Exercise 5", stubs["my_merge"])
    exercises.check("Exercise 2", stubs["broken_load_blocks"], kernels["with_producer"])
    said = capsys.readouterr().out
    assert said.count("not solved yet.") == 2 and "Exercise 2: not yet right (with 1 stage" in said


@pytest.mark.parametrize(
    "version, change, said",
    [
        (
            "one_group",
            ("mbarrier.wait(full, use % 2)", "mbarrier.wait(full, 0)"),
            "before TMA has landed|still lands",
        ),
        ("with_producer", ("mbarrier.arrive(v_empty.index(stage), count=1)", ""), "nothing moves any more"),
        ("with_producer", ("use // STAGES % 2  # +", "use % 2  # +"), "in the emulator"),
        (
            "two_consumers",
            ("make_ring(k_desc, v_desc, STAGES, 2)", "make_ring(k_desc, v_desc, STAGES, 1)"),
            "one too many|overwrites a tile|nothing moves",
        ),
        (
            "two_consumers",
            ("make_ring(k_desc, v_desc, STAGES, 2)", "make_ring(k_desc, v_desc, STAGES, 3)"),
            "nothing moves any more",
        ),
        (
            "overlapped",
            ("warpgroup_mma_wait(1, [s])", "warpgroup_mma_wait(2, [s])"),
            "before warpgroup_mma_wait",
        ),
        (
            "overlapped",
            ("acc = warpgroup_mma_wait(0, [acc])", "acc = acc"),
            "before warpgroup_mma_wait|overwrites a tile",
        ),
        (
            "overlapped",
            ("q.store(finish_tile(", "fence_async_shared = lambda: None\n    q.store(finish_tile("),
            "without fence_async_shared",
        ),
        ("persistent", ("(q_use + 1) % 2", "q_use % 2"), "nothing moves any more"),
        ("persistent", ("mbarrier.arrive(q_empty, count=1)", "pass"), "nothing moves any more"),
        (
            "persistent",
            ("    use += 1\n            q_use += 1\n    tma", "    q_use += 1\n    tma"),
            "in the emulator",
        ),
        ("persistent", ("tma.store_wait(0)  # + the store", "pass  # the store"), "still uses"),
    ],
)
def test_a_fault_in_a_kernel_of_the_lesson_is_found(version, change, said):
    found = define(exercises.NOTEBOOK, [version, f"prepare_{version}"], change)
    assert re.search(said, exercises.check_attention(found[f"prepare_{version}"]))


def test_the_last_kernel_runs_with_one_stage_and_with_three(kernels):
    """The notebook has two stages; its own cells check that."""
    for stages in (1, 3):

        def prepare(q, k, v, out, causal=False, stages=stages):
            return kernels["launch"](
                kernels["persistent"], q, k, v, out, causal, 128, 128, boxes=2, persistent=True, STAGES=stages
            )

        assert exercises.check_attention(prepare) == "", stages
