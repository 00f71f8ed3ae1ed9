// One product per expert in one launch: C (tokens x N) = A B[expert]^T, where the tokens of an expert are neighbouring
// rows of A (tokens x K), and B is (experts x N x K). A and B are fp8 e4m3 with scales, as in ch14/fp8_gemm/fp8.cu. All
// of that kernel's parts serve here too: read it first. Only this is new:
//
//     - The CTAs stay, and number the tiles of all experts from offsets in global memory (schedule.cuh). The host needs
//       to know nothing, and the kernel can be captured in a CUDA graph.
//     - The tensor map of B has three dimensions. The last coordinate is the expert.
//     - A group may begin in any row and have any number of rows. Its last tile also holds rows of the next group. They
//       are multiplied and not stored: TMA stores a tile that is whole, threads store the first rows of another one. A
//       consumer whose 64 rows all lie past the group's end multiplies nothing.
//     - With CLUSTER, CTAs side by side in C load A together. They always belong to one group.
//
// The macros are those of fp8.cu, with SPLIT, BIAS, ACTIVATION and MX 0. GROUP_M counts within a group.
#include "../fp8_gemm/fp8.cu"
#include "schedule.cuh"

// The tile of C at (row, column). Its rows from `begin` to `end` - 1 belong to the group. Its scale_a begin at
// (scale_row, layer). A box begins at a multiple of 16 bytes, and a tile therefore at a multiple of four scales.
struct GroupTile {
    int row, column, expert, begin, end, scale_row, layer;
};

__device__ __forceinline__ GroupTile place_tile(const Group& group, int id, int tiles_n, int rank, int capacity) {
    const int first_row = group.align_begin(capacity, 4), tiles_m = (group.end - first_row + BLOCK_M - 1) / BLOCK_M;
    const Tile tile = place_in_group(id - group.first_tile, tiles_m, tiles_n, GROUP_M);
    const int row = first_row + tile.m * BLOCK_M;
    return {row,
            (tile.n * CLUSTER + rank) * BLOCK_N,
            group.index,
            group.begin,
            group.end,
            row - group.index * capacity,
            capacity ? group.index : 0};
}

// The producer's thread fills the ring for one tile.
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& scale_a_map,
                                        const Memory& memory, Ring<STAGES>& state, const GroupTile& tile, int steps,
                                        int rank) {
    for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(memory.empty + 8 * state.stage, state.phase ^ 1);
        const u32 a = memory.ring + state.stage * STAGE_BYTES, ready = memory.full + 8 * state.stage;
        mbarrier_arrive_expect_tx(ready, STAGE_BYTES + SCALE_BYTES);
        const int part = rank * (BLOCK_M / CLUSTER);  // the rows of A that this CTA loads
        if constexpr (CLUSTER == 1) tma_load_2d(a, a_map, step * BLOCK_K, tile.row, ready);
        else
            tma_load_2d_multicast(a + part * BLOCK_K, a_map, step * BLOCK_K, tile.row + part, ready,
                                  (1 << CLUSTER) - 1);
        tma_load_3d(a + A_BYTES, b_map, step * BLOCK_K, tile.column, tile.expert, ready);
        tma_load_3d(memory.scales + state.stage * SCALE_BYTES, scale_a_map, tile.scale_row, step, tile.layer, ready);
    }
}

// A consumer without rows of the group only says that it has read the stages.
__device__ __forceinline__ void pass_over(const Memory& memory, Ring<STAGES>& state, int steps) {
    for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(memory.full + 8 * state.stage, state.phase);
        __syncwarp();
        release(memory, state.stage, threadIdx.x % 32);
    }
}

// Store a staged subtile of ROW_COUNT rows at (row, column): those that belong to the group. `thread` is one of
// `threads`.
template <int ROW_COUNT>
__device__ __forceinline__ void store_subtile(const TensorMap& c_map, unsigned short* c, u32 staged,
                                              const GroupTile& tile, int row, int column, int N, int thread,
                                              int threads) {
    if (row < tile.begin || row + ROW_COUNT > tile.end) {
        constexpr int UNITS = LINE_BYTES / 16;  // of eight columns
        const char* source = shared + (staged - shared_address(shared));
#pragma unroll 1
        for (int i = thread; i < ROW_COUNT * UNITS; i += threads) {
            const int line = i / UNITS, own_row = row + line, own_column = column + i % UNITS * 8;
            if (own_row >= tile.begin && own_row < tile.end && own_column < N)
                *reinterpret_cast<uint4*>(c + static_cast<u64>(own_row) * N + own_column) =
                    *reinterpret_cast<const uint4*>(source + swizzle_offset(i * 16, LINE_BYTES));
        }
    } else if (thread == 0) tma_store_2d(c_map, staged, column, row);
}

// The consumers stage all columns of their rows at once, and for wide tiles need more memory than those of fp8.cu.
constexpr u32 PART_BYTES = ROWS * LINE_BYTES, ROWS_OF_C_BYTES = PART_BYTES * (BLOCK_N / SUBTILE_COLUMNS);
constexpr u32 EXTRA_BYTES =
    EPILOGUE_WARPS || CONSUMERS * ROWS_OF_C_BYTES <= STAGED_BYTES ? 0 : CONSUMERS * ROWS_OF_C_BYTES - STAGED_BYTES;

// Store one consumer's 64 rows of C from `row` on. Returns before TMA has read shared memory.
__device__ __forceinline__ void store_rows(const float (&acc)[SUMS], const TensorMap& c_map, unsigned short* c,
                                           u32 staged, const GroupTile& tile, int row, int N, u32 barrier) {
    constexpr int PARTS = BLOCK_N / SUBTILE_COLUMNS;
    const u32 thread = threadIdx.x % 128;
    if (thread == 0) bulk_wait_read<0>();  // TMA has read the previous tile
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 16)
        stage_bf16(acc + j / 2, staged + j / SUBTILE_COLUMNS * PART_BYTES, thread / 32 * 16, j % SUBTILE_COLUMNS);
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
#pragma unroll 1
    for (int part = 0; part < PARTS; ++part)
        store_subtile<ROWS>(c_map, c, staged + part * PART_BYTES, tile, row, tile.column + part * SUBTILE_COLUMNS, N,
                            thread, 128);
    if (thread == 0) bulk_commit();
}

// An epilogue warp stores the 16 rows of C from `row` on, whose sums lie in `slot`. Returns before TMA has read shared
// memory.
__device__ __forceinline__ void store_slot(const float4* slot, const TensorMap& c_map, unsigned short* c, u32 staged,
                                           u32& stored, const GroupTile& tile, int row, int N) {
    const u32 lane = threadIdx.x % 32;
    for (int part = 0; part < BLOCK_N / SUBTILE_COLUMNS; ++part) {
        const u32 buffer = staged + stored++ % BUFFERS * ROWS_BYTES;
        if (lane == 0) bulk_wait_read<BUFFERS - 1>();  // TMA has read the buffer's previous rows
        __syncwarp();
#pragma unroll
        for (int j = 0; j < SUBTILE_COLUMNS; j += 16) {
            const int group = (part * SUBTILE_COLUMNS + j) / 8;  // of eight columns
            const float4 left = slot[group * 32 + lane], right = slot[(group + 1) * 32 + lane];
            const float d[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
            stage_bf16(d, buffer, 0, j);
        }
        fence_proxy_async();
        __syncwarp();
        store_subtile<16>(c_map, c, buffer, tile, row, tile.column + part * SUBTILE_COLUMNS, N, lane, 32);
        if (lane == 0) bulk_commit();  // an empty group counts too, so that bulk_wait_read finds the right buffer
    }
}

// `ends` has one number per expert, and `capacity` says what it means (list_groups). The list of groups is in shared
// memory behind the barriers.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_fp8(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap scale_a_map, const __grid_constant__ TensorMap c_map,
                unsigned short* c, const float* scale_b, const int* ends, int experts, int capacity, int rows, int N,
                int K) {
    Memory memory = divide_memory();
    memory.scales += EXTRA_BYTES, memory.full += EXTRA_BYTES, memory.empty += EXTRA_BYTES;
    Group* groups = reinterpret_cast<Group*>(shared + (memory.full + BARRIER_BYTES - memory.ring));
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0, steps = K / BLOCK_K;
    const int tiles_n = (N + BLOCK_N * CLUSTER - 1) / (BLOCK_N * CLUSTER);
    if (threadIdx.x == 0) {
        make_barriers(memory);
        prefetch_tensormap(a_map), prefetch_tensormap(b_map);
        prefetch_tensormap(scale_a_map), prefetch_tensormap(c_map);
    }
    __syncwarp();
    griddepcontrol_wait();
    if (warp == 0) list_groups(groups, {ends, experts, capacity, rows, BLOCK_M, tiles_n, 4});
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();  // all barriers of the cluster are initialised
    griddepcontrol_launch_dependents();

    const int begin = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    Walk walk = {groups};
    Ring<STAGES> state;
    u32 stored = 0, slot_phase = 0;
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<FIRST_GROUP_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int id = begin; walk.find(id); id += stride)
                produce(a_map, b_map, scale_a_map, memory, state, place_tile(*walk.group, id, tiles_n, rank, capacity),
                        steps, rank);
        } else if (warp >= 1 && warp <= EPILOGUE_WARPS) {
            const u32 staged = memory.staged + (warp - 1) * BUFFERS * ROWS_BYTES;
            for (int id = begin; walk.find(id); id += stride, slot_phase ^= 1) {
                const GroupTile tile = place_tile(*walk.group, id, tiles_n, rank, capacity);
                for (u32 slot = warp - 1; slot < SLOTS; slot += EPILOGUE_WARPS) {
                    const int row = tile.row + slot * 16;
                    mbarrier_wait(memory.slot_full + 8 * slot, slot_phase);
                    if (row < tile.end)
                        store_slot(memory.slots + slot * SLOT_VECTORS, c_map, c, staged, stored, tile, row, N);
                    mbarrier_arrive(memory.slot_empty + 8 * slot);  // every lane says that it has read its part
                }
            }
            if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const u32 consumer = warpgroup - 1, staged = memory.staged + consumer * ROWS_OF_C_BYTES;
        const u64 scales_per_expert = static_cast<u64>((N + BLOCK - 1) / BLOCK) * steps;
        float acc[SUMS] = {};
        for (int id = begin; walk.find(id); id += stride, slot_phase ^= 1) {
            const GroupTile tile = place_tile(*walk.group, id, tiles_n, rank, capacity);
            const int row = tile.row + consumer * ROWS;
            if (row < tile.end)
                consume(acc, memory, state, scale_b + tile.expert * scales_per_expert,
                        {tile.row, min(tile.column, N - 1), 0, steps}, steps, N, warp);  // for the scales
            else pass_over(memory, state, steps);
            // A consumer without rows hands old sums over, which are not stored.
            if constexpr (EPILOGUE_WARPS) hand_over(acc, memory, 4 * consumer + warp % 4, slot_phase);
            else if (row < tile.end) store_rows(acc, c_map, c, staged, tile, row, N, warpgroup);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive(), cluster_wait();  // no CTA ends while another one may still load into it
    }
}
