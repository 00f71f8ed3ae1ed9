"""The fast kernel, for Hopper alone: flash attention in Gluon, where each warp group has one role.

Gluon is Triton's lower-level language. The kernel for every GPU with TMA is in `kernels`.

A walk through `attention_hopper_kernel`, which a CTA of nine warps runs (of 17 with four groups):

    warps 0-3 | attend, group 0 | wgmma: rows 0-63 of the tile of Q against each block of K and V
    warps 4-7 | attend, group 1 | wgmma: rows 64-127
    warp 8    | load_tiles      | TMA: the tile of Q, then its blocks of K and V

1. The kernel allocates the tiles and their mbarriers. A `full` barrier completes when TMA has written the bytes that
   the loading warp announced; an `empty` barrier completes when all groups have arrived, so TMA may write again.
2. All three roles go through the same items of work in the same order, and through the same ring of STAGES blocks.
   `RingState` counts along: which stage is next, and which phase of its barriers to wait for. `PartitionArgs` holds
   all that the roles share.
3. A group computes S = Q K^T, takes the exponentials with a running maximum, and adds P V to its accumulator. With
   OVERLAP it starts the next S before this P V, so the tensor core works while the group computes exponentials.
   With PING_PONG the groups take turns at the tensor core.
4. With as many programs as SMs (a persistent grid) the loading warp runs ahead into the next item of work.

For heads of 64 features, where the exponentials take as long as the products, there are four groups (BLOCK_M = 256),
which fill each other's gaps. Blocks of 64 keys leave each group the registers that it needs. JOINT gives a block of K
and of V the same barriers, which halves the waits and arrivals, and holds a block of K longer. With Q_STAGES = 2 TMA
loads the next tile of Q while this one is in use. Each group has its own barriers for Q, so it does not wait for the
other groups between two tiles.

Source: FlashAttention-3, sections 3.1 and 3.2 (arXiv 2407.08608); Triton's Gluon tutorials. This file does not import
annotations from __future__, because an aggregate needs the types of its fields and not their names.
"""

import sys

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

from ch14.attention.kernels import LOWEST

# TMA writes this layout and wgmma reads it. The swizzle moves the 16-byte pieces within rows of 128 bytes, so that the
# same piece of eight successive rows lies in eight different groups of banks.
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it


@aggregate
class RingState:
    """A stage of a ring, and the phase in which a wait on its barriers returns."""

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, stage, phase, STAGES):
        self.stage, self.phase, self.STAGES = stage, phase, gl.constexpr(STAGES)

    @gluon.jit
    def advance(self):
        stage = self.stage + 1
        phase = self.phase
        if stage == self.STAGES:  # a barrier's phase flips each time the ring comes round
            stage = 0
            phase ^= 1
        return RingState(stage, phase, self.STAGES)


def enter_scope(name, _semantic=None):
    """Begin a scope of a recording where Triton's profiler is loaded and records; else leave no instruction."""
    if profiler := sys.modules.get("triton.profiler.language"):
        profiler.enter_scope(name, _semantic=_semantic)


def exit_scope(name, _semantic=None):
    """End the scope."""
    if profiler := sys.modules.get("triton.profiler.language"):
        profiler.exit_scope(name, _semantic=_semantic)


# The compiler calls these two when it meets them.
enter_scope.__triton_builtin__ = exit_scope.__triton_builtin__ = True


@aggregate
class Buffers:
    """Tiles in shared memory with the barriers that say when a tile has arrived and when it may be overwritten.

    `NBYTES` is what a `full` barrier expects. With 0, or without `FREES`, the barriers are those of other tiles, whose
    buffers wait or arrive. `NAME` is for recordings.
    """

    NAME: gl.constexpr
    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NBYTES: gl.constexpr
    FREES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, NAME, tiles, full, empty, NBYTES, FREES):
        self.tiles, self.full, self.empty = tiles, full, empty
        self.NAME, self.NBYTES, self.FREES = map(gl.constexpr, (NAME, NBYTES, FREES))

    @gluon.jit
    def load(self, desc, origin, index, phase):
        # The loading warp: let TMA overwrite a tile as soon as all groups have read it.
        if self.NBYTES:
            enter_scope(f"wait {self.NAME} empty")
            mbarrier.wait(self.empty.index(index), phase)
            exit_scope(f"wait {self.NAME} empty")
        enter_scope(f"load {self.NAME}")
        if self.NBYTES:
            mbarrier.expect(self.full.index(index), self.NBYTES)
        tma.async_copy_global_to_shared(desc, origin, self.full.index(index), self.tiles.index(index))
        exit_scope(f"load {self.NAME}")

    @gluon.jit
    def wait(self, index, phase):
        # A group: wait until a tile has arrived.
        if self.NBYTES:
            enter_scope(f"wait {self.NAME} full")
            mbarrier.wait(self.full.index(index), phase)
            exit_scope(f"wait {self.NAME} full")

    @gluon.jit
    def free(self, index):
        # A group: say that it has read a tile.
        if self.FREES:
            mbarrier.arrive(self.empty.index(index), count=1)


@aggregate
class Problem:
    """The items of work, and how they are cut into tiles of BLOCK_M queries and blocks of BLOCK_N keys."""

    scale: gl.tensor
    items: gl.tensor
    KEYS: gl.tensor
    row_blocks: gl.tensor
    heads: gl.tensor
    heads_per_kv: gl.tensor
    paired: gl.tensor
    CAUSAL: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, items, lengths, paired, CAUSAL, BLOCK_M, BLOCK_N):
        self.scale, self.items, self.paired = scale, items, paired
        self.KEYS, self.row_blocks, self.heads, self.heads_per_kv = lengths
        self.CAUSAL, self.BLOCK_M, self.BLOCK_N = map(gl.constexpr, (CAUSAL, BLOCK_M, BLOCK_N))

    @gluon.jit
    def locate(self, item):
        # Return the head of an item of work, its first and its last row block, and the number of its tiles. Under a
        # causal mask a late tile meets more keys than an early one. If `paired`, an item is a pair of tiles of one
        # head: five row blocks make the items (4, 0), (3, 1) and (2). Else an item is one tile, those with the most
        # keys of all heads come first, and every second round of programs goes backwards. Three programs take the
        # items 0, 5, 6 and 1, 4, 7 and 2, 3, 8.
        count = gl.where(item < self.items, 1, 0)
        if self.CAUSAL:
            if self.paired != 0:
                pairs = (self.row_blocks + 1) // 2
                early = item % pairs
                late = self.row_blocks - 1 - early
                head = item // pairs
                count = gl.where(late != early, 2 * count, count)
            else:
                programs = gl.num_programs(0)
                place = item % programs
                turned = item // programs % 2 == 1
                item += gl.where(turned, programs - 1 - 2 * place, 0)
                count = gl.where(item < self.items, 1, 0)
                heads = self.items // self.row_blocks
                late = self.row_blocks - 1 - item // heads
                early = late
                head = item % heads
        else:
            late = item % self.row_blocks
            early = late
            head = item // self.row_blocks
        return head, late, early, count

    @gluon.jit
    def round_up(self):
        # Return the end of the items, so that all programs go through as many.
        programs = gl.num_programs(0)
        return (self.items + programs - 1) // programs * programs

    @gluon.jit
    def count_key_blocks(self, row, ROWS: gl.constexpr):
        # Return how many blocks of keys the rows from `row` on meet.
        last = self.KEYS
        if self.CAUSAL:
            last = gl.minimum(self.KEYS, row + ROWS)
        return (last + self.BLOCK_N - 1) // self.BLOCK_N


@aggregate
class PartitionArgs:
    """All that the roles share: the work, the descriptors, the tiles with their barriers, and how groups take turns."""

    problem: Problem
    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    queries: Buffers
    keys: Buffers
    values: Buffers
    o_tiles: gl.shared_memory_descriptor
    tensor_core_barriers: gl.shared_memory_descriptor
    OVERLAP: gl.constexpr
    PING_PONG: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, problem, descs, buffers, o_tiles, tensor_core_barriers, OVERLAP, PING_PONG):
        self.problem, self.o_tiles, self.tensor_core_barriers = problem, o_tiles, tensor_core_barriers
        self.q_desc, self.k_desc, self.v_desc, self.o_desc = descs
        self.queries, self.keys, self.values = buffers
        self.OVERLAP, self.PING_PONG = map(gl.constexpr, (OVERLAP, PING_PONG))


@gluon.jit
def load_tiles(args):
    # The role of the last warp. It loads the last block of keys first, because only that block may need a mask.
    problem = args.problem
    ROWS: gl.constexpr = args.q_desc.block_type.shape[2]
    GROUPS: gl.constexpr = problem.BLOCK_M // ROWS
    # On a new barrier a wait for phase 1 returns at once, so the first round finds every stage empty.
    state = RingState(gl.to_tensor(0), gl.to_tensor(1), args.keys.tiles.shape[0])
    q_state = RingState(gl.to_tensor(0), gl.to_tensor(1), args.queries.tiles.shape[0] // GROUPS)
    for item in range(gl.program_id(0), problem.round_up(), gl.num_programs(0)):
        head, late, early, count = problem.locate(item)
        batch = head // problem.heads
        q_head = head % problem.heads
        kv_head = q_head // problem.heads_per_kv
        for tile in range(count):
            row = (late + tile * (early - late)) * problem.BLOCK_M
            blocks = problem.count_key_blocks(row, problem.BLOCK_M)
            for group in gl.static_range(GROUPS):
                tile_of_q = q_state.stage * GROUPS + group
                args.queries.load(
                    args.q_desc, [batch, q_head, row + group * ROWS, 0], tile_of_q, q_state.phase
                )
            q_state = q_state.advance()
            for block in range(blocks):
                origin = [batch, kv_head, (blocks - 1 - block) * problem.BLOCK_N, 0]
                args.keys.load(args.k_desc, origin, state.stage, state.phase)
                args.values.load(args.v_desc, origin, state.stage, state.phase)
                state = state.advance()


@gluon.jit
def sum_per_lane(p):
    # Return (ROWS, 4) sums. Four lanes hold a row of wgmma's result, each two of every eight columns. Sums within a
    # lane need no shuffles, so the four are added only once, at the end.
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def attend(args, GROUP: gl.constexpr):
    # The role of a group of four warps: 64 rows of Q against every block. The hardware computes powers of two, so
    # `scale` holds log2(e).
    problem = args.problem
    keys = args.keys
    values = args.values
    scale = problem.scale
    o_desc = args.o_desc
    ROWS: gl.constexpr = o_desc.block_type.shape[2]
    D: gl.constexpr = o_desc.block_type.shape[3]
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    GROUPS: gl.constexpr = problem.BLOCK_M // ROWS
    NEXT: gl.constexpr = (GROUP + 1) % GROUPS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # wgmma takes P from registers in this layout.
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    state = RingState(gl.to_tensor(0), gl.to_tensor(0), keys.tiles.shape[0])
    q_state = RingState(gl.to_tensor(0), gl.to_tensor(0), args.queries.tiles.shape[0] // GROUPS)
    tensor_core_phase = 0
    if args.PING_PONG and NEXT == 0:
        mbarrier.arrive(args.tensor_core_barriers.index(0), count=1)  # group 0 begins
    for item in range(gl.program_id(0), problem.round_up(), gl.num_programs(0)):
        head, late, early, count = problem.locate(item)
        for tile in range(count):
            row = (late + tile * (early - late)) * problem.BLOCK_M
            blocks = problem.count_key_blocks(row, problem.BLOCK_M)
            row += GROUP * ROWS
            # The other groups meet blocks that this one does not.
            if problem.CAUSAL and problem.BLOCK_M > BLOCK_N:
                own_blocks = problem.count_key_blocks(row, ROWS)
                for _ in range(own_blocks, blocks):
                    keys.wait(state.stage, state.phase)
                    keys.free(state.stage)
                    values.wait(state.stage, state.phase)
                    values.free(state.stage)
                    if args.PING_PONG:
                        mbarrier.wait(args.tensor_core_barriers.index(GROUP), tensor_core_phase)
                        mbarrier.arrive(args.tensor_core_barriers.index(NEXT), count=1)
                        tensor_core_phase ^= 1
                    state = state.advance()
                blocks = own_blocks
            acc = gl.zeros([ROWS, D], gl.float32, o_layout)
            tile_of_q = q_state.stage * GROUPS + GROUP
            q = args.queries.tiles.index(tile_of_q).reshape([ROWS, D])
            args.queries.wait(tile_of_q, q_state.phase)
            keys.wait(state.stage, state.phase)
            k = keys.tiles.index(state.stage).reshape([BLOCK_N, D]).permute((1, 0))
            enter_scope("product k")
            s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            exit_scope("product k")
            keys.free(state.stage)
            columns = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))[None, :]
            keep = columns < problem.KEYS
            if problem.CAUSAL:  # ROWS divides BLOCK_N, so the diagonal crosses only this block
                keep = keep & (columns <= row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))[:, None])
            s = gl.where(keep, s, float("-inf"))
            row_max = gl.maximum(gl.max(s, 1) * scale, LOWEST)
            p_float = gl.exp2(s * scale - row_max[:, None])
            row_sum = sum_per_lane(p_float)
            p = gl.convert_layout(p_float.to(o_desc.dtype), p_layout)

            for _ in range(1, blocks):
                last = state
                v = values.tiles.index(last.stage).reshape([BLOCK_N, D])
                state = state.advance()
                keys.wait(state.stage, state.phase)
                if args.PING_PONG:
                    mbarrier.wait(args.tensor_core_barriers.index(GROUP), tensor_core_phase)
                k = keys.tiles.index(state.stage).reshape([BLOCK_N, D]).permute((1, 0))
                if args.OVERLAP:
                    enter_scope("product k")
                    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
                    values.wait(last.stage, last.phase)
                    enter_scope("product v")
                    acc = warpgroup_mma(p, v, acc, is_async=True)
                else:
                    values.wait(last.stage, last.phase)
                    enter_scope("product v")
                    acc = warpgroup_mma(p, v, acc, is_async=True)
                    acc = warpgroup_mma_wait(0, [acc])
                    exit_scope("product v")
                    values.free(last.stage)
                    enter_scope("product k")
                    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
                if args.PING_PONG:
                    mbarrier.arrive(args.tensor_core_barriers.index(NEXT), count=1)
                    tensor_core_phase ^= 1
                s = warpgroup_mma_wait(1 if args.OVERLAP else 0, [s])  # with OVERLAP P V is still running
                exit_scope("product k")
                keys.free(state.stage)
                new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
                rescale = gl.exp2(row_max - new_max)
                p_float = gl.exp2(s * scale - new_max[:, None])
                row_sum = (
                    row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
                )
                row_sum += sum_per_lane(p_float)
                row_max = new_max
                if args.OVERLAP:
                    acc = warpgroup_mma_wait(0, [acc])
                    exit_scope("product v")
                    values.free(last.stage)
                acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
                p = gl.convert_layout(p_float.to(o_desc.dtype), p_layout)

            args.queries.free(tile_of_q)
            q_state = q_state.advance()
            values.wait(state.stage, state.phase)
            enter_scope("product v")
            acc = warpgroup_mma(p, values.tiles.index(state.stage).reshape([BLOCK_N, D]), acc)
            exit_scope("product v")
            values.free(state.stage)
            state = state.advance()
            enter_scope("store")
            acc = acc * gl.convert_layout(1.0 / gl.sum(row_sum, 1), gl.SliceLayout(1, o_layout))[:, None]
            tma.store_wait(0)  # the store of the last tile has read this group's staging tile
            group_barrier()  # one thread issued that store and waited for it; now all threads may write
            o_tile = args.o_tiles.index(GROUP)
            o_tile.reshape([ROWS, D]).store(acc.to(o_desc.dtype))
            fence_async_shared()
            origin = [head // problem.heads, head % problem.heads, row, 0]
            tma.async_copy_shared_to_global(o_desc, origin, o_tile)
            exit_scope("store")
    tma.store_wait(0)


@gluon.jit
def allocate_tiles(desc, COUNT: gl.constexpr):
    # Return shared memory for COUNT tiles as `desc` moves them.
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    # Return COUNT new mbarriers. Each completes after ARRIVALS arrivals.
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(COUNT):
        mbarrier.init(barriers.index(index), count=ARRIVALS)
    return barriers


# Lengths are not specialised, so a new prompt length does not compile a new kernel.
@gluon.jit(do_not_specialize=["items", "KEYS", "row_blocks", "heads", "heads_per_kv", "paired"])
def attention_hopper_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    scale,
    items,
    KEYS,
    row_blocks,
    heads,
    heads_per_kv,
    paired,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    PING_PONG: gl.constexpr,
    JOINT: gl.constexpr,
):
    GROUPS: gl.constexpr = BLOCK_M // q_desc.block_type.shape[2]
    NBYTES: gl.constexpr = k_desc.block_type.nbytes
    q_tiles = allocate_tiles(q_desc, Q_STAGES * GROUPS)
    o_tiles = allocate_tiles(o_desc, GROUPS)
    k_tiles = allocate_tiles(k_desc, STAGES)
    v_tiles = allocate_tiles(v_desc, STAGES)
    q_full = allocate_barriers(Q_STAGES * GROUPS, 1)  # each group has its own rows of Q
    q_empty = allocate_barriers(Q_STAGES * GROUPS, 1)
    k_full = allocate_barriers(STAGES, 1)
    k_empty = allocate_barriers(STAGES, GROUPS)  # every group reads each tile
    queries = Buffers("q", q_tiles, q_full, q_empty, q_desc.block_type.nbytes, True)
    if JOINT:  # one pair of barriers for a block of K and of V
        keys = Buffers("k", k_tiles, k_full, k_empty, 2 * NBYTES, False)
        values = Buffers("v", v_tiles, k_full, k_empty, 0, True)
    else:
        v_full = allocate_barriers(STAGES, 1)
        v_empty = allocate_barriers(STAGES, GROUPS)
        keys = Buffers("k", k_tiles, k_full, k_empty, NBYTES, True)
        values = Buffers("v", v_tiles, v_full, v_empty, NBYTES, True)
    tensor_core_barriers = q_full
    if PING_PONG:
        tensor_core_barriers = allocate_barriers(GROUPS, 1)
    fence_async_shared()  # without it TMA might not see the initialised barriers
    gdc_wait()  # this kernel may start before the one before it has ended
    gdc_launch_dependents()
    lengths = (KEYS, row_blocks, heads, heads_per_kv)
    problem = Problem(scale, items, lengths, paired, CAUSAL, BLOCK_M, BLOCK_N)
    descs = (q_desc, k_desc, v_desc, o_desc)
    args = PartitionArgs(
        problem, descs, (queries, keys, values), o_tiles, tensor_core_barriers, OVERLAP, PING_PONG
    )

    # The numbers are the warps, and the registers per thread, of the groups after the first and of the loading warp.
    if GROUPS == 2:
        gl.warp_specialize(
            [(attend, (args, 0)), (attend, (args, 1)), (load_tiles, (args,))], [4, 1], [240, 24]
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [(attend, (args, 0)), (attend, (args, 1)), (attend, (args, 2)), (load_tiles, (args,))],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (args, 0)),
                (attend, (args, 1)),
                (attend, (args, 2)),
                (attend, (args, 3)),
                (load_tiles, (args,)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
