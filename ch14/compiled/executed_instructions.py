"""The instructions that kernels execute, by Nsight Compute: the proof of TMA where there is no cubin to disassemble.

cuBLAS, cuDNN and torch's own attention come as libraries. ncu patches a kernel as it runs and counts each opcode.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from ch07.resample.experiments import NotProfiled
from ch14 import compiled
from ch14.compiled import reading
from tilelab import worker_pool

# (family, shape, modes): what the modes of compiled_trials.CASES run that torch.compile did not write.
CALLS = (("matmul", (4096, 4096, 4096), ("eager",)), ("mlp", (8192, 4096, 14336), ("eager",)),
         ("attention", (4, 16, 16, 8192, 128), ("cuDNN", "flash", "efficient", "course")),
         ("causal attention", (4, 16, 16, 8192, 128), ("cuDNN", "flash", "course")))


def profile() -> list[dict]:
    """Rows {workload, shape, name, kernel, instructions, and each of compiled_reading.OPCODES}: every launch of CALLS,
    in a process of its own under ncu. Raises NotProfiled."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotProfiled("ncu is not on the PATH: install Nsight Compute, or read the counters in results/.")
    command = [ncu, "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw",
               "--print-units", "base", "--print-metric-instances", "details", "--metrics",
               reading.PER_OPCODE, sys.executable, "-m", "ch14.compiled.executed_instructions"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=worker_pool.ROOT, check=False)
    said = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise NotProfiled("this user may not read the GPU's counters: run as root, or have the administrator load the "
                          "driver with NVreg_RestrictProfilingToAdminUsers=0.")
    if done.returncode:
        reason = next((line for line in said.splitlines()[::-1] if line.strip()), "it said nothing")
        raise NotProfiled(f"ncu gave no counters ({reason.strip()[:200]}).")
    try:
        return by_call(reading.counters(done.stdout))
    except ValueError as error:
        raise NotProfiled(str(error)) from error


def by_call(launches: list[dict]) -> list[dict]:
    """The launches, each with the call of CALLS that it belongs to. ValueError when there are not as many calls."""
    names = [(family, shape, mode) for family, shape, modes in CALLS for mode in modes]
    calls = reading.between_marks(launches)
    if len(calls) != len(names):
        raise ValueError(f"ncu saw {len(calls)} calls of {len(names)}.")
    return [{"workload": family, "shape": list(shape), "name": mode, "status": "ok", **launch}
            for (family, shape, mode), call in zip(names, calls) for launch in call]


def _run() -> None:
    """Every call once, for ncu to watch; a mode that this machine cannot run leaves its mark alone."""
    import torch

    for family, shape, modes in CALLS:
        work = compiled.workload(family, shape)
        inputs = work.inputs()
        for mode in modes:
            function = None
            try:
                function = compiled.prepare(work, mode)
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
    _run()
