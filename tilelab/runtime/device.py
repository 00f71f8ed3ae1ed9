"""Describe this machine's GPU and what it can do, and list known GPUs.

Code that differs by architecture asks the predicates here, such as `current().has_tma`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")


class Unsupported(RuntimeError):
    """A kernel cannot run here. The message is one sentence: what it needs, what is here, what to do instead."""


class _Capabilities:
    """Predicates over `capability`, a (major, minor) tuple; without a GPU it is None and every predicate is False."""

    @property
    def has_tma(self) -> bool:
        """Return whether there is a Tensor Memory Accelerator (`cp.async.bulk`, tensor maps): capability 9.0 and up."""
        return self.capability is not None and self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Return whether `wgmma.mma_async` exists: capability 9.0 exactly, since no later GPU kept it."""
        return self.capability == (9, 0)

    @property
    def has_tcgen05(self) -> bool:
        """Return whether `tcgen05` and tensor memory exist: 10.x and 11.0 (which took over sm_101), not 12.x."""
        return self.capability is not None and self.capability[0] in (10, 11)

    @property
    def has_native_block_scale(self) -> bool:
        """Return whether tensor cores multiply block-scaled operands (MX, NVFP4): capability 10.x to 12.x."""
        return self.capability is not None and 10 <= self.capability[0] <= 12


_NEEDS = {
    "capability": "a GPU",
    "has_tma": "TMA (compute capability 9.0 or newer)",
    "has_wgmma": "WGMMA (compute capability 9.0)",
    "has_tcgen05": "tcgen05 and tensor memory (compute capability 10.x)",
    "has_native_block_scale": "block-scaled tensor cores (compute capability 10.x or 12.x)",
}


@dataclass(frozen=True)
class TargetLimits(_Capabilities):
    """Limits of one compilation target. Shared memory is in bytes, per block with opt-in; registers have 32 bits.

    Source: CUDA Programming Guide, "Compute Capabilities", technical specifications.
    """

    target: str
    capability: tuple[int, int]
    smem_per_block: int
    threads_per_sm: int
    regs_per_thread: int = 255
    regs_per_sm: int = 65536

    @property
    def smem_per_sm(self) -> int:
        """Shared memory of an SM, in bytes. The runtime reserves 1 KiB for each resident block."""
        return self.smem_per_block + 1024


_LIMITS = {
    limits.target: limits
    for limits in (
        TargetLimits("sm_80", (8, 0), 166912, 2048),
        TargetLimits("sm_90a", (9, 0), 232448, 2048),
        TargetLimits("sm_100a", (10, 0), 232448, 2048),
        TargetLimits("sm_103a", (10, 3), 232448, 2048),
        TargetLimits("sm_120a", (12, 0), 101376, 1536),
        TargetLimits("sm_121a", (12, 1), 101376, 1536),
    )
}


def target_limits(target: str) -> TargetLimits:
    """Return the limits of one of TARGETS; ValueError for any other string."""
    if target in _LIMITS:
        return _LIMITS[target]
    if f"{target}a" in _LIMITS:
        raise ValueError(f"{target} lacks the architecture-specific instructions: choose {target}a.")
    raise ValueError(f"unknown target {target!r:.40}; choose one of {', '.join(TARGETS)}.")


@dataclass(frozen=True)
class KnownGpu:
    """Published figures of a GPU: memory bandwidth in GB/s, and dense bf16 TFLOP/s with float32 accumulation.

    None stands for a figure without a reliable source. `pattern` matches the name that the driver reports.
    """

    target: str
    sms: int | None
    memory: str
    peak_gbps: int | None
    bf16_tflops: float | None
    source: str
    pattern: str

    @property
    def smem_per_block(self) -> int:
        """Shared memory that a block may have with opt-in, in bytes."""
        return target_limits(self.target).smem_per_block


# The rate is half of the one in a datasheet that lists only the rate with 2:4 sparsity.
KNOWN = {
    "A100 SXM 80 GB": KnownGpu(
        "sm_80", 108, "HBM2e", 2039, 312, "NVIDIA A100 datasheet", r"NVIDIA A100-SXM4?-80GB"
    ),
    "H100 SXM": KnownGpu("sm_90a", 132, "HBM3", 3350, 989, "NVIDIA H100 datasheet", r"NVIDIA H100 80GB HBM3"),
    "H200": KnownGpu("sm_90a", 132, "HBM3e", 4800, 989, "NVIDIA H200 datasheet", r"NVIDIA H200"),
    "GH200 96 GB": KnownGpu(
        "sm_90a", 132, "HBM3", 4000, 989, "NVIDIA GH200 datasheet", r"NVIDIA GH200 480GB"
    ),
    "B200": KnownGpu("sm_100a", 148, "HBM3e", 8000, 2250, "NVIDIA Blackwell technical brief", r"NVIDIA B200"),
    "B300": KnownGpu("sm_103a", None, "HBM3e", 8000, 2250, "NVIDIA HGX B300 datasheet", r"NVIDIA B300.*"),
    "RTX 5090": KnownGpu(
        "sm_120a", 170, "GDDR7", 1792, 209.5, "NVIDIA RTX Blackwell whitepaper", r"NVIDIA GeForce RTX 5090"
    ),
    "RTX PRO 6000 Blackwell": KnownGpu(
        "sm_120a",
        188,
        "GDDR7",
        1792,
        None,
        "NVIDIA RTX Blackwell PRO whitepaper",
        r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Max-Q).*",
    ),
    "GB10": KnownGpu("sm_121a", 48, "LPDDR5X", 273, None, "NVIDIA DGX Spark datasheet", r"NVIDIA GB10"),
}


def known_gpu(name: str) -> KnownGpu | None:
    """Return the entry of KNOWN for a name from the driver ("NVIDIA H200"), or None; variants have no entry."""
    return next((gpu for gpu in KNOWN.values() if re.fullmatch(gpu.pattern, name)), None)


def describe_target(target: str) -> str:
    """Return a target with the first two GPUs that have it: "sm_90a, H100 SXM / H200"."""
    return f"{target}, {' / '.join([name for name, gpu in KNOWN.items() if gpu.target == target][:2])}"


@dataclass(frozen=True)
class Device(_Capabilities):
    """The GPU that kernels run on. Without one, capability is None, sizes (bytes) are 0 and `note` gives the reason."""

    name: str = "no GPU"
    capability: tuple[int, int] | None = None
    target: str | None = None
    sms: int = 0
    smem_per_block: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    driver: str | None = None
    note: str = ""

    @property
    def slug(self) -> str:
        """The name of its folder in results/: "nvidia-h200", or "no-gpu"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def describe(self) -> str:
        """Return one line for a table or an error message."""
        if self.capability is None:
            return f"no GPU ({self.note})" if self.note else "no GPU"
        return (
            f"{self.name} ({self.target}, {self.sms} SMs, {self.smem_per_block:,} B of shared memory per block, "
            f"{self.memory_bytes / 2**30:.0f} GiB, driver {self.driver or 'unknown'})"
        )


def _query_smi(query: str, options: str) -> str:
    """Return the output of nvidia-smi; "" where it does not exist or does not answer."""
    command = ["nvidia-smi", f"--query-gpu={query}", f"--format=csv,noheader{options}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def driver_version() -> str | None:
    """Return the version of the NVIDIA kernel driver ("580.95.05"), or None where nothing reports it."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = _query_smi("driver_version", "")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def _reason_for_no_gpu() -> str:
    """Return why torch sees no NVIDIA GPU; "" when it sees one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    try:
        import torch
    except Exception as error:  # a broken wheel raises OSError as readily as ImportError
        return f"torch cannot be imported: {first_line(error)}"
    if torch.version.hip:
        return "torch is a ROCm build"
    if torch.version.cuda is None:
        return "torch is a CPU build"
    # a driver that does not answer is only a warning there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    return first_line(caught[0].message) if caught else "torch finds no CUDA device"


def first_line(error: object) -> str:
    """Return the first line of a message without its full stop; for an error without a message, its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


@functools.cache
def current() -> Device:
    """Return torch's current GPU, or a Device whose note says why there is none. Decided once; never raises."""
    try:
        if reason := _reason_for_no_gpu():
            return Device(note=reason)
        import torch

        props = torch.cuda.get_device_properties(torch.cuda.current_device())
        target = f"sm_{props.major}{props.minor}" + ("a" if props.major >= 9 else "")
        sizes = props.shared_memory_per_block_optin, props.L2_cache_size, props.total_memory
        capability, sms = (props.major, props.minor), props.multi_processor_count
        return Device(props.name, capability, target, sms, *sizes, driver_version())
    except Exception as error:
        return Device(note=f"the driver does not answer: {first_line(error)}")


@functools.cache
def current_uuid() -> str:
    """Return the UUID of the current GPU in the form of CUDA_VISIBLE_DEVICES; "" without a GPU."""
    if current().capability is None:
        return ""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def same_model_uuids() -> list[str]:
    """Return the UUIDs of the visible GPUs of the current GPU's model; only their figures can be compared."""
    if current().capability is None:
        return []
    import torch

    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"GPU-{gpu.uuid}" for gpu in every if gpu.name == current().name]


def out_of_memory_reason(error: Exception) -> str:
    """Return a sentence if `error` says that the GPU has no memory left; "" for any other error."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return (
        f"the GPU has too little free memory; other processes hold {others / 2**30:.0f} of its {total / 2**30:.0f} "
        "GiB: end them, or hide the GPU with CUDA_VISIBLE_DEVICES=-1 to see the recorded rows"
    )


@contextlib.contextmanager
def explain_missing_memory(what: str) -> Iterator[None]:
    """Turn torch's error of a GPU without free memory into an Unsupported that names `what`, in one sentence."""
    try:
        yield
    except Exception as error:
        if reason := out_of_memory_reason(error):
            raise Unsupported(f"{what}: {reason}") from error
        raise


def user_lock_path(name: str) -> pathlib.Path:
    """Return the path of a lock file in a folder that only this user can open, so that nobody else can hold the lock.

    All processes of the user find it in the folder of temporary files. OSError where another user has made the folder.
    """
    folder = pathlib.Path(tempfile.gettempdir(), f"tiles-in-flight-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} must be this user's and of mode 0700: remove it, or set TMPDIR.")
    return folder / f"{name}.lock"


def memory_in_use_gib() -> dict[str, tuple[float, float]]:
    """Return {UUID: (GiB in use, GiB in total)} of each GPU for which nvidia-smi reports them."""
    text = _query_smi("uuid,memory.used,memory.total", ",nounits")
    # Where the CPU shares the memory, "[N/A]" stands there, and no row matches.
    rows = re.findall(r"^(GPU-\S+), (\d+), (\d+)$", text, re.MULTILINE)
    return {uuid: (int(used) / 1024, int(total) / 1024) for uuid, used, total in rows}


def require(predicate: str, what: str, instead: str) -> None:
    """Raise Unsupported unless the current GPU has `predicate`, such as "has_tma".

    `what` names the kernel or experiment; `instead` is an imperative clause that says what to do.
    """
    here = current()
    if not getattr(here, predicate):
        raise Unsupported(
            f"{what} needs {_NEEDS[predicate]}; here is {here.describe()}: {instead.rstrip('.')}."
        )


def interpret_without_gpu() -> None:
    """Let Triton run kernels in its interpreter where there is no GPU; each chapter's __init__ calls this.

    Triton reads TRITON_INTERPRET when it defines a kernel, also in its own library, so the variable must be set before
    `import triton`; RuntimeError if it is too late. A value that is already set stays: "0" allows compiling.
    """
    if "TRITON_INTERPRET" in os.environ or current().capability is not None:
        return
    if "triton" in sys.modules:
        raise RuntimeError(
            "Triton was imported before the chapter, but without a GPU kernels run in its interpreter, "
            "which it selects when it is imported: restart, and import the chapter first."
        )
    os.environ["TRITON_INTERPRET"] = "1"
