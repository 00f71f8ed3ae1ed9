// Wrappers of single PTX instructions: mbarriers, bulk copies, fences and cp.async. An address in shared memory has 32
// bits. The file includes no other header. PTX ISA: "mbarrier", "cp.async.bulk", "cp.async", "Async proxy".
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a phase completes after `arrivals` arrivals, when all announced bytes have landed too

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The copy engine can only signal a barrier whose initialisation it has seen.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, which also announces `bytes` that the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait until the phase of this parity has completed. The first phase has parity 0, the second 1, the third 0 again. A
// wait on a new barrier for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 phase) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(phase)
            : "memory");
    }
}

// ---- bulk copies: one thread starts each; both addresses and the size are multiples of 16 bytes

__device__ __forceinline__ void bulk_load(u32 tile, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tile),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void bulk_store(void* destination, u32 tile, u32 bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(destination)),
        "r"(tile), "r"(bytes)
        : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most PENDING groups of this thread's stores have not yet read their shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// The copy engine reads shared memory through another path (proxy) than threads do. The fence makes this thread's
// writes visible to copies that start afterwards.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- cp.async, the older asynchronous copy: each thread copies its own 16 bytes

__device__ __forceinline__ void cp_async_16(u32 tile, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tile), "l"(__cvta_generic_to_global(source))
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
