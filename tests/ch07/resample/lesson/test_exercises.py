"""The versions of the notebook are right, the solutions pass, and each planted wrong answer fails its check."""

import planted
import pytest
from cases import cases

from ch07.resample.lesson import exercises, published_kernel
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
KERNELS = cuda_magic.notebook_kernels(NOTEBOOKS / "02_ch07_resample.ipynb")
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "02_ch07_resample.ipynb")


def answer(kernel, *changes):
    return planted.answer(SOLUTIONS, kernel, *changes)


def prepare(name, change=("", "")):
    kernel = planted.answer(KERNELS, name, change)[name]
    if name == "search_per_thread":
        return exercises.by_element(kernel)
    return exercises.by_chunk(kernel, 0, 64 * 512 if name == "bulk_rows" else 0)


@cases(
    "name, change",
    ("search_per_thread", ("times[middle] <= target", "times[middle] < target - 1")),
    ("ballot_search", ("31 - __clz(ballot)", "__popc(ballot)")),
    (
        "shared_search",
        ("    __syncthreads();                                          // + all targets are found", ""),
    ),
    ("bulk_rows", ("last_row + 1 - first_row", "last_row - first_row")),
)
def test_a_wrong_version_fails(name, change):
    assert exercises.check_version(prepare(name, change))


def check_ballot(change=("", "")):
    cell = answer("padded_ballot", change)
    exercises.check_places(cell["places"], cell["padded_ballot"])


def check_search(change=("", "")):
    exercises.CHECKS["Exercise 2"](answer("mended_search", change)["mended_search"])


@cases(
    "change",
    ("min(CHUNK, targets - within)", "CHUNK"),
    ("target >= end ? 1 : ", ""),
    ("batch * targets + within", "blockIdx.x * CHUNK"),
)
def test_a_wrong_whole_kernel_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_whole(answer("my_resample", change)["my_resample"])


@cases(
    "change, reason",
    (("return i + i / 32;", "return i;"), "one step takes 32 wavefronts"),
    (("return i + i / 32;", "return i / 32;"), "share a word"),
    (("times[place(low)]", "times[low]"), "elements are wrong"),
)
def test_a_wrong_place_fails(change, reason):
    with pytest.raises(AssertionError, match=reason):
        check_ballot(change)


@cases("change", ("min(CHUNK, targets - within)", "CHUNK"), ("batch * targets + within", "within"))
def test_a_search_that_is_not_mended_fails(change):
    with pytest.raises(AssertionError):
        check_search(change)


@cases("change", ("high = sources - 2", "high = sources - 1"), ("blockIdx.x / chunks", "0"))
def test_a_wrong_search_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_search(answer("my_search", change)["my_search"])


@cases(
    "search",
    # every lane of a warp searches for each of its targets; a thread looks at one source time after the other
    """for (int i = first + threadIdx.x / 32; i < min(first + CHUNK, targets); i += 8) {
            const float target = target_times[batch * targets + i];
            int low = 0, high = sources - 2;
            while (low < high) {
                const int middle = (low + high + 1) / 2;
                if (times[middle] <= target) low = middle;
                else high = middle - 1;
            }
            left[batch * targets + i] = low;
        }""",
    """for (int i = first + threadIdx.x; i < min(first + CHUNK, targets); i += 256) {
            int low = 0;
            while (low < sources - 2 && times[low + 1] <= target_times[batch * targets + i]) ++low;
            left[batch * targets + i] = low;
        }""",
)
def test_a_search_that_takes_too_many_steps_fails(search):
    source = SOLUTIONS["my_search"].source
    source = source[: source.index("    const int i = first")] + search + "}\n"
    with pytest.raises(AssertionError, match="left is right, but .* take [0-9,]+ steps in all per target"):
        exercises.check_search(cuda_magic.find_kernels(source, SOLUTIONS["my_search"].options)["my_search"])


def test_two_threads_may_search_for_a_target():
    changes = (
        "threadIdx.x;\n    if (threadIdx.x >= CHUNK",
        "threadIdx.x / 2;\n    if (threadIdx.x >= 2 * CHUNK",
    )
    exercises.check_search(answer("my_search", changes)["my_search"])


def test_a_short_chunk_must_not_reach_into_the_next_batch():
    # In the order of the blocks the next one repairs it, and the end of the last batch is known.
    change = ("min(CHUNK, targets - within)", "min(CHUNK, items / chunks * targets - first)")
    says = "the first blocks alone: .* elements are wrong|nothing orders the two blocks"
    with pytest.raises(AssertionError, match=says):
        check_search(change)


FROM_GLOBAL = ("rows + (left[first + i / DEPTH] - first_row)", "features + left[first + i / DEPTH]")


@cases(
    "changes, reason",
    # all rows by TMA, or one of them, and then from global memory
    ([FROM_GLOBAL], "the blend reads 71,680 bytes of the features in global memory"),
    ([FROM_GLOBAL, ("(left[first + count - 1] + 2 - first_row) * DEPTH * 4", "DEPTH * 4")], "reads 71,680"),
    (
        [
            (
                "bulk_load(shared_address(rows), features + first_row * DEPTH, bytes,",
                "for (u32 row = 0; row < bytes; row += 512) bulk_load(shared_address(rows) + row, "
                "features + first_row * DEPTH + row / 4, 512,",
            )
        ],
        "a block has [0-9]+ bulk copies instead of one",
    ),
)
def test_a_blend_must_bring_its_rows_with_one_bulk_copy(changes, reason):
    with pytest.raises(AssertionError, match=reason):
        exercises.check_blend(answer("my_blend", *changes)["my_blend"])


def test_a_search_in_global_memory_is_not_what_was_asked():
    changes = (
        ("__shared__ float times[TIMES];", ""),
        ("times[i] = source_times[batch * sources + i];", ""),
        ("times[middle] <=", "source_times[batch * sources + middle] <="),
    )
    with pytest.raises(AssertionError, match="not in shared memory"):
        exercises.check_search(answer("my_search", *changes)["my_search"])


@cases(
    "change",
    ("+ 2 - first_row", "+ 1 - first_row"),
    ("min(16, targets - first)", "16"),
    ("expect_tx(shared_address(&landed), bytes)", "expect_tx(shared_address(&landed), 64 * DEPTH * 4)"),
)
def test_a_wrong_blend_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_blend(answer("my_blend", change)["my_blend"])


def test_a_test_must_catch_every_error_and_no_right_kernel():
    with pytest.raises(AssertionError, match="pass the right kernel"):
        exercises.check_test(lambda kernel: True)
    with pytest.raises(NotImplementedError):
        exercises.check_test(lambda kernel: False)
    with pytest.raises(AssertionError, match="not caught: one time array"):
        exercises.check_test(
            lambda kernel: kernel in (published_kernel.stride_features, published_kernel.drop_last_targets)
        )
