"""Flash attention for Hopper in Gluon, Triton's lower-level language: warp groups with roles, barriers in sight.

One warp loads through descriptors, two warp groups of 64 query rows each compute. OVERLAP starts the next scores ahead
of this product with V, which then runs under the softmax; with PING_PONG the groups take turns at the tensor core, so
that one computes exponentials while the other multiplies. A program walks over items of work: with as many programs as
SMs (persistent) the loads of its next tile run ahead of this one's end. Source: FlashAttention-3, sections
3.1 and 3.2 (arXiv 2407.08608); Triton's Gluon tutorials.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# What TMA writes and wgmma reads: rows of 128 bytes, swizzled so that eight rows of 16 bytes lie in all banks.
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 has renamed it


@gluon.jit
def turned(index, phase, STAGES: gl.constexpr):
    # The next stage of the ring. A barrier's phase flips each time the ring comes round.
    index += 1
    if index == STAGES:
        index = 0
        phase ^= 1
    return index, phase


@gluon.jit
def tiles_of(item, row_blocks, CAUSAL: gl.constexpr):
    # An item of work: a tile or, under a causal mask, a long and a short tile of a head, so that all items are equal.
    # Returns the head, the first and the last row block, and how many tiles that is.
    if CAUSAL:
        pairs = (row_blocks + 1) // 2
        late = row_blocks - 1 - item % pairs
        early = item % pairs
        head = item // pairs
    else:
        late = item % row_blocks
        early = late
        head = item // row_blocks
    return head, late, early, 1 + (late != early).to(gl.int32)


@gluon.jit
def blocks_of(row, KEYS, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    # Blocks of keys that the tile from `row` on meets.
    last = KEYS
    if CAUSAL:
        last = gl.minimum(KEYS, row + BLOCK_M)
    return (last + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def load_tiles(q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, v_full, k_empty, v_empty,
               items, KEYS, row_blocks, heads, heads_per_kv, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr,
               BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    # The producer: Q of a tile, then K and V of each block, the last block first (it is the one that may need a mask).
    rows: gl.constexpr = q_desc.block_type.shape[2]
    stage = 0
    phase = 1  # a fresh barrier counts as past its phase 1: the first round finds every stage empty
    q_phase = 1
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, late, early, count = tiles_of(item, row_blocks, CAUSAL)
        batch = head // heads
        kv_head = head % heads // heads_per_kv
        for each in range(count):
            row = (late + each * (early - late)) * BLOCK_M
            blocks = blocks_of(row, KEYS, CAUSAL, BLOCK_M, BLOCK_N)
            mbarrier.wait(q_empty, q_phase)
            mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [batch, head % heads, row, 0], q_full, q_tiles.index(0))
            tma.async_copy_global_to_shared(q_desc, [batch, head % heads, row + rows, 0], q_full, q_tiles.index(1))
            q_phase ^= 1
            for block in range(blocks):
                at = [batch, kv_head, (blocks - 1 - block) * BLOCK_N, 0]
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(k_desc, at, k_full.index(stage), k_tiles.index(stage))
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(v_desc, at, v_full.index(stage), v_tiles.index(stage))
                stage, phase = turned(stage, phase, STAGES)


@gluon.jit
def attend(GROUP: gl.constexpr, o_desc, q_tiles, k_tiles, v_tiles, o_tiles, q_full, q_empty, k_full, v_full, k_empty,
           v_empty, turns, scale, items, KEYS, row_blocks, heads, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr,
           BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
           PING_PONG: gl.constexpr):
    # A consumer: 64 rows of Q against every block. `scale` holds log2(e): exponentials are powers of two.
    ROWS: gl.constexpr = o_desc.block_type.shape[2]
    D: gl.constexpr = o_desc.block_type.shape[3]
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, output, 2)  # as wgmma takes its first operand from registers
    q = q_tiles.index(GROUP).reshape([ROWS, D])
    none = gl.zeros([ROWS, BLOCK_N], gl.float32, scores)
    stage = 0
    phase = 0
    q_phase = 0
    turn = 0
    if PING_PONG and GROUP == 1:
        mbarrier.arrive(turns.index(0), count=1)  # group 0 begins
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        head, late, early, count = tiles_of(item, row_blocks, CAUSAL)
        for each in range(count):
            row = (late + each * (early - late)) * BLOCK_M
            blocks = blocks_of(row, KEYS, CAUSAL, BLOCK_M, BLOCK_N)
            row += GROUP * ROWS
            acc = gl.zeros([ROWS, D], gl.float32, output)
            mbarrier.wait(q_full, q_phase)
            mbarrier.wait(k_full.index(stage), phase)
            k = k_tiles.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
            s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            columns = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))[None, :]
            keep = columns < KEYS
            if CAUSAL:  # a block of keys is as long as the rows of both groups: only this block crosses the diagonal
                keep = keep & (columns <= row + gl.arange(0, ROWS, gl.SliceLayout(1, scores))[:, None])
            s = gl.where(keep, s, float("-inf"))
            top = gl.max(s, 1) * scale
            w = gl.exp2(s * scale - top[:, None])
            total = gl.sum(w, 1)
            p = gl.convert_layout(w.to(o_desc.dtype), weights)

            for _ in range(1, blocks):
                v = v_tiles.index(stage).reshape([BLOCK_N, D])
                v_stage = stage
                v_phase = phase
                stage, phase = turned(stage, phase, STAGES)
                mbarrier.wait(k_full.index(stage), phase)
                if PING_PONG:
                    mbarrier.wait(turns.index(GROUP), turn)
                k = k_tiles.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
                if OVERLAP:
                    s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    acc = warpgroup_mma(p, v, acc, is_async=True)
                else:
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    acc = warpgroup_mma(p, v, acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    mbarrier.arrive(v_empty.index(v_stage), count=1)
                    s = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                if PING_PONG:
                    mbarrier.arrive(turns.index(1 - GROUP), count=1)
                    turn ^= 1
                s = warpgroup_mma_wait(1 if OVERLAP else 0, [s])  # with OVERLAP the product with V runs on
                mbarrier.arrive(k_empty.index(stage), count=1)
                higher = gl.maximum(top, gl.max(s, 1) * scale)
                shrink = gl.exp2(top - higher)
                w = gl.exp2(s * scale - higher[:, None])
                total = total * shrink + gl.sum(w, 1)
                top = higher
                if OVERLAP:
                    acc = warpgroup_mma_wait(0, [acc])
                    mbarrier.arrive(v_empty.index(v_stage), count=1)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, output))[:, None]
                p = gl.convert_layout(w.to(o_desc.dtype), weights)

            mbarrier.arrive(q_empty, count=1)
            q_phase ^= 1
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(p, v_tiles.index(stage).reshape([BLOCK_N, D]), acc)
            mbarrier.arrive(v_empty.index(stage), count=1)
            stage, phase = turned(stage, phase, STAGES)
            acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, output))[:, None]
            tma.store_wait(0)  # of the last tile: it has left this group's staging space
            group_barrier()  # the thread that waited speaks for the group
            o_tiles.index(GROUP).reshape([ROWS, D]).store(acc.to(o_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [head // heads, head % heads, row, 0], o_tiles.index(GROUP))
    tma.store_wait(0)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(made.index(index), count=ARRIVALS)
    return made


# Lengths are not specialised: a new prompt length must not compile a new kernel.
@gluon.jit(do_not_specialize=["items", "KEYS", "row_blocks", "heads", "heads_per_kv"])
def attention_hopper_kernel(q_desc, k_desc, v_desc, o_desc, scale, items, KEYS, row_blocks, heads, heads_per_kv,
                            CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                            OVERLAP: gl.constexpr, PING_PONG: gl.constexpr):
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    o_tiles = gl.allocate_shared_memory(o_desc.dtype, [2] + o_desc.block_type.shape, o_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    q_full = barriers(1, 1).index(0)
    q_empty = barriers(1, 2).index(0)  # 2: both groups have read it
    k_full = barriers(STAGES, 1)
    v_full = barriers(STAGES, 1)
    k_empty = barriers(STAGES, 2)
    v_empty = barriers(STAGES, 2)
    turns = barriers(2, 1)
    fence_async_shared()  # the copy engine sees the barriers initialised

    gl.warp_specialize([
        (attend, (0, o_desc, q_tiles, k_tiles, v_tiles, o_tiles, q_full, q_empty, k_full, v_full, k_empty, v_empty,
                  turns, scale, items, KEYS, row_blocks, heads, CAUSAL, BLOCK_M, BLOCK_N, STAGES, OVERLAP, PING_PONG)),
        (attend, (1, o_desc, q_tiles, k_tiles, v_tiles, o_tiles, q_full, q_empty, k_full, v_full, k_empty, v_empty,
                  turns, scale, items, KEYS, row_blocks, heads, CAUSAL, BLOCK_M, BLOCK_N, STAGES, OVERLAP, PING_PONG)),
        (load_tiles, (q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, v_full, k_empty,
                      v_empty, items, KEYS, row_blocks, heads, heads_per_kv, CAUSAL, BLOCK_M, BLOCK_N, STAGES)),
    ], [4, 1], [240, 24])  # warps, and registers a thread, of the second group and of the producer
