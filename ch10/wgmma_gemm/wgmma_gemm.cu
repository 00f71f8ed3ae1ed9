// C (M x N, bf16) = A (M x K, bf16) B^T (N x K, bf16), sums in float32, on Hopper's tensor cores.
//
// Three kernels, of which KERNEL names the one that is compiled: ONE_GROUP loads and multiplies by turns; SPECIALISED
// gives loading to a warp group of its own (warp specialisation); SPLIT shares the K steps of a tile among the CTAs of a
// cluster. Other -D: BLOCK_M x BLOCK_N elements of C a tile, STAGES of the ring, DEPTH (boxes of 64 columns of A and B a
// stage), CONSUMERS (warp groups that multiply), CLUSTER (CTAs below each other that share tiles of B, or for SPLIT the
// CTAs of a tile), CTAS an SM, PARTS in which C is staged (epilogue subtiles), GROUP (rows of tiles that the raster keeps
// together), SWAP (operands swapped: C is stored transposed), BREAK (0: nothing), TIMELINE (1: write time stamps).
#include "wgmma.cuh"

#define ONE_GROUP 0
#define SPECIALISED 1
#define SPLIT 2

constexpr int BOX_K = 64;  // 128 bytes: one row of the widest swizzle, and as wide as a box may then be
constexpr int BLOCK_K = BOX_K * DEPTH;
constexpr int ROWS = BLOCK_M / CONSUMERS, FRAGMENTS = ROWS / 64;  // of a consumer
constexpr u32 A_BOX_BYTES = BLOCK_M * BOX_K * 2, B_BOX_BYTES = BLOCK_N * BOX_K * 2;
constexpr u32 A_BYTES = A_BOX_BYTES * DEPTH, STAGE_BYTES = A_BYTES + B_BOX_BYTES * DEPTH;
constexpr int COLUMNS = BLOCK_N / PARTS;  // of C in one part
// C is stored in boxes as wide as a swizzle; transposed ones have 64 rows of the product as their columns.
constexpr int BOX = SWAP || COLUMNS % 64 == 0 ? 64 : COLUMNS % 32 == 0 ? 32 : 16;
constexpr u32 PART_BYTES = ROWS * COLUMNS * 2;  // of a consumer
constexpr u32 BUFFERS = PARTS > 1 ? 2 : 1;  // while one part is stored the next is staged
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES, STAGED_BYTES = CONSUMERS * BUFFERS * PART_BYTES;
// Sums of `split`, as C lies in memory; rows begin 8 banks apart.
constexpr int LINES = SWAP ? BLOCK_N : BLOCK_M, LINE = SWAP ? BLOCK_M : BLOCK_N, PITCH = LINE + 8;
constexpr u32 SUMS_BYTES = LINES * PITCH * 4, SPLIT_BYTES = RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;
// What a reader may leave out, to see what it is for.
enum { NOTHING, PHASE, PROXY_FENCE, EXPECT_LESS, RELEASE_EARLY };
static_assert(ROWS % 64 == 0 && BLOCK_N % (16 * PARTS) == 0 && (!SWAP || PARTS == 1), "");

// The ring, then C as it is staged, then the barriers. Tiles are aligned to the 1,024 bytes after which a swizzle
// repeats; a static array would come first and cost as much again.
extern __shared__ __align__(1024) char shared[];

// One K step: the products of 16 columns each of A's rows and of B's.
__device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][BLOCK_N / 2], u32 a, u32 b, bool accumulate) {
    const u64 a_descriptor = wgmma_descriptor(a), b_descriptor = wgmma_descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
        // In a swizzled row of 128 bytes the next 16 elements begin 32 bytes on: the hardware XORs address bits alone.
        const int box = k / 4, within = k % 4 * 32;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
            wgmma_m64k16<BLOCK_N>(acc[f], a_descriptor + (box * A_BOX_BYTES + f * 64 * 128 + within) / 16,
                             b_descriptor + (box * B_BOX_BYTES + within) / 16, accumulate || k > 0);
    }
    wgmma_commit();
}

// Writes a consumer's part of C to shared memory as bf16, in boxes that a tensor map stores.
__device__ __forceinline__ void stage_part(const float (&acc)[FRAGMENTS][BLOCK_N / 2], u32 staged, int part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 16) {  // two 8 x 8 matrices wide, two high
            const float* d = acc[f] + (part * COLUMNS + j) / 2;
            const u32 left_top = pack_bf16x2(d[0], d[1]), left_low = pack_bf16x2(d[2], d[3]);
            const u32 right_top = pack_bf16x2(d[4], d[5]), right_low = pack_bf16x2(d[6], d[7]);
            if constexpr (SWAP) {
                const u32 row = j + lane % 8 + lane / 16 * 8, unit = 2 * warp + lane / 8 % 2;
                stmatrix_x4_trans(staged + f * BLOCK_N * 128 + swizzle_offset(row * 128 + unit * 16, 128),
                                          left_top, left_low, right_top, right_low);
            } else {
                const u32 row = 16 * warp + lane % 16, unit = j % BOX / 8 + lane / 16;
                stmatrix_x4(staged + (j / BOX * FRAGMENTS + f) * 64 * BOX * 2
                                   + swizzle_offset(row * BOX * 2 + unit * 16, BOX * 2),
                               left_top, left_low, right_top, right_low);
            }
        }
}

// One thread of the consumer hands the staged boxes to the copy engine, which leaves out what lies outside of C.
__device__ __forceinline__ void store_part(const TensorMap& c_map, u32 staged, int row, int column, int part) {
    if constexpr (SWAP) {
        for (int f = 0; f < FRAGMENTS; ++f) tma_store_2d(c_map, staged + f * BLOCK_N * 128, row + f * 64, column);
    } else {
        for (int j = 0; j < COLUMNS; j += BOX)
            for (int f = 0; f < FRAGMENTS; ++f)
                tma_store_2d(c_map, staged + (j / BOX * FRAGMENTS + f) * 64 * BOX * 2, column + part * COLUMNS + j,
                             row + f * 64);
    }
    bulk_commit();
}

// `staged` is this consumer's, `parts` how many it has staged before, `name` the barrier of its warp group. Returns
// before the stores have read shared memory.
__device__ __forceinline__ void epilogue(const float (&acc)[FRAGMENTS][BLOCK_N / 2], const TensorMap& c_map, u32 staged,
                                         u32& parts, int row, int column, u32 name) {
    const bool leader = threadIdx.x % 128 == 0;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        const u32 buffer = staged + parts++ % BUFFERS * PART_BYTES;
        if (leader) bulk_wait_read<BUFFERS - 1>();  // all but the part before this one have left their buffer
        named_barrier_sync(name, 128);
        stage_part(acc, buffer, part);
        if (BREAK != PROXY_FENCE) fence_proxy_async();
        named_barrier_sync(name, 128);
        if (leader) store_part(c_map, buffer, row, column, part);
    }
}

// Time stamps of the first CTA, for a picture: {cycles, event << 32 | step}, TIMELINE_EVENTS for each of its roles.
enum Event { WAITED, LOADED, ARRIVED, MULTIPLIED, STORED };
constexpr int TIMELINE_EVENTS = 4096;

struct Recorder {
    u64* at;
    int left;
    __device__ Recorder(u64* trace, int role) : at(trace + role * TIMELINE_EVENTS * 2), left(TIMELINE_EVENTS) {}
    __device__ __forceinline__ void operator()(Event event, u32 step) {
        if constexpr (TIMELINE) {
            if (blockIdx.x || !left) return;
            at[0] = clock64();
            at[1] = static_cast<u64>(event) << 32 | step;
            at += 2, --left;
        }
    }
};

#define ARGUMENTS \
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, \
    const __grid_constant__ TensorMap c_map, unsigned short *c, int M, int N, int K, u64 stride_c, u64 *trace

// ---- loading and multiplying by turns

#if KERNEL == ONE_GROUP
extern "C" __global__ void __launch_bounds__(128, CTAS) one_group(ARGUMENTS) {
    const u32 ring = shared_address(shared), full = ring + RING_BYTES + STAGED_BYTES;
    const bool leader = threadIdx.x == 0;
    if (leader) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(full + 8 * s, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const Tile tile = tile_at(blockIdx.x, (M + BLOCK_M - 1) / BLOCK_M, (N + BLOCK_N - 1) / BLOCK_N, GROUP);
    const int row = tile.m * BLOCK_M, column = tile.n * BLOCK_N, steps = (K + BLOCK_K - 1) / BLOCK_K;

    auto load = [&](int step, u32 stage) {
        const u32 a = ring + stage * STAGE_BYTES, b = a + A_BYTES, barrier = full + 8 * stage;
        // 8 KiB less than what comes: the phase ends before the tile is whole.
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES - (BREAK == EXPECT_LESS ? 8192 : 0));
        for (int box = 0; box < DEPTH; ++box) {
            tma_load_2d(a + box * A_BOX_BYTES, a_map, step * BLOCK_K + box * BOX_K, row, barrier);
            tma_load_2d(b + box * B_BOX_BYTES, b_map, step * BLOCK_K + box * BOX_K, column, barrier);
        }
    };
    if (leader)
        for (int step = 0; step < min(STAGES, steps); ++step) load(step, step);

    Recorder recorder(trace, 0);
    if (!leader) recorder.left = 0;
    float acc[FRAGMENTS][BLOCK_N / 2];
    // With a second stage the products of one step stay under way while the next is waited for.
    constexpr int LAG = STAGES > 1;
    Ring<STAGES> turn;
    u32 before = 0;
    for (int step = 0; step < steps; ++step, turn.advance()) {
        mbarrier_wait(full + 8 * turn.stage, BREAK == PHASE ? 0 : turn.phase);
        recorder(ARRIVED, step);
        const u32 a = ring + turn.stage * STAGE_BYTES;
        multiply(acc, a, a + A_BYTES, step > 0);
        if (BREAK != RELEASE_EARLY) wgmma_wait<LAG>();
        if (step >= LAG) recorder(MULTIPLIED, step - LAG);
        __syncthreads();  // all four warps have read the stage of LAG steps before: it may be filled again
        if (leader && step >= LAG && step - LAG + STAGES < steps) load(step - LAG + STAGES, LAG ? before : turn.stage);
        before = turn.stage;
    }
    wgmma_wait<0>();
    if (LAG) recorder(MULTIPLIED, steps - 1);
    u32 parts = 0;
    epilogue(acc, c_map, ring + RING_BYTES, parts, row, column, 1);
    recorder(STORED, 0);
    if (leader) bulk_wait_read<0>();
}
#endif

// ---- one warp group loads, the others multiply

#if KERNEL != ONE_GROUP
static_assert(STAGES > 1, "a stage is free only when the next one is being multiplied");

constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_REGISTERS = consumer_registers(CONSUMERS, CTAS);
constexpr u32 WARPS = 4 * CONSUMERS;

struct Barriers {
    u32 full, empty;  // one of each a stage, 8 bytes apart
};

// All threads: a stage is full when its bytes have landed, empty when every warp that reads it says so.
__device__ __forceinline__ Barriers make_barriers(u32 at, u32 ctas) {
    const Barriers barriers = {at, at + 8 * STAGES};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(barriers.full + 8 * s, 1);
            mbarrier_init(barriers.empty + 8 * s, WARPS * ctas);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();  // the other CTAs signal these barriers too
    else __syncthreads();
    return barriers;
}

// One thread fills the ring, stage after stage. With SHARED each CTA of the cluster loads a part of B for all of them.
template <bool SHARED>
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, u32 ring, Barriers barriers,
                                        Ring<STAGES>& turn, int row, int column, int first, int last,
                                        Recorder& recorder) {
    constexpr u32 EACH = BLOCK_N / CLUSTER;
    for (int step = first; step < last; ++step, turn.advance()) {
        // A fresh barrier lets a wait for the phase before its first pass.
        mbarrier_wait(barriers.empty + 8 * turn.stage, BREAK == PHASE ? 1 : turn.phase ^ 1);
        recorder(WAITED, step);
        const u32 a = ring + turn.stage * STAGE_BYTES, b = a + A_BYTES, barrier = barriers.full + 8 * turn.stage;
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES - (BREAK == EXPECT_LESS ? 8192 : 0));
        for (int box = 0; box < DEPTH; ++box) {
            const int k = step * BLOCK_K + box * BOX_K;
            tma_load_2d(a + box * A_BOX_BYTES, a_map, k, row, barrier);
            if constexpr (SHARED) {
                const u32 rank = cluster_rank();
                tma_load_2d_multicast(b + box * B_BOX_BYTES + rank * EACH * 128, b_map, k, column + rank * EACH,
                                      barrier, (1 << CLUSTER) - 1);
            } else {
                tma_load_2d(b + box * B_BOX_BYTES, b_map, k, column, barrier);
            }
        }
        recorder(LOADED, step);
    }
}

// One lane a CTA tells it that this warp has read the stage.
template <bool SHARED>
__device__ __forceinline__ void release(u32 barrier) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (SHARED) {
        if (lane < CLUSTER) mbarrier_arrive_cluster(barrier, lane);
    } else {
        if (lane == 0) mbarrier_arrive(barrier);
    }
}

template <bool SHARED>
__device__ __forceinline__ void consume(float (&acc)[FRAGMENTS][BLOCK_N / 2], u32 ring, Barriers barriers,
                                        Ring<STAGES>& turn, int first, int last, Recorder& recorder) {
    const u32 consumer = threadIdx.x / 128 - 1;
    u32 before = 0;
    for (int step = first; step < last; ++step, turn.advance()) {
        mbarrier_wait(barriers.full + 8 * turn.stage, BREAK == PHASE ? 0 : turn.phase);
        recorder(ARRIVED, step);
        const u32 a = ring + turn.stage * STAGE_BYTES;
        multiply(acc, a + consumer * ROWS * 128, a + A_BYTES, step > first);
        // One step stays under way, so that the tensor cores never wait for this loop: the stage before it is free.
        if (BREAK == RELEASE_EARLY) release<SHARED>(barriers.empty + 8 * turn.stage);
        else {
            wgmma_wait<1>();
            if (step > first) {
                recorder(MULTIPLIED, step - 1);
                release<SHARED>(barriers.empty + 8 * before);
            }
        }
        before = turn.stage;
    }
    wgmma_wait<0>();
    recorder(MULTIPLIED, last - 1);
    if (BREAK != RELEASE_EARLY) release<SHARED>(barriers.empty + 8 * before);
}

#endif

#if KERNEL == SPECIALISED
// CTAs of a cluster take tiles below each other. A grid that is smaller than the number of tiles is persistent: the
// producer runs ahead into the next tile while the consumers store this one.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) specialised(ARGUMENTS) {
    const u32 ring = shared_address(shared), group = threadIdx.x / 128, rank = CLUSTER > 1 ? cluster_rank() : 0;
    const Barriers barriers = make_barriers(ring + RING_BYTES + STAGED_BYTES, CLUSTER);
    const int tiles_m = (M + BLOCK_M * CLUSTER - 1) / (BLOCK_M * CLUSTER), tiles_n = (N + BLOCK_N - 1) / BLOCK_N;
    const int steps = (K + BLOCK_K - 1) / BLOCK_K, clusters = gridDim.x / CLUSTER;
    Recorder recorder(trace, group);
    Ring<STAGES> turn;
    if (group == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            prefetch_tensormap(a_map), prefetch_tensormap(b_map), prefetch_tensormap(c_map);
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            for (int index = blockIdx.x / CLUSTER; index < tiles_m * tiles_n; index += clusters) {
                const Tile tile = tile_at(index, tiles_m, tiles_n, GROUP);
                produce<(CLUSTER > 1)>(a_map, b_map, ring, barriers, turn, (tile.m * CLUSTER + rank) * BLOCK_M,
                                       tile.n * BLOCK_N, 0, steps, recorder);
            }
        }
        __syncwarp();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const u32 consumer = group - 1, staged = ring + RING_BYTES + consumer * BUFFERS * PART_BYTES;
        u32 parts = 0;
        Recorder mine(trace, threadIdx.x % 128 ? 0 : group);
        if (threadIdx.x % 128) mine.left = 0;
        float acc[FRAGMENTS][BLOCK_N / 2];
        for (int index = blockIdx.x / CLUSTER; index < tiles_m * tiles_n; index += clusters) {
            const Tile tile = tile_at(index, tiles_m, tiles_n, GROUP);
            consume<(CLUSTER > 1)>(acc, ring, barriers, turn, 0, steps, mine);
            const int row = (tile.m * CLUSTER + rank) * BLOCK_M + consumer * ROWS;
            epilogue(acc, c_map, staged, parts, row, tile.n * BLOCK_N, group);
            mine(STORED, index);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    }
    // A CTA that left would take its shared memory along, into which the others still signal.
    __syncwarp();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();
}
#endif

// ---- a tile's K steps shared by a cluster

#if KERNEL == SPLIT
// For few tiles and many K steps: every CTA of the cluster sums a part, then each adds up a part of the tile, always in
// the same order, through the cluster's shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) split(ARGUMENTS) {
    const u32 ring = shared_address(shared), group = threadIdx.x / 128, rank = cluster_rank();
    const Barriers barriers = make_barriers(ring + SPLIT_BYTES, 1);
    const int tiles_m = (M + BLOCK_M - 1) / BLOCK_M, tiles_n = (N + BLOCK_N - 1) / BLOCK_N;
    const Tile tile = tile_at(blockIdx.x / CLUSTER, tiles_m, tiles_n, GROUP);
    const int row = tile.m * BLOCK_M, column = tile.n * BLOCK_N, steps = (K + BLOCK_K - 1) / BLOCK_K;
    const int first = steps * rank / CLUSTER, last = steps * (rank + 1) / CLUSTER;
    Recorder recorder(trace, group);
    Ring<STAGES> turn;
    if (group == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            prefetch_tensormap(a_map), prefetch_tensormap(b_map);
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            produce<false>(a_map, b_map, ring, barriers, turn, row, column, first, last, recorder);
        }
        __syncwarp();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const int consumer = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        Recorder none(trace, 0);
        none.left = 0;
        float acc[FRAGMENTS][BLOCK_N / 2];
        consume<false>(acc, ring, barriers, turn, first, last, none);
        named_barrier_sync(8, 128 * CONSUMERS);  // the others' products still read the ring, which now takes the sums
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {
                const u32 r = consumer * ROWS + f * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8;
                const u32 c = i / 4 * 8 + lane % 4 * 2 + i % 2;
                asm volatile("st.shared.f32 [%0], %1;"
                             ::"r"(ring + 4 * (SWAP ? c * PITCH + r : r * PITCH + c)), "f"(acc[f][i]) : "memory");
            }
    }
    cluster_arrive(), cluster_wait();
    if (group > 0) {
        const int c_rows = SWAP ? N : M, c_columns = SWAP ? M : N;
        const int c_row = SWAP ? column : row, c_column = SWAP ? row : column;
        constexpr int EACH = LINES * LINE / 8 / CLUSTER;  // eight elements, 16 bytes of C, at a time
        for (int i = threadIdx.x - 128; i < EACH; i += 128 * CONSUMERS) {
            const int at = rank * EACH + i, line = at / (LINE / 8), begin = at % (LINE / 8) * 8;
            if (c_row + line >= c_rows || c_column + begin >= c_columns) continue;
            float sum[8] = {};
#pragma unroll
            for (u32 other = 0; other < CLUSTER; ++other) {
                const u32 from = ring + 4 * (line * PITCH + begin);
                const float4 low = load_shared_cluster(from, other), high = load_shared_cluster(from + 16, other);
                sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
                sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
            }
            const uint4 packed = {pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]), pack_bf16x2(sum[4], sum[5]),
                                  pack_bf16x2(sum[6], sum[7])};
            *reinterpret_cast<uint4*>(c + (c_row + line) * stride_c + c_column + begin) = packed;
        }
    }
    cluster_arrive(), cluster_wait();  // nobody leaves while its sums are read
}
#endif
