"""Triton kernels of `ch14.mx_formats`: bf16 to block-scaled fp8 and fp4 in one pass.

A program takes BLOCK groups of one row, whose elements lie within few lanes. Conversions of the hardware (CVT) are
only used where they round as the format does; the same in arithmetic is for Triton's interpreter, which does not.
"""

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
SIXTH = tl.constexpr(0.1666666716337204)  # float32(1 / 6), as Transformer Engine has it
FLOOR = tl.constexpr(1e-4)  # DeepGEMM's least amax: a block of zeros has a scale too


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def eight(tile):
    # (groups, lanes, 8) -> the eight elements that a lane holds
    groups: tl.constexpr = tile.shape[0]
    lanes: tl.constexpr = tile.shape[1]
    even, odd = tl.split(tile.reshape(groups, lanes, 4, 2))
    e04, e26 = tl.split(even.reshape(groups, lanes, 2, 2))
    e15, e37 = tl.split(odd.reshape(groups, lanes, 2, 2))
    e0, e4 = tl.split(e04)
    e1, e5 = tl.split(e15)
    e2, e6 = tl.split(e26)
    e3, e7 = tl.split(e37)
    return e0, e1, e2, e3, e4, e5, e6, e7


@triton.jit
def lane_amax(e):
    first = nan_max(nan_max(tl.abs(e[0]), tl.abs(e[1])), nan_max(tl.abs(e[2]), tl.abs(e[3])))
    return nan_max(first, nan_max(nan_max(tl.abs(e[4]), tl.abs(e[5])), nan_max(tl.abs(e[6]), tl.abs(e[7]))))


@triton.jit
def across(amax):
    # Of positive floats the larger has the larger bits, and NaN the largest: integers do, which keep NaN.
    bits = tl.max(amax.to(tl.int32, bitcast=True), 1)
    return bits.to(tl.float32, bitcast=True), bits >= 0x7F800000


@triton.jit
def e8m0_scale(amax, dead, EMAX: tl.constexpr, CARRY: tl.constexpr):
    # The exponent field is the scale; CARRY adds one to it where the mantissa is above that of the largest element.
    exponent = (amax.to(tl.int32, bitcast=True) + CARRY) >> 23
    code = tl.where(dead, 255, tl.maximum(exponent - EMAX, 0))
    return code.to(tl.uint8), (tl.where(dead, 0, 254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def on_grid(magnitude, MANTISSA: tl.constexpr, EMIN: tl.constexpr, LIMIT: tl.constexpr):
    # Round to nearest even, by adding a number so large that its last place is the format's step.
    if LIMIT is not None:
        magnitude = tl.minimum(magnitude, LIMIT)
    power = tl.maximum(magnitude, 2.0**EMIN).to(tl.int32, bitcast=True) & 0x7F800000
    large = power.to(tl.float32, bitcast=True) * 2.0**(23 - MANTISSA)
    return (large + magnitude) - large


@triton.jit
def field(rounded, EMIN: tl.constexpr):
    # Exponent and mantissa at the place where float32 has them: its subnormals are the format's.
    return (rounded * 2.0**(-126 - EMIN)).to(tl.uint32, bitcast=True)


@triton.jit
def e4m3_scale(amax, dead, encode):
    scale = on_grid(amax * SIXTH * encode, 3, -6, 448.0)
    code = tl.where(dead, 0x7F, (field(scale, -6) >> 20).to(tl.int32))
    multiplier = tl.minimum(tl.div_rn(encode, tl.maximum(scale, 2.0**-9)), FLT_MAX)
    return code.to(tl.uint8), tl.where(dead | (scale == 0), 0.0, multiplier)


@triton.jit
def place(row, group, groups, TILED: tl.constexpr):
    # Row by row, or in tiles of 128 rows x 4 scales: 32 rows x 4 quarters x 4, as Blackwell's tensor cores read them.
    if TILED:
        tile = (row // 128) * ((groups + 3) // 4) + group // 4
        return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + group % 4
    return row * groups + group


@triton.jit
def start(BLOCK: tl.constexpr, FLAT: tl.constexpr):
    # Row and first group of this program: 64 bits, while a lane's own index has 32. FLAT: the tensor as one row.
    row = tl.program_id(1).to(tl.int64)
    return 0 if FLAT else row + tl.program_id(2) * 32768, tl.program_id(0).to(tl.int64) * BLOCK


@triton.jit
def rest(columns, first, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    return tl.minimum(columns - first * GROUP, BLOCK * GROUP).to(tl.int32)


@triton.jit
def quantise_fp8_kernel(x, values, scales, rows, columns, groups, x_stride, BLOCK: tl.constexpr, GROUP: tl.constexpr,
                        MANTISSA: tl.constexpr, EMIN: tl.constexpr, LIMIT: tl.constexpr, EMAX: tl.constexpr,
                        CARRY: tl.constexpr, SCALE: tl.constexpr, TILED: tl.constexpr, FLAT: tl.constexpr,
                        CVT: tl.constexpr):
    row, first = start(BLOCK, FLAT)
    if row >= rows:
        return
    group = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < rest(columns, first, GROUP, BLOCK)
    bits = tl.load(x + (row * x_stride + first * GROUP) + column, mask=inside, other=0)
    tile = (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    amax, dead = across(lane_amax(eight(tile.reshape(BLOCK, GROUP // 8, 8))))
    if SCALE == "e8m0":
        scale, multiplier = e8m0_scale(amax, dead, EMAX, CARRY)
    else:
        amax = tl.maximum(amax, FLOOR)
        scale = tl.where(dead, float("nan"), tl.div_rn(amax, LIMIT))
        multiplier = tl.where(dead, 0.0, tl.div_rn(LIMIT, amax))
    scaled = tl.where(dead[:, None], 0.0, tile * multiplier[:, None])
    if CVT:
        codes = scaled.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        sign = scaled.to(tl.uint32, bitcast=True) >> 24 & 0x80
        codes = (field(on_grid(tl.abs(scaled), MANTISSA, EMIN, LIMIT), EMIN) >> (23 - MANTISSA) | sign).to(tl.uint8)
    tl.store(values + (row * columns + first * GROUP) + column, codes, mask=inside)
    tl.store(scales + place(row, first + group, groups, TILED), scale, mask=group < rest(groups, first, 1, BLOCK))


@triton.jit
def up(pair, HIGH: tl.constexpr):
    # One of two bf16 as float32: bf16 is its upper half.
    bits = pair & -65536 if HIGH else pair << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def eight_of(x, word, inside, left, WHOLE: tl.constexpr):
    # Eight bf16 a lane, read as four int32, which hold the earlier element in their lower half.
    if WHOLE:
        column = word[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        pairs = tl.load(x + column, mask=inside[:, None, None], other=0)
    else:
        column = word[:, :, None] * 8 + tl.arange(0, 4)[None, None, :] * 2
        low = tl.load(x + column, mask=column < left, other=0).to(tl.uint16, bitcast=True)
        pairs = tl.load(x + column + 1, mask=column + 1 < left, other=0).to(tl.int32) << 16 | low.to(tl.int32)
    even, odd = tl.split(pairs.reshape(word.shape[0], word.shape[1], 2, 2))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return up(p0, 0), up(p0, 1), up(p1, 0), up(p1, 1), up(p2, 0), up(p2, 1), up(p3, 0), up(p3, 1)


@triton.jit
def word_of(e, multiplier, dead, LIMIT: tl.constexpr):
    # The eight nibbles of e * multiplier, first element lowest.
    low = tl.zeros_like(e[0]).to(tl.uint32, bitcast=True)
    high, signs = low, low
    for k in tl.static_range(3, -1, -1):
        # A code's three bits stand at 22 and all others are zero: one shift with addition puts it in its place.
        low += field(on_grid(tl.abs(e[k] * multiplier), 1, 0, LIMIT), 0) >> (22 - 4 * k)
        high += field(on_grid(tl.abs(e[k + 4] * multiplier), 1, 0, LIMIT), 0) >> (22 - 4 * k)
    for k in tl.static_range(7, -1, -1):
        signs = signs << 4 | e[k].to(tl.uint32, bitcast=True) >> 28  # a funnel shift; its three lower bits are noise
    codes = low | high << 16
    if LIMIT is None:  # below 8 there is one code above the largest, 8, and its bit is free until the signs come
        codes -= (codes & 0x88888888) >> 3
    return tl.where(dead, 0, codes | signs & 0x88888888).to(tl.int32, bitcast=True)


@triton.jit
def joined(words):
    # One, two or four tensors (groups, lanes) side by side: (groups, lanes x 1, 2 or 4)
    if len(words) == 1:
        both = words[0]
    elif len(words) == 2:
        both = tl.join(words[0], words[1])
    else:
        both = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    return both.reshape(words[0].shape[0], words[0].shape[1] * len(words))


@triton.jit
def quantise_fp4_kernel(x, values, scales, encode, rows, columns, groups, x_stride, BLOCK: tl.constexpr,
                        GROUP: tl.constexpr, LANES: tl.constexpr, CARRY: tl.constexpr, SCALE: tl.constexpr,
                        TILED: tl.constexpr, FLAT: tl.constexpr, WHOLE: tl.constexpr):
    row, first = start(BLOCK, FLAT)
    if row >= rows:
        return
    CHUNKS: tl.constexpr = GROUP // 8 // LANES  # of eight elements that a lane takes, one after the other
    group = tl.arange(0, BLOCK)
    chunk = group[:, None] * (GROUP // 8) + tl.arange(0, LANES)[None, :] * CHUNKS
    inside, left = group < rest(groups, first, 1, BLOCK), rest(columns, first, GROUP, BLOCK)
    x += row * (x_stride // 2) + first * (GROUP // 2) if WHOLE else row * x_stride + first * GROUP
    elements = (eight_of(x, chunk, inside, left, WHOLE),)
    amax = lane_amax(elements[0])
    for k in tl.static_range(1, CHUNKS):
        elements = elements + (eight_of(x, chunk + k, inside, left, WHOLE),)
        amax = nan_max(amax, lane_amax(elements[k]))
    amax, dead = across(amax)
    if SCALE == "e8m0":
        scale, multiplier = e8m0_scale(amax, dead, 2, CARRY)
    else:
        scale, multiplier = e4m3_scale(amax, dead, tl.load(encode))
    LIMIT: tl.constexpr = None if SCALE == "e8m0" else 6.0
    words = (word_of(elements[0], multiplier[:, None], dead[:, None], LIMIT),)
    for k in tl.static_range(1, CHUNKS):
        words = words + (word_of(elements[k], multiplier[:, None], dead[:, None], LIMIT),)
    word = group[:, None] * (GROUP // 8) + tl.arange(0, GROUP // 8)[None, :]
    if WHOLE:
        tl.store(values + (row * groups + first) * (GROUP // 8) + word, joined(words), mask=inside[:, None])
    else:
        values += row * ((columns + 1) // 2) + first * (GROUP // 2)
        for k in tl.static_range(4):
            byte = word * 4 + k
            tl.store(values + byte, (joined(words) >> (8 * k)).to(tl.uint8), mask=byte < (left + 1) // 2)
    tl.store(scales + place(row, first + group, groups, TILED), scale, mask=inside)


@triton.jit
def amax_kernel(x, bits, elements, BLOCK: tl.constexpr):
    # The largest finite magnitude of a tensor, as the bits of bf16; `bits` begins as zero.
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    magnitude = tl.load(x + index, mask=index < elements, other=0).to(tl.int32) & 0x7FFF
    tl.atomic_max(bits, tl.max(tl.where(magnitude < 0x7F80, magnitude, 0), 0), sem="relaxed")


@triton.jit
def tensor_scale_kernel(bits, pair):
    # From that largest magnitude: the scale of the tensor, and what its elements are first multiplied by.
    amax = (tl.load(bits) << 16).to(tl.float32, bitcast=True)
    scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, 2688.0), 2.0**-126), 1.0)
    tl.store(pair, scale)
    tl.store(pair + 1, tl.div_rn(1.0, scale))
