"""Kernels of `decode`: MXFP4 weights are decoded where they are multiplied by a few bfloat16 tokens.

`decode_registers_kernel` (Gluon), step by step:

1. Each lane loads a block of 32 weights (16 bytes) and its scale, `AHEAD` - 1 slabs of 128 columns in advance.
2. The program looks at all scales of its tile. If one is large, the whole tile takes the slower way to decode.
3. The tokens of this share of K are staged in shared memory, once per program.
4. Per slab, a lane decodes its block with integer instructions, and mma.m16n8k16 takes the weights from the lane's own
   registers. Weights never pass through shared memory.
5. Each program stores its sums. The last program of a block of rows adds the shares and stores bfloat16.

`decode_plain_kernel` (Triton) does the same with tl.dot, for other GPUs and the interpreter. Sources: OCP MX v1.0, 5.3
and 5.4. PTX ISA, "mma.m16n8k16" (which lane holds which element) and "mul" (bf16x2, subnormals).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ch14.mx_formats.kernels import decode_fp4, decode_scale, to_bf16_bits

cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it

# Decode a word of eight codes, $8, to eight bf16 ($0 to $7), two codes at a time. A code is s e e m. One multiplication
# makes two shifted copies of it, and the mask keeps the sign of one and the magnitude of the other. The result is the
# value times 2^-126 (0.5 becomes a subnormal).
#
#     bit       15  14 ... 9   8 7 6   5 ... 0
#     bf16       s  0  ... 0   e e m   0 ... 0
#
# Codes 0 and 4 lie 16 bits apart in $8 and become the pair $0, $1. Codes 1 and 5 become $2, $3, and so on. Both halves
# of the factor $9 are 2^126 times the scale, and the product is exact.
_STEPS = """
    and.b32 t, {source}, {mask};
    mul.lo.u32 t, t, {copies};
    and.b32 t, t, 0x81C081C0;
    {unscale}
    mul.rn.bf16x2 t, t, $9;
    mov.b32 {{${low}, ${high}}}, t;"""


def _decode_ptx(unscale: str) -> str:
    even, odd = ("0x000F000F", "0x00001040"), ("0x00F000F0", "0x00000104")
    steps = [
        _STEPS.format(
            source=source, mask=mask, copies=copies, unscale=unscale, low=2 * pair, high=2 * pair + 1
        )
        for pair, (source, (mask, copies)) in enumerate((("$8", even), ("$8", odd), ("u", even), ("u", odd)))
    ]
    return "{\n    .reg .b32 t, u;\n    shr.u32 u, $8, 8;" + "".join(steps) + "\n}"


DECODE = gl.constexpr(_decode_ptx(""))
# Multiply by 2^126 and by the scale separately.
DECODE_WIDE = gl.constexpr(_decode_ptx("mul.rn.bf16x2 t, t, $10;"))
FENCE = gl.constexpr("bar.warp.sync 0xffffffff;\n    mov.b32 $0, 0;")  # ptxas moves no load past it.
SLAB = gl.constexpr(128)  # Columns of W per step, which are 64 bytes of each row.


@gluon.constexpr_function
def power_bases(first, end, rank, dim):
    """Return the bases first, 2 first, 4 first, ... below `end` of a linear layout, along dimension `dim`."""
    bases = []
    while first < end:
        bases.append([first if axis == dim else 0 for axis in range(rank)])
        first *= 2
    return bases


@gluon.constexpr_function
def slab_layout(rows, warps):
    # The codes of a slab are rows x 4 blocks x 4 words. mma's A operand wants them in these lanes. A lane holds all
    # four words of its block, and in further registers the block of row + 8.
    #
    #     lane       0   1   2   3     4  ...  31
    #     row        0   0   0   0     1  ...   7
    #     block      0   1   2   3     0  ...   3
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]] + power_bases(16 * warps, rows, 3, 0),
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        power_bases(16, 16 * warps, 3, 0),
        [],
        [rows, 4, 4],
    )


@gluon.constexpr_function
def tokens_layout(tokens, warps):
    # Tokens x 32 columns of a plane. Lane l holds token l / 4 (a column of mma's B operand) and the eight columns,
    # 16 bytes, that its eight halfwords of W multiply. All warps hold the same tokens.
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]] + power_bases(8, tokens, 2, 0),
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[0, 0]] * len(power_bases(1, warps, 1, 0)),
        [],
        [tokens, 32],
    )


@gluon.jit
def load_slab(words, scales, ahead: gl.constexpr, block, blocks_left):
    # Codes past K keep whatever the registers held: their scale is 1 and the tokens there are 0.
    inside = block + ahead * 4 < blocks_left
    scale = gl.load(scales + ahead * 4, mask=inside, other=127)
    codes = gl.load(words + ahead * 16, mask=inside[:, :, None])
    return codes, scale.to(gl.int32)


@gluon.jit
def decode_slab(codes, scales, WIDE: gl.constexpr):
    # Return four planes of bf16, each [rows, 4 blocks, 8 halfwords]: the four pairs that each word holds.
    kinds: gl.constexpr = (gl.bfloat16,) * 8
    # Scale 0 is 2^-127, a subnormal, and 255 is NaN: as bf16 both have bit 6, which no other scale has.
    if WIDE:
        bits = scales * 0x00800080 + gl.where((scales == 0) | (scales == 255), 0x00400040, 0)
        pairs, _ = gl.broadcast(bits[:, :, None], codes)
        unscale = gl.full(pairs.shape, 0x7E807E80, gl.int32, pairs.type.layout)
        c = gl.inline_asm_elementwise(
            DECODE_WIDE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [codes, pairs, unscale], kinds, True, 1
        )
    else:
        pairs, _ = gl.broadcast((scales * 0x00800080 + 0x3F003F00)[:, :, None], codes)
        c = gl.inline_asm_elementwise(DECODE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [codes, pairs], kinds, True, 1)
    return gl.join(c[0], c[1]), gl.join(c[2], c[3]), gl.join(c[4], c[5]), gl.join(c[6], c[7])


@gluon.jit
def multiply_plane(acc, codes, plane, mma: gl.constexpr):
    # A sum over K may take its terms in any order. Halfword 8c + 4h + 2p + e becomes column 16h + 8p + 2c + e, because
    # mma expects that column in lane c, which holds the halfword. The tokens are permuted likewise, so nothing moves.
    ROWS: gl.constexpr = codes.shape[0]
    TOKENS: gl.constexpr = plane.shape[0]
    a = codes.reshape([ROWS, 4, 2, 2, 2]).permute([0, 2, 3, 1, 4]).reshape([ROWS, 32])
    b = plane.load(tokens_layout(TOKENS, gl.num_warps()))
    b = b.reshape([TOKENS, 4, 2, 2, 2]).permute([2, 3, 1, 4, 0]).reshape([32, TOKENS])
    return mma_v2(
        gl.convert_layout(a, gl.DotOperandLayout(0, mma, 2)),
        gl.convert_layout(b, gl.DotOperandLayout(1, mma, 2)),
        acc,
    )


@gluon.jit
def multiply_share(
    words,
    scale_bytes,
    block,
    blocks_left,
    slabs,
    tokens,
    BLOCK_N: gl.constexpr,
    SLABS: gl.constexpr,
    WIDE: gl.constexpr,
    mma: gl.constexpr,
):
    # Return the sums over this share of K. After a slab is decoded, its registers receive a later one. Each product
    # waits for the one before it that adds to the same sums. A warp with 16 rows and 8 tokens has only one tile of
    # sums, so it adds every second product to a second tile.
    TOKENS: gl.constexpr = tokens.shape[1]
    SECOND_SUM: gl.constexpr = BLOCK_N == 16 * gl.num_warps() and TOKENS == 8
    acc = gl.zeros([BLOCK_N, TOKENS], gl.float32, mma)
    other = gl.zeros([BLOCK_N, TOKENS], gl.float32, mma)
    AHEAD: gl.constexpr = len(slabs) + 1  # the loop is unrolled that often, so each slab keeps its registers
    for slab in range(0, gl.cdiv(blocks_left, 4), AHEAD):
        for ahead in gl.static_range(AHEAD):
            slabs = slabs + (load_slab(words, scale_bytes, AHEAD - 1 + ahead, block, blocks_left),)
            # Without the fence ptxas moves the load to the end, because nothing in this iteration uses it.
            gl.inline_asm_elementwise(FENCE, "=r", [], gl.int32, False, 1)
            codes, scales = slabs[0]
            slabs = slabs[1:]
            planes = decode_slab(codes, scales, WIDE)
            for plane in gl.static_range(4):
                x = tokens.index(plane * SLABS + slab + ahead)
                if SECOND_SUM and plane % 2:
                    other = multiply_plane(other, planes[plane], x, mma)
                else:
                    acc = multiply_plane(acc, planes[plane], x, mma)
        words += 16 * AHEAD
        scale_bytes += 4 * AHEAD
        block += 4 * AHEAD
    return acc + other if SECOND_SUM else acc


@gluon.jit
def load_all_scales(
    scales_ptr,
    n,
    N,
    first,
    blocks,
    blocks_left,
    BLOCK_N: gl.constexpr,
    SHARE: gl.constexpr,
    PER_LOAD: gl.constexpr,
):
    # Return the scales of the program's tile as int32, each with PER_LOAD (4 or 1) scales. Four need a K that is a
    # multiple of 128, so that no word crosses two rows.
    LOADS: gl.constexpr = SHARE // (32 * PER_LOAD)  # per row
    index = gl.arange(0, BLOCK_N * LOADS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = gl.minimum(n + index // LOADS, N - 1)
    load = index % LOADS
    if PER_LOAD == 4:
        scales_ptr = scales_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    scales = gl.load(
        scales_ptr + row.to(gl.int64) * (blocks // PER_LOAD) + (first // PER_LOAD + load),
        mask=load * PER_LOAD < blocks_left,
        other=0,
    )
    return scales.to(gl.int32)


@gluon.jit
def mark_wide_scales(words):
    # A scale of more than 128 times 2^126 is too large for bf16. For such a byte the result has bit 7 set: the byte has
    # it, and adding 127 to its other seven bits carries.
    return ((words & 0x7F7F7F7F) + 0x7F7F7F7F) & words & -0x7F7F7F80


@gluon.jit
def load_first_slabs(words, scale_bytes, block, blocks_left, AHEAD: gl.constexpr):
    slabs = ()
    for slab in gl.static_range(AHEAD - 1):
        slabs = slabs + (load_slab(words, scale_bytes, slab, block, blocks_left),)
    return slabs


@gluon.jit
def store_plane(tokens, x, FIRST: gl.constexpr):
    # Store (tokens, columns) slab after slab, 64 bytes per token, so that eight lanes read 128 consecutive bytes.
    TOKENS: gl.constexpr = x.shape[0]
    slabs: gl.constexpr = x.shape[1] // 32
    x = x.reshape([TOKENS, slabs, 32]).permute([1, 0, 2]).reshape([slabs * TOKENS, 32])
    tokens.slice(FIRST * TOKENS, slabs * TOKENS).store(x)


@gluon.jit
def store_piece(tokens, x, FIRST: gl.constexpr, SLABS: gl.constexpr):
    TOKENS: gl.constexpr = x.shape[0]
    even, odd = gl.split(x.reshape([TOKENS, x.shape[1] // 4, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    store_plane(tokens, x0, FIRST)
    store_plane(tokens, x1, SLABS + FIRST)
    store_plane(tokens, x2, 2 * SLABS + FIRST)
    store_plane(tokens, x3, 3 * SLABS + FIRST)


@gluon.jit
def stage_tokens(tokens, x_ptr, M, first, blocks, TOKENS: gl.constexpr, SLABS: gl.constexpr):
    # Store this share of x in four planes. A halfword of W holds four codes, of columns 4i to 4i + 3, and plane p holds
    # the columns 4i + p: those that the p-th code of each halfword multiplies. All loads come before the first store,
    # so that the program waits for memory once.
    WARPS: gl.constexpr = gl.num_warps()
    PIECE: gl.constexpr = min(SLABS, WARPS)
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [8, 4], [1, WARPS], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
    pieces = ()
    for slab in gl.static_range(0, SLABS, PIECE):
        column = first * 32 + slab * SLAB + gl.arange(0, PIECE * SLAB, gl.SliceLayout(0, layout))[None, :]
        pieces = pieces + (
            gl.load(
                x_ptr + token * (blocks * 32) + column, mask=(token < M) & (column // 32 < blocks), other=0.0
            ),
        )
    for piece in gl.static_range(len(pieces)):
        store_piece(tokens, pieces[piece], piece * PIECE, SLABS)


@gluon.jit
def add_parts(parts, offset, shares, BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, mma: gl.constexpr):
    # Add the sums of all shares in their order, four per step: the loads of a step do not wait for each other.
    SIZE: gl.constexpr = BLOCK_N * TOKENS
    total = gl.zeros([BLOCK_N, TOKENS], gl.float32, mma)
    for share in range(0, shares, 4):
        loaded = ()
        for part in gl.static_range(4):
            left = (shares - share - part) * SIZE  # zero or less past the last share
            loaded = loaded + (
                gl.load(
                    parts + (share + part).to(gl.int64) * SIZE + offset,
                    mask=offset < left,
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
        for part in gl.static_range(4):
            total += loaded[part]
    return total


# Without specialisation another number of tokens needs no other compilation.
@gluon.jit(do_not_specialize=["M", "N", "blocks"])
def decode_registers_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    M,
    N,
    blocks,
    BLOCK_N: gl.constexpr,
    TOKENS: gl.constexpr,
    SHARE: gl.constexpr,
    AHEAD: gl.constexpr,
    SCALES_PER_LOAD: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    SLABS: gl.constexpr = SHARE // SLAB
    layout: gl.constexpr = slab_layout(BLOCK_N, WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = gl.program_id(0) * BLOCK_N
    share = gl.program_id(1)
    shares = gl.num_programs(1)
    # The grid's third dimension is groups of TOKENS tokens. They read the same weights at about the same time.
    group = gl.program_id(2)
    tile = gl.program_id(0) * gl.num_programs(2) + group
    M -= group * TOKENS
    x_ptr += group * TOKENS * blocks * 32
    out_ptr += (group * TOKENS).to(gl.int64) * N
    first = share * (SHARE // 32)
    blocks_left = gl.minimum(blocks - first, SHARE // 32)
    row = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None]
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    block_offset = gl.minimum(row, N - 1).to(gl.int64) * blocks + first + block
    scale_bytes = scales_ptr + block_offset
    words = weight_ptr + (block_offset[:, :, None] * 4 + word)
    slabs = load_first_slabs(words, scale_bytes, block, blocks_left, AHEAD)
    all_scales = load_all_scales(
        scales_ptr, n, N, first, blocks, blocks_left, BLOCK_N, SHARE, SCALES_PER_LOAD
    )
    wide = mark_wide_scales(all_scales)
    # The previous kernel of the stream may still write the tokens and use the work space, but not the weights. So the
    # first weights are on their way while it drains.
    gdc_wait()
    gdc_launch_dependents()
    tokens = gl.allocate_shared_memory(gl.bfloat16, [4 * SLABS, TOKENS, 32], plain)
    stage_tokens(
        tokens._reinterpret(gl.bfloat16, [4 * SLABS * TOKENS, 32], plain),
        x_ptr,
        M,
        first,
        blocks,
        TOKENS,
        SLABS,
    )
    cta_barrier()
    if gl.reduce_or(wide, 0) != 0:  # weights of 4 and more, or NaN: two multiplications per pair
        acc = multiply_share(words, scale_bytes, block, blocks_left, slabs, tokens, BLOCK_N, SLABS, True, mma)
    else:
        acc = multiply_share(
            words, scale_bytes, block, blocks_left, slabs, tokens, BLOCK_N, SLABS, False, mma
        )

    token = gl.arange(0, TOKENS, gl.SliceLayout(0, mma))[None, :]
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))[:, None]
    is_last = True
    if shares > 1:
        # The work space holds a tile of sums per program, and each thread reads again what the same thread of another
        # program stored. The lanes of a row store neighbouring groups of eight bytes.
        SIZE: gl.constexpr = BLOCK_N * TOKENS
        parts = parts_ptr + tile.to(gl.int64) * shares * SIZE
        offset = row * TOKENS + token
        gl.store(parts + share.to(gl.int64) * SIZE + offset, acc)
        cta_barrier()  # all parts are stored before one thread counts the arrival
        is_last = gl.atomic_add(arrivals_ptr + tile, 1) == shares - 1
        if is_last:
            acc = add_parts(parts, offset, shares, BLOCK_N, TOKENS, mma)
            gl.store(arrivals_ptr + tile, 0)  # for the next launch
    if is_last:
        inside = (token < M) & (n + row < N)
        gl.store(out_ptr + token.to(gl.int64) * N + (n + row), acc.to(gl.bfloat16), mask=inside)


@triton.jit
def dot_operand(value, FLOAT32: tl.constexpr):
    return value if FLOAT32 else value.to(tl.bfloat16)


@triton.jit(do_not_specialize=["M", "N", "blocks"])
def decode_plain_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    M,
    N,
    blocks,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARE: tl.constexpr,
    FLOAT32: tl.constexpr,
):
    # x and out are passed as the bits of bfloat16. The interpreter multiplies in float32 (FLOAT32), because
    # Triton's own gets products of bfloat16 wrong.
    n = tl.program_id(0) * BLOCK_N
    share = tl.program_id(1)
    shares = tl.num_programs(1)
    first = share * (SHARE // 32)
    row = n + tl.arange(0, BLOCK_N)
    token = tl.arange(0, TOKENS)
    row_block = row.to(tl.int64) * blocks
    acc = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for begin in range(first, tl.minimum(blocks, first + SHARE // 32), 4):
        block = begin + tl.arange(0, 4)
        inside = (row < N)[:, None] & (block < blocks)[None, :]
        scales = tl.load(scales_ptr + row_block[:, None] + block[None, :], mask=inside, other=127)
        scales = decode_scale(scales, None, "e8m0")
        byte = block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        codes = tl.load(weight_ptr + row_block[:, None, None] * 16 + byte, mask=inside[:, :, None], other=0)
        codes = codes.to(tl.int32)
        low = decode_fp4(codes) * scales[:, :, None]
        high = decode_fp4(codes >> 4) * scales[:, :, None]
        column = begin * 32 + tl.arange(0, 128)
        bits = tl.load(
            x_ptr + token[:, None] * (blocks * 32) + column[None, :],
            mask=(token < M)[:, None] & (column // 32 < blocks)[None, :],
            other=0,
        )
        if FLOAT32:
            x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            x = bits.to(tl.bfloat16, bitcast=True)
        even, odd = tl.split(x.reshape(TOKENS, 64, 2))
        acc = tl.dot(dot_operand(low.reshape(BLOCK_N, 64), FLOAT32), even.T, acc, input_precision="ieee")
        acc = tl.dot(dot_operand(high.reshape(BLOCK_N, 64), FLOAT32), odd.T, acc, input_precision="ieee")
    inside = (token < M)[:, None] & (row < N)[None, :]
    offset = token.to(tl.int64)[:, None] * N + row[None, :]
    if shares == 1:
        tl.store(out_ptr + offset, to_bf16_bits(acc.T, not FLOAT32), mask=inside)
    else:
        size = TOKENS * tl.cast(N, tl.int64)
        tl.store(parts_ptr + share * size + offset, acc.T, mask=inside)
        tl.debug_barrier()  # all parts are stored before one thread counts the arrival
        if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1) == shares - 1:
            total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
            for part in range(shares):
                total += tl.load(
                    parts_ptr + part * size + offset, mask=inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(out_ptr + offset, to_bf16_bits(total, not FLOAT32), mask=inside)
            tl.store(arrivals_ptr + tl.program_id(0), 0)  # for the next launch
