// nvcc -arch=sm_90a -O3 -o transpose transpose.cu && ./transpose
//
// The swizzled transpose of chapter 10 in one file, without any header of the course: a ring of boxes that a tensor map
// describes. Thread 0 of a block issues the loads and stores, and all 256 threads turn each tile in shared memory.
//
//     event                             who            what becomes safe
//     the box has landed                copy engine    full[stage] ends its phase: threads may read the tile
//     fence.proxy.async, __syncthreads  every thread   the engine may read `turned`, and the stage may be loaded again
//     the store has read `turned`       copy engine    its group is done: after a __syncthreads threads may write it
#include <cuda.h>  // for CUtensorMap; the function comes from the driver, so nothing is linked
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

constexpr int ROWS = 128, COLUMNS = 32;  // of a tile of x; a row takes 128 bytes, as the swizzle wants
constexpr int STAGES = 3, BYTES = ROWS * COLUMNS * 4;
constexpr int SHARED_BYTES = (STAGES + 1) * BYTES;  // 64 KiB: the ring, and the turned tile

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

extern "C" __global__ void transpose(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap out,
                                     int tiles_x, int tiles) {
    extern __shared__ __align__(1024) unsigned char ring[];  // STAGES boxes, at multiples of 1,024 for the swizzle
    float* turned = reinterpret_cast<float*>(ring + STAGES * BYTES);
    __shared__ __align__(8) uint64_t full[STAGES];
    const bool leader = threadIdx.x == 0;

    if (leader) {
        for (int stage = 0; stage < STAGES; ++stage)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[stage])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();  // nobody waits on a barrier before it exists

    auto load = [&](int use) {  // issue the load of the box that this block uses as number `use`, if there is one
        const int tile = blockIdx.x + use * gridDim.x;
        if (tile >= tiles) return;
        const uint32_t barrier = shared_address(&full[use % STAGES]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(BYTES) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                "r"(shared_address(ring + use % STAGES * BYTES)),
            "l"(&x), "r"(tile % tiles_x * COLUMNS), "r"(tile / tiles_x * ROWS), "r"(barrier)
            : "memory");
    };
    for (int use = 0; leader && use < STAGES; ++use) load(use);

    for (int use = 0, tile = blockIdx.x; tile < tiles; ++use, tile += gridDim.x) {
        const float* box = reinterpret_cast<const float*>(ring + use % STAGES * BYTES);
        wait(shared_address(&full[use % STAGES]), use / STAGES % 2);
        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {
            const int row = i % ROWS, column = i / ROWS;  // a warp reads 32 rows of one column
            const int unit = column / 4 ^ row % 8;  // where the swizzle has put the unit of 16 bytes
            turned[column * ROWS + row] = box[row * COLUMNS + unit * 4 + column % 4];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // this thread's writes, before the engine reads
        __syncthreads();  // all threads have read the box and written
        if (leader) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out),
                         "r"(tile / tiles_x * ROWS), "r"(tile % tiles_x * COLUMNS), "r"(shared_address(turned))
                         : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            load(use + STAGES);
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        }
        __syncthreads();  // the engine has read `turned`
    }
}

#define CHECK(call)                                                    \
    if (cudaError_t error = (call)) {                                  \
        fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
        exit(1);                                                       \
    }

// Return the tensor map of a matrix of floats: its rows lie one after the other, and each copy moves a box.
CUtensorMap make_map(float* matrix, int rows, int columns, int box_rows, int box_columns, CUtensorMapSwizzle swizzle) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (!encode) {  // ask the runtime for the driver's function, so that no -lcuda is needed
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000,
                                               cudaEnableDefault, &found));
    }
    CUtensorMap map;
    const cuuint64_t shape[] = {cuuint64_t(columns), cuuint64_t(rows)};  // the innermost dimension first
    const cuuint64_t strides[] = {cuuint64_t(columns) * 4};  // bytes from a row to the next
    const cuuint32_t box[] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[] = {1, 1};
    const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, matrix, shape, strides, box, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "the driver refuses the tensor map (error %d)\n", result);
        exit(1);
    }
    return map;
}

int main() {
    // All rows start at a line of 128 bytes, and the last tile of each column of tiles is ragged.
    const int rows = 16416, columns = 8224;
    const size_t count = size_t(rows) * columns;
    float *x, *out, *host = (float*)malloc(4 * count), *found = (float*)malloc(4 * count);
    int sms;
    CHECK(cudaMalloc(&x, 4 * count));
    CHECK(cudaMalloc(&out, 4 * count));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    for (size_t i = 0; i < count; ++i) host[i] = float(i % 16777213);
    CHECK(cudaMemcpy(x, host, 4 * count, cudaMemcpyHostToDevice));

    const CUtensorMap from = make_map(x, rows, columns, ROWS, COLUMNS, CU_TENSOR_MAP_SWIZZLE_128B);
    const CUtensorMap to = make_map(out, columns, rows, COLUMNS, ROWS, CU_TENSOR_MAP_SWIZZLE_NONE);
    const int tiles_x = (columns + COLUMNS - 1) / COLUMNS, tiles = tiles_x * ((rows + ROWS - 1) / ROWS);
    // A launch with more than 48 KiB of dynamic shared memory fails unless the kernel's limit was raised before.
    CHECK(cudaFuncSetAttribute(transpose, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));

    cudaEvent_t events[3];
    for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
    transpose<<<3 * sms, 256, SHARED_BYTES>>>(from, to, tiles_x, tiles);  // the first launch loads the kernel
    CHECK(cudaEventRecord(events[0]));
    for (int i = 0; i < 10; ++i) transpose<<<3 * sms, 256, SHARED_BYTES>>>(from, to, tiles_x, tiles);
    CHECK(cudaEventRecord(events[1]));
    for (int i = 0; i < 10; ++i) CHECK(cudaMemcpyAsync(out, x, 4 * count, cudaMemcpyDeviceToDevice));
    CHECK(cudaEventRecord(events[2]));
    CHECK(cudaMemset(out, 0xff, 4 * count));
    transpose<<<3 * sms, 256, SHARED_BYTES>>>(from, to, tiles_x, tiles);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found, out, 4 * count, cudaMemcpyDeviceToHost));

    size_t wrong = 0;
    for (int row = 0; row < rows; ++row)
        for (int column = 0; column < columns; ++column)
            wrong += found[size_t(column) * rows + row] != host[size_t(row) * columns + column];
    float transpose_ms, copy_ms;
    CHECK(cudaEventElapsedTime(&transpose_ms, events[0], events[1]));
    CHECK(cudaEventElapsedTime(&copy_ms, events[1], events[2]));
    printf("%zu of %zu elements are wrong; the transpose moves %.0f GB/s, cudaMemcpy %.0f GB/s\n", wrong, count,
           80e-6 * count / transpose_ms, 80e-6 * count / copy_ms);
    return wrong != 0;
}
