"""Copy, add and gather rows through Triton's tensor descriptors, and by pointers beside them.

Read `tile_copy.copy_tma_kernel` first, the smallest kernel, then `kernels`, and `rules` for what a descriptor demands.
Source: Triton's tensor-descriptor API; PTX ISA, "Tensors", "tensormap.replace".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.descriptors.configs import OPS, UNIT, TileConfig, choose_variant, configs
from ch14.descriptors.kernels import find_kernel, job, make_sizes, tile_host_kernel
from tilelab.runtime import device
from tilelab.runtime.cuda import ensure_cuda_context
from tilelab.runtime.operands import (
    Launch,
    require_disjoint,
    require_gpu,
    require_rows,
    require_tensor,
    row_stride,
)

__all__ = ["OPS", "TileConfig", "configs", "spec", "copy", "add", "gather", "prepare", "job"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of elements that are only moved
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def spec(
    op: str,
    x: torch.Tensor,  # (R, C), or of any shape to copy
    y: torch.Tensor | None = None,  # as x, to add
    index: torch.Tensor | None = None,  # (N), to gather
) -> torch.Tensor:  # as x, or (N, C)
    """Return a copy of x ("copy"), x + y in float64 ("add"), or rows of x by index, zeros for no row ("gather")."""
    if op == "copy":
        return x.clone()
    if op == "add":
        return x.double() + y.double()  # type: ignore[union-attr]
    exists: Any = (index >= 0) & (index < len(x))  # type: ignore[operator]
    rows = x[index.clamp(0, len(x) - 1).long()]  # type: ignore[union-attr]
    return torch.where(exists[:, None], rows, torch.zeros_like(x[:1]))


@dataclass
class TileLaunch(Launch):
    """A Launch that shows its kernel and arguments. It may be called in any thread, on torch's current stream.

    Host descriptors were made once; Triton encodes their tensor maps again at each launch (`launch_cost`).
    """

    kernel: Any = None
    grid: int = 0
    arguments: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    def compile(self) -> Any:
        """Return Triton's CompiledKernel, loaded, without a launch."""
        compiled = self.kernel.warmup(**self.arguments, **self.options, grid=(self.grid,))
        compiled._init_handles()
        return compiled


def require_describable(name: str, tensor: torch.Tensor, block: Sequence[int], written: bool) -> None:
    """Raise ValueError for what a tensor descriptor cannot express, or, if `tensor` is `written`, would overwrite."""
    size = tensor.element_size()
    require_rows(name, tensor if tensor.ndim == 2 else tensor.view(1, -1), UNIT)
    if block[-1] * size < UNIT:
        raise ValueError(
            f"a tile of {name} must be at least {UNIT} bytes wide for a descriptor; {block[-1]} elements "
            f"are {block[-1] * size}."
        )
    if written and tensor.shape[-1] * size % UNIT:
        raise ValueError(
            f"a row of {name} must end at a multiple of {UNIT} bytes: a descriptor stores whole units and "
            f"would overwrite memory behind its {tensor.shape[-1] * size:,} bytes: pad it, or take "
            "pointers."
        )


def _check_operands(op, x, y, index, out, config) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors as the kernel takes them, by name, and out.

    Elements that are only moved become integers of the same size, and tensors for flat tiles one row.
    """
    for name, tensor, wanted in (("y", y, op == "add"), ("index", index, op == "gather")):
        if (tensor is not None) != wanted:
            raise ValueError(f"{op} {'needs' if wanted else 'takes no'} {name}.")
    flat = op != "gather" and not config.block_m
    require_tensor("x", x, op, dtype=tuple(FLOATS) if op == "add" else None, ndim=None if flat else 2)
    if x.element_size() not in BITS:
        raise ValueError(f"an element of x must have 1, 2, 4 or 8 bytes; it has {x.element_size()}.")
    shape = x.shape
    if op == "gather":  # coordinates of a tensor map are 32 bits
        require_tensor("index", index, op, dtype=torch.int32, ndim=1, on=x.device, contiguous=True)
        shape = (len(index), x.shape[1])
        if not len(x):
            raise ValueError(f"x must have a row to gather; its shape is {tuple(x.shape)}.")
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    tensors = {"x": x, "out": out} | ({"y": y} if op == "add" else {})
    for name, tensor in tensors.items():
        require_tensor(
            name,
            tensor,
            op,
            dtype=x.dtype,
            shape=shape if name == "out" else x.shape,
            on=x.device,
            contiguous=flat,
        )
        tensor = tensor if op == "add" else tensor.view(BITS[x.element_size()])
        tensors[name] = tensor = tensor.view(-1) if flat else tensor
        if config.uses_descriptors:
            require_describable(name, tensor, config.block, name == "out")
        elif not flat:
            require_rows(name, tensor, 1)
        if any(extent >= 1 << 31 for extent in tensor.shape):
            raise ValueError(f"an extent of {name} must be below 2^31: coordinates of a tile are 32 bits.")
    require_disjoint({"out": tensors["out"]}, {"x": tensors["x"], "y": tensors.get("y"), "index": index})
    return tensors, out


def prepare(
    op: str,
    x: torch.Tensor,  # (R, C), or of any shape where the tile is flat
    *,
    y: torch.Tensor | None = None,  # as x, to add
    index: torch.Tensor | None = None,  # (N), int32, to gather
    out: torch.Tensor | None = None,  # as x, or (N, C)
    config: str | TileConfig = "best",
) -> TileLaunch:
    """Return a Launch of out = x ("copy"), out = x + y ("add") or out[i] = x[index[i]] ("gather").

    x, y, out: tensors of one dtype and shape with contiguous rows, matrices unless the tile is flat. Copy and gather
    take any dtype of 1, 2, 4 or 8 bytes. Add takes float32, bfloat16 and float16, and computes in float32.
    index: int32. A row that x does not have gives zeros.
    config: "best", a variant's name or a TileConfig.

    Raises ValueError for bad arguments, and Unsupported where the configuration cannot run.
    """
    config = choose_variant(op, config)
    tensors, out = _check_operands(op, x, y, index, out, config)
    is_interpreted = not isinstance(tile_host_kernel, triton.JITFunction)
    here = device.current()
    if config.uses_descriptors:
        require_gpu(x, "a descriptor", instead="take pointers", interpreted=is_interpreted)
    elif not is_interpreted and not x.is_cuda:
        raise device.Unsupported(f"{op} needs its tensors on a GPU; they are on {x.device}: move them there.")
    if not is_interpreted and here.target in device.TARGETS and (reason := config.rejection(here.target)):
        raise device.Unsupported(reason)
    kernel, names = find_kernel(op, config)
    rows, columns = out.shape if tensors["out"].ndim == 2 else (1, out.numel())
    strides = {name: row_stride(tensor) for name, tensor in tensors.items() if tensor.ndim == 2}
    given = make_sizes(config, x.element_size(), rows, columns, len(x) if x.ndim else 1, strides)
    given |= {"y": None, "index": index, **tensors}
    if given["tiles"] >= 1 << 31:
        raise ValueError(f"there are {given['tiles']:,} tiles, and fewer than 2^31 fit: take a larger tile.")
    grid = config.programs(given["tiles"], here.sms or 2)
    if config.way in ("host", "gather4") and grid:
        given |= {
            name: TensorDescriptor(
                tensor,
                list(tensor.shape),
                [strides[name], 1] if name in strides else [1],
                list(config.descriptor_block(name)),
            )
            for name, tensor in tensors.items()
        }
    arguments, options = {name: given[name] for name in names}, {"num_warps": config.num_warps}

    def run():
        if config.way == "device" and not is_interpreted:
            # A ContextVar: a thread that never set it has no allocator, so set it where the launch happens.
            triton.set_allocator(
                lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
            )
        elif config.uses_descriptors and not is_interpreted:
            ensure_cuda_context()
        if grid:
            kernel[(grid,)](**arguments, **options)

    launch = TileLaunch(run, out, config, kernel=kernel, grid=grid, arguments=arguments, options=options)
    if grid and not is_interpreted:
        try:
            launch.compile()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            # It is too large for shared memory or for the compiler: refused here, and not at a launch.
            raise device.Unsupported(
                f"{config} cannot run on {here.target}: {type(error).__name__}: "
                f"{device.first_line(error)[:200]}."
            ) from error
    return launch


def copy(
    x: torch.Tensor,  # (R, C), or of any shape where the tile is flat
    *,
    out: torch.Tensor | None = None,  # as x
    config: str | TileConfig = "best",
) -> torch.Tensor:  # as x
    """Return a copy of x, bit for bit. Arguments and errors as for `prepare`."""
    return prepare("copy", x, out=out, config=config)()


def add(
    x: torch.Tensor,  # (R, C), or of any shape where the tile is flat
    y: torch.Tensor,  # as x
    *,
    out: torch.Tensor | None = None,  # as x
    config: str | TileConfig = "best",
) -> torch.Tensor:  # as x
    """Return x + y, computed in float32 and rounded once. Arguments and errors as for `prepare`."""
    return prepare("add", x, y=y, out=out, config=config)()


def gather(
    x: torch.Tensor,  # (R, C)
    index: torch.Tensor,  # (N), int32
    *,
    out: torch.Tensor | None = None,  # (N, C)
    config: str | TileConfig = "best",
) -> torch.Tensor:  # (N, C)
    """Return x[index]: row i is row index[i] of x, or zeros. Arguments and errors as for `prepare`."""
    return prepare("gather", x, index=index, out=out, config=config)()
