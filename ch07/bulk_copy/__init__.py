"""One-dimensional bulk copies: out = x and out = a x + y, from 16-byte loads to a ring that TMA fills and empties.

Read bulk_copy.cu first, then `prepare` below. Source: PTX ISA, "cp.async.bulk", "mbarrier", "Async proxy".
"""

import ctypes
import math
import pathlib

import torch

from ch07.bulk_copy.configs import CONFIGS, KERNELS, OPS, UNIT, BulkConfig, configs, parse
from tilelab.runtime import build, cuda, device, operands

__all__ = [
    "CONFIGS",
    "ELEMENTS",
    "KERNELS",
    "OPS",
    "SOURCE",
    "UNIT",
    "BulkConfig",
    "axpy",
    "configs",
    "copy",
    "job",
    "parse",
    "prepare",
    "spec",
]

SOURCE = pathlib.Path(__file__).with_name("bulk_copy.cu")
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}


def spec(
    x: torch.Tensor,  # any shape
    y: torch.Tensor | None = None,  # the shape of x
    a: float = 1.0,
) -> torch.Tensor:  # the shape of x
    """Return what a kernel must compute: the bits of x or, with y, a x + y in float64 with `a` rounded to float32."""
    if y is None:
        return x.clone()
    return ctypes.c_float(a).value * x.double() + y.double()


def _choose_config(config: str | BulkConfig, op: str) -> BulkConfig:
    named = configs(op)
    return operands.choose_config(config, named, BulkConfig, lambda: next(iter(named.values())), parse)


def job(
    config: str | BulkConfig, target: str, element: str = "u8", source: pathlib.Path = SOURCE
) -> build.Job:
    """Return the job that compiles a configuration for `target`; it needs no GPU.

    `element` is "u8" for the copy, or a value of ELEMENTS for a x + y. `source` may be an edited copy of bulk_copy.cu.
    """
    arrays = 1 if element == "u8" else 2
    config = _choose_config(config, OPS[arrays - 1])
    return build.Job(
        f"{source}:{config.kernel}",
        {},
        config.constants(element),
        target,
        config.threads // 32,
        smem_bytes=config.smem_bytes(arrays),
        name=str(config),
    )


def _check_operands(x, y, out) -> torch.Tensor:
    """Return `out`, or new memory for it; raise ValueError for what the copy engine cannot take."""
    operands.require_tensor(
        "x", x, "a bulk copy", dtype=None if y is None else tuple(ELEMENTS), contiguous=True
    )
    start = x.data_ptr() % UNIT
    if out is None:  # new memory starts at a multiple of UNIT; skip as many bytes as x does
        skipped = start // x.element_size()
        out = x.new_empty(skipped + x.numel())[skipped:].view(x.shape)
    for name, tensor in (("y", y), ("out", out)):
        if name == "y" and y is None:
            continue
        operands.require_tensor(
            name, tensor, "a bulk copy", dtype=x.dtype, shape=x.shape, on=x.device, contiguous=True
        )
        if tensor.data_ptr() % UNIT != start:  # a unit must be a unit of all arrays
            raise ValueError(
                f"x and {name} must start equally far past a multiple of {UNIT} bytes; x starts {start} "
                f"bytes past one, {name} {tensor.data_ptr() % UNIT}."
            )
    operands.require_disjoint({"out": out}, {"x": x, "y": y})
    return out


def prepare(
    x: torch.Tensor,  # any shape
    *,
    y: torch.Tensor | None = None,  # the shape of x
    a: float = 1.0,
    out: torch.Tensor | None = None,  # the shape of x
    config: str | BulkConfig = "best",
    source: pathlib.Path = SOURCE,
) -> operands.Launch:
    """Return the Launch of out = x or, with `y`, of out = a x + y, on the stream that is current when it is called.

    x, y and out are contiguous CUDA tensors of one shape and dtype. A copy takes any dtype. With `y` the dtype is
    float32, bfloat16 or float16; the kernel computes in float32 and rounds once. The tensors start equally far past a
    multiple of 16 bytes, and out overlaps neither input. `config` is "best", a name from `configs(op)` or a BulkConfig.
    `source` may be an edited copy of bulk_copy.cu.

    A CUDA graph may capture the launch and must not outlive it. bulk_in_order counts chunks in memory of its own, so
    its launches must not overlap. Raises ValueError for bad arguments and Unsupported without TMA.
    """
    config = _choose_config(config, "copy" if y is None else "axpy")
    out = _check_operands(x, y, out)
    if config.kernel == "bulk_in_order" and y is not None:
        raise ValueError("bulk_in_order can only copy; leave out y.")
    operands.require_gpu(x, "a bulk copy", instead="compile it with ch07.bulk_copy.job and read its SASS")
    if not x.numel():
        return operands.Launch(lambda: None, out, config)
    element, size = ("u8", x.nbytes) if y is None else (ELEMENTS[x.dtype], x.numel())
    chunks = max(1, math.ceil(x.nbytes / config.chunk_bytes))
    if chunks >= 1 << 31:
        raise ValueError(f"x has {chunks:,} chunks; a grid has fewer than 2^31: choose a larger chunk_bytes.")
    grid = (
        math.ceil(chunks / config.chunks_per_cta)
        if config.chunks_per_cta
        else min(chunks, device.current().sms * config.ctas_per_sm)
    )
    macros = tuple(f"-D{name}={value}" for name, value in config.constants(element).items())
    args = [x, x if y is None else y, out, ctypes.c_float(a), ctypes.c_uint64(size)]
    if config.kernel == "bulk_in_order":
        args.append(torch.zeros(1, dtype=torch.int32, device=x.device))
    run = cuda.prepare_launch(
        cuda.load_kernel(source, config.kernel, macros),
        grid,
        config.threads,
        args,
        config.smem_bytes(1 if y is None else 2),
    )
    return operands.Launch(run, out, config)


def copy(
    x: torch.Tensor,  # any shape
    *,
    out: torch.Tensor | None = None,  # the shape of x
    config: str | BulkConfig = "best",
) -> torch.Tensor:  # the shape of x
    """Return a copy of x, bit for bit. Arguments and errors as for `prepare`."""
    return prepare(x, out=out, config=config)()


def axpy(
    a: float,
    x: torch.Tensor,  # any shape
    y: torch.Tensor,  # the shape of x
    *,
    out: torch.Tensor | None = None,  # the shape of x
    config: str | BulkConfig = "best",
) -> torch.Tensor:  # the shape of x
    """Return a x + y, computed in float32 and rounded once. Arguments and errors as for `prepare`."""
    return prepare(x, y=y, a=a, out=out, config=config)()
