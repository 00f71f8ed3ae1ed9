"""GEMM on Hopper's tensor cores, bf16 with float32 sums: C (M, N) = A (M, K) B (K, N).

Read wgmma_gemm.cu first: it walks through the kernels. The steps of the ladder and the model that picks a configuration
are in configs.py. Source: PTX ISA, "wgmma"; CUTLASS, sm90_mma_tma_gmma_ss_warpspecialized.
"""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from ch10.wgmma_gemm import operator
from ch10.wgmma_gemm.choice import rank
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, configs, fits, parse, rejection
from tilelab.runtime import build, cuda, device, first_call, operands, operators, provenance, tuned
from tilelab.runtime.plans import Plan, Planner
from tilelab.runtime.tensor_map import make_tensor_map

__all__ = ["spec", "gemm", "prepare", "configs", "job", "WgmmaConfig"]

SOURCE = pathlib.Path(__file__).with_name("wgmma_gemm.cu")
LARGEST_EXTENT = (1 << 31) - 1024  # coordinates have 32 bits, and the last tile may start past the end
NOTHING = ctypes.c_uint8()  # the empty struct that a kernel without RECORD takes as its `recording`
INSTEAD = (
    "read the record or compile it; other GPUs with TMA multiply with ch14.gemm, through tcgen05 on capability "
    "10.x and mma.sync on 12.x"
)


def spec(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
) -> torch.Tensor:  # (M, N), float64
    """Return C (M, N) = a (M, K) @ b (K, N) in float64."""
    return a.double() @ b.double()


def job(
    config: WgmmaConfig,
    target: str = "sm_90a",
    source: pathlib.Path = SOURCE,
    more: dict[str, Any] | None = None,
) -> build.Job:
    """Return the compilation of `config`, with the macros `more`. Only sm_90a has wgmma."""
    return build.Job(
        f"{source}:{config.kernel}",
        {},
        {**config.constants(), **(more or {})},
        target,
        config.threads // 32,
        smem_bytes=config.smem_bytes,
        name=str(config),
    )


def _check_operands(a, b, out) -> None:
    for name, tensor in (("a", a), ("b", b)):
        operands.require_tensor(name, tensor, "wgmma_gemm", dtype=torch.bfloat16, ndim=2)
    (m, k), (inner, n) = a.shape, b.shape
    if inner != k:
        raise ValueError(f"a (M, K) and b (K, N) must agree in K; a is {m} x {k} and b is {inner} x {n}.")
    if n % 8 or k % 8:
        raise ValueError(
            f"N and K must be multiples of 8, so that rows take multiples of 16 bytes; N is {n} and K is "
            f"{k}: pad them with zeros."
        )
    if max(m, n, k) > LARGEST_EXTENT:
        raise ValueError(f"M, N and K must be at most {LARGEST_EXTENT:,}; they are {m:,}, {n:,} and {k:,}.")
    if n > 1 and k > 1 and b.stride(0) != 1:
        raise ValueError(
            f"b must have K contiguous, as weight.T has; its strides are {b.stride()}: use "
            "b.T.contiguous().T."
        )
    operands.require_tensor("b", b, "wgmma_gemm", on=a.device)
    if out is not None:
        operands.require_tensor("out", out, "wgmma_gemm", dtype=torch.bfloat16, shape=(m, n), on=a.device)
        operands.require_disjoint({"out": out}, {"a": a, "b": b})
    for name, tensor in (("a", a), ("b.T", b.T), ("out", out)):
        if tensor is not None and tensor.numel():
            operands.require_rows(name, tensor)
    operands.require_gpu(a, "wgmma_gemm", "has_wgmma", INSTEAD)


def tuned_source() -> str:
    """Return the hash of the code that the rows of the tuned table are measured with."""
    return provenance.source_hash(SOURCE)


def find_best(m: int, n: int, k: int) -> tuple[WgmmaConfig, str]:
    """Return the configuration for a shape, and how it was found: in the table of tuned shapes, or by the model."""
    here = device.current()
    found = tuned.find_exact(
        *("wgmma_gemm", WgmmaConfig, m, n, k, "bf16"),
        lambda config: fits(config, k) and not rejection(config),
        tuned_source,
    )
    if found:
        return found
    ranked, why = rank(max(m, 1), max(n, 1), max(k, 1), here.sms or 132, here.name or "", most=1)
    return ranked[0], why


def resolve_config(config: str | WgmmaConfig, m: int, n: int, k: int) -> WgmmaConfig:
    """Return the configuration for a shape that `config` stands for: itself, a step of the ladder, or "best".

    Raises ValueError for an unknown name, or for a cluster with too few K steps. Raises Unsupported for a configuration
    that exceeds an SM.
    """
    config = operands.choose_config(config, STEPS, WgmmaConfig, lambda: find_best(m, n, k)[0], parse)
    if config.kernel == "split" and config.cluster > config.steps(k):
        raise ValueError(
            f"a cluster of {config.cluster} needs as many K steps of {64 * config.boxes_per_stage} to "
            f"share; K is {k}."
        )
    if reason := rejection(config):
        raise device.Unsupported(f"configuration {config} cannot run: {reason}")
    return config


def build_launch(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    out: torch.Tensor,  # (M, N)
    config: WgmmaConfig,
    source: pathlib.Path = SOURCE,
    more: dict[str, Any] | None = None,
    recording: Any = NOTHING,
) -> Callable:
    """Return a function of (a, b, out) that launches `config`; without arguments, on the checked operands given here.

    `source` may be a patched copy of the kernel file. A kernel with the macro RECORD in `more` fills a `recording`.
    """
    (m, k), n, weight = a.shape, b.shape[1], b.T
    first, second, rows, columns = (weight, a, n, m) if config.swap else (a, weight, m, n)
    follows = (1, 0, 2, 2) if config.swap else (0, 1, 2, 2)
    a_box, b_box, c_box = config.boxes
    maps = (
        make_tensor_map(first, a_box, swizzle="128B", l2_promotion="128B"),
        make_tensor_map(second, b_box, swizzle="128B", l2_promotion="128B"),
        make_tensor_map(out, c_box, swizzle=f"{2 * config.box}B"),
    )
    macros = tuple(f"-D{name}={value}" for name, value in {**config.constants(), **(more or {})}.items())
    arguments = (
        *maps,
        out,
        *map(ctypes.c_int, (rows, columns, k)),
        ctypes.c_uint64(out.stride(0) if m > 1 else n),
        recording,
    )
    return cuda.prepare_launch(
        cuda.load_kernel(source, config.kernel, macros),
        config.grid(m, n, device.current().sms),
        config.threads,
        arguments,
        config.smem_bytes,
        config.cluster_size,
        config.pdl,
        follows,
    )


def _tune(a, b, out) -> tuple[WgmmaConfig, str]:
    """Measure the configurations that are likely to be fast for these operands, and keep the fastest."""
    (m, k), n, here = a.shape, b.shape[1], device.current()

    def compile_one(config):
        macros = [f"-D{name}={value}" for name, value in config.constants().items()]
        cuda.compile_file(SOURCE, here.target or "sm_90a", macros)

    def prepare_one(config, a, b, out):
        launch = build_launch(a, b, out, config)
        return lambda: launch(a, b, out)

    ranked, _ = rank(m, n, k, here.sms or 132, here.name or "")
    return first_call.choose(
        "wgmma_gemm", (m, n, k), "bf16", ranked, compile_one, prepare_one, (a, b, out), tuned_source()
    )


def _plan(a, b, out, config) -> Plan:
    """Check the operands, choose a configuration, and build its launch."""
    _check_operands(a, b, out)
    (m, k), n = a.shape, b.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device) if out is None else out
    chosen = ""
    if isinstance(config, str) and config in ("best", "tune"):
        wanted, (config, chosen) = config, find_best(m, n, k)
        if wanted == "tune" and chosen != "tuned" and out.numel() and k:
            config, chosen = _tune(a, b, out)
    config = resolve_config(config, m, n, k)
    launch = build_launch(a, b, out, config) if out.numel() and k else lambda a, b, out: out.zero_()
    return Plan(launch, (m, n), a.dtype, a.device, config, chosen=chosen)


planner = Planner(_plan, ("a", "b"))


@operator.register
def wgmma_gemm_operator(a: torch.Tensor, b: torch.Tensor, config: str = "best") -> torch.Tensor:
    return planner.run((a, b), None, config)


def prepare(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | WgmmaConfig = "best",
) -> operands.Launch:
    """Check the operands, choose a configuration, and return a launch that computes C = a b on torch's current stream.

    a (M, K), b (K, N) and out (M, N) are bfloat16 matrices on the GPU. Rows of a and of out are contiguous, and so are
    columns of b: pass `weight.T`. N and K are multiples of 8. `config` is "best" (the tuned configuration of the shape,
    or else what a model and the times at the nearest measured shapes say), "tune" (a dozen configurations are measured
    at the first call of a shape, and the winner is kept in the user's cache), a step of the ladder or a WgmmaConfig.
    The launch may be captured in
    a graph, which it must outlive. Raises ValueError for operands that the kernel cannot take and
    tilelab.runtime.device.Unsupported for a GPU without wgmma.
    """
    return planner.prepare((a, b), out, config)


def gemm(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | WgmmaConfig = "best",
) -> torch.Tensor:  # (M, N)
    """Return C (M, N) = a (M, K) b (K, N) in `out` or in new memory. `prepare` describes arguments and errors.

    Under torch.compile and where autograd records, this is torch.ops.tiles.wgmma_gemm, whose `config` is a name. It has
    no backward pass; `ch14.gemm` has one.
    """
    if operators.is_traced(a, b):
        return operators.store(wgmma_gemm_operator(a, b, config), out)
    return planner.run((a, b), out, config)
