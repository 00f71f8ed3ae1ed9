"""What does each operation of Triton's language compute in the interpreter?

`Builder` replaces what Triton's InterpreterBuilder computes in another way than a GPU, and adds what it lacks.
"""

import functools

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tilelab.runtime.interpreter import formats, libdevice
from tilelab.runtime.interpreter.formats import FLOAT8, HELD_IN_FLOAT32


def _array(mask):
    return mask if isinstance(mask, np.ndarray) else mask.data


class Unsupported(NotImplementedError):
    """What the interpreter cannot run."""


def _rounded(data, dtype):
    """Return the handle of a result that numpy computed in float32 or in the type itself."""
    if dtype is tl.bfloat16:
        return TensorHandle(formats.round_to_bfloat16(data), dtype)
    return TensorHandle(data, dtype)


def _require_arithmetic(*operands):
    for each in operands:
        if each.dtype.scalar in FLOAT8:
            raise Unsupported(
                f"a GPU has no arithmetic for {each.dtype.scalar}: convert the values to float16 or float32 first."
            )


def _floats(operation, compares=False):
    def create(self, left, right):
        dtype = left.dtype.scalar
        if dtype in HELD_IN_FLOAT32:
            _require_arithmetic(left, right)
        found = operation(left.data, right.data)
        return TensorHandle(found, tl.int1) if compares else _rounded(found, dtype)

    return create


def _extreme(operation, meets):
    """Return a minimum or maximum for which -0 is below +0."""

    def extreme(left, right):
        found = operation(left, right)
        zeros = (left == 0) & (right == 0)
        if not zeros.any():
            return found
        bits = f"u{found.itemsize}"
        left, right = np.broadcast_arrays(left, right)
        met = meets(np.ascontiguousarray(left).view(bits), np.ascontiguousarray(right).view(bits)).view(
            found.dtype
        )
        return np.where(zeros, met, found)

    return extreme


MINIMUM, MAXIMUM = _extreme(np.fmin, np.bitwise_or), _extreme(np.fmax, np.bitwise_and)


def bits_of(handle):
    """Return the bits of a handle's values as unsigned integers."""
    dtype = handle.dtype.scalar
    if isinstance(dtype, tl.pointer_type):
        return handle.data
    return (
        formats.encode(handle.data, dtype)
        if dtype in HELD_IN_FLOAT32
        else handle.data.view(formats.bits_type(dtype))
    )


def of_bits(bits, dtype):
    """Return the handle of values whose bits are given."""
    dtype = dtype.scalar
    if not isinstance(dtype, tl.pointer_type) and dtype in HELD_IN_FLOAT32:
        return TensorHandle(formats.decode(bits, dtype), dtype)
    return TensorHandle(bits.view(formats.numpy_type(dtype)), dtype)


def _locate(descriptor, offsets):
    """Return the pointers of a tile and what of it lies inside the tensor; TMA takes each offset, aligned or not."""
    strides = [
        each.data * descriptor.base.dtype.element_ty.primitive_bitwidth // 8 for each in descriptor.strides
    ]
    places = [
        (offset.data + np.arange(size)).reshape([-1 if axis == at else 1 for axis in range(descriptor.ndim)])
        for at, (offset, size) in enumerate(zip(offsets, descriptor.block_shape))
    ]
    pointers = descriptor.base.data + sum(
        (place * stride).astype(np.uint64) for place, stride in zip(places, strides)
    )
    inside = [(place >= 0) & (place < size.data) for place, size in zip(places, descriptor.shape)]
    mask = np.logical_and.reduce(np.broadcast_arrays(*inside))
    return TensorHandle(pointers, descriptor.base.dtype.scalar), mask


class Builder(InterpreterBuilder):
    """Triton's builder, which computes at once. Its methods are named by the operations of Triton's compiler."""

    def __getattr__(self, name):
        if name.startswith("create_"):
            raise Unsupported(
                f"Triton's interpreter has no {name.removeprefix('create_')}: run this kernel on a GPU."
            )
        raise AttributeError(name)

    # ---- constants, conversions

    def get_bf16(self, value):
        return TensorHandle(formats.convert(np.array([value], np.float64), tl.bfloat16), tl.bfloat16)

    def get_all_ones_value(self, kind):
        return TensorHandle(np.full(1, -1).astype(formats.numpy_type(kind)), kind.scalar)

    def cast_impl(self, source, kind):
        before, after = source.dtype.scalar, kind.scalar
        if before.is_floating():
            change = formats.convert if after.is_floating() else formats.to_integer
            return TensorHandle(change(source.data, after), after)
        if after.is_floating():
            return TensorHandle(formats.from_integer(source.data, after), after)
        return TensorHandle(source.data.astype(formats.numpy_type(after)), after)

    def create_fp_to_fp(self, source, kind, rounding):
        towards_zero = rounding == ir.ROUNDING_MODE.RTZ
        return TensorHandle(formats.convert(source.data, kind.scalar, towards_zero), kind.scalar)

    def create_bitcast(self, source, kind):
        return of_bits(bits_of(source), kind)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # ---- memory

    def create_masked_load(self, pointers, mask, other, *hints, **named):
        dtype = pointers.get_element_ty()
        kind = formats.bits_type(dtype)
        if other is None:  # undefined on a GPU; a check of a lesson fills it with a byte that shows
            undefined = getattr(interpreter._interpreter, "undefined", 0)
            size = np.dtype(kind).itemsize
            rest = np.full((*pointers.data.shape, size), undefined, np.uint8).view(kind)[..., 0]
        else:
            rest = bits_of(TensorHandle(other.data, dtype))
        return of_bits(interpreter._interpreter.load(pointers.data, _array(mask), rest, kind), dtype)

    def create_masked_store(self, pointers, value, mask, *hints, **named):
        dtype, bits = pointers.get_element_ty(), bits_of(value)
        if bits.itemsize != formats.bits_type(dtype).itemsize:
            raise TypeError(
                f"values of {value.dtype.scalar} are stored through a pointer to {dtype}: convert them first."
            )
        return interpreter._interpreter.store(pointers.data, np.ascontiguousarray(bits), _array(mask))

    def _update(self, pointers, value, mask, operation):
        """Replace the values at the pointers one after the other by operation(old, value); return the old ones."""
        dtype = value.dtype.scalar
        places, given = pointers.data.ravel(), np.broadcast_to(value.data, pointers.data.shape).ravel()
        old, waiting = np.zeros_like(given), np.flatnonzero(np.broadcast_to(mask.data, pointers.data.shape))
        while waiting.size:
            _, first = np.unique(places[waiting], return_index=True)
            now = waiting[first]
            here, everywhere = (
                TensorHandle(places[now], pointers.dtype.scalar),
                TensorHandle(np.ones(now.shape, bool), tl.int1),
            )
            old[now] = self.create_masked_load(here, everywhere, None).data
            bits = bits_of(_rounded(operation(old[now], given[now]), dtype))
            memory = interpreter._interpreter  # a check of a lesson may watch it
            getattr(memory, "update", memory.store)(places[now], np.ascontiguousarray(bits), everywhere.data)
            waiting = np.delete(waiting, first)
        return TensorHandle(old.reshape(pointers.data.shape), dtype)

    def create_atomic_rmw(self, operation, pointer, value, mask, sem, scope):
        if value.dtype.scalar != tl.bfloat16:
            return super().create_atomic_rmw(operation, pointer, value, mask, sem, scope)
        is_exchange = operation == ir.ATOMIC_OP.XCHG
        return self._update(pointer, value, mask, (lambda old, new: new) if is_exchange else np.add)

    def create_atomic_cas(self, pointer, compared, value, sem, scope):
        dtype = pointer.get_element_ty()
        for each in (compared, value):
            if each.dtype.scalar != dtype:
                raise TypeError(
                    f"atomic_cas at a pointer to {dtype} got {each.dtype.scalar}: convert both values to {dtype}."
                )
        old = interpreter._interpreter.atomic_cas(
            pointer.data, bits_of(compared), bits_of(value), self.ir_sem_to_interpreter_sem[sem]
        )
        return of_bits(old, dtype)

    def create_make_tensor_descriptor(self, *given, **named):
        found = super().create_make_tensor_descriptor(*given, **named)
        found.materialize_pointers = functools.partial(_locate, found)
        return found

    def create_descriptor_reduce(self, kind, descriptor, value, indices):
        kinds = ir.DESCRIPTOR_REDUCE_KIND
        operation = {
            kinds.ADD: np.add, kinds.AND: np.bitwise_and, kinds.OR: np.bitwise_or, kinds.XOR: np.bitwise_xor,
            kinds.MIN: MINIMUM if value.dtype.scalar.is_floating() else np.minimum,
            kinds.MAX: MAXIMUM if value.dtype.scalar.is_floating() else np.maximum,
        }[kind]  # fmt: skip
        pointers, mask = descriptor.materialize_pointers(indices)
        self._update(pointers, value, TensorHandle(mask, tl.int1), operation)

    def create_addptr(self, pointer, offset):
        size = formats.bits_type(pointer.get_element_ty()).itemsize
        return TensorHandle(pointer.data + size * offset.data.astype(np.uint64), pointer.dtype)

    # ---- arithmetic

    create_fadd, create_fsub, create_fmul = _floats(np.add), _floats(np.subtract), _floats(np.multiply)
    create_fdiv = create_precise_divf = _floats(np.divide)
    create_frem = _floats(np.fmod)
    create_minnumf, create_maxnumf = _floats(MINIMUM), _floats(MAXIMUM)
    create_minimumf = _floats(_extreme(np.minimum, np.bitwise_or))
    create_maximumf = _floats(_extreme(np.maximum, np.bitwise_and))
    create_fcmpOLT, create_fcmpOGT = _floats(np.less, True), _floats(np.greater, True)
    create_fcmpOLE, create_fcmpOGE = _floats(np.less_equal, True), _floats(np.greater_equal, True)
    create_fcmpOEQ, create_fcmpUNE = _floats(np.equal, True), _floats(np.not_equal, True)

    def binary_op(self, left, right, operation):
        found = operation(left.data, right.data)
        dtype = tl.int1 if found.dtype == bool else left.dtype.scalar
        kind = formats.numpy_type(dtype)
        return TensorHandle(found if found.dtype == kind else found.astype(kind), dtype)

    def create_and(self, left, right):
        if left.dtype.scalar in FLOAT8:  # abs() of float8e4b15
            return of_bits(bits_of(left) & bits_of(right), left.dtype)
        return self.binary_op(left, right, np.bitwise_and)

    def create_ashr(self, left, right):
        dtype = left.data.dtype
        signed = left.data.view(f"i{dtype.itemsize}") >> right.data.view(f"i{dtype.itemsize}")
        return TensorHandle(signed.view(dtype), left.dtype.scalar)

    def create_umulhi(self, left, right):
        unsigned = (each.data.view(f"u{each.data.itemsize}") for each in (left, right))
        return TensorHandle(libdevice.high_product(*unsigned).view(left.data.dtype), left.dtype.scalar)

    def create_clampf(self, x, low, high, propagate):
        _require_arithmetic(x)
        found = MINIMUM(MAXIMUM(x.data, low.data), high.data)
        if propagate == tl.PropagateNan.ALL:
            found = np.where(np.isnan(x.data), x.data, found)
        return TensorHandle(found, x.dtype.scalar)

    def create_fma(self, x, y, z):
        _require_arithmetic(x, y, z)
        dtype = z.dtype.scalar
        if dtype.is_int():
            return TensorHandle(x.data * y.data + z.data, dtype)
        return TensorHandle(
            formats.convert(formats.fused(x.data, y.data, z.data, dtype.primitive_bitwidth < 32), dtype),
            dtype,
        )

    def create_fabs(self, x):
        return TensorHandle(np.abs(x.data), x.dtype.scalar)

    def create_erf(self, x):
        found = torch.erf(torch.tensor(x.data, dtype=torch.float64)).numpy()
        return TensorHandle(found.astype(x.data.dtype), x.dtype.scalar)

    def create_rsqrt(self, x):
        return TensorHandle((1 / np.sqrt(x.data.astype(np.float64))).astype(x.data.dtype), x.dtype.scalar)

    def create_histogram(self, values, bins, mask):
        kept = values.data if mask is None else values.data[mask.data]
        kept = kept[(kept >= 0) & (kept < bins)].astype(np.int64)
        return TensorHandle(np.bincount(kept, minlength=bins).astype(np.int32), tl.int32)

    # ---- products

    def create_dot(self, a, b, c, precision, imprecise):
        kind = np.float32 if a.data.dtype == np.float16 else a.data.dtype
        if kind == np.int8:
            kind = np.float64  # which holds each sum of products of int8
        product = np.matmul(a.data.astype(kind, copy=False), b.data.astype(kind, copy=False))
        return TensorHandle((product + c.data).astype(c.data.dtype), c.dtype.scalar)

    def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, fast, a_packs_k, b_packs_k, c):
        left = _scaled(a, a_scale, a_format, -1 if a_packs_k else -2)
        right = _scaled(b, b_scale, b_format, -2 if b_packs_k else -1, transposed=True)
        return TensorHandle((np.matmul(left, right) + c.data).astype(np.float32), tl.float32)

    # ---- refused, printed

    def create_extern_elementwise(self, library, path, symbol, operands, kind, is_pure):
        function = libdevice.lookup(symbol)
        if function is None:
            raise Unsupported(f"Triton's interpreter cannot call {symbol}: run this kernel on a GPU.")
        _require_arithmetic(*operands)
        found = function(*(each.data for each in operands))
        return TensorHandle(np.asarray(found).astype(formats.numpy_type(kind)), kind.scalar)

    def create_inline_asm(self, text, *rest):
        raise Unsupported(
            f"Triton's interpreter cannot run inline_asm_elementwise ({text.strip().split(chr(10))[0].strip()!r}): run "
            "this kernel on a GPU."
        )

    def create_print(self, prefix, in_hex, values, signed):
        where = f"({', '.join(map(str, self.grid_idx))}){prefix.rstrip()}"
        for value in values:
            show = {"formatter": {"all": "0x{:02x}".format}} if in_hex else {}
            print(where, np.array2string(bits_of(value) if in_hex else value.data, **show))
        if not values:
            print(where)

    def create_assert(self, condition, message):
        assert condition, f"device_assert failed: {message}"

    def create_assume(self, condition):
        assert condition, "tl.assume got a condition that is false."


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _scaled(operand, scale, kind, packed_axis, transposed=False):
    """Return an operand of tl.dot_scaled, unpacked and times its scales, in float32."""
    values = operand.data
    if kind == ir.ScaleDotElemTypeTY.E2M1:
        codes = values.view(np.uint8)
        pairs = np.stack([codes & 15, codes >> 4], packed_axis)  # the lower four bits come first
        axis = values.ndim + packed_axis
        shape = [2 * each if at == axis else each for at, each in enumerate(values.shape)]
        values = E2M1[pairs].reshape(shape)
    values = values.astype(np.float32)
    if scale is None:
        return values
    if scale.dtype.scalar in FLOAT8:
        factors = scale.data
    else:
        bits = scale.data.view(np.uint8)
        factors = np.where(
            bits == 255, np.float32("nan"), np.ldexp(np.float32(1), bits.astype(np.int32) - 127)
        )
    depth = values.shape[-2 if transposed else -1]
    factors = np.repeat(factors, depth // factors.shape[-1], -1)
    return values * (np.swapaxes(factors, -1, -2) if transposed else factors)


class Semantic(TritonSemantic):
    """Triton's rules of types, where the interpreter passes them plain numbers and has no driver to ask."""

    def dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, *rest):
        names = (name if hasattr(name, "value") else tl.constexpr(name) for name in (a_format, b_format))
        return super().dot_scaled(a, a_scale, next(names), b, b_scale, next(names), *rest)

    def cast(self, value, kind, fp_downcast_rounding=None):
        before, after = value.type.scalar, kind.scalar
        is_mixed = before.is_int() and after.is_fp8() or before.is_fp8() and after.is_int()
        if is_mixed and not (before.is_ptr() or after.is_ptr()):
            raise TypeError(f"Triton does not convert {before} to {after}: convert to float32 between them.")
        return super().cast(value, kind, fp_downcast_rounding)

    def _has_native_tma(self):
        return True


BUILDER = Builder()
SEMANTIC = Semantic(BUILDER)
