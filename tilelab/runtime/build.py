"""Compile Triton and CUDA C++ kernels for any target, without a GPU, in worker processes that may crash.

A compiler that raises, aborts, faults or hangs becomes a Report with the reason. Only the workers import Triton, with
TRITON_INTERPRET=0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from tilelab.runtime import cuda, worker_pool
from tilelab.runtime.cubin import OPCODES, sass, sass_counts
from tilelab.runtime.cubin import ptxas_remarks as ptxas_remarks  # callers take it from here
from tilelab.runtime.device import Unsupported, target_limits

# Instructions that are counted in the PTX: what the compiler emitted, not how often it runs.
INSTRUCTIONS = {
    "tma_load": r"cp\.async\.bulk\.tensor\.[^;\n]*shared::(?:cluster|cta)\.global",
    "tma_store": r"cp\.async\.bulk\.tensor\.[^;\n]*\.global\.shared::cta|cp\.reduce\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05_mma": r"tcgen05\.mma",
    "block_scale": r"\.block_scale",
    "mma_sync": r"mma\.sync",
    "tensormap_replace": r"tensormap\.replace",
    "setmaxnreg": r"setmaxnreg",
}
SYSTEM_SMEM = 1024  # bytes of shared memory per block that the system keeps, from sm_90 on
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Job:
    """One kernel, specialised for one target.

    For Triton, `kernel` is "ch14.gemm.kernels:gemm_plain_kernel" or "path/to/file.py:name". `signature` maps each
    argument that is not a constexpr to its Triton type ("*bf16", "i32", "tensordesc<bf16[128, 64]>"). `constants` maps
    the constexpr arguments to their values. `aligned` names pointers and integers that are multiples of 16. `options`
    are further compile options. `first_lines` maps the functions of a file that holds a copy of notebook cells to their
    lines in these cells: Triton's cache compares them too, so that a launch from a cell finds the build.

    For CUDA C++, `kernel` is "path/to/file.cu:name". `constants` become -DNAME=VALUE (a bool 0 or 1), and
    `smem_bytes` is the dynamic shared memory of the launch.
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
    first_lines: dict[str, int] = field(default_factory=dict)

    @property
    def _entry(self) -> str:
        """Return the kernel's name if its cubin may hold several (.cu), else ""."""
        path, _, name = self.kernel.rpartition(":")
        return name if path.endswith(".cu") else ""


@dataclass(frozen=True)
class Report:
    """The result of compiling a Job. `status` is ok, rejected (compiled, but the target cannot launch it) or failed.

    `smem` and `smem_static` are bytes of dynamic and static shared memory per block; from sm_90 on the static ones
    include 1,024 of the system. `spills` are bytes of local memory per thread, `tmem` columns of tensor memory per
    block. `reason` is one sentence, empty when all is well; `compiler_output` holds exception and log of a failure.
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
    seconds: float = 0.0
    ptx: str = field(default="", repr=False)
    cubin: bytes = field(default=b"", repr=False)
    compiler_output: str = field(default="", repr=False)

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of instructions in the PTX (INSTRUCTIONS), or in the SASS of a .cu kernel, by their names.

        It is empty where nothing was built or the SASS cannot be read. Reading SASS takes part of a second.
        """
        if not self.job._entry:
            return {
                name: len(re.findall(pattern, self.ptx)) for name, pattern in INSTRUCTIONS.items() if self.ptx
            }
        try:
            return dict.fromkeys(OPCODES, 0) | sass_counts(self.cubin, self.job._entry) if self.cubin else {}
        except (RuntimeError, OSError):  # cuobjdump may be older than the target
            return {}

    @property
    def sass(self) -> str:
        """Return the SASS of the kernel. RuntimeError says why it cannot be read."""
        if not self.cubin:
            raise RuntimeError(f"{self.job.kernel.rpartition(':')[2]} was not built: {self.reason}")
        return sass(self.cubin, self.job._entry)

    @property
    def programs_per_sm(self) -> int | None:
        """Return how many programs run on an SM at a time (the occupancy); None where nothing was built."""
        if self.smem is None or not self.registers:
            return None
        limit, warps = target_limits(self.job.target), self.threads // 32
        # the SM hands out registers 256 per warp at a time
        registers_per_warp = -(-self.registers * 32 // 256) * 256
        smem = _requested_smem(self.smem, self.smem_static, self.job.target) + SYSTEM_SMEM
        return min(
            limit.smem_per_sm // smem,
            limit.threads_per_sm // self.threads,
            limit.regs_per_sm // (registers_per_warp * warps),
            32,
        )

    @property
    def launchable(self) -> bool:
        """Return whether the target can launch it."""
        return self.status == "ok"

    def row(self) -> dict:
        """Return a flat dict for a table or results/, without PTX and cubin."""
        fields = "status reason registers spills smem smem_static threads".split()
        row = {"name": self.job.name or self.job.kernel, "target": self.job.target}
        row |= {field: getattr(self, field) for field in fields} | {"seconds": round(self.seconds, 3)}
        return row | self.counts


def _requested_smem(dynamic: int, static: int | None, target: str) -> int:
    """Return the shared memory that a block asks for: a cubin counts the system's share as static from sm_90 on."""
    system = SYSTEM_SMEM if target_limits(target).capability >= (9, 0) else 0
    return dynamic + max((static or 0) - system, 0)


def job_for(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], target: str, **fields: Any
) -> Job:
    """Return the Job of a `@triton.jit` function, also an interpreted or autotuned one; `fields` are others of Job.

    Raises ValueError for a kernel that another process cannot import by name.
    """
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    if kernel.__module__ == "__main__" or kernel.__qualname__ != kernel.__name__:
        raise ValueError(
            f"the compiler's process cannot import {kernel.__qualname__} from {kernel.__module__}: "
            "define it at the top level of a module."
        )
    where = kernel.__module__ if kernel.__module__ in sys.modules else kernel.__code__.co_filename
    return Job(f"{where}:{kernel.__name__}", signature, constants, target, **fields)


def build(
    jobs: Iterable[Job],
    workers: int | None = None,
    timeout_s: float = 120,
    cache: str | os.PathLike | None = None,
    triton: tuple[str, os.PathLike] | None = None,
) -> Iterator[Report]:
    """Compile `jobs` in parallel and yield a Report for each as it finishes, in any order.

    `workers` is the number of processes (default: one per CPU), `timeout_s` the limit per job, to which the start of a
    process does not count. `cache` replaces the cache folders of Triton and of tilelab.runtime.cuda. `triton` is
    (version, folder) of another Triton (pip's --target), for kernels that import nothing but Triton. Closing the
    iterator early kills the running builds. Raises ValueError at once for a target that is not in
    tilelab.runtime.device.TARGETS, and Unsupported where the folder does not hold that Triton.
    """
    jobs = list(jobs)
    for job in jobs:
        target_limits(job.target)
    return _build(jobs, min(workers or _count_cpus(), max(len(jobs), 1)), timeout_s, cache, triton)


def _count_cpus() -> int:
    return len(os.sched_getaffinity(0))  # those that this process may use


def _build(jobs, count, timeout_s, cache, triton):
    cancel_token = object()
    pool = ThreadPoolExecutor(count, "build")
    try:
        futures = [pool.submit(build_one, job, timeout_s, cache, cancel_token, triton) for job in jobs]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        worker_pool.kill_workers(cancel_token)  # the caller may have stopped early
        pool.shutdown()


def compile_ahead(jobs: Iterable[Job]) -> None:
    """Compile the jobs in parallel into the caches that launches read. A failure shows again at the launch."""
    for _ in build(jobs):
        pass


def disassemble(jobs: Iterable[Job]) -> list[Report]:
    """Return the Reports of the jobs, in order, with their SASS in the cache: cuobjdump runs for them in parallel."""

    def read(report: Report) -> None:
        with contextlib.suppress(RuntimeError):
            sass(report.cubin, report.job._entry)

    jobs, reports = list(jobs), {}
    with ThreadPoolExecutor(_count_cpus()) as pool:
        for report in build(jobs):
            reports[id(report.job)] = report
            if report.cubin:
                pool.submit(read, report)
    return [reports[id(job)] for job in jobs]


def build_one(
    job: Job,
    timeout_s: float = 120,
    cache: str | os.PathLike | None = None,
    cancel_token: object = None,
    triton: tuple[str, os.PathLike] | None = None,
    keep_ptx: bool = False,
) -> Report:
    """Compile a single job like `build`, in a worker that `worker_pool.kill_workers(cancel_token)` ends.

    The report of a Triton kernel has its PTX; that of a .cu kernel has it with `keep_ptx`, which takes longer.
    """
    target_limits(job.target)
    kernel = os.path.abspath(job.kernel) if re.search(r"\.(py|cu):", job.kernel) else job.kernel
    request = {
        **dataclasses.asdict(job),
        "kernel": kernel,
        "cubins": os.path.abspath(cache or cuda.cubin_folder()),
        "cache": str(cache or os.environ.get("TRITON_CACHE_DIR") or ""),
        "keep_ptx": keep_ptx,
    }
    env = {"TRITON_INTERPRET": "0"}
    if triton:
        env |= {"TILES_TRITON_VERSION": triton[0], "TILES_TRITON": os.path.abspath(triton[1])}
    try:
        with worker_pool.lease_worker(
            "tilelab.runtime.build_worker", "the compiler", cancel_token, **env
        ) as worker:
            answer = worker.ask(request, timeout_s, {"kernel": kernel, "warm_up": True})
    except Exception as error:  # a job that cannot be pickled, a machine out of processes
        return Report(job, "failed", f"{type(error).__name__}: {error}")
    if "unsupported" in answer:
        raise Unsupported(answer["unsupported"])
    return _make_report(job, answer)


def _make_report(job: Job, answer: dict) -> Report:
    if "reason" in answer:
        output = answer.get("compiler_output", answer["reason"])
        return Report(job, "failed", answer["reason"].rstrip(".") + ".", compiler_output=output)
    reason = _find_exceeded_limit(job.target, **answer)
    return Report(job, "rejected" if reason else "ok", reason, **answer)


def _find_exceeded_limit(
    target: str,
    smem: int,
    smem_static: int,
    threads: int,
    registers: int | None,
    tmem: int | None = None,
    **_,
) -> str:
    """Return a sentence about the first limit of the target that a launch would exceed, or ""."""
    limit, smem = target_limits(target), _requested_smem(smem, smem_static, target)
    if smem > limit.smem_per_block:
        return f"it needs {smem:,} B of shared memory per block; {target} has {limit.smem_per_block:,} B."
    if (tmem or 0) > TENSOR_MEMORY_COLUMNS:  # Triton compiles a trap, and its launcher refuses
        return f"it needs {tmem:,} columns of tensor memory per block; {target} has {TENSOR_MEMORY_COLUMNS}."
    if threads > 1024:
        return f"it has {threads:,} threads per block; {target} allows 1,024."
    if threads * (registers or 0) > limit.regs_per_sm:
        return f"its {threads} threads with {registers} registers each exceed the {limit.regs_per_sm:,} of an SM."
    return ""
