"""The split kernel for Hopper, in Gluon: it asks for its first keys and values before it waits for anything.

`split_kernels.attention_split_kernel` describes the tiles, the splits and the parts. Here a program of four warps
fills the 64 rows of wgmma, and TMA fills a ring of STAGES blocks of K and V. All loads of the first round are on their
way before the program waits for its queries.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from ch14.attention.hopper_kernel import allocate_barriers, allocate_tiles, group_barrier
from ch14.attention.kernels import LOWEST
from ch14.attention.split_kernels import SPLIT_LENGTHS

GROUP_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)


@gluon.jit
def load_block(k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, origin, stage):
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, origin, k_full.index(stage), k_tiles.index(stage))
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(v_desc, origin, v_full.index(stage), v_tiles.index(stage))


@gluon.jit(do_not_specialize=SPLIT_LENGTHS)
def attention_split_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    parts_ptr,
    scale,
    KEYS,
    kv_heads,
    queries,
    group,
    query_blocks,
    group_blocks,
    splits,
    CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    QUERIES: gl.constexpr = q_desc.block_type.shape[2]
    GROUP: gl.constexpr = q_desc.block_type.shape[3]
    D: gl.constexpr = q_desc.block_type.shape[4]
    ROWS: gl.constexpr = QUERIES * GROUP
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    if EARLY:
        gdc_launch_dependents()
    k_tiles = allocate_tiles(k_desc, STAGES)
    v_tiles = allocate_tiles(v_desc, STAGES)
    q_tile = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    k_full = allocate_barriers(STAGES, 1)
    v_full = allocate_barriers(STAGES, 1)
    q_full = allocate_barriers(1, 1)
    fence_async_shared()
    split = gl.program_id(0) % splits
    tile = gl.program_id(0) // splits
    first_head = tile % group_blocks * GROUP
    first_query = tile // group_blocks % query_blocks * QUERIES
    kv_head = tile // group_blocks // query_blocks % kv_heads
    batch = tile // group_blocks // query_blocks // kv_heads
    end = KEYS
    if CAUSAL:
        end = gl.minimum(KEYS, first_query + QUERIES)
    all_blocks = (end + BLOCK_N - 1) // BLOCK_N
    begin = split * (all_blocks // splits) + gl.minimum(split, all_blocks % splits)
    blocks = all_blocks // splits + gl.where(split < all_blocks % splits, 1, 0)
    for stage in gl.static_range(STAGES):
        if stage < blocks:
            origin = [batch, kv_head, (begin + stage) * BLOCK_N, 0]
            load_block(k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, origin, stage)
    mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        q_desc, [batch, kv_head, first_query, first_head, 0], q_full.index(0), q_tile
    )
    row = gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))[None, :]
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    row_max = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    q = q_tile.reshape([ROWS, D])
    mbarrier.wait(q_full.index(0), 0)
    stage = 0
    phase = 0
    for block in range(begin, begin + blocks):
        mbarrier.wait(k_full.index(stage), phase)
        k = k_tiles.index(stage).reshape([BLOCK_N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        columns = block * BLOCK_N + column
        keep = columns < KEYS
        if CAUSAL:
            keep = keep & (columns <= (first_query + row // GROUP)[:, None])
        s = gl.where(keep, s, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
        rescale = gl.exp2(row_max - new_max)
        p_float = gl.exp2(s * scale - new_max[:, None])
        row_sum = row_sum * rescale + gl.sum(p_float, 1)
        row_max = new_max
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(p_float.to(o_desc.dtype), p_layout)
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(p, v_tiles.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        group_barrier()  # all warps have read the tiles
        if block + STAGES < begin + blocks:
            origin = [batch, kv_head, (block + STAGES) * BLOCK_N, 0]
            load_block(k_desc, v_desc, k_tiles, v_tiles, k_full, v_full, origin, stage)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if parts_ptr is None:
        acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, o_layout))[:, None]
        q.store(acc.to(o_desc.dtype))
        fence_async_shared()
        group_barrier()
        tma.async_copy_shared_to_global(o_desc, [batch, kv_head, first_query, first_head, 0], q_tile)
        tma.store_wait(0)
    else:
        part = parts_ptr + gl.program_id(0).to(gl.int64) * (ROWS * (D + 2))
        keep = (first_query + row // GROUP < queries) & (first_head + row % GROUP < group)
        gl.store(part + ROWS * D + row, row_max, mask=keep)
        gl.store(part + ROWS * (D + 1) + row, row_sum, mask=keep)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
        keep = (first_query + row // GROUP < queries) & (first_head + row % GROUP < group)
        offset = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
        gl.store(part + offset, acc, mask=keep[:, None])
