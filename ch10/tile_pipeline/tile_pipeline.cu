// Tiles of two dimensions, moved by tensor maps (TMA). KERNEL selects the kernel that is compiled:
//
//   TILE_COPY    out = x                     one thread moves boxes through a ring; no thread touches the data
//   ACCUMULATE   out = sum over b of x[b]    like the copy, but L2 adds each tile to out
//   STENCIL      centre x + edge (up + down + left + right): each box brings a tile and its halo
//   TRANSPOSE    out = x transposed: a box is loaded, turned in registers and stored
//   ADD_SHARED   out[b] = x[b] + y: the CTAs of a cluster load each tile of y once, for all of them (multicast)
//   DUMP         one box as it lies in shared memory, byte by byte
//
// Compile it with `python -m ch10.tile_pipeline --target sm_90a`, or by hand:
//
//     nvcc -arch=sm_90a -Itilelab/include -cubin ch10/tile_pipeline/tile_pipeline.cu -DKERNEL=TILE_COPY -DROWS=2
//         -DCOLUMNS=256 -DITEMSIZE=4 -DTHREADS=32 -DSTAGES=1 -DTILES_PER_CTA=1 -DPRODUCER=0 -DSWIZZLE=0 -DBLOCK=1
//         -DRASTER=1 -DCLUSTER=1
//
// Each kernel loads in the same four steps:
//
//   1. One thread initialises a `full` barrier per stage, and fences so that TMA sees the barrier.
//   2. It announces the bytes of the whole box to the barrier (mbarrier_arrive_expect_tx).
//   3. It names the box by the coordinates of its corner (tma_load_2d).
//   4. The user of the tile waits for the barrier. The phase flips each time the ring comes round.
//
// Two rules of TMA shape the code. A load must start at a multiple of 16 bytes of its row; otherwise it is an illegal
// instruction. A box may stick out of its tensor: a load fills that part with zeros or NaN, which count as landed
// bytes. A store leaves that part out, but only in whole units of 16 bytes, so rows of results must be whole units.
//
// The other macros, set with -D:
//   ROWS, COLUMNS, ITEMSIZE   the tile of results, and the bytes of an element
//   THREADS                   threads per block; TILE_COPY and ACCUMULATE use only one
//   STAGES, TILES_PER_CTA     size of the ring, and the tiles along x that pass through it
//   PRODUCER                  STENCIL: 0 if a computing thread starts the loads, 1 if an extra warp does
//   SWIZZLE, BLOCK, RASTER    TRANSPOSE: bytes (0: none), side of a thread's block, rows of tiles in a band
//   CLUSTER                   ADD_SHARED: number of CTAs that share y
#include "tma.cuh"

#define TILE_COPY 0
#define ACCUMULATE 1
#define STENCIL 2
#define TRANSPOSE 3
#define ADD_SHARED 4
#define DUMP 5

typedef unsigned char u8;

__device__ constexpr u32 round_up(u32 value, u32 unit) { return (value + unit - 1) / unit * unit; }

// TMA needs tiles at multiples of 128 bytes, and swizzled ones at multiples of 1,024.
constexpr u32 TILE_BYTES = ROWS * COLUMNS * ITEMSIZE, STAGE_BYTES = round_up(TILE_BYTES, 128);
extern __shared__ __align__(128) u8 memory[];

// ---- TILE_COPY and ACCUMULATE

// Move `tiles` tiles, one after the other, through a ring of STAGES: `load` fills a stage, `store` empties it.
template <typename Load, typename Store>
__device__ __forceinline__ void move_through_ring(u32 tiles, Load load, Store store) {
    __shared__ __align__(8) u64 full[STAGES];
    const u32 ring = shared_address(memory);
    for (u32 stage = 0; stage < STAGES; ++stage) mbarrier_init(shared_address(full + stage), 1);
    fence_mbarrier_init();

    auto fill = [&](u32 tile) {
        if (tile >= tiles) return;
        const u32 stage = tile % STAGES, barrier = shared_address(full + stage);
        mbarrier_arrive_expect_tx(barrier, TILE_BYTES);
        load(tile, ring + stage * STAGE_BYTES, barrier);
    };
    for (u32 tile = 0; tile < STAGES; ++tile) fill(tile);
    for (u32 tile = 0; tile < tiles; ++tile) {
        const u32 stage = tile % STAGES;
        mbarrier_wait(shared_address(full + stage), tile / STAGES & 1);
        store(tile, ring + stage * STAGE_BYTES);
        bulk_commit();
        // With two or more stages, refill the stage before this one: its store has had a whole step to finish.
        constexpr int BEHIND = STAGES > 1;
        bulk_wait_read<BEHIND>();
        if (!BEHIND || tile) fill(tile + STAGES - BEHIND);
    }
    bulk_wait_read<0>();  // shared memory must outlive the stores that read it
}

// The tiles of one CTA: TILES_PER_CTA neighbours in one line of tiles. Lines are counted through all matrices. CTAs
// start in the order of their tiles, so the GPU moves over memory in one narrow front, which suits DRAM.
struct TileRange {
    u32 first, tiles, line;

    __device__ __forceinline__ explicit TileRange(u32 tiles_x) {
        const u32 ranges = (tiles_x + TILES_PER_CTA - 1) / TILES_PER_CTA;
        first = blockIdx.x % ranges * TILES_PER_CTA;
        tiles = min(tiles_x - first, u32{TILES_PER_CTA});
        line = blockIdx.x / ranges;
    }
    __device__ __forceinline__ int column(u32 tile) const { return static_cast<int>((first + tile) * COLUMNS); }
};

#if KERNEL == TILE_COPY
extern "C" __global__ void __launch_bounds__(THREADS)
    tile_copy(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, u32 tiles_x) {
    if (threadIdx.x != 0) return;
    const TileRange range(tiles_x);
    const int row = static_cast<int>(range.line * ROWS);
    move_through_ring(
        range.tiles, [&](u32 tile, u32 to, u32 barrier) { tma_load_2d(to, x, range.column(tile), row, barrier); },
        [&](u32 tile, u32 from) { tma_store_2d(out, from, range.column(tile), row); });
}
#endif

#if KERNEL == ACCUMULATE
// The tiles of the matrices are added to out in the order in which they arrive. The map of x has three dimensions, so
// that a tile that sticks out of one matrix does not reach into the next.
extern "C" __global__ void __launch_bounds__(THREADS)
    accumulate(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, u32 tiles_x, u32 tiles_y) {
    if (threadIdx.x != 0) return;
    const TileRange range(tiles_x);
    const int row = static_cast<int>(range.line % tiles_y * ROWS), batch = static_cast<int>(range.line / tiles_y);
    move_through_ring(
        range.tiles,
        [&](u32 tile, u32 to, u32 barrier) { tma_load_3d(to, x, range.column(tile), row, batch, barrier); },
        [&](u32 tile, u32 from) { tma_reduce_add_2d(out, from, range.column(tile), row); });
}
#endif

// ---- STENCIL
//
//     +---+---------+---+   A box is the tile with one more row above and below, and one more unit of 16 bytes (4
//     |   |  halo   |   |   floats) on each side, of which the stencil reads one column. SPLITS threads share a
//     |  h|  tile   |h  |   column of the tile and walk down ROWS_PER_THREAD rows each.
//     |   |  halo   |   |
//     +---+---------+---+

#if KERNEL == STENCIL
enum { THREAD, WARP };
constexpr u32 LEFT = 4, HALO_ROWS = ROWS + 2, HALO_COLUMNS = LEFT + COLUMNS + 4;
constexpr u32 HALO_BYTES = HALO_ROWS * HALO_COLUMNS * sizeof(float), HALO_STAGE = round_up(HALO_BYTES, 128);
constexpr u32 SPLITS = THREADS > COLUMNS ? THREADS / COLUMNS : 1, ROWS_PER_THREAD = ROWS > SPLITS ? ROWS / SPLITS : 1;

extern "C" __global__ void __launch_bounds__(THREADS + (PRODUCER == WARP ? 32 : 0))
    stencil(const __grid_constant__ TensorMap x, float* out, u64 stride, u32 rows, u32 columns, float centre,
            float edge) {
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    const TileRange range((columns + COLUMNS - 1) / COLUMNS);
    const u32 row = range.line * ROWS;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared_address(full + stage), 1);
            mbarrier_init(shared_address(empty + stage), THREADS / 32);  // one arrival per computing warp
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    auto fill = [&](u32 tile) {
        const u32 stage = tile % STAGES, barrier = shared_address(full + stage);
        mbarrier_arrive_expect_tx(barrier, HALO_BYTES);
        // Coordinates may be negative. TMA fills in the part outside of x.
        tma_load_2d(shared_address(memory) + stage * HALO_STAGE, x, range.column(tile) - static_cast<int>(LEFT),
                    static_cast<int>(row) - 1, barrier);
    };

    if constexpr (PRODUCER == WARP) {
        if (threadIdx.x >= THREADS) {
            if (threadIdx.x == THREADS)
                for (u32 tile = 0; tile < range.tiles; ++tile) {
                    // On a new barrier, a wait for the phase before the first one returns at once.
                    mbarrier_wait(shared_address(empty + tile % STAGES), (tile / STAGES & 1) ^ 1);
                    fill(tile);
                }
            return;
        }
    } else if (threadIdx.x == 0) {
        for (u32 tile = 0; tile < min(range.tiles, u32{STAGES}); ++tile) fill(tile);
    }

    const u32 across = threadIdx.x % COLUMNS, down = threadIdx.x / COLUMNS * ROWS_PER_THREAD;
    for (u32 tile = 0; tile < range.tiles; ++tile) {
        const u32 stage = tile % STAGES, column = range.column(tile) + across;
        mbarrier_wait(shared_address(full + stage), tile / STAGES & 1);
        const float* box = reinterpret_cast<const float*>(memory + stage * HALO_STAGE);
        const float* from = box + (down + 1) * HALO_COLUMNS + across + LEFT;
        float* to = out + (row + down) * stride + column;
        const u32 inside = column < columns && row + down < rows ? rows - row - down : 0;
        // Two of the five values are still in registers from the row above, so each result takes three reads.
        float above = from[-static_cast<int>(HALO_COLUMNS)], here = from[0];
#pragma unroll 8
        for (u32 i = 0; i < ROWS_PER_THREAD; ++i, from += HALO_COLUMNS, to += stride) {
            const float below = from[HALO_COLUMNS];
            const float result = fmaf(centre, here, edge * ((above + below) + (from[-1] + from[1])));
            if (i < inside) *to = result;
            above = here;
            here = below;
        }
        if constexpr (PRODUCER == WARP) {
            __syncwarp();  // all lanes have read the stage
            if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(empty + stage));
        } else if (tile + STAGES < range.tiles) {
            __syncthreads();
            if (threadIdx.x == 0) fill(tile + STAGES);
        }
    }
}
#endif

// ---- TRANSPOSE: elements of four bytes, tiles of TILE x TILE

#if KERNEL == TRANSPOSE
constexpr u32 TILE = ROWS, SQUARE_BYTES = TILE * TILE * 4;
// A row of a swizzled box is at most as long as the swizzle, so a tile consists of several boxes side by side. Without a
// swizzle one box is the tile.
constexpr u32 BOX_COLUMNS = SWIZZLE ? SWIZZLE / 4 : TILE, BOXES = TILE / BOX_COLUMNS,
              BOX_BYTES = TILE * BOX_COLUMNS * 4;

template <typename T>
__device__ __forceinline__ T& element(u8* tile, u32 row, u32 column) {
    const u32 offset = swizzle_offset((row * BOX_COLUMNS + column % BOX_COLUMNS) * 4, SWIZZLE ? SWIZZLE : 16);
    return *reinterpret_cast<T*>(tile + column / BOX_COLUMNS * BOX_BYTES + offset);
}

template <int SIDE>
struct BlockRow;  // one row of the block of SIDE x SIDE elements that a thread turns in registers
template <>
struct BlockRow<1> {
    using type = u32;
};
template <>
struct BlockRow<4> {
    using type = uint4;
};

__device__ __forceinline__ void transpose_block(u32 (&)[1]) {}
__device__ __forceinline__ void transpose_block(uint4 (&rows)[4]) {
    const uint4 a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    rows[0] = make_uint4(a.x, b.x, c.x, d.x);
    rows[1] = make_uint4(a.y, b.y, c.y, d.y);
    rows[2] = make_uint4(a.z, b.z, c.z, d.z);
    rows[3] = make_uint4(a.w, b.w, c.w, d.w);
}

constexpr u32 BLOCKS = TILE * TILE / (BLOCK * BLOCK), BLOCKS_PER_THREAD = (BLOCKS + THREADS - 1) / THREADS;

struct Position {
    u32 row, column;
};

// Return the first element of a block. Single elements (BLOCK 1) are taken down the columns: a warp reads one column,
// which lies in one bank without a swizzle, and writes along a row. Blocks of 4 x 4 lie on diagonals of 32 x 32:
//
//     a b c d ...   Eight lanes, which shared memory serves at a time, take the blocks of one letter. Their rows and
//     b a d c       their columns all differ, so in boxes with rows of 128, 256 or more bytes they touch all banks,
//     c d a b       both when they read and when they write.
//     d c b a
__device__ __forceinline__ Position block_position(u32 block) {
    if constexpr (BLOCK == 1) return {block % TILE, block / TILE};
    constexpr u32 SQUARES_ACROSS = TILE > 32 ? TILE / 32 : 1;
    const u32 square = block / 64, diagonal = block / 8 % 8, down = block % 8, across = down ^ diagonal;
    return {square / SQUARES_ACROSS * 32 + down * 4, square % SQUARES_ACROSS * 32 + across * 4};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, u32 tiles_x, u32 tiles_y) {
    __shared__ __align__(8) u64 full;
    const u32 tile = round_up(shared_address(memory), 1024), barrier = shared_address(&full);
    u8* const elements = memory + (tile - shared_address(memory));
    // CTAs walk along bands that are `tall` tiles tall, column by column. In tall bands, CTAs that run at the same time
    // write long stretches of out's rows, and read short ones of x's.
    const u32 tall = min(tiles_y, u32{RASTER}), band = blockIdx.x / (tiles_x * tall);
    const u32 within = blockIdx.x % (tiles_x * tall), height = min(tiles_y - band * tall, tall);
    const int row = static_cast<int>((band * tall + within % height) * TILE);
    const int column = static_cast<int>(within / height * TILE);

    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, SQUARE_BYTES);
        for (u32 box = 0; box < BOXES; ++box)
            tma_load_2d(tile + box * BOX_BYTES, x, column + box * BOX_COLUMNS, row, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);

    // All threads read before any thread writes, so one tile of shared memory is enough.
    using Row = typename BlockRow<BLOCK>::type;
    Row blocks[BLOCKS_PER_THREAD][BLOCK];
#pragma unroll
    for (u32 i = 0; i < BLOCKS_PER_THREAD; ++i) {
        const u32 block = i * THREADS + threadIdx.x;
        if (block >= BLOCKS) break;
        const Position from = block_position(block);
        for (u32 k = 0; k < BLOCK; ++k) blocks[i][k] = element<Row>(elements, from.row + k, from.column);
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < BLOCKS_PER_THREAD; ++i) {
        const u32 block = i * THREADS + threadIdx.x;
        if (block >= BLOCKS) break;
        const Position from = block_position(block);
        transpose_block(blocks[i]);
        for (u32 k = 0; k < BLOCK; ++k) element<Row>(elements, from.column + k, from.row) = blocks[i][k];
    }
    fence_proxy_async();  // each thread makes its own writes visible to TMA before the barrier
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 box = 0; box < BOXES; ++box)
            tma_store_2d(out, tile + box * BOX_BYTES, row + box * BOX_COLUMNS, column);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
#endif

// ---- ADD_SHARED: the CTAs of a cluster take the same tile of y, and neighbouring matrices of the batch

#if KERNEL == ADD_SHARED
extern "C" __global__ void __launch_bounds__(THREADS)
    add_shared(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y,
               const __grid_constant__ TensorMap out, u32 tiles_x, u32 tiles_y) {
    __shared__ __align__(8) u64 full;
    constexpr u32 SHARE = TILE_BYTES / CLUSTER;
    const u32 tile = shared_address(memory), y_tile = tile + STAGE_BYTES, barrier = shared_address(&full);
    const u32 position = blockIdx.x / CLUSTER, line = position / tiles_x, rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int column = static_cast<int>(position % tiles_x * COLUMNS), row = static_cast<int>(line % tiles_y * ROWS);
    const int batch = static_cast<int>(line / tiles_y * CLUSTER + rank);  // past the end: loads zeros, stores nothing
    const bool leader = threadIdx.x == 0;

    if (leader) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 2 * TILE_BYTES);  // x, and the shares of y from all CTAs
        tma_load_3d(tile, x, column, row, batch, barrier);
        if constexpr (CLUSTER == 1) tma_load_2d(y_tile, y, column, row, barrier);
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();  // the barriers of all CTAs are ready to count what other CTAs send
        if (leader)
            tma_load_2d_multicast(y_tile + rank * SHARE, y, column, row + rank * (ROWS / CLUSTER), barrier,
                                  (1 << CLUSTER) - 1);
    } else {
        __syncthreads();
    }
    mbarrier_wait(barrier, 0);
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();  // all data for this CTA has landed
    }
    float4* sums = reinterpret_cast<float4*>(memory);
    const float4* shared = reinterpret_cast<const float4*>(memory + STAGE_BYTES);
    for (u32 i = threadIdx.x; i < TILE_BYTES / sizeof(float4); i += THREADS) {
        const float4 a = sums[i], b = shared[i];
        sums[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
    fence_proxy_async();
    __syncthreads();
    if (leader) {
        tma_store_3d(out, tile, column, row, batch);
        bulk_commit();
        bulk_wait_read<0>();
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_wait();  // no CTA ends while its own multicast is still on the way to another
    }
}
#endif

// ---- DUMP: the bytes of shared memory after one box has landed

#if KERNEL == DUMP
extern "C" __global__ void __launch_bounds__(THREADS)
    dump(const __grid_constant__ TensorMap x, u8* bytes, int column, int row) {
    __shared__ __align__(8) u64 full;
    const u32 tile = round_up(shared_address(memory), 1024), barrier = shared_address(&full);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, TILE_BYTES);
        tma_load_2d(tile, x, column, row, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    for (u32 i = threadIdx.x; i < TILE_BYTES; i += THREADS) bytes[i] = memory[tile - shared_address(memory) + i];
}
#endif
