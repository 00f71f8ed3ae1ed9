"""Count the instructions that kernels execute, by Nsight Compute: proof of TMA where there is no cubin to disassemble.

cuBLAS, cuDNN and torch's own attention come as libraries. ncu patches a kernel as it runs and counts each opcode.
"""

from __future__ import annotations

import sys

import torch

from ch14.compiled.lesson import reading
from ch14.compiled.lesson.workloads import make_workload, prepare
from tilelab.measure import profiler

# (family, shape, modes): the modes of experiments.CASES whose kernels torch.compile did not generate.
CALLS = (
    ("matmul", (4096, 4096, 4096), ("eager",)),
    ("mlp", (8192, 4096, 14336), ("eager",)),
    ("attention", (4, 16, 16, 8192, 128), ("cuDNN", "flash", "efficient", "course")),
    ("causal attention", (4, 16, 16, 8192, 128), ("cuDNN", "flash", "course")),
)


def profile() -> list[dict]:
    """Run CALLS under ncu in a process of its own, and return a row for each launch.

    A row is {workload, shape, name, kernel, instructions, and each of reading.OPCODES}. Raises ProfilerUnavailable.
    """
    output = profiler.run_ncu(
        [
            "--profile-from-start",
            "off",
            "--print-metric-instances",
            "details",
            "--metrics",
            reading.PER_OPCODE,
        ],
        [sys.executable, "-m", "ch14.compiled.lesson.executed_instructions"],
    )
    try:
        return group_by_call(reading.parse_counters(output))
    except ValueError as error:
        raise profiler.ProfilerUnavailable(str(error)) from error


def group_by_call(launches: list[dict]) -> list[dict]:
    """Return the launches, each with the call of CALLS that made it. ValueError if the number of calls differs."""
    names = [(family, shape, mode) for family, shape, modes in CALLS for mode in modes]
    calls = reading.split_at_marks(launches)
    if len(calls) != len(names):
        raise ValueError(f"ncu saw {len(calls)} calls of {len(names)}.")
    return [
        {"workload": family, "shape": list(shape), "name": mode, "status": "ok", **launch}
        for (family, shape, mode), call in zip(names, calls)
        for launch in call
    ]


def _run_calls() -> None:
    """Run every call once, for ncu to watch. A mode that this machine cannot run leaves only its mark."""
    for family, shape, modes in CALLS:
        work = make_workload(family, shape)
        inputs = work.inputs()
        for mode in modes:
            function = prepare(work, mode)
            try:
                function(*inputs)
            except Exception as error:
                function = None
                print(f"{family} {shape} {mode}: {error}", file=sys.stderr)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            if function:
                function(*inputs)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    _run_calls()
