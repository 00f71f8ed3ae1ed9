// C = A B in CUDA C++: a producer fills a ring by TMA, and BLOCK_M / 64 consumers multiply and store 64 rows each.
#include "wgmma.cuh"
#include "gemm_tile.cuh"
constexpr int CONSUMERS = BLOCK_M / 64;
constexpr u32 A_BYTES = BLOCK_M * 128, STAGE_BYTES = A_BYTES + BLOCK_N * 128, ROWS_BYTES = 64 * BLOCK_N * 2;

extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         const __grid_constant__ TensorMap c_map, int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 stages = shared_address(memory), staged = stages + STAGES * STAGE_BYTES;
    const u32 full = staged + CONSUMERS * ROWS_BYTES, empty = full + 8 * STAGES;
    make_barriers<STAGES>(full, empty, 4 * CONSUMERS);
    const int tiles_m = (M + BLOCK_M - 1) / BLOCK_M, tiles_n = (N + BLOCK_N - 1) / BLOCK_N, steps = (K + 63) / 64;
    Ring<STAGES> state;
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x > 0) return;
        for (int id = blockIdx.x; id < tiles_m * tiles_n; id += gridDim.x) {
            const Tile tile = tile_coordinates(id, tiles_m, tiles_n, GROUP_M);
            for (int step = 0; step < steps; ++step, state.advance()) {
                const u32 a = stages + state.stage * STAGE_BYTES, barrier = full + 8 * state.stage;
                mbarrier_wait(empty + 8 * state.stage, state.phase ^ 1);
                mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
                tma_load_2d(a, a_map, step * 64, tile.m * BLOCK_M, barrier);
                tma_load_2d(a + A_BYTES, b_map, step * 64, tile.n * BLOCK_N, barrier);
            }
        }
    } else {
        warpgroup_reg_alloc<consumer_registers(CONSUMERS, 1)>();
        const int consumer = threadIdx.x / 128 - 1, leader = threadIdx.x % 128 == 0,
                  rows = staged + consumer * ROWS_BYTES;
        float d[BLOCK_N / 2];
        for (int id = blockIdx.x; id < tiles_m * tiles_n; id += gridDim.x) {
            const Tile tile = tile_coordinates(id, tiles_m, tiles_n, GROUP_M);
            u32 previous = empty;
            for (int step = 0; step < steps; ++step, state.advance()) {
                const u32 a = stages + state.stage * STAGE_BYTES;
                mbarrier_wait(full + 8 * state.stage, state.phase);
                wgmma_fence();
                multiply<BLOCK_N>(d, a + consumer * 64 * 128, a + A_BYTES, step > 0);
                wgmma_commit();
                wgmma_wait<1>();  // the products of the step before are done: its stage is free
                if (step > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(previous);
                previous = empty + 8 * state.stage;
            }
            wgmma_wait<0>();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(previous);
            if (leader) bulk_wait_read<0>();  // the rows of the tile before have left shared memory
            named_barrier_sync(1 + consumer, 128);
            for (int box = 0; box < BLOCK_N / 64; ++box) stage_sums(rows + box * 64 * 128, d + 32 * box);
            fence_proxy_async();
            named_barrier_sync(1 + consumer, 128);
            for (int n = 0; leader && n < BLOCK_N; n += 64)
                tma_store_2d(c_map, rows + n * 128, tile.n * BLOCK_N + n, tile.m * BLOCK_M + 64 * consumer);
            if (leader) bulk_commit();
        }
        if (leader) bulk_wait_read<0>();
    }
}
