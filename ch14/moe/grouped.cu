// One product per expert in one launch: C (tokens x N) = A B[expert]^T, where the tokens of an expert are neighbouring
// rows of A (tokens x K), and B is (experts x N x K). A and B are fp8 e4m3 with scales, as in ch14/fp8_gemm/fp8.cu: that
// file says why a consumer sums in two levels, and has the ring, the promotion and the epilogue. Only this is new:
//
//     - The CTAs stay, and number the tiles of all experts from offsets in global memory (schedule.cuh). The host needs
//       to know nothing, and the kernel can be captured in a CUDA graph.
//     - The tensor map of B has three dimensions. The last coordinate is the expert.
//     - A group may begin in any row and have any number of rows. Its last tile also holds rows of the next group. They
//       are multiplied and not stored: TMA stores a tile that is whole, threads store the first rows of another one. A
//       consumer whose 64 rows all lie past the group's end multiplies nothing.
//     - A tile has up to 192 columns. It leaves registers for one scratch per consumer, so the tensor core multiplies for
//       another consumer while one adds its scratch to its sums. Per product, wide tiles load fewer bytes.
//     - A consumer finds its next tile and loads the tile's first scales of B before it stores the tile that it has.
//
// The macros, set with -D (TiledConfig.constants in native.py):
//   BLOCK_N    columns of a tile, a multiple of 16 up to 160, or 192
//   CONSUMERS  warp groups that multiply, 1 to 3, with 64 rows of the tile each
//   STAGES     stages of the ring
//   GROUP_M    rows of tiles in a band of a group's raster (tile_coordinates)
#include "schedule.cuh"
#include "wgmma_widths.cuh"

constexpr int BLOCK = 128;  // a scale of B covers BLOCK x BLOCK; a stage holds BLOCK columns of K
constexpr int ROWS = 64, BLOCK_M = ROWS * CONSUMERS, SUMS = BLOCK_N / 2;  // sums per thread: ROWS x BLOCK_N / 128
constexpr u32 A_BYTES = BLOCK_M * BLOCK, STAGE_BYTES = A_BYTES + BLOCK_N * BLOCK, SCALE_BYTES = 4 * BLOCK_M;
// C is staged in parts as wide as BLOCK_N allows, up to 128 bytes, so that no store reaches into the next tile.
constexpr int PART = BLOCK_N % 64 == 0 ? 64 : BLOCK_N % 32 == 0 ? 32 : 16;
constexpr u32 LINE_BYTES = 2 * PART, PART_BYTES = ROWS * LINE_BYTES, STAGED_BYTES = BLOCK_M * BLOCK_N * 2;
constexpr bool HAS_TWO_SCALES = BLOCK % BLOCK_N != 0;  // then a tile reaches into two blocks of columns
static_assert(BLOCK_N <= BLOCK || BLOCK % (BLOCK_N - BLOCK) == 0, "a tile reaches into two blocks at most");

// The ring, the staged C, scales, barriers and the list of groups.
extern __shared__ __align__(1024) char shared[];

// The producer's thread fills the ring for one tile.
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& scale_a_map,
                                        const Memory& memory, Ring<STAGES>& state, const GroupTile& tile, int steps) {
    for (int step = 0; step < steps; ++step, state.advance()) {
        // On a new barrier a wait for the other phase returns at once: all stages start empty.
        mbarrier_wait(memory.empty + 8 * state.stage, state.phase ^ 1);
        const u32 a = memory.ring + state.stage * STAGE_BYTES, ready = memory.full + 8 * state.stage;
        mbarrier_arrive_expect_tx(ready, STAGE_BYTES + SCALE_BYTES);
        tma_load_2d(a, a_map, step * BLOCK, tile.row, ready);
        tma_load_3d(a + A_BYTES, b_map, step * BLOCK, tile.column, tile.expert, ready);
        tma_load_3d(memory.scales + state.stage * SCALE_BYTES, scale_a_map, tile.scale_row, step, tile.layer, ready);
    }
}

// The scales of B for a tile's left columns, and for those in the next block.
struct Scales {
    float left, right;
};

// Return the scales for step `first` + i in lane i. They are shared by shuffles, and loaded long before, because memory
// takes long. `scale_b` holds the scales of all experts: each expert has a row of `steps` per block of columns.
__device__ __forceinline__ Scales load_scales(const float* scale_b, const GroupTile& tile, int first, int steps,
                                              int N) {
    const int blocks = (N + BLOCK - 1) / BLOCK, block = min(tile.column, N - 1) / BLOCK;
    const float* source = scale_b + (static_cast<u64>(tile.expert) * blocks + block) * steps +
                          min(first + static_cast<int>(threadIdx.x % 32), steps - 1);
    return {__ldg(source), HAS_TWO_SCALES ? __ldg(source + (block + 1 < blocks ? steps : 0)) : 0};
}

// A consumer multiplies one tile. `scales` belong to its first 32 steps.
__device__ __forceinline__ void consume(float (&acc)[SUMS], const Memory& memory, Ring<STAGES>& state,
                                        const float* scale_b, const GroupTile& tile, Scales scales, int steps, int N,
                                        u32 warp) {
    const u32 consumer = warp / 4 - 1, own_row = consumer * ROWS + warp % 4 * 16 + threadIdx.x % 32 / 4;
    const int left_columns = BLOCK - tile.column % BLOCK;
    Scales next_scales = load_scales(scale_b, tile, 32, steps, N);
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = 0;
    // Both consumers often wait for the tensor core together, so what stands between two products takes its time away.
    // Unrolled, the compiler looks for the next stage, and prepares its products, while it adds the ones before.
#pragma unroll 8
    for (int step = 0; step < steps; ++step, state.advance()) {
        if (step % 32 == 0 && step > 0)
            scales = next_scales, next_scales = load_scales(scale_b, tile, step + 32, steps, N);
        mbarrier_wait(memory.full + 8 * state.stage, state.phase);
        const u32 a = memory.ring + state.stage * STAGE_BYTES;
        const u64 a_tile = wgmma_descriptor(a + consumer * ROWS * BLOCK), b_tile = wgmma_descriptor(a + A_BYTES);
        // This thread has sums of two rows, the second one eight below the first. It reads their scales before the
        // products begin, because these read shared memory all the time.
        const u32 scale_a = memory.scales + state.stage * SCALE_BYTES + 4 * own_row;
        const float upper = load_scale(scale_a), lower = load_scale(scale_a + 32);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK / 32; ++k) wgmma_any_e4m3<BLOCK_N>(sums, a_tile + 2 * k, b_tile + 2 * k, k > 0);
        wgmma_commit();
        const float left = __shfl_sync(~0u, scales.left, step % 32);
        const float right = HAS_TWO_SCALES ? __shfl_sync(~0u, scales.right, step % 32) : left;
        wgmma_wait<0>();
        warpgroup_fence_operand(sums);
        // One lane speaks for its warp: the lanes have read their scales before their common wgmma_wait.
        release(memory, state.stage);
#pragma unroll
        for (int begin = 0; begin < SUMS; begin += PART / 2) {
            const float scale = HAS_TWO_SCALES && 2 * begin >= left_columns ? right : left;
            const float upper_scale = upper * scale, lower_scale = lower * scale;
#pragma unroll
            for (int i = begin; i < begin + PART / 2; ++i) acc[i] += sums[i] * (i / 2 % 2 ? lower_scale : upper_scale);
        }
    }
}

// A consumer without rows of the group only says that it has read the stages.
__device__ __forceinline__ void pass_over(const Memory& memory, Ring<STAGES>& state, int steps) {
    for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(memory.full + 8 * state.stage, state.phase);
        __syncwarp();
        release(memory, state.stage);
    }
}

// Store one consumer's 64 rows of C from `row` on: those that belong to the group. Returns before TMA has read shared
// memory. `barrier` is a named barrier for the consumer's threads. One stmatrix_x4 stores 16 x 16 elements. Lane l passes
// the address of row l % 16, in the left half if l < 16, else in the right one:
//
//                  columns 0-7     columns 8-15
//     rows 0-7       matrix 0        matrix 2
//     rows 8-15      matrix 1        matrix 3
__device__ __forceinline__ void store_rows(const float (&acc)[SUMS], const TensorMap& c_map, unsigned short* c,
                                           u32 staged, const GroupTile& tile, int row, int N, u32 barrier) {
    const int thread = threadIdx.x % 128, own_row = thread / 32 * 16 + thread % 16, half = thread % 32 / 16;
    if (thread == 0) bulk_wait_read<0>();  // TMA has read the previous tile
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int j = 0; j < BLOCK_N; j += 16) {
        const float* v = acc + j / 2;
        const u32 offset = own_row * LINE_BYTES + (j % PART / 8 + half) * 16;
        stmatrix_x4(staged + j / PART * PART_BYTES + swizzle_offset(offset, LINE_BYTES), pack_bf16x2(v[0], v[1]),
                    pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7]));
    }
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
    if (row >= tile.begin && row + ROWS <= tile.end) {
        if (thread == 0)
            for (int j = 0; j < BLOCK_N; j += PART)
                tma_store_2d(c_map, staged + j / PART * PART_BYTES, tile.column + j, row);
        if (thread == 0) bulk_commit();
        return;
    }
    constexpr int UNITS = BLOCK_N / 8;  // of eight columns
    const char* source = shared + (staged - shared_address(shared));
#pragma unroll 1
    for (int i = thread; i < ROWS * UNITS; i += 128) {
        const int line = i / UNITS, j = i % UNITS * 8, own = row + line;
        if (own >= tile.begin && own < tile.end && tile.column + j < N)
            *reinterpret_cast<uint4*>(c + static_cast<u64>(own) * N + tile.column + j) =
                *reinterpret_cast<const uint4*>(source + j / PART * PART_BYTES +
                                                swizzle_offset(line * LINE_BYTES + j % PART * 2, LINE_BYTES));
    }
}

// `ends` has one number per expert, and `capacity` says what it means (list_groups). The list of groups is in shared
// memory behind the barriers.
extern "C" __global__ void __launch_bounds__(128 * (1 + CONSUMERS), 1)
    grouped_fp8(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap scale_a_map, const __grid_constant__ TensorMap c_map,
                unsigned short* c, const float* scale_b, const int* ends, int experts, int capacity, int rows, int N,
                int K) {
    const Memory memory = divide_memory(shared_address(shared), STAGES * STAGE_BYTES, STAGED_BYTES, SCALE_BYTES);
    Group* groups = reinterpret_cast<Group*>(shared + (memory.empty + 8 * STAGES - memory.ring));
    // The shuffle shows the compiler that all lanes have the same value, so it keeps addresses in uniform registers.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const int steps = K / BLOCK, tiles_n = (N + BLOCK_N - 1) / BLOCK_N;
    if (threadIdx.x == 0) {
        make_barriers(memory, 4 * CONSUMERS);  // one arrival per warp that reads a stage
        prefetch_tensormap(a_map), prefetch_tensormap(b_map);
        prefetch_tensormap(scale_a_map), prefetch_tensormap(c_map);
    }
    __syncwarp();
    griddepcontrol_wait();
    if (warp == 0) list_groups(groups, {ends, experts, capacity, rows, BLOCK_M, tiles_n, 4});
    __syncthreads();
    griddepcontrol_launch_dependents();

    int id = blockIdx.x;
    Walk walk = {groups};
    // A box of scale_a begins at a multiple of 16 bytes, and a tile therefore at a multiple of four rows.
    auto place = [&] { return place_tile<BLOCK_M, BLOCK_N, 4>(*walk.group, id, tiles_n, capacity); };
    Ring<STAGES> state;
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            for (; walk.find(id); id += gridDim.x) produce(a_map, b_map, scale_a_map, memory, state, place(), steps);
    } else {
        warpgroup_reg_alloc<consumer_registers(CONSUMERS, 1)>();
        const u32 consumer = warpgroup - 1, staged = memory.staged + consumer * ROWS * BLOCK_N * 2;
        float acc[SUMS];
        GroupTile next = {};
        Scales scales = {};
        auto find_next = [&] {
            if (!walk.find(id)) return false;
            next = place();
            scales = load_scales(scale_b, next, 0, steps, N);
            return true;
        };
        for (bool found = find_next(); found;) {
            const GroupTile tile = next;
            const int row = tile.row + consumer * ROWS;
            if (row < tile.end) consume(acc, memory, state, scale_b, tile, scales, steps, N, warp);
            else pass_over(memory, state, steps);
            id += gridDim.x;
            found = find_next();
            if (row < tile.end) store_rows(acc, c_map, c, staged, tile, row, N, warpgroup);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }
}
