"""What this machine is and can do, and a table of known GPUs.

Code that differs by architecture asks here (`current().has_tma`), in one place.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass

TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")


class Unsupported(RuntimeError):
    """A kernel cannot run here. The message is one sentence: what is needed, what is here, what to do instead."""


class _Capabilities:
    """Predicates over `capability`, a (major, minor) tuple or None without a GPU (every predicate is then False)."""

    @property
    def has_tma(self) -> bool:
        """Tensor Memory Accelerator: `cp.async.bulk` and tensor maps, capability 9.0 and newer."""
        return self.capability is not None and self.capability >= (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """`wgmma.mma_async`, the Hopper warp-group product: capability 9.0 exactly, no later GPU kept it."""
        return self.capability == (9, 0)

    @property
    def has_tcgen05(self) -> bool:
        """`tcgen05` products and tensor memory: 10.x (and 11.0, which took over sm_101), not the 12.x GPUs."""
        return self.capability is not None and self.capability[0] in (10, 11)

    @property
    def has_native_block_scale(self) -> bool:
        """Block-scaled products (MX, NVFP4) in the tensor cores: 10.x to 12.x, whatever a compiler makes of them."""
        return self.capability is not None and 10 <= self.capability[0] <= 12


_NEEDS = {
    "has_tma": "TMA (compute capability 9.0 or newer)",
    "has_wgmma": "WGMMA (compute capability 9.0)",
    "has_tcgen05": "tcgen05 and tensor memory (compute capability 10.x)",
    "has_native_block_scale": "block-scaled tensor cores (compute capability 10.x or 12.x)",
}


@dataclass(frozen=True)
class TargetLimits(_Capabilities):
    """What one compilation target allows: bytes of shared memory (per block: with opt-in), 32-bit registers, threads.

    Source: CUDA Programming Guide, "Compute Capabilities", technical specifications.
    """

    target: str
    capability: tuple[int, int]
    smem_per_block: int
    smem_per_sm: int
    threads_per_sm: int
    regs_per_thread: int = 255
    regs_per_sm: int = 65536


_LIMITS = {
    "sm_80": TargetLimits("sm_80", (8, 0), 166912, 167936, 2048),
    "sm_90a": TargetLimits("sm_90a", (9, 0), 232448, 233472, 2048),
    "sm_100a": TargetLimits("sm_100a", (10, 0), 232448, 233472, 2048),
    "sm_103a": TargetLimits("sm_103a", (10, 3), 232448, 233472, 2048),
    "sm_120a": TargetLimits("sm_120a", (12, 0), 101376, 102400, 1536),
    "sm_121a": TargetLimits("sm_121a", (12, 1), 101376, 102400, 1536),
}


def target_limits(target: str) -> TargetLimits:
    """The limits of one of TARGETS; ValueError for any other string."""
    if target in _LIMITS:
        return _LIMITS[target]
    if f"{target}a" in _LIMITS:
        raise ValueError(f"{target} lacks the architecture-specific instructions: the target meant is {target}a.")
    raise ValueError(f"unknown target {target!r:.40}: the targets are {', '.join(TARGETS)}.")


@dataclass(frozen=True)
class KnownGpu:
    """A published GPU: peak_gbps is memory bandwidth in GB/s, bf16_tflops the dense bf16 peak with fp32 accumulation.

    None stands where no figure could be backed. `pattern` matches the name that the driver gives.
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
        """Shared memory a block may have, in bytes, with opt-in."""
        return target_limits(self.target).smem_per_block


# A datasheet that lists only the rate with 2:4 sparsity is halved here.
KNOWN = {
    "A100 SXM 80 GB": KnownGpu("sm_80", 108, "HBM2e", 2039, 312, "NVIDIA A100 datasheet", r"NVIDIA A100-SXM4?-80GB"),
    "H100 SXM": KnownGpu("sm_90a", 132, "HBM3", 3350, 989, "NVIDIA H100 datasheet", r"NVIDIA H100 80GB HBM3"),
    "H200": KnownGpu("sm_90a", 132, "HBM3e", 4800, 989, "NVIDIA H200 datasheet", r"NVIDIA H200"),
    "GH200 96 GB": KnownGpu("sm_90a", 132, "HBM3", 4000, 989, "NVIDIA GH200 datasheet", r"NVIDIA GH200 480GB"),
    "B200": KnownGpu("sm_100a", 148, "HBM3e", 8000, 2250, "NVIDIA Blackwell technical brief", r"NVIDIA B200"),
    "B300": KnownGpu("sm_103a", None, "HBM3e", 8000, 2250, "NVIDIA HGX B300 datasheet", r"NVIDIA B300.*"),
    "RTX 5090": KnownGpu("sm_120a", 170, "GDDR7", 1792, 209.5, "NVIDIA RTX Blackwell whitepaper",
                         r"NVIDIA GeForce RTX 5090"),
    "RTX PRO 6000 Blackwell": KnownGpu("sm_120a", 188, "GDDR7", 1792, None, "NVIDIA RTX Blackwell PRO whitepaper",
                                       r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Max-Q).*"),
    "GB10": KnownGpu("sm_121a", 48, "LPDDR5X", 273, None, "NVIDIA DGX Spark datasheet", r"NVIDIA GB10"),
}


def known_gpu(name: str) -> KnownGpu | None:
    """The table's entry for a driver's device name ("NVIDIA H200"), or None; variants and MIG slices do not match."""
    return next((gpu for gpu in KNOWN.values() if re.fullmatch(gpu.pattern, name)), None)


@dataclass(frozen=True)
class Device(_Capabilities):
    """The GPU that kernels run on, or its absence (capability None, zero sizes). Sizes in bytes; `note` says why."""

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
        """Folder name in results/: "nvidia-h200", or "no-gpu"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def describe(self) -> str:
        """One line for a table or an error message."""
        if self.capability is None:
            return f"no GPU ({self.note})" if self.note else "no GPU"
        return (f"{self.name} ({self.target}, {self.sms} SMs, {self.smem_per_block:,} B of shared memory a block, "
                f"{self.memory_bytes / 2**30:.0f} GiB, driver {self.driver or 'unknown'})")


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver ("580.95.05"), or None where neither /proc nor nvidia-smi tells it."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        try:
            command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else None


def _absent() -> str:
    """Why torch sees no NVIDIA GPU; empty when it sees one."""
    try:
        import torch
    except Exception as error:  # a broken wheel raises OSError as readily as ImportError
        return f"torch cannot be imported: {first_line(error)}"
    if torch.version.hip:
        return "torch is a ROCm build"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides every GPU"
    if torch.version.cuda is None:
        return "torch is a CPU build"
    with warnings.catch_warnings(record=True) as caught:  # a driver that does not answer is only a warning there
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    return first_line(caught[0].message) if caught else "torch finds no CUDA device"


def first_line(error: object) -> str:
    """The first line of a message, without its full stop; the type of an error that has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


@functools.cache
def current() -> Device:
    """The CUDA device that torch is using, or a Device saying why there is none. Decided once; never raises."""
    try:
        if reason := _absent():
            return Device(note=reason)
        import torch

        props = torch.cuda.get_device_properties(torch.cuda.current_device())
        target = f"sm_{props.major}{props.minor}" + ("a" if props.major >= 9 else "")
        return Device(props.name, (props.major, props.minor), target, props.multi_processor_count,
                      props.shared_memory_per_block_optin, props.L2_cache_size, props.total_memory, driver_version())
    except Exception as error:
        return Device(note=f"the driver does not answer: {first_line(error)}")


@functools.cache
def current_uuid() -> str:
    """The current GPU's, as CUDA_VISIBLE_DEVICES takes it; empty without one."""
    if current().capability is None:
        return ""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def same_model_uuids() -> list[str]:
    """UUIDs of the visible GPUs that are of one model with the current one: only their figures can be compared."""
    if current().capability is None:
        return []
    import torch

    every = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"GPU-{gpu.uuid}" for gpu in every if gpu.name == current().name]


def out_of_memory_reason(error: Exception) -> str:
    """A sentence where `error` is that the GPU's memory is used up; empty where it is another."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    free, whole = torch.cuda.mem_get_info()
    others = whole - free - torch.cuda.memory_reserved()
    return (f"the GPU's memory does not suffice, of whose {whole / 2**30:.0f} GiB other processes hold "
            f"{others / 2**30:.0f}: end them, or hide the GPU with CUDA_VISIBLE_DEVICES=-1 to see what is recorded")


def memory_in_use_gib() -> dict[str, tuple[float, float]]:
    """{UUID: GiB of its memory that processes hold, GiB it has} of each GPU that nvidia-smi knows that of."""
    command = ["nvidia-smi", "--query-gpu=uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = re.findall(r"^(GPU-\S+), (\d+), (\d+)$", said, re.MULTILINE)  # "[N/A]" where the CPU shares it
    return {gpu: (int(used) / 1024, int(total) / 1024) for gpu, used, total in rows}


def require(predicate: str, what: str, instead: str) -> None:
    """Raise Unsupported unless the current device has `predicate` ("has_tma").

    `what` names the kernel or experiment; `instead` is an imperative clause saying what to do.
    """
    if predicate not in _NEEDS:
        raise ValueError(f"unknown predicate {predicate!r}: they are {', '.join(_NEEDS)}.")
    device = current()
    if not getattr(device, predicate):
        raise Unsupported(f"{what} needs {_NEEDS[predicate]}; here is {device.describe()}: {instead.rstrip('.')}.")


def interpret_without_gpu() -> None:
    """Have Triton run kernels in its interpreter where there is no GPU; a chapter's __init__ calls it.

    Triton asks TRITON_INTERPRET as it defines each kernel, those of its own library first, so it must be set before
    `import triton`: RuntimeError when that is past. A value that is set already stays: "0" is for who only compiles.
    """
    if "TRITON_INTERPRET" in os.environ or current().capability is not None:
        return
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before the chapter: without a GPU kernels run in Triton's interpreter, "
                           "which it chooses as it is imported; restart, and import the chapter first.")
    os.environ["TRITON_INTERPRET"] = "1"
