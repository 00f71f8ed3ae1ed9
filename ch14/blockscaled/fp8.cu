// C (M x N) = sum over blocks of 128 along K of scale_a scale_b (A B^T), on Hopper's tensor cores: A (M x K) and
// B (N x K) are fp8 e4m3; a scale_a belongs to 1 x 128 elements of A, a scale_b to 128 x 128 of B.
//
// The tensor core knows no block scales, and adds fp8 products in fewer bits than float32 has. So each block of 128
// along K is summed in a scratch accumulator, which the CUDA cores add, scaled, to the real one (two-level
// accumulation). Meanwhile the tensor core multiplies for the other consumers or into a second scratch. Source:
// DeepSeek-V3, section 3.3.2 (arXiv 2412.19437).
//
// -D: BLOCK_N (columns of a tile, 64 or 128), CONSUMERS (warp groups that multiply, 64 rows each), SCRATCH
// (accumulators beside the real one, 1 or 2), STAGES of the ring, SPLIT (1: the K steps of a tile are shared by `splits`
// CTAs), GROUP (rows of tiles that the raster keeps together), BIAS, ACTIVATION (0, SILU 1, GELU 2), MX (1: C is MXFP8,
// not bf16).
#include "wgmma.cuh"

constexpr int BLOCK = 128, BLOCK_K = BLOCK;  // what shares a scale of B; 128 bytes are a row of the widest swizzle
constexpr int ROWS = 64, BLOCK_M = ROWS * CONSUMERS, SUMS = BLOCK_N / 2;  // SUMS: a thread's
constexpr u32 A_BYTES = BLOCK_M * BLOCK_K, B_BYTES = BLOCK_N * BLOCK_K, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;
constexpr u32 SCALE_BYTES = 4 * BLOCK_M;  // of a stage: A's
constexpr u32 PART_BYTES = ROWS * 128, BUFFERS = 2;  // C leaves in parts with rows of 128 bytes, two a consumer
constexpr u32 STAGED_BYTES = CONSUMERS * BUFFERS * PART_BYTES, BARRIER_BYTES = 16 * STAGES;
constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_REGISTERS = consumer_registers(CONSUMERS, 1);
static_assert(STAGES > 2, "one stage is added up while the next is multiplied and a third loaded");
static_assert(BLOCK_N == 128 || BLOCK_N == 64 && !MX, "a part of MXFP8 is 128 columns wide");

// SiLU by two instructions of the special unit and no more: __expf and a division would guard subnormal numbers, which
// end as zero or value all the same.
__device__ __forceinline__ float activated(float value) {
    if constexpr (ACTIVATION == 1) {
        float power, quotient;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.44269504f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
        return value * quotient;
    }
    if constexpr (ACTIVATION == 2) return 0.5f * value * (1.0f + erff(value * 0.70710678f));
    return value;
}

// Bias and activation of 64 rows, in place; `column` is the first of this thread's first pair.
__device__ __forceinline__ void finish(float (&d)[SUMS], const u32* bias, int column) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        if constexpr (BIAS) {
            const u32 pair = __ldg(bias + (column + 2 * i) / 2);
            const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xFFFF0000);
            d[i] += low, d[i + 1] += high, d[i + 2] += low, d[i + 3] += high;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) d[i + j] = activated(d[i + j]);
    }
}

// 64 columns from the `half`-th on, as bf16, in rows of 128 bytes.
__device__ __forceinline__ void stage_bf16(const float (&d)[SUMS], u32 staged, int half) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < 64; j += 16) {
        const float* v = d + half * 32 + j / 2;
        stmatrix_x4(staged + swizzle_offset(row * 128 + (j / 8 + lane / 16) * 16, 128), pack_bf16x2(v[0], v[1]),
                       pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7]));
    }
}

// All 128 columns as MXFP8: rounded to bf16, as what would be stored otherwise, then each 32 of a row to e4m3 with a
// scale e8m0 (OCP MX specification, 6.3). Four lanes hold a row; each writes one of its four scales.
__device__ __forceinline__ void stage_mx(const float (&d)[SUMS], u32 staged, unsigned char* scales, int row, int rows,
                                         int pitch) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows lane / 4 and lane / 4 + 8 of a warp's 16
        const u32 within = threadIdx.x / 32 % 4 * 16 + half * 8 + lane / 4;
        u32 mine = 0;
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            u32 pairs[4], most = 0;  // most: of the magnitudes at even places, and at odd ones
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* from = d + 16 * block + 4 * j + 2 * half;
                pairs[j] = pack_bf16x2(from[0], from[1]);
                most = __vmaxu2(most, pairs[j] & 0x7FFF7FFF);  // of positive floats the larger has the larger bits
            }
            most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 1));
            most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 2));
            const u32 largest = max(most >> 16, most & 0xFFFF);
            const bool dead = largest >= 0x7F80;  // an infinity or NaN
            const u32 code = dead ? 255 : max(static_cast<int>(largest >> 7) - 8, 0);
            const float multiplier = __uint_as_float((254 - code) << 23);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                unsigned short two;
                asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
                    : "=h"(two) : "f"(__uint_as_float(pairs[j] & 0xFFFF0000) * multiplier),
                      "f"(__uint_as_float(pairs[j] << 16) * multiplier));
                const u32 at = within * 128 + block * 32 + j * 8 + lane % 4 * 2;
                asm volatile("st.shared.u16 [%0], %1;"
                             ::"r"(staged + swizzle_offset(at, 128)), "h"(dead ? static_cast<unsigned short>(0) : two)
                             : "memory");
            }
            if (lane % 4 == block) mine = code;
        }
        if (row + within < rows) scales[static_cast<u64>(row + within) * pitch + lane % 4] = mine;
    }
}

// One consumer's rows of C. Returns before the stores have read shared memory; `parts` counts those staged before.
__device__ __forceinline__ void epilogue(float (&acc)[SUMS], const TensorMap& c_map, u32 staged, u32& parts,
                                         const u32* bias, unsigned char* scales, int row, int column, int M, int N,
                                         u32 name) {
    const bool leader = threadIdx.x % 128 == 0;
    finish(acc, bias, column + threadIdx.x % 4 * 2);
#pragma unroll
    for (int half = 0; half < (MX ? 1 : BLOCK_N / 64); ++half) {
        const u32 buffer = staged + parts++ % BUFFERS * PART_BYTES;
        if (leader) bulk_wait_read<BUFFERS - 1>();  // the part that was last in this buffer has left it
        named_barrier_sync(name, 128);
        if constexpr (MX) stage_mx(acc, buffer, scales + column / 32, row, M, N / 32);
        else stage_bf16(acc, buffer, half);
        fence_proxy_async();
        named_barrier_sync(name, 128);
        if (leader) tma_store_2d(c_map, buffer, column + half * 64, row), bulk_commit();
    }
}

// Adds up what the CTAs of a tile have summed, always in the same order; false for all but the last of them to come.
// A warp whose rows lie past the end has nothing to add up.
__device__ __forceinline__ bool gathered(float (&acc)[SUMS], float4* parts, u32* arrivals, u32 flag, int index,
                                         int splits, bool inside, u32 name) {
    const u32 consumer = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, tile = index / splits;
    auto part = [&](int work) { return parts + (static_cast<u64>(work) * CONSUMERS + consumer) * 32 * SUMS + thread; };
    float4* mine = part(index);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        if (inside) __stcg(mine + i * 32, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
    __threadfence();
    named_barrier_sync(name, 128);
    if (thread == 0) {
        const u32 before = atomicAdd(arrivals + tile * CONSUMERS + consumer, 1);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(before) : "memory");
    }
    named_barrier_sync(name, 128);
    u32 before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(flag) : "memory");
    if (before != splits - 1) return false;
    __threadfence();
    for (int split = 0; inside && split < splits; ++split) {
        const float4* from = part(tile * splits + split);
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const float4 more = __ldcg(from + i * 32);
            acc[i] = split ? acc[i] + more.x : more.x, acc[i + 1] = split ? acc[i + 1] + more.y : more.y;
            acc[i + 2] = split ? acc[i + 2] + more.z : more.z, acc[i + 3] = split ? acc[i + 3] + more.w : more.w;
        }
    }
    if (thread == 0) arrivals[tile * CONSUMERS + consumer] = 0;  // for the next launch
    return true;
}

__device__ __forceinline__ float load_shared(u32 from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

// One block of K into `sum`: four products, under way when this returns.
__device__ __forceinline__ void multiply(float (&sum)[SUMS], u32 a, u32 b) {
    const u64 a_tile = wgmma_descriptor(a), b_tile = wgmma_descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 32; ++k) wgmma_m64k32_e4m3<BLOCK_N>(sum, a_tile + 2 * k, b_tile + 2 * k, k > 0);
    wgmma_commit();
}

// The ring, C as it is staged, scales, the barriers, a word a consumer. Tiles are aligned to the 1,024 bytes after
// which a swizzle repeats.
extern __shared__ __align__(1024) char shared[];

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp8_blocks(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
               const __grid_constant__ TensorMap scale_a_map, const __grid_constant__ TensorMap c_map,
               const float* scale_b, const u32* bias, unsigned char* c_scales, float4* parts, u32* arrivals, int M,
               int N, int K, int splits, int rows) {
    // `rows` of A are loaded, at most BLOCK_M: what lies in those below is nobody's.
    const u32 ring = shared_address(shared), scales = ring + RING_BYTES + STAGED_BYTES;
    const u32 full = scales + STAGES * SCALE_BYTES, empty = full + 8 * STAGES;
    // From one lane, so that the compiler knows it is the same in all, and keeps addresses in uniform registers.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(empty + 8 * s, 4 * CONSUMERS);  // each warp that reads the stage
        }
        fence_mbarrier_init();
        prefetch_tensormap(a_map), prefetch_tensormap(b_map);
        prefetch_tensormap(scale_a_map), prefetch_tensormap(c_map);
    }
    __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    const int tiles_m = (M + BLOCK_M - 1) / BLOCK_M, tiles_n = N / BLOCK_N, steps = K / BLOCK_K;
    if (!SPLIT) splits = 1;  // known to the compiler
    const int works = tiles_m * tiles_n * splits;
    auto begins = [&](int split) { return static_cast<int>(static_cast<long long>(steps) * split / splits); };
    Ring<STAGES> turn;
    if (group == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            for (int index = blockIdx.x; index < works; index += gridDim.x) {
                const Tile tile = tile_at(index / splits, tiles_m, tiles_n, GROUP);
                const int row = tile.m * BLOCK_M, column = tile.n * BLOCK_N, split = index % splits;
                for (int step = begins(split); step < begins(split + 1); ++step, turn.advance()) {
                    // A fresh barrier lets a wait for the phase before its first pass.
                    mbarrier_wait(empty + 8 * turn.stage, turn.phase ^ 1);
                    const u32 a = ring + turn.stage * STAGE_BYTES, ready = full + 8 * turn.stage;
                    mbarrier_arrive_expect_tx(ready, B_BYTES + rows * (BLOCK_K + 4));
                    tma_load_2d(a, a_map, step * BLOCK_K, row, ready);
                    tma_load_2d(a + A_BYTES, b_map, step * BLOCK_K, column, ready);
                    // By the copy engine, too: a warp that copied scales with cp.async cost 15 % of the speed.
                    tma_load_2d(scales + turn.stage * SCALE_BYTES, scale_a_map, row, step, ready);
                }
            }
        }
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const u32 consumer = group - 1, within = consumer * ROWS + warp % 4 * 16 + lane / 4;  // and eight rows below
        const u32 staged = ring + RING_BYTES + consumer * BUFFERS * PART_BYTES;
        u32 staged_parts = 0;
        float acc[SUMS], sums[SCRATCH][SUMS];
        // Both begin together: with the second 2 or 4 blocks behind, so that one's epilogue falls into the other's
        // products, the H200 was slower at a short K and for MXFP8, and nowhere faster beyond the noise.
        for (int index = blockIdx.x; index < works; index += gridDim.x) {
            const Tile tile = tile_at(index / splits, tiles_m, tiles_n, GROUP);
            const int row = tile.m * BLOCK_M + consumer * ROWS, column = tile.n * BLOCK_N, split = index % splits;
            const float* of_b = scale_b + static_cast<u64>(column / BLOCK) * steps;
            int step = begins(split), left = begins(split + 1) - step;
            float ahead = __ldg(of_b + min(step, steps - 1));  // B's scale of the next block: it comes from L2
            float upper, lower;  // of the block that is under way: the scales of two rows of A times B's
            u32 before = turn.stage;  // its stage
            auto start = [&](float (&sum)[SUMS]) {
                const float scale = ahead;
                ahead = __ldg(of_b + min(++step, steps - 1));
                mbarrier_wait(full + 8 * turn.stage, turn.phase);
                const u32 a = ring + turn.stage * STAGE_BYTES, at = scales + turn.stage * SCALE_BYTES + 4 * within;
                multiply(sum, a + consumer * ROWS * BLOCK_K, a + A_BYTES);
                upper = load_shared(at) * scale, lower = load_shared(at + 32) * scale;
                turn.advance();
            };
            auto end = [&](float (&sum)[SUMS], float of_upper, float of_lower) {
                warpgroup_fence_operand(sum);
                if (lane == 0) mbarrier_arrive(empty + 8 * before);
#pragma unroll
                for (int i = 0; i < SUMS; ++i) acc[i] += sum[i] * (i / 2 % 2 ? of_lower : of_upper);
            };
#pragma unroll
            for (int i = 0; i < SUMS; ++i) acc[i] = 0;
            if constexpr (SCRATCH == 1) {
                for (; left > 0; --left) {
                    before = turn.stage;
                    start(sums[0]);
                    wgmma_wait<0>();
                    end(sums[0], upper, lower);
                }
            } else if (left > 0) {
                // Straight on from one block to the next: where products under way cross a branch, the compiler makes
                // each wait for the one before.
                float (&even)[SUMS] = sums[0], (&odd)[SUMS] = sums[SCRATCH - 1];
                auto both = [&](float (&sum)[SUMS], float (&next)[SUMS]) {
                    const float of_upper = upper, of_lower = lower;
                    const u32 stage = turn.stage;
                    start(next);
                    wgmma_wait<1>();
                    end(sum, of_upper, of_lower);
                    before = stage;
                };
                start(even);
                for (; left > 2; left -= 2) both(even, odd), both(odd, even);
                if (left == 2) {
                    both(even, odd);
                    wgmma_wait<0>();
                    end(odd, upper, lower);
                } else {
                    wgmma_wait<0>();
                    end(even, upper, lower);
                }
            }
            if constexpr (SPLIT) {
                const bool inside = row + static_cast<int>(warp % 4 * 16) < M;
                if (!gathered(acc, parts, arrivals, full + BARRIER_BYTES + 4 * consumer, index, splits, inside, group))
                    continue;
            }
            if (row < M) epilogue(acc, c_map, staged, staged_parts, bias, c_scales, row, column, M, N, group);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }
}
