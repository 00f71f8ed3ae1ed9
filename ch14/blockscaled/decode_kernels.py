"""Kernels of `ch14.blockscaled.decode`: MXFP4 weights, decoded where they are multiplied by a few bfloat16 tokens.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ch14.attention.hopper_kernel import group_barrier
from ch14.mx_formats.dequantise_kernels import fp4_value, narrow, scale_value

# Eight codes, $8, to eight bf16: $0 and $1 are codes 0 and 4, $2 and $3 codes 1 and 5, ... A code's sign goes to bit 15
# and its magnitude, eem, to bits 8 to 6 by one multiplication, which makes two copies, and a mask. As bf16 that is the
# value times 2^-126, a subnormal for 0.5; $9, a pair of 2^126 times the scale, makes it whole, exactly.
_STEPS = """
    and.b32 t, {source}, {mask};
    mul.lo.u32 t, t, {copies};
    and.b32 t, t, 0x81C081C0;
    {unscale}
    mul.rn.bf16x2 t, t, $9;
    mov.b32 {{${low}, ${high}}}, t;"""


def _decode_ptx(unscale: str) -> str:
    even, odd = ("0x000F000F", "0x00001040"), ("0x00F000F0", "0x00000104")
    steps = [_STEPS.format(source=source, mask=mask, copies=copies, unscale=unscale, low=2 * out, high=2 * out + 1)
             for out, (source, (mask, copies)) in enumerate((("$8", even), ("$8", odd), ("u", even), ("u", odd)))]
    return "{\n    .reg .b32 t, u;\n    shr.u32 u, $8, 8;" + "".join(steps) + "\n}"


DECODE = gl.constexpr(_decode_ptx(""))
DECODE_WIDE = gl.constexpr(_decode_ptx("mul.rn.bf16x2 t, t, $10;"))  # 2^126 and the scale, one after the other
FENCE = gl.constexpr("bar.warp.sync 0xffffffff;\n    mov.b32 $0, 0;")  # no load moves past it
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
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]] + powers(16 * warps, rows, 3, 0),
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]], powers(16, 16 * warps, 3, 0), [], [rows, 4, 4])


@gluon.constexpr_function
def tokens_layout(tokens, warps):
    # mma's columns of B: lane / 4; a lane holds what its eight halfwords of W meet, 16 bytes. All warps hold the same.
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4]] + powers(8, tokens, 2, 0),
                                      [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[0, 0]] * len(powers(1, warps, 1, 0)),
                                      [], [tokens, 32])


@gluon.jit
def load_slab(words, scales, ahead: gl.constexpr, block, left):
    # Codes outside K keep what the registers held: their scale is 1 and the tokens are 0.
    inside = block + ahead * 4 < left
    found = gl.load(scales + ahead * 4, mask=inside, other=127)
    codes = gl.load(words + ahead * 16, mask=inside[:, :, None])
    return codes, found.to(gl.int32)


@gluon.jit
def decoded(codes, scales, WIDE: gl.constexpr):
    # The four pairs of bf16 of a word: [rows, 4 blocks, 8 halfwords] each.
    kinds: gl.constexpr = (gl.bfloat16,) * 8
    if WIDE:  # 0 is 2^-127, a subnormal; 255 is NaN: both have bit 6, which no other scale has
        bits = scales * 0x00800080 + gl.where((scales == 0) | (scales == 255), 0x00400040, 0)
        pairs, _ = gl.broadcast(bits[:, :, None], codes)
        unscale = gl.full(pairs.shape, 0x7E807E80, gl.int32, pairs.type.layout)
        c = gl.inline_asm_elementwise(DECODE_WIDE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [codes, pairs, unscale], kinds,
                                      True, 1)
    else:
        pairs, _ = gl.broadcast((scales * 0x00800080 + 0x3F003F00)[:, :, None], codes)
        c = gl.inline_asm_elementwise(DECODE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [codes, pairs], kinds, True, 1)
    return gl.join(c[0], c[1]), gl.join(c[2], c[3]), gl.join(c[4], c[5]), gl.join(c[6], c[7])


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
def swept(words, scale_bytes, block, left, slabs, tokens, BLOCK_N: gl.constexpr, SLABS: gl.constexpr,
          WIDE: gl.constexpr, mma: gl.constexpr, layout: gl.constexpr):
    # This share of K, and the largest scale in it. A slab is decoded, then its registers take one that comes later.
    TOKENS: gl.constexpr = tokens.shape[1]
    acc = gl.zeros([BLOCK_N, TOKENS], gl.float32, mma)
    top = gl.zeros([BLOCK_N, 4], gl.int32, gl.SliceLayout(2, layout))
    AHEAD: gl.constexpr = len(slabs) + 1  # so many turns at once, and every slab keeps its registers
    for slab in range(0, gl.cdiv(left, 4), AHEAD):
        for ahead in gl.static_range(AHEAD):
            slabs = slabs + (load_slab(words, scale_bytes, AHEAD - 1 + ahead, block, left),)
            # Without the fence ptxas asks for it last of all, since nothing in this turn of the loop uses it.
            gl.inline_asm_elementwise(FENCE, "=r", [], gl.int32, False, 1)
            codes, scales = slabs[0]
            slabs = slabs[1:]
            c0, c1, c2, c3 = decoded(codes, scales, WIDE)
            top = gl.maximum(top, scales)
            acc = product(acc, c0, tokens.index(slab + ahead), mma)
            acc = product(acc, c1, tokens.index(SLABS + slab + ahead), mma)
            acc = product(acc, c2, tokens.index(2 * SLABS + slab + ahead), mma)
            acc = product(acc, c3, tokens.index(3 * SLABS + slab + ahead), mma)
        words += 16 * AHEAD
        scale_bytes += 4 * AHEAD
        block += 4 * AHEAD
    return acc, gl.max(gl.max(top, 1), 0)


@gluon.jit
def first_slabs(words, scale_bytes, block, left, AHEAD: gl.constexpr):
    slabs = ()
    for slab in gl.static_range(AHEAD - 1):
        slabs = slabs + (load_slab(words, scale_bytes, slab, block, left),)
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
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    at = gl.minimum(row, N - 1).to(gl.int64) * blocks + first + block
    scale_bytes = scales_ptr + at
    words = packed_ptr + (at[:, :, None] * 4 + word)
    slabs = first_slabs(words, scale_bytes, block, left, AHEAD)  # on their way while the tokens are staged
    gdc_wait()  # weights are on their way while the kernel before drains; tokens and work space must be free of it
    gdc_launch_dependents()
    tokens = gl.allocate_shared_memory(gl.bfloat16, [4 * SLABS, TOKENS, 32], plain)
    stage_tokens(tokens._reinterpret(gl.bfloat16, [4 * SLABS * TOKENS, 32], plain), x_ptr, M, first, blocks, TOKENS,
                 SLABS)
    group_barrier()
    acc, top = swept(words, scale_bytes, block, left, slabs, tokens, BLOCK_N, SLABS, False, mma, layout)
    if top > NARROW_SCALES:  # weights of 4 and more, or NaN: again, with two multiplications a pair
        slabs = first_slabs(words, scale_bytes, block, left, AHEAD)
        acc, top = swept(words, scale_bytes, block, left, slabs, tokens, BLOCK_N, SLABS, True, mma, layout)

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
        low = fp4_value(packed) * scales[:, :, None]
        high = fp4_value(packed >> 4) * scales[:, :, None]
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
