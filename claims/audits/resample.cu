// Variants of the lesson's kernels that differ in one thing, for claims about who searches and which lanes read what.
//
// features (B, S, DEPTH) and out (B, T, DEPTH) are float32, and so are the times. A block of 256 threads takes a chunk
// of CHUNK targets of one batch.
//
// Compile with -D:
//     DEPTH, CHUNK     features per row, targets per chunk
//     TIMES            source times that fit in shared memory; 0 reads them in global memory
//     SEARCHES         who searches for a target: EVERY_THREAD of the block for its own element, EVERY_LANE of the
//                      warp that takes the target, or LANE_0 of that warp, which tells the others
//     ORDER            which elements the 32 lanes of a warp read at once (locate)
//
// nvcc -std=c++17 -arch=sm_90a -cubin -Itilelab/include -DDEPTH=128 -DCHUNK=64 -DTIMES=1024 -DSEARCHES=EVERY_LANE
//      claims/audits/resample.cu
#include "ptx.cuh"

enum { EVERY_THREAD, EVERY_LANE, LANE_0 };
enum { NEIGHBOURS, EVERY_FOURTH, A_ROW_PER_LANE };

struct Found {
    int left;
    float w;
};

__device__ int search(const float* times, int sources, float target) {
    int low = 0, high = sources - 2;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (times[middle] <= target) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Lane 0 compares, and one shuffle per step tells the other lanes.
__device__ int search_by_lane_0(const float* times, int sources, float target) {
    int low = 0, high = sources - 2;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        int decision = 0;
        if (threadIdx.x % 32 == 0) decision = times[middle] <= target;
        decision = __shfl_sync(0xffffffff, decision, 0);
        if (decision) low = middle;
        else high = middle - 1;
    }
    return low;
}

__device__ Found weigh(const float* times, int low, float target) {
    const float begin = times[low], end = times[low + 1];
    return {low, target >= end ? 1 : target <= begin ? 0 : (target - begin) / (end - begin)};
}

__device__ void blend(const float* rows, Found at, int feature, float* to) {
    const float* left = rows + at.left * DEPTH + feature;
    *to = (1 - at.w) * left[0] + at.w * left[DEPTH];
}

#ifdef SEARCHES
extern "C" __global__ void search_variant(const float* features, const float* source_times, const float* target_times,
                                          float* out, int sources, int targets, int chunks) {
    __shared__ float shared[TIMES + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int batch = blockIdx.x / chunks, first = blockIdx.x % chunks * CHUNK, count = min(CHUNK, targets - first);
    const float* times = source_times + batch * sources;
    if (TIMES) {
        for (int i = threadIdx.x; i < sources; i += 256) shared[i] = times[i];
        __syncthreads();
        times = shared;
    }

    const float* rows = features + u64(batch) * sources * DEPTH;
    float* to = out + (u64(batch) * targets + first) * DEPTH;
    const float* wanted = target_times + batch * targets + first;
    if (SEARCHES == EVERY_THREAD) {
        for (int i = threadIdx.x; i < count * DEPTH; i += 256) {
            const float target = wanted[i / DEPTH];
            blend(rows, weigh(times, search(times, sources, target), target), i % DEPTH, to + i);
        }
    } else {
        for (int i = warp; i < count; i += 8) {
            const float target = wanted[i];
            const int low =
                SEARCHES == LANE_0 ? search_by_lane_0(times, sources, target) : search(times, sources, target);
            Found at = {low, 0};
            if (SEARCHES == EVERY_LANE || lane == 0) at = weigh(times, low, target);
            if (SEARCHES == LANE_0) at.w = __shfl_sync(0xffffffff, at.w, 0);
            for (int feature = lane; feature < DEPTH; feature += 32) blend(rows, at, feature, to + i * DEPTH + feature);
        }
    }
}
#endif

#ifdef ORDER
// Return the target and the feature of element i of a chunk with `count` targets. Element i belongs to lane i % 32:
//
//     NEIGHBOURS        lanes 0, 1, 2, ... read features 0, 1, 2, ... of one row: 128 bytes, 4 sectors of 32 bytes
//     EVERY_FOURTH      lanes 0, 1, 2, ... read features 0, 4, 8, ... of one row: 16 sectors (DEPTH is 128)
//     A_ROW_PER_LANE    lanes 0, 1, 2, ... read one feature of the rows of targets 0, 1, 2, ...: up to 32 sectors
__device__ void locate(int i, int count, int& target, int& feature) {
    target = ORDER == A_ROW_PER_LANE ? i % count : i / DEPTH;
    feature = ORDER == A_ROW_PER_LANE ? i / count : i % DEPTH;
    if (ORDER == EVERY_FOURTH) feature = feature % 32 * 4 + feature / 32;
}

// The lesson's shared_search: each target is searched once, by one thread. Only the order of the elements varies.
extern "C" __global__ void order_variant(const float* features, const float* source_times, const float* target_times,
                                         float* out, int sources, int targets, int chunks) {
    __shared__ float times[TIMES];
    __shared__ Found found[CHUNK];
    const int batch = blockIdx.x / chunks, first = blockIdx.x % chunks * CHUNK, count = min(CHUNK, targets - first);
    for (int i = threadIdx.x; i < sources; i += 256) times[i] = source_times[batch * sources + i];
    __syncthreads();

    for (int i = threadIdx.x; i < count; i += 256) {
        const float target = target_times[batch * targets + first + i];
        found[i] = weigh(times, search(times, sources, target), target);
    }
    __syncthreads();

    const float* rows = features + u64(batch) * sources * DEPTH;
    float* to = out + (u64(batch) * targets + first) * DEPTH;
    for (int i = threadIdx.x; i < count * DEPTH; i += 256) {
        int target, feature;
        locate(i, count, target, feature);
        blend(rows, found[target], feature, to + target * DEPTH + feature);
    }
}
#endif
