// C (M x N) = sum over blocks of 128 along K of scale_a scale_b (A B^T), on Hopper's tensor cores. A (M x K) and B
// (N x K) are fp8 e4m3. A scale_a belongs to 1 x 128 elements of A, a scale_b to 128 x 128 elements of B.
//
// The tensor core knows no block scales, and it adds fp8 products with fewer bits than float32 has. So the kernel sums
// in two levels. A CTA has one producer warp group, which loads A, B and scale_a into a ring of STAGES by TMA, and
// CONSUMERS warp groups that multiply. For each block of 128 along K, a consumer does this:
//
//     1. It waits for a stage. Four wgmma sum its 128 columns of K in a scratch accumulator.
//     2. It releases the stage, and adds scratch x scale_a x scale_b to its float32 sums of C.
//
// After the last block it applies bias and activation, and stores C through shared memory by TMA. A stage holds
//
//     | A: BLOCK_M x 128 bytes | B: BLOCK_N x 128 bytes |   and in its own array   | scale_a: BLOCK_M floats |
//
// During step 2 the tensor core multiplies for another consumer, or into a second scratch. With SPLIT, several CTAs
// share the K steps of a tile and the last one adds their sums. With EPILOGUE_WARPS, the consumers hand their sums over
// in shared memory. Other warps then apply bias and activation, and store, while the consumers multiply the next tile.
// The producer's group has three warps to spare; for more, there is a second group before the consumers. Source:
// DeepSeek-V3, section 3.3.2 (arXiv 2412.19437).
//
// A tile may reach past the ends of M and N. There TMA loads zeros and stores nothing. N is a multiple of 8, because
// TMA stores rows of whole 16 bytes, and of 128 if C is MXFP8.
//
// The macros, set with -D (Fp8Config.constants in configs.py):
//   BLOCK_N         columns of a tile, a multiple of 16 from 64 to 160
//   CONSUMERS       warp groups that multiply, 1 to 3, with 64 rows of the tile each
//   SCRATCH         scratch accumulators per consumer, 1 or 2
//   STAGES          stages of the ring
//   SPLIT           1: several CTAs share the K steps of a tile
//   GROUP_M         rows of tiles in a band of the raster (tile_coordinates)
//   BIAS            1: C gets a bias
//   ACTIVATION      0, 1 (SiLU) or 2 (GELU)
//   MX              1: C is MXFP8, with scales in `c_scales`; 0: it is bf16
//   CLUSTER         CTAs, one below the other in C, that load B together: each a part, for all of them
//   EPILOGUE_WARPS  warps that store C instead of the consumers, 0 to 7; above 0, SPLIT and MX are 0
//
// Build it by hand with
//   nvcc -cubin -arch=sm_90a -std=c++17 -I tilelab/include -DBLOCK_N=128 -DCONSUMERS=2 -DSCRATCH=2 -DSTAGES=5 -DSPLIT=0
//       -DGROUP_M=8 -DBIAS=0 -DACTIVATION=0 -DMX=0 -DCLUSTER=1 -DEPILOGUE_WARPS=0 ch14/fp8_gemm/fp8.cu
#include "wgmma.cuh"

constexpr int BLOCK = 128, BLOCK_K = BLOCK;  // a scale of B covers BLOCK x BLOCK; the widest swizzle has 128 bytes
constexpr int ROWS = 64, BLOCK_M = ROWS * CONSUMERS;
constexpr int SUMS = BLOCK_N / 2;  // accumulators per thread: ROWS x BLOCK_N / 128
constexpr u32 A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;
constexpr u32 SCALE_BYTES = 4 * BLOCK_M;  // scale_a of one stage
// C is staged in subtiles as wide as BLOCK_N allows, up to 128 bytes, so that no store reaches into the next tile.
constexpr int SUBTILE_COLUMNS = BLOCK_N % 64 == 0 ? 64 : BLOCK_N % 32 == 0 ? 32 : 16;
constexpr u32 LINE_BYTES = 2 * SUBTILE_COLUMNS, SUBTILE_BYTES = ROWS * 128, BUFFERS = 2;
// Columns that always have one scale of B in common. A tile reaches into two blocks of columns at most.
constexpr int GRAIN = SUBTILE_COLUMNS == 64 && BLOCK_N % 128 == 0 ? 128 : SUBTILE_COLUMNS;
constexpr bool HAS_TWO_SCALES = 128 % BLOCK_N != 0;
// Each warp of the consumers has a slot, in which it hands 16 rows of sums over. An epilogue warp stages such rows.
constexpr u32 SLOTS = EPILOGUE_WARPS ? 4 * CONSUMERS : 0, SLOT_VECTORS = 32 * SUMS / 4;
constexpr u32 ROWS_BYTES = 16 * 128, ALL_ROWS_BYTES = EPILOGUE_WARPS * BUFFERS * ROWS_BYTES;
constexpr u32 STAGED_BYTES =
    EPILOGUE_WARPS ? ALL_ROWS_BYTES + SLOTS * SLOT_VECTORS * 16 : CONSUMERS * BUFFERS * SUBTILE_BYTES;
constexpr u32 BARRIER_BYTES = 16 * (STAGES + SLOTS);
constexpr int FIRST_CONSUMER = EPILOGUE_WARPS > 3 ? 2 : 1;  // the groups before it load, and store C
constexpr int THREADS = 128 * (FIRST_CONSUMER + CONSUMERS);
// Epilogue warps need 48 registers per thread or more, and all four warps of a group get as many. The consumers share
// the rest of what the CTA starts with.
constexpr int FIRST_GROUP_REGISTERS = EPILOGUE_WARPS > 3 ? CONSUMERS == 1 ? 128
                                                           : BLOCK_N > 64 ? 48
                                                                          : 80
                                      : EPILOGUE_WARPS   ? 56
                                                         : PRODUCER_REGISTERS;
constexpr int CONSUMER_REGISTERS = EPILOGUE_WARPS <= 3 ? consumer_registers(CONSUMERS, 1) - (EPILOGUE_WARPS ? 8 : 0)
                                   : CONSUMERS == 1    ? 240
                                                       : 256 - FIRST_GROUP_REGISTERS;
static_assert(EPILOGUE_WARPS <= 3 || CONSUMERS <= 2, "three consumers leave no registers for a second group");
static_assert(BLOCK_N % (8 * CLUSTER) == 0, "the swizzle repeats every eight rows, so each part of B has whole ones");
static_assert(STAGES > 2, "one stage is added, the next multiplied, and a third loaded at the same time");
static_assert(BLOCK_N == 128 || BLOCK_N % 16 == 0 && BLOCK_N <= 160 && !MX, "a subtile of MXFP8 is 128 columns wide");
static_assert(!EPILOGUE_WARPS || !MX && !SPLIT, "epilogue warps store whole sums, as bf16");

// SiLU uses only two instructions of the special function unit. __expf and a division would also handle subnormal
// numbers, for which the result is zero or `value` in any case.
__device__ __forceinline__ float apply_activation(float value) {
    if constexpr (ACTIVATION == 1) {
        float power, quotient;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.44269504f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
        return value * quotient;
    }
    if constexpr (ACTIVATION == 2) return 0.5f * value * (1.0f + erff(value * 0.70710678f));
    return value;
}

// Apply bias and activation to a fragment (see wgmma.cuh) or to part of one. d[0] of this thread is in `column`. The
// bias has N elements. Columns from N on are not stored, so they need none.
template <int COUNT>
__device__ __forceinline__ void apply_bias_and_activation(float (&d)[COUNT], const u32* bias, int column, int N) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        if constexpr (BIAS) {
            const u32 pair = column + 2 * i < N ? __ldg(bias + (column + 2 * i) / 2) : 0;
            const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000);
            d[i] += low, d[i + 1] += high, d[i + 2] += low, d[i + 3] += high;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) d[i + j] = apply_activation(d[i + j]);
    }
}

// Stage 16 columns of a warp's 16 rows as bf16, in rows of LINE_BYTES from row `first_row` of `staged`. One stmatrix_x4
// stores 16 x 16 elements. Lane l passes the address of row l % 16, in the left half if l < 16, else in the right one.
//
//                  columns 0-7     columns 8-15
//     rows 0-7       matrix 0        matrix 2
//     rows 8-15      matrix 1        matrix 3
__device__ __forceinline__ void stage_bf16(const float* v, u32 staged, u32 first_row, int column) {
    const u32 lane = threadIdx.x % 32, row = first_row + lane % 16;
    stmatrix_x4(staged + swizzle_offset(row * LINE_BYTES + (column / 8 + lane / 16) * 16, LINE_BYTES),
                pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7]));
}

// Stage all 128 columns as MXFP8. They are first rounded to bf16, as they would be stored otherwise. Then each block of
// 32 columns becomes e4m3 with an e8m0 scale (OCP MX specification, 6.3). Four lanes hold a row, and each stores one of
// its four scales. For j = 0 to 3 a lane holds this column and the next:
//
//     lane % 4             0       1       2       3
//     column in block     8j   8j + 2  8j + 4  8j + 6
__device__ __forceinline__ void stage_mx(const float (&d)[SUMS], u32 staged, unsigned char* scales, int row, int rows,
                                         int pitch) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows lane / 4 and lane / 4 + 8 of the warp's 16
        const u32 row_in_tile = threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
        u32 own_scale = 0;
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            u32 pairs[4], amax_pair = 0;  // the largest magnitudes in even and in odd columns
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* sums = d + 16 * block + 4 * j + 2 * half;
                pairs[j] = pack_bf16x2(sums[0], sums[1]);
                amax_pair = __vmaxu2(amax_pair, pairs[j] & 0x7FFF7FFF);  // positive floats compare like their bits
            }
            amax_pair = __vmaxu2(amax_pair, __shfl_xor_sync(~0u, amax_pair, 1));
            amax_pair = __vmaxu2(amax_pair, __shfl_xor_sync(~0u, amax_pair, 2));
            const u32 amax = max(amax_pair >> 16, amax_pair & 0xFFFF);
            const bool not_finite = amax >= 0x7F80;
            const u32 scale = not_finite ? 255 : max(static_cast<int>(amax >> 7) - 8, 0);
            const float multiplier = __uint_as_float((254 - scale) << 23);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                unsigned short codes;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                    : "=h"(codes)
                    : "f"(__uint_as_float(pairs[j] & 0xFFFF0000) * multiplier),
                      "f"(__uint_as_float(pairs[j] << 16) * multiplier));
                const u32 offset = row_in_tile * 128 + block * 32 + j * 8 + lane % 4 * 2;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(staged + swizzle_offset(offset, 128)),
                             "h"(not_finite ? static_cast<unsigned short>(0) : codes)
                             : "memory");
            }
            if (lane % 4 == block) own_scale = scale;
        }
        if (row + row_in_tile < rows) scales[static_cast<u64>(row + row_in_tile) * pitch + lane % 4] = own_scale;
    }
}

// Store one consumer's rows of C. Returns before TMA has read shared memory. `stored` counts the subtiles staged so far,
// `barrier` is a named barrier for the 128 threads of the consumer.
__device__ __forceinline__ void epilogue(float (&acc)[SUMS], const TensorMap& c_map, u32 staged, u32& stored,
                                         const u32* bias, unsigned char* scales, int row, int column, int M, int N,
                                         u32 barrier) {
    const bool leader = threadIdx.x % 128 == 0;
    apply_bias_and_activation(acc, bias, column + threadIdx.x % 4 * 2, N);
#pragma unroll
    for (int part = 0; part < (MX ? 1 : BLOCK_N / SUBTILE_COLUMNS); ++part) {
        const u32 buffer = staged + stored++ % BUFFERS * SUBTILE_BYTES;
        if (leader) bulk_wait_read<BUFFERS - 1>();  // TMA has read the buffer's previous subtile
        named_barrier_sync(barrier, 128);
        if constexpr (MX) stage_mx(acc, buffer, scales + column / 32, row, M, N / 32);
        else {
#pragma unroll
            for (int j = 0; j < SUBTILE_COLUMNS; j += 16)
                stage_bf16(acc + (part * SUBTILE_COLUMNS + j) / 2, buffer, threadIdx.x / 32 % 4 * 16, j);
        }
        fence_proxy_async();
        named_barrier_sync(barrier, 128);
        if (leader) tma_store_2d(c_map, buffer, column + part * SUBTILE_COLUMNS, row), bulk_commit();
    }
}

// Store 16 rows of C whose sums a consumer's warp has left in `slot`. Returns before TMA has read shared memory.
__device__ __forceinline__ void store_slot(const float4* slot, const TensorMap& c_map, u32 staged, u32& stored,
                                           const u32* bias, int row, int column, int N) {
    const u32 lane = threadIdx.x % 32;
    for (int part = 0; part < BLOCK_N / SUBTILE_COLUMNS; ++part) {
        const u32 buffer = staged + stored++ % BUFFERS * ROWS_BYTES;
        if (lane == 0) bulk_wait_read<BUFFERS - 1>();  // TMA has read the buffer's previous rows
        __syncwarp();
#pragma unroll
        for (int j = 0; j < SUBTILE_COLUMNS; j += 16) {
            const int group = (part * SUBTILE_COLUMNS + j) / 8;  // of eight columns
            const float4 left = slot[group * 32 + lane], right = slot[(group + 1) * 32 + lane];
            float d[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
            apply_bias_and_activation(d, bias, column + group * 8 + lane % 4 * 2, N);
            stage_bf16(d, buffer, 0, j);
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) tma_store_2d(c_map, buffer, column + part * SUBTILE_COLUMNS, row), bulk_commit();
    }
}

// Store the sums of one of the `splits` CTAs that share a tile. The last CTA to arrive adds all sums, always in the
// same order, and gets true. Warps whose rows lie past the end of C (not `inside`) have nothing to add.
__device__ __forceinline__ bool reduce_splits(float (&acc)[SUMS], float4* parts, u32* arrivals, u32 flag, int work_id,
                                              int splits, bool inside, u32 barrier) {
    const u32 consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, tile = work_id / splits;
    auto part = [&](int work) { return parts + (static_cast<u64>(work) * CONSUMERS + consumer) * 32 * SUMS + thread; };
    float4* own_part = part(work_id);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        if (inside) __stcg(own_part + i * 32, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
    named_barrier_sync(barrier, 128);
    if (thread == 0) {
        __threadfence();  // the barrier and the fence order the sums of all threads before the arrival
        const u32 arrived = atomicAdd(arrivals + tile * CONSUMERS + consumer, 1);
        __threadfence();
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(arrived) : "memory");
    }
    named_barrier_sync(barrier, 128);
    u32 arrived;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(arrived) : "r"(flag) : "memory");
    if (arrived != splits - 1) return false;
    for (int split = 0; inside && split < splits; ++split) {
        const float4* other = part(tile * splits + split);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 sum = __ldcg(other + i * 32);
            acc[i] = split ? acc[i] + sum.x : sum.x, acc[i + 1] = split ? acc[i + 1] + sum.y : sum.y;
            acc[i + 2] = split ? acc[i + 2] + sum.z : sum.z, acc[i + 3] = split ? acc[i + 3] + sum.w : sum.w;
        }
    }
    if (thread == 0) arrivals[tile * CONSUMERS + consumer] = 0;  // for the next launch
    return true;
}

__device__ __forceinline__ float load_shared(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// Start the four products of one block of K into `sum`. They are still running when this returns.
__device__ __forceinline__ void multiply(float (&sum)[SUMS], u32 a, u32 b) {
    const u64 a_tile = wgmma_descriptor(a), b_tile = wgmma_descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 32; ++k) wgmma_m64k32_e4m3<BLOCK_N>(sum, a_tile + 2 * k, b_tile + 2 * k, k > 0);
    wgmma_commit();
}

// Shared memory, in this order: the ring, the staged C with slots, scales, barriers, and a flag per consumer. The swizzle
// repeats every 1,024 bytes, so tiles are aligned to that.
extern __shared__ __align__(1024) char shared[];

struct Memory {
    u32 ring, staged, scales, full, empty, slot_full, slot_empty, flags;  // addresses in shared memory
    float4* slots;
};

__device__ __forceinline__ Memory divide_memory() {
    const u32 ring = shared_address(shared), staged = ring + RING_BYTES, scales = staged + STAGED_BYTES;
    const u32 full = scales + STAGES * SCALE_BYTES, empty = full + 8 * STAGES, slot_full = empty + 8 * STAGES;
    return {ring,
            staged,
            scales,
            full,
            empty,
            slot_full,
            slot_full + 8 * SLOTS,
            full + BARRIER_BYTES,
            reinterpret_cast<float4*>(shared + RING_BYTES + ALL_ROWS_BYTES)};
}

__device__ __forceinline__ void make_barriers(const Memory& memory) {
    for (int s = 0; s < STAGES; ++s) {
        mbarrier_init(memory.full + 8 * s, 1);
        mbarrier_init(memory.empty + 8 * s, 4 * CONSUMERS * CLUSTER);  // one arrival per warp that reads B
    }
    for (int s = 0; s < SLOTS; ++s) {
        mbarrier_init(memory.slot_full + 8 * s, 32);
        mbarrier_init(memory.slot_empty + 8 * s, 32);
    }
    fence_mbarrier_init();
}

// A tile of C and the K steps, blocks of BLOCK_K, that a CTA multiplies for it: all of them, or a split.
struct Work {
    int row, column, first, last;
};

// The tiles of one cluster lie below each other. `rank` is the place of this CTA in its cluster, and `clusters_m` counts
// the clusters in a column of C.
struct Works {
    int clusters_m, tiles_n, steps, splits, rank;
    __device__ __forceinline__ int count() const { return clusters_m * tiles_n * splits; }
    __device__ __forceinline__ int first_step(int split) const {
        return static_cast<int>(static_cast<long long>(steps) * split / splits);
    }
    __device__ __forceinline__ Work get(int id) const {
        const Tile tile = tile_coordinates(id / splits, clusters_m, tiles_n, GROUP_M);
        return {(tile.m * CLUSTER + rank) * BLOCK_M, tile.n * BLOCK_N, first_step(id % splits),
                first_step(id % splits + 1)};
    }
};

// The producer's thread fills the ring, stage by stage. A load brings `rows` rows of A.
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& scale_a_map,
                                        const Memory& memory, Ring<STAGES>& state, const Work& work, int rows,
                                        int rank) {
    for (int step = work.first; step < work.last; ++step, state.advance()) {
        // On a new barrier a wait for the other phase returns at once: all stages start empty.
        mbarrier_wait(memory.empty + 8 * state.stage, state.phase ^ 1);
        const u32 a = memory.ring + state.stage * STAGE_BYTES, ready = memory.full + 8 * state.stage;
        mbarrier_arrive_expect_tx(ready, B_BYTES + rows * (BLOCK_K + 4));
        tma_load_2d(a, a_map, step * BLOCK_K, work.row, ready);
        const int part = rank * (BLOCK_N / CLUSTER);  // the rows of B that this CTA loads
        if constexpr (CLUSTER == 1) tma_load_2d(a + A_BYTES, b_map, step * BLOCK_K, work.column, ready);
        else
            tma_load_2d_multicast(a + A_BYTES + part * BLOCK_K, b_map, step * BLOCK_K, work.column + part, ready,
                                  (1 << CLUSTER) - 1);
        // TMA loads the scales too: a warp that copied them with cp.async made the kernel 15 % slower.
        tma_load_2d(memory.scales + state.stage * SCALE_BYTES, scale_a_map, work.row, step, ready);
    }
}

// A warp says that it has read a stage: to its own CTA, and to those that load B into it.
__device__ __forceinline__ void release(const Memory& memory, u32 stage, u32 lane) {
    if constexpr (CLUSTER == 1) {
        if (lane == 0) mbarrier_arrive(memory.empty + 8 * stage);
    } else if (lane < CLUSTER) mbarrier_arrive_cluster(memory.empty + 8 * stage, lane);
}

// Scales for a tile that reaches into a second block of B's columns: those of its left and of its right columns.
struct Scales {
    float left, right;
    __device__ __forceinline__ Scales operator*(float factor) const { return {left * factor, right * factor}; }
};

// A consumer multiplies the steps of `work`, and adds each scaled block to `acc`. `warp` is the warp of the CTA.
__device__ __forceinline__ void consume(float (&acc)[SUMS], const Memory& memory, Ring<STAGES>& state,
                                        const float* scale_b, const Work& work, int steps, int N, u32 warp) {
    const u32 consumer = warp / 4 - FIRST_CONSUMER, lane = threadIdx.x % 32;
    const u32 upper_row = consumer * ROWS + warp % 4 * 16 + lane / 4;  // this thread also holds the row 8 below
    const int block = work.column / BLOCK, columns_left = (block + 1) * BLOCK - work.column;
    const float* tile_scale_b = scale_b + static_cast<u64>(block) * steps;
    const int to_next = (block + 1) * BLOCK < N ? steps : 0;  // to the other block's scales
    int step = work.first, blocks_left = work.last - step;
    float sums[SCRATCH][SUMS];
    auto load_scales = [&](int step) {
        const float* source = tile_scale_b + min(step, steps - 1);
        return Scales{__ldg(source), HAS_TWO_SCALES ? __ldg(source + to_next) : 0};
    };
    Scales next_scale_b = load_scales(step);  // one block ahead, because L2 takes long
    Scales upper_scale, lower_scale;  // scale_a x scale_b of this thread's two rows, for the running block
    u32 used_stage = state.stage;  // holds the running block
    auto start_block = [&](float (&sum)[SUMS]) {
        const Scales block_scale_b = next_scale_b;
        next_scale_b = load_scales(++step);
        mbarrier_wait(memory.full + 8 * state.stage, state.phase);
        const u32 a = memory.ring + state.stage * STAGE_BYTES;
        const u32 stage_scales = memory.scales + state.stage * SCALE_BYTES + 4 * upper_row;
        multiply(sum, a + consumer * ROWS * BLOCK_K, a + A_BYTES);
        upper_scale = block_scale_b * load_shared(stage_scales);
        lower_scale = block_scale_b * load_shared(stage_scales + 32);
        state.advance();
    };
    auto add_block = [&](float (&sum)[SUMS], Scales upper, Scales lower) {
        warpgroup_fence_operand(sum);
        // One lane speaks for its warp: the lanes have read their scales before their common wgmma_wait.
        release(memory, used_stage, lane);
#pragma unroll
        for (int begin = 0; begin < SUMS; begin += GRAIN / 2) {
            const bool is_right = HAS_TWO_SCALES && 2 * begin >= columns_left;
            const float upper_factor = is_right ? upper.right : upper.left;
            const float lower_factor = is_right ? lower.right : lower.left;
#pragma unroll
            for (int i = begin; i < begin + GRAIN / 2 && i < SUMS; ++i)
                acc[i] += sum[i] * (i / 2 % 2 ? lower_factor : upper_factor);
        }
    };
#pragma unroll
    for (int i = 0; i < SUMS; ++i) acc[i] = 0;
    if constexpr (SCRATCH == 1) {
        for (; blocks_left > 0; --blocks_left) {
            used_stage = state.stage;
            start_block(sums[0]);
            wgmma_wait<0>();
            add_block(sums[0], upper_scale, lower_scale);
        }
    } else if (blocks_left > 0) {
        // The loop has no branch between two blocks: where running products cross a branch, the compiler makes each
        // wait for the one before.
        float (&even)[SUMS] = sums[0], (&odd)[SUMS] = sums[SCRATCH - 1];
        auto start_next_and_add = [&](float (&sum)[SUMS], float (&next)[SUMS]) {
            const Scales upper = upper_scale, lower = lower_scale;
            const u32 next_stage = state.stage;
            start_block(next);
            wgmma_wait<1>();
            add_block(sum, upper, lower);
            used_stage = next_stage;
        };
        start_block(even);
        for (; blocks_left > 2; blocks_left -= 2) start_next_and_add(even, odd), start_next_and_add(odd, even);
        if (blocks_left == 2) {
            start_next_and_add(even, odd);
            wgmma_wait<0>();
            add_block(odd, upper_scale, lower_scale);
        } else {
            wgmma_wait<0>();
            add_block(even, upper_scale, lower_scale);
        }
    }
}

// A warp of a consumer hands the sums of its 16 rows over in its slot.
__device__ __forceinline__ void hand_over(const float (&acc)[SUMS], const Memory& memory, u32 slot, u32 phase) {
    mbarrier_wait(memory.slot_empty + 8 * slot, phase ^ 1);  // a new slot is empty
    float4* own = memory.slots + slot * SLOT_VECTORS + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) own[i / 4 * 32] = make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
    mbarrier_arrive(memory.slot_full + 8 * slot);  // every lane says that it has written its part
}

// An epilogue warp stores its share of the slots of a tile. `stored` counts as in `epilogue`.
__device__ __forceinline__ void store(const TensorMap& c_map, const Memory& memory, const Work& work, const u32* bias,
                                      u32& stored, u32 phase, u32 warp, int M, int N) {
    const u32 staged = memory.staged + (warp - 1) * BUFFERS * ROWS_BYTES;
    for (u32 slot = warp - 1; slot < SLOTS; slot += EPILOGUE_WARPS) {
        const int row = work.row + slot * 16;
        mbarrier_wait(memory.slot_full + 8 * slot, phase);
        if (row < M) store_slot(memory.slots + slot * SLOT_VECTORS, c_map, staged, stored, bias, row, work.column, N);
        mbarrier_arrive(memory.slot_empty + 8 * slot);  // every lane says that it has read its part
    }
}

// Each load brings `rows` rows of A, at most BLOCK_M. Those below hold old data, and their results are not stored.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_blocks(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
               const __grid_constant__ TensorMap scale_a_map, const __grid_constant__ TensorMap c_map,
               const float* scale_b, const u32* bias, unsigned char* c_scales, float4* parts, u32* arrivals, int M,
               int N, int K, int splits, int rows) {
    const Memory memory = divide_memory();
    // The shuffle shows the compiler that all lanes have the same value, so it keeps addresses in uniform registers.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    if (threadIdx.x == 0) {
        make_barriers(memory);
        prefetch_tensormap(a_map), prefetch_tensormap(b_map);
        prefetch_tensormap(scale_a_map), prefetch_tensormap(c_map);
    }
    __syncthreads();
    if constexpr (CLUSTER > 1) cluster_arrive(), cluster_wait();  // all barriers of the cluster are initialised
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    // Without SPLIT, the compiler knows that there is one split.
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    const Works works = {(M + BLOCK_M * CLUSTER - 1) / (BLOCK_M * CLUSTER), (N + BLOCK_N - 1) / BLOCK_N, K / BLOCK_K,
                         SPLIT ? splits : 1, rank};
    const int count = works.count(), begin = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    Ring<STAGES> state;
    u32 stored = 0, slot_phase = 0;
    if (group < FIRST_CONSUMER) {
        warpgroup_reg_dealloc<FIRST_GROUP_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int id = begin; id < count; id += stride)
                produce(a_map, b_map, scale_a_map, memory, state, works.get(id), rows, rank);
        } else if (warp >= 1 && warp <= EPILOGUE_WARPS) {
            for (int id = begin; id < count; id += stride, slot_phase ^= 1)
                store(c_map, memory, works.get(id), bias, stored, slot_phase, warp, M, N);
            if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const u32 consumer = group - FIRST_CONSUMER, staged = memory.staged + consumer * BUFFERS * SUBTILE_BYTES;
        float acc[SUMS];
        // Both consumers begin together. With the second 2 or 4 blocks later, the epilogue of one overlaps with the
        // products of the other. On an H200 that was slower for a short K and for MXFP8, and nowhere faster.
        for (int id = begin; id < count; id += stride, slot_phase ^= 1) {
            const Work work = works.get(id);
            const int row = work.row + consumer * ROWS;
            consume(acc, memory, state, scale_b, work, works.steps, N, warp);
            if constexpr (SPLIT) {
                const bool inside = row + static_cast<int>(warp % 4 * 16) < M;
                const int work_id = (id / splits * CLUSTER + rank) * splits + id % splits;
                if (!reduce_splits(acc, parts, arrivals, memory.flags + 4 * consumer, work_id, splits, inside, group))
                    continue;
            }
            if constexpr (EPILOGUE_WARPS) hand_over(acc, memory, 4 * consumer + warp % 4, slot_phase);
            else if (row < M) epilogue(acc, c_map, staged, stored, bias, c_scales, row, work.column, M, N, group);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive(), cluster_wait();  // no CTA ends while another one may still load into it
    }
}
