"""Compile Triton and CUDA C++ kernels for any target with no GPU, in worker processes that may crash, and read what
came out.

A compiler that raises, aborts, faults or hangs becomes a Report with the reason. Nothing here imports Triton: it lives
in the workers, where TRITON_INTERPRET=0 lets a machine without a GPU compile.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from tilelab import cuda, worker_pool
from tilelab.cubin import ptxas_remarks, sass, sass_counts
from tilelab.device import target_limits

__all__ = ["Job", "Report", "build", "build_one", "disassemble", "job_for", "ptxas_remarks", "sass", "sass_counts",
           "compile_ahead"]

# Occurrences in the PTX: what the compiler emitted, not how often it runs.
INSTRUCTIONS = {
    "tma_load": r"cp\.async\.bulk\.tensor\.[^;\n]*shared::cluster\.global|"
                r"cp\.async\.bulk\.tensor\.[^;\n]*shared::cta\.global",
    "tma_store": r"cp\.async\.bulk\.tensor\.[^;\n]*\.global\.shared::cta|cp\.reduce\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05_mma": r"tcgen05\.mma",
    "block_scale": r"\.block_scale",
    "mma_sync": r"mma\.sync",
    "tensormap_replace": r"tensormap\.replace",
    "setmaxnreg": r"setmaxnreg",
}


@dataclass(frozen=True)
class Job:
    """One kernel, specialised for one target.

    kernel: "ch14.gemm:gemm_plain_kernel" or "path/to/file.py:name". signature: a Triton type for each argument that is
    no constexpr ("*bf16", "i32", "tensordesc<bf16[128, 64]>"). constants: the constexpr arguments. aligned: names of
    pointers and integers known to be multiples of 16. options: further compile options, {"launch_pdl": True}.

    Or "path/to/file.cu:name", for NVRTC: constants are -DNAME=VALUE (a bool 0 or 1), options fields of
    cuda.core.ProgramOptions, `smem_bytes` the dynamic shared memory of its launch; signature and aligned stay empty.
    """

    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    target: str
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    smem_bytes: int = 0

    @property
    def _entry(self) -> str:
        """The name in the cubin of a .cu file's kernel, which may hold others; empty for Triton's, which holds one."""
        path, _, name = self.kernel.rpartition(":")
        return name if path.endswith(".cu") else ""


@dataclass(frozen=True)
class Report:
    """What the compiler made of a Job: `status` is ok, rejected (compiled, cannot launch there) or failed.

    Sizes in bytes: `smem` dynamic and `smem_static` a block (from sm_90 on 1,024 of it are the system's), `spills`
    local memory a thread; `tmem` columns of tensor memory a block; None where they could not be read. `counts` are
    instructions in the PTX (INSTRUCTIONS), or those in the SASS of a .cu kernel (cubin.OPCODES, and what tensor core
    instructions it has), empty where that cannot be read. `seconds` the compiler's. `reason` is a sentence, empty when
    all is well; `said` all that the compiler said about a failure: the exception's name and text, then its log.
    """

    job: Job
    status: str
    reason: str = ""
    registers: int | None = None
    spills: int | None = None
    smem: int | None = None
    smem_static: int | None = None
    tmem: int | None = None
    threads: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    ptx: str = field(default="", repr=False)
    cubin: bytes = field(default=b"", repr=False)
    said: str = field(default="", repr=False)

    @property
    def sass(self) -> str:
        """SASS of the kernel; RuntimeError says why it could not be read."""
        return sass(self.cubin, self.job._entry)

    @property
    def programs_per_sm(self) -> int | None:
        """How many programs fit on an SM of the target together: its occupancy. None where it was not built."""
        if self.smem is None or not self.registers:
            return None
        limit, warps = target_limits(self.job.target), self.threads // 32
        of_a_warp = -(-self.registers * 32 // 256) * 256  # registers are given out by 256 a warp
        own = _own_smem(self.smem, self.smem_static, self.job.target)
        return min(limit.smem_per_sm // (own + 1024), limit.threads_per_sm // self.threads,
                   limit.regs_per_sm // (of_a_warp * warps), 32)

    @property
    def launchable(self) -> bool:
        """Whether the target can launch it."""
        return self.status == "ok"

    def row(self) -> dict:
        """Flat, for a table or results/; without the PTX."""
        kept = {"name": self.job.name or self.job.kernel, "target": self.job.target, "status": self.status,
                "reason": self.reason, "registers": self.registers, "spills": self.spills, "smem": self.smem,
                "smem_static": self.smem_static, "threads": self.threads, "seconds": round(self.seconds, 3)}
        return kept | self.counts


def _own_smem(dynamic: int, static: int | None, target: str) -> int:
    """Shared memory that a block asks for: all but the 1,024 B of the system, which a cubin from sm_90 on counts in."""
    return dynamic + max((static or 0) - (1024 if target_limits(target).capability >= (9, 0) else 0), 0)


def job_for(kernel, signature: dict[str, str], constants: dict[str, Any], target: str, **rest) -> Job:
    """The Job of a `@triton.jit` function, interpreted or autotuned too; `rest` are further fields of Job.

    Raises ValueError for a kernel that another process cannot import by name.
    """
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    if kernel.__module__ == "__main__" or kernel.__qualname__ != kernel.__name__:
        raise ValueError(f"the compiler's process cannot import {kernel.__qualname__} from {kernel.__module__}: "
                         "define it at the top level of a module.")
    where = kernel.__module__ if kernel.__module__ in sys.modules else kernel.__code__.co_filename
    return Job(f"{where}:{kernel.__name__}", signature, constants, target, **rest)


def build(jobs: Iterable[Job], workers: int | None = None, timeout_s: float = 120,
          cache: str | os.PathLike | None = None, triton: str | os.PathLike | None = None) -> Iterator[Report]:
    """Compile `jobs` in parallel and yield a Report for each as it finishes, in whatever order.

    `workers` processes (default: one a CPU), each given `timeout_s` a job; `cache` replaces the cache folders of Triton
    and of tilelab.cuda for these jobs. A damaged cache entry is compiled again elsewhere. `triton` is the folder that
    another Triton was installed into (pip's --target), for kernels that import nothing but Triton. Builds may overlap,
    each with workers of its own; an iterator that is closed early kills what it was building. Raises ValueError at once
    for a target that is none of tilelab.device.TARGETS.
    """
    jobs = list(jobs)
    for job in jobs:
        target_limits(job.target)
    if timeout_s <= 0 or (workers is not None and workers < 1):
        raise ValueError(f"workers and timeout_s must be positive; they are {workers} and {timeout_s}.")
    return _build(jobs, min(workers or _cpus(), max(len(jobs), 1)), timeout_s, cache, triton)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))  # those it may use: in a cpuset, or a test beside another, not all


def _build(jobs, count, timeout_s, cache, triton):
    ticket = object()
    pool = ThreadPoolExecutor(count, "build")
    try:
        for future in as_completed([pool.submit(build_one, job, timeout_s, cache, ticket, triton) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        worker_pool.kill(ticket)  # the caller stopped early
        pool.shutdown()


def compile_ahead(jobs: Iterable[Job]) -> None:
    """Compile them all, every CPU at work, into the caches that launches read: alone, each would wait for its own.
    What does not compile is left to its launch to tell."""
    for _ in build(jobs):
        pass


def disassemble(jobs: Iterable[Job]) -> list[Report]:
    """Their Reports, in order, each with a listing of its SASS at hand where that can be read: cuobjdump takes as long
    as a compiler, and its listings are kept."""
    def read(report: Report) -> None:
        with contextlib.suppress(RuntimeError):
            sass(report.cubin, report.job._entry)

    jobs, reports = list(jobs), {}
    with ThreadPoolExecutor(_cpus()) as pool:
        for report in build(jobs):
            reports[id(report.job)] = report
            if report.cubin:
                pool.submit(read, report)
    return [reports[id(job)] for job in jobs]


def build_one(job: Job, timeout_s: float = 120, cache: str | os.PathLike | None = None,
              ticket: object = None, triton: str | os.PathLike | None = None) -> Report:
    """`build` of a single job, in a worker that `worker_pool.kill(ticket)` ends."""
    target_limits(job.target)
    kernel = os.path.abspath(job.kernel) if re.search(r"\.(py|cu):", job.kernel) else job.kernel
    request = {**dataclasses.asdict(job), "kernel": kernel, "cubins": os.path.abspath(cache or cuda.cubin_folder()),
               "cache": str(cache or os.environ.get("TRITON_CACHE_DIR") or "")}
    try:
        env = {"TRITON_INTERPRET": "0"} | ({"TILES_TRITON": os.path.abspath(triton)} if triton else {})
        with worker_pool.lease_worker("tilelab.build_worker", "the compiler", ticket, **env) as worker:
            return _report(job, worker.ask(request, timeout_s))
    except Exception as error:  # a job that is no JSON, a machine out of processes: a row like any other
        return Report(job, "failed", f"{type(error).__name__}: {error}")


def _report(job: Job, answer: dict) -> Report:
    if "reason" in answer:
        return Report(job, "failed", answer["reason"].rstrip(".") + ".", said=answer.get("said", answer["reason"]))
    limit = target_limits(job.target)
    if "counts" not in answer:
        answer["counts"] = {name: len(re.findall(pattern, answer["ptx"])) for name, pattern in INSTRUCTIONS.items()}
    reason, smem = "", _own_smem(answer["smem"], answer["smem_static"], job.target)
    if smem > limit.smem_per_block:
        reason = (f"it needs {smem:,} B of shared memory a block; {job.target} has "
                  f"{limit.smem_per_block:,} B.")
    elif (answer.get("tmem") or 0) > 512:  # Triton's kernel is a trap then, and its launcher refuses
        reason = f"it needs {answer['tmem']:,} columns of tensor memory a block; {job.target} has 512."
    elif answer["threads"] > 1024:
        reason = f"it has {answer['threads']:,} threads a block; {job.target} allows 1,024."
    elif answer["threads"] * (answer.get("registers") or 0) > limit.regs_per_sm:
        reason = (f"its {answer['threads']} threads with {answer['registers']} registers each exceed the "
                  f"{limit.regs_per_sm:,} of an SM.")
    return Report(job, "rejected" if reason else "ok", reason,
                  **{**answer, "cubin": base64.b64decode(answer["cubin"])})
