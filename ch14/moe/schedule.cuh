// The tiles of a grouped product, numbered group by group, found from row numbers that lie in global memory: the host
// knows neither how many rows a group has nor how many tiles there are. At the end are the parts of the ring that
// grouped.cu and swapped.cu have in common. Their macros STAGES and GROUP_M count here too.
#pragma once
#include "wgmma.cuh"

// A group that has rows, begin to end - 1. Its tiles are numbered from `first_tile` on. A list of groups ends
// with the `index` -1.
struct alignas(16) Group {
    int first_tile, index, begin, end;
    // Return the first row of the group's tiles, a multiple of `alignment` from the first row of its scales.
    __device__ __forceinline__ int align_begin(int capacity, int alignment) const {
        return begin - (begin - index * capacity) % alignment;
    }
};

// The rows of a kernel's groups, and its tiles. With `capacity` 0, the rows of all groups follow each other, and ends[g]
// is the row after the last one of group g. Otherwise each group has `capacity` rows and scales of its own, and of group
// g the first ends[g] rows count.
struct Groups {
    const int* ends;
    int count, capacity, rows, tile_rows, tiles_n, alignment;

    __device__ __forceinline__ Group get(int index) const {
        if (capacity) return {0, index, index * capacity, index * capacity + min(ends[index], capacity)};
        return {0, index, index ? max(ends[index - 1], 0) : 0, min(ends[index], rows)};
    }
    __device__ __forceinline__ int count_tiles(const Group& group) const {
        if (group.end <= group.begin) return 0;
        return (group.end - group.align_begin(capacity, alignment) + tile_rows - 1) / tile_rows * tiles_n;
    }
};

// A warp lists the groups that have rows. Each lane counts the tiles of neighbouring groups, adds up what the lanes
// before it have counted, and lists its own groups from there on. For five groups of 1, 0, 3, 2 and 1 tiles:
//
//     lane             0     1     2     ...
//     groups           0     1     2     3     4
//     its tiles        1     0     3     2     1
//     first_tile       0           1     4     6     and 7 in the group that ends the list
__device__ __forceinline__ void list_groups(Group* list, const Groups& groups) {
    const int lane = threadIdx.x % 32, per_lane = (groups.count + 31) / 32;
    const int first = lane * per_lane, last = min(first + per_lane, groups.count);
    int own_tiles = 0, own_groups = 0;
    for (int index = first; index < last; ++index) {
        const int tiles = groups.count_tiles(groups.get(index));
        own_tiles += tiles, own_groups += tiles > 0;
    }
    int all_tiles = own_tiles, all_groups = own_groups;  // of this lane and of those before it
    for (int distance = 1; distance < 32; distance *= 2) {
        const int tiles = __shfl_up_sync(~0u, all_tiles, distance);
        const int count = __shfl_up_sync(~0u, all_groups, distance);
        if (lane >= distance) all_tiles += tiles, all_groups += count;
    }
    int first_tile = all_tiles - own_tiles;
    list += all_groups - own_groups;
    for (int index = first; index < last; ++index) {
        Group group = groups.get(index);
        const int tiles = groups.count_tiles(group);
        if (!tiles) continue;
        group.first_tile = first_tile, first_tile += tiles;
        *list++ = group;
    }
    if (lane == 31) *list = {first_tile, -1, 0, 0};
}

// Return the row and column of a tile within its group, in tiles. A group's last row of tiles may be quick, because few
// of its rows count. Each CTA takes every n-th tile, and would always meet the same row of tiles if n is a multiple of
// their number. So columns of tiles begin at different rows.
__device__ __forceinline__ Tile place_in_group(int tile_id, int tiles_m, int tiles_n, int group_m) {
    if (tiles_m > group_m) return tile_coordinates(tile_id, tiles_m, tiles_n, group_m);
    Tile tile = {tile_id % tiles_m, tile_id / tiles_m};
    tile.m += static_cast<u64>(tile.n * 0x9E3779B1u) * tiles_m >> 32;
    if (tile.m >= tiles_m) tile.m -= tiles_m;
    return tile;
}

// The tile of C at (row, column). Its rows from `begin` to `end` - 1 belong to the group. Its scale_a begin at
// (scale_row, layer).
struct GroupTile {
    int row, column, expert, begin, end, scale_row, layer;
};

// Return the tile `id` of a group. The group's tiles begin at a multiple of ALIGNMENT from the first row of its scales. If they share its rows, each has a multiple of 16.
template <int TILE_ROWS, int TILE_COLUMNS, int ALIGNMENT, bool IS_SHARED = false>
__device__ __forceinline__ GroupTile place_tile(const Group& group, int id, int tiles_n, int capacity) {
    const int first_row = group.align_begin(capacity, ALIGNMENT),
              tiles_m = (group.end - first_row + TILE_ROWS - 1) / TILE_ROWS;
    const Tile tile = place_in_group(id - group.first_tile, tiles_m, tiles_n, GROUP_M);
    const int share = IS_SHARED ? ((group.end - first_row + tiles_m - 1) / tiles_m + 15) / 16 * 16 : TILE_ROWS;
    const int row = first_row + tile.m * share;
    return {row,
            tile.n * TILE_COLUMNS,
            group.index,
            group.begin,
            IS_SHARED ? min(row + share, group.end) : group.end,
            row - group.index * capacity,
            capacity ? group.index : 0};
}

// A role of the kernel walks over its tiles, in rising order, and over the list with them.
struct Walk {
    const Group* group;
    // Move to the group that has tile `id`, and return whether there is one.
    __device__ __forceinline__ bool find(int id) {
        while (group->index >= 0 && id >= group[1].first_tile) ++group;
        return group->index >= 0;
    }
};

// The addresses in shared memory of the ring, the staged C, scale_a of each stage, and the barriers.
struct Memory {
    u32 ring, staged, scales, full, empty;
};

__device__ __forceinline__ Memory divide_memory(u32 ring, u32 ring_bytes, u32 staged_bytes, u32 scale_bytes) {
    const u32 staged = ring + ring_bytes, scales = staged + staged_bytes, full = scales + STAGES * scale_bytes;
    return {ring, staged, scales, full, full + 8 * STAGES};
}

__device__ __forceinline__ void make_barriers(const Memory& memory, int readers) {
    for (int s = 0; s < STAGES; ++s) {
        mbarrier_init(memory.full + 8 * s, 1);
        mbarrier_init(memory.empty + 8 * s, readers);
    }
    fence_mbarrier_init();
}

// A warp says that it has read a stage.
__device__ __forceinline__ void release(const Memory& memory, u32 stage) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.empty + 8 * stage);
}

__device__ __forceinline__ float load_scale(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
