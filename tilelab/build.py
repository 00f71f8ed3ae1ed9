"""Compile Triton and CUDA C++ kernels for any target with no GPU, in worker processes that may crash, and read what
came out.

A compiler that raises, aborts, faults or hangs becomes a Report with the reason. Nothing here imports Triton: it lives
in the workers, where TRITON_INTERPRET=0 lets a machine without a GPU compile.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from tilelab import child, cuda
from tilelab.device import limits

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
# How data moves, in the SASS of a .cu kernel: by threads, by threads without registers, by the copy engine; barriers.
OPCODES = ("LDG", "STG", "LDS", "STS", "LDGSTS", "UBLKCP", "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG", "SYNCS")


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
    instructions in the PTX (INSTRUCTIONS), or those in the SASS of a .cu kernel (OPCODES, and what tensor core
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
        limit, warps = limits(self.job.target), self.threads // 32
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
    return dynamic + max((static or 0) - (1024 if limits(target).capability >= (9, 0) else 0), 0)


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


# ---- in the worker


def _kernel(name: str):
    module, _, attribute = name.rpartition(":")
    try:
        if module.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"file_{pathlib.Path(module).stem}", module)
            loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up
            # Compiled here: a bytecode cache cannot tell apart two edits within one second.
            exec(compile(pathlib.Path(module).read_text(), module, "exec"), loaded.__dict__)
        else:
            loaded = importlib.import_module(module)
        kernel = getattr(loaded, attribute)
    except Exception as error:
        raise ImportError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    while not hasattr(kernel, "arg_names") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if not hasattr(kernel, "arg_names"):
        raise TypeError(f"{name} is no @triton.jit function")
    return kernel


def _compile(job: dict) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = _kernel(job["kernel"])
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    names = kernel.arg_names
    unknown = ((set(job["signature"]) | set(job["constants"])) ^ set(names)) | (set(job["aligned"]) - set(names))
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: given but not taken by the kernel, or the reverse")
    signature = {name: job["signature"].get(name, "constexpr") for name in names}
    # As a launch gives them, so that it finds this build in the cache: in order, and empty for what is not aligned.
    names_constants = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    given = ("*", "i", "u") + ("constexpr",) * names_constants
    attributes = {(index,): [["tt.divisibility", 16]] if name in job["aligned"] else []
                  for index, name in enumerate(names)
                  if signature[name].startswith(given) and not kernel.params[index].do_not_specialize}
    capability = int(re.sub(r"\D", "", job["target"]))
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"], **job["options"]}

    def built() -> dict:
        source = source_type(kernel, signature, job["constants"], attributes)
        begun = time.perf_counter()
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        seconds = time.perf_counter() - begun
        ptx, cubin = binary.asm["ptx"], binary.asm["cubin"]
        if not ptx.rstrip().endswith("}"):
            raise ValueError("the PTX is not complete")
        warps = getattr(binary.metadata, "total_num_warps", None) or binary.metadata.num_warps
        return {"smem": binary.metadata.shared, "tmem": getattr(binary.metadata, "tmem_size", None),
                "threads": 32 * warps, "seconds": seconds, "ptx": ptx,
                "cubin": base64.b64encode(cubin).decode(), **_resources(cubin)}

    try:
        return built()
    except (KeyError, OSError, ValueError, struct.error):  # what a damaged or unwritable cache raises
        with tempfile.TemporaryDirectory() as os.environ["TRITON_CACHE_DIR"]:
            return built()


def _compile_cu(job: dict) -> dict:
    path, _, name = job["kernel"].rpartition(":")
    file = os.path.basename(path)
    if job["signature"] or job["aligned"]:
        raise ValueError(f"{file} is CUDA C++: its job takes no signature and no aligned")
    options = [f"-D{key}={int(value) if isinstance(value, bool) else value}" for key, value in job["constants"].items()]
    options += [f"--{key}" if value is True else f"--{key}={value}" for key, value in job["options"].items()]
    begun = time.perf_counter()
    try:
        cubin = cuda.compile_file(path, job["target"], options)
    except cuda.CompileError as error:
        return {"reason": _first_error(str(error))}
    seconds = time.perf_counter() - begun
    entries = _entries(cubin).values()
    if name not in entries:
        hint = ' (extern "C" leaves a name as it is written)' if any(each.startswith("_Z") for each in entries) else ""
        return {"reason": f"{file} defines no kernel {name}; it defines {', '.join(entries) or 'none'}{hint}"}
    try:
        counts = dict.fromkeys(OPCODES, 0) | sass_counts(cubin, name)
    except (RuntimeError, OSError):  # a cuobjdump may be older than the target
        counts = {}
    return {"smem": job["smem_bytes"], "threads": 32 * job["num_warps"], "seconds": seconds, "ptx": "",
            "counts": counts, "cubin": base64.b64encode(cubin).decode(), **_resources(cubin, name)}


def _first_error(said: str) -> str:
    """The first error in what `tilelab.cuda` says, in one line: with file and line where it is NVRTC's, while ptxas
    knows only lines of the PTX."""
    if found := re.search(r"^.+\(\d+\): (?:catastrophic )?error.*", said, re.MULTILINE):
        return found[0].strip()
    first, *rest = said.splitlines()
    if found := re.search(r"^ptxas.*?\b(?:error|fatal)\s*: (.+)", "\n".join(rest), re.MULTILINE):
        return f"{first} ptxas: {found[1].strip()}"
    return " ".join([first, *rest[:1]])


def _sections(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Where each section of the ELF file begins and its length."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("the cubin is no ELF file")
    table, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    return {_string(cubin, headers[names][4] + header[0]): header[4:] for header in headers}


def _string(cubin: bytes, at: int) -> str:
    return cubin[at:cubin.index(b"\0", at)].decode()


def _entries(cubin: bytes) -> dict[int, str]:
    """The names of its kernels, by their index in the symbol table."""
    sections = _sections(cubin)
    at, length = sections[".symtab"]
    symbols = [struct.unpack_from("<IBB", cubin, at + 24 * index) for index in range(length // 24)]
    return {index: _string(cubin, sections[".strtab"][0] + name)
            for index, (name, _, other) in enumerate(symbols) if other & 0x10}  # STO_CUDA_ENTRY


def _resources(cubin: bytes, kernel: str = "") -> dict:
    """Registers and stack, from the attributes that ptxas writes to .nv.info, and shared memory: of `kernel`, or of a
    cubin's only one.

    They are what `cuobjdump -res-usage` prints, without another process and for targets newer than that tool.
    """
    sections = _sections(cubin)
    entries = _entries(cubin) if kernel else {}
    at, length = sections.get(".nv.info", (0, 0))
    end, registers, stack = at + length, [], []
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        if attribute in (0x2F, 0x12):  # EIATTR_REGCOUNT, EIATTR_MIN_STACK_SIZE: a symbol and its figure
            symbol, figure = struct.unpack_from("<II", cubin, at + 4)
            if entries.get(symbol, "") == kernel:
                (registers if attribute == 0x2F else stack).append(figure)
        at += 4 + (value if form == 4 else 0)  # form 4: `value` is the length of what follows
    static = sum(length for name, (_, length) in sections.items()
                 if name.startswith(".nv.shared.") and "reserved" not in name
                 and (not kernel or name == f".nv.shared.{kernel}"))
    return {"registers": max(registers, default=None), "spills": max(stack, default=None), "smem_static": static}


def _tool(name: str) -> pathlib.Path:
    found = importlib.util.find_spec("triton")  # found, not imported
    return pathlib.Path(found.origin).parent / "backends/nvidia/bin" / name


def _cuobjdump(flag: str, cubin: bytes, *more: str) -> str:
    # A listing takes as long as it took to compile, and many ask for the same: it is kept beside the cubins.
    what = (flag, *more, version("triton")), cubin
    path = cuda.cubin_folder() / (hashlib.sha256(repr(what).encode()).hexdigest() + ".listing")
    if kept := cuda.recall(path):
        return zlib.decompress(kept).decode()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_tool("cuobjdump"), flag, *more, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        raise RuntimeError(f"the cuobjdump of Triton {version('triton')} cannot read this cubin: {' '.join(said[:1])}")
    cuda.keep(path, zlib.compress(done.stdout.encode(), 1))
    return done.stdout


def _why(error: BaseException, said: str) -> str:
    """One sentence from an exception and what the compiler wrote to stderr while it was raised."""
    text = f"{error}\n{said}"
    if found := re.search(r"ptxas (?:\S+, line \d+; )?(?:fatal|error)\s*:\s*(?:\(C\d+\) )?(.+)", text):
        return f"ptxas: {found[1].strip()}"
    if found := re.search(r"executing \[?`(\w+)`", text):
        detail = re.search(r"error: (?!Failures have been detected)(.+)|(Assertion `.+?') failed", said)
        return f"the compiler pass {found[1]} failed" + (f": {(detail[1] or detail[2]).strip()}" if detail else "")
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]


def _answer(request: dict) -> dict:
    os.lseek(2, 0, os.SEEK_SET)  # or what the compiler says would lie behind a hole as long as the last job's
    os.environ.pop("TRITON_CACHE_DIR", None)  # the last job's
    if request["cache"]:
        os.environ["TRITON_CACHE_DIR"] = request["cache"]
    os.environ["TILES_CUBINS"] = request["cubins"]
    try:
        return _compile_cu(request) if ".cu:" in request["kernel"] else _compile(request)
    except Exception as error:
        sys.stderr.flush()
        said = os.pread(2, 1 << 20, 0).decode(errors="replace")  # what the compiler wrote, whole kernels too
        # What LLVM calls fatal leaves a process behind in which later builds were seen to hang and to abort.
        return {"reason": _why(error, said), "said": f"{type(error).__name__}: {error}\n{said}",
                "leaving": bool(re.search("LLVM ERROR|Assertion `", said))}


# ---- in the caller


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
        limits(job.target)
    if timeout_s <= 0 or (workers is not None and workers < 1):
        raise ValueError(f"workers and timeout_s must be positive; they are {workers} and {timeout_s}.")
    return _build(jobs, min(workers or os.cpu_count() or 1, max(len(jobs), 1)), timeout_s, cache, triton)


def _build(jobs, count, timeout_s, cache, triton):
    ticket = object()
    pool = ThreadPoolExecutor(count, "build")
    try:
        for future in as_completed([pool.submit(build_one, job, timeout_s, cache, ticket, triton) for job in jobs]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        child.kill(ticket)  # the caller stopped early
        pool.shutdown()


def build_one(job: Job, timeout_s: float = 120, cache: str | os.PathLike | None = None,
              ticket: object = None, triton: str | os.PathLike | None = None) -> Report:
    """`build` of a single job, in a worker that `child.kill(ticket)` ends."""
    limits(job.target)
    kernel = os.path.abspath(job.kernel) if re.search(r"\.(py|cu):", job.kernel) else job.kernel
    request = {**dataclasses.asdict(job), "kernel": kernel, "cubins": os.path.abspath(cache or cuda.cubin_folder()),
               "cache": str(cache or os.environ.get("TRITON_CACHE_DIR") or "")}
    try:
        env = {"TRITON_INTERPRET": "0"} | ({"TILES_TRITON": os.path.abspath(triton)} if triton else {})
        with child.borrowed("tilelab.build", "the compiler", ticket, **env) as worker:
            return _report(job, worker.ask(request, timeout_s))
    except Exception as error:  # a job that is no JSON, a machine out of processes: a row like any other
        return Report(job, "failed", f"{type(error).__name__}: {error}")


def _report(job: Job, answer: dict) -> Report:
    if "reason" in answer:
        return Report(job, "failed", answer["reason"].rstrip(".") + ".", said=answer.get("said", answer["reason"]))
    limit = limits(job.target)
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


def sass(cubin: bytes, kernel: str = "") -> str:
    """SASS of a cubin, or of one kernel in it, through the cuobjdump in Triton's wheel; RuntimeError says why it could
    not be read."""
    return _cuobjdump("-sass", cubin, *(["-fun", kernel] if kernel else []))


def sass_counts(cubin: bytes, kernel: str = "") -> collections.Counter:
    """Occurrences in SASS of opcodes, without their suffixes: TMA (UTMALDG, UTMASTG, UBLKCP), mbarrier (SYNCS), tensor
    core (HGMMA, UTCHMMA, HMMA...), loads and stores by threads (LDG, STG, LDS, STS, LDGSTS) and fences (FENCE).

    Of one kernel where it is named; RuntimeError as for `sass`.
    """
    opcodes = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?" \
              r"(UTMA[A-Z]+|UBLKCP|UBLKRED|SYNCS|UTC[A-Z]*MMA|[A-Z]G?MMA|LDGSTS|LDG|STG|LDS|STS|FENCE)\b"
    return collections.Counter(re.findall(opcodes, sass(cubin, kernel), re.MULTILINE))


def ptxas_remarks(ptx: str, target: str) -> list[str]:
    """What ptxas has to say about performance, "wgmma instructions are serialized" above all; Triton drops it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [_tool("ptxas"), f"--gpu-name={target}", path, "-o", path.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses this PTX: {(done.stdout + done.stderr).strip().splitlines()[:1]}")
    return re.findall(r"\(C\d+\) Potential Performance Loss: .+", done.stdout + done.stderr)


if __name__ == "__main__":
    if another := os.environ.get("TILES_TRITON"):
        sys.path.insert(0, another)
        importlib.import_module("triton")  # now, for each request brings the path of its caller
    child.serve(_answer)
