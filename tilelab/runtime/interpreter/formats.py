"""Which bits stand for which number in bfloat16 and in the formats of eight bits, and how does a GPU round to them?

numpy has none of these types. The interpreter holds their values in float32, which holds each of them exactly. So no
operation of numpy can take their bits for integers. `encode` and `decode` translate where bits are needed: in memory
and in bitcasts. A decoded NaN keeps its bits in the low bits of the float32, so that a copy is exact.
"""

import functools

import numpy as np
import torch
import triton.language as tl

# tl.float8e4b15 has a bias of 15 and no NaN; torch lacks it.
TORCH_TYPES = {
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
FLOAT8 = {*TORCH_TYPES, tl.float8e4b15}
HELD_IN_FLOAT32 = {*FLOAT8, tl.bfloat16}

NUMPY_TYPES = {
    tl.int1: np.dtype(bool),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
    **{
        getattr(tl, f"{sign}int{bits}"): np.dtype(f"{sign}int{bits}")
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **dict.fromkeys(HELD_IN_FLOAT32, np.dtype(np.float32)),
}


def numpy_type(dtype: tl.dtype) -> np.dtype:
    """Return the type of the array that holds values of a type of Triton."""
    dtype = dtype.scalar
    return np.dtype(np.uint64) if isinstance(dtype, tl.pointer_type) else NUMPY_TYPES[dtype]


def bits_type(dtype: tl.dtype) -> np.dtype:
    """Return the unsigned type of the bits in memory."""
    bits = 64 if isinstance(dtype, tl.pointer_type) else max(8, dtype.primitive_bitwidth)
    return np.dtype(f"uint{bits}")


@functools.cache
def _values(dtype: tl.dtype) -> np.ndarray:
    """Return the 256 values of a format of eight bits."""
    codes = np.arange(256, dtype=np.uint8)
    if dtype == tl.float8e4b15:
        wide = codes.astype(np.uint16)
        return ((wide & 0x7F) << 7 | (wide & 0x80) << 8).view(np.float16).astype(np.float32)
    values = torch.from_numpy(codes).view(TORCH_TYPES[dtype]).float().numpy().copy()
    bits, unknown = values.view(np.uint32), np.isnan(values)
    bits[unknown] = 0x7FC00000 | codes[unknown].astype(np.uint32)
    return values


def decode(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return the values whose bits are given, in float32."""
    if dtype == tl.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return _values(dtype)[bits]


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Return the bits of values in float32 that the format holds exactly."""
    if dtype == tl.bfloat16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == tl.float8e4b15:
        half = values.astype(np.float16).view(np.uint16)
        return (half >> 7 & 0x7F | half >> 8 & 0x80).astype(np.uint8)
    bits = torch.tensor(values).to(TORCH_TYPES[dtype]).view(torch.uint8).numpy()
    unknown = np.isnan(values)
    if unknown.any():
        payload = values.view(np.uint32)[unknown] & 0xFF
        bits[unknown] = np.where(payload, payload, 0x80 if dtype in (tl.float8e4b8, tl.float8e5b16) else 0x7F)
    return bits


def _cut(rounded: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return the neighbour towards zero of each number that was rounded away from zero."""
    bits = rounded.view(f"uint{8 * rounded.itemsize}")
    return (
        (bits - (np.abs(rounded).astype(exact.dtype) > np.abs(exact))).astype(bits.dtype).view(rounded.dtype)
    )


def to_float32_odd(values: np.ndarray) -> np.ndarray:
    """Round float64 to float32 such that a second rounding gives what one rounding would: an inexact result is odd."""
    near = values.astype(np.float32)
    bits = _cut(near, values).view(np.uint32) | (near != values)
    return np.where(np.isnan(values), np.float32("nan"), bits.view(np.float32))


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return values
    nearest = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return (
        np.where(np.isnan(values), 0x7FFF0000, nearest)
        .astype(np.uint32)
        .view(np.float32)
        .reshape(values.shape)
    )


def _to_float8e4b15(values: np.ndarray) -> np.ndarray:
    """Convert as Triton's PTX does: float16 towards zero, at most 1.75, half a step is added and the rest cut off."""
    half = convert(values, tl.float16, towards_zero=True).view(np.uint16)
    magnitude = np.where(half & 0x7FFF > 0x7C00, 0x3F00, np.minimum(half & 0x7FFF, 0x3F00))
    return decode(((2 * magnitude + 0x80 >> 8) | half >> 8 & 0x80).astype(np.uint8), tl.float8e4b15)


def convert(values: np.ndarray, dtype: tl.dtype, towards_zero: bool = False) -> np.ndarray:
    """Convert floating-point values to another floating-point type, with one rounding, as sm_90 does.

    To nearest even, formats of eight bits saturate. Towards zero, e5m2 keeps infinity, as Triton's own code does.
    """
    if dtype not in HELD_IN_FLOAT32:
        found = values.astype(NUMPY_TYPES[dtype])
        return _cut(found, values) if towards_zero and found.itemsize < values.itemsize else found
    if dtype == tl.float8e4b15:
        return _to_float8e4b15(values)
    values = to_float32_odd(values) if values.dtype == np.float64 else values.astype(np.float32)
    if dtype == tl.bfloat16:
        if not towards_zero:
            return round_to_bfloat16(values)
        cut = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        return np.where(np.isnan(values), np.float32("nan"), cut)
    kind = TORCH_TYPES[dtype]
    largest = torch.finfo(kind).max
    codes = torch.tensor(values).clamp(-largest, largest).to(kind).view(torch.uint8).numpy()
    if dtype in (tl.float8e4b8, tl.float8e5b16):  # no negative zero: its bits are NaN's
        codes[values == 0] = 0
    if towards_zero:
        codes = codes - (np.abs(_values(dtype)[codes]) > np.abs(values)).astype(np.uint8)
        if dtype == tl.float8e5:
            codes = np.where(np.isinf(values), 0x7C | codes & 0x80, codes)
    found = _values(dtype)[codes]
    found[np.isnan(values)] = np.nan
    return found


def to_integer(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Convert to an integer as PTX does: towards zero; saturated to at least 16 bits, of which the lowest stay."""
    signed, bits = dtype.is_int_signed(), max(16, dtype.primitive_bitwidth)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    wide = values.astype(np.float64)
    unknown = 2 ** (bits - 1) if values.dtype == np.float64 or bits == 64 else 0
    inside = np.where((wide >= low) & (wide < high + 1.0), wide, 0).astype(np.int64 if signed else np.uint64)
    found = np.where(wide >= high + 1.0, np.array(high, inside.dtype), inside)
    found = np.where(wide < low, np.array(low, inside.dtype), found)
    found = np.where(np.isnan(wide), np.array(unknown % 2**64, np.uint64).astype(inside.dtype), found)
    return found.astype(NUMPY_TYPES[dtype])


def from_integer(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Convert integers to a floating-point type with one rounding."""
    if dtype != tl.bfloat16:
        return values.astype(NUMPY_TYPES[dtype])
    if values.dtype.itemsize == 8:  # more bits than float64 has: the lowest stays odd where one was cut off
        sticky = ((values & 2047) != 0).astype(values.dtype) << 11
        values = np.where(np.abs(values.astype(np.float64)) < 2.0**53, values, values >> 11 << 11 | sticky)
    return convert(values.astype(np.float64), dtype)


def fused(x, y, z, odd=False):
    """Return x y + z with one rounding; where another one follows, `odd` keeps it exact."""
    if z.dtype == np.float64:
        return (x.astype(np.longdouble) * y + z).astype(np.float64)
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)  # the product is exact
    total = product + addend
    back = total - product
    missing = (product - (total - back)) + (addend - back)  # what the addition cut off, exactly
    even = (total.view(np.uint64) & 1) == 0
    step = np.where((missing > 0) == (total > 0), 1, -1)
    total = np.where(
        even & (missing != 0) & np.isfinite(total), (total.view(np.int64) + step).view(np.float64), total
    )
    return to_float32_odd(total) if odd else total.astype(np.float32)
