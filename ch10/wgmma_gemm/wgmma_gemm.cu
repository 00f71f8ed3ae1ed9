// C (M x N, bf16) = A (M x K, bf16) B^T (B is N x K, bf16), with sums in float32, on Hopper's tensor cores.
//
// How a tile of C, BLOCK_M x BLOCK_N, is computed:
//
//     A, B in L2 --TMA--> ring of STAGES --wgmma--> registers --stmatrix--> shared memory --TMA--> C
//
//   1. One thread asks TMA for the next boxes of A and B. Their rows are 64 elements long (128 bytes) and swizzled.
//   2. The `full` barrier of the stage completes when all its bytes have landed.
//   3. Warp groups (128 threads each) issue wgmma, which reads the stage; the sums stay in registers.
//   4. When wgmma has finished with a stage, the stage is empty, and step 1 may fill it again.
//   5. After the last step along K, the epilogue rounds the sums to bf16 and TMA stores them.
//
// Compile it with `python -m ch10.wgmma_gemm --compile`, or by hand:
//
//     nvcc -arch=sm_90a -Itilelab/include -cubin ch10/wgmma_gemm/wgmma_gemm.cu -DKERNEL=SPECIALISED -DBLOCK_M=128
//         -DBLOCK_N=256 -DSTAGES=4 -DCONSUMERS=2 -DBOXES_PER_STAGE=1 -DCLUSTER=1 -DCLUSTER_N=1 -DEPILOGUE_SUBTILE=4 -DGROUP_M=4 -DSWAP=0
//
// KERNEL selects one of three kernels:
//   ONE_GROUP    one warp group issues both the loads and the products.
//   SPECIALISED  one warp group (the producer) loads, CONSUMERS warp groups multiply; persistent if the grid
//                is smaller than the number of tiles.
//   SPLIT        like SPECIALISED, but the CTAs of a cluster divide the K steps of one tile and then add up its parts.
//
// The other macros, set with -D:
//   BLOCK_M, BLOCK_N   the tile of C
//   CONSUMERS          warp groups that multiply; each takes BLOCK_M / CONSUMERS rows of the tile
//   STAGES             stages of the ring
//   BOXES_PER_STAGE    boxes of 64 columns of A, and as many of B, that a stage holds
//   CLUSTER            CTAs one below the other, which share tiles of B; for SPLIT those that share a tile of C
//   CLUSTER_N          columns of such CTAs in a cluster; CTAs side by side share tiles of A
//   EPILOGUE_SUBTILE   number of parts in which the epilogue stores its tile
//   GROUP_M            rows of tiles in a band of the raster (tile_coordinates)
//   SWAP               1: A and B have changed places, and C is stored transposed
//   RECORD             if it is defined, the kernel writes time stamps (recorder.cuh)
#include "wgmma.cuh"
#include "recorder.cuh"

#define ONE_GROUP 0
#define SPECIALISED 1
#define SPLIT 2

constexpr int BOX_K = 64;  // 128 bytes, the widest swizzle; a swizzled box cannot be wider
constexpr int BLOCK_K = BOX_K * BOXES_PER_STAGE;
constexpr int ROWS = BLOCK_M / CONSUMERS, FRAGMENTS = ROWS / 64;  // of one consumer; wgmma takes 64 rows at a time
constexpr u32 A_BOX_BYTES = BLOCK_M * BOX_K * 2, B_BOX_BYTES = BLOCK_N * BOX_K * 2;
constexpr u32 A_BYTES = A_BOX_BYTES * BOXES_PER_STAGE, STAGE_BYTES = A_BYTES + B_BOX_BYTES * BOXES_PER_STAGE;
constexpr u32 RING_BYTES = STAGES * STAGE_BYTES;

// The epilogue stages C in subtiles of COLUMNS columns, cut into boxes as wide as a swizzle. A transposed C has boxes
// of 64 columns, which are 64 rows of the product.
constexpr int COLUMNS = BLOCK_N / EPILOGUE_SUBTILE;
constexpr int BOX = SWAP || COLUMNS % 64 == 0 ? 64 : COLUMNS % 32 == 0 ? 32 : 16;
constexpr int BOX_ROWS = SWAP ? COLUMNS : 64;  // of the boxes of C
constexpr u32 SUBTILE_BYTES = ROWS * COLUMNS * 2;  // of one consumer
constexpr u32 BUFFERS = EPILOGUE_SUBTILE > 1 ? 2 : 1;  // one is stored while the next is written
constexpr u32 STAGED_BYTES = CONSUMERS * BUFFERS * SUBTILE_BYTES;

// SPLIT keeps the sums in shared memory as C lies in global memory. If C_COLUMNS is a multiple of 32, a row begins 8
// banks after the one before it.
constexpr int C_ROWS = SWAP ? BLOCK_N : BLOCK_M, C_COLUMNS = SWAP ? BLOCK_M : BLOCK_N, PITCH = C_COLUMNS + 8;
constexpr u32 SUMS_BYTES = C_ROWS * PITCH * 4, SPLIT_BYTES = RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;
static_assert(ROWS % 64 == 0 && BLOCK_N % ((SWAP ? 8 : 16) * EPILOGUE_SUBTILE) == 0, "");

// The ring and the staged C. The swizzle pattern repeats every 1,024 bytes, so tiles are aligned to that. The barriers
// are in it too: a separate static array would come first, and aligning the ring behind it would waste 1,024 bytes.
extern __shared__ __align__(1024) char shared[];

// One step along K: issue the products of one stage and commit them as a group. They are still running on return.
__device__ __forceinline__ void multiply(float (&acc)[FRAGMENTS][BLOCK_N / 2], u32 a, u32 b, bool accumulate) {
    const u64 a_descriptor = wgmma_descriptor(a), b_descriptor = wgmma_descriptor(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_K / 16; ++k) {
        // The next 16 columns start 32 bytes further in a row of 128 bytes, in spite of the swizzle: the hardware
        // applies the XOR to the address that it has computed.
        const int box = k / 4, within = k % 4 * 32;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
            wgmma_m64k16<BLOCK_N>(acc[f], a_descriptor + (box * A_BOX_BYTES + f * 64 * 128 + within) / 16,
                                  b_descriptor + (box * B_BOX_BYTES + within) / 16, accumulate || k > 0);
    }
    wgmma_commit();
}

// Write one subtile of a consumer's C to shared memory as bf16, in the swizzled boxes that the tensor map describes.
//
// A warp holds 16 rows (drawing in wgmma.cuh). One stmatrix stores 16 of their columns, j to j + 15; d is acc + j / 2:
//
//                 columns j .. j + 7    j + 8 .. j + 15
//     rows 0-7    matrix 0: d[0] d[1]   matrix 2: d[4] d[5]
//     rows 8-15   matrix 1: d[2] d[3]   matrix 3: d[6] d[7]
//
// Lane l passes the address of row l % 8 of matrix l / 8: row l % 16 of the warp, and the 16-byte unit j / 8 + l / 16.
// If C is transposed, a matrix row is a column of the product: row j + l % 8 + 8 (l / 16), unit 2 warp + l / 8 % 2. Then
// a subtile may end with eight columns, matrices 0 and 1.
__device__ __forceinline__ void stage_subtile(const float (&acc)[FRAGMENTS][BLOCK_N / 2], u32 staged, int subtile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 16) {
            const float* d = acc[f] + (subtile * COLUMNS + j) / 2;
            const u32 matrix0 = pack_bf16x2(d[0], d[1]), matrix1 = pack_bf16x2(d[2], d[3]);
            const u32 transposed_row = j + lane % 8 + lane / 16 * 8, transposed_unit = 2 * warp + lane / 8 % 2;
            const u32 transposed =
                staged + f * BOX_ROWS * 128 + swizzle_offset(transposed_row * 128 + transposed_unit * 16, 128);
            if (SWAP && j + 8 == COLUMNS) {
                stmatrix_x2_trans(transposed, matrix0, matrix1);
                continue;
            }
            const u32 matrix2 = pack_bf16x2(d[4], d[5]), matrix3 = pack_bf16x2(d[6], d[7]);
            if (SWAP) {
                stmatrix_x4_trans(transposed, matrix0, matrix1, matrix2, matrix3);
            } else {
                const u32 row = 16 * warp + lane % 16, unit = j % BOX / 8 + lane / 16;
                stmatrix_x4(staged + (j / BOX * FRAGMENTS + f) * 64 * BOX * 2 +
                                swizzle_offset(row * BOX * 2 + unit * 16, BOX * 2),
                            matrix0, matrix1, matrix2, matrix3);
            }
        }
}

// One thread per consumer asks TMA to store the staged boxes. TMA leaves out what lies outside of C.
__device__ __forceinline__ void store_subtile(const TensorMap& c_map, u32 staged, int row, int column, int subtile) {
    if constexpr (SWAP) {
        for (int f = 0; f < FRAGMENTS; ++f)
            tma_store_2d(c_map, staged + f * BOX_ROWS * 128, row + f * 64, column + subtile * COLUMNS);
    } else {
        for (int j = 0; j < COLUMNS; j += BOX)
            for (int f = 0; f < FRAGMENTS; ++f)
                tma_store_2d(c_map, staged + (j / BOX * FRAGMENTS + f) * 64 * BOX * 2, column + subtile * COLUMNS + j,
                             row + f * 64);
    }
    bulk_commit();
}

// Store one consumer's part of a tile. `staged` is the consumer's memory, `stored` counts the subtiles that it has
// staged so far, and `barrier` is the named barrier of its warp group. The last stores may still read shared memory
// when this returns.
__device__ __forceinline__ void epilogue(const float (&acc)[FRAGMENTS][BLOCK_N / 2], const TensorMap& c_map, u32 staged,
                                         u32& stored, int row, int column, u32 barrier) {
    const bool leader = threadIdx.x % 128 == 0;
#pragma unroll
    for (int subtile = 0; subtile < EPILOGUE_SUBTILE; ++subtile) {
        const u32 buffer = staged + stored++ % BUFFERS * SUBTILE_BYTES;
        if (leader) bulk_wait_read<BUFFERS - 1>();  // the earlier stores from this buffer have read it
        named_barrier_sync(barrier, 128);
        stage_subtile(acc, buffer, subtile);
        fence_proxy_async();  // TMA must see what the threads have written
        named_barrier_sync(barrier, 128);
        if (leader) store_subtile(c_map, buffer, row, column, subtile);
    }
}

// All three kernels take the same arguments. Only SPLIT writes C through `c`, whose rows are `stride_c` elements apart.

// ---- ONE_GROUP: one warp group loads and multiplies

#if KERNEL == ONE_GROUP
extern "C" __global__ void __launch_bounds__(128, 1)
    one_group(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
              const __grid_constant__ TensorMap c_map, unsigned short* c, int M, int N, int K, u64 stride_c,
              Recording recording) {
    RingState<STAGES> state(recording);
    const u32 ring = shared_address(shared), full = ring + RING_BYTES + STAGED_BYTES;
    const bool leader = threadIdx.x == 0;
    if (leader) {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(full + 8 * s, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    state.record(STARTED);
    const Tile tile = tile_coordinates(blockIdx.x, (M + BLOCK_M - 1) / BLOCK_M, (N + BLOCK_N - 1) / BLOCK_N, GROUP_M);
    const int row = tile.m * BLOCK_M, column = tile.n * BLOCK_N, steps = (K + BLOCK_K - 1) / BLOCK_K;

    auto load = [&](int step, u32 stage) {
        const u32 a = ring + stage * STAGE_BYTES, b = a + A_BYTES, barrier = full + 8 * stage;
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
        for (int box = 0; box < BOXES_PER_STAGE; ++box) {
            tma_load_2d(a + box * A_BOX_BYTES, a_map, step * BLOCK_K + box * BOX_K, row, barrier);
            tma_load_2d(b + box * B_BOX_BYTES, b_map, step * BLOCK_K + box * BOX_K, column, barrier);
        }
        state.record(LOADED, step, stage);
    };
    if (leader)
        for (int step = 0; step < min(STAGES, steps); ++step) load(step, step);

    float acc[FRAGMENTS][BLOCK_N / 2];
    // With two or more stages, the products of one step keep running while the next stage is waited for.
    constexpr int LAG = STAGES > 1;
    u32 previous_stage = 0;
    for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(full + 8 * state.stage, state.phase);
        state.record(ARRIVED, step, state.stage);
        const u32 a = ring + state.stage * STAGE_BYTES;
        multiply(acc, a, a + A_BYTES, step > 0);
        wgmma_wait<LAG>();
        if (step >= LAG) state.record(MULTIPLIED, step - LAG);
        __syncthreads();  // all four warps have read the stage of LAG steps ago, so it may be filled again
        if (leader && step >= LAG && step - LAG + STAGES < steps)
            load(step - LAG + STAGES, LAG ? previous_stage : state.stage);
        previous_stage = state.stage;
    }
    wgmma_wait<0>();
    if (LAG) state.record(MULTIPLIED, steps - 1);
    u32 stored = 0;
    epilogue(acc, c_map, ring + RING_BYTES, stored, row, column, 1);
    state.record(STORED);
    if (leader) bulk_wait_read<0>();  // shared memory must outlive the stores that read it
    state.finish();
}
#endif

// ---- SPECIALISED and SPLIT: one warp group loads, the others multiply

#if KERNEL != ONE_GROUP
static_assert(STAGES > 1, "a stage is only released while the next one is being multiplied");

constexpr int THREADS = 128 * (1 + CONSUMERS), CONSUMER_REGISTERS = consumer_registers(CONSUMERS, 1);
constexpr u32 CLUSTER_SIZE = CLUSTER * CLUSTER_N;  // the CTA of rank r is in row r % CLUSTER, column r / CLUSTER

struct Barriers {
    u32 full, empty;  // the first of STAGES barriers each, 8 bytes apart
};

// All threads call this. A stage becomes empty when each warp that reads it has arrived, in each of `ctas` CTAs.
__device__ __forceinline__ Barriers make_barriers(u32 address, u32 ctas) {
    const Barriers barriers = {address, address + 8 * STAGES};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(barriers.full + 8 * s, 1);
            mbarrier_init(barriers.empty + 8 * s, 4 * CONSUMERS * ctas);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    if (CLUSTER_SIZE > 1) cluster_arrive(), cluster_wait();  // other CTAs will signal these barriers
    else __syncthreads();
    return barriers;
}

// Load a box of BOX_ROWS rows that SHARERS CTAs need, of which this one is number `sharer`; bit r of `ctas` stands for
// the CTA of rank r in the cluster. Each CTA loads its part of the rows into the shared memory of all sharers. A swizzled
// part has whole groups of eight rows. If the rows do not divide so, the CTAs take turns in loading whole boxes.
template <int SHARERS, int BOX_ROWS>
__device__ __forceinline__ void load_box(u32 box, const TensorMap& map, int k, int row, u32 barrier, u32 sharer,
                                         u32 ctas) {
    if constexpr (SHARERS == 1) {
        tma_load_2d(box, map, k, row, barrier);
    } else if constexpr (BOX_ROWS % (8 * SHARERS) == 0) {
        const u32 part = sharer * (BOX_ROWS / SHARERS);
        tma_load_2d_multicast(box + part * 128, map, k, row + part, barrier, ctas);
    } else if (k / BOX_K % SHARERS == sharer) {
        tma_load_2d_multicast(box, map, k, row, barrier, ctas);
    }
}

// The producer's thread fills the ring, stage by stage. With MULTICAST, the CTAs of a cluster share what they load: those
// one below the other the boxes of B, those side by side the boxes of A.
template <bool MULTICAST>
__device__ __forceinline__ void produce(const TensorMap& a_map, const TensorMap& b_map, u32 ring, Barriers barriers,
                                        RingState<STAGES>& state, int row, int column, int first, int last) {
    const u32 rank = MULTICAST ? cluster_rank() : 0, m = rank % CLUSTER, n = rank / CLUSTER;
    u32 same_row = 0;
    for (int i = 0; i < CLUSTER_N; ++i) same_row |= 1 << (i * CLUSTER + m);
    const u32 same_column = ((1 << CLUSTER) - 1) << (n * CLUSTER);
    for (int step = first; step < last; ++step, state.advance()) {
        // On a new barrier, a wait for the phase before the first one returns at once: all stages are empty.
        mbarrier_wait(barriers.empty + 8 * state.stage, state.phase ^ 1);
        const u32 freed = state.read_clock();
        const u32 a = ring + state.stage * STAGE_BYTES, b = a + A_BYTES;
        const u32 barrier = barriers.full + 8 * state.stage;
        mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
        for (int box = 0; box < BOXES_PER_STAGE; ++box) {
            const int k = step * BLOCK_K + box * BOX_K;
            load_box<MULTICAST ? CLUSTER_N : 1, BLOCK_M>(a + box * A_BOX_BYTES, a_map, k, row, barrier, n, same_row);
            load_box<MULTICAST ? CLUSTER : 1, BLOCK_N>(b + box * B_BOX_BYTES, b_map, k, column, barrier, m,
                                                       same_column);
        }
        state.record_at(freed, FREE, step, state.stage);
        state.record(LOADED, step, state.stage);
    }
}

// A warp has read a stage. One lane per CTA that loads into the stage tells that CTA's `empty` barrier.
template <bool MULTICAST>
__device__ __forceinline__ void release(u32 barrier) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (MULTICAST) {
        const u32 rank = CLUSTER_N > 1 ? cluster_rank() : 0;  // with one column, all CTAs load into the stage
        if (lane < CLUSTER_SIZE && (lane % CLUSTER == rank % CLUSTER || lane / CLUSTER == rank / CLUSTER))
            mbarrier_arrive_cluster(barrier, lane);
    } else {
        if (lane == 0) mbarrier_arrive(barrier);
    }
}

// A consumer multiplies the steps first to last - 1 of its rows.
template <bool MULTICAST>
__device__ __forceinline__ void consume(float (&acc)[FRAGMENTS][BLOCK_N / 2], u32 ring, Barriers barriers,
                                        RingState<STAGES>& state, int first, int last) {
    const u32 consumer = threadIdx.x / 128 - 1;
    u32 previous_stage = 0;
    for (int step = first; step < last; ++step, state.advance()) {
        mbarrier_wait(barriers.full + 8 * state.stage, state.phase);
        const u32 arrived = state.read_clock();
        const u32 a = ring + state.stage * STAGE_BYTES;
        multiply(acc, a + consumer * ROWS * 128, a + A_BYTES, step > first);
        state.record_at(arrived, ARRIVED, step, state.stage);
        // One group of products stays in flight, so the tensor cores never wait for this loop. The group before it has
        // finished, and so its stage is free.
        wgmma_wait<1>();
        const u32 multiplied = state.read_clock();
        if (step > first) {
            release<MULTICAST>(barriers.empty + 8 * previous_stage);
            state.record_at(multiplied, MULTIPLIED, step - 1);
        }
        previous_stage = state.stage;
    }
    wgmma_wait<0>();
    release<MULTICAST>(barriers.empty + 8 * previous_stage);
    state.record(MULTIPLIED, last - 1);
}
#endif

#if KERNEL == SPECIALISED
// The CTAs of a cluster take neighbouring tiles. If the grid has fewer CTAs than there are tiles, each CTA takes
// several (persistent): the producer already loads the next tile while the consumers store this one.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    specialised(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                const __grid_constant__ TensorMap c_map, unsigned short* c, int M, int N, int K, u64 stride_c,
                Recording recording) {
    RingState<STAGES> state(recording);
    constexpr bool MULTICAST = CLUSTER_SIZE > 1;
    const u32 ring = shared_address(shared), warpgroup = threadIdx.x / 128, rank = MULTICAST ? cluster_rank() : 0;
    // A stage is filled by the CTAs of its row and of its column.
    const Barriers barriers = make_barriers(ring + RING_BYTES + STAGED_BYTES, CLUSTER + CLUSTER_N - 1);
    const int tiles_m = (M + BLOCK_M * CLUSTER - 1) / (BLOCK_M * CLUSTER);
    const int tiles_n = (N + BLOCK_N * CLUSTER_N - 1) / (BLOCK_N * CLUSTER_N);
    const int steps = (K + BLOCK_K - 1) / BLOCK_K, clusters = gridDim.x / CLUSTER_SIZE;
    const int m = rank % CLUSTER, n = rank / CLUSTER;  // in the cluster
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            prefetch_tensormap(a_map), prefetch_tensormap(b_map), prefetch_tensormap(c_map);
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            state.record(STARTED);
            for (int tile_id = blockIdx.x / CLUSTER_SIZE; tile_id < tiles_m * tiles_n; tile_id += clusters) {
                const Tile tile = tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M);
                produce<MULTICAST>(a_map, b_map, ring, barriers, state, (tile.m * CLUSTER + m) * BLOCK_M,
                                   (tile.n * CLUSTER_N + n) * BLOCK_N, 0, steps);
            }
        }
        __syncwarp();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const u32 consumer = warpgroup - 1, staged = ring + RING_BYTES + consumer * BUFFERS * SUBTILE_BYTES;
        u32 stored = 0;
        float acc[FRAGMENTS][BLOCK_N / 2];
        state.record(STARTED);
        for (int tile_id = blockIdx.x / CLUSTER_SIZE; tile_id < tiles_m * tiles_n; tile_id += clusters) {
            const Tile tile = tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M);
            consume<MULTICAST>(acc, ring, barriers, state, 0, steps);
            const int row = (tile.m * CLUSTER + m) * BLOCK_M + consumer * ROWS;
            epilogue(acc, c_map, staged, stored, row, (tile.n * CLUSTER_N + n) * BLOCK_N, warpgroup);
            state.record(STORED, tile_id);
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read<0>();  // shared memory must outlive the stores that read it
    }
    state.finish();
    // The other CTAs of the cluster still signal barriers in this CTA's shared memory, which ends with the CTA.
    __syncwarp();
    if (MULTICAST) cluster_arrive(), cluster_wait();
}
#endif

// ---- SPLIT: a cluster shares the K steps of a tile

#if KERNEL == SPLIT
constexpr u32 CONSUMERS_BARRIER = 8;  // the named barrier of all consumers

// For a C of few tiles and a long K. Each CTA of the cluster multiplies a part of the K steps and leaves its sums in
// shared memory. Then each CTA adds up 1 / CLUSTER of the tile, reading the sums of all CTAs in a fixed order.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    split(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
          const __grid_constant__ TensorMap c_map, unsigned short* c, int M, int N, int K, u64 stride_c,
          Recording recording) {
    RingState<STAGES> state(recording);
    const u32 ring = shared_address(shared), warpgroup = threadIdx.x / 128, rank = cluster_rank();
    const Barriers barriers = make_barriers(ring + SPLIT_BYTES, 1);
    const int tiles_m = (M + BLOCK_M - 1) / BLOCK_M, tiles_n = (N + BLOCK_N - 1) / BLOCK_N;
    const Tile tile = tile_coordinates(blockIdx.x / CLUSTER, tiles_m, tiles_n, GROUP_M);
    const int row = tile.m * BLOCK_M, column = tile.n * BLOCK_N, steps = (K + BLOCK_K - 1) / BLOCK_K;
    const int first = steps * rank / CLUSTER, last = steps * (rank + 1) / CLUSTER;
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            prefetch_tensormap(a_map), prefetch_tensormap(b_map);
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            produce<false>(a_map, b_map, ring, barriers, state, row, column, first, last);
        }
        __syncwarp();
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        const int consumer = warpgroup - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        float acc[FRAGMENTS][BLOCK_N / 2];
        consume<false>(acc, ring, barriers, state, first, last);
        // The sums overwrite the ring, which other consumers may still read.
        named_barrier_sync(CONSUMERS_BARRIER, 128 * CONSUMERS);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) {  // the place of acc[f][i] is drawn in wgmma.cuh
                const u32 r = consumer * ROWS + f * 64 + 16 * warp + lane / 4 + i / 2 % 2 * 8;
                const u32 c = i / 4 * 8 + lane % 4 * 2 + i % 2;
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(ring + 4 * (SWAP ? c * PITCH + r : r * PITCH + c)),
                             "f"(acc[f][i])
                             : "memory");
            }
    }
    cluster_arrive(), cluster_wait();  // all sums of the cluster are written
    if (warpgroup > 0) {
        const int c_rows = SWAP ? N : M, c_columns = SWAP ? M : N;
        const int c_row = SWAP ? column : row, c_column = SWAP ? row : column;
        constexpr int UNITS = C_ROWS * C_COLUMNS / 8;  // a unit is eight elements, 16 bytes of C
        constexpr int UNITS_PER_CTA = (UNITS + CLUSTER - 1) / CLUSTER;  // 3 CTAs do not share evenly
        const int last_unit = min((int(rank) + 1) * UNITS_PER_CTA, UNITS);
        for (int unit = rank * UNITS_PER_CTA + threadIdx.x - 128; unit < last_unit; unit += 128 * CONSUMERS) {
            const int line = unit / (C_COLUMNS / 8), begin = unit % (C_COLUMNS / 8) * 8;
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
    cluster_arrive(), cluster_wait();  // no CTA ends while another still reads its sums
}
#endif
