"""Triton kernels of `ch14.mx_formats`: block-scaled fp8 and fp4 back to bf16.

A code's exponent and mantissa are put where float32 has them; a multiplication by a power of two then gives its value,
subnormals included.
"""

import triton
import triton.language as tl

from ch14.mx_formats.quantise_kernels import place, rest, start


@triton.jit
def narrow(value, CVT: tl.constexpr):
    # float32 -> the bits of bf16, to nearest even
    if CVT:
        return value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def scale_value(code, tensor_scale, SCALE: tl.constexpr):
    if SCALE == "fp32":
        value = code
    elif SCALE == "e8m0":  # 2^-127 is a subnormal of float32, 255 NaN
        wide = code.to(tl.int32)
        bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
        value = bits.to(tl.float32, bitcast=True)
    else:
        wide = code.to(tl.int32) & 0x7F  # unsigned: Blackwell's ue4m3
        value = (wide << 20).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where(wide == 0x7F, float("nan"), value) * tl.load(tensor_scale)
    return value


@triton.jit
def signed(magnitude, sign):
    # By its bit, the highest of `sign`: Triton's -x is 0 - x, which makes +0 of 0.
    bits = magnitude.to(tl.uint32, bitcast=True) | sign.to(tl.uint32, bitcast=True) & 0x80000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp8_value(codes, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    low = codes & 0x7F  # of a uint32
    value = (low << (23 - MANTISSA)).to(tl.float32, bitcast=True) * 2.0**(126 + EMIN)
    if MANTISSA == 3:
        value = tl.where(low == 0x7F, float("nan"), value)
    else:
        value = tl.where(low >= 0x7C, tl.where(low == 0x7C, float("inf"), float("nan")), value)
    return signed(value, codes << 24)


@triton.jit
def fp4_value(codes):
    # Of the lowest four bits of an int32.
    return signed(((codes & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126, codes << 28)


@triton.jit
def dequantise_fp8_kernel(values, scales, out, rows, columns, groups, BLOCK: tl.constexpr, GROUP: tl.constexpr,
                          MANTISSA: tl.constexpr, EMIN: tl.constexpr, SCALE: tl.constexpr, TILED: tl.constexpr,
                          FLAT: tl.constexpr, CVT: tl.constexpr):
    row, first = start(BLOCK, FLAT)
    if row >= rows:
        return
    group = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < rest(columns, first, GROUP, BLOCK)
    begin = row * columns + first * GROUP
    codes = tl.load(values + begin + column, mask=inside, other=0)
    scale = tl.load(scales + place(row, first + group, groups, TILED), mask=group < rest(groups, first, 1, BLOCK),
                    other=0)
    if CVT:
        value = codes.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5, bitcast=True).to(tl.float32)
    else:
        value = fp8_value(codes.to(tl.uint32), MANTISSA, EMIN)
    value *= scale_value(scale, scale, SCALE)[:, None]
    tl.store(out + begin + column, narrow(value, CVT), mask=inside)


@triton.jit
def dequantise_fp4_kernel(values, scales, tensor_scale, out, rows, columns, groups, BLOCK: tl.constexpr,
                          GROUP: tl.constexpr, SCALE: tl.constexpr, TILED: tl.constexpr, FLAT: tl.constexpr,
                          WHOLE: tl.constexpr, CVT: tl.constexpr):
    row, first = start(BLOCK, FLAT)
    if row >= rows:
        return
    LANES: tl.constexpr = GROUP // 8
    group = tl.arange(0, BLOCK)
    word = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside, left = group < rest(groups, first, 1, BLOCK), rest(columns, first, GROUP, BLOCK)
    if WHOLE:
        packed = tl.load(values + (row * groups + first) * LANES + word, mask=inside[:, None], other=0)
    else:
        values += row * ((columns + 1) // 2) + first * (GROUP // 2)
        packed = tl.zeros((BLOCK, LANES), tl.int32)
        for k in tl.static_range(4):
            byte = word * 4 + k
            packed |= tl.load(values + byte, mask=byte < (left + 1) // 2, other=0).to(tl.int32) << (8 * k)
    scale = tl.load(scales + place(row, first + group, groups, TILED), mask=inside, other=0)
    value = fp4_value(packed[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :])
    value *= scale_value(scale, tensor_scale, SCALE)[:, None, None]
    column = word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(out + (row * columns + first * GROUP) + column, narrow(value, CVT), mask=column < left)
