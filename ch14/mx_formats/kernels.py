"""Triton kernels of `ch14.mx_formats`: bf16 to block-scaled fp8 and fp4 in one pass, and back.

A program quantises BLOCK groups of one row. A group is the GROUP elements that share a scale. The program

1. loads the elements as integers and converts them to float32, whose upper half is a bf16;
2. finds the largest magnitude of each group (`group_amax`), which lies within few lanes and needs few shuffles;
3. derives the scale code, and the multiplier that brings the elements into the range of the format;
4. multiplies, rounds to the numbers of the format, extracts the bits of the codes from the float32, and stores them.

A dequantising program puts the bits of the codes back into a float32, multiplies by the scale and rounds to bf16.

Without CVT the kernels round to fp8 by arithmetic. Triton's interpreter needs that, because its conversions round
otherwise than the hardware. Small floats and float32 have the same fields, only narrower ones. A multiplication by a
power of two therefore moves a rounded number to where float32's exponent and mantissa hold the code:

    bit       31 | 30 29 28 27 26 25 24 23 | 22 21 20 19 .. 0
    e4m3       0 |  0  0  0  0  e  e  e  e |  m  m  m  0 .. 0    value * 2^-120; code = bits >> 20
    e2m1       0 |  0  0  0  0  0  0  e  e |  m  0  0  0 .. 0    value * 2^-126; code = bits >> 22

The subnormal numbers of the format are subnormal in float32, too, so they need no case of their own.
"""

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
SIXTH = tl.constexpr(0.1666666716337204)  # float32(1 / 6), as Transformer Engine has it
MIN_AMAX = tl.constexpr(1e-4)  # DeepGEMM's smallest amax: a block of zeros has a scale, too


# ---- shared by all kernels


@triton.jit
def program_origin(BLOCK: tl.constexpr, FLAT: tl.constexpr):
    # Row and first group of this program, in 64 bits; offsets within the program fit in 32. FLAT: one long row.
    row = tl.program_id(1).to(tl.int64)
    return 0 if FLAT else row + tl.program_id(2) * 32768, tl.program_id(0).to(tl.int64) * BLOCK


@triton.jit
def program_origin_backwards(BLOCK: tl.constexpr, FLAT: tl.constexpr, rows):
    # The same from the end of the matrix, because L2 still has the end of what a pass before this one has read.
    row, _ = program_origin(BLOCK, FLAT)
    return rows - 1 - row, (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK


@triton.jit
def count_inside(columns, first, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    # How many of the program's elements lie inside the row; with GROUP 1, how many of its groups.
    return tl.minimum(columns - first * GROUP, BLOCK * GROUP).to(tl.int32)


@triton.jit
def scale_index(row, group, groups, TILED: tl.constexpr):
    # Row by row, or in tiles of 128 rows x 4 scales as Blackwell's tensor cores read them. A tile is 32 lines:
    #   byte     0 .. 3    4 .. 7    8 .. 11   12 .. 15
    #   line 0   row 0     row 32    row 64    row 96      each the scales of four groups
    #   line 1   row 1     row 33    row 65    row 97
    if TILED:
        tile = (row // 128) * ((groups + 3) // 4) + group // 4
        return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + group % 4
    return row * groups + group


# ---- quantise


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def split_eight(tile):
    # (groups, lanes, 8) -> the eight elements of each lane, as eight tensors (groups, lanes). tl.split halves the last
    # dimension: 01234567 -> 0246 and 1357 -> 04, 26 and 15, 37 -> single elements.
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
def group_amax(amax):
    # The maximum over the lanes of a group, and whether it is NaN or infinity. It is taken of the bits as integers:
    # positive floats are ordered like their bits, and NaN has the largest, so that it is not lost.
    bits = tl.max(amax.to(tl.int32, bitcast=True), 1)
    return bits.to(tl.float32, bitcast=True), bits >= 0x7F800000


@triton.jit
def e8m0_scale(amax, not_finite, EMAX: tl.constexpr, CARRY: tl.constexpr):
    # The exponent field of amax is the scale. CARRY adds one to the exponent if the mantissa of amax is larger than the
    # mantissa of the format's largest element. The multiplier is the reciprocal: the exponent mirrored at 127.
    exponent = (amax.to(tl.int32, bitcast=True) + CARRY) >> 23
    code = tl.where(not_finite, 255, tl.maximum(exponent - EMAX, 0))
    return code.to(tl.uint8), (tl.where(not_finite, 0, 254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_to_format(magnitude, MANTISSA: tl.constexpr, EMIN: tl.constexpr, LIMIT: tl.constexpr):
    # Round to nearest even, by adding a power of two whose last place in float32 is the step of the format.
    if LIMIT is not None:
        magnitude = tl.minimum(magnitude, LIMIT)
    power = tl.maximum(magnitude, 2.0**EMIN).to(tl.int32, bitcast=True) & 0x7F800000
    large = power.to(tl.float32, bitcast=True) * 2.0 ** (23 - MANTISSA)
    return (large + magnitude) - large


@triton.jit
def code_fields(rounded, EMIN: tl.constexpr):
    # The bits of a float32 whose exponent and mantissa hold the code: see the drawing above.
    return (rounded * 2.0 ** (-126 - EMIN)).to(tl.uint32, bitcast=True)


@triton.jit
def e4m3_scale(amax, not_finite, inverse_tensor_scale):
    scale = round_to_format(amax * SIXTH * inverse_tensor_scale, 3, -6, 448.0)
    code = tl.where(not_finite, 0x7F, (code_fields(scale, -6) >> 20).to(tl.int32))
    multiplier = tl.minimum(tl.div_rn(inverse_tensor_scale, tl.maximum(scale, 2.0**-9)), FLT_MAX)
    return code.to(tl.uint8), tl.where(not_finite | (scale == 0), 0.0, multiplier)


@triton.jit
def quantise_fp8_kernel(
    x,
    values,
    scales,
    rows,
    columns,
    groups,
    x_stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    MANTISSA: tl.constexpr,
    EMIN: tl.constexpr,
    LIMIT: tl.constexpr,
    EMAX: tl.constexpr,
    CARRY: tl.constexpr,
    SCALE: tl.constexpr,
    TILED: tl.constexpr,
    FLAT: tl.constexpr,
    CVT: tl.constexpr,
):
    row, first = program_origin(BLOCK, FLAT)
    if row >= rows:
        return
    group = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < count_inside(columns, first, GROUP, BLOCK)
    bits = tl.load(x + (row * x_stride + first * GROUP) + column, mask=inside, other=0)
    tile = (bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    amax, not_finite = group_amax(lane_amax(split_eight(tile.reshape(BLOCK, GROUP // 8, 8))))
    if SCALE == "e8m0":
        scale, multiplier = e8m0_scale(amax, not_finite, EMAX, CARRY)
    else:
        amax = tl.maximum(amax, MIN_AMAX)
        scale = tl.where(not_finite, float("nan"), tl.div_rn(amax, LIMIT))
        multiplier = tl.where(not_finite, 0.0, tl.div_rn(LIMIT, amax))
    scaled = tl.where(not_finite[:, None], 0.0, tile * multiplier[:, None])
    if CVT:
        codes = scaled.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        sign = scaled.to(tl.uint32, bitcast=True) >> 24 & 0x80
        magnitude = round_to_format(tl.abs(scaled), MANTISSA, EMIN, LIMIT)
        codes = (code_fields(magnitude, EMIN) >> (23 - MANTISSA) | sign).to(tl.uint8)
    tl.store(values + (row * columns + first * GROUP) + column, codes, mask=inside)
    tl.store(
        scales + scale_index(row, first + group, groups, TILED),
        scale,
        mask=group < count_inside(groups, first, 1, BLOCK),
    )


@triton.jit
def bf16_to_float(pair, HIGH: tl.constexpr):
    # One of the two bf16 of an int32 as float32: bf16 is the upper half of a float32.
    bits = pair & -65536 if HIGH else pair << 16
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_pairs(x, chunk, inside, columns_inside, WHOLE: tl.constexpr):
    # Each lane loads eight bf16 as four int32; the earlier element is in the lower half.
    if WHOLE:
        column = chunk[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        pairs = tl.load(x + column, mask=inside[:, None, None], other=0)
    else:
        column = chunk[:, :, None] * 8 + tl.arange(0, 4)[None, None, :] * 2
        low = tl.load(x + column, mask=column < columns_inside, other=0).to(tl.uint16, bitcast=True)
        pairs = tl.load(x + column + 1, mask=column + 1 < columns_inside, other=0).to(
            tl.int32
        ) << 16 | low.to(tl.int32)
    even, odd = tl.split(pairs.reshape(chunk.shape[0], chunk.shape[1], 2, 2))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@triton.jit
def unpack_pairs(pairs):
    p0, p1, p2, p3 = pairs
    return (
        bf16_to_float(p0, 0),
        bf16_to_float(p0, 1),
        bf16_to_float(p1, 0),
        bf16_to_float(p1, 1),
        bf16_to_float(p2, 0),
        bf16_to_float(p2, 1),
        bf16_to_float(p3, 0),
        bf16_to_float(p3, 1),
    )


# With SATURATE the fp4 kernel uses two instructions that Triton has no name for. An H200 issues a minimum, a shift or a
# logical operation at half the rate of a multiplication or an addition, and those are what the portable code spends its
# time on. Saturation, to the range from 0 to 1, costs nothing there.
MAX_PAIRS = tl.constexpr("max.u16x2 $0, $1, $2;")


def write_fp4_encoder() -> str:
    """Return PTX that encodes eight bf16 ($1 to $4) times a multiplier ($5) as the eight e2m1 of a word ($0).

    A magnitude m is rounded in the three parts of the format, whose steps are 1/2, 1 and 2:

        m              0 .. 2                2 .. 4                  4 .. 6
        saturated      a = sat(m / 2)        b = sat(m / 2 - 1)      c = sat(m / 2 - 2)
        codes          round(4 a), 0 .. 4    round(2 b), 0 .. 2      round(c), 0 or 1

    The code is their sum. Added to 2^23 one after the other, they are rounded to whole numbers, ties to even, and
    larger m have code 7. Four codes share a float32: before the next one is added, the sum is multiplied by 16.
    """
    lines = ["{", ".reg .b32 w, u, v, s, t;", ".reg .f32 m, p, q;"]
    for half in (1, 0):
        for k in (3, 2, 1, 0):
            pair, odd = 1 + 2 * half + k // 2, k % 2
            # abs is a modifier of the multiplication and takes no instruction of its own.
            lines += [
                f"and.b32 w, ${pair}, 0xFFFF0000;" if odd else f"shl.b32 w, ${pair}, 16;",
                "mov.b32 m, w;",
                "abs.f32 m, m;",
                "mul.rn.f32 m, m, $5;",
            ]
            # 0f4B000000 is 2^23, 0fCCF00000 is -15 * 2^23.
            lines += [
                "mov.f32 q, 0f4B000000;" if k == 3 else "fma.rn.f32 q, q, 0f41800000, 0fCCF00000;",
                "mul.rn.sat.f32 p, m, 0f3F000000;",
                "fma.rn.f32 q, p, 0f40800000, q;",
                "fma.rn.sat.f32 p, m, 0f3F000000, 0fBF800000;",
                "fma.rn.f32 q, p, 0f40000000, q;",
                "fma.rn.sat.f32 p, m, 0f3F000000, 0fC0000000;",
                "add.rn.f32 q, p, q;",
            ]
        lines.append(f"mov.b32 {'v' if half else 'u'}, q;")
    # The signs are bit 15 and bit 31 of each pair, so they are the highest bits of its bytes 1 and 3.
    lines += [
        "prmt.b32 u, u, v, 0x5410;",
        "prmt.b32 s, $1, $2, 0x7351;",
        "prmt.b32 t, $3, $4, 0x7351;",
        "prmt.b32 w, s, t, 0x5410;",
        "prmt.b32 s, s, t, 0x7632;",
        "shr.u32 w, w, 4;",
        "and.b32 w, w, 0x08080808;",
        "and.b32 s, s, 0x80808080;",
        "or.b32 w, w, s;",
        "or.b32 $0, u, w;",
        "}",
    ]
    return "\n".join(lines)


FP4_ENCODER = tl.constexpr(write_fp4_encoder())


@triton.jit
def pairs_amax(pairs):
    # The largest magnitude of eight bf16. Positive bf16 are ordered like 16-bit integers, and NaN is the largest.
    p0, p1, p2, p3 = pairs
    first = tl.inline_asm_elementwise(
        MAX_PAIRS, "=r,r,r", [p0 & 0x7FFF7FFF, p1 & 0x7FFF7FFF], tl.int32, True, 1
    )
    second = tl.inline_asm_elementwise(
        MAX_PAIRS, "=r,r,r", [p2 & 0x7FFF7FFF, p3 & 0x7FFF7FFF], tl.int32, True, 1
    )
    return tl.inline_asm_elementwise(MAX_PAIRS, "=r,r,r", [first, second], tl.int32, True, 1)


@triton.jit
def larger_half(pair):
    return tl.maximum(pair & -65536, pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_fp4_pairs(pairs, multiplier, not_finite):
    p0, p1, p2, p3 = pairs
    word = tl.inline_asm_elementwise(
        FP4_ENCODER, "=r,r,r,r,r,f", [p0, p1, p2, p3, multiplier], tl.int32, True, 1
    )
    return tl.where(not_finite, 0, word)


@triton.jit
def encode_fp4_word(e, multiplier, not_finite, LIMIT: tl.constexpr):
    # The codes of e * multiplier as the eight nibbles of a word:
    #   bit      31 .. 28   27 .. 24   ...   7 .. 4   3 .. 0
    #   element     7          6       ...      1        0       each nibble: sign, two exponent bits, one mantissa bit
    low = tl.zeros_like(e[0]).to(tl.uint32, bitcast=True)
    high, signs = low, low
    for k in tl.static_range(3, -1, -1):
        # The three bits of a code stand from bit 22 up and all others are zero: one shift with addition places it.
        low += code_fields(round_to_format(tl.abs(e[k] * multiplier), 1, 0, LIMIT), 0) >> (22 - 4 * k)
        high += code_fields(round_to_format(tl.abs(e[k + 4] * multiplier), 1, 0, LIMIT), 0) >> (22 - 4 * k)
    for k in tl.static_range(7, -1, -1):
        # One funnel shift per element; the three lower bits of each nibble are noise that a mask removes below.
        signs = signs << 4 | e[k].to(tl.uint32, bitcast=True) >> 28
    codes = low | high << 16
    # An E8M0 scale leaves magnitudes below 8. They round to at most 8, code 8, which becomes 7.
    if LIMIT is None:
        codes -= (codes & 0x88888888) >> 3
    return tl.where(not_finite, 0, codes | signs & 0x88888888).to(tl.int32, bitcast=True)


@triton.jit
def join_words(words):
    # Two or four tensors (groups, lanes) -> (groups, lanes x 2 or 4): the words of a lane side by side.
    if len(words) == 2:
        joined = tl.join(words[0], words[1])
    else:
        joined = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    return joined.reshape(words[0].shape[0], words[0].shape[1] * len(words))


@triton.jit
def quantise_fp4_kernel(
    x,
    values,
    scales,
    inverse_tensor_scale,
    rows,
    columns,
    groups,
    x_stride,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    CARRY: tl.constexpr,
    SCALE: tl.constexpr,
    TILED: tl.constexpr,
    FLAT: tl.constexpr,
    WHOLE: tl.constexpr,
    SATURATE: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    if BACKWARDS:
        row, first = program_origin_backwards(BLOCK, FLAT, rows)
    else:
        row, first = program_origin(BLOCK, FLAT)
    if (row < 0) | (row >= rows):
        return
    # One lane takes a whole group: chunks of eight elements, one after the other.
    CHUNKS: tl.constexpr = GROUP // 8
    group = tl.arange(0, BLOCK)
    chunk = group[:, None] * CHUNKS + tl.arange(0, 1)[None, :]
    inside = group < count_inside(groups, first, 1, BLOCK)
    columns_inside = count_inside(columns, first, GROUP, BLOCK)
    x += row * (x_stride // 2) + first * (GROUP // 2) if WHOLE else row * x_stride + first * GROUP
    pairs = (load_pairs(x, chunk, inside, columns_inside, WHOLE),)
    for k in tl.static_range(1, CHUNKS):
        pairs = pairs + (load_pairs(x, chunk + k, inside, columns_inside, WHOLE),)
    if SATURATE:
        largest = pairs_amax(pairs[0])
        for k in tl.static_range(1, CHUNKS):
            largest = tl.inline_asm_elementwise(
                MAX_PAIRS, "=r,r,r", [largest, pairs_amax(pairs[k])], tl.int32, True, 1
            )
        amax = larger_half(largest)
    else:
        elements = (unpack_pairs(pairs[0]),)
        amax = lane_amax(elements[0])
        for k in tl.static_range(1, CHUNKS):
            elements = elements + (unpack_pairs(pairs[k]),)
            amax = nan_max(amax, lane_amax(elements[k]))
    amax, not_finite = group_amax(amax)
    if SCALE == "e8m0":
        scale, multiplier = e8m0_scale(amax, not_finite, 2, CARRY)
    else:
        scale, multiplier = e4m3_scale(amax, not_finite, tl.load(inverse_tensor_scale))
    LIMIT: tl.constexpr = None if SCALE == "e8m0" else 6.0
    if SATURATE:
        words = (encode_fp4_pairs(pairs[0], multiplier[:, None], not_finite[:, None]),)
        for k in tl.static_range(1, CHUNKS):
            words = words + (encode_fp4_pairs(pairs[k], multiplier[:, None], not_finite[:, None]),)
    else:
        words = (encode_fp4_word(elements[0], multiplier[:, None], not_finite[:, None], LIMIT),)
        for k in tl.static_range(1, CHUNKS):
            words = words + (encode_fp4_word(elements[k], multiplier[:, None], not_finite[:, None], LIMIT),)
    word = group[:, None] * CHUNKS + tl.arange(0, CHUNKS)[None, :]
    if WHOLE:
        tl.store(values + (row * groups + first) * CHUNKS + word, join_words(words), mask=inside[:, None])
    else:
        values += row * ((columns + 1) // 2) + first * (GROUP // 2)
        for k in tl.static_range(4):
            byte = word * 4 + k
            tl.store(
                values + byte,
                (join_words(words) >> (8 * k)).to(tl.uint8),
                mask=byte < (columns_inside + 1) // 2,
            )
    tl.store(scales + scale_index(row, first + group, groups, TILED), scale, mask=inside)


@triton.jit
def tensor_scale_kernel(x, pair, counters, elements, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    # Find NVFP4's scale of a tensor, amax / (448 * 6), and its reciprocal. amax is the largest finite magnitude. The
    # first counter receives its bits as a bf16, and the second counts programs. The last program to arrive computes the
    # scale, and sets both counters back to zero.
    largest = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        index = (tl.program_id(0).to(tl.int64) * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        magnitude = tl.load(x + index, mask=index < elements, other=0).to(tl.int32) & 0x7FFF
        largest = tl.maximum(largest, tl.where(magnitude < 0x7F80, magnitude, 0))
    tl.atomic_max(counters, tl.max(largest, 0), sem="relaxed")
    if tl.atomic_add(counters + 1, 1) == tl.num_programs(0) - 1:
        amax = (tl.atomic_xchg(counters, 0) << 16).to(tl.float32, bitcast=True)
        tl.store(counters + 1, 0)
        scale = tl.where(amax > 0, tl.maximum(tl.div_rn(amax, 2688.0), 2.0**-126), 1.0)
        tl.store(pair, scale)
        tl.store(pair + 1, tl.div_rn(1.0, scale))


# ---- dequantise


@triton.jit
def to_bf16_bits(value, CVT: tl.constexpr):
    # float32 -> the bits of the nearest bf16, to even: add half a step less one, plus one if the kept part is odd.
    if CVT:
        return value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def decode_scale(code, tensor_scale, SCALE: tl.constexpr):
    if SCALE == "fp32":
        value = code
    elif SCALE == "e8m0":  # Code 0 is 2^-127, a subnormal of float32; 255 is NaN.
        wide = code.to(tl.int32)
        bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
        value = bits.to(tl.float32, bitcast=True)
    else:
        wide = code.to(tl.int32) & 0x7F  # Blackwell reads this scale as ue4m3, without a sign.
        value = (wide << 20).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where(wide == 0x7F, float("nan"), value) * tl.load(tensor_scale)
    return value


@triton.jit
def set_sign(magnitude, sign):
    # Set the sign to the highest bit of `sign`. Triton's -x is 0 - x, which would make +0 of 0.
    bits = magnitude.to(tl.uint32, bitcast=True) | sign.to(tl.uint32, bitcast=True) & 0x80000000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_fp8(codes, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    low = codes & 0x7F  # of a uint32
    value = (low << (23 - MANTISSA)).to(tl.float32, bitcast=True) * 2.0 ** (126 + EMIN)
    if MANTISSA == 3:
        value = tl.where(low == 0x7F, float("nan"), value)
    else:
        value = tl.where(low >= 0x7C, tl.where(low == 0x7C, float("inf"), float("nan")), value)
    return set_sign(value, codes << 24)


@triton.jit
def decode_fp4(codes):
    # The value of the lowest four bits of an int32.
    return set_sign(((codes & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126, codes << 28)


@triton.jit
def dequantise_fp8_kernel(
    values,
    scales,
    out,
    rows,
    columns,
    groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    MANTISSA: tl.constexpr,
    EMIN: tl.constexpr,
    SCALE: tl.constexpr,
    TILED: tl.constexpr,
    FLAT: tl.constexpr,
    CVT: tl.constexpr,
):
    row, first = program_origin(BLOCK, FLAT)
    if row >= rows:
        return
    group = tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < count_inside(columns, first, GROUP, BLOCK)
    begin = row * columns + first * GROUP
    codes = tl.load(values + begin + column, mask=inside, other=0)
    scale = tl.load(
        scales + scale_index(row, first + group, groups, TILED),
        mask=group < count_inside(groups, first, 1, BLOCK),
        other=0,
    )
    if CVT:
        value = codes.to(tl.float8e4nv if MANTISSA == 3 else tl.float8e5, bitcast=True).to(tl.float32)
    else:
        value = decode_fp8(codes.to(tl.uint32), MANTISSA, EMIN)
    value *= decode_scale(scale, scale, SCALE)[:, None]
    tl.store(out + begin + column, to_bf16_bits(value, CVT), mask=inside)


@triton.jit
def dequantise_fp4_kernel(
    values,
    scales,
    tensor_scale,
    out,
    rows,
    columns,
    groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    TILED: tl.constexpr,
    FLAT: tl.constexpr,
    WHOLE: tl.constexpr,
    CVT: tl.constexpr,
):
    row, first = program_origin(BLOCK, FLAT)
    if row >= rows:
        return
    LANES: tl.constexpr = GROUP // 8  # each lane takes one word: eight elements
    group = tl.arange(0, BLOCK)
    word = group[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = group < count_inside(groups, first, 1, BLOCK)
    columns_inside = count_inside(columns, first, GROUP, BLOCK)
    if WHOLE:
        packed = tl.load(values + (row * groups + first) * LANES + word, mask=inside[:, None], other=0)
    else:
        values += row * ((columns + 1) // 2) + first * (GROUP // 2)
        packed = tl.zeros((BLOCK, LANES), tl.int32)
        for k in tl.static_range(4):
            byte = word * 4 + k
            packed |= tl.load(values + byte, mask=byte < (columns_inside + 1) // 2, other=0).to(tl.int32) << (
                8 * k
            )
    scale = tl.load(scales + scale_index(row, first + group, groups, TILED), mask=inside, other=0)
    value = decode_fp4(packed[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :])
    value *= decode_scale(scale, tensor_scale, SCALE)[:, None, None]
    column = word[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(
        out + (row * columns + first * GROUP) + column, to_bf16_bits(value, CVT), mask=column < columns_inside
    )
