// Tiles of two dimensions, moved by tensor maps: a copy, a stencil, a transpose, a sum with an operand that a cluster
// shares, a sum that L2 adds up, and a look at where a box lies in shared memory. KERNEL names the one to compile.
//
// Other -D: ROWS x COLUMNS elements of ITEMSIZE bytes make a tile of results; THREADS of a block, of which copy and
// accumulate use one; STAGES of a ring, SPAN tiles a CTA, neighbours along x. For the stencil PRODUCER (0: a computing
// thread starts the loads, 1: a warp of its own); for the transpose SWIZZLE in bytes (0: none), BLOCK x BLOCK elements a
// thread at a time and bands of RASTER rows of tiles; CLUSTER CTAs that share an operand.
//
// A box starts at a whole unit of 16 bytes of its row, or the load is an illegal instruction. It may stick out of its
// tensor: it is loaded with zeros or NaN there, which count as bytes that landed. A store writes whole units of 16 bytes:
// the rows of a map of results must be whole units long.
#include "tma.cuh"

#define TILE_COPY 0
#define ACCUMULATE 1
#define STENCIL 2
#define TRANSPOSE 3
#define ADD_SHARED 4
#define DUMP 5

typedef unsigned char u8;

__device__ constexpr u32 rounded(u32 value, u32 unit) { return (value + unit - 1) / unit * unit; }

// The copy engine wants tiles at multiples of 128 bytes, and swizzled ones at multiples of 1,024.
constexpr u32 TILE_BYTES = ROWS * COLUMNS * ITEMSIZE, SLOT = rounded(TILE_BYTES, 128);
extern __shared__ __align__(128) u8 memory[];

// ---- copy and accumulate: one thread gives the orders, and none touches the data

// The CTA's `tiles`, one after the other, through a ring of STAGES slots: `load` fills a slot, `store` empties it.
template <typename Load, typename Store>
__device__ __forceinline__ void through_ring(u32 tiles, Load load, Store store) {
    __shared__ __align__(8) u64 full[STAGES];
    const u32 ring = shared_address(memory);
    for (u32 stage = 0; stage < STAGES; ++stage) mbarrier_init(shared_address(full + stage), 1);
    fence_mbarrier_init();

    auto fill = [&](u32 tile) {
        if (tile >= tiles) return;
        const u32 slot = tile % STAGES, barrier = shared_address(full + slot);
        mbarrier_arrive_expect_tx(barrier, TILE_BYTES);
        load(tile, ring + slot * SLOT, barrier);
    };
    for (u32 tile = 0; tile < STAGES; ++tile) fill(tile);
    for (u32 tile = 0; tile < tiles; ++tile) {
        const u32 slot = tile % STAGES;
        mbarrier_wait(shared_address(full + slot), tile / STAGES & 1);
        store(tile, ring + slot * SLOT);
        bulk_commit();
        // With stages to spare, the slot before this one is refilled: its store has had a whole step to finish.
        constexpr int BEHIND = STAGES > 1;
        bulk_wait_read<BEHIND>();
        if (!BEHIND || tile) fill(tile + STAGES - BEHIND);
    }
    bulk_wait_read<0>();  // shared memory goes when the CTA ends
}

// The tiles of one CTA among those of a matrix `wide` tiles across. Short-lived CTAs start in the order of their tiles,
// so the chip walks over memory in one narrow front, which DRAM likes.
struct Run {
    u32 first, tiles, line;  // of the line of tiles with this number, counted through all matrices

    __device__ __forceinline__ explicit Run(u32 wide) {
        const u32 runs = (wide + SPAN - 1) / SPAN;
        first = blockIdx.x % runs * SPAN;
        tiles = min(wide - first, u32{SPAN});
        line = blockIdx.x / runs;
    }
    __device__ __forceinline__ int column(u32 tile) const { return static_cast<int>((first + tile) * COLUMNS); }
};

#if KERNEL == TILE_COPY
extern "C" __global__ void __launch_bounds__(THREADS)
tile_copy(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, u32 wide) {
    if (threadIdx.x != 0) return;
    const Run run(wide);
    const int row = static_cast<int>(run.line * ROWS);
    through_ring(run.tiles,
                 [&](u32 tile, u32 slot, u32 barrier) { tma_load_2d(slot, x, run.column(tile), row, barrier); },
                 [&](u32 tile, u32 slot) { tma_store_2d(out, slot, run.column(tile), row); });
}
#endif

#if KERNEL == ACCUMULATE
// out = the sum of x's matrices: each tile is added to out where L2 holds it, in whatever order they come.
extern "C" __global__ void __launch_bounds__(THREADS)
accumulate(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, u32 wide, u32 tall) {
    if (threadIdx.x != 0) return;
    const Run run(wide);
    const int row = static_cast<int>(run.line % tall * ROWS), batch = static_cast<int>(run.line / tall);
    through_ring(run.tiles,
                 [&](u32 tile, u32 slot, u32 barrier) {
                     tma_load_3d(slot, x, run.column(tile), row, batch, barrier);
                 },
                 [&](u32 tile, u32 slot) { tma_reduce_add_2d(out, slot, run.column(tile), row); });
}
#endif

// ---- stencil: out = centre x + edge (up + down + left + right)

#if KERNEL == STENCIL
enum { THREAD, WARP };
// A tile with one more row on each side, and one more unit of 16 bytes, of which one column is used.
constexpr u32 LEFT = 4, HALO_ROWS = ROWS + 2, HALO_COLUMNS = LEFT + COLUMNS + 4;
constexpr u32 HALO_BYTES = HALO_ROWS * HALO_COLUMNS * sizeof(float), HALO_SLOT = rounded(HALO_BYTES, 128);
// Each thread walks down one column of one of the tile's PARTS.
constexpr u32 PARTS = THREADS > COLUMNS ? THREADS / COLUMNS : 1, EACH = ROWS > PARTS ? ROWS / PARTS : 1;

extern "C" __global__ void __launch_bounds__(THREADS + (PRODUCER == WARP ? 32 : 0))
stencil(const __grid_constant__ TensorMap x, float* out, u64 stride, u32 rows, u32 columns, float centre, float edge) {
    __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
    const Run run((columns + COLUMNS - 1) / COLUMNS);
    const u32 row = run.line * ROWS;

    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared_address(full + stage), 1);
            mbarrier_init(shared_address(empty + stage), THREADS / 32);  // one arrival a computing warp
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    auto fill = [&](u32 tile) {
        const u32 slot = tile % STAGES, barrier = shared_address(full + slot);
        mbarrier_arrive_expect_tx(barrier, HALO_BYTES);
        // Coordinates may be negative: what lies outside is filled in.
        tma_load_2d(shared_address(memory) + slot * HALO_SLOT, x, run.column(tile) - static_cast<int>(LEFT),
                    static_cast<int>(row) - 1, barrier);
    };

    if constexpr (PRODUCER == WARP) {
        if (threadIdx.x >= THREADS) {
            if (threadIdx.x == THREADS)
                for (u32 tile = 0; tile < run.tiles; ++tile) {
                    // A wait for the phase before the first returns at once: at first all slots are empty.
                    mbarrier_wait(shared_address(empty + tile % STAGES), (tile / STAGES & 1) ^ 1);
                    fill(tile);
                }
            return;
        }
    } else if (threadIdx.x == 0) {
        for (u32 tile = 0; tile < min(run.tiles, u32{STAGES}); ++tile) fill(tile);
    }

    const u32 across = threadIdx.x % COLUMNS, down = threadIdx.x / COLUMNS * EACH;
    for (u32 tile = 0; tile < run.tiles; ++tile) {
        const u32 slot = tile % STAGES, column = run.column(tile) + across;
        mbarrier_wait(shared_address(full + slot), tile / STAGES & 1);
        const float* box = reinterpret_cast<const float*>(memory + slot * HALO_SLOT);
        const float* at = box + (down + 1) * HALO_COLUMNS + across + LEFT;
        float* to = out + (row + down) * stride + column;
        const u32 inside = column < columns && row + down < rows ? rows - row - down : 0;
        // Two of the five values are still in registers from the row above: three reads a result.
        float above = at[-static_cast<int>(HALO_COLUMNS)], here = at[0];
#pragma unroll 8
        for (u32 i = 0; i < EACH; ++i, at += HALO_COLUMNS, to += stride) {
            const float below = at[HALO_COLUMNS];
            const float result = fmaf(centre, here, edge * ((above + below) + (at[-1] + at[1])));
            if (i < inside) *to = result;
            above = here;
            here = below;
        }
        if constexpr (PRODUCER == WARP) {
            __syncwarp();  // all lanes have read the slot
            if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(empty + slot));
        } else if (tile + STAGES < run.tiles) {
            __syncthreads();
            if (threadIdx.x == 0) fill(tile + STAGES);
        }
    }
}
#endif

// ---- transpose: elements of four bytes, tiles of TILE x TILE

#if KERNEL == TRANSPOSE
constexpr u32 TILE = ROWS, SQUARE_BYTES = TILE * TILE * 4;
// A row of a swizzled box is at most as long as the swizzle, so a tile is several boxes that lie side by side.
constexpr u32 BOX_COLUMNS = SWIZZLE ? SWIZZLE / 4 : 32, BOXES = TILE / BOX_COLUMNS, BOX_BYTES = TILE * BOX_COLUMNS * 4;

template <typename T>
__device__ __forceinline__ T& element(u8* tile, u32 row, u32 column) {
    const u32 offset = swizzle_offset((row * BOX_COLUMNS + column % BOX_COLUMNS) * 4, SWIZZLE ? SWIZZLE : 16);
    return *reinterpret_cast<T*>(tile + column / BOX_COLUMNS * BOX_BYTES + offset);
}

template <int SIDE> struct Piece;  // what a thread reads of a row of its block
template <> struct Piece<1> { using type = u32; };
template <> struct Piece<4> { using type = uint4; };

__device__ __forceinline__ void turn(u32 (&)[1]) {}
__device__ __forceinline__ void turn(uint4 (&rows)[4]) {
    const uint4 a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    rows[0] = make_uint4(a.x, b.x, c.x, d.x);
    rows[1] = make_uint4(a.y, b.y, c.y, d.y);
    rows[2] = make_uint4(a.z, b.z, c.z, d.z);
    rows[3] = make_uint4(a.w, b.w, c.w, d.w);
}

// A step of the transpose: BLOCK x BLOCK elements that a thread reads and turns in its registers.
constexpr u32 STEPS = TILE * TILE / (BLOCK * BLOCK), STEPS_EACH = (STEPS + THREADS - 1) / THREADS;

struct Place {
    u32 row, column;
};

__device__ __forceinline__ Place place(u32 step) {
    // One by one a warp reads down a column and writes along a row: unswizzled, the 32 reads fall into one bank.
    if constexpr (BLOCK == 1) return {step % TILE, step / TILE};
    // Eight lanes, which shared memory serves at a time, take blocks on a diagonal of a 32 x 32 part: with rows of 128
    // bytes they touch all banks, reading and writing.
    constexpr u32 PART_COLUMNS = TILE > 32 ? TILE / 32 : 1;
    const u32 part = step / 64, diagonal = step / 8 % 8, down = step % 8, across = down ^ diagonal;
    return {part / PART_COLUMNS * 32 + down * 4, part % PART_COLUMNS * 32 + across * 4};
}

extern "C" __global__ void __launch_bounds__(THREADS)
transpose(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap out, u32 wide, u32 tall) {
    __shared__ __align__(8) u64 full;
    const u32 tile = rounded(shared_address(memory), 1024), barrier = shared_address(&full);
    u8* const elements = memory + (tile - shared_address(memory));
    // CTAs walk down bands RASTER tiles tall: neighbours in time then write long stretches of out's rows, too.
    const u32 band = blockIdx.x / (wide * RASTER), within = blockIdx.x % (wide * RASTER);
    const u32 height = min(tall - band * RASTER, u32{RASTER});
    const int row = static_cast<int>((band * RASTER + within % height) * TILE);
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

    // All threads read before any writes, so that one tile of shared memory will do.
    using Vector = typename Piece<BLOCK>::type;
    Vector held[STEPS_EACH][BLOCK];
#pragma unroll
    for (u32 i = 0; i < STEPS_EACH; ++i) {
        const u32 step = i * THREADS + threadIdx.x;
        if (step >= STEPS) break;
        const Place from = place(step);
        for (u32 k = 0; k < BLOCK; ++k) held[i][k] = element<Vector>(elements, from.row + k, from.column);
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < STEPS_EACH; ++i) {
        const u32 step = i * THREADS + threadIdx.x;
        if (step >= STEPS) break;
        const Place from = place(step);
        turn(held[i]);
        for (u32 k = 0; k < BLOCK; ++k) element<Vector>(elements, from.column + k, from.row) = held[i][k];
    }
    fence_proxy_async();  // each thread orders its own writes before the engine's read; then all of them have
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 box = 0; box < BOXES; ++box)
            tma_store_2d(out, tile + box * BOX_BYTES, row + box * BOX_COLUMNS, column);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
#endif

// ---- add_shared: out[b] = x[b] + y; the CTAs of a cluster have the same tile of y, and neighbouring b

#if KERNEL == ADD_SHARED
extern "C" __global__ void __launch_bounds__(THREADS)
add_shared(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y,
           const __grid_constant__ TensorMap out, u32 wide, u32 tall) {
    __shared__ __align__(8) u64 full;
    constexpr u32 SHARE = TILE_BYTES / CLUSTER;
    const u32 tile = shared_address(memory), shared_tile = tile + SLOT, barrier = shared_address(&full);
    const u32 position = blockIdx.x / CLUSTER, line = position / wide, rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int column = static_cast<int>(position % wide * COLUMNS), row = static_cast<int>(line % tall * ROWS);
    const int batch = static_cast<int>(line / tall * CLUSTER + rank);  // past the last: loads zeros, stores nothing
    const bool leads = threadIdx.x == 0;

    if (leads) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 2 * TILE_BYTES);  // the shares of all CTAs land here
        tma_load_3d(tile, x, column, row, batch, barrier);
        if constexpr (CLUSTER == 1) tma_load_2d(shared_tile, y, column, row, barrier);
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();
        cluster_wait();  // the barriers of all CTAs are ready to count what the others send
        if (leads)
            tma_load_2d_multicast(shared_tile + rank * SHARE, y, column, row + rank * (ROWS / CLUSTER), barrier,
                                  (1 << CLUSTER) - 1);
    } else {
        __syncthreads();
    }
    mbarrier_wait(barrier, 0);
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive();  // nothing is under way to this CTA any more
    }
    float4* sums = reinterpret_cast<float4*>(memory);
    const float4* shared = reinterpret_cast<const float4*>(memory + SLOT);
    for (u32 i = threadIdx.x; i < TILE_BYTES / sizeof(float4); i += THREADS) {
        const float4 a = sums[i], b = shared[i];
        sums[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
    fence_proxy_async();
    __syncthreads();
    if (leads) {
        tma_store_3d(out, tile, column, row, batch);
        bulk_commit();
        bulk_wait_read<0>();
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_wait();  // no CTA leaves while another still has something of its own under way to the rest
    }
}
#endif

// ---- dump: the bytes of shared memory after one box has landed there

#if KERNEL == DUMP
extern "C" __global__ void __launch_bounds__(THREADS)
dump(const __grid_constant__ TensorMap x, u8* bytes, int column, int row) {
    __shared__ __align__(8) u64 full;
    const u32 tile = rounded(shared_address(memory), 1024), barrier = shared_address(&full);
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
