// PTX of the copy engine, wrapped once: mbarriers, bulk copies, fences. Addresses of shared memory are 32 bits wide.
// PTX ISA: "mbarrier", "cp.async.bulk", "cp.async", "Async proxy". Needs no header, so NVRTC needs no include path.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier: a phase ends when `arrivals` threads have arrived and every byte that was announced has landed

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The copy engine must see an initialised barrier before it can signal it.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces `bytes` that the phase has to wait for.
__device__ __forceinline__ void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: the first phase has parity 0, the next 1, then 0 again.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

// ---- bulk copies: addresses and size are multiples of 16 bytes; one thread starts one

__device__ __forceinline__ void bulk_load(u32 tile, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(tile), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ void bulk_store(void* destination, u32 tile, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(destination)), "r"(tile), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's groups of stores have still to read shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Orders this thread's view of shared memory, its own writes above all, before what the copy engine does next.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- cp.async, the older way: every thread copies 16 bytes of its own

__device__ __forceinline__ void async_load16(u32 tile, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(tile), "l"(__cvta_generic_to_global(source)) : "memory");
}

__device__ __forceinline__ void async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
