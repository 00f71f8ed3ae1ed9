"""Copy, add and gather rows through Triton's tensor descriptors, and by pointers beside them.

Three ways to the same bytes: a descriptor that the host makes (a tensor map, encoded by the driver, is an argument of
the kernel), one that the kernel makes itself, and 16-byte loads by threads. Source: Triton's tensor-descriptor API;
PTX ISA, "Tensors", "tensormap.replace".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.descriptors.configs import OPS, UNIT, TileConfig, chosen, configs
from ch14.descriptors.kernels import counts, job, kernel_of
from ch14.descriptors.tile_copy import (
    copy_tma_kernel,  # the smallest of them: a tile a program, two descriptors of the host
)
from tilelab import device
from tilelab.cuda import ensure_cuda_context
from tilelab.operands import address_range, require_tensor, row_stride

# Old names, for packages that do not use tilelab.operands yet.
context, span, check_dense = ensure_cuda_context, address_range, require_tensor

__all__ = ["OPS", "TileConfig", "configs", "copy_tma_kernel", "copy", "add", "gather", "prepare", "job"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # what moves as it is
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def copy_spec(x):
    """The same bits."""
    return x.clone()


def add_spec(x, y):
    """x + y in float64."""
    return x.double() + y.double()


def gather_spec(x, index):
    """Row index[i] of x in row i, zeros where x has no such row."""
    there = (index >= 0) & (index < x.shape[0])
    rows = x[index.clamp(0, x.shape[0] - 1).long()]
    return torch.where(there[:, None], rows, torch.zeros_like(rows))


# ---- launching

@dataclass
class Launch:
    """A kernel with its arguments, ready: call it to launch it, on torch's current stream, and get `out`.

    It may be called in any thread. Host descriptors were made once; Triton encodes their tensor maps again at each
    launch (`ch14.descriptors.launch_cost`). `way` is the configuration's, "" in the interpreter.
    """

    kernel: Any
    grid: int
    arguments: dict
    options: dict
    out: torch.Tensor
    way: str

    def __call__(self):
        if self.way == "device":  # a ContextVar: a thread that never set it has none, so set it where it is launched
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        elif self.way in ("host", "gather4"):
            ensure_cuda_context()
        if self.grid:
            self.kernel[(self.grid,)](**self.arguments, **self.options)
        return self.out

    def compiled(self):
        """Triton's CompiledKernel, loaded, without a launch."""
        found = self.kernel.warmup(**self.arguments, **self.options, grid=(self.grid,))
        found._init_handles()
        return found


def _tensor(name: str, given, op: str, flat: bool) -> torch.Tensor:
    """`given` as the kernel takes it: bits where they are only moved, one row where it is flat."""
    require_tensor(name, given, op)
    if op == "add" and given.dtype not in FLOATS:
        raise ValueError(f"add takes {', '.join(str(d)[6:] for d in FLOATS)}; {name} is {str(given.dtype)[6:]}.")
    if given.element_size() not in BITS:
        raise ValueError(f"an element has 1, 2, 4 or 8 bytes; those of {name} have {given.element_size()}.")
    tensor = given if op == "add" else given.view(BITS[given.element_size()])
    if flat:
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous for a flat tile; it is {tuple(given.shape)} with strides "
                             f"{given.stride()}: take a tile of rows.")
        return tensor.view(-1)
    if tensor.ndim != 2:
        raise ValueError(f"{name} must be a matrix for a tile of rows; its shape is {tuple(given.shape)}: take a flat "
                         "tile, or reshape it.")
    if tensor.numel() and (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        raise ValueError(f"the last dimension of {name} must be contiguous (stride 1); its strides are "
                         f"{given.stride()}: use {name}.contiguous().")
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        raise ValueError(f"the rows of {name} overlap (stride {tensor.stride(0)} for {tensor.shape[1]} elements).")
    return tensor


def describable(name: str, tensor, block, written: bool) -> None:
    """ValueError for what a tensor descriptor cannot say of `tensor`, or, if it is `written`, would overwrite."""
    size, otherwise = tensor.element_size(), "or take pointers"
    if tensor.data_ptr() % UNIT:
        raise ValueError(f"{name} must start at a multiple of {UNIT} bytes for a descriptor; it starts "
                         f"{tensor.data_ptr() % UNIT} past one: copy it first, {otherwise}.")
    if tensor.ndim > 1 and row_stride(tensor) * size % UNIT:
        raise ValueError(f"a row of {name} must take a multiple of {UNIT} bytes for a descriptor; its stride is "
                         f"{row_stride(tensor) * size:,} bytes: pad it, {otherwise}.")
    if block[-1] * size < UNIT:
        raise ValueError(f"a descriptor's tile is at least {UNIT} bytes wide; {block[-1]} elements of {name} are "
                         f"{block[-1] * size}.")
    if written and tensor.shape[-1] * size % UNIT:
        raise ValueError(f"a row of {name} must end at a multiple of {UNIT} bytes: a descriptor stores whole units of "
                         f"them, and would overwrite what lies behind its {tensor.shape[-1] * size:,} bytes: pad it, "
                         f"{otherwise}.")


def _checked(op, x, out, y, index, config) -> dict[str, torch.Tensor]:
    """The tensors as the kernel takes them, by name; ValueError says what is wrong."""
    for name, given, wanted in (("y", y, op == "add"), ("index", index, op == "gather")):
        if (given is not None) != wanted:
            raise ValueError(f"{op} {'needs' if wanted else 'takes no'} {name}.")
    flat = op != "gather" and not config.block_m
    given = {"x": x, "y": y, "out": out} if op == "add" else {"x": x, "out": out}
    tensors = {name: _tensor(name, tensor, op, flat) for name, tensor in given.items()}
    shape = x.shape
    if op == "gather":
        if not isinstance(index, torch.Tensor) or index.dtype != torch.int32 or index.ndim != 1:
            raise ValueError("index must be a torch.Tensor of int32 with one dimension, as coordinates of a tensor map "
                             "are 32 bits.")
        if not index.is_contiguous() or index.device != x.device:
            raise ValueError(f"index must be contiguous and on {x.device}; it is on {index.device} with stride "
                             f"{index.stride(0)}.")
        if not x.shape[0]:
            raise ValueError(f"x must have a row to gather; it is {tuple(x.shape)}.")
        shape = (len(index), x.shape[1])
    for name, tensor in given.items():
        wanted = shape if name == "out" else x.shape
        if (tensor.shape, tensor.dtype, tensor.device) != (wanted, x.dtype, x.device):
            raise ValueError(f"{name} must be {tuple(wanted)} of {str(x.dtype)[6:]} on {x.device}; it is "
                             f"{tuple(tensor.shape)} of {str(tensor.dtype)[6:]} on {tensor.device}.")
    if any(extent >= 1 << 31 for tensor in tensors.values() for extent in tensor.shape):
        raise ValueError("an extent has at most 2^31 - 1 elements: coordinates of a tile are 32 bits.")
    if x.is_meta:
        raise ValueError("x must be in memory; it is on the meta device.")
    spans = {name: address_range(tensor) for name, tensor in {**tensors, "index": index}.items()
             if tensor is not None and tensor.numel()}
    begin, end = spans.pop("out", (0, 0))
    for name, (start, stop) in spans.items():  # tiles are stored while others are still read
        if begin < stop and start < end:
            raise ValueError(f"out lies in the memory that {name} spans: give it memory of its own.")
    if config.described:
        for name, tensor in tensors.items():
            describable(name, tensor, config.block, name == "out")
    return tensors


def prepare(op: str, x, out, *, y=None, index=None, config="best") -> Launch:
    """A Launch of out = x ("copy"), out = x + y ("add") or out[i] = x[index[i]] ("gather").

    x, y, out: tensors of one shape and dtype, matrices for all but flat tiles, with contiguous rows; copy and gather
    take any dtype of 1, 2, 4 or 8 bytes, add float32, bfloat16 and float16, computed in float32. index: int32; a row
    that x does not have gives zeros. `config` is a variant's name, "best" or a TileConfig. Raises ValueError for what
    it cannot take, and tilelab.device.Unsupported where the configuration cannot run (outside the interpreter).
    """
    config = chosen(op, config)
    tensors = _checked(op, x, out, y, index, config)
    interpreted = not isinstance(copy_tma_kernel, triton.JITFunction)
    here = device.current()
    if not interpreted:
        if config.described:
            device.require("has_tma", "a descriptor", "take pointers")
        if not x.is_cuda:
            raise ValueError(f"x must be on the GPU; it is on {x.device}.")
        if here.target in device.TARGETS and (reason := config.rejection(here.target)):
            raise device.Unsupported(reason)
    kernel, names = kernel_of(op, config)
    rows, columns = tensors["out"].shape if tensors["out"].ndim == 2 else (1, tensors["out"].numel())
    strides = {name: row_stride(tensor) for name, tensor in tensors.items() if tensor.ndim == 2}
    given = counts(config, x.element_size(), rows, columns, x.shape[0] if x.ndim else 1, strides) | {
        "y": None, "index": index, **tensors}
    tiles = given["tiles"]
    if tiles >= 1 << 31:
        raise ValueError(f"there are at most 2^31 - 1 tiles; here are {tiles:,}: take a larger one.")
    grid = config.programs(tiles, here.sms or 2)
    if config.way in ("host", "gather4") and tiles:
        for name, tensor in tensors.items():
            given[name] = TensorDescriptor(tensor, list(tensor.shape), [strides[name], 1] if name in strides else [1],
                                           list(config.block_of(name)))
    launch = Launch(kernel, grid, {name: given[name] for name in names}, {"num_warps": config.num_warps}, out,
                    "" if interpreted else config.way)
    if grid and not interpreted:
        try:
            launch.compiled()
        except torch.AcceleratorError:
            raise
        except Exception as error:  # too large for shared memory, or for the compiler: said here, not at a launch
            raise device.Unsupported(f"{config} cannot run on {here.target}: {type(error).__name__}: "
                                     f"{device.first_line(error)[:200]}.") from error
    return launch


def copy(x, out=None, config="best"):
    """A copy of x, bit for bit, in `out` or in new memory. Arguments and errors as for `prepare`."""
    out = torch.empty_like(x) if out is None and isinstance(x, torch.Tensor) else out
    return prepare("copy", x, out, config=config)()


def add(x, y, out=None, config="best"):
    """x + y, computed in float32 and rounded once. Arguments and errors as for `prepare`."""
    out = torch.empty_like(x) if out is None and isinstance(x, torch.Tensor) else out
    return prepare("add", x, out, y=y, config=config)()


def gather(x, index, out=None, config="best"):
    """x[index]: row i of the result is row index[i] of x, or zeros. Arguments and errors as for `prepare`."""
    if not isinstance(index, torch.Tensor) or index.ndim != 1:
        raise ValueError("index must be a torch.Tensor of int32 with one dimension; it is "
                         f"{tuple(index.shape) if isinstance(index, torch.Tensor) else type(index).__name__}.")
    if out is None and isinstance(x, torch.Tensor) and x.ndim == 2:
        out = torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device)
    return prepare("gather", x, out, index=index, config=config)()
