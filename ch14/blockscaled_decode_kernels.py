"""Kernels of `ch14.blockscaled_decode`: MXFP4 weights, decoded where they are multiplied by a few bfloat16 tokens.

`registers` (Gluon): a lane loads a block of 32 weights, 16 bytes, decodes it by bits, and the tensor core takes it from
the lane's registers: weights never see shared memory. `plain` (Triton) is the same for any GPU and the interpreter.
Sources: OCP MX v1.0, 5.3 and 5.4; PTX ISA, "mma.m16n8k16" (which lane holds what) and "mul" (bf16x2, subnormals).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ch14.attention_hopper import group_barrier
from ch14.mx_back_kernels import narrow, scale_value

# Four codes in each half of $4, to four pairs of bf16. A code's sign goes to bit 15 and its magnitude, eem, to bits 8
# to 6 by one multiplication, which makes two copies, and a mask. As bf16 that is the value times 2^-126, a subnormal
# for 0.5; $5, a pair of 2^126 times the scale, makes it whole, exactly.
_STEPS = """
    and.b32 t, {source}, {mask};
    mul.lo.u32 t, t, {copies};
    and.b32 t, t, 0x81C081C0;
    {unscale}
    mul.rn.bf16x2 ${out}, t, $5;"""


def _decode_ptx(unscale: str) -> str:
    even, odd = ("0x000F000F", "0x00001040"), ("0x00F000F0", "0x00000104")
    steps = [_STEPS.format(source=source, mask=mask, copies=copies, unscale=unscale, out=out)
             for out, (source, (mask, copies)) in enumerate((("$4", even), ("$4", odd), ("u", even), ("u", odd)))]
    return "{\n    .reg .b32 t, u;\n    shr.u32 u, $4, 8;" + "".join(steps) + "\n}"


DECODE = gl.constexpr(_decode_ptx(""))
DECODE_WIDE = gl.constexpr(_decode_ptx("mul.rn.bf16x2 t, t, $7;"))  # 2^126 and the scale, one after the other
NARROW_SCALES = gl.constexpr(128)  # above it 2^126 times the scale is no bf16
SLAB = gl.constexpr(128)  # columns of W in a step: 64 bytes a row, four lanes


@gluon.constexpr_function
def powers(first, end, rank, dim):
    made = []
    while first < end:
        made.append([first if at == dim else 0 for at in range(rank)])
        first *= 2
    return made


@gluon.constexpr_function
def slab_layout(rows, warps):
    # Rows x four blocks x eight halfwords. mma's rows of A: lane / 4, and 8 more; its columns: a block a lane.
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]] + powers(16 * warps, rows, 3, 0),
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], powers(16, 16 * warps, 3, 0), [], [rows, 4, 8])


@gluon.constexpr_function
def tokens_layout(tokens, warps):
    # mma's columns of B: lane / 4; a lane holds what its eight halfwords of W meet, 16 bytes. All warps hold the same.
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]] + powers(8, tokens, 2, 0),
                                      [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[0, 0]] * len(powers(1, warps, 1, 0)),
                                      [], [tokens, 32])


@gluon.jit
def load_slab(rows, scale_rows, live, slab, left, layout: gl.constexpr):
    block = slab * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    inside = live & (block < left)[None, :]
    scales = gl.load(scale_rows + block[None, :], mask=inside, other=127)
    halfword = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    codes = gl.load(rows[:, :, None] + (block[None, :, None] * 8 + halfword), mask=inside[:, :, None], other=0)
    return codes, scales.to(gl.int32)


@gluon.jit
def decoded(codes, scales, WIDE: gl.constexpr):
    # Pairs of bf16 (even, odd halfword) of each of the four codes in a halfword. `pack`: both halfwords are of a block.
    kinds: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
    if WIDE:  # 0 is 2^-127, a subnormal; 255 is NaN: both have bit 6, which no other scale has
        bits = scales * 0x00800080 + gl.where((scales == 0) | (scales == 255), 0x00400040, 0)
        pairs, _ = gl.broadcast(bits[:, :, None], codes)
        unscale = gl.full(pairs.shape, 0x7E807E80, gl.int32, pairs.type.layout)
        made = gl.inline_asm_elementwise(DECODE_WIDE, "=r,=r,=r,=r,r,r,r,r,r", [codes, pairs, unscale], kinds, True, 2)
    else:
        pairs, _ = gl.broadcast((scales * 0x00800080 + 0x3F003F00)[:, :, None], codes)
        made = gl.inline_asm_elementwise(DECODE, "=r,=r,=r,=r,r,r,r", [codes, pairs], kinds, True, 2)
    return made


@gluon.jit
def product(acc, codes, plane, mma: gl.constexpr):
    # The sum over K may take its terms in any order: halfword 8 c + 4 h + 2 p + e becomes column 16 h + 8 p + 2 c + e,
    # for that is where lane c holds it. So nothing moves, for the same is done to the tokens.
    ROWS: gl.constexpr = codes.shape[0]
    TOKENS: gl.constexpr = plane.shape[0]
    a = codes.reshape([ROWS, 4, 2, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([ROWS, 32])
    b = plane.load(tokens_layout(TOKENS, gl.num_warps()))
    b = b.reshape([TOKENS, 4, 2, 2, 2]).permute([2, 3, 1, 4, 0]).reshape([32, TOKENS])
    return mma_v2(gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2)),
                  gl.convert_layout(b, gl.DotOperandLayout(1, mma, 2)), acc)


@gluon.jit
def swept(rows, scale_rows, live, left, slabs, tokens, BLOCK_N: gl.constexpr, SLABS: gl.constexpr,
          WIDE: gl.constexpr, mma: gl.constexpr, layout: gl.constexpr):
    # This share of K, and the largest scale in it. A slab is decoded, then its registers take one that comes later.
    TOKENS: gl.constexpr = tokens.shape[1]
    acc = gl.zeros([BLOCK_N, TOKENS], gl.float32, mma)
    top = gl.zeros([BLOCK_N, 4], gl.int32, gl.SliceLayout(2, layout))
    AHEAD: gl.constexpr = len(slabs)
    for slab in range(0, gl.cdiv(left, 4), AHEAD):
        for ahead in gl.static_range(AHEAD):
            codes, scales = slabs[0]
            c0, c1, c2, c3 = decoded(codes, scales, WIDE)
            top = gl.maximum(top, scales)
            slabs = slabs[1:] + (load_slab(rows, scale_rows, live, slab + ahead + AHEAD, left, layout),)
            acc = product(acc, c0, tokens.index(slab + ahead), mma)
            acc = product(acc, c1, tokens.index(SLABS + slab + ahead), mma)
            acc = product(acc, c2, tokens.index(2 * SLABS + slab + ahead), mma)
            acc = product(acc, c3, tokens.index(3 * SLABS + slab + ahead), mma)
    return acc, gl.max(gl.max(top, 1), 0)


@gluon.jit
def first_slabs(rows, scale_rows, live, left, AHEAD: gl.constexpr, layout: gl.constexpr):
    slabs = ()
    for slab in gl.static_range(AHEAD):
        slabs = slabs + (load_slab(rows, scale_rows, live, slab, left, layout),)
    return slabs


@gluon.jit
def stage_plane(tokens, x, FIRST: gl.constexpr):
    # (tokens, columns) -> a slab after the other, 64 bytes a token: eight lanes then read 128 bytes without a gap.
    TOKENS: gl.constexpr = x.shape[0]
    slabs: gl.constexpr = x.shape[1] // 32
    x = x.reshape([TOKENS, slabs, 32]).permute([1, 0, 2]).reshape([slabs * TOKENS, 32])
    tokens.slice(FIRST * TOKENS, slabs * TOKENS).store(x)


@gluon.jit
def stage_tokens(tokens, x_ptr, M, first, blocks, TOKENS: gl.constexpr, SLABS: gl.constexpr):
    # x of this share to shared memory in four planes: of each four columns those that meet a halfword's first code, ...
    WARPS: gl.constexpr = gl.num_warps()
    PIECE: gl.constexpr = min(SLABS, WARPS)
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [8, 4], [1, WARPS], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
    for slab in gl.static_range(0, SLABS, PIECE):
        column = first * 32 + slab * SLAB + gl.arange(0, PIECE * SLAB, gl.SliceLayout(0, layout))[None, :]
        x = gl.load(x_ptr + token * (blocks * 32) + column, mask=(token < M) & (column // 32 < blocks), other=0.0)
        even, odd = gl.split(x.reshape([TOKENS, PIECE * 32, 2, 2]))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        stage_plane(tokens, x0, slab)
        stage_plane(tokens, x1, SLABS + slab)
        stage_plane(tokens, x2, 2 * SLABS + slab)
        stage_plane(tokens, x3, 3 * SLABS + slab)


# Sizes are not specialised: another number of tokens must not compile another kernel.
@gluon.jit(do_not_specialize=["M", "N", "blocks"])
def decode_registers_kernel(x_ptr, packed_ptr, scales_ptr, out_ptr, parts_ptr, arrivals_ptr, M, N, blocks,
                            BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, SHARE: gl.constexpr, AHEAD: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    SLABS: gl.constexpr = SHARE // SLAB
    layout: gl.constexpr = slab_layout(BLOCK_N, WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = gl.program_id(0) * BLOCK_N
    share = gl.program_id(1)
    shares = gl.num_programs(1)
    first = share * (SHARE // 32)
    left = gl.minimum(blocks - first, SHARE // 32)
    row = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    live = row < N
    at = row.to(gl.int64) * blocks + first
    rows = packed_ptr + at * 8
    scale_rows = scales_ptr + at
    slabs = first_slabs(rows, scale_rows, live, left, AHEAD, layout)  # on their way while the tokens are staged
    tokens = gl.allocate_shared_memory(gl.bfloat16, [4 * SLABS, TOKENS, 32], plain)
    stage_tokens(tokens._reinterpret(gl.bfloat16, [4 * SLABS * TOKENS, 32], plain), x_ptr, M, first, blocks, TOKENS,
                 SLABS)
    group_barrier()
    acc, top = swept(rows, scale_rows, live, left, slabs, tokens, BLOCK_N, SLABS, False, mma, layout)
    if top > NARROW_SCALES:  # weights of 4 and more, or NaN: again, with two multiplications a pair
        slabs = first_slabs(rows, scale_rows, live, left, AHEAD, layout)
        acc, top = swept(rows, scale_rows, live, left, slabs, tokens, BLOCK_N, SLABS, True, mma, layout)

    token = gl.arange(0, TOKENS, gl.SliceLayout(0, mma))[None, :]
    row = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))[:, None]
    if shares == 1:
        gl.store(out_ptr + token.to(gl.int64) * N + row, acc.to(gl.bfloat16), mask=(token < M) & (row < N))
    else:
        gl.store(parts_ptr + (share * TOKENS + token).to(gl.int64) * N + row, acc, mask=(token < M) & (row < N))
        group_barrier()  # the thread that counts speaks for all
        if gl.atomic_add(arrivals_ptr + gl.program_id(0), 1) == shares - 1:
            flat: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
            m = gl.arange(0, TOKENS, gl.SliceLayout(1, flat))[:, None]
            c = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, flat))[None, :]
            inside = (m < M) & (c < N)
            total = gl.zeros([TOKENS, BLOCK_N], gl.float32, flat)
            for each in range(shares):
                total += gl.load(parts_ptr + (each * TOKENS + m).to(gl.int64) * N + c, mask=inside, other=0.0,
                                 cache_modifier=".cg")
            gl.store(out_ptr + m.to(gl.int64) * N + c, total.to(gl.bfloat16), mask=inside)
            gl.store(arrivals_ptr + gl.program_id(0), 0)  # for the next launch


@triton.jit
def code_values(codes, scale):
    # float32's exponent and mantissa from a code's, subnormal for 0.5; exact to the rounding of the scaled value.
    magnitude = ((codes & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
    return tl.where((codes & 8) != 0, -magnitude, magnitude) * scale


@triton.jit
def factor(value, FLOAT32: tl.constexpr):
    return value if FLOAT32 else value.to(tl.bfloat16)


@triton.jit(do_not_specialize=["M", "N", "blocks"])
def decode_plain_kernel(x_ptr, packed_ptr, scales_ptr, out_ptr, parts_ptr, arrivals_ptr, M, N, blocks,
                        BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, SHARE: tl.constexpr, FLOAT32: tl.constexpr):
    # x and out as the bits of bfloat16. FLOAT32: so the interpreter multiplies, which gets bfloat16 wrong.
    n = tl.program_id(0) * BLOCK_N
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    first = share * (SHARE // 32)
    row = n + tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    at = row.to(tl.int64) * blocks
    acc = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for begin in range(first, tl.minimum(blocks, first + SHARE // 32), 4):
        block = begin + tl.arange(0, 4)
        inside = (row < N)[:, None] & (block < blocks)[None, :]
        scales = scale_value(tl.load(scales_ptr + at[:, None] + block[None, :], mask=inside, other=127), None, "e8m0")
        byte = block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        packed = tl.load(packed_ptr + at[:, None, None] * 16 + byte, mask=inside[:, :, None], other=0).to(tl.int32)
        low = code_values(packed, scales[:, :, None])
        high = code_values(packed >> 4, scales[:, :, None])
        column = begin * 32 + tl.arange(0, 128)
        bits = tl.load(x_ptr + token[:, None] * (blocks * 32) + column[None, :],
                       mask=(token < M)[:, None] & (column // 32 < blocks)[None, :], other=0)
        if FLOAT32:
            x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            x = bits.to(tl.bfloat16, bitcast=True)
        even, odd = tl.split(x.reshape(TOKENS, 64, 2))
        acc = tl.dot(factor(low.reshape(BLOCK_N, 64), FLOAT32), even.T, acc, input_precision="ieee")
        acc = tl.dot(factor(high.reshape(BLOCK_N, 64), FLOAT32), odd.T, acc, input_precision="ieee")
    inside = (token < M)[:, None] & (row < N)[None, :]
    at = token.to(tl.int64)[:, None] * N + row[None, :]
    if shares == 1:
        tl.store(out_ptr + at, narrow(acc.T, not FLOAT32), mask=inside)
    else:
        size = TOKENS * tl.cast(N, tl.int64)
        tl.store(parts_ptr + share * size + at, acc.T, mask=inside)
        tl.debug_barrier()  # the thread that counts speaks for all
        if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1) == shares - 1:
            total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
            for each in range(shares):
                total += tl.load(parts_ptr + each * size + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, narrow(total, not FLOAT32), mask=inside)
            tl.store(arrivals_ptr + tl.program_id(0), 0)  # for the next launch
