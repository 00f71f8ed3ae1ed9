"""The tensors, pointers and numbers of a kernel, with Triton's types and without its registers.

A `Value` is a block (a torch tensor), a number, or one or many pointers (a place in a tensor and offsets in elements).
Integers wrap and divide as on the GPU, and operands meet in the type that Triton chooses. Layouts are carried along as
far as they are known, and two that differ are refused as Triton refuses them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic

from tilelab.emulator.gluon.program import GluonError, program, refuse

TORCH = {
    name: getattr(torch, known)
    for name, known in {
        "int1": "bool", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64", "uint8": "uint8",
        "uint16": "uint16", "uint32": "uint32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32",
        "fp64": "float64", "fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2",
    }.items()
}  # fmt: skip
GLUON = {
    TORCH[each.name]: each
    for each in (gl.int1, gl.int8, gl.int16, gl.int32, gl.int64, gl.uint8, gl.uint16, gl.uint32, gl.float16,
                 gl.bfloat16, gl.float32, gl.float64, gl.float8e4nv, gl.float8e5)
}  # fmt: skip
_WIDER = {"uint16": torch.int64, "uint32": torch.int64}  # torch lacks arithmetic on these


def in_memory(dtype: Any) -> torch.dtype:
    """Return torch's type of an element in memory."""
    if dtype.is_ptr() or dtype.name not in TORCH:
        refuse(f"elements of type {dtype}")
    return TORCH[dtype.name]


def to_memory(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    return data.to(in_memory(dtype))


def _in_registers(dtype: Any) -> torch.dtype:
    return _WIDER.get(dtype.name) or in_memory(dtype)


def in_registers(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return elements from memory in the type that arithmetic uses."""
    return data.to(_WIDER[dtype.name]) if dtype.name in _WIDER else data


def unwrap(value: Any) -> Any:
    """Return what a constexpr holds."""
    return value.value if type(value) is gl.constexpr else value


class Shape(list):
    """A shape that adds to lists and tuples, as in Triton."""

    def __add__(self, other):
        return Shape([*self, *other])

    def __radd__(self, other):
        return Shape([*other, *self])

    def __eq__(self, other):
        return list(self) == list(other)


class Memory:
    """The elements between the first and the last one of a tensor in global memory."""

    def __init__(self, tensor: torch.Tensor):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        self.flat = tensor.detach().as_strided((last + 1 if tensor.numel() else 0,), (1,))


class Value:
    """A block, a number or pointers; `memory` is the tensor that pointers point into."""

    __slots__ = ("data", "dtype", "layout", "memory")

    def __init__(self, data: Any, dtype: Any, layout: Any = None, memory: Memory | None = None):
        self.data, self.dtype, self.layout, self.memory = data, dtype, layout, memory

    @property
    def is_block(self) -> bool:
        return isinstance(self.data, torch.Tensor)

    @property
    def shape(self) -> Shape:
        return Shape(self.data.shape) if self.is_block else Shape()

    @property
    def type(self) -> Any:
        if not self.is_block:
            return self.dtype
        return gl.distributed_type(self.dtype, list(self.data.shape), self.layout or gl.AutoLayout())

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> Value:  # noqa: N802
        return permute(self, (1, 0))

    def _number(self) -> Any:
        if self.is_block:
            raise GluonError(f"a block of shape {self.shape} stands where a number is needed")
        if self.memory:
            raise GluonError("a pointer stands where a number is needed")
        return self.data

    def __bool__(self):
        return bool(self._number())

    def __int__(self):
        return int(self._number())

    def __index__(self):
        return operator.index(self._number())

    def __float__(self):
        return float(self._number())

    def __repr__(self):
        return str(self.data)

    __hash__ = None

    def __getitem__(self, slices):
        slices = slices if isinstance(slices, tuple) else (slices,)
        result = self
        for axis, each in enumerate(slices):
            if each is None:
                result = expand_dims(result, axis)
            elif each != slice(None):
                refuse(f"the index {each} of a block: blocks take `:` and None")
        return result

    def __neg__(self):
        return _operate("sub", 0, self) if not self.dtype.is_floating() else _operate("mul", self, -1.0)

    def __pos__(self):
        return self

    def __abs__(self):
        return absolute(self)

    def __invert__(self):
        if self.dtype.is_int1():
            return Value(~self.data if self.is_block else not self.data, gl.int1, self.layout)
        return _operate("xor", self, -1)

    def logical_and(self, other):
        return _operate("and_", self != 0, as_value(other) != 0)

    def logical_or(self, other):
        return _operate("or_", self != 0, as_value(other) != 0)


# ---- types


@functools.lru_cache(1024)
def _common(a: Any, a_is_literal: bool, b: Any, b_is_literal: bool, divides: bool) -> Any:
    types = object.__new__(TritonSemantic)
    return types.computation_type_impl(a, a_is_literal, b, b_is_literal, divides)


def _type_of_literal(value: Any) -> Any:
    if isinstance(value, bool):
        return gl.int1
    if isinstance(value, int):
        return gl.int32 if -(2**31) <= value < 2**31 else gl.uint32 if 0 < value < 2**32 else gl.int64
    if isinstance(value, float):
        return gl.float32
    raise GluonError(f"a {type(value).__name__} stands where a tensor or a number is needed: {value}")


def settle(value: Any) -> Any:
    """Return a Value, or a number that the kernel's text holds."""
    if type(value) in (Value, int, float):
        return value
    value = unwrap(value)
    return value.settle() if hasattr(value, "settle") else value


def as_value(value: Any) -> Value:
    value = settle(value)
    return value if isinstance(value, Value) else Value(value, _type_of_literal(value))


def _wrap(data: Any, dtype: Any) -> Any:
    """Return a number as a register of `dtype` holds it."""
    if dtype.is_int1():
        return bool(data)
    if dtype.is_int():
        bits = dtype.primitive_bitwidth
        data = int(data) & ((1 << bits) - 1)
        return data - (1 << bits) if dtype.is_int_signed() and data >> (bits - 1) else data
    if dtype.is_fp32():
        with numpy.errstate(over="ignore"):
            return float(numpy.float32(data))
    return float(data) if dtype.is_fp64() else torch.tensor(data, dtype=in_memory(dtype)).item()


def _as(value: Any, dtype: Any, as_block: bool) -> Any:
    """Return the data of a Value or a literal in `dtype`: a tensor if it is a block or `as_block`, else a number."""
    data = value.data if isinstance(value, Value) else value
    if isinstance(data, torch.Tensor):
        return data if value.dtype == dtype else _convert(data, value.dtype, dtype)
    if not as_block or dtype.name in ("fp32", "fp64", "int32", "int64"):
        return _wrap(data, dtype)
    return torch.tensor(_wrap(data, dtype), dtype=_in_registers(dtype))


def _convert(data: torch.Tensor, old: Any, new: Any) -> torch.Tensor:
    if new.is_int1():
        return data != 0
    if new.name in _WIDER:
        return data.to(torch.int64) & ((1 << new.primitive_bitwidth) - 1)
    if new.is_fp8():  # the GPU's conversion saturates
        data, most = data.float(), torch.finfo(in_memory(new)).max
        data = data.clamp(-most, most)
    return data.to(in_memory(new))


def common_layout(*values: Value) -> Any:
    """Return the layout that blocks share; two that differ are an error of the compiler."""
    found = None
    for value in values:
        layout = value.layout if isinstance(value, Value) and isinstance(value.data, torch.Tensor) else None
        if layout is None or layout is found or isinstance(layout, gl.AutoLayout):
            continue
        if found is not None and layout != found:
            raise GluonError(
                f"two blocks of different layouts meet; take gl.convert_layout: {found} and {layout}"
            )
        found = layout
    return found


# ---- arithmetic


def _divide(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(
            a, torch.where(b == 0, -1, b) if isinstance(b, torch.Tensor) else b, rounding_mode="trunc"
        )
    if b == 0:  # the GPU does not trap
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return torch.fmod(a, b if b.is_floating_point() else torch.where(b == 0, -1, b))
    return math.fmod(a, b) if isinstance(a, float) else a - b * _divide(a, b)


def _quotient(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.as_tensor(a) / b
    return a / b if b else math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_OPERATIONS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "and_", "or_", "xor", "lshift", "rshift", *_COMPARISONS)
} | {"truediv": _quotient, "floordiv": _divide, "mod": _remainder}


def _operate(name: str, a: Any, b: Any) -> Value:
    # Most numbers of a kernel are counters of type int32.
    x = a.data if type(a) is Value and a.dtype is gl.int32 else a
    y = b.data if type(b) is Value and b.dtype is gl.int32 else b
    if type(x) is int and type(y) is int and -(2**31) <= x < 2**31 and -(2**31) <= y < 2**31:
        result = _OPERATIONS[name](x, y) if name not in ("truediv", "lshift", "rshift") else None
        if name in _COMPARISONS:
            return Value(result, gl.int1)
        if result is not None and -(2**31) <= result < 2**31:
            return Value(result, gl.int32)
    a, b = settle(a), settle(b)
    a_type = a.dtype if isinstance(a, Value) else _type_of_literal(a)
    b_type = b.dtype if isinstance(b, Value) else _type_of_literal(b)
    if a_type.is_ptr() or b_type.is_ptr():
        return _move_pointer(name, a, b)
    if a_type is b_type and name not in ("truediv", "floordiv", "mod"):
        dtype = a_type
    else:
        divides = name in ("truediv", "floordiv", "mod")
        dtype = _common(a_type, not isinstance(a, Value), b_type, not isinstance(b, Value), divides)
    if dtype.is_fp8() or dtype.name == "uint64":
        refuse(f"arithmetic on {dtype}: convert the operands first")
    if name == "truediv" and dtype.is_int():
        dtype = gl.float32
    elif dtype.is_floating() and name in ("floordiv", "and_", "or_", "xor", "lshift", "rshift"):
        raise GluonError(f"the operator {name.strip('_')} takes integers, not {dtype}")
    elif dtype.is_int1() and name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift"):
        dtype = gl.int1 if name == "mul" else gl.int32 if a_type.is_int1() and b_type.is_int1() else dtype
    a_block = isinstance(a, Value) and isinstance(a.data, torch.Tensor)
    b_block = isinstance(b, Value) and isinstance(b.data, torch.Tensor)
    x, y = _as(a, dtype, b_block), _as(b, dtype, a_block)
    layout = None
    if a_block and b_block:
        layout = common_layout(a, b)
        if x.ndim != y.ndim:
            raise GluonError(f"blocks of shapes {list(x.shape)} and {list(y.shape)} do not broadcast")
    elif a_block or b_block:
        layout = (a if a_block else b).layout
        if (a if b_block else b) is None:
            raise GluonError("None stands where a number is needed")
    result = _OPERATIONS[name](x, y)
    if name in _COMPARISONS:
        return Value(result, gl.int1, layout)
    if a_block or b_block:
        if dtype.name in _WIDER:
            result &= (1 << dtype.primitive_bitwidth) - 1
        return Value(result, dtype, layout)
    return Value(_wrap(result, dtype), dtype)


def _move_pointer(name: str, a: Any, b: Any) -> Value:
    pointer, offset = (a, b) if isinstance(a, Value) and a.dtype.is_ptr() else (b, a)
    if (
        isinstance(offset, Value)
        and offset.dtype.is_ptr()
        or name not in ("add", "sub")
        or (name, a) == ("sub", offset)
    ):
        refuse(f"the operator {name} on pointers")
    offset = as_value(offset)
    if not offset.dtype.is_int():
        raise GluonError(f"an offset of type {offset.dtype} is added to a pointer")
    if pointer.is_block and offset.is_block and pointer.data.ndim != offset.data.ndim:
        raise GluonError(
            f"pointers of shape {pointer.shape} and offsets of shape {offset.shape} do not broadcast"
        )
    step = offset.data.to(torch.int64) if offset.is_block else int(offset.data)
    return Value(
        pointer.data + step if name == "add" else pointer.data - step,
        pointer.dtype, common_layout(pointer, offset), pointer.memory,
    )  # fmt: skip


def _install(name: str) -> None:
    setattr(Value, f"__{name.strip('_')}__", lambda self, other: _operate(name, self, other))
    if name not in _COMPARISONS:
        setattr(Value, f"__r{name.strip('_')}__", lambda self, other: _operate(name, other, self))


for _name in _OPERATIONS:
    _install(_name)


def operation(name: str) -> Callable[[Any, Any], Value]:
    """Return gl.add, gl.sub or gl.mul."""
    return lambda x, y, sanitize_overflow=True: _operate(name, x, y)


# ---- global memory


def _require_none(what: str, **options: Any) -> None:
    for name, value in options.items():
        if unwrap(value) not in ((), None, "", False, []):
            refuse(f"{name}={unwrap(value)!r} of {what}")


def _address(what: str, pointer: Any, mask: Any, *others: Any) -> tuple:
    """Return the memory, the offsets, the mask, other operands, all of one shape, and the layout."""
    pointer = settle(pointer)
    if not (isinstance(pointer, Value) and pointer.memory):
        raise GluonError(f"{what} takes pointers")
    program().count_load()
    values = [pointer, *(as_value(each) for each in (mask, *others) if each is not None)]
    layout, flat = common_layout(*values), pointer.memory.flat
    blocks = [each.data for each in values if each.is_block]
    mask = None if mask is None else as_value(mask).data
    if not pointer.is_block:
        if blocks:
            raise GluonError(f"{what} of one pointer takes no block as mask or value")
        return (
            flat,
            pointer.data,
            True if mask is None else bool(mask),
            [as_value(each) for each in others],
            layout,
        )
    shape = torch.broadcast_shapes(*(each.shape for each in blocks))
    offsets = pointer.data.expand(shape)
    mask = None if mask is None else torch.as_tensor(mask, dtype=torch.bool).expand(shape)
    return flat, offsets, mask, [as_value(each) for each in others], layout


def _require_inside(what: str, flat: torch.Tensor, offsets: Any, mask: Any) -> None:
    outside = (offsets < 0) | (offsets >= flat.numel())
    if mask is not None:
        outside = outside & mask
    if outside.any() if isinstance(outside, torch.Tensor) else outside:
        first = offsets[outside][0].item() if isinstance(outside, torch.Tensor) else offsets
        raise GluonError(f"{what} at element {first} of a tensor whose memory holds {flat.numel()} elements")


def load(pointer, mask=None, other=None, boundary_check=(), padding_option="", cache_modifier="", eviction_policy="",
         volatile=False):  # fmt: skip
    _require_none("gl.load", boundary_check=boundary_check, padding_option=padding_option)
    flat, offsets, mask, _, layout = _address("gl.load", pointer, mask)
    if unwrap(volatile):
        program().maybe_pause()
    dtype = settle(pointer).dtype.element_ty
    if not isinstance(offsets, torch.Tensor):
        if not mask:
            return cast(other if other is not None else 0, dtype)
        _require_inside("gl.load", flat, offsets, None)
        return Value(in_registers(flat[offsets], dtype).item(), dtype)
    _require_inside("gl.load", flat, offsets, mask)
    if mask is None:
        return Value(in_registers(flat[offsets], dtype), dtype, layout)
    data = torch.empty(offsets.shape, dtype=flat.dtype)
    if other is not None:
        data = to_memory(torch.as_tensor(cast(other, dtype).data), dtype).expand(offsets.shape).clone()
    else:  # nobody knows what such a register holds
        data.view(torch.uint8).fill_(0xFF if flat.dtype != torch.bool else 1)
    data[mask] = flat[offsets[mask]]
    return Value(in_registers(data, dtype), dtype, layout)


def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    _require_none("gl.store", boundary_check=boundary_check)
    dtype = settle(pointer).dtype.element_ty
    flat, offsets, mask, (value,), _ = _address("gl.store", pointer, mask, cast(value, dtype))
    program().progress()
    if not isinstance(offsets, torch.Tensor):
        if mask:
            _require_inside("gl.store", flat, offsets, None)
            flat[offsets] = value.data
        return
    _require_inside("gl.store", flat, offsets, mask)
    data = to_memory(torch.as_tensor(value.data), dtype).expand(offsets.shape)
    if mask is None:
        flat[offsets] = data
    else:
        flat[offsets[mask]] = data[mask]


def _atomic(name: str, change: Callable[[Value, Value], Value]) -> Callable:
    def call(pointer, val, mask=None, sem=None, scope=None):
        return _change_atomically(name, change, pointer, mask, val)

    return call


def atomic_cas(pointer, cmp, val, sem=None, scope=None):
    return _change_atomically(
        "gl.atomic_cas", lambda old, cmp, val: where(old == cmp, val, old), pointer, None, cmp, val
    )


def _change_atomically(name: str, change: Callable, pointer: Any, mask: Any, *operands: Any) -> Value:
    program().maybe_pause()
    dtype = settle(pointer).dtype.element_ty
    flat, offsets, mask, operands, layout = _address(
        name, pointer, mask, *(cast(each, dtype) for each in operands)
    )
    _require_inside(name, flat, offsets, mask if isinstance(offsets, torch.Tensor) else None)
    if not isinstance(offsets, torch.Tensor):
        old = Value(in_registers(flat[offsets], dtype).item(), dtype)
        if mask:
            new = change(old, *operands).data
            flat[offsets] = new
            if new != old.data:  # a loop that only asks makes no progress
                program().progress()
        return old
    chosen = torch.ones(offsets.shape, dtype=torch.bool) if mask is None else mask
    places = offsets[chosen]
    operands = [torch.as_tensor(each.data).expand(offsets.shape)[chosen] for each in operands]
    old = torch.zeros(places.shape, dtype=in_registers(flat[:0], dtype).dtype)
    left = torch.arange(places.numel())
    while left.numel():  # one access of each address per round
        _, which = torch.unique(places[left], return_inverse=True)
        first = torch.full((int(which.max()) + 1,), left.numel()).scatter_reduce(
            0, which, torch.arange(left.numel()), "amin"
        )
        now = left[first]
        old[now] = in_registers(flat[places[now]], dtype)
        new = change(Value(old[now], dtype), *(Value(each[now], dtype) for each in operands))
        flat[places[now]] = to_memory(new.data, dtype)
        if not torch.equal(new.data, old[now]):
            program().progress()
        keep = torch.ones(left.numel(), dtype=torch.bool)
        keep[first] = False
        left = left[keep]
    result = torch.zeros(offsets.shape, dtype=old.dtype)
    result[chosen] = old
    return Value(result, dtype, layout)


# ---- functions of the language


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    value, dtype = as_value(input), unwrap(dtype)
    if unwrap(fp_downcast_rounding) not in (None, "rtne"):
        refuse(f"fp_downcast_rounding={unwrap(fp_downcast_rounding)!r}")
    if value.dtype == dtype:
        return value
    if value.dtype.is_ptr() or dtype.is_ptr():
        refuse(f"a conversion from {value.dtype} to {dtype}")
    if unwrap(bitcast):
        if value.dtype.primitive_bitwidth != dtype.primitive_bitwidth:
            raise GluonError(f"a bitcast from {value.dtype} to {dtype}, which has another size")
        data = torch.as_tensor(value.data)
        data = to_memory(data, value.dtype).view(in_memory(dtype))
        data = in_registers(data, dtype)
        return Value(data if value.is_block else data.item(), dtype, value.layout)
    if value.is_block:
        return Value(_convert(value.data, value.dtype, dtype), dtype, value.layout)
    if dtype.is_fp8():
        return Value(_convert(torch.tensor(value.data), value.dtype, dtype).item(), dtype)
    return Value(_wrap(value.data, dtype), dtype)


Value.to = cast


def arange(start, end, layout=None):
    begin, end = unwrap(start), unwrap(end)
    if (
        not (isinstance(begin, int) and isinstance(end, int))
        or (end - begin) & (end - begin - 1)
        or end <= begin
    ):
        raise GluonError(f"gl.arange from {begin} to {end}: the range is a constexpr and a power of two")
    return Value(torch.arange(begin, end, dtype=torch.int32), gl.int32, unwrap(layout))


def sizes(shape: Any) -> list[int]:
    """Return a shape that a kernel gives, as integers."""
    shape = unwrap(shape)
    return [int(unwrap(each)) for each in (shape if isinstance(shape, Sequence) else [shape])]


def full(shape, value, dtype, layout=None):
    shape, dtype, value = sizes(shape), unwrap(dtype), cast(value, unwrap(dtype))
    if value.is_block:
        refuse("gl.full with a block as value")
    made = torch.full(shape, value.data, dtype=_in_registers(dtype))
    return Value(made, dtype, unwrap(layout)) if shape else value


def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype, layout)


def _meet(x: Any, y: Any) -> tuple[Any, Any, Any, Any]:
    """Return the data of two operands in their common type, that type, and the layout."""
    x, y = settle(x), settle(y)
    types = [each.dtype if isinstance(each, Value) else _type_of_literal(each) for each in (x, y)]
    dtype = _common(types[0], not isinstance(x, Value), types[1], not isinstance(y, Value), False)
    blocks = [isinstance(each, Value) and each.is_block for each in (x, y)]
    data = (_as(each, dtype, any(blocks)) for each in (x, y))
    return (
        *(torch.as_tensor(each) if any(blocks) else each for each in data),
        dtype,
        common_layout(as_value(x), as_value(y)),
    )


def where(condition, x, y):
    condition, (a, b, dtype, layout) = as_value(condition), _meet(x, y)
    if not condition.is_block:
        if not isinstance(a, torch.Tensor):
            return Value(a if condition.data else b, dtype)
        a, b = torch.broadcast_tensors(a, b)
        return Value((a if condition.data else b).clone(), dtype, layout)
    layout = common_layout(condition, Value(torch.empty(1), dtype, layout))
    chosen = condition.data if condition.dtype.is_int1() else condition.data != 0
    made = torch.where(chosen, torch.as_tensor(a), torch.as_tensor(b))
    return Value(made if made.dtype == (_in_registers(dtype)) else made.to(in_memory(dtype)), dtype, layout)


def _extreme(name: str, of_tensors: Callable, of_numbers: Callable) -> Callable:
    def call(x, y, propagate_nan=None):
        if "ALL" in str(unwrap(propagate_nan)):
            refuse(f"propagate_nan=ALL of gl.{name}")
        a, b, dtype, layout = _meet(x, y)
        if isinstance(a, torch.Tensor):
            return Value(
                of_tensors(
                    a.to(torch.promote_types(a.dtype, b.dtype)), b.to(torch.promote_types(a.dtype, b.dtype))
                ),
                dtype,
                layout,
            )
        return Value(b if a != a else a if b != b else of_numbers(a, b), dtype)

    return call


maximum, minimum = _extreme("maximum", torch.fmax, max), _extreme("minimum", torch.fmin, min)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def call(x):
        x = as_value(x)
        if x.is_block:
            return Value(function(x.data), x.dtype, x.layout)
        kind = _in_registers(x.dtype)
        return Value(function(torch.tensor(x.data, dtype=kind)).item(), x.dtype)

    return call


absolute = _unary(torch.abs)
UNARY = {
    name: _unary(getattr(torch, name))
    for name in ("exp", "exp2", "log", "log2", "cos", "sin", "sqrt", "rsqrt", "abs", "erf", "floor", "ceil")
} | {"sqrt_rn": _unary(torch.sqrt)}


def fma(x, y, z):
    x, y, z = (as_value(each) for each in (x, y, z))
    if x.dtype.is_fp32() and y.dtype.is_fp32() and z.dtype.is_fp32():
        return cast(cast(x, gl.float64) * cast(y, gl.float64) + cast(z, gl.float64), gl.float32)
    return x * y + z


def fdiv(x, y, ieee_rounding=False):
    return as_value(x) / y


def div_rn(x, y):
    return as_value(x) / y


def umulhi(x, y):
    return cast(
        (cast(x, gl.int64) & 0xFFFFFFFF) * (cast(y, gl.int64) & 0xFFFFFFFF) >> 32 & 0xFFFFFFFF,
        as_value(x).dtype,
    )


def cdiv(x, div):
    return (x + div - 1) // div if isinstance(x, Value) or isinstance(div, Value) else -(-x // div)


def expand_dims(input, axis):
    value, axis = as_value(input), unwrap(axis)
    for each in sorted(
        each % (len(value.shape) + 1) for each in (axis if isinstance(axis, Sequence) else [axis])
    ):
        layout = value.layout
        if isinstance(layout, gl.SliceLayout):
            if layout.dim != each:
                raise GluonError(f"expand_dims at axis {each} of a block with SliceLayout({layout.dim}, …)")
            layout = layout.parent
        elif layout is not None and not isinstance(layout, gl.AutoLayout):
            raise GluonError(f"expand_dims takes a block with a SliceLayout, not {layout}")
        value = Value(value.data.unsqueeze(each), value.dtype, layout, value.memory)
    return value


def broadcast(input, other):
    a, b = as_value(input), as_value(other)
    layout = common_layout(a, b)
    if not (a.is_block and b.is_block):
        shape = (a if a.is_block else b).shape
        data = [
            each.data if each.is_block else torch.full(shape, each.data, dtype=in_memory(each.dtype))
            for each in (a, b)
        ]
    else:
        data = torch.broadcast_tensors(a.data, b.data)
    return tuple(Value(each, value.dtype, layout, value.memory) for each, value in zip(data, (a, b)))


def _listed(shape: tuple) -> list[int]:
    first = unwrap(shape[0])
    return sizes(first if len(shape) == 1 and isinstance(first, Sequence) else shape)


def broadcast_to(input, *shape):
    return Value(input.data.expand(_listed(shape)), input.dtype, input.layout, input.memory)


def reshape(input, *shape, can_reorder=False):
    _require_none("gl.reshape", can_reorder=can_reorder)
    value = as_value(input)
    return Value(value.data.reshape(_listed(shape)), value.dtype, None, value.memory)


def permute(input, *dims):
    value = as_value(input)
    return Value(value.data.permute(_listed(dims)), value.dtype, None, value.memory)


def trans(input, *dims):
    return permute(input, *(dims or ((1, 0),)))


def join(a, b):
    a, b = broadcast(a, b)
    if a.dtype != b.dtype:
        raise GluonError(f"gl.join takes two blocks of one type, not {a.dtype} and {b.dtype}")
    return Value(torch.stack((a.data, b.data), -1), a.dtype)


def split(a):
    value = as_value(a)
    if not value.shape or value.shape[-1] != 2:
        raise GluonError(f"gl.split takes a block whose last dimension is 2, not one of shape {value.shape}")
    return tuple(Value(each, value.dtype) for each in value.data.unbind(-1))


def gather(src, index, axis):
    return Value(src.data.gather(unwrap(axis), index.data.to(torch.int64)), src.dtype, index.layout)


def histogram(input, num_bins, mask=None, layout=None):
    data = input.data if mask is None else input.data[mask.data]
    bins = unwrap(num_bins)
    if data.numel() and not 0 <= int(data.min()) <= int(data.max()) < bins:
        raise GluonError(f"gl.histogram of {bins} bins meets {int(data.min())} to {int(data.max())}")
    return Value(torch.bincount(data.flatten().long(), minlength=bins).int(), gl.int32, unwrap(layout))


def convert_layout(value, layout, assert_trivial=False):
    value, layout = as_value(value), unwrap(layout)
    if unwrap(assert_trivial) and value.layout != layout:
        refuse("assert_trivial=True of gl.convert_layout between two layouts that are not equal")
    return Value(value.data, value.dtype, layout, value.memory)


def set_auto_layout(value, layout):
    return convert_layout(value, layout)


# ---- reductions


def _without(layout: Any, axis: int) -> Any:
    return None if layout is None else gl.SliceLayout(axis, layout)


def _finish(data: torch.Tensor, value: Value, axis: int | None, keep_dims: bool, dtype: Any) -> Value:
    """Return the result of a reduction, from which `axis` is gone."""
    if axis is None and not keep_dims:
        return Value(data.item(), dtype)
    if keep_dims:
        shape = [1 if axis is None or each == axis else size for each, size in enumerate(value.shape)]
        return Value(data.reshape(shape), dtype, value.layout)
    return Value(data, dtype, _without(value.layout, axis)) if data.ndim else Value(data.item(), dtype)


def sum_of(input, axis=None, keep_dims=False, dtype=None):
    value, axis, dtype = as_value(input), unwrap(axis), unwrap(dtype)
    if dtype is None and value.dtype.is_int() and value.dtype.primitive_bitwidth < 32:
        dtype = gl.int32 if value.dtype.is_int_signed() else gl.uint32
    value = cast(value, dtype) if dtype is not None else value
    axis = axis % len(value.shape) if axis is not None else None
    kind = value.data.dtype
    data = value.data.sum(dtype=kind) if axis is None else value.data.sum(axis, dtype=kind)
    return _finish(data, value, axis, unwrap(keep_dims), value.dtype)


def _reduce_to(name: str, worst: float) -> Callable:
    def call(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False):
        value, axis = as_value(input), unwrap(axis)
        axis = axis % len(value.shape) if axis is not None else None
        if axis is None and unwrap(return_indices):
            refuse(f"return_indices=True of gl.{name} without an axis")
        data = value.data
        if data.is_floating_point():  # NaN loses
            data = torch.where(data.isnan(), worst, data)
        found = getattr(data, f"a{name}")() if axis is None else getattr(data, f"a{name}")(axis)
        result = _finish(found, value, axis, unwrap(keep_dims), value.dtype)
        if not unwrap(return_indices):
            return result
        if not unwrap(return_indices_tie_break_left):
            refuse(f"return_indices_tie_break_left=False of gl.{name}")
        places = (data == found.unsqueeze(axis)).int().argmax(axis).int()
        return result, _finish(places, value, axis, unwrap(keep_dims), gl.int32)

    return call


max_of, min_of = _reduce_to("max", -math.inf), _reduce_to("min", math.inf)


def _pieces(values: tuple, pick: Callable[[torch.Tensor], torch.Tensor]) -> list[Value]:
    return [Value(pick(each.data), each.dtype) for each in values]


def _combine(combine_fn: Callable, a: list[Value], b: list[Value]) -> list[Value]:
    made = combine_fn(*a, *b)
    return list(made) if isinstance(made, tuple) else [made]


def reduce(input, axis, combine_fn, keep_dims=False):
    values, axis = input if isinstance(input, tuple) else (input,), unwrap(axis)
    if axis is None:
        values, axis = tuple(reshape(each, each.numel) for each in values), 0
    axis = axis % len(values[0].shape)
    parts = list(values)
    while (size := parts[0].shape[axis]) > 1:
        halves = [
            _pieces(parts, lambda data, at=at: data.narrow(axis, at, size // 2)) for at in (0, size // 2)
        ]
        parts = _combine(combine_fn, *halves)
    made = tuple(
        _finish(part.data.squeeze(axis), value, axis, unwrap(keep_dims), part.dtype)
        for part, value in zip(parts, values)
    )
    return made if isinstance(input, tuple) else made[0]


def associative_scan(input, axis, combine_fn, reverse=False):
    values = input if isinstance(input, tuple) else (input,)
    axis, size = unwrap(axis) % len(values[0].shape), values[0].shape[unwrap(axis)]
    steps, done = (range(size - 1, -1, -1) if unwrap(reverse) else range(size)), {}
    last = None
    for step in steps:
        now = _pieces(values, lambda data, step=step: data.select(axis, step))
        last = done[step] = now if last is None else _combine(combine_fn, last, now)
    made = tuple(
        Value(
            torch.stack([done[step][part].data for step in range(size)], axis),
            done[0][part].dtype,
            value.layout,
        )
        for part, value in enumerate(values)
    )
    return made if isinstance(input, tuple) else made[0]


ATOMICS = {
    "add": lambda old, val: old + val,
    "max": maximum,
    "min": minimum,
    "and": lambda old, val: old & val,
    "or": lambda old, val: old | val,
    "xor": lambda old, val: old ^ val,
    "xchg": lambda old, val: val,
}
ATOMICS = {f"atomic_{name}": _atomic(f"gl.atomic_{name}", change) for name, change in ATOMICS.items()} | {
    "atomic_cas": atomic_cas
}

for _name, _function in {
    "reshape": reshape, "view": reshape, "permute": permute, "trans": trans, "split": split, "cast": cast,
    "expand_dims": expand_dims, "broadcast_to": broadcast_to, "sum": sum_of, "max": max_of, "min": min_of,
    "reduce": reduce, "associative_scan": associative_scan, "gather": gather, "cdiv": cdiv, "store": store,
    "histogram": histogram,
}.items():  # fmt: skip
    setattr(Value, _name, _function)
for _name, _function in (UNARY | ATOMICS).items():
    setattr(Value, _name, lambda self, *rest, _function=_function, **named: _function(self, *rest, **named))
