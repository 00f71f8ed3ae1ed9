// Linear interpolation of feature rows between irregular source times: a ladder of kernels, one idea per step.
//
// features (B, S, DEPTH), source_times (B, S) float32 ascending, target_times (B, T) float32, out (B, T, DEPTH). For
// each target, a kernel searches the two neighbouring source times and blends the two rows of features.
//
//     source_times   s0     s1        s2     s3          index = 1: the last source at or before the target
//                     |------|----*----|------|          left  = row 1, weight (s2 - target) / (s2 - s1)
//                               target                   right = row 2, weight (target - s1) / (s2 - s1)
//
// An item of work is TARGETS neighbouring targets of one batch. From shared_search on, the threads of a block first
// search all targets of an item (search_targets). Then they share the item's rows (blend_rows), or, in `vectors`, its
// vectors in the order of memory (blend_flat).
//
// Compile with -D:
//     ELEMENT            float, bf16 or f16
//     DEPTH, THREADS     features per row, threads per block
//     TARGETS            targets per item
//     TIMES              source times that fit in shared memory, a power of two; 0 searches in global memory
//     SAMPLE             shared memory holds every SAMPLE-th source time, a power of two; 1 holds all
//     VECTOR_BYTES       bytes that a thread loads and stores with one instruction; they divide a row
//     TARGETS_IN_FLIGHT  targets whose vectors a thread loads before it uses the first one
//     ROWS               rows that fit in the dynamic shared memory of bulk_rows
//
// nvcc -std=c++17 -arch=sm_90a -cubin -Itilelab/include -DELEMENT=bf16 -DDEPTH=128 -DTHREADS=128 -DTARGETS=128
//      -DTIMES=1024 -DSAMPLE=1 -DVECTOR_BYTES=16 -DTARGETS_IN_FLIGHT=4 -DROWS=100 ch07/resample/resample.cu
#include "elements.cuh"
#include "ptx.cuh"

constexpr u32 ROW_BYTES = DEPTH * sizeof(ELEMENT);
#include "blend.cuh"  // Weights, weigh and store_blend: the precise arithmetic

struct Problem {
    const ELEMENT* features;
    const float *source_times, *target_times;
    ELEMENT* out;
    int batches, sources, targets;
};

// ---- the search: the index of the last source at or before `target`, at least 0 and at most sources - 2

// Halve the step until it is 1.
__device__ __forceinline__ int search_alone(const float* times, int sources, float target) {
    int low = 0;
    for (int step = 1 << (31 - __clz(sources)); step > 0; step /= 2)
        if (low + step < sources && times[low + step] <= target) low += step;
    return max(min(low, sources - 2), 0);
}

// The same among TIMES, where infinity stands after the last source: there is no bound to check and no branch.
__device__ __forceinline__ int search_padded(const float* times, int sources, float target) {
    int low = 0;
#pragma unroll
    for (int step = TIMES / 2; step > 0; step /= 2)
        if (times[low + step] <= target) low += step;
    return max(min(low, sources - 2), 0);
}

// The field note's search: lane 0 compares and sends the result to the other lanes, one shuffle per step.
__device__ __forceinline__ int search_lane0(const float* times, int sources, float target) {
    int low = 0, high = sources > 2 ? sources - 2 : 0;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        int right = 0;
        if (threadIdx.x % 32 == 0) right = times[middle] <= target;
        right = __shfl_sync(~0u, right, 0);
        if (right) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Every lane compares its own pivot. A ballot then tells all lanes which pivots the target has passed.
//
//     low       + step     + 2 step   + 3 step               low + count
//     |----------|----------|----------|---- ... --------------|
//     lane 0     lane 1     lane 2     lane 3                       ballot ...0111: the target is between 2 and 3
//
// Each step divides the range by 32.
__device__ __forceinline__ int search_ballot(const float* times, int sources, float target) {
    const int lane = threadIdx.x % 32;
    int low = 0, count = sources > 1 ? sources - 1 : 1;  // the result is one of [low, low + count)
    while (count > 1) {
        const int step = (count + 31) / 32, pivot = low + lane * step;
        const u32 passed = __ballot_sync(~0u, lane * step < count && times[pivot] <= target);
        const int last = passed ? 31 - __clz(passed) : 0;
        const int end = low + count;
        low += last * step;
        count = min(step, end - low);
    }
    return low;
}

// ---- items, and where their data is

struct Item {
    int batch, first, count;  // `count` targets of `batch`, from `first` on
};

__device__ __forceinline__ int items_per_batch(const Problem& p) { return (p.targets + TARGETS - 1) / TARGETS; }

__device__ __forceinline__ Item get_item(const Problem& p, int index) {
    const int per_batch = items_per_batch(p), first = index % per_batch * TARGETS;
    return {index / per_batch, first, min(TARGETS, p.targets - first)};
}

__device__ __forceinline__ const float* source_times(const Problem& p, const Item& item) {
    return p.source_times + static_cast<u64>(item.batch) * p.sources;
}

__device__ __forceinline__ float target_time(const Problem& p, const Item& item, int target) {
    return p.target_times[static_cast<u64>(item.batch) * p.targets + item.first + target];
}

__device__ __forceinline__ const u8* source_rows(const Problem& p, const Item& item) {
    return reinterpret_cast<const u8*>(p.features) + static_cast<u64>(item.batch) * p.sources * ROW_BYTES;
}

__device__ __forceinline__ u8* out_rows(const Problem& p, const Item& item) {
    return reinterpret_cast<u8*>(p.out) + (static_cast<u64>(item.batch) * p.targets + item.first) * ROW_BYTES;
}

// Copy the batch's source times, or every SAMPLE-th of them, to shared memory where they fit; the caller synchronizes
// the block.
__device__ __forceinline__ const float* stage_times(const Problem& p, const Item& item, float* shared) {
    const float* times = source_times(p, item);
    if constexpr (TIMES == 0) return times;
    const float infinity = __int_as_float(0x7f800000);
    for (int i = threadIdx.x; i < TIMES; i += THREADS)
        shared[i] = i * SAMPLE < p.sources ? times[i * SAMPLE] : infinity;
    return shared;
}

// ---- steps 1 to 3: every thread or warp searches for itself and moves one element at a time

__device__ __forceinline__ void blend_element(const Problem& p, const Item& item, const Weights& weights, int target,
                                              int feature) {
    constexpr int SIZE = sizeof(ELEMENT);
    const u8* rows = source_rows(p, item) + feature * SIZE;
    store_blend(weights, load<ELEMENT, SIZE>(rows + weights.left), load<ELEMENT, SIZE>(rows + weights.right),
                out_rows(p, item) + static_cast<u64>(target) * ROW_BYTES + feature * SIZE);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    search_a_thread(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches,
                    int sources, int targets) {
    const Problem p = {features, source, target, out, batches, sources, targets};
    const u64 i = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x, per_batch = static_cast<u64>(targets) * DEPTH;
    if (i >= per_batch * batches) return;
    const Item item = {static_cast<int>(i / per_batch), static_cast<int>(i % per_batch / DEPTH), 1};
    const int feature = i % DEPTH;
    const float time = target_time(p, item, 0);
    const float* times = source_times(p, item);
    blend_element(p, item, weigh(times, sources, search_alone(times, sources, time), time), 0, feature);
}

// One warp per target: its lanes search together, then take the features of the row in turn.
template <typename Search>
__device__ __forceinline__ void warp_per_target(const Problem& p, Search search) {
    __shared__ float shared[TIMES + 1];
    const int lane = threadIdx.x % 32;
    for (int index = blockIdx.x; index < p.batches * items_per_batch(p); index += gridDim.x) {
        const Item item = get_item(p, index);
        const float* times = stage_times(p, item, shared);
        __syncthreads();
        for (int target = threadIdx.x / 32; target < item.count; target += THREADS / 32) {
            const float time = target_time(p, item, target);
            const Weights weights = weigh(times, p.sources, search(times, p.sources, time), time);
            for (int feature = lane; feature < DEPTH; feature += 32) blend_element(p, item, weights, target, feature);
        }
        __syncthreads();  // before the times of the next item overwrite these
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    lane0_search(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches,
                 int sources, int targets) {
    warp_per_target({features, source, target, out, batches, sources, targets}, search_lane0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ballot_search(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches,
                  int sources, int targets) {
    warp_per_target({features, source, target, out, batches, sources, targets}, search_ballot);
}

// ---- steps 4 to 7: the block searches each target once

__device__ __forceinline__ void search_targets(const Problem& p, const Item& item, float* shared, Weights* found) {
    const float* times = stage_times(p, item, shared);
    float time = threadIdx.x < item.count ? target_time(p, item, threadIdx.x) : 0;  // in flight beside the source times
    __syncthreads();
    for (int target = threadIdx.x; target < item.count; target += THREADS) {
        if (target >= THREADS) time = target_time(p, item, target);
        const int index = TIMES ? search_padded(times, p.sources, time) : search_alone(times, p.sources, time);
        found[target] = weigh(times, p.sources, index, time);
    }
    __syncthreads();
}

// The same for `vectors`. A thread searches all its targets together, so that their loads of one step do not wait for
// each other.
//
// With SAMPLE > 1 shared memory holds every SAMPLE-th source time. The last steps of the search are in global memory,
// among SAMPLE neighbouring times: only the first of these loads may miss L1, because the times are mostly in one line.
__device__ __forceinline__ void search_targets_together(const Problem& p, const Item& item, float* shared,
                                                        Weights* found) {
    constexpr int TOGETHER = (TARGETS + THREADS - 1) / THREADS;
    const float* all = source_times(p, item);
    const float* times = stage_times(p, item, shared);
    float time[TOGETHER];
    int low[TOGETHER];
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
        const int target = threadIdx.x + k * THREADS;
        time[k] = target < item.count ? target_time(p, item, target) : 0;
        low[k] = 0;
    }
    __syncthreads();
    if constexpr (TIMES == 0) {
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) low[k] = search_alone(all, p.sources, time[k]);
    } else {
#pragma unroll
        for (int step = TIMES / 2; step > 0; step /= 2)
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k)
                if (times[low[k] + step] <= time[k]) low[k] += step;
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) low[k] *= SAMPLE;
#pragma unroll
        for (int step = SAMPLE / 2; step > 0; step /= 2)
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k)
                if (low[k] + step < p.sources && all[low[k] + step] <= time[k]) low[k] += step;
    }
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
        const int target = threadIdx.x + k * THREADS, index = max(min(low[k], p.sources - 2), 0);
        if (target < item.count) found[target] = weigh(SAMPLE > 1 ? all : times, p.sources, index, time[k]);
    }
    __syncthreads();
}

// The threads share the rows of an item, BYTES each. A thread stays in its column of vectors and takes
// TARGETS_IN_FLIGHT neighbouring targets together, because they mostly need the same source rows. Rows of 4 vectors,
// 12 threads and 2 targets in flight give this assignment of threads to vectors:
//
//     target 0, 1 |  0 |  1 |  2 |  3 |     ACROSS = 4 threads cover a row
//     target 2, 3 |  4 |  5 |  6 |  7 |     DOWN = 3 groups of targets in one pass
//     target 4, 5 |  8 |  9 | 10 | 11 |
//     target 6, 7 |  0 |  1 |  2 |  3 |
//
// `get` loads the vector at a byte offset from the batch's first row.
template <int BYTES, typename Get>
__device__ __forceinline__ void blend_rows(const Problem& p, const Item& item, const Weights* found, Get get) {
    constexpr int PER_ROW = ROW_BYTES / BYTES, ACROSS = PER_ROW < THREADS ? PER_ROW : THREADS, DOWN = THREADS / ACROSS;
    const int first = threadIdx.x / ACROSS;
    if (first >= DOWN) return;  // where ACROSS does not divide THREADS, some threads are left over
    for (int column = threadIdx.x % ACROSS * BYTES; column < ROW_BYTES; column += ACROSS * BYTES) {
        u8* out = out_rows(p, item) + column;
        for (int begin = first * TARGETS_IN_FLIGHT; begin < item.count; begin += DOWN * TARGETS_IN_FLIGHT) {
            Pack<ELEMENT, BYTES> left[TARGETS_IN_FLIGHT], right[TARGETS_IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < TARGETS_IN_FLIGHT; ++k) {
                const int target = min(begin + k, item.count - 1);  // past the end, load the last one and store nothing
                left[k] = get(found[target].left + column);
                right[k] = get(found[target].right + column);
            }
#pragma unroll
            for (int k = 0; k < TARGETS_IN_FLIGHT; ++k) {
                const int target = begin + k;
                if (target < item.count) store_blend(found[target], left[k], right[k], out + target * ROW_BYTES);
            }
        }
    }
}

template <int BYTES>
__device__ __forceinline__ void blend_rows(const Problem& p, const Item& item, const Weights* found) {
    const u8* rows = source_rows(p, item);
    blend_rows<BYTES>(p, item, found, [&](u32 at) { return load<ELEMENT, BYTES>(rows + at); });
}

// Divide the targets of a batch evenly between as few items as hold TARGETS each.
__device__ __forceinline__ Item get_even_item(const Problem& p, int index) {
    const int per_batch = items_per_batch(p), each = (p.targets + per_batch - 1) / per_batch;
    const int first = index % per_batch * each;
    return {index / per_batch, first, min(each, p.targets - first)};
}

// The threads share the vectors of an item in the order of memory. No thread is left over, whatever the vectors per row
// are, and a warp stores 32 neighbouring vectors. The compiler divides by PER_ROW with a multiplication. Rows of 3
// vectors, 4 threads and 2 vectors in flight give this assignment of threads to vectors:
//
//     target 0 |  0 |  1 |  2 |
//     target 1 |  3 |  0 |  1 |     the second vector of threads 0 to 3 is 4 after their first
//     target 2 |  2 |  3 |  0 |     the next pass
template <int BYTES>
__device__ __forceinline__ void blend_flat(const Problem& p, const Item& item, const Weights* found) {
    constexpr u32 PER_ROW = ROW_BYTES / BYTES;
    const u8* rows = source_rows(p, item);
    u8* out = out_rows(p, item);
    const u32 vectors = item.count * PER_ROW;
    for (u32 begin = threadIdx.x; begin < vectors; begin += THREADS * TARGETS_IN_FLIGHT) {
        Pack<ELEMENT, BYTES> left[TARGETS_IN_FLIGHT], right[TARGETS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < TARGETS_IN_FLIGHT; ++k) {
            const u32 vector = min(begin + k * THREADS, vectors - 1);  // past the end, load the last one
            const u32 target = vector / PER_ROW, column = (vector - target * PER_ROW) * BYTES;
            left[k] = load<ELEMENT, BYTES>(rows + (found[target].left + column));
            right[k] = load<ELEMENT, BYTES>(rows + (found[target].right + column));
        }
#pragma unroll
        for (int k = 0; k < TARGETS_IN_FLIGHT; ++k) {
            const u32 vector = begin + k * THREADS;
            if (vector < vectors) store_blend(found[vector / PER_ROW], left[k], right[k], out + vector * BYTES);
        }
    }
}

template <int BYTES>
__device__ __forceinline__ void resample_item(const Problem& p, int index) {
    __shared__ float shared[TIMES + 1];
    __shared__ Weights found[TARGETS];
    const Item item = get_item(p, index);
    search_targets(p, item, shared, found);
    blend_rows<BYTES>(p, item, found);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    shared_search(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches,
                  int sources, int targets) {
    resample_item<sizeof(ELEMENT)>({features, source, target, out, batches, sources, targets}, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    vectors(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches, int sources,
            int targets) {
    __shared__ float shared[TIMES + 1];
    __shared__ Weights found[TARGETS];
    const Problem p = {features, source, target, out, batches, sources, targets};
    const Item item = get_even_item(p, blockIdx.x);
    search_targets_together(p, item, shared, found);
    blend_flat<VECTOR_BYTES>(p, item, found);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    persistent(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches,
               int sources, int targets) {
    const Problem p = {features, source, target, out, batches, sources, targets};
    for (int index = blockIdx.x; index < batches * items_per_batch(p); index += gridDim.x) {
        resample_item<VECTOR_BYTES>(p, index);
        __syncthreads();  // before the weights of the next item overwrite these
    }
}

// The rows from the first to the last that an item needs are contiguous, so one bulk copy brings them. Where the
// targets are too far apart for ROWS rows, their rows are read from global memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    bulk_rows(const ELEMENT* features, const float* source, const float* target, ELEMENT* out, int batches, int sources,
              int targets) {
    extern __shared__ __align__(128) u8 rows[];
    __shared__ float shared[TIMES + 1];
    __shared__ Weights found[TARGETS];
    __shared__ u32 first_row, last_row;
    __shared__ __align__(8) u64 landed;
    const Problem p = {features, source, target, out, batches, sources, targets};
    const Item item = get_item(p, blockIdx.x);
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&landed), 1);
        fence_mbarrier_init();
        first_row = ~0u;
        last_row = 0;
    }
    search_targets(p, item, shared, found);
    for (int i = threadIdx.x; i < item.count; i += THREADS) {
        atomicMin(&first_row, found[i].left);
        atomicMax(&last_row, found[i].right);
    }
    __syncthreads();
    const u32 first = first_row, bytes = last_row + ROW_BYTES - first;
    if (bytes > ROWS * ROW_BYTES) return blend_rows<VECTOR_BYTES>(p, item, found);

    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(shared_address(&landed), bytes);
        bulk_load(shared_address(rows), source_rows(p, item) + first, bytes, shared_address(&landed));
    }
    mbarrier_wait(shared_address(&landed), 0);
    blend_rows<VECTOR_BYTES>(p, item, found,
                             [&](u32 at) { return load_shared<ELEMENT, VECTOR_BYTES>(rows + at - first); });
}
