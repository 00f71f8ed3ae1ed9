// Bulk copy without a tensor map: global -> shared -> global, one CTA a chunk of CHUNK_BYTES (-D, a multiple of 16).
// PTX ISA: "cp.async.bulk", "mbarrier". Header-free, so NVRTC needs no include path.

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
    // The copy engine must see an initialised barrier before it can signal it.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ void mbarrier_expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void mbarrier_wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

__device__ void bulk_load(u32 tile, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(tile), "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier) : "memory");
}

__device__ void bulk_store(void* destination, u32 tile, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(destination)), "r"(tile), "r"(bytes) : "memory");
}

// bytes: a multiple of 16; source and destination: 16-byte aligned; launch with ceil(bytes / CHUNK_BYTES) CTAs.
extern "C" __global__ void bulk_copy(const unsigned char* source, unsigned char* destination, u64 bytes) {
    __shared__ alignas(128) unsigned char tile[CHUNK_BYTES];
    __shared__ alignas(8) u64 barrier_storage;
    if (threadIdx.x != 0) return;  // one thread drives the copy engine

    const u32 barrier = shared_address(&barrier_storage);
    const u64 offset = static_cast<u64>(blockIdx.x) * CHUNK_BYTES;
    const u64 left = bytes - offset;
    const u32 size = left < CHUNK_BYTES ? static_cast<u32>(left) : CHUNK_BYTES;

    mbarrier_init(barrier, 1);
    mbarrier_expect_tx(barrier, size);
    bulk_load(shared_address(tile), source + offset, size, barrier);
    mbarrier_wait(barrier, 0);  // the first phase has parity 0

    // Orders what this thread has seen of the tile before the async proxy reads it for the store.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    bulk_store(destination + offset, shared_address(tile), size);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    // Shared memory is freed when the CTA exits, so the store must be done with it.
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
