"""Launch Triton kernels again and again on tensors of one kind, without the time that Triton's own launch takes.

Triton 3.6 and 3.7 look each argument up and call `cuTensorMapEncodeTiled` for each host descriptor at each launch, also
for a TensorDescriptor that was kept (`triton/backends/nvidia/driver.py`, `make_tensordesc_arg`). `prepare` compiles a
kernel and puts its parameters, in the order that driver.py gives them, into a `tilelab.runtime.cuda.PreparedLaunch`.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilelab.runtime import cuda, tensor_map

SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
SWIZZLES = list(tensor_map.SWIZZLES)  # Triton numbers them as the driver does


class UnknownParameters(RuntimeError):
    """The kernels of this Triton take other parameters than Triton 3.6 and 3.7 give them."""


class _Described:
    """Memory with a descriptor's shape and strides. A ragged one reaches beyond its tensor, which no view may."""

    def __init__(self, memory: torch.Tensor, shape: Sequence[int], strides: Sequence[int]):
        self.memory, self.shape, self.ndim, self.stride = memory, tuple(shape), len(shape), lambda: strides

    def __getattr__(self, name: str):
        return getattr(self.memory, name)


def parameter_bytes(ptx: str) -> list[int]:
    """Return the size of each parameter of the kernel in this PTX, in bytes."""
    entry = ptx[ptx.index(".entry") :]
    sizes = re.findall(r"\.param \.(?:align \d+ \.b8 \w+\[(\d+)\]|[a-z](\d+))", entry[: entry.index(")")])
    return [int(array) if array else int(bits) // 8 for array, bits in sizes]


def make_parameters(
    compiled: Any,
    arguments: Mapping[str, Any],
    follows: Mapping[str, int] | None = None,
    encode: Callable = tensor_map.make_tensor_map,
) -> tuple[list, list[int | None]]:
    """Return the parameters of Triton's CompiledKernel, but for the two of its scratch memory, and what each follows.

    A descriptor becomes a map, a shape (32 bits each) and strides (64). `follows` names the tensor of a call whose
    address an argument takes. UnknownParameters when the binary wants others.
    """
    values, positions, maps = [], [], iter(compiled.metadata.tensordesc_meta or ())
    for name, kind in compiled.src.signature.items():
        given = arguments[name]
        if isinstance(given, TensorDescriptor | GluonDescriptor):
            meta = next(maps, None)
            if meta is None:
                raise UnknownParameters(f"{name} is a descriptor, for which this Triton made no tensor map.")
            # The driver has no float8.
            memory = given.base.view(torch.uint8) if given.base.itemsize == 1 else given.base
            made = [
                encode(
                    _Described(memory, given.shape, given.strides),
                    meta["block_size"],
                    swizzle=SWIZZLES[meta["swizzle"]],
                    fill="nan" if given.padding == "nan" else "zero",
                ),
                *map(ctypes.c_int32, given.shape),
                *map(ctypes.c_int64, given.strides),
            ]
        elif kind.startswith("*"):
            made = [given]
        else:
            made = [] if kind == "constexpr" else [SCALARS[kind](given)]
        values += made
        positions += [(follows or {}).get(name), *[None] * (len(made) - 1)][: len(made)]
    sizes = [
        ctypes.sizeof(value)
        if isinstance(value, ctypes._SimpleCData)
        else 8
        if isinstance(value, torch.Tensor)
        else tensor_map.TensorMap.NBYTES
        for value in values
    ]
    if parameter_bytes(compiled.asm["ptx"]) != [*sizes, 8, 8]:
        raise UnknownParameters(
            f"this Triton's kernels take parameters of {parameter_bytes(compiled.asm['ptx'])} "
            f"bytes, not of {[*sizes, 8, 8]}: launch it through Triton."
        )
    return values, positions


def bind(
    compiled: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    follows: Mapping[str, int] | None = None,
    early: bool | None = None,
) -> Callable[..., None]:
    """Return a function of tensors that launches Triton's CompiledKernel without Triton's Python.

    `arguments` are all arguments of the kernel by name, and `follows` says which tensor of a call each pointer and
    descriptor takes the address of. A kernel that makes descriptors itself gets new scratch memory at each launch. With
    `early` it may start before the kernel before it has ended; by default if it was compiled so. UnknownParameters for
    a Triton whose kernels take other parameters.
    """
    compiled._init_handles()  # load the binary
    parameters, positions = make_parameters(compiled, arguments, follows)
    meta, scratch = compiled.metadata, cuda.Address(0)
    launch = cuda.PreparedLaunch(
        compiled.function,
        grid,
        (32 * meta.num_warps,),
        # The last parameter is a profiler's scratch memory.
        [*map(cuda.as_parameter, parameters), scratch, cuda.Address(0)],
        [*positions, -1],
        meta.shared,
        early=meta.launch_pdl if early is None else early,
        keep_alive=compiled,
    )
    size = math.prod(grid) * meta.global_scratch_size
    if not size:
        return lambda *tensors: launch(*tensors, None)
    return lambda *tensors: launch(*tensors, torch.empty(size, dtype=torch.int8, device="cuda"))


def _forget_memory(argument: Any) -> Any:
    """Return an argument without the tensor in it."""
    if not hasattr(argument, "block_shape"):
        return None
    descriptor = copy.copy(argument)
    descriptor.base = None
    return descriptor


def prepare(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    follows: Mapping[str, int],
    early: bool | None = None,
    **constants: Any,
) -> Callable[..., None]:
    """Compile and load a kernel, and return a function of tensors that launches it on torch's current stream.

    `arguments` are arguments of the kernel by name, with tensors of the kind that later calls will pass. `follows`
    says which tensor of a call each pointer and descriptor takes the address of; the tensor may have another dtype than
    the argument. `constants` are the other arguments, and Triton's options. `early` is described at `bind`. The
    function keeps no tensor alive. Without a GPU the interpreter runs the kernel.
    """
    kept = arguments | {name: _forget_memory(arguments[name]) for name in follows}
    dtypes = {name: getattr(arguments[name], "base", arguments[name]).dtype for name in follows}

    def launch_by_triton(*tensors):
        moved = {}
        for name, position in follows.items():
            tensor = tensors[position].view(dtypes[name])
            moved[name] = tensor if kept[name] is None else dataclasses.replace(kept[name], base=tensor)
        kernel[grid](**kept | moved, **constants)

    if not isinstance(kernel, triton.JITFunction):
        return launch_by_triton
    compiled = kernel.warmup(grid=grid, **arguments, **constants)
    try:
        return bind(compiled, grid, arguments | constants, follows, early)
    except UnknownParameters:
        constants |= {} if early is None else {"launch_pdl": early}

        def launch_in_this_thread(*tensors):
            # A ContextVar: a thread that never set it has no allocator, so set it where the launch happens.
            triton.set_allocator(
                lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda")
            )
            cuda.ensure_cuda_context()
            launch_by_triton(*tensors)

        return launch_in_this_thread
