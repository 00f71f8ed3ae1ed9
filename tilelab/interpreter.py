"""Mend Triton's interpreter (3.6 and 3.7): exact conversions of bfloat16, and calls in half the time.

The interpreter cuts off the lower half of a float32 to make a bfloat16, which rounds towards zero, and it converts
subnormal numbers wrongly. A GPU rounds to nearest even. The interpreter also patches the whole of triton.language again
at each call of one kernel function by another, although the launch has done so.
"""

import numpy
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl
_patch = interpreter._patch_lang
_patched = set()  # what the current launch has patched: triton.language, triton.language.core or both


def _cast_exactly(self, source, kind):
    if (source.dtype.scalar, kind.scalar) == (tl.bfloat16, tl.float32):
        return TensorHandle((source.data.astype(numpy.uint32) << 16).view(numpy.float32), kind.scalar)
    if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
        return _cast(self, source, kind)
    bits = source.data.view(numpy.uint32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1)  # a tie goes to the even number
    return TensorHandle((numpy.where(numpy.isnan(source.data), 0x7FC00000, nearest) >> 16).astype(numpy.uint16),
                        kind.scalar)


def _patch_once(function):
    modules = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
    if modules in _patched:
        return interpreter._LangPatchScope()
    scope = _patch(function)
    scope.set_attr(tl.tensor, "__index__", lambda number: int(number.handle.data.squeeze()))  # Triton 3.6, numpy 2.5
    _patched.add(modules)
    restore = scope.restore

    def end_launch():
        _patched.clear()
        restore()

    scope.restore = end_launch
    return scope


def mend() -> None:
    """Change the interpreter in this process. Compiled kernels stay as they are."""
    InterpreterBuilder.cast_impl = _cast_exactly
    interpreter._patch_lang = _patch_once
