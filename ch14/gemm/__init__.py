"""GEMM on tiles that tensor descriptors move: C = A B in Triton, on sm_90a and newer.

Read `kernels` first. Then read `configs`, which says what a tile configuration needs of a GPU, and `choice`, which says
which one suits a shape. Source: Triton's persistent matmul tutorial; CUTLASS's tile rasters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.gemm import choice, kernels, operator
from ch14.gemm.configs import (
    ITEMSIZE,
    SETS,
    GemmConfig,
    apply_switch,
    configs,
    job,
    parse,
    rank_configs,
    rejection,
)
from ch14.gemm.kernels import gemm_persistent_kernel, gemm_plain_kernel, gemm_split_kernel
from tilelab.runtime import device, operators, provenance, triton_launch, tuned, workspace
from tilelab.runtime.operands import (
    Launch,
    choose_config,
    require_disjoint,
    require_gpu,
    require_rows,
    require_tensor,
    row_stride,
)
from tilelab.runtime.plans import Plan, Planner

__all__ = ["spec", "gemm", "prepare", "configs", "GemmConfig", "rejection", "job"]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
IS_INTERPRETED = not isinstance(gemm_plain_kernel, triton.JITFunction)
TORCH = {name: dtype for dtype, name in DTYPES.items()}


def spec(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    scale_a: torch.Tensor | None = None,  # one value
    scale_b: torch.Tensor | None = None,  # one value
) -> torch.Tensor:  # (M, N), float64
    """Return C (M, N) = scale_a * scale_b * A (M, K) @ B (K, N) in float64."""
    c = a.double() @ b.double()
    for scale in (scale_a, scale_b):
        c = c if scale is None else c * scale.double()
    return c


def _check_operands(a, b, scale_a, scale_b, out):
    """Return (dtype name, B with its rows as they are stored, True when these rows run along K, out)."""
    require_tensor("a", a, "a prepared gemm", dtype=tuple(DTYPES), ndim=2)
    require_tensor("b", b, "a prepared gemm", dtype=a.dtype, ndim=2, on=a.device)
    (m, k), (rows, n), dtype = a.shape, b.shape, DTYPES[a.dtype]
    if rows != k:
        raise ValueError(f"the inner extents differ: a is {m} x {k} and b is {rows} x {n}.")
    require_gpu(a, "gemm", instead="use torch.mm", interpreted=IS_INTERPRETED)
    if a.numel():
        require_rows("a", a)
    b_k_major = b.stride(0) == 1 and (b.stride(1) >= k or n == 1)
    if dtype == "fp8" and b.numel() and not b_k_major:
        raise ValueError("float8 needs B with K contiguous: store the weight as (N, K) and pass weight.T.")
    stored_b = b.T if b_k_major else b
    if b.numel():
        require_rows("b", stored_b)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None:
            require_tensor(name, scale, "gemm", dtype=torch.float32, on=a.device)
            if dtype != "fp8" or scale.numel() != 1:
                raise ValueError(
                    f"{name} must be one value, for float8 inputs; it has {scale.numel()}, for {dtype}."
                )
    if n % 8:  # a descriptor stores whole 16-byte chunks, also past the last column
        raise ValueError(f"N must be a multiple of 8, so a row of C takes a multiple of 16 bytes; N is {n}.")
    out_dtype = torch.bfloat16 if dtype == "fp8" else a.dtype
    out = torch.empty(m, n, dtype=out_dtype, device=a.device) if out is None else out
    require_tensor("out", out, "a prepared gemm", dtype=out_dtype, shape=(m, n), on=a.device)
    if out.numel():
        require_rows("out", out)
    require_disjoint({"out": out}, {"a": a, "b": stored_b, "scale_a": scale_a, "scale_b": scale_b})
    return dtype, stored_b, b_k_major, out


def tuned_source() -> str:
    """Return the hash of the code that the rows of the tuned table are measured with."""
    return provenance.source_hash(kernels)


def find_best(
    m: int, n: int, k: int, dtype: str, b_k_major: bool, target: str, sms: int
) -> tuple[GemmConfig | None, str]:
    """Return the configuration for a shape, and how it was found: in a table of tuned shapes, or as `choice` says.

    None when no configuration of the course runs on `target`.
    """
    if b_k_major and ITEMSIZE[dtype] == 2 and target == "sm_90a":  # as the operands of the tables were
        found = tuned.find_exact(
            *("gemm", GemmConfig, m, n, k, "bf16"),
            lambda config: not rejection(config, target, dtype),
            tuned_source,
        )
        if found:
            return found
        ranked, why = choice.rank(m, n, k, sms, device.current().name or "", most=1)
        return ranked[0], why
    return next(iter(rank_configs("course", m, n, k, dtype, target, sms)), None), "by the model"


def _list_choices(
    config, shape: tuple[int, int, int], dtype, b_k_major, target, sms
) -> Iterator[tuple[GemmConfig, str]]:
    """Yield the configurations that `config` may mean, in the order to try them, each with why it is chosen.

    Those of a set that the resource model rejects come first, so that a Launch can list them with their reasons.
    """
    if isinstance(config, str) and config == "best":
        config = os.environ.get("TILES_GEMM_CONFIG") or config
    if not isinstance(config, str) or config not in (*SETS, "best"):
        named = parse(config, dtype) if isinstance(config, str) else config
        yield choose_config(named, dict.fromkeys(SETS), GemmConfig, lambda: named), ""
        return
    which, why = ("course", "by the model") if config == "best" else (config, "")
    yield from ((each, why) for each in configs(which, dtype).values() if rejection(each, target, dtype))
    if config == "best":
        best, how = find_best(*shape, dtype, b_k_major, target, sms)
        yield from [(best, how)] if best else []
    yield from ((each, why) for each in rank_configs(which, *shape, dtype, target, sms))
    fallback = f"no configuration of the set {which!r} runs on {target}; the conservative configuration"
    for each in rank_configs("conservative", *shape, dtype, target, sms):
        yield each, f"{fallback} {each} is used instead."


def _plan(a, b, scale_a, scale_b, out, config) -> Plan:
    """Check the arguments, choose the first configuration that compiles, and build its descriptors."""
    dtype, stored_b, b_k_major, out = _check_operands(a, b, scale_a, scale_b, out)
    shape = m, n, _ = a.shape[0], b.shape[1], a.shape[1]
    here = device.current()
    # Without a GPU the interpreter stands in for one of sm_90a with eight SMs, so that tiles and waves still occur.
    target, sms = (here.target, here.sms) if here.target and here.has_tma else ("sm_90a", 8)
    if 0 in shape:  # a sum over nothing is zero
        some = tuple(max(1, extent) for extent in shape)
        config, why = next(_list_choices(config, some, dtype, b_k_major, target, sms))
        return Plan(lambda *tensors: tensors[-1].zero_(), (m, n), out.dtype, a.device, config, chosen=why)
    skipped: dict[GemmConfig, str] = {}
    cause = None
    for candidate, why in _list_choices(config, shape, dtype, b_k_major, target, sms):
        candidate = apply_switch(candidate)
        if candidate in skipped:
            continue
        if reason := rejection(candidate, target, dtype):
            skipped[candidate] = reason
            continue
        try:  # to compile and load, so that a refusal comes here and not at the first launch
            launch = bind_config(candidate, a, stored_b, out, scale_a, scale_b, shape, b_k_major, sms)
        except torch.AcceleratorError:
            raise  # the context is lost: no other configuration could run either
        except Exception as error:
            skipped[candidate] = f"{type(error).__name__}: {device.first_line(error)[:200]}"
            cause = error
            continue
        fallback = why if why.startswith("no configuration") else ""
        return Plan(launch, (m, n), out.dtype, a.device, candidate, [*skipped.items()], fallback, why)
    reasons = "; ".join(f"{each}: {reason.rstrip('.')}" for each, reason in skipped.items())
    raise device.Unsupported(f"no configuration that was asked for runs on {target}: {reasons}.") from cause


def bind_config(
    config: GemmConfig, a, stored_b, out, scale_a, scale_b, shape, b_k_major: bool, sms: int
) -> Callable[..., object]:
    """Compile `config`'s kernel and return a function of (a, b, scale_a, scale_b, out) that launches it."""
    constants = config.constants(sms, b_k_major)
    options: dict[str, Any] = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    follows = {"scale_a_ptr": 2, "scale_b_ptr": 3}
    arguments = {"scale_a_ptr": scale_a, "scale_b_ptr": scale_b}
    arguments |= dict(zip("NMK" if config.swap else "MNK", shape))
    if config.kernel == "plain":
        kernel, programs = gemm_plain_kernel, config.tiles(*shape[:2])
        arguments = {
            "a_ptr": a,
            "b_ptr": stored_b,
            "c_ptr": out,
            **arguments,
            "stride_a": row_stride(a),
            "stride_b": row_stride(stored_b),
            "stride_c": row_stride(out),
        }
        follows |= {"a_ptr": 0, "b_ptr": 1, "c_ptr": 4}
    else:
        kernel = gemm_persistent_kernel if config.kernel == "persistent" else gemm_split_kernel
        programs = min(constants.get("PROGRAMS", 1 << 30), config.tiles(*shape[:2]) * config.splits)
        positions = {"a": 1, "b": 0, "c": 4} if config.swap else {"a": 0, "b": 1, "c": 4}
        named: dict[str, Any] = {}
        constants["ALIGNMENT"] = math.gcd(16, *shape[1:]) if config.pointers else 1
        for name, block in config.blocks(b_k_major).items():
            matrix = {0: a, 1: stored_b, 4: out}[positions[name[0]]]
            stride = row_stride(matrix)
            arguments[f"stride_{name[0]}"] = stride if config.pointers else None
            if block and config.pointers:
                named[name] = matrix
            else:
                named[name] = block and TensorDescriptor(matrix, list(matrix.shape), [stride, 1], block)
            follows[name] = positions[name[0]]
        if config.kernel == "split":
            named |= dict(zip(("parts_ptr", "arrivals_ptr"), _make_workspace(config, shape, a.device)))
            follows |= {"parts_ptr": 5, "arrivals_ptr": 6}
            arguments |= {"splits": config.splits}
        arguments = named | arguments
        constants["PDL"] &= not IS_INTERPRETED
        if constants["PDL"]:
            options["launch_pdl"] = True
    follows = {name: position for name, position in follows.items() if arguments[name] is not None}
    launch = triton_launch.prepare(kernel, (programs,), arguments, follows, **constants, **options)
    if config.kernel != "split":
        return launch
    return lambda *tensors: launch(*tensors, *_make_workspace(config, shape, tensors[0].device))


def _make_workspace(config, shape, where) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for the parts of all tiles, and a counter for each tile."""
    tiles = config.tiles(*shape[:2])
    parts = torch.empty(tiles * config.splits * config.block_m * config.block_n, device=where)
    return parts, workspace.make_counters(tiles, where)


planner = Planner(_plan, ("a", "b", "scale_a", "scale_b"))


@operator.register
def gemm_operator(a, b, scale_a=None, scale_b=None, config="best"):
    return planner.run((a, b, scale_a, scale_b), None, config)


def prepare(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    *,
    scale_a: torch.Tensor | None = None,  # one value
    scale_b: torch.Tensor | None = None,  # one value
    out: torch.Tensor | None = None,  # (M, N)
    config: str | GemmConfig = "best",
) -> Launch:
    """Check the arguments, choose a configuration and build its descriptors once; return a Launch.

    Arguments as for `gemm`. The Launch has `out` and the chosen `config`. It lists in `skipped` the configurations that
    cannot run, with reasons. `fallback` is a sentence when no configuration of the requested set can run.
    """
    return planner.prepare((a, b, scale_a, scale_b), out, config)


def gemm(
    a: torch.Tensor,  # (M, K)
    b: torch.Tensor,  # (K, N)
    *,
    scale_a: torch.Tensor | None = None,  # one value
    scale_b: torch.Tensor | None = None,  # one value
    out: torch.Tensor | None = None,  # (M, N)
    config: str | GemmConfig = "best",
) -> torch.Tensor:  # (M, N)
    """Return C (M, N) = A (M, K) @ B (K, N), accumulated in float32.

    float8 on Hopper accumulates with fewer mantissa bits than float32.

    a, b: bfloat16, float16 or float8_e4m3fn on one GPU with TMA. A is stored row by row. B may be stored either way:
    weight.T, with K contiguous, is the usual case, and float8 needs it. A row must take a multiple of 16 bytes, and N
    must be a multiple of 8.
    scale_a, scale_b: one float32 value each, for float8 only.
    out: has A's dtype, or bfloat16 for float8.
    config: "best" (the tuned configuration of the shape, or else the one that `choice` or, on other GPUs than Hopper
    and for other layouts, the model of the course expects to be fastest), a set ("conservative", "proposed",
    "course"), the name of a configuration (`configs.parse`) or a GemmConfig. If no configuration of a set can run, gemm
    warns and falls back to a conservative one. The environment variable TILES_GEMM_CONFIG, a set or a name, replaces
    "best" when the first call with such tensors is planned. TILES_TMA=0 makes every configuration move its tiles by
    pointers, for comparison.

    Under torch.compile and where autograd records, this is the operator torch.ops.tiles.gemm. It has a backward pass
    for bfloat16 and float16, and its `config` is a name.

    Raises ValueError for bad arguments, and Unsupported for hardware or a configuration that cannot run.
    """
    if operators.is_traced(a, b, scale_a, scale_b):
        return operators.store(gemm_operator(a, b, scale_a, scale_b, config), out)
    return planner.run((a, b, scale_a, scale_b), out, config)
