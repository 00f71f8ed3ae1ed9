"""C = A B in Gluon: a producer warp loads by TMA, eight consumer warps multiply by wgmma, mbarriers join the two."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

group_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it


@gluon.jit
def play_role(PRODUCE: gl.constexpr, GROUP_M: gl.constexpr, K, a_desc, b_desc, c_desc, a, b, c, full, empty):
    STAGES: gl.constexpr = a.shape[0]
    BLOCK_M: gl.constexpr = c.shape[0]
    BLOCK_N: gl.constexpr = c.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    tiles_m, tiles_n = gl.cdiv(c_desc.shape[0], BLOCK_M), gl.cdiv(c_desc.shape[1], BLOCK_N)
    use = gl.to_tensor(0)  # of the ring: use number i is that of stage i % STAGES
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        first = tile // (GROUP_M * tiles_n) * GROUP_M  # GROUP_M rows of tiles sweep the columns together
        rows = gl.minimum(tiles_m - first, GROUP_M)
        m = (first + tile % (GROUP_M * tiles_n) % rows) * BLOCK_M
        n = tile % (GROUP_M * tiles_n) // rows * BLOCK_N
        if not PRODUCE:
            acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
        for k in range(0, K, a.shape[2]):
            stage, phase = use % STAGES, use // STAGES & 1
            use += 1
            if PRODUCE:
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.expect(full.index(stage), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(a_desc, [m, k], full.index(stage), a.index(stage))
                tma.async_copy_global_to_shared(b_desc, [n, k], full.index(stage), b.index(stage))
            else:
                mbarrier.wait(full.index(stage), phase)
                acc = hopper.warpgroup_mma(a.index(stage), b.index(stage).permute((1, 0)), acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(1, deps=[acc])  # the step before is done: its stage is free
                mbarrier.arrive(empty.index((use + STAGES - 2) % STAGES), count=1, pred=k > 0)
        if not PRODUCE:
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((use + STAGES - 1) % STAGES), count=1)
            tma.store_wait(0)  # the tile before has left shared memory
            c.store(acc.to(gl.bfloat16))
            hopper.fence_async_shared()
            group_barrier()
            tma.async_copy_shared_to_global(c_desc, [m, n], c)
    if not PRODUCE:
        tma.store_wait(0)


@gluon.jit
def gemm(a_desc, b_desc, c_desc, K, STAGES: gl.constexpr, GROUP_M: gl.constexpr):
    a = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    c = gl.allocate_shared_memory(gl.bfloat16, c_desc.block_type.shape, c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for barrier in gl.static_range(2 * STAGES):
        mbarrier.init((full if barrier < STAGES else empty).index(barrier % STAGES), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize([
        (play_role, (False, GROUP_M, K, a_desc, b_desc, c_desc, a, b, c, full, empty)),
        (play_role, (True, GROUP_M, K, a_desc, b_desc, c_desc, a, b, c, full, empty)),
    ], [1], [24])  # fmt: skip
