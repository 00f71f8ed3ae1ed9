"""C = A B in CuTe DSL: layouts, partitions, barriers and warp roles by hand, with the library's words for each."""

import cutlass
from cutlass import BFloat16, Float32, cute, pipeline
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.utils import SmemAllocator

from ch14.languages.kernels.cute_host import partition


def multiply(
    mma, acc, a, b, stage, first=False
):  # the first product replaces the sums, which are not set yet
    warpgroup.fence()
    for k in range(a.shape[2]):
        if first:
            mma.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(mma, acc, a[None, None, k, stage], b[None, None, k, stage], acc)
    warpgroup.commit_group()


@cute.kernel
def gemm(mma, load_a, A, load_b, B, store_c, C, layouts, tile: cutlass.Constexpr):
    thread, warp_id = cute.arch.thread_idx()[0], cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem, (tile_m, tile_n, _) = SmemAllocator(), cute.arch.block_idx()
    a, b, c = (smem.allocate_tensor(BFloat16, each.outer, 1024, each.inner) for each in layouts)
    consumers, stages, nbytes = tile[0] // 64, cute.size(a, mode=[2]), (tile[0] + tile[1]) * tile[2] * 2
    one, warps = (pipeline.CooperativeGroup(pipeline.Agent.Thread, count) for count in (1, 4 * consumers))
    groups = {"producer_group": one, "consumer_group": warps}
    ring = pipeline.PipelineTmaAsync.create(num_stages=stages, tx_count=nbytes, **groups)
    a_tiles = cute.local_tile(A, (tile[0], tile[2]), (tile_m, None))
    b_tiles = cute.local_tile(B, (tile[1], tile[2]), (tile_n, None))
    if warp_id == 4 * consumers:
        a_to, a_from = partition(load_a, a, a_tiles)
        b_to, b_from = partition(load_b, b, b_tiles)
        producer = ring.make_producer()
        for step in cutlass.range(cute.size(a_tiles, mode=[2]), unroll=1):
            stage = producer.acquire_and_advance()
            cute.copy(load_a, a_from[None, step], a_to[None, stage.index], tma_bar_ptr=stage.barrier)
            cute.copy(load_b, b_from[None, step], b_to[None, stage.index], tma_bar_ptr=stage.barrier)
    else:
        share, user = mma.get_slice(thread), pipeline.PipelineUserType.Consumer
        a_part, b_part = mma.make_fragment_A(share.partition_A(a)), mma.make_fragment_B(share.partition_B(b))
        acc = cute.make_rmem_tensor(mma.partition_shape_C(tile[:2]), Float32)
        state, done = (pipeline.make_pipeline_state(user, stages) for _ in (0, 1))
        ring.consumer_wait(state)
        multiply(mma, acc, a_part, b_part, state.index, first=True)
        state.advance()
        for _step in cutlass.range(1, cute.size(a_tiles, mode=[2]), unroll=1):
            ring.consumer_wait(state)
            multiply(mma, acc, a_part, b_part, state.index)
            warpgroup.wait_group(1)  # the step before is done: its stage is free
            ring.consumer_release(done)
            done.advance()
            state.advance()
        warpgroup.wait_group(0)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), mma)
        part, rounded = copy.get_slice(thread), cute.make_rmem_tensor(acc.layout, BFloat16)
        rounded.store(acc.load().to(BFloat16))
        cute.copy(copy, part.retile(rounded), part.partition_D(c))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1, number_of_threads=128 * consumers)
        if warp_id == 0:
            cute.copy(store_c, *partition(store_c, c, cute.local_tile(C, tile[:2], (tile_m, tile_n))))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
