"""Inputs, the note's rule and checks for `notebooks/10_ch14_bug_hunt.ipynb`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ch14 import bug_hunt
from ch14.bug_hunt import environments
from ch14.bug_hunt.lesson import experiments
from tilelab.cells import lesson
from tilelab.measure.check import check_exercise
from tilelab.runtime import build, device

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


@functools.cache
def _build_specialised() -> list[tuple[dict, str, str]]:
    """Return (configuration, outcome, PTX) of builds of the second hunt with the installed Triton."""
    builds = bug_hunt.Builds(bug_hunt.HUNTS["warp_specialize"], environments.installed_version(), "sm_90a")
    configs = [
        {"LOOP": loop, "LOADS": loads, "BLOCK_M": 64, "num_warps": warps}
        for loop, loads, warps in (
            ("over K", "device", 4),
            ("over K", "device", 8),
            ("over tiles flat", "host", 4),
            ("over tiles", "device", 4),
            ("over K", "pointers", 16),
        )
    ]
    return [
        (config, row["outcome"], build.build_one(builds.hunt.job(config, "sm_90a")).ptx)
        for config, row in zip(configs, builds.ask(configs))
    ]


def check_specialised(specialised: Callable) -> None:
    """Raise AssertionError unless `specialised(ptx, num_warps)` tells "real" from "ignored"."""
    for config, outcome, ptx in _build_specialised():
        if outcome != "fails":
            answer = specialised(ptx, config["num_warps"])
            assert answer == outcome, (
                f"{bug_hunt.describe(config)}: it is {outcome}, and the answer is {answer}"
            )


def check_native(native: Callable) -> None:
    """Raise AssertionError unless `native(triton, target, name, block_m)` is right for every recorded build."""
    for row in experiments.load_record("matrix").rows:
        if row["hunt"] == "dot_scaled":
            version = tuple(map(int, row["triton"].split(".")))
            answer = native(version, row["target"], row["FORMAT"], row["BLOCK_M"])
            build_of = f"Triton {row['triton']}, {row['target']}, {row['FORMAT']}, {row['BLOCK_M']} rows"
            assert answer == (row["outcome"] == "native"), f"{build_of}: {row['outcome']}"


CHECKS = {
    "Exercise 1": check_doubled,
    "Exercise 2": check_same_bug,
    "Exercise 3": check_specialised,
    "Exercise 4": check_native,
}


def check(exercise: str, answer: Callable) -> None:
    """Print whether a reader's answer solves an exercise."""
    check_exercise(exercise, lambda: CHECKS[exercise](answer))
