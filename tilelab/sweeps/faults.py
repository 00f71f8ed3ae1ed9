"""A sweep in which every kind of fault happens once, to show that its other rows come out right.

Small blocks of y = 2 x are built, checked and timed on the GPU. Without one they run in Triton's interpreter, where a
write to an out-of-bounds address is a segmentation fault.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from typing import Any

from tilelab.runtime import build, device, files, provenance
from tilelab.sweeps.space import Space

SIZE = 1000
# Each fault, and the words that its row's reason must hold: on a GPU, and without one.
FAULTS = {
    "failing compiler pass": ("TritonGPUFuseNestedLoops failed", "TritonGPUFuseNestedLoops failed"),
    "segfault in the compiler": ("SIGSEGV", "SIGSEGV"),
    "abort in the compiler": ("LLVM ERROR", "LLVM ERROR"),
    "illegal memory access": ("illegal memory access", "SIGSEGV"),
    "hang": ("no answer within", "no answer within"),
    "out of memory": ("out of memory", "allocate memory"),
    "wrong result": ("never written", "never written"),
}
COMPILER_CRASHES = {
    "segfault in the compiler": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "abort in the compiler": "import os; os.write(2, b'LLVM ERROR: planted\\n'); os.abort()",
}


def _where() -> str:
    return "cuda" if device.current().capability else "cpu"


@dataclasses.dataclass(frozen=True)
class Config:
    """`block` elements per program; `fault` is a key of FAULTS, or "" for a kernel that is right."""

    block: int
    fault: str = ""


def configs(faults: tuple[str, ...] = tuple(FAULTS)) -> list[Config]:
    """Return eight configurations that are right, and between them one for each of `faults`."""
    right = [Config(2**power) for power in range(4, 12)]
    pairs = [config for pair in zip(right, [Config(64, fault) for fault in faults]) for config in pair]
    return pairs + right[len(faults) :]


@dataclasses.dataclass(frozen=True)
class FaultSpace(Space):
    """y = 2 x of 1,000 elements. `folder` holds kernels that crash the compiler, and a `log` of measurements."""

    shape: tuple[int, ...] = (SIZE,)
    dtype: str = "fp32"
    folder: str = ""

    @property
    def can_measure(self) -> bool:  # also without a GPU
        return self.compile_for is None

    @property
    def target(self) -> str:
        return self.compile_for or device.current().target or "sm_90a"

    def label(self, config: Config) -> dict[str, Any]:
        kernel = f"{config.block} {config.fault}".strip()
        return super().label(config) | {"kernel": kernel, "block": config.block, "fault": config.fault}

    def predict_us(self, config: Config) -> float:
        return 1e3 * config.block  # no model: it only fixes the order

    @classmethod
    def source(cls) -> str:
        return provenance.source_hash(pathlib.Path(__file__).with_name("faults_kernels.py"))

    def job(self, config: Config) -> build.Job:
        kernel = "tilelab.sweeps.faults_kernels:double_kernel"
        if crash := COMPILER_CRASHES.get(config.fault):
            path = pathlib.Path(self.folder, f"{config.fault.replace(' ', '_')}.py")
            files.write_atomically(path, crash)
            kernel = f"{path}:kernel"
        return build.Job(
            kernel,
            {"x": "*fp32", "y": "*fp32", "n": "i32"},
            {"BLOCK": config.block, "FAULT": config.fault},
            self.target,
            aligned=("x", "y"),
        )

    def warm_up(self) -> dict:
        import torch

        from tilelab.measure import check  # noqa: F401, its imports take seconds
        from tilelab.sweeps import faults_kernels  # noqa: F401

        torch.empty(1, device=_where())  # it opens the GPU
        return {}

    def measure(self, config: Config) -> dict:
        import torch

        from tilelab.measure import check
        from tilelab.sweeps import faults_kernels

        self._log("begin", config)
        where = _where()
        if config.fault == "out of memory":
            torch.empty(1 << 46, device=where)

        def double(x, out):
            programs = -(-SIZE // config.block)
            faults_kernels.double_kernel[(programs,)](x, out, SIZE, BLOCK=config.block, FAULT=config.fault)

        x = torch.randn(SIZE, device=where)
        row = check.compare(
            double, lambda x: 2 * x.double(), [("y", (x,))], out=lambda x: (x.shape, x.dtype)
        )[0]
        if row["status"] != "ok":
            return {"status": row["status"], "reason": row["reason"]}
        begin, y = time.perf_counter(), torch.empty_like(x)
        for _ in range(3):
            double(x, y)
        if x.is_cuda:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - begin) / 3 * 1e3
        self._log("end", config)
        return {"status": "ok", "reason": "", "ms": ms}

    def _log(self, event: str, config: Config) -> None:
        with open(pathlib.Path(self.folder, "log"), "a") as log:
            print(event, os.getpid(), time.monotonic(), self.label(config)["kernel"], sep=",", file=log)
