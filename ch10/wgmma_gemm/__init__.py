"""GEMM on Hopper's tensor cores: C (M, N) = A (M, K) B (N, K)^T, bf16, sums in float32, from one tile at a time to a
clustered, persistent kernel.

The kernels are in wgmma_gemm.cu, the steps of the ladder in wgmma_configs.py. Source: PTX ISA, "wgmma"; CUTLASS,
sm90_mma_tma_gmma_ss_warpspecialized.
"""

from __future__ import annotations

import ctypes
import pathlib

import torch

from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, choose, parse, rejection
from tilelab import build, cuda, device
from tilelab.tensor_map import make_tensor_map

SOURCE = pathlib.Path(__file__).with_name("wgmma_gemm.cu")
TIMELINE_EVENTS = 4096  # as in wgmma_gemm.cu
ROLES = 3
LARGEST = (1 << 31) - 1024  # of an extent: coordinates have 32 bits, and the last tile's may lie past the end
INSTEAD = ("read the record or compile it; other GPUs with TMA multiply with ch14.gemm, through tcgen05 on capability "
           "10.x and mma.sync on 12.x")


def spec(a, b):
    """C (M, N) = A (M, K) @ B (N, K).T in float64."""
    return a.double() @ b.double().T


def configs() -> dict[str, WgmmaConfig]:
    """The steps of the ladder by name, in its order; "best" is the course's choice for a shape."""
    return STEPS


def job(config: WgmmaConfig, target: str = "sm_90a") -> build.Job:
    """The compilation of `config`; only sm_90a has these instructions."""
    return build.Job(f"{SOURCE}:{config.kernel}", {}, config.constants(), target, config.threads // 32,
                     smem_bytes=config.smem_bytes, name=str(config))


def _matrix(name: str, given) -> None:
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; it is a {type(given).__name__}.")
    if given.is_nested or given.layout is not torch.strided:
        raise ValueError(f"{name} must be dense; it is {'nested' if given.is_nested else str(given.layout)[6:]}.")
    if given.ndim != 2 or min(given.shape) < 1:
        raise ValueError(f"{name} must be a matrix with at least one element; its shape is {tuple(given.shape)}.")
    if given.dtype != torch.bfloat16:
        raise ValueError(f"{name} must be bfloat16; it is {str(given.dtype)[6:]}.")
    if given.requires_grad and (torch.is_grad_enabled() or name == "out"):
        raise ValueError(f"gemm has no backward pass and {name} requires a gradient: detach it.")
    if given.is_neg() or given.is_conj():
        raise ValueError(f"{name} is a view that negates what memory holds: resolve it first.")
    if max(given.shape) > LARGEST:
        raise ValueError(f"extents are at most {LARGEST:,}; {name} is {' x '.join(map(str, given.shape))}.")
    if (given.stride(1) != 1 and given.shape[1] > 1) or (given.stride(0) == 0 and given.shape[0] > 1):
        raise ValueError(f"{name} must be stored row by row; its strides are {given.stride()}: use contiguous().")
    if given.data_ptr() % 16:
        raise ValueError(f"{name} must start at a multiple of 16 bytes for a tensor map; it starts "
                         f"{given.data_ptr() % 16} past one: copy it first.")
    rows, columns = given.shape
    if rows > 1 and (given.stride(0) % 8 or given.stride(0) < columns):
        raise ValueError(f"a row of {name} takes a multiple of 8 elements (16 bytes) and overlaps no other; its stride "
                         f"is {given.stride(0)} for {columns} columns: pad it.")


def _span(matrix) -> tuple[int, int]:
    begin = matrix.data_ptr()
    return begin, begin + 2 * ((matrix.shape[0] - 1) * matrix.stride(0) + matrix.shape[1])


def _check(a, b, out):
    """out, made where it is None; ValueError and Unsupported say what cannot be multiplied."""
    for name, given in (("a", a), ("b", b)):
        _matrix(name, given)
    (m, k), (n, inner) = a.shape, b.shape
    if inner != k:
        raise ValueError(f"a (M, K) and b (N, K) differ in K: a is {m} x {k} and b is {n} x {inner}.")
    if n % 8 or k % 8:
        raise ValueError(f"N and K are multiples of 8, so that rows take a multiple of 16 bytes; here N is {n} and K "
                         f"is {k}: pad them with zeros.")
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device; they are on {a.device} and {b.device}.")
    device.require("has_wgmma", "wgmma_gemm", INSTEAD)
    if not a.is_cuda:
        raise ValueError(f"a and b must be on the GPU; they are on {a.device}.")
    if a.device.index != torch.cuda.current_device():  # a map does not say where its address is
        raise ValueError(f"a and b lie on {a.device}, and the launch is for cuda:{torch.cuda.current_device()}: make "
                         "the tensors' GPU the current one, with torch.cuda.device.")
    out = torch.empty(m, n, dtype=a.dtype, device=a.device) if out is None else out
    _matrix("out", out)
    if out.shape != (m, n) or out.device != a.device:
        raise ValueError(f"out must be {m} x {n} on {a.device}; it is {' x '.join(map(str, out.shape))} on "
                         f"{out.device}.")
    begin, end = _span(out)
    for name, given in (("a", a), ("b", b)):  # tiles are stored while others are still read
        other_begin, other_end = _span(given)
        if begin < other_end and other_begin < end:
            raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")
    return out


def chosen(config, m: int, n: int, k: int, sms: int) -> WgmmaConfig:
    """The WgmmaConfig that `config` stands for: itself, a step of the ladder, "best" or a text that `parse` reads."""
    if not isinstance(config, (str, WgmmaConfig)):
        raise ValueError(f"config is a WgmmaConfig or its text, best or one of {', '.join(STEPS)}; here it is a "
                         f"{type(config).__name__}.")
    if isinstance(config, str):
        if config == "best":
            config = choose(m, n, k, sms)
        elif config in STEPS or "," not in config:
            if config not in STEPS:
                raise ValueError(f"the steps are best, {', '.join(STEPS)}; here it is {config[:80]!r}.")
            config = STEPS[config]
        else:
            config = parse(config)
    if config.kernel == "split" and config.cluster > config.steps(k):
        raise ValueError(f"a cluster of {config.cluster} shares at least as many K steps of {64 * config.depth}; K is "
                         f"{k}.")
    if reason := rejection(config):
        raise device.Unsupported(f"configuration {config} cannot run: {reason}")
    return config


def prepare(a, b, out=None, *, config="best", trace: torch.Tensor | None = None):
    """A function that launches out = a b^T on torch's current stream and returns out.

    a (M, K), b (N, K), out (M, N): bfloat16 CUDA matrices stored row by row, rows a multiple of 16 bytes apart, out
    apart from both. N and K are multiples of 8. `config` is "best", a step of the ladder, a WgmmaConfig or its text;
    `trace`, int64 of shape (ROLES, TIMELINE_EVENTS, 2), asks for time stamps of the first CTA. The function has the
    attributes `out` and `config` and may be captured in a graph: keep it as long as that. Raises ValueError for what it
    cannot take and tilelab.device.Unsupported where there is no WGMMA.
    """
    out = _check(a, b, out)
    (m, k), n = a.shape, b.shape[0]
    config = chosen(config, m, n, k, device.current().sms)
    stamps = ROLES, TIMELINE_EVENTS, 2
    if trace is not None and not (isinstance(trace, torch.Tensor) and trace.is_contiguous()
                                  and (trace.dtype, trace.shape, trace.device) == (torch.int64, stamps, a.device)):
        raise ValueError(f"trace is a contiguous int64 tensor of shape {stamps} on {a.device}.")
    first, second, rows, columns = (b, a, n, m) if config.swap else (a, b, m, n)
    shared = config.cluster if config.kernel == "specialised" else 1
    maps = (make_tensor_map(first, (config.block_m, 64), swizzle="128B", l2_promotion="128B"),
            make_tensor_map(second, (config.block_n // shared, 64), swizzle="128B", l2_promotion="128B"),
            make_tensor_map(out, (config.block_n if config.swap else 64, config.box), swizzle=f"{2 * config.box}B"))
    constants = config.constants() | {"TIMELINE": int(trace is not None)}
    kernel = cuda.load_kernel(SOURCE, config.kernel, tuple(f"-D{name}={value}" for name, value in constants.items()))
    args = (*maps, out, *map(ctypes.c_int, (rows, columns, k)), ctypes.c_uint64(out.stride(0) if m > 1 else n),
            ctypes.c_uint64(0) if trace is None else trace)
    launch = cuda.prepare_launch(kernel, config.grid(m, n, device.current().sms), config.threads, args,
                                 config.smem_bytes, config.cluster, config.early)

    def gemm_again(kept_alive=(a, b)):
        launch()
        return out

    gemm_again.out, gemm_again.config = out, config
    return gemm_again


def gemm(a, b, out=None, config="best"):
    """C (M, N) = A (M, K) B (N, K)^T in `out` or in new memory. Arguments and errors as for `prepare`."""
    return prepare(a, b, out, config=config)()
