// out = x, or out = a x + y: 16-byte loads, cp.async, and bulk copies with one buffer and with a ring of them.
//
// -D: ELEMENT (u8 copies; float, bf16 and f16 make a x + y), THREADS, CHUNK bytes a step (a multiple of 16), STAGES of a
// ring, SPAN chunks a CTA (0: persistent CTAs, each with every gridDim.x-th chunk), BREAK (0: nothing). x, y and out lie equally far from a multiple of 16 bytes. The elements before the first such
// multiple, and after the last, are moved one by one: a bulk copy takes whole units of 16 bytes.
#include "elements.cuh"
#include "ptx.cuh"

constexpr int COPY = sizeof(ELEMENT) == 1;
constexpr int INPUTS = COPY ? 1 : 2;
constexpr int UNIT = 16, PER_UNIT = UNIT / sizeof(ELEMENT);
// What a reader may leave out, to see what it is for.
enum { NOTHING, EXPECT_TX, PHASE, WAIT_READ, PROXY_FENCE };

__device__ __forceinline__ ELEMENT one(float a, ELEMENT x, ELEMENT y) {
    if constexpr (COPY) return x;
    else {
        Pack<ELEMENT, sizeof(ELEMENT)> px, py, result;
        px.word[0] = py.word[0] = 0;
        *reinterpret_cast<ELEMENT*>(px.word) = x;
        *reinterpret_cast<ELEMENT*>(py.word) = y;
        result.set(0, fmaf(a, px[0], py[0]), 0.0f);
        return *reinterpret_cast<ELEMENT*>(result.word);
    }
}

__device__ __forceinline__ uint4 unit(float a, uint4 x, uint4 y) {
    if constexpr (COPY) return x;
    else {
        Pack<ELEMENT, UNIT> px, py, result;
        px.whole = x;
        py.whole = y;
        for (int i = 0; i < PER_UNIT; i += 2) {
            result.set(i, fmaf(a, px[i], py[i]), fmaf(a, px[i + 1], py[i + 1]));
            if constexpr (sizeof(ELEMENT) == 4) result.set(i + 1, fmaf(a, px[i + 1], py[i + 1]), 0.0f);
        }
        return result.whole;
    }
}

// The whole units of the three arrays; the first block's threads do the odd elements at both ends.
struct Body {
    const uint4 *x, *y;
    uint4* out;
    u64 units;
    u32 first, end, step;  // this CTA's chunks
};

__device__ Body body(const ELEMENT* x, const ELEMENT* y, ELEMENT* out, float a, u64 n) {
    const u32 past = reinterpret_cast<u64>(x) % UNIT / sizeof(ELEMENT);
    u64 head = past ? PER_UNIT - past : 0;
    head = head < n ? head : n;
    const u64 units = (n - head) / PER_UNIT, tail = head + units * PER_UNIT;
    if (blockIdx.x == 0) {
        if (threadIdx.x < head) out[threadIdx.x] = one(a, x[threadIdx.x], y[threadIdx.x]);
        if (tail + threadIdx.x < n) out[tail + threadIdx.x] = one(a, x[tail + threadIdx.x], y[tail + threadIdx.x]);
    }
    const u32 chunks = static_cast<u32>((units + CHUNK / UNIT - 1) / (CHUNK / UNIT));
    // Short-lived CTAs start in the order of their chunks, so the chip walks over memory in one narrow front. Persistent
    // ones drift apart, and DRAM pays for it.
    const u32 first = SPAN ? blockIdx.x * SPAN : blockIdx.x;
    return {reinterpret_cast<const uint4*>(x + head), reinterpret_cast<const uint4*>(y + head),
            reinterpret_cast<uint4*>(out + head), units, first, SPAN ? min(first + SPAN, chunks) : chunks,
            SPAN ? 1 : gridDim.x};
}

// Units of chunk `chunk`: all but the last chunk are full.
__device__ __forceinline__ u32 units_of(const Body& all, u32 chunk) {
    const u64 left = all.units - static_cast<u64>(chunk) * (CHUNK / UNIT);
    return left < CHUNK / UNIT ? static_cast<u32>(left) : CHUNK / UNIT;
}

#define ARGUMENTS const ELEMENT *x, const ELEMENT *y, ELEMENT *out, float a, u64 n

// One CTA a chunk; every thread has all its loads in flight before it stores the first. No shared memory.
extern "C" __global__ void __launch_bounds__(THREADS) loads(ARGUMENTS) {
    const Body all = body(x, y, out, a, n);
    constexpr int EACH = (CHUNK / UNIT + THREADS - 1) / THREADS;
    const u64 first = static_cast<u64>(blockIdx.x) * (CHUNK / UNIT) + threadIdx.x;
    uint4 px[EACH], py[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u64 at = first + i * THREADS;
        if (at >= all.units) continue;
        px[i] = __ldg(all.x + at);
        if constexpr (!COPY) py[i] = __ldg(all.y + at);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u64 at = first + i * THREADS;
        if (at < all.units) all.out[at] = unit(a, px[i], py[i]);
    }
}

// A ring filled by cp.async. A thread reads back only what it has copied itself, so no barrier is needed.
extern "C" __global__ void __launch_bounds__(THREADS) cp_async(ARGUMENTS) {
    extern __shared__ __align__(128) u8 ring[];
    const Body all = body(x, y, out, a, n);
    const u32 base = shared_address(ring);

    auto fill = [&](u32 chunk, u32 slot) {
        if (chunk < all.end) {
            const u64 first = static_cast<u64>(chunk) * (CHUNK / UNIT);
            for (u32 i = threadIdx.x; i < units_of(all, chunk); i += THREADS) {
                cp_async_16(base + slot * INPUTS * CHUNK + i * UNIT, all.x + first + i);
                if constexpr (!COPY) cp_async_16(base + (slot * INPUTS + 1) * CHUNK + i * UNIT, all.y + first + i);
            }
        }
        cp_async_commit();  // an empty group counts too: the wait below counts groups
    };

    for (u32 stage = 0; stage + 1 < STAGES; ++stage) fill(all.first + stage * all.step, stage);
    u32 slot = 0;
    for (u32 chunk = all.first; chunk < all.end; chunk += all.step) {
        fill(chunk + (STAGES - 1) * all.step, (slot + STAGES - 1) % STAGES);
        cp_async_wait<STAGES - 1>();
        const u64 first = static_cast<u64>(chunk) * (CHUNK / UNIT);
        const uint4* tile = reinterpret_cast<const uint4*>(ring + slot * INPUTS * CHUNK);
        for (u32 i = threadIdx.x; i < units_of(all, chunk); i += THREADS)
            all.out[first + i] = unit(a, tile[i], tile[COPY ? i : CHUNK / UNIT + i]);
        slot = (slot + 1) % STAGES;
    }
}

// Bulk copies, both ways. With STAGES 1 there is one buffer and a full wait, with more a ring.
//
// A slot's life: announce its bytes, load, wait for the phase, work on it in place, store, wait until the store has
// read it. One thread gives the orders; the others only work, and a copy has no work for them.
extern "C" __global__ void __launch_bounds__(THREADS) bulk(ARGUMENTS) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(8) u64 full[STAGES];
    const Body all = body(x, y, out, a, n);
    const u32 base = shared_address(ring);
    const bool leads = threadIdx.x == 0;

    if (leads) {
        for (u32 stage = 0; stage < STAGES; ++stage) mbarrier_init(shared_address(full + stage), 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    auto fill = [&](u32 chunk, u32 slot) {
        if (chunk >= all.end) return;
        const u32 bytes = units_of(all, chunk) * UNIT, tile = base + slot * INPUTS * CHUNK;
        const u32 barrier = shared_address(full + slot);
        const u64 first = static_cast<u64>(chunk) * (CHUNK / UNIT);
        if constexpr (BREAK == EXPECT_TX) mbarrier_arrive(barrier);
        else mbarrier_arrive_expect_tx(barrier, INPUTS * bytes);
        bulk_load(tile, all.x + first, bytes, barrier);
        if constexpr (!COPY) bulk_load(tile + CHUNK, all.y + first, bytes, barrier);
    };

    if (leads)
        for (u32 stage = 0; stage < STAGES; ++stage) fill(all.first + stage * all.step, stage);
    u32 slot = 0, parity = 0;
    for (u32 chunk = all.first; chunk < all.end; chunk += all.step) {
        if (leads || !COPY) mbarrier_wait(shared_address(full + slot), parity);
        const u32 units = units_of(all, chunk);
        if constexpr (!COPY) {
            uint4* tile = reinterpret_cast<uint4*>(ring + slot * INPUTS * CHUNK);
            for (u32 i = threadIdx.x; i < units; i += THREADS) tile[i] = unit(a, tile[i], tile[CHUNK / UNIT + i]);
            // Each thread orders its own writes before the engine's read; then all of them have.
            if constexpr (BREAK != PROXY_FENCE) fence_proxy_async();
            __syncthreads();
        }
        if (leads) {
            bulk_store(all.out + static_cast<u64>(chunk) * (CHUNK / UNIT), base + slot * INPUTS * CHUNK, units * UNIT);
            bulk_commit();
            // With stages to spare, the slot before this one is refilled: its store has had a whole step to finish.
            constexpr int BEHIND = STAGES > 1;
            if constexpr (BREAK != WAIT_READ) bulk_wait_read<BEHIND>();
            if (!BEHIND || chunk != all.first)
                fill(chunk + (STAGES - BEHIND) * all.step, (slot + STAGES - BEHIND) % STAGES);
        }
        slot = (slot + 1) % STAGES;
        if (slot == 0 && BREAK != PHASE) parity ^= 1;
    }
    if (leads) bulk_wait_read<0>();  // shared memory goes when the CTA ends
}

// Persistent CTAs again, but each takes the next chunk that nobody has taken: the front stays narrow. For a copy, which
// one thread a CTA can drive. `taken` holds two zeros, and does again when all CTAs are done.
extern "C" __global__ void __launch_bounds__(THREADS) bulk_in_order(ARGUMENTS, u32* taken) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ __align__(8) u64 full[STAGES];
    const Body all = body(x, y, out, a, n);
    if (threadIdx.x != 0 || !COPY) return;
    const u32 base = shared_address(ring), chunks = static_cast<u32>((all.units + CHUNK / UNIT - 1) / (CHUNK / UNIT));
    for (u32 stage = 0; stage < STAGES; ++stage) mbarrier_init(shared_address(full + stage), 1);
    fence_mbarrier_init();

    u32 chunk_of[STAGES], next = atomicAdd(taken, 1);
    auto fill = [&](u32 slot) {
        const u32 chunk = chunk_of[slot] = next;
        if (chunk >= chunks) return;
        const u32 bytes = units_of(all, chunk) * UNIT, barrier = shared_address(full + slot);
        mbarrier_arrive_expect_tx(barrier, bytes);
        bulk_load(base + slot * CHUNK, all.x + static_cast<u64>(chunk) * (CHUNK / UNIT), bytes, barrier);
        next = atomicAdd(taken, 1);
    };
#pragma unroll
    for (u32 stage = 0; stage < STAGES; ++stage) fill(stage);
    for (u32 parity = 0;; parity ^= 1) {
#pragma unroll
        for (u32 slot = 0; slot < STAGES; ++slot) {
            const u32 chunk = chunk_of[slot];
            if (chunk >= chunks) {  // those that follow are past the end, too
                if (atomicAdd(taken + 1, 1) == gridDim.x - 1) taken[0] = taken[1] = 0;
                bulk_wait_read<0>();
                return;
            }
            mbarrier_wait(shared_address(full + slot), parity);
            bulk_store(all.out + static_cast<u64>(chunk) * (CHUNK / UNIT), base + slot * CHUNK,
                       units_of(all, chunk) * UNIT);
            bulk_commit();
            bulk_wait_read<0>();
            fill(slot);
        }
    }
}
