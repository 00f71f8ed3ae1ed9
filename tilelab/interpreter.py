"""Let Triton's interpreter convert between float32 and bfloat16 with the bits that a GPU computes.

Triton 3.6 and 3.7 cut off the lower half of a float32, which rounds towards zero, and convert subnormal numbers wrongly.
"""

import numpy
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast = InterpreterBuilder.cast_impl


def _cast_exactly(self, source, kind):
    if (source.dtype.scalar, kind.scalar) == (tl.bfloat16, tl.float32):
        return TensorHandle((source.data.astype(numpy.uint32) << 16).view(numpy.float32), kind.scalar)
    if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
        return _cast(self, source, kind)
    bits = source.data.view(numpy.uint32)
    nearest = bits + 0x7FFF + (bits >> 16 & 1)  # a tie goes to the even number
    return TensorHandle((numpy.where(numpy.isnan(source.data), 0x7FC00000, nearest) >> 16).astype(numpy.uint16),
                        kind.scalar)


def convert_bfloat16_exactly() -> None:
    """Replace the interpreter's conversions in this process. Compiled kernels stay as they are."""
    InterpreterBuilder.cast_impl = _cast_exactly
