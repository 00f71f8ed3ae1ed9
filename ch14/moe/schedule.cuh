// The tiles of a grouped product, numbered group by group, found from row numbers that lie in global memory: the host
// knows neither how many rows a group has nor how many tiles there are.
#pragma once
#include "wgmma.cuh"

// A group that has rows, begin to end - 1. Its tiles are numbered from `first_tile` on. A list of them ends with a group
// whose `index` is -1.
struct alignas(16) Group {
    int first_tile, index, begin, end;
};

// A warp lists the groups that have some of the `rows` rows. With `capacity` 0, the rows of all groups follow each
// other, and ends[g] is the row after the last one of group g. Otherwise group g has `capacity` rows, of which the
// first ends[g] count. A group's first tile begins at a multiple of `alignment` rows, the group's first row or one
// before it. A lane looks at one group at a time; groups without rows get no place in the list. With tiles_n = 2:
//
//     lane              0   1   2   3
//     rows of tiles     1   0   3   2
//     tiles             2   0   6   4
//     first_tile        0       2   8     sums of the tiles of the lanes before
__device__ __forceinline__ void list_groups(Group* list, const int* ends, int groups, int capacity, int rows,
                                            int tile_rows, int tiles_n, int alignment) {
    const int lane = threadIdx.x % 32;
    int all_tiles = 0;
    for (int first = 0; first < groups; first += 32) {
        const int index = first + lane;
        int begin = 0, end = 0;
        if (index < groups) {
            begin = capacity ? index * capacity : index ? max(ends[index - 1], 0) : 0;
            end = capacity ? begin + min(ends[index], capacity) : min(ends[index], rows);
        }
        const int tiles = end > begin ? (end - begin / alignment * alignment + tile_rows - 1) / tile_rows * tiles_n : 0;
        int sum = tiles;  // of this lane's tiles and of those of the lanes before
        for (int distance = 1; distance < 32; distance *= 2) {
            const int before = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += before;
        }
        const u32 listed = __ballot_sync(~0u, tiles > 0);
        if (tiles) list[__popc(listed & ((1u << lane) - 1))] = {all_tiles + sum - tiles, index, begin, end};
        all_tiles += __shfl_sync(~0u, sum, 31);
        list += __popc(listed);
    }
    if (lane == 0) *list = {all_tiles, -1, 0, 0};
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
