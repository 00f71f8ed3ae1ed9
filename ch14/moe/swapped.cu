// The grouped product of grouped.cu with its operands swapped, in fp8 or bf16: C^T = B[expert] A^T. One instruction
// of the tensor core computes 64 rows and 8 to 256 columns, in steps of 8. An expert has few rows of A, so this kernel
// makes them the columns. The output columns are many, so they become the 64 rows.
//
//                     TOKENS rows of A
//                    +---------------+
//     BLOCK_W        | C transposed  |     CONSUMERS warp groups with FRAGMENTS x 64 output columns each
//     output columns |               |
//                    +---------------+
//
// A stage of the ring holds 128 bytes of K of the weights, and of the tile's rows of A. In fp8 these are one block of
// scales, and a consumer adds the block's product to its sums as in fp8.cu: a column of the accumulator has a scale_a
// of its own, and all 64 rows have one scale_b. In bf16 there are no scales, and products add up in the tensor core.
// The epilogue transposes PART rows of C at a time into shared memory. TMA stores them if all belong to the group;
// otherwise threads store those that do.
//
// With SWIGLU, B has gates in its rows before N and values in those from N on, and C is silu(gate) x value. A stage holds
// 64 rows of gates and 64 of values for each consumer. A thread has both for the same element of C, in its two fragments.
//
// The macros, set with -D (SwappedConfig.constants in native.py):
//   FP8        1: fp8 e4m3 with scales; 0: bf16
//   TOKENS     rows of A in a tile
//   CONSUMERS  warp groups that multiply, 1 or 2
//   FRAGMENTS  wgmma per consumer and 32 bytes of K, with 64 output columns each: 1 or 2
//   STAGES     stages of the ring
//   SWIGLU     0; 1: C is silu(gate) x value; 2: the same, as fp8 with a scale per 1 x 128 in `c_scales`
//   PARTS      parts in which a tile of C is stored
//   GROUP_M    rows of tiles in a band of a group's raster (tile_coordinates)
#include "schedule.cuh"
#include "wgmma_widths.cuh"

typedef unsigned char u8;

constexpr int BLOCK_K = FP8 ? 128 : 64;  // 128 bytes
constexpr int ROWS = 64 * FRAGMENTS, BLOCK_W = ROWS * CONSUMERS, SUMS = TOKENS / 2;
// Fragments that are left for the epilogue, and columns of C in a tile.
constexpr int OUT_FRAGMENTS = SWIGLU ? 1 : FRAGMENTS, OUT_ROWS = 64 * OUT_FRAGMENTS, COLUMNS = OUT_ROWS * CONSUMERS;
// Fragments that a consumer multiplies at a time in fp8, as its registers allow.
constexpr int SCRATCH = FRAGMENTS == 2 && TOKENS <= 80 ? 2 : 1;
constexpr u32 W_BYTES = BLOCK_W * 128, STAGE_BYTES = W_BYTES + TOKENS * 128, RING_BYTES = STAGES * STAGE_BYTES;
// A box of scale_a begins at a multiple of four rows, so it holds up to three scales of the rows before.
constexpr u32 SCALE_BYTES = FP8 ? 4 * (TOKENS + 4) : 0, SCALE_PITCH = (SCALE_BYTES + 127) / 128 * 128;
constexpr int PART = TOKENS / PARTS;
constexpr u32 BOX_BYTES = PART * 128, BUFFERS = PARTS > 1 ? 2 : 1;  // a box has PART rows and 64 columns of C
// Fp8 is staged in rows of 128 bytes, and behind them the largest magnitude of a row: of each warp's part, and of all.
constexpr u32 STAGED_BYTES = SWIGLU == 2 ? TOKENS * (128 + 64) : CONSUMERS * BUFFERS * OUT_FRAGMENTS * BOX_BYTES;
constexpr int THREADS = 128 * (1 + CONSUMERS);
// The last tile of a group may have few rows. Then a load brings only the boxes of A_BOX rows that have some of them, and
// a consumer multiplies by half of the tile's rows, or by a quarter, and so on. Where TOKENS is 144, the tiles of a group
// share its rows evenly, and multiply by 128 rows if those suffice: groups of about 256 or 512 rows fit well.
constexpr int A_BOX = TOKENS / (TOKENS % 64 ? 1 : 4);
constexpr bool IS_SHARED = TOKENS == 144 && !FP8;
// The next number of rows to multiply by, or 0.
__device__ constexpr int narrow(int width) {
    return SWIGLU || width % 32 ? IS_SHARED && width == TOKENS ? 128 : 0 : width / 2;
}
static_assert(TOKENS % (8 * PARTS) == 0, "the swizzle repeats every eight rows");
static_assert(!SWIGLU || FRAGMENTS == 2, "one fragment has gates, the other one values");
static_assert(SWIGLU < 2 || FP8 && CONSUMERS == 2, "a block of scales has 128 columns");

// The ring, the staged C, scales, barriers and the list of groups.
extern __shared__ __align__(1024) char shared[];

// The producer's thread fills the ring for one tile.
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& scale_a_map,
                                        const Memory& memory, Ring<STAGES>& state, const GroupTile& tile, int steps,
                                        int N) {
    const int loaded = min(TOKENS, (tile.end - tile.row + A_BOX - 1) / A_BOX * A_BOX);
    for (int step = 0; step < steps; ++step, state.advance()) {
        // On a new barrier a wait for the other phase returns at once: all stages start empty.
        mbarrier_wait(memory.empty + 8 * state.stage, state.phase ^ 1);
        const u32 b = memory.ring + state.stage * STAGE_BYTES, a = b + W_BYTES, ready = memory.full + 8 * state.stage;
        mbarrier_arrive_expect_tx(ready, W_BYTES + loaded * 128 + SCALE_BYTES);
        tma_load_3d(b, b_map, step * BLOCK_K, tile.column, tile.expert, ready);
        if constexpr (SWIGLU) tma_load_3d(b + W_BYTES / 2, b_map, step * BLOCK_K, N + tile.column, tile.expert, ready);
        for (int row = 0; row < loaded; row += A_BOX)
            tma_load_2d(a + row * 128, a_map, step * BLOCK_K, tile.row + row, ready);
        if constexpr (FP8)
            tma_load_3d(memory.scales + state.stage * SCALE_PITCH, scale_a_map, tile.scale_row / 4 * 4, step,
                        tile.layer, ready);
    }
}

// Return where the 64 rows of a consumer's fragment begin in a stage, in bytes.
__device__ __forceinline__ u32 fragment_offset(u32 consumer, int f) {
    return (SWIGLU ? f * CONSUMERS + consumer : consumer * FRAGMENTS + f) * 64 * 128;
}

// Start the products of one stage with the first WIDTH rows of A for all fragments in bf16, or for one in fp8. They are
// still running on return.
template <int WIDTH>
__device__ __forceinline__ void multiply_bf16(float (&acc)[FRAGMENTS][SUMS], u32 b, u32 a, u32 consumer,
                                              bool accumulate) {
    const u64 a_tile = wgmma_descriptor(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
            wgmma_m64k16<WIDTH>(reinterpret_cast<float (&)[WIDTH / 2]>(acc[f]),
                                wgmma_descriptor(b + fragment_offset(consumer, f)) + 2 * k, a_tile + 2 * k,
                                accumulate || k > 0);
    wgmma_commit();
}
template <int WIDTH>
__device__ __forceinline__ void multiply_fp8(float (&sums)[WIDTH / 2], u32 b, u32 a) {
    const u64 b_tile = wgmma_descriptor(b), a_tile = wgmma_descriptor(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if constexpr (FP8) wgmma_any_e4m3<WIDTH>(sums, b_tile + 2 * k, a_tile + 2 * k, k > 0);
    wgmma_commit();
}

// A consumer multiplies the first WIDTH rows of one tile in fp8, or fewer if few are left of the group. `scale_b` are the
// scales of the expert.
template <int WIDTH>
__device__ __forceinline__ void consume_fp8(float (&acc)[FRAGMENTS][SUMS], const Memory& memory, Ring<STAGES>& state,
                                            const float* scale_b, const GroupTile& tile, int steps, int N) {
    if constexpr (constexpr int LESS = narrow(WIDTH); LESS > 0)
        if (tile.end - tile.row <= LESS) return consume_fp8<LESS>(acc, memory, state, scale_b, tile, steps, N);
    constexpr int COUNT = WIDTH / 2;  // of sums
    const u32 consumer = threadIdx.x / 128 - 1;
    const float* source[FRAGMENTS];  // of scale_b
    float next_scale[FRAGMENTS], sums[SCRATCH][COUNT];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
        const int column = tile.column + consumer * OUT_ROWS + (SWIGLU ? f * N : f * 64);
        source[f] = scale_b + min(column, (SWIGLU ? 2 : 1) * N - 1) / 128 * steps;
        next_scale[f] = __ldg(source[f]);  // one step ahead, because L2 takes long
#pragma unroll
        for (int i = 0; i < COUNT; ++i) acc[f][i] = 0;
    }
    for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(memory.full + 8 * state.stage, state.phase);
        const u32 b = memory.ring + state.stage * STAGE_BYTES;
#pragma unroll
        for (int f = 0; f < SCRATCH; ++f) multiply_fp8<WIDTH>(sums[f], b + fragment_offset(consumer, f), b + W_BYTES);
        float scale[FRAGMENTS], scale_a[COUNT / 2];  // two columns of every eight
        const u32 scales = memory.scales + state.stage * SCALE_PITCH + 4 * (tile.scale_row % 4 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int j = 0; j < COUNT / 2; ++j) scale_a[j] = load_scale(scales + j / 2 * 32 + j % 2 * 4);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            scale[f] = next_scale[f];
            next_scale[f] = __ldg(source[f] + min(step + 1, steps - 1));
        }
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
            if (SCRATCH == 1 && f > 0) multiply_fp8<WIDTH>(sums[0], b + fragment_offset(consumer, f), b + W_BYTES);
            if (f + 1 < SCRATCH) wgmma_wait<1>();
            else wgmma_wait<0>();
            float (&sum)[COUNT] = sums[f % SCRATCH];
            warpgroup_fence_operand(sum);
            // One lane speaks for its warp: all have read their scales before they wait for the products.
            if (f == FRAGMENTS - 1) release(memory, state.stage);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) acc[f][i] += sum[i] * (scale_a[i / 4 * 2 + i % 2] * scale[f]);
        }
    }
}

// The same in bf16. One group of products stays under way while the next stage is waited for.
template <int WIDTH>
__device__ __forceinline__ void consume_bf16(float (&acc)[FRAGMENTS][SUMS], const Memory& memory, Ring<STAGES>& state,
                                             int steps, int left) {
    if constexpr (constexpr int LESS = narrow(WIDTH); LESS > 0)
        if (left <= LESS) return consume_bf16<LESS>(acc, memory, state, steps, left);
    const u32 consumer = threadIdx.x / 128 - 1;
    u32 previous_stage = 0;
    for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(memory.full + 8 * state.stage, state.phase);
        const u32 b = memory.ring + state.stage * STAGE_BYTES;
        multiply_bf16<WIDTH>(acc, b, b + W_BYTES, consumer, step > 0);
        wgmma_wait<1>();
        if (step > 0) release(memory, previous_stage);
        previous_stage = state.stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) warpgroup_fence_operand(acc[f]);
    release(memory, previous_stage);
}

// Put silu(gate) x value into the first fragment.
__device__ __forceinline__ void apply_swiglu(float (&acc)[FRAGMENTS][SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[0][i] = acc[0][i] / (1.0f + __expf(-acc[0][i])) * acc[FRAGMENTS - 1][i];
}

// Store a tile as fp8. Its 128 columns are one block of scales, so the consumers look for the largest magnitude of a row
// together. Each thread has two columns' elements of two rows out of eight (drawing in wgmma.cuh).
constexpr u32 CONSUMERS_BARRIER = 8;
__device__ __forceinline__ void store_fp8(const float (&v)[SUMS], u8* c, float* c_scales, int pitch, u32 staged,
                                          const GroupTile& tile, int N) {
    const int thread = threadIdx.x - 128, warp = thread / 32, lane = thread % 32;
    u8* rows = reinterpret_cast<u8*>(shared) + (staged - shared_address(shared));
    float* of_warps = reinterpret_cast<float*>(rows + TOKENS * 128);
    float* of_rows = of_warps + 8 * TOKENS;
#pragma unroll
    for (int j = 0; j < SUMS / 2; ++j) {
        const int i = j / 2 * 4 + j % 2, row = j / 2 * 8 + lane % 4 * 2 + j % 2;
        float largest = fmaxf(fabsf(v[i]), fabsf(v[i + 2]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        if (lane < 4) of_warps[warp * TOKENS + row] = largest;
    }
    named_barrier_sync(CONSUMERS_BARRIER, 256);
    if (thread < TOKENS) {
        float largest = 1e-30f;
        for (int w = 0; w < 8; ++w) largest = fmaxf(largest, of_warps[w * TOKENS + thread]);
        of_rows[thread] = largest / 448.0f;
        if (tile.row + thread < tile.end)
            c_scales[static_cast<u64>(tile.column / 128) * pitch + tile.row + thread] = largest / 448.0f;
    }
    named_barrier_sync(CONSUMERS_BARRIER, 256);
#pragma unroll
    for (int j = 0; j < SUMS / 2; ++j) {
        const int i = j / 2 * 4 + j % 2, row = j / 2 * 8 + lane % 4 * 2 + j % 2, column = warp * 16 + lane / 4;
        const float scale = of_rows[row];
        unsigned short codes;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(v[i + 2] / scale), "f"(v[i] / scale));
        rows[swizzle_offset(row * 128 + column, 128)] = codes & 0xFF;
        rows[swizzle_offset(row * 128 + column + 8, 128)] = codes >> 8;
    }
    named_barrier_sync(CONSUMERS_BARRIER, 256);
#pragma unroll 1
    for (int i = thread; i < min(tile.end - tile.row, TOKENS) * 8; i += 256)  // in units of 16 columns
        *reinterpret_cast<uint4*>(c + static_cast<u64>(tile.row + i / 8) * N + tile.column + i % 8 * 16) =
            *reinterpret_cast<const uint4*>(rows + swizzle_offset(i * 16, 128));
}

// Stage PART rows of C from `first` of the tile on, in boxes of 64 columns. A row of a matrix of stmatrix is a column of
// the accumulator (drawing in ch10/wgmma_gemm): lane l passes row l % 8 + 8 (l / 16), unit 2 warp + l / 8 % 2.
__device__ __forceinline__ void stage_part(const float (&acc)[FRAGMENTS][SUMS], u32 staged, int first) {
    const u32 lane = threadIdx.x % 32, unit = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
    for (int f = 0; f < OUT_FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < PART; j += 16) {
            const float* d = acc[f] + (first + j) / 2;
            const u32 row = j + lane % 8 + lane / 16 * 8;
            const u32 place = staged + f * BOX_BYTES + swizzle_offset(row * 128 + unit * 16, 128);
            if (j + 8 == PART) stmatrix_x2_trans(place, pack_bf16x2(d[0], d[1]), pack_bf16x2(d[2], d[3]));
            else
                stmatrix_x4_trans(place, pack_bf16x2(d[0], d[1]), pack_bf16x2(d[2], d[3]), pack_bf16x2(d[4], d[5]),
                                  pack_bf16x2(d[6], d[7]));
        }
}

// Store one consumer's part of a tile, whose columns begin at `column`. `stored` counts the parts so far, `barrier` is a
// named barrier for the consumer's threads. Returns before TMA has read shared memory.
__device__ __forceinline__ void store_tile(const float (&acc)[FRAGMENTS][SUMS], const TensorMap& c_map,
                                           unsigned short* c, u32 staged, u32& stored, const GroupTile& tile,
                                           int column, int N, u32 barrier) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const int row = tile.row + part * PART;
        if (row >= tile.end) break;
        const u32 buffer = staged + stored++ % BUFFERS * OUT_FRAGMENTS * BOX_BYTES;
        if (thread == 0) bulk_wait_read<BUFFERS - 1>();  // TMA has read what was in the buffer
        named_barrier_sync(barrier, 128);
        stage_part(acc, buffer, part * PART);
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        if (row + PART <= tile.end) {
            if (thread == 0)
                for (int f = 0; f < OUT_FRAGMENTS; ++f)
                    tma_store_2d(c_map, buffer + f * BOX_BYTES, column + f * 64, row);
        } else {
            const char* source = shared + (buffer - shared_address(shared));
#pragma unroll 1
            for (int i = thread; i < (tile.end - row) * OUT_FRAGMENTS * 8; i += 128) {  // in units of eight columns
                const int f = i / 8 % OUT_FRAGMENTS, line = i / (8 * OUT_FRAGMENTS),
                          own_column = column + f * 64 + i % 8 * 8;
                if (own_column < N)
                    *reinterpret_cast<uint4*>(c + static_cast<u64>(row + line) * N + own_column) =
                        *reinterpret_cast<const uint4*>(source + f * BOX_BYTES +
                                                        swizzle_offset(line * 128 + i % 8 * 16, 128));
            }
        }
        if (thread == 0) bulk_commit();  // an empty group counts too, so that bulk_wait_read finds the right buffer
    }
}

// The arguments are those of grouped_fp8. In bf16, scale_a_map and scale_b are not read. `c` is fp8
// if there are `c_scales`, whose columns are `pitch` elements apart. N counts the columns of C.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    grouped_swapped(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                    const __grid_constant__ TensorMap scale_a_map, const __grid_constant__ TensorMap c_map,
                    unsigned short* c, const float* scale_b, const int* ends, int experts, int capacity, int rows,
                    int N, int K, float* c_scales, int pitch) {
    const Memory memory = divide_memory(shared_address(shared), RING_BYTES, STAGED_BYTES, SCALE_PITCH);
    Group* groups = reinterpret_cast<Group*>(shared + (memory.empty + 8 * STAGES - memory.ring));
    // The shuffle shows the compiler that all lanes have the same value, so it keeps addresses in uniform registers.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const int steps = (K + BLOCK_K - 1) / BLOCK_K, tiles_n = (N + COLUMNS - 1) / COLUMNS;
    if (threadIdx.x == 0) {
        make_barriers(memory, 4 * CONSUMERS);  // one arrival per warp that reads a stage
        prefetch_tensormap(a_map), prefetch_tensormap(b_map), prefetch_tensormap(c_map);
        if constexpr (FP8) prefetch_tensormap(scale_a_map);
    }
    __syncwarp();
    griddepcontrol_wait();
    if (warp == 0) list_groups(groups, {ends, experts, capacity, rows, TOKENS, tiles_n, 1});
    __syncthreads();
    griddepcontrol_launch_dependents();

    const int begin = blockIdx.x, stride = gridDim.x;
    Walk walk = {groups};
    Ring<STAGES> state;
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0)
            for (int id = begin; walk.find(id); id += stride)
                produce(a_map, b_map, scale_a_map, memory, state,
                        place_tile<TOKENS, COLUMNS, 1, IS_SHARED>(*walk.group, id, tiles_n, capacity), steps, N);
        __syncwarp();
    } else {
        warpgroup_reg_alloc<consumer_registers(CONSUMERS, 1)>();
        const u32 consumer = warpgroup - 1, staged = memory.staged + consumer * BUFFERS * OUT_FRAGMENTS * BOX_BYTES;
        const u64 scales_per_expert = static_cast<u64>(((SWIGLU ? 2 : 1) * N + 127) / 128) * steps;
        u32 stored = 0;
        float acc[FRAGMENTS][SUMS];
        for (int id = begin; walk.find(id); id += stride) {
            const GroupTile tile = place_tile<TOKENS, COLUMNS, 1, IS_SHARED>(*walk.group, id, tiles_n, capacity);
            if constexpr (FP8)
                consume_fp8<TOKENS>(acc, memory, state, scale_b + tile.expert * scales_per_expert, tile, steps, N);
            else consume_bf16<TOKENS>(acc, memory, state, steps, tile.end - tile.row);
            if constexpr (SWIGLU) apply_swiglu(acc);
            if constexpr (SWIGLU == 2)
                store_fp8(acc[0], reinterpret_cast<u8*>(c), c_scales, pitch, memory.staged, tile, N);
            else store_tile(acc, c_map, c, staged, stored, tile, tile.column + consumer * OUT_ROWS, N, warpgroup);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }
}
