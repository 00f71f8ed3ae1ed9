"""Mend Triton's interpreter (3.6 and 3.7): exact conversions and products of bfloat16, and calls in half the time.

The interpreter cuts off the lower half of a float32 to make a bfloat16, which rounds towards zero, and it converts
subnormal numbers wrongly. A GPU rounds to nearest even. `tl.dot` takes the bits of a bfloat16 for an integer, and
misreads the subnormal numbers of float8e5. From float32 to float8 the interpreter rounds in another way than a GPU's
instruction, which rounds to nearest even and saturates. The interpreter also patches the whole of triton.language again
at each call of one kernel function by another, although the launch has done so. It does not know the instructions of a
dependent launch (`gdc_wait` and `gdc_launch_dependents`), which have nothing to do where one launch follows another.
It keeps the position in the grid in a global variable, so launches of several threads take turns.
"""

import threading

import numpy
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl
_convert = InterpreterBuilder.create_fp_to_fp
_dot = InterpreterBuilder.create_dot
_patch = interpreter._patch_lang
_run = interpreter.InterpretedFunction.run
_turn = threading.RLock()  # a launch may launch another kernel, as autotuning does
_patched = set()  # what the current launch has patched: triton.language, triton.language.core or both

WIDENED = {tl.bfloat16: torch.bfloat16, tl.float8e5: torch.float8_e5m2, tl.float8e4nv: torch.float8_e4m3fn}


def _cast_exactly(self, source, kind):
    if (source.dtype.scalar, kind.scalar) == (tl.bfloat16, tl.float32):
        return TensorHandle((source.data.astype(numpy.uint32) << 16).view(numpy.float32), kind.scalar)
    if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
        return _cast(self, source, kind)
    bits = source.data.view(numpy.uint32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1)  # a tie goes to the even number
    return TensorHandle(
        (numpy.where(numpy.isnan(source.data), 0x7FC00000, nearest) >> 16).astype(numpy.uint16), kind.scalar
    )


def _convert_exactly(self, source, kind, rounding_mode):
    narrow = {tl.float8e5: torch.float8_e5m2, tl.float8e4nv: torch.float8_e4m3fn}.get(kind.scalar)
    if narrow is None or source.dtype.scalar != tl.float32:
        return _convert(self, source, kind, rounding_mode)
    largest = torch.finfo(narrow).max
    given = torch.from_numpy(numpy.array(source.data)).clamp(-largest, largest)
    return TensorHandle(given.to(narrow).view(torch.uint8).numpy(), kind.scalar)


def _widen(operand):
    """Return an operand of `tl.dot` in float32, which holds each value of the formats in WIDENED exactly."""
    if operand.dtype.scalar not in WIDENED:
        return operand
    bits = torch.from_numpy(numpy.ascontiguousarray(operand.data))
    return TensorHandle(bits.view(WIDENED[operand.dtype.scalar]).float().numpy(), tl.float32)


def _dot_exactly(self, a, b, *accumulator_and_options):
    return _dot(self, _widen(a), _widen(b), *accumulator_and_options)


def _patch_once(function):
    modules = frozenset(
        id(value) for value in function.__globals__.values() if value is tl or value is tl.core
    )
    if modules in _patched:
        return interpreter._LangPatchScope()
    scope = _patch(function)
    scope.set_attr(
        tl.tensor, "__index__", lambda number: int(number.handle.data.squeeze())
    )  # Triton 3.6, numpy 2.5
    _patched.add(modules)
    restore = scope.restore

    def end_launch():
        _patched.clear()
        restore()

    scope.restore = end_launch
    return scope


def _run_alone(self, *arguments, **options):
    with _turn:
        return _run(self, *arguments, **options)


def mend() -> None:
    """Change the interpreter in this process. Compiled kernels stay as they are."""
    InterpreterBuilder.cast_impl = _cast_exactly
    InterpreterBuilder.create_dot = _dot_exactly
    InterpreterBuilder.create_fp_to_fp = _convert_exactly
    interpreter._patch_lang = _patch_once
    interpreter.InterpretedFunction.run = _run_alone
    tl.extra.cuda.gdc_wait = tl.extra.cuda.gdc_launch_dependents = lambda: None
