"""Check what an operator is given, and hold what it has prepared.

Each `require_…` function raises one sentence that names the argument, what it is and what is allowed, before a kernel
could read or write memory that is not its own. `Launch` is what every `prepare` of the course returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from tilelab.runtime import device

Config = TypeVar("Config")


@dataclasses.dataclass
class Launch:
    """A prepared operator. Call it to run the kernel again on the same tensors; the call returns `out`.

    `config` is the chosen configuration. `skipped` lists (configuration, reason) for each one that the model rejected
    or that failed to compile, and `fallback` is a sentence if none of the requested set could run. `chosen` says how
    "best" was found: "tuned", "tuned at 64 × 4096 × 4096" (a shape nearby), "by the model", or for fp8 "by the
    extents". ", for another version of the kernel" is added where the kernel has changed since. `keep_alive` holds the
    tensors that the kernel knows only by their addresses.
    """

    run: Callable[[], object]
    out: Any
    config: Any
    keep_alive: tuple = ()
    skipped: Sequence[tuple[Any, str]] = ()
    fallback: str = ""
    chosen: str = ""

    def __call__(self) -> Any:
        self.run()
        return self.out


def address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def row_stride(matrix: torch.Tensor, unit_bytes: int = 16) -> int:
    """Return the number of elements from one row to the next, for a descriptor.

    Torch allows any stride for a matrix of one row; a descriptor demands a multiple of `unit_bytes` for it too.
    """
    unit = max(1, unit_bytes // matrix.element_size())
    return matrix.stride(0) if matrix.shape[0] > 1 else math.ceil(matrix.shape[1] / unit) * unit


def _sizes(extents: Sequence[int]) -> str:
    return " x ".join(map(str, extents)) or "a single number"


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def require_tensor(
    name: str,
    given: Any,
    op: str,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    ndim: int | None = None,
    shape: Sequence[int] | None = None,
    on: torch.device | None = None,
    contiguous: bool = False,
    aligned: int = 1,
    not_empty: bool = False,
    in_memory: bool = True,
) -> torch.Tensor:
    """Return `given` if it is a dense tensor in memory that a kernel can read by address, else raise ValueError.

    `op` names the operator in the message. Each further argument adds one requirement: one of several dtypes, a number
    of dimensions, a shape, a device, contiguous memory, a start at a multiple of `aligned` bytes, an element at least.
    Without `in_memory`, the tensor may be one that a trace or the meta device holds.
    """
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor; it is a {type(given).__name__}.")
    if given.is_nested or given.is_quantized or given.layout is not torch.strided:
        kind = "nested" if given.is_nested else "quantized" if given.is_quantized else str(given.layout)[6:]
        raise ValueError(f"{name} must be a dense tensor of plain numbers; it is {kind}.")
    if in_memory:
        _require_memory(name, given, op)
    if ndim is not None and given.ndim != ndim:
        kind = {1: "a vector", 2: "a matrix"}.get(ndim, f"a tensor of {ndim} dimensions")
        raise ValueError(f"{name} must be {kind}; its shape is {tuple(given.shape)}.")
    if shape is not None and tuple(given.shape) != tuple(shape):
        raise ValueError(f"{name} must be {_sizes(shape)}; it is {_sizes(given.shape)}.")
    if not_empty and not given.numel():
        raise ValueError(f"{name} must have at least one element; its shape is {tuple(given.shape)}.")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if dtypes and given.dtype not in dtypes:
        raise ValueError(f"{name} must be {_dtypes(dtypes)}; it is {_dtypes([given.dtype])}.")
    if on is not None and given.device != on:
        raise ValueError(f"all tensors must be on one device; {name} is on {given.device}, not on {on}.")
    if contiguous and not given.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; its strides are {given.stride()}: use {name}.contiguous()."
        )
    if in_memory and given.data_ptr() % aligned:
        raise ValueError(
            f"{name} must start at a multiple of {aligned} bytes; it starts {given.data_ptr() % aligned} "
            "bytes past one: copy it first."
        )
    return given


def _require_memory(name: str, given: torch.Tensor, op: str) -> None:
    """Raise ValueError unless a kernel that reads the memory of a tensor reads its values, and all that it carries."""
    if given.is_meta:
        raise ValueError(f"{name} must be in memory; it is on the meta device.")
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op} has no backward pass and {name} requires a gradient: detach it or use torch.no_grad()."
        )
    if given.is_conj() or given.is_neg():
        raise ValueError(f"{name} is a view that conjugates or negates what memory holds: resolve it first.")
    if forward_ad._current_level >= 0:
        refuse_tangents(op, given)
    try:
        given.data_ptr()
    except RuntimeError:
        raise ValueError(
            f"{name} must be in memory; a transform of torch.func or a trace stands in for it."
        ) from None


def refuse_tangents(op: str, *tensors: Any) -> None:
    """Raise RuntimeError if a tensor carries a tangent of forward-mode AD, which a kernel would lose."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{op} has no forward-mode derivative, which jvp, jacfwd and hessian need: differentiate backwards, or "
                "use torch's operation."
            )


def require_rows(name: str, matrix: torch.Tensor, unit_bytes: int = 16) -> None:
    """Raise ValueError unless a matrix is stored row by row, and each row starts at a multiple of `unit_bytes` bytes.

    A tensor map cannot describe any other matrix.
    """
    rows, columns = matrix.shape
    if columns > 1 and matrix.stride(1) != 1:
        raise ValueError(
            f"{name} must be stored row by row (stride 1 in its last dimension); its strides are "
            f"{matrix.stride()}: use {name}.contiguous()."
        )
    if rows > 1 and matrix.stride(0) < columns:
        raise ValueError(
            f"the rows of {name} overlap (stride {matrix.stride(0)} for {columns} elements): use "
            f"{name}.contiguous()."
        )
    if matrix.data_ptr() % unit_bytes:
        raise ValueError(
            f"{name} must start at a multiple of {unit_bytes} bytes; it starts "
            f"{matrix.data_ptr() % unit_bytes} bytes past one: copy it first."
        )
    if rows > 1 and matrix.stride(0) * matrix.element_size() % unit_bytes:
        raise ValueError(
            f"a row of {name} must take a multiple of {unit_bytes} bytes; its stride is "
            f"{matrix.stride(0) * matrix.element_size():,} bytes: pad it."
        )


def require_no_self_overlap(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if two elements of a tensor may share memory, in any of its dimensions."""
    used = 1  # elements from the first to the last of the dimensions with smaller strides
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent > 1 and stride < used:
            raise ValueError(
                f"{name} overlaps itself: its shape is {tuple(tensor.shape)} and its strides are "
                f"{tensor.stride()}; give it memory of its own."
            )
        used += (extent - 1) * stride


def require_number(name: str, given: Any, least: float, most: float, allowed: str) -> None:
    """Raise ValueError unless `given` is a Python number from `least` to `most`, which `allowed` puts in words."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not least <= given <= most:
        found = f"{given!r:.40}" if is_number else f"a {type(given).__name__}"
        raise ValueError(f"{name} must be a Python number {allowed}; it is {found}.")


def require_disjoint(out: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]) -> None:
    """Raise ValueError if an output overlaps an input or another output in memory.

    A kernel stores some tiles while it still loads others. None stands for an argument that was left out.
    """
    written = {name: address_range(each) for name, each in out.items() if each is not None and each.numel()}
    others = {name: address_range(each) for name, each in read.items() if each is not None and each.numel()}
    while written:
        name, (begin, end) = written.popitem()
        for other, (start, stop) in {**others, **written}.items():
            if begin < stop and start < end:
                raise ValueError(f"{name} lies in the memory of {other}: give it memory of its own.")


def require_gpu(
    tensor: torch.Tensor, op: str, capability: str = "has_tma", instead: str = "", interpreted: bool = False
) -> None:
    """Raise Unsupported unless `op` can run on the tensor's device; with `interpreted` it always can.

    `capability` is a predicate of tilelab.runtime.device.Device, and `instead` says what to do on a GPU without it. The
    tensor must be on torch's current GPU (ValueError), because a tensor map does not say to which GPU its address
    belongs.
    """
    if interpreted:
        return
    device.require(capability, op, instead)
    if not tensor.is_cuda:
        raise device.Unsupported(f"{op} needs its tensors on a GPU; they are on {tensor.device}: move them.")
    if tensor.device.index != torch.cuda.current_device():
        raise ValueError(
            f"the tensors are on {tensor.device}, and the current GPU is "
            f"cuda:{torch.cuda.current_device()}: run this inside "
            "`with torch.cuda.device(tensor.device):`."
        )


def require_whole_numbers(config: Any) -> None:
    """Raise ValueError unless each field of a configuration that is declared `int` holds an int, and no bool.

    A float such as 256.0 or a True lies in the same ranges, but a kernel cannot be compiled with it.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in ("int", int) and type(value) is not int:
            raise ValueError(
                f"{field.name} of a {type(config).__name__} must be a whole number; it is {value!r:.40}."
            )


def require_one_of(name: str, value: Any, allowed: Iterable) -> None:
    """Raise ValueError unless `value` is one of `allowed` and has its type, so that 16.0 is not 16."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise ValueError(f"{name} is {value!r:.40}; choose one of {', '.join(map(str, allowed))}.")


def choose_config(
    config: Any,
    named: Mapping[str, Any],
    kind: type[Config],
    best: Callable[[], Any],
    parse: Callable[[str], Any] | None = None,
) -> Config:
    """Return the configuration for `config`: a `kind` itself, a name in `named`, or "best", the result of `best()`.

    `parse` reads other spellings of the configurations in `named`, such as that of an earlier version. ValueError,
    which lists the names, for anything else, and for a configuration as `require_whole_numbers` does.
    """
    if isinstance(config, kind):
        require_whole_numbers(config)
        return config
    if isinstance(config, str) and config == "best":
        return best()
    if isinstance(config, str) and config in named:
        return named[config]
    if isinstance(config, str) and parse:
        with contextlib.suppress(TypeError, ValueError):  # a TypeError for a text that leaves fields out
            if (found := parse(config)) in named.values():
                return found
    raise ValueError(
        f"unknown configuration {config!r:.60}; choose best, {', '.join(named)}, or pass a {kind.__name__}."
    )
