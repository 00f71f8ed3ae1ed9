"""A sweep in which every kind of fault happens once, to show that the rest of it comes out right.

Small blocks of y = 2 x are built, checked and timed on the GPU, or without one in Triton's interpreter, where a write
to an out-of-bounds address is a segmentation fault.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time

from tilelab import build, device, results
from tilelab.tunable import Space

SIZE = 5000
# What goes wrong, and the words that its row's reason holds: on a GPU, and without one.
FAULTS = {
    "failing compiler pass": ("TritonGPUFuseNestedLoops failed", "TritonGPUFuseNestedLoops failed"),
    "segfault in the compiler": ("SIGSEGV", "SIGSEGV"),
    "abort in the compiler": ("LLVM ERROR", "LLVM ERROR"),
    "illegal memory access": ("illegal memory access", "SIGSEGV"),
    "hang": ("no answer within", "no answer within"),
    "out of memory": ("out of memory", "allocate memory"),
    "wrong result": ("never written", "never written"),
}
IN_THE_COMPILER = {"segfault in the compiler": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
                   "abort in the compiler": "import os; os.write(2, b'LLVM ERROR: planted\\n'); os.abort()"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Elements a program computes, and what goes wrong ("": nothing)."""

    block: int
    fault: str = ""


def configs(faults: tuple[str, ...] = tuple(FAULTS)) -> list[Config]:
    """Eight configurations that are right, and one for each fault among them."""
    right = [Config(2**power) for power in range(4, 12)]
    return [config for pair in zip(right, [Config(64, fault) for fault in faults]) for config in pair] + \
        right[len(faults):]


@dataclasses.dataclass(frozen=True)
class FaultSpace(Space):
    """y = 2 x of 5,000 elements. `folder` keeps the kernels that kill the compiler, and `log`, a line a measurement."""

    folder: str
    can_measure: bool = True

    @property
    def target(self) -> str:
        return device.current().target or "sm_90a"

    def label(self, config):
        return {"name": "course", "kernel": f"{config.block} {config.fault}".strip(), "block": config.block,
                "fault": config.fault, "shape": [SIZE], "dtype": "fp32"}

    def predicted_ms(self, config):
        return float(config.block)  # in this order, whatever it means

    def source(self):
        return results.source_hash(pathlib.Path(__file__).with_name("faults_kernels.py"))

    def job(self, config):
        kernel = "tilelab.faults_kernels:double_kernel"
        if crash := IN_THE_COMPILER.get(config.fault):
            path = pathlib.Path(self.folder, f"{config.fault.replace(' ', '_')}.py")
            results.write_atomically(path, crash)
            kernel = f"{path}:kernel"
        return build.Job(kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"},
                         {"BLOCK": config.block, "FAULT": config.fault}, self.target, aligned=("x", "y"))

    def warm_up(self):
        from tilelab import faults_kernels  # noqa: F401

        return {}

    def measure(self, config):
        import torch

        from tilelab import check, faults_kernels

        self._note("begin", config)
        where = "cuda" if device.current().capability else "cpu"
        if config.fault == "out of memory":
            torch.empty(1 << 46, device=where)

        def double(x, out):
            programs = -(-SIZE // config.block)
            faults_kernels.double_kernel[(programs,)](x, out, SIZE, BLOCK=config.block, FAULT=config.fault)

        x = torch.randn(SIZE, device=where)
        row = check.compare(double, lambda x: 2 * x.double(), [("y", (x,))], out=lambda x: (x.shape, x.dtype))[0]
        if row["status"] != "ok":
            return {"status": row["status"], "reason": row["reason"]}
        begun, y = time.perf_counter(), torch.empty_like(x)
        for _ in range(3):
            double(x, y)
        if x.is_cuda:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - begun) / 3 * 1e3
        self._note("end", config)
        return {"status": "ok", "reason": "", "ms": ms}

    def _note(self, what: str, config: Config) -> None:
        with open(pathlib.Path(self.folder, "log"), "a") as log:
            print(what, os.getpid(), time.monotonic(), self.label(config)["kernel"], sep=",", file=log)
