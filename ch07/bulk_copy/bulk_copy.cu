// out = x, or out = a x + y: with 16-byte loads, with cp.async, and with bulk copies into a ring of stages.
//
// Every kernel calls divide_work first. This function cuts the arrays, and moves the ragged ends element by element.
//
//     x, y, out:  | head | unit | unit | unit | unit | unit | tail |      a unit is 16 bytes, at a multiple of 16
//     chunks:            |------ 0 ----|------ 1 ----|-- 2 -|             CHUNK_BYTES each, the last may be shorter
//     CTAs:              |----------- CTA 0 ---------|CTA 1 |             CHUNKS_PER_CTA chunks each
//
// With CHUNKS_PER_CTA 0 the CTAs are persistent: CTA i takes the chunks i, i + gridDim.x, i + 2 gridDim.x, ...
//
// The arrays x, y and out start equally far past a multiple of 16 bytes. They have n elements. Compile with -D:
//     ELEMENT         u8 copies; float, bf16 and f16 compute a x + y
//     THREADS         threads per CTA
//     CHUNK_BYTES     bytes per chunk and array, a multiple of 16
//     STAGES          chunks that the ring holds
//     CHUNKS_PER_CTA  0 for persistent CTAs
//
// nvcc -std=c++17 -arch=sm_90a -cubin -Itilelab/include -DELEMENT=u8 -DTHREADS=32 -DCHUNK_BYTES=2048 -DSTAGES=4
//      -DCHUNKS_PER_CTA=8 ch07/bulk_copy/bulk_copy.cu
#include "elements.cuh"
#include "ptx.cuh"

constexpr int COPY = sizeof(ELEMENT) == 1;
constexpr int INPUTS = COPY ? 1 : 2;
constexpr int UNIT = 16, ELEMENTS_PER_UNIT = UNIT / sizeof(ELEMENT), UNITS_PER_CHUNK = CHUNK_BYTES / UNIT;
constexpr int STAGE_BYTES = INPUTS * CHUNK_BYTES;  // a stage holds a chunk of x, then one of y

// Return BYTES of results: x where ELEMENT is u8, else a x + y.
template <int BYTES>
__device__ __forceinline__ typename Word<BYTES>::type compute_unit(float a, typename Word<BYTES>::type x,
                                                                   typename Word<BYTES>::type y) {
    if constexpr (COPY) return x;
    else {
        Pack<ELEMENT, BYTES> px, py, result;
        px.word[0] = py.word[0] = 0;
        px.whole = x;
        py.whole = y;
        constexpr int STEP = sizeof(ELEMENT) == 2 && BYTES > 2 ? 2 : 1;  // one instruction rounds two halves
        for (int i = 0; i < px.COUNT; i += STEP)
            result.set(i, fmaf(a, px[i], py[i]), STEP == 2 ? fmaf(a, px[i + 1], py[i + 1]) : 0.0f);
        return result.whole;
    }
}

struct Work {
    const uint4 *x, *y;  // the first whole unit of each array
    uint4* out;
    u64 units;
    u32 first, end, step;  // the chunks of this CTA
};

// Compute and store the elements before and after the units, one by one, in the first CTA.
__device__ __forceinline__ void move_ragged_ends(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n,
                                                 u64 head, u64 tail) {
    if (blockIdx.x != 0) return;
    typedef Word<sizeof(ELEMENT)>::type Bits;
    auto move = [&](u64 i) {
        reinterpret_cast<Bits*>(out)[i] =
            compute_unit<sizeof(ELEMENT)>(a, reinterpret_cast<const Bits*>(x)[i], reinterpret_cast<const Bits*>(y)[i]);
    };
    if (threadIdx.x < head) move(threadIdx.x);
    if (tail + threadIdx.x < n) move(tail + threadIdx.x);
}

// Cut the arrays, and move their ragged ends.
__device__ Work divide_work(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n) {
    const u32 past = reinterpret_cast<u64>(x) % UNIT / sizeof(ELEMENT);
    u64 head = past ? ELEMENTS_PER_UNIT - past : 0;
    head = head < n ? head : n;
    const u64 units = (n - head) / ELEMENTS_PER_UNIT, tail = head + units * ELEMENTS_PER_UNIT;
    move_ragged_ends(x, y, out, a, n, head, tail);
    const u32 chunks = static_cast<u32>((units + UNITS_PER_CHUNK - 1) / UNITS_PER_CHUNK);
    // The hardware starts CTAs in order. Short-lived CTAs therefore read and write memory in one narrow, advancing
    // front. Persistent CTAs drift apart, and scattered addresses make DRAM slower.
    const u32 first = CHUNKS_PER_CTA ? blockIdx.x * CHUNKS_PER_CTA : blockIdx.x;
    return {reinterpret_cast<const uint4*>(x + head),
            reinterpret_cast<const uint4*>(y + head),
            reinterpret_cast<uint4*>(out + head),
            units,
            first,
            CHUNKS_PER_CTA ? min(first + CHUNKS_PER_CTA, chunks) : chunks,
            CHUNKS_PER_CTA ? 1 : gridDim.x};
}

__device__ __forceinline__ u64 first_unit(u32 chunk) { return static_cast<u64>(chunk) * UNITS_PER_CHUNK; }

__device__ __forceinline__ u32 count_units(const Work& work, u32 chunk) {
    const u64 left = work.units - first_unit(chunk);
    return left < UNITS_PER_CHUNK ? static_cast<u32>(left) : UNITS_PER_CHUNK;
}

// One CTA per chunk, no shared memory. Every thread issues all its loads before its first store.
extern "C" __global__ void __launch_bounds__(THREADS)
    loads(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n) {
    const Work work = divide_work(x, y, out, a, n);
    constexpr int UNITS_PER_THREAD = (UNITS_PER_CHUNK + THREADS - 1) / THREADS;
    const u64 first = first_unit(blockIdx.x) + threadIdx.x;
    uint4 px[UNITS_PER_THREAD], py[UNITS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
        const u64 at = first + i * THREADS;
        if (at >= work.units) continue;
        px[i] = __ldg(work.x + at);
        if constexpr (!COPY) py[i] = __ldg(work.y + at);
    }
#pragma unroll
    for (int i = 0; i < UNITS_PER_THREAD; ++i) {
        const u64 at = first + i * THREADS;
        if (at < work.units) work.out[at] = compute_unit<UNIT>(a, px[i], py[i]);
    }
}

// A ring filled by cp.async. A thread reads only the units that it has copied itself, so no barrier is needed.
extern "C" __global__ void __launch_bounds__(THREADS)
    cp_async(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n) {
    extern __shared__ __align__(128) u8 ring[];
    const Work work = divide_work(x, y, out, a, n);
    const u32 base = shared_address(ring);

    auto fill = [&](u32 chunk, u32 stage) {
        if (chunk < work.end) {
            const u64 first = first_unit(chunk);
            for (u32 i = threadIdx.x; i < count_units(work, chunk); i += THREADS) {
                const u32 tile = base + stage * STAGE_BYTES;
                cp_async_16(tile + i * UNIT, work.x + first + i);
                if constexpr (!COPY) cp_async_16(tile + CHUNK_BYTES + i * UNIT, work.y + first + i);
            }
        }
        cp_async_commit();  // also when it is empty: cp_async_wait counts groups
    };

    for (u32 stage = 0; stage + 1 < STAGES; ++stage) fill(work.first + stage * work.step, stage);
    u32 stage = 0;
    for (u32 chunk = work.first; chunk < work.end; chunk += work.step) {
        fill(chunk + (STAGES - 1) * work.step, (stage + STAGES - 1) % STAGES);
        cp_async_wait<STAGES - 1>();
        const u64 first = first_unit(chunk);
        const uint4* tile = reinterpret_cast<const uint4*>(ring + stage * STAGE_BYTES);
        for (u32 i = threadIdx.x; i < count_units(work, chunk); i += THREADS)
            work.out[first + i] = compute_unit<UNIT>(a, tile[i], tile[COPY ? i : UNITS_PER_CHUNK + i]);
        stage = (stage + 1) % STAGES;
    }
}

// A ring that bulk copies fill and empty. STAGES 1 is one buffer, and every copy is waited for.
//
// One thread, the leader, issues all loads and stores. The other threads only compute, and a copy has nothing to
// compute. A stage goes through four states:
//
//     load in flight  --mbarrier_wait-->  full  --bulk_store-->  being stored  --bulk_wait_read-->  free  --fill--> ...
extern "C" __global__ void __launch_bounds__(THREADS)
    bulk(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(8) u64 full[STAGES];
    const Work work = divide_work(x, y, out, a, n);
    const u32 base = shared_address(ring);
    const bool leader = threadIdx.x == 0;

    if (leader) {
        for (u32 stage = 0; stage < STAGES; ++stage) mbarrier_init(shared_address(full + stage), 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    auto fill = [&](u32 chunk, u32 stage) {
        if (chunk >= work.end) return;
        const u32 bytes = count_units(work, chunk) * UNIT, tile = base + stage * STAGE_BYTES;
        const u32 barrier = shared_address(full + stage);
        mbarrier_arrive_expect_tx(barrier, INPUTS * bytes);
        bulk_load(tile, work.x + first_unit(chunk), bytes, barrier);
        if constexpr (!COPY) bulk_load(tile + CHUNK_BYTES, work.y + first_unit(chunk), bytes, barrier);
    };

    if (leader)
        for (u32 stage = 0; stage < STAGES; ++stage) fill(work.first + stage * work.step, stage);
    u32 stage = 0, phase = 0;
    for (u32 chunk = work.first; chunk < work.end; chunk += work.step) {
        if (leader || !COPY) mbarrier_wait(shared_address(full + stage), phase);
        const u32 units = count_units(work, chunk);
        if constexpr (!COPY) {
            uint4* tile = reinterpret_cast<uint4*>(ring + stage * STAGE_BYTES);
            for (u32 i = threadIdx.x; i < units; i += THREADS)
                tile[i] = compute_unit<UNIT>(a, tile[i], tile[UNITS_PER_CHUNK + i]);
            // The copy engine reads shared memory through another path (the async proxy) than threads write it. Each
            // thread fences its own writes; after the barrier all writes are visible to the store below.
            fence_proxy_async();
            __syncthreads();
        }
        if (leader) {
            bulk_store(work.out + first_unit(chunk), base + stage * STAGE_BYTES, units * UNIT);
            bulk_commit();
            // With several stages, refill the previous stage, not this one: the engine has had one chunk's time to
            // read it for its store.
            constexpr int BEHIND = STAGES > 1;
            bulk_wait_read<BEHIND>();
            if (!BEHIND || chunk != work.first)
                fill(chunk + (STAGES - BEHIND) * work.step, (stage + STAGES - BEHIND) % STAGES);
        }
        stage = (stage + 1) % STAGES;
        if (stage == 0) phase ^= 1;
    }
    if (leader) bulk_wait_read<0>();  // shared memory must not be freed while the engine reads
}

// The same ring in persistent CTAs, but each takes the next chunk that no other CTA has taken, so that the front of
// addresses stays narrow. It only copies, which one thread per CTA can drive. `counter` holds the next chunk and is zero
// before the launch. Each CTA takes one number past the last chunk, so a launch takes chunks + gridDim.x numbers, and
// atomicInc wraps to zero after the last of them.
extern "C" __global__ void __launch_bounds__(THREADS)
    bulk_in_order(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n, u32* counter) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(8) u64 full[STAGES];
    const Work work = divide_work(x, y, out, a, n);
    if (threadIdx.x != 0 || !COPY) return;
    const u32 base = shared_address(ring);
    const u32 chunks = static_cast<u32>((work.units + UNITS_PER_CHUNK - 1) / UNITS_PER_CHUNK);
    for (u32 stage = 0; stage < STAGES; ++stage) mbarrier_init(shared_address(full + stage), 1);
    fence_mbarrier_init();

    const u32 last = chunks + gridDim.x - 1;
    u32 chunk_in[STAGES], next = atomicInc(counter, last);
    auto fill = [&](u32 stage) {
        const u32 chunk = chunk_in[stage] = next;
        if (chunk >= chunks) return;
        const u32 bytes = count_units(work, chunk) * UNIT, barrier = shared_address(full + stage);
        mbarrier_arrive_expect_tx(barrier, bytes);
        bulk_load(base + stage * CHUNK_BYTES, work.x + first_unit(chunk), bytes, barrier);
        next = atomicInc(counter, last);
    };
#pragma unroll
    for (u32 stage = 0; stage < STAGES; ++stage) fill(stage);
    for (u32 phase = 0;; phase ^= 1) {
#pragma unroll
        for (u32 stage = 0; stage < STAGES; ++stage) {
            const u32 chunk = chunk_in[stage];
            if (chunk >= chunks) return;  // chunks come in order, so the other stages hold none either
            mbarrier_wait(shared_address(full + stage), phase);
            bulk_store(work.out + first_unit(chunk), base + stage * CHUNK_BYTES, count_units(work, chunk) * UNIT);
            bulk_commit();
            bulk_wait_read<0>();
            fill(stage);
        }
    }
}
