"""Multiply a few bfloat16 tokens by MXFP4 weights, as a language model does for each token: out (M, N) = x (M, K) W^T.

The time goes into reading W (N, K) once. Each program owns rows of W and a share of K, so that there are enough
programs. The last program of a block of rows adds the shares, always in the same order, so that the same launch gives
the same bits. Read `kernels` first, which is for up to 16 tokens, then decode.cu, which is for more, and then
`configs`. Source: OCP MX v1.0.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib
from typing import Any

import torch
import triton
from torch.utils.weak import WeakTensorKeyDictionary

from ch14.fp4_decode import operator
from ch14.fp4_decode.configs import (
    SLAB,
    STAGED,
    DecodeConfig,
    best_config,
    configs,
    find_best,
    is_bf16_faster,
    launch_options,
    padded_tokens,
    parse,
)
from ch14.fp4_decode.kernels import decode_plain_kernel, decode_registers_kernel
from ch14.mx_formats import number_formats, packing
from tilelab.runtime import build, cuda, device, operands, operators, triton_launch, workspace
from tilelab.runtime.operands import Launch
from tilelab.runtime.plans import Plan, Planner
from tilelab.runtime.tensor_map import make_tensor_map

__all__ = [
    "spec",
    "decode",
    "prepare",
    "configs",
    "DecodeConfig",
    "best_config",
    "find_best",
    "padded_tokens",
    "parse",
    "job",
]

SOURCE = pathlib.Path(__file__).with_name("decode.cu")
BLOCK = 32  # weights that share a scale
IS_INTERPRETED = not isinstance(decode_plain_kernel, triton.JITFunction)


def spec(
    x: torch.Tensor,  # (M, K)
    weight: torch.Tensor,  # (N, K / 2)
    scales: torch.Tensor,  # (N, K / 32)
) -> torch.Tensor:  # (M, N)
    """Return x @ W^T in float64, for W (N, K) in MXFP4. Arguments as for `decode`."""
    return x.double() @ _dequantise(weight, scales).double().T


def _dequantise(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return W (N, K) in float32."""
    codes = packing.unpack(weight, 4, 2 * weight.shape[1])
    return number_formats.dequantise(
        number_formats.Quantised(number_formats.lookup("mxfp4"), codes, scales, None)
    )


def _check_operands(x, weight, scales, out) -> tuple[int, int, int]:
    """Return M, N and K; raise ValueError for operands that the kernels cannot read."""
    common: dict[str, Any] = dict(op="decode", contiguous=True, not_empty=True)
    operands.require_tensor("x", x, dtype=torch.bfloat16, ndim=2, aligned=16, **common)
    operands.require_tensor("weight", weight, dtype=torch.uint8, ndim=2, on=x.device, aligned=16, **common)
    (m, k), n = x.shape, weight.shape[0]
    padded_tokens(m)
    if k % BLOCK or k > 2**24 or n > 2**30:
        raise ValueError(
            f"K is {k} and N is {n}; K must be a multiple of {BLOCK} up to 2^24, and N at most 2^30."
        )
    operands.require_tensor("weight", weight, "decode", shape=(n, k // 2))
    operands.require_tensor("scales", scales, dtype=torch.uint8, shape=(n, k // BLOCK), on=x.device, **common)
    if out is not None:
        operands.require_tensor("out", out, dtype=torch.bfloat16, shape=(m, n), on=x.device, **common)
        operands.require_disjoint({"out": out}, {"x": x, "weight": weight, "scales": scales})
    return m, n, k


def _check_hardware(config: DecodeConfig, x: torch.Tensor) -> None:
    if IS_INTERPRETED:
        if config.kernel != "plain":
            raise device.Unsupported(
                "the interpreter runs Triton, not Gluon or CUDA C++: use a plain configuration without a GPU."
            )
    elif not x.is_cuda:
        raise device.Unsupported(f"decode needs its tensors on a GPU; they are on {x.device}: move them.")
    elif config.kernel == "wgmma" and not device.current().has_wgmma:
        raise device.Unsupported("the wgmma kernel runs on Hopper only: use a plain configuration.")
    elif config.kernel == "registers" and (device.current().capability or (0, 0)) < (9, 0):
        raise device.Unsupported(
            "the registers kernel needs products of bf16x2 (compute capability 9.0 or newer): "
            "use a plain configuration."
        )


def _build(x, weight, scales, out, config, early: bool):
    """Check the arguments and compile the kernel.

    Return a function of (x, weight, scales, out, parts, counters) that launches it, the configuration, the numbers of
    parts and of counters, and how the configuration was chosen.
    """
    m, n, k = _check_operands(x, weight, scales, out)
    chosen = ""
    if isinstance(config, str) and config == "best":
        config, chosen = find_best(m, n, k, device.current(), aligned=scales.data_ptr() % 4 == 0)
    config = operands.choose_config(config, configs(m), DecodeConfig, lambda: None, parse)
    _check_hardware(config, x)
    tokens, grid = padded_tokens(m, config.kernel), config.grid(n, k)
    if config.kernel == "wgmma":
        return *_build_wgmma(x, weight, scales, out, config, early), chosen
    if config.kernel == "registers" and tokens * config.share > STAGED:
        raise ValueError(
            f"{tokens} tokens of a share of {config.share} columns take more than 64 KiB of shared "
            f"memory: use a share of {STAGED // tokens}."
        )
    if grid[1] > 65535:
        raise ValueError(
            f"a grid has at most 65,535 shares of K; a share of {config.share} makes {grid[1]:,}: take a "
            "longer one."
        )
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    rows = grid[0] * config.block_n if config.kernel == "registers" else n
    groups = -(-m // tokens)  # 1 but in the registers kernel
    parts, counters = grid[1] * tokens * rows * groups if grid[1] > 1 else 1, grid[0] * groups
    constants = dict(BLOCK_N=config.block_n, TOKENS=tokens, SHARE=config.share, num_warps=config.num_warps)
    if config.kernel == "registers":
        kernel, tensors = decode_registers_kernel, (x, weight.view(torch.int32), scales, out)
        whole_words = k % 128 == 0 and scales.data_ptr() % 4 == 0
        constants |= dict(AHEAD=config.num_stages, SCALES_PER_LOAD=4 if whole_words else 1)
        constants |= launch_options(config)
    else:
        kernel, tensors = decode_plain_kernel, (x.view(torch.int16), weight, scales, out.view(torch.int16))
        constants |= dict(FLOAT32=IS_INTERPRETED, num_stages=config.num_stages)
        early = False
    names = ("x_ptr", "weight_ptr", "scales_ptr", "out_ptr", "parts_ptr", "arrivals_ptr")
    arguments = dict(zip(names, (*tensors, *_make_workspace(parts, counters, x.device))))
    arguments |= {"M": m, "N": n, "blocks": k // BLOCK}
    launch = triton_launch.prepare(
        kernel, (*grid, groups), arguments, dict(zip(names, range(6))), early, **constants
    )
    return launch, config, parts, counters, chosen


def _build_wgmma(x, weight, scales, out, config: DecodeConfig, early: bool):
    """Return the first four of what `_build` returns, for the wgmma kernel and the one that arranges its tokens."""
    (m, k), n = x.shape, weight.shape[0]
    if k % SLAB or scales.data_ptr() % 4:
        raise ValueError(
            f"K is {k}; the wgmma kernel needs a multiple of {SLAB}, and scales that start at a multiple of 4 bytes: "
            "use another configuration."
        )
    tokens, (tiles, splits) = padded_tokens(m, "wgmma"), config.grid(n, k)
    parts = tiles * splits * config.block_n * tokens if splits > 1 else 0
    macros = tuple(f"-D{name}={value}" for name, value in config.constants(tokens).items())
    arrange = cuda.prepare_launch(
        cuda.load_kernel(SOURCE, "arrange_tokens", macros),
        k // SLAB,
        4 * tokens,
        {"x": x, "arranged": None, "M": ctypes.c_int(m), "K": ctypes.c_int(k)},
        early=early,
        follows={"x": 0, "arranged": 1},
    )
    multiply = cuda.prepare_launch(
        cuda.load_kernel(SOURCE, "decode_wgmma", macros),
        tiles * splits,
        config.threads,
        {
            "weight_map": make_tensor_map(weight, (config.block_n, SLAB // 2)),
            "scales": scales,
            "out": out,
            "work": None,
            "arrivals": None,
            **{name: ctypes.c_int(value) for name, value in zip("MNK", (m, n, k))},
            "splits": ctypes.c_int(splits),
        },
        config.smem_bytes(tokens),
        early=True,  # loads weights while `arrange` runs, which starts after what may have written them unless `early`
        follows={"weight_map": 0, "scales": 1, "out": 2, "work": 3, "arrivals": 4},
    )

    def launch(x, weight, scales, out, work, counters):
        arrange(x, work)
        multiply(weight, scales, out, work, counters)

    return launch, config, k * tokens // 2 + parts, tiles * (config.block_n // 64)


def _make_workspace(parts: int, counters: int, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(parts, dtype=torch.float32, device=where),
        torch.zeros(counters, dtype=torch.int32, device=where),
    )


def _plan(x, weight, scales, out, config) -> Plan:
    # The kernel before may have written the weights, so none is loaded before it has ended.
    run, config, parts, counters, chosen = _build(x, weight, scales, out, config, False)

    def launch(*tensors):
        where = tensors[0].device
        work = torch.empty(parts, dtype=torch.float32, device=where)
        run(*tensors, work, workspace.make_counters(counters, where))

    return Plan(launch, (x.shape[0], weight.shape[0]), torch.bfloat16, x.device, config, chosen=chosen)


planner = Planner(_plan, ("x", "weight", "scales"))


@operator.register
def decode_operator(x, weight, scales, config="best"):
    return planner.run((x, weight, scales), None, config)


_copies = WeakTensorKeyDictionary()  # {weight: {scales: W in bf16}}


def _prepare_bf16(x, weight, scales, out, chosen: str) -> Launch:
    """Return a launch of cuBLAS on a copy of W in bf16, which all launches of these tensors share.

    Each call makes the copy anew, in the same place: no version of a tensor tells what was written through `data`.
    """
    m, n, k = _check_operands(x, weight, scales, out)
    copies = _copies.setdefault(weight, WeakTensorKeyDictionary())
    dense = copies.get(scales)
    if (
        dense is None or dense.shape != (n, k) or dense.device != x.device
    ):  # `data` may have got another shape
        dense = copies[scales] = torch.empty(n, k, dtype=torch.bfloat16, device=x.device)
    dense.copy_(_dequantise(weight, scales))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    return Launch(functools.partial(torch.mm, x, dense.T, out=out), out, "bf16", chosen=chosen)


def prepare(
    x: torch.Tensor,  # (M, K)
    weight: torch.Tensor,  # (N, K / 2)
    scales: torch.Tensor,  # (N, K / 32)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | DecodeConfig = "best",
) -> Launch:
    """Check the arguments of `decode`, make its work space, and return a Launch. Arguments as there.

    Launches share the work space, so only one may be in flight. Unless it is of a plain kernel, a launch loads weights
    before the previous kernel of the stream has ended: after writing `weight` or `scales` in place, prepare again. `x`
    may change between launches. `chosen` says how "best" was found.

    With more than 16 tokens and fewer than about 35 million weights, bf16 often takes less time than MXFP4. Then "best"
    is "bf16": cuBLAS on a copy of W in bf16, of four times the memory, which all launches of `weight` and `scales`
    share, and which each call makes anew. Any other `config` keeps to MXFP4.
    """
    if isinstance(x, torch.Tensor) and x.ndim == 2 and not x.shape[0]:  # nothing to launch
        return planner.prepare((x, weight, scales), out, "best" if config == "bf16" else config)
    if isinstance(config, str) and config in ("bf16", "best"):
        m, n, k = _check_operands(x, weight, scales, out)
        if config == "bf16" or x.is_cuda and is_bf16_faster(m, n, k, device.current()):
            return _prepare_bf16(x, weight, scales, out, "by the model" if config == "best" else "")
    launch, config, parts, counters, chosen = _build(x, weight, scales, out, config, True)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    tensors = x, weight, scales, out, *_make_workspace(parts, counters, x.device)
    return Launch(functools.partial(launch, *tensors), out, config, chosen=chosen)


def run(x, weight, scales, *, out=None, config="best") -> torch.Tensor:
    """Return what `decode` does, for tensors that nobody traces or differentiates."""
    return planner.run((x, weight, scales), out, config)


def decode(
    x: torch.Tensor,  # (M, K)
    weight: torch.Tensor,  # (N, K / 2)
    scales: torch.Tensor,  # (N, K / 32)
    *,
    out: torch.Tensor | None = None,  # (M, N)
    config: str | DecodeConfig = "best",
) -> torch.Tensor:  # (M, N)
    """Return out = x @ W^T for 1 to 64 tokens, accumulated in float32, as F.linear(x, W) does.

    x is bfloat16. W (N, K) is in MXFP4. Its weight (N, K / 2) uint8 holds two e2m1 codes per byte, the first in the
    lower half. Its scales (N, K / 32) uint8 are E8M0, where 255 is NaN. K is a multiple of 32, N anything. All tensors
    are contiguous; x and weight start at multiples of 16 bytes. A decoded weight is rounded to bfloat16, which is exact
    but for infinity (4 x 2^127). `out` is bfloat16. `config` is a DecodeConfig, "best" or a name of `configs`. Raises
    ValueError for arguments that do not fit and Unsupported for hardware that cannot run it.
    """
    if operators.is_traced(x, weight, scales):
        return operators.store(decode_operator(x, weight, scales, config), out)
    return run(x, weight, scales, out=out, config=config)


def job(config: DecodeConfig, target: str, m: int = 16) -> build.Job:
    """Return how the kernel is compiled for M tokens, for tilelab.runtime.build."""
    if config.kernel == "wgmma":
        tokens = padded_tokens(m, "wgmma")
        return build.Job(
            f"{SOURCE}:decode_wgmma",
            {},
            config.constants(tokens),
            target,
            config.threads // 32,
            smem_bytes=config.smem_bytes(tokens),
            name=str(config),
        )
    registers = config.kernel == "registers"
    pointers = dict(
        x_ptr="*bf16" if registers else "*i16",
        weight_ptr="*i32" if registers else "*u8",
        scales_ptr="*u8",
        out_ptr="*bf16" if registers else "*i16",
        parts_ptr="*fp32",
        arrivals_ptr="*i32",
    )
    constants = dict(BLOCK_N=config.block_n, TOKENS=padded_tokens(m, config.kernel), SHARE=config.share)
    constants |= dict(AHEAD=config.num_stages, SCALES_PER_LOAD=4) if registers else dict(FLOAT32=False)
    options = dict(options=launch_options(config)) if registers else dict(num_stages=config.num_stages)
    return build.Job(
        f"ch14.fp4_decode.kernels:decode_{config.kernel}_kernel",
        pointers | dict.fromkeys(("M", "N", "blocks"), "i32"),
        constants,
        target,
        config.num_warps,
        aligned=tuple(pointers),
        name=f"{config}",
        **options,
    )
