// nvcc -arch=sm_90a -O3 -o ring_copy ring_copy.cu && ./ring_copy
//
// The ring of bulk copies of chapter 7 in one file, without any header of the course. One thread per block issues all
// loads and stores. Stage s holds the tiles that its block uses as numbers s, s + STAGES, s + 2 * STAGES, ...
//
//     event                               who          what becomes safe
//     the bytes of a load have landed     copy engine  full[s] ends its phase: the tile may be stored
//     a store has read its stage          copy engine  its group is done: the stage may be loaded again
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

constexpr int BYTES = 8192, STAGES = 8;  // of a tile; 64 KiB per block, more than the 48 that every kernel may have

// An address in shared memory, as PTX takes it.
__device__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Return when the phase of this parity has ended. One try_wait gives up after a while, so it stands in a loop.
__device__ void wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done)
        asm volatile(
            "{\n .reg .pred ended;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
            " selp.u32 %0, 1, 0, ended;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}

extern "C" __global__ void ring_copy(const unsigned char* x, unsigned char* out, int tiles) {
    extern __shared__ __align__(128) unsigned char ring[];  // STAGES tiles
    __shared__ __align__(8) uint64_t full[STAGES];
    if (threadIdx.x != 0) return;

    for (int stage = 0; stage < STAGES; ++stage)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[stage])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine can see the barriers

    auto load = [&](int use) {  // issue the load of the tile that this block uses as number `use`, if there is one
        const int tile = blockIdx.x + use * gridDim.x;
        if (tile >= tiles) return;
        const uint32_t barrier = shared_address(&full[use % STAGES]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(BYTES) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(ring + use % STAGES * BYTES)),
                     "l"(x + size_t(tile) * BYTES), "r"(BYTES), "r"(barrier)
                     : "memory");
    };

    for (int use = 0; use < STAGES; ++use) load(use);
    for (int use = 0, tile = blockIdx.x; tile < tiles; ++use, tile += gridDim.x) {
        wait(shared_address(&full[use % STAGES]), use / STAGES % 2);  // the tile has landed
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + size_t(tile) * BYTES),
                     "r"(shared_address(ring + use % STAGES * BYTES)), "r"(BYTES)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (use > 0) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");  // the store before has read its stage
            load(use - 1 + STAGES);
        }
    }
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // shared memory is freed when the block ends
}

#define CHECK(call)                                                    \
    if (cudaError_t error = (call)) {                                  \
        fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
        return 1;                                                      \
    }

int main() {
    const int tiles = 65537;  // 512 MiB and one tile, so that the blocks get different numbers of tiles
    const size_t bytes = size_t(tiles) * BYTES;
    unsigned char *x, *out;
    int sms;
    CHECK(cudaMalloc(&x, bytes));
    CHECK(cudaMalloc(&out, bytes));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    // A launch with more than 48 KiB of dynamic shared memory fails unless the kernel's limit was raised before.
    CHECK(cudaFuncSetAttribute(ring_copy, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGES * BYTES));

    unsigned char* host = (unsigned char*)malloc(bytes);
    for (size_t i = 0; i < bytes; ++i) host[i] = (unsigned char)(i * 2654435761u >> 13);
    CHECK(cudaMemcpy(x, host, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(out, 0xee, bytes));

    cudaEvent_t events[3];
    for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
    ring_copy<<<sms, 32, STAGES * BYTES>>>(x, out, tiles);  // the first launch loads the kernel
    CHECK(cudaEventRecord(events[0]));
    for (int i = 0; i < 10; ++i) ring_copy<<<sms, 32, STAGES * BYTES>>>(x, out, tiles);
    CHECK(cudaEventRecord(events[1]));
    for (int i = 0; i < 10; ++i) CHECK(cudaMemcpyAsync(out, x, bytes, cudaMemcpyDeviceToDevice));
    CHECK(cudaEventRecord(events[2]));
    CHECK(cudaMemset(out, 0xee, bytes));
    ring_copy<<<sms, 32, STAGES * BYTES>>>(x, out, tiles);
    CHECK(cudaGetLastError());
    unsigned char* found = (unsigned char*)malloc(bytes);
    CHECK(cudaMemcpy(found, out, bytes, cudaMemcpyDeviceToHost));

    size_t wrong_bytes = 0;
    for (size_t i = 0; i < bytes; ++i) wrong_bytes += found[i] != host[i];
    float ring_ms, copy_ms;
    CHECK(cudaEventElapsedTime(&ring_ms, events[0], events[1]));
    CHECK(cudaEventElapsedTime(&copy_ms, events[1], events[2]));
    printf("%zu of %zu bytes are wrong; the ring moves %.0f GB/s, cudaMemcpy %.0f GB/s\n", wrong_bytes, bytes,
           20e-6 * bytes / ring_ms, 20e-6 * bytes / copy_ms);
    return wrong_bytes != 0;
}
