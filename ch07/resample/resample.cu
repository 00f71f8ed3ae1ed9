// Linear interpolation of feature rows between irregular source times: a ladder of kernels, one idea a step.
//
// features (B, S, DEPTH), source_times (B, S) float32 ascending, target_times (B, T) float32, out (B, T, DEPTH).
// -D: ELEMENT (float, bf16, f16), DEPTH, VECTOR bytes a thread moves at once (a divisor of a row's), THREADS, TARGETS of a
// work item, TIMES (room for source times in shared memory, a power of two; 0: they are searched where they are), AT_ONCE
// pairs of vectors that a thread loads before it uses the first, ROWS that bulk_rows has room for.
#include "elements.cuh"
#include "ptx.cuh"

#define PARAMETERS \
    const ELEMENT *features, const float *source_times, const float *target_times, ELEMENT *out, int batches, \
        int sources, int targets
#define PROBLEM {features, source_times, target_times, out, batches, sources, targets}

struct Problem {
    const ELEMENT* features;
    const float *source_times, *target_times;
    ELEMENT* out;
    int batches, sources, targets;
};

// The rows to blend, by their distance in bytes from the batch's first, and the times from the target to their own: the
// result is (u left + w right) / span. u and w are floats with what those floats round away, so that left and right may
// cancel to the last bit; a power of two common to all three keeps the products within a float's range.
struct alignas(16) Between {
    u32 left, right;
    float u, u_rest, w, w_rest, inverse, inverse_rest;
};

// ---- who searches: the last source at or before `target`, 0 where there is none, at most sources - 2

// Steps of halving size.
__device__ __forceinline__ int search_alone(const float* times, int sources, float target) {
    int low = 0;
    for (int step = 1 << (31 - __clz(sources)); step > 0; step /= 2)
        if (low + step < sources && times[low + step] <= target) low += step;
    return max(min(low, sources - 2), 0);
}

// The same among TIMES, a power of two, those past the sources infinite: no bound to check, no branch.
__device__ __forceinline__ int search_padded(const float* times, int sources, float target) {
    int low = 0;
#pragma unroll
    for (int step = TIMES / 2; step > 0; step /= 2)
        if (times[low + step] <= target) low += step;
    return max(min(low, sources - 2), 0);
}

// Lane 0 compares and tells the others, a shuffle a step: the field note's search.
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

// Every lane compares a pivot of its own: a ballot cuts the range to a 32nd a step.
__device__ __forceinline__ int search_ballot(const float* times, int sources, float target) {
    const int lane = threadIdx.x % 32;
    int low = 0, count = sources > 1 ? sources - 1 : 1;  // the answer is one of [low, low + count)
    while (count > 1) {
        const int step = (count + 31) / 32, pivot = low + lane * step;
        const u32 passed = __ballot_sync(~0u, lane * step < count && times[pivot] <= target);
        const int last = passed ? 31 - __clz(passed) : 0;
        const int begun = low;
        low += last * step;
        count = min(step, begun + count - low);
    }
    return low;
}

constexpr u32 ROW_BYTES = DEPTH * sizeof(ELEMENT);

// later - earlier is exactly near + rest.
__device__ __forceinline__ void difference(float later, float earlier, float& near, float& rest) {
    near = later - earlier;
    const float back = near - later;
    rest = (later - (near - back)) - (earlier + back);
}

__device__ __forceinline__ Between between(const float* times, int sources, int index, float target) {
    const int next = min(index + 1, sources - 1);
    const float begin = times[index], end = times[next];
    // At a source time, or outside them all, one row alone counts; so equal times are never divided by.
    if (target >= end) return {next * ROW_BYTES, next * ROW_BYTES, 1, 0, 0, 0, 1, 0};
    if (target <= begin) return {index * ROW_BYTES, index * ROW_BYTES, 1, 0, 0, 0, 1, 0};
    Between at = {index * ROW_BYTES, next * ROW_BYTES};
    difference(end, target, at.u, at.u_rest);
    difference(target, begin, at.w, at.w_rest);
    // Brings the span to between a half and one.
    const float scale = __uint_as_float(0x7e800000u - (__float_as_uint(end - begin) & 0x7f800000u));
    at.u *= scale, at.u_rest *= scale, at.w *= scale, at.w_rest *= scale;
    if constexpr (sizeof(ELEMENT) == 4) {
        const double inverse = 1.0 / ((static_cast<double>(end) - begin) * scale);
        at.inverse = static_cast<float>(inverse);
        at.inverse_rest = static_cast<float>(inverse - at.inverse);
    } else {
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(at.inverse) : "f"((end - begin) * scale));
    }
    return at;
}

// To within half a unit in the last place of the result, and a little, as long as left and right do not cancel to less
// than 2^-40 of themselves (2^-28, for 4-byte elements). Where u and w are exact floats, as they mostly are, RESTS is
// false.
template <bool RESTS>
__device__ __forceinline__ float blend(const Between& at, float left, float right) {
    if constexpr (sizeof(ELEMENT) == 4) {
        const double u = static_cast<double>(at.u) + at.u_rest, w = static_cast<double>(at.w) + at.w_rest;
        const double inverse = static_cast<double>(at.inverse) + at.inverse_rest;
        return static_cast<float>(fma(w, static_cast<double>(right), u * left) * inverse);
    } else {
        const float product = at.w * right;
        float lost = fmaf(at.w, right, -product);  // exactly what the product rounds away
        if constexpr (RESTS) lost = fmaf(at.u_rest, left, fmaf(at.w_rest, right, lost));
        return (fmaf(at.u, left, product) + lost) * at.inverse;
    }
}

// ---- where the rows are moved

struct Item {  // a work item: some targets of one batch
    int batch, first, count;
};

__device__ __forceinline__ int items_of(const Problem& p) { return p.batches * ((p.targets + TARGETS - 1) / TARGETS); }

__device__ __forceinline__ Item item_of(const Problem& p, int index) {
    const int chunks = (p.targets + TARGETS - 1) / TARGETS, first = index % chunks * TARGETS;
    return {index / chunks, first, min(TARGETS, p.targets - first)};
}

__device__ __forceinline__ const float* times_of(const Problem& p, const Item& item) {
    return p.source_times + static_cast<u64>(item.batch) * p.sources;
}

__device__ __forceinline__ float target_of(const Problem& p, const Item& item, int target) {
    return p.target_times[static_cast<u64>(item.batch) * p.targets + item.first + target];
}

__device__ __forceinline__ const u8* rows_of(const Problem& p, const Item& item) {
    return reinterpret_cast<const u8*>(p.features) + static_cast<u64>(item.batch) * p.sources * ROW_BYTES;
}

__device__ __forceinline__ u8* out_of(const Problem& p, const Item& item) {
    return reinterpret_cast<u8*>(p.out) + (static_cast<u64>(item.batch) * p.targets + item.first) * ROW_BYTES;
}

// The batch's source times in shared memory, or where they are; the caller synchronises.
__device__ __forceinline__ const float* staged(const Problem& p, const Item& item, float* shared) {
    const float* times = times_of(p, item);
    if constexpr (TIMES == 0) return times;
    for (int i = threadIdx.x; i < TIMES; i += THREADS) shared[i] = i < p.sources ? times[i] : __int_as_float(0x7f800000);
    return shared;
}

template <bool RESTS, int BYTES>
__device__ __forceinline__ Pack<ELEMENT, BYTES> blended(const Between& at, const Pack<ELEMENT, BYTES>& left,
                                                        const Pack<ELEMENT, BYTES>& right) {
    Pack<ELEMENT, BYTES> result;
    constexpr int STEP = sizeof(ELEMENT) == 2 && BYTES > 2 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < left.COUNT; i += STEP)
        result.set(i, blend<RESTS>(at, left[i], right[i]), STEP == 2 ? blend<RESTS>(at, left[i + 1], right[i + 1]) : 0);
    return result;
}

template <int BYTES>
__device__ __forceinline__ void blend_pack(const Between& at, const Pack<ELEMENT, BYTES>& left,
                                           const Pack<ELEMENT, BYTES>& right, u8* out) {
    if (sizeof(ELEMENT) == 2 && at.u_rest == 0 && at.w_rest == 0) store(out, blended<false>(at, left, right));
    else store(out, blended<true>(at, left, right));
}

// One element of one target, from global memory; `d` in bytes.
__device__ __forceinline__ void blend_one(const Problem& p, const Item& item, const Between& at, int target, int d) {
    constexpr int SIZE = sizeof(ELEMENT);
    const u8* rows = rows_of(p, item) + d;
    blend_pack(at, load<ELEMENT, SIZE>(rows + at.left), load<ELEMENT, SIZE>(rows + at.right),
               out_of(p, item) + static_cast<u64>(target) * ROW_BYTES + d);
}

// A warp a target: its lanes search by `search` and walk over the row one element each.
template <typename Search>
__device__ __forceinline__ void warp_a_target(const Problem& p, Search search) {
    __shared__ float shared[TIMES + 1];
    const int lane = threadIdx.x % 32;
    for (int index = blockIdx.x; index < items_of(p); index += gridDim.x) {
        const Item item = item_of(p, index);
        const float* times = staged(p, item, shared);
        __syncthreads();
        for (int target = threadIdx.x / 32; target < item.count; target += THREADS / 32) {
            const float time = target_of(p, item, target);
            const Between at = between(times, p.sources, search(times, p.sources, time), time);
            for (int d = lane; d < DEPTH; d += 32) blend_one(p, item, at, target, d * sizeof(ELEMENT));
        }
        __syncthreads();  // the next item's times go where these are
    }
}

// Each target is searched once, by one thread, for all of the block.
__device__ __forceinline__ void search_targets(const Problem& p, const Item& item, float* shared, Between* found) {
    const float* times = staged(p, item, shared);
    float time = threadIdx.x < item.count ? target_of(p, item, threadIdx.x) : 0;  // on its way while the times are
    __syncthreads();
    for (int target = threadIdx.x; target < item.count; target += THREADS) {
        if (target >= THREADS) time = target_of(p, item, target);
        const int index = TIMES ? search_padded(times, p.sources, time) : search_alone(times, p.sources, time);
        found[target] = between(times, p.sources, index, time);
    }
    __syncthreads();
}

// The block's threads share the item's rows, BYTES each. A thread stays in its column and takes AT_ONCE targets at a time,
// neighbours, whose rows are mostly the same; their loads are in flight before the first is used. `get` loads what lies at
// a distance from the batch's first row.
template <int BYTES, typename Get>
__device__ __forceinline__ void blend_rows(const Problem& p, const Item& item, const Between* found, Get get) {
    constexpr int PER_ROW = ROW_BYTES / BYTES, ACROSS = PER_ROW < THREADS ? PER_ROW : THREADS, DOWN = THREADS / ACROSS;
    const int first = threadIdx.x / ACROSS;
    if (first >= DOWN) return;  // a row's vectors may not divide the block's threads
    for (int column = threadIdx.x % ACROSS * BYTES; column < ROW_BYTES; column += ACROSS * BYTES) {
        u8* out = out_of(p, item) + column;
        for (int begin = first * AT_ONCE; begin < item.count; begin += DOWN * AT_ONCE) {
            Pack<ELEMENT, BYTES> left[AT_ONCE], right[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int target = min(begin + k, item.count - 1);  // past the end: loaded, not stored
                left[k] = get(found[target].left + column);
                right[k] = get(found[target].right + column);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                const int target = begin + k;
                if (target < item.count) blend_pack(found[target], left[k], right[k], out + target * ROW_BYTES);
            }
        }
    }
}

template <int BYTES>
__device__ __forceinline__ void blend_rows(const Problem& p, const Item& item, const Between* found) {
    const u8* rows = rows_of(p, item);
    blend_rows<BYTES>(p, item, found, [&](u32 at) { return load<ELEMENT, BYTES>(rows + at); });
}

// ---- the ladder

// Each thread has one output element and searches for it.
extern "C" __global__ void __launch_bounds__(THREADS) search_a_thread(PARAMETERS) {
    const Problem p = PROBLEM;
    const u64 i = static_cast<u64>(blockIdx.x) * THREADS + threadIdx.x, of_batch = static_cast<u64>(p.targets) * DEPTH;
    if (i >= of_batch * p.batches) return;
    const Item item = {static_cast<int>(i / of_batch), static_cast<int>(i % of_batch / DEPTH), 1};
    const int d = i % DEPTH;
    const float time = target_of(p, item, 0);
    const float* times = times_of(p, item);
    const Between at = between(times, p.sources, search_alone(times, p.sources, time), time);
    blend_one(p, item, at, 0, d * sizeof(ELEMENT));
}

extern "C" __global__ void __launch_bounds__(THREADS) lane0_search(PARAMETERS) {
    warp_a_target(PROBLEM, search_lane0);
}

extern "C" __global__ void __launch_bounds__(THREADS) ballot_search(PARAMETERS) {
    warp_a_target(PROBLEM, search_ballot);
}

extern "C" __global__ void __launch_bounds__(THREADS) shared_search(PARAMETERS) {
    const Problem p = PROBLEM;
    __shared__ float shared[TIMES + 1];
    __shared__ Between found[TARGETS];
    const Item item = item_of(p, blockIdx.x);
    search_targets(p, item, shared, found);
    blend_rows<sizeof(ELEMENT)>(p, item, found);
}

extern "C" __global__ void __launch_bounds__(THREADS) vectors(PARAMETERS) {
    const Problem p = PROBLEM;
    __shared__ float shared[TIMES + 1];
    __shared__ Between found[TARGETS];
    const Item item = item_of(p, blockIdx.x);
    search_targets(p, item, shared, found);
    blend_rows<VECTOR>(p, item, found);
}

extern "C" __global__ void __launch_bounds__(THREADS) persistent(PARAMETERS) {
    const Problem p = PROBLEM;
    __shared__ float shared[TIMES + 1];
    __shared__ Between found[TARGETS];
    for (int index = blockIdx.x; index < items_of(p); index += gridDim.x) {
        const Item item = item_of(p, index);
        search_targets(p, item, shared, found);
        blend_rows<VECTOR>(p, item, found);
        __syncthreads();  // the next item's targets go where these are
    }
}

// The rows from the first to the last that the item's targets need lie in one piece: one bulk copy brings them. Targets
// too far apart for ROWS rows read theirs where they are.
extern "C" __global__ void __launch_bounds__(THREADS) bulk_rows(PARAMETERS) {
    extern __shared__ __align__(128) u8 rows[];
    __shared__ float shared[TIMES + 1];
    __shared__ Between found[TARGETS];
    __shared__ u32 first_row, last_row;
    __shared__ __align__(8) u64 landed;
    const Problem p = PROBLEM;
    const Item item = item_of(p, blockIdx.x);
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&landed), 1);
        fence_mbarrier_init();
        first_row = ~0u;
        last_row = 0;
    }
    search_targets(p, item, shared, found);
    for (int target = threadIdx.x; target < item.count; target += THREADS) {
        atomicMin(&first_row, found[target].left);
        atomicMax(&last_row, found[target].right);
    }
    __syncthreads();
    const u32 first = first_row, bytes = last_row + ROW_BYTES - first;
    if (bytes > ROWS * ROW_BYTES) return blend_rows<VECTOR>(p, item, found);

    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(shared_address(&landed), bytes);
        bulk_load(shared_address(rows), rows_of(p, item) + first, bytes, shared_address(&landed));
    }
    mbarrier_wait(shared_address(&landed), 0);
    blend_rows<VECTOR>(p, item, found, [&](u32 at) { return load_shared<ELEMENT, VECTOR>(rows + at - first); });
}
