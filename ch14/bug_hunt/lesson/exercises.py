"""Inputs, the note's rule and checks for `notebooks/10_ch14_bug_hunt.ipynb`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ch14 import bug_hunt
from ch14.bug_hunt.lesson import experiments
from tilelab.cells import lesson
from tilelab.measure.check import make_checker
from tilelab.runtime import device

TARGET, BLOCK = "sm_100a", (128, 128, 64)  # of M, N, K

# ---- the note's rule


def note_says_fails(row: dict) -> bool:
    """Return whether the note says that this configuration fails."""
    return row["BLOCK_K"] >= 64 and row["num_stages"] >= 4 and row["num_warps"] >= 8


def note_says_builds(row: dict) -> bool:
    """Return whether the note says that this configuration builds."""
    return row["BLOCK_K"] <= 32 or row["num_stages"] == 1 or row["num_warps"] <= 4


_THRESHOLD = {"LOOP": "carry both", "LOADS": "device", "BLOCK_K": 64, "num_stages": 4, "num_warps": 8}
# (a build that would contradict one clause of the rule, its configuration, its outcome)
CLAUSES = [
    (clause, _THRESHOLD | change, outcome)
    for clause, change, outcome in (
        ("BLOCK_K <= 32, and it fails", {"BLOCK_K": 32}, "fails"),
        ("num_stages == 1, and it fails", {"num_stages": 1}, "fails"),
        ("num_stages < 4, and it fails", {"num_stages": 2}, "fails"),
        ("num_warps <= 4, and it fails", {"num_warps": 4}, "fails"),
        ("all three, and it builds", {"num_warps": 16}, "builds"),
        ("all three, the plain loop, and it builds", {"LOOP": "plain"}, "builds"),
        ("no descriptor, and it fails", {"LOADS": "pointers"}, "fails"),
    )
]


# ---- the loops of the notebook's cells


def make_operands(shape: tuple[int, int, int] = (256, 256, 256), where: str = "cpu") -> list[torch.Tensor]:
    """Return float16 matrices a (M, K) and b (K, N), and out (M, N), for shape (M, N, K)."""
    m, n, k = shape
    return [
        torch.randn(m, k, device=where).half(),
        torch.randn(k, n, device=where).half(),
        torch.empty(m, n, dtype=torch.float16, device=where),
    ]


def prepare_loop(kernel: Callable, num_stages: int = 4, block: tuple[int, int, int] = BLOCK) -> Callable:
    """Return a function that prepares a launch of a loop kernel, one tile per program, with 8 warps."""

    def prepare(a, b, out):
        (m, k), n = a.shape, b.shape[1]
        grid = -(-m // block[0]), -(-n // block[1])
        return lambda: kernel[grid](a, b, out, m, n, k, *block, num_warps=8, num_stages=num_stages)

    return prepare


def check_doubled(kernel: Callable) -> None:
    """Raise AssertionError unless `kernel` computes A (2 B), and compiles for a B200 with four stages."""
    import triton

    if device.current().capability:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
    # One stage, because what is hunted is only built.
    fault = lesson.check_launch(
        prepare_loop(kernel, 1),
        {"cpu": [(128, 136, 64), (40, 128, 200)], "cuda": [(128, 136, 64), (40, 128, 200)]},
        make_operands,
        lambda a, b: a.double() @ (2 * b.double()),
    )
    assert not fault, fault
    report = lesson.compile_launch(prepare_loop(kernel), make_operands(), TARGET)
    assert report.status == "ok", f"for {TARGET} with 4 stages {report.reason}"
    assert report.counts["tma_load"] >= 2, "both tiles must come by descriptor"
    tiles = 2 * BLOCK[2] * (BLOCK[0] + BLOCK[1])  # bytes of one stage
    assert report.smem > 3.25 * tiles, (
        f"it compiles, with {report.smem:,} B of shared memory; four stages of two tiles take {4 * tiles:,} B"
    )


def check_same_bug(same_bug: Callable) -> None:
    """Raise AssertionError unless `same_bug(before, after)` compares outcome, pass and message without numbers."""
    first = {"outcome": "fails", "stage": "TritonGPUPipeline", "message": "op 12 has 3 uses", "num_warps": 8}
    for change, same in (
        ({}, True),
        ({"num_warps": 4}, True),
        ({"message": "op 7 has 31 uses"}, True),
        ({"message": "op 1234 has 3 uses"}, True),
        ({"message": "op 12 has no uses"}, False),
        ({"message": "op 12 has 3 gaps"}, False),  # as long as the first one
        ({"message": "op 12 has 3 uses of 2"}, False),
        ({"stage": "ptxas"}, False),
        ({"outcome": "crashes"}, False),
    ):
        for pair in ((first, first | change), (first | change, first)):
            answer = same_bug(*pair)
            assert bool(answer) == same, f"with {change or 'no change'} the answer is {answer}"
    built = {"outcome": "builds", "num_warps": 8}  # a build that succeeds has neither a stage nor a message
    for pair in ((first, built), (built, first)):
        assert not same_bug(*pair), "a build that succeeds does not show the bug"


def _plant(axes: dict[str, range], shows: Callable[[dict], bool]) -> tuple[dict, dict, Callable]:
    """Return axes, the configuration of their last values, and a function that makes a row of a planted bug.

    A build that does not show the bug builds, or has another one where all values are the simplest.
    """

    def build_row(config: dict) -> dict:
        other = all(value == 1 for value in config.values())
        stage = "TritonGPUPipeline" if not other else "ptxas"
        fails = {"outcome": "fails", "stage": stage, "message": f"op {sum(config.values())} has no uses"}
        return config | (fails if other or shows(config) else {"outcome": "builds"})

    return axes, {axis: values[-1] for axis, values in axes.items()}, build_row


def _list_searches() -> dict[str, tuple[dict, dict, Callable]]:
    """Return what a search is tried on: the record of the loop, and three planted bugs."""
    hunt = bug_hunt.HUNTS["loop"]
    recorded = {tuple(row[axis] for axis in hunt.axes): row for row in experiments.load_record("loop").rows}
    start = {"LOOP": "carry both guarded", "LOADS": "host", "BLOCK_K": 128, "num_stages": 4, "num_warps": 8}
    return {
        "the recorded loop": (hunt.axes, start, lambda config: recorded[tuple(config.values())]),
        "x gets simpler only after y": _plant(
            {"x": range(1, 5), "y": range(1, 5)}, lambda c: c["x"] == 4 or (c["y"] == 1 and c["x"] > 1)
        ),
        "2 and 5 fail, and 3 and 4 build": _plant(
            {"x": range(1, 6), "y": range(1, 3)}, lambda c: c["x"] in (2, 5)
        ),
        "the simplest values have another bug": _plant({"x": range(1, 4), "y": range(1, 4)}, lambda c: True),
    }


def check_smallest(smallest: Callable) -> None:
    """Raise AssertionError unless `smallest(ask, axes, start)` returns a configuration that shows the bug of `start`.

    A simpler value of any single axis must not show the bug. The search may ask for three builds per value of an axis.
    """
    for name, (axes, start, build_row) in _list_searches().items():
        _check_search(smallest, name, axes, start, build_row)


def _check_search(smallest: Callable, name: str, axes: dict, start: dict, build_row: Callable) -> None:
    asked, limit = set(), 3 * sum(map(len, axes.values()))

    def ask(config: dict) -> dict:
        assert list(config) == list(axes), f"{name}: `ask` takes one value for each axis, not {config}"
        asked.add(tuple(config.values()))
        return build_row(config)

    found, wanted = smallest(ask, dict(axes), dict(start)), bug_hunt.symptom(build_row(start))
    assert found and bug_hunt.symptom(build_row(found)) == wanted, f"{name}: {found} does not show the bug"
    for axis, values in axes.items():
        for value in values[: values.index(found[axis])]:
            shown = bug_hunt.symptom(build_row(found | {axis: value}))
            assert shown != wanted, f"{name}: of {bug_hunt.describe(found)}, {axis} can still be {value}"
    assert len(asked) <= limit, f"{name}: {len(asked)} different builds; {limit} are enough"


CHECKS = {"Exercise 1": check_doubled, "Exercise 2": check_same_bug, "Exercise 3": check_smallest}
check = make_checker(CHECKS)
