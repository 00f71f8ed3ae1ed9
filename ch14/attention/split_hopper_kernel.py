"""The split kernel for tiles of 128 rows on Hopper, where the products take longer than reading K and V.

`split_kernels` describes the rows, the splits and the parts, and `hopper_kernel` the roles: two warp groups multiply 64
rows each by every block, and a warp loads blocks of K and V by TMA. Here a program computes one tile and ends. The rows
of a tile come from several heads, so each group loads its own rows of Q while the first blocks are on their way.
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
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ch14.attention.hopper_kernel import (
    RingState,
    allocate_barriers,
    allocate_tiles,
    group_barrier,
    sum_per_lane,
)
from ch14.attention.kernels import LOWEST

ROWS = gl.constexpr(64)  # of a warp group
Q_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@aggregate
class Tile:
    """A program's tile: which rows, which blocks of keys, and where they are in shared memory."""

    batch: gl.tensor
    kv_head: gl.tensor
    first_row: gl.tensor
    begin: gl.tensor
    blocks: gl.tensor
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, first_row, begin, blocks, tiles, barriers):
        self.batch, self.kv_head, self.first_row, self.begin, self.blocks = (
            batch,
            kv_head,
            first_row,
            begin,
            blocks,
        )
        self.k_tiles, self.v_tiles = tiles
        self.k_full, self.k_empty, self.v_full, self.v_empty = barriers


@gluon.jit
def load_blocks(tile, k_desc, v_desc):
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    state = RingState(gl.to_tensor(0), gl.to_tensor(1), tile.k_tiles.shape[0])
    for block in range(tile.blocks):
        origin = [tile.batch, tile.kv_head, (tile.begin + tile.blocks - 1 - block) * BLOCK_N, 0]
        mbarrier.wait(tile.k_empty.index(state.stage), state.phase)
        mbarrier.expect(tile.k_full.index(state.stage), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            k_desc, origin, tile.k_full.index(state.stage), tile.k_tiles.index(state.stage)
        )
        mbarrier.wait(tile.v_empty.index(state.stage), state.phase)
        mbarrier.expect(tile.v_full.index(state.stage), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            v_desc, origin, tile.v_full.index(state.stage), tile.v_tiles.index(state.stage)
        )
        state = state.advance()


@gluon.jit
def locate_rows(row, tile, group, batch_stride, head_stride, query_stride):
    head = tile.kv_head * group + row % group
    return tile.batch * batch_stride + head * head_stride + row // group * query_stride


@gluon.jit
def attend_rows(
    tile,
    q_ptr,
    out_ptr,
    parts_ptr,
    q_tiles,
    strides,
    scale,
    KEYS,
    queries,
    group,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
):
    BLOCK_N: gl.constexpr = tile.k_tiles.shape[3]
    D: gl.constexpr = tile.k_tiles.shape[4]
    GROUPS: gl.constexpr = q_tiles.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16 bytes per thread
    q_batch, q_head, q_query, out_batch, out_head, out_query = strides
    row = tile.first_row + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    column = gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    keep_wide = (row // group < queries)[:, None]
    q_row = locate_rows(row, tile, group, q_batch, q_head, q_query)
    q = q_tiles.index(GROUP)
    q_pointers = gl.multiple_of(q_ptr + (q_row[:, None] + column), [16, 16])  # bytes, so that loads are wide
    q.store(gl.load(q_pointers, mask=keep_wide, other=0.0))
    fence_async_shared()
    group_barrier()  # all warps of the group have stored their rows
    out_row = locate_rows(row, tile, group, out_batch, out_head, out_query)
    first_row = tile.first_row + GROUP * ROWS
    row_query = (first_row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))) // group
    column_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))[None, :]
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    state = RingState(gl.to_tensor(0), gl.to_tensor(0), tile.k_tiles.shape[0])
    mbarrier.wait(tile.k_full.index(state.stage), state.phase)
    k = tile.k_tiles.index(state.stage).reshape([BLOCK_N, D]).permute((1, 0))
    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    mbarrier.arrive(tile.k_empty.index(state.stage), count=1)
    columns = (tile.begin + tile.blocks - 1) * BLOCK_N + column_n
    keep = columns < KEYS
    if CAUSAL:
        keep = keep & (columns <= row_query[:, None])
    s = gl.where(keep, s, float("-inf"))
    row_max = gl.maximum(gl.max(s, 1) * scale, LOWEST)
    p_float = gl.exp2(s * scale - row_max[:, None])
    row_sum = sum_per_lane(p_float)
    p = gl.convert_layout(p_float.to(out_ptr.dtype.element_ty), p_layout)
    for block in range(1, tile.blocks):
        last = state
        state = state.advance()
        mbarrier.wait(tile.k_full.index(state.stage), state.phase)
        k = tile.k_tiles.index(state.stage).reshape([BLOCK_N, D]).permute((1, 0))
        s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        mbarrier.wait(tile.v_full.index(last.stage), last.phase)
        acc = warpgroup_mma(p, tile.v_tiles.index(last.stage).reshape([BLOCK_N, D]), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s])  # P V is still running
        mbarrier.arrive(tile.k_empty.index(state.stage), count=1)
        if CAUSAL:  # rows of several heads cross the diagonal in one or two blocks
            columns = (tile.begin + tile.blocks - 1 - block) * BLOCK_N + column_n
            s = gl.where(columns <= row_query[:, None], s, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
        rescale = gl.exp2(row_max - new_max)
        p_float = gl.exp2(s * scale - new_max[:, None])
        row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        row_sum += sum_per_lane(p_float)
        row_max = new_max
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(tile.v_empty.index(last.stage), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        p = gl.convert_layout(p_float.to(out_ptr.dtype.element_ty), p_layout)
    mbarrier.wait(tile.v_full.index(state.stage), state.phase)
    acc = warpgroup_mma(p, tile.v_tiles.index(state.stage).reshape([BLOCK_N, D]), acc)
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
    if parts_ptr is None:
        acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_layout))[:, None]
        out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), wide)
        gl.store(gl.multiple_of(out_ptr + (out_row[:, None] + column), [16, 16]), out, mask=keep_wide)
    else:
        SIZE: gl.constexpr = GROUPS * ROWS * (D + 2)
        part = parts_ptr + gl.program_id(0).to(gl.int64) * SIZE
        row = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        keep = row_query < queries
        gl.store(part + GROUPS * ROWS * D + row, row_max, mask=keep)
        gl.store(part + GROUPS * ROWS * (D + 1) + row, total, mask=keep)
        row = GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
        keep = (tile.first_row + row) // group < queries
        offset = row[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
        gl.store(part + offset, acc, mask=keep[:, None])


@gluon.jit(
    do_not_specialize="KEYS kv_heads queries group row_blocks splits "
    "q_batch q_head q_query out_batch out_head out_query".split()
)
def attention_split_hopper_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    parts_ptr,
    scale,
    q_batch: gl.int64,
    q_head: gl.int64,
    q_query: gl.int64,
    out_batch: gl.int64,
    out_head: gl.int64,
    out_query: gl.int64,
    KEYS,
    kv_heads,
    queries,
    group,
    row_blocks,
    splits,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    D: gl.constexpr = k_desc.block_type.shape[3]
    GROUPS: gl.constexpr = BLOCK_M // ROWS
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [GROUPS, ROWS, D], Q_LAYOUT)
    tiles = (allocate_tiles(k_desc, STAGES), allocate_tiles(v_desc, STAGES))
    k_full = allocate_barriers(STAGES, 1)
    k_empty = allocate_barriers(STAGES, GROUPS)
    v_full = allocate_barriers(STAGES, 1)
    v_empty = allocate_barriers(STAGES, GROUPS)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    split = gl.program_id(0) % splits
    index = gl.program_id(0) // splits
    first_row = index % row_blocks * BLOCK_M
    end = KEYS
    if CAUSAL:
        end = gl.minimum(KEYS, (first_row + BLOCK_M - 1) // group + 1)
    all_blocks = (end + BLOCK_N - 1) // BLOCK_N
    begin = split * (all_blocks // splits) + gl.minimum(split, all_blocks % splits)
    # A split without keys meets one block that is hidden whole.
    blocks = gl.maximum(all_blocks // splits + gl.where(split < all_blocks % splits, 1, 0), 1)
    tile = Tile(
        index // row_blocks // kv_heads,
        index // row_blocks % kv_heads,
        first_row,
        begin,
        blocks,
        tiles,
        (k_full, k_empty, v_full, v_empty),
    )
    strides = (q_batch, q_head, q_query, out_batch, out_head, out_query)
    gl.warp_specialize(
        [
            (
                attend_rows,
                (tile, q_ptr, out_ptr, parts_ptr, q_tiles, strides, scale, KEYS, queries, group, CAUSAL, 0),
            ),
            (
                attend_rows,
                (tile, q_ptr, out_ptr, parts_ptr, q_tiles, strides, scale, KEYS, queries, group, CAUSAL, 1),
            ),
            (load_blocks, (tile, k_desc, v_desc)),
        ],
        [4, 1],
        [240, 24],
    )
