// Copy by cp.async.bulk without a tensor map. Each CTA moves one chunk of CHUNK_BYTES (-D, a multiple of 16) from
// global memory to shared memory and back to global memory.
#include "ptx.cuh"

// bytes is a multiple of 16, source and destination are aligned to 16 bytes; launch ceil(bytes / CHUNK_BYTES) CTAs.
extern "C" __global__ void bulk_copy(const unsigned char* source, unsigned char* destination, u64 bytes) {
    __shared__ alignas(128) unsigned char tile[CHUNK_BYTES];
    __shared__ alignas(8) u64 barrier_storage;
    if (threadIdx.x != 0) return;  // one thread drives the copy engine

    const u32 barrier = shared_address(&barrier_storage);
    const u64 offset = static_cast<u64>(blockIdx.x) * CHUNK_BYTES;
    const u64 left = bytes - offset;
    const u32 size = left < CHUNK_BYTES ? static_cast<u32>(left) : CHUNK_BYTES;

    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(barrier, size);
    bulk_load(shared_address(tile), source + offset, size, barrier);
    mbarrier_wait(barrier, 0);  // the first phase has parity 0

    // The store reads the tile through the async proxy, so this thread's view of it must be ordered before.
    fence_proxy_async();
    bulk_store(destination + offset, shared_address(tile), size);
    bulk_commit();
    // Shared memory is freed when the CTA exits, so the store must have read it by then.
    bulk_wait_read<0>();
}
