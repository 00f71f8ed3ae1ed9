"""The exercises' checks: the solutions pass, and each planted wrong answer fails with the rule that it breaks."""

import re

import planted
import pytest
from cases import cases

from ch07.bulk_copy.lesson import exercises
from tilelab import ROOT, emulator
from tilelab.cells import cuda_magic

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = cuda_magic.notebook_kernels(NOTEBOOKS / "solutions" / "01_ch07_bulk_copy.ipynb")


def answer(kernel, *changes):
    return planted.answer(SOLUTIONS, kernel, *changes)[kernel]


@cases("change", ("use / 2 % 2", "0"), ("&full[use % 2]), BYTES)", "&full[use % 2]), BYTES / 2)"))
def test_a_wrong_ring_fails(change):
    with pytest.raises(AssertionError, match="with . blocks?, "):
        exercises.check_ring(answer("mended_ring", change))


@cases(
    "change",
    ("use / STAGES % 2", "use % 2"),
    ("load(use + STAGES)", "load(use + 2)"),
    ("if (tile >= tiles) return;", ""),
)
def test_a_ring_that_is_right_for_some_stages_only_fails(change):
    with pytest.raises(AssertionError, match="with . stages?, "):
        exercises.check_rings(answer("my_ring", change))


STORE = "bulk_store(out + u64(tile) * BYTES, shared_address(buffer + use % STAGES * BYTES), BYTES);"
REFILL = "        bulk_wait_read<0>();\n        load(use + STAGES);"


@cases(
    "changes, fault",
    # one buffer and one barrier, whatever STAGES says; and loads that are issued just before their wait
    (
        [("% STAGES", "% 1"), ("/ STAGES", "/ 1"), ("use < STAGES", "use < 1"), ("use + STAGES", "use + 1")],
        "3 stag",
    ),
    (
        [
            ("for (int use = 0; use < STAGES; ++use) load(use);", ""),
            ("        mbarrier_wait(", "        load(use);\n        mbarrier_wait("),
            ("load(use + STAGES);", ""),
        ],
        "with 3 stages, when a block stores its tile number 0 it has issued 1 load; .* it can have issued 2",
    ),
    # the other way round, and what writes elsewhere
    (
        [("x + u64(tile)", "out + u64(tile)"), (STORE, STORE.replace("out", "(unsigned char*)x"))],
        "elements are wrong",
    ),
    ([(STORE, STORE + " out[u64(tiles) * BYTES + 80000] = 1;")], "80000 bytes past the end of the"),
    # no bulk copies at all, or stores without them
    (
        [(STORE, "for (int i = 0; i < BYTES; ++i) (out + tile * BYTES)[i] = (x + tile * BYTES)[i];")],
        "store 0 of",
    ),
)
def test_a_ring_that_is_no_ring_or_writes_elsewhere_fails(changes, fault):
    with pytest.raises(AssertionError, match=fault):
        exercises.check_rings(answer("my_ring", *changes))


def test_another_right_ring_passes():
    changes = (
        # the stage before is refilled, as in ring_copy
        (
            REFILL,
            "        if (STAGES == 1) bulk_wait_read<0>(), load(use + 1);\n"
            "        else if (use > 0) bulk_wait_read<1>(), load(use - 1 + STAGES);",
        ),
        ("    }\n}", "    }\n    bulk_wait_read<0>();\n}"),
        # a tile comes and goes in halves
        (
            "bulk_load(shared_address(buffer + use % STAGES * BYTES), x + u64(tile) * BYTES, BYTES, barrier);",
            "for (u32 half = 0; half < BYTES; half += BYTES / 2) bulk_load(shared_address(buffer + use % STAGES * "
            "BYTES) + half, x + u64(tile) * BYTES + half, BYTES / 2, barrier);",
        ),
    )
    exercises.check_rings(answer("my_ring", *changes))


def test_the_first_exercise_asks_for_a_fault(capsys):
    exercises.check("Exercise 1", answer("too_early"))
    said = capsys.readouterr().out
    assert re.match("The fault: with 1 block, .* a bulk_load overwrites .* may still read", said)
    assert said.endswith("Exercise 1: solved.\n")
    for kernel, reason in (
        (answer("mended_ring"), "let the thread wait for the older store only"),
        (
            answer("too_early", ("use / 2 % 2", "0")),
            "with bulk_wait_read<0> it must be right, and with 1 block",
        ),
        (answer("too_early", ("load(use + 2);", "if (use > 0) load(use + 1);")), "it is right"),
    ):
        exercises.check("Exercise 1", kernel)
        assert f"Exercise 1: not yet right ({reason}" in capsys.readouterr().out


@cases(
    "change",
    # a fence acts for the thread that executes it, and the barrier comes after it
    ("    fence_proxy_async();", "    if (threadIdx.x == 0) fence_proxy_async();"),
    ("blockIdx.x * 256, shared", "0, shared"),
    ("*= a", "= fabsf(a) * tile[threadIdx.x]"),
)
def test_a_wrong_scale_fails(change):
    with pytest.raises(AssertionError):
        exercises.check_scale(answer("scale_tile", change))
