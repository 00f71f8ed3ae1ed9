// The functions that the kernels of `notebooks/05_ch10_wgmma_gemm.ipynb` share. They make the barriers of a ring, multiply one
// stage, and store the sums: in C from registers, or in a box of shared memory. Include "wgmma.cuh" first.
#pragma once

// All threads call this. Thread 0 makes RING_SIZE barriers from `full` on, for one arrival and the bytes that it announces,
// and as many from `empty` on, for the arrivals of `warps` warps.
template <u32 RING_SIZE>
__device__ __forceinline__ void make_barriers(u32 full, u32 empty, u32 warps) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < RING_SIZE; ++stage) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, warps);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
}

// d (64 x WIDTH) = or += A B^T for one stage: 64 columns of A and of B, in rows of 128 swizzled bytes. Fence before it,
// commit after it.
template <int WIDTH>
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], u32 a, u32 b, bool accumulate) {
#pragma unroll
    for (int k = 0; k < 4; ++k)  // 16 columns are 32 bytes
        wgmma_m64k16<WIDTH>(d, wgmma_descriptor(a + 32 * k), wgmma_descriptor(b + 32 * k), accumulate || k > 0);
}

// Store d (64 x WIDTH) at (row, column) of C (M x N, bf16) from registers, two columns per store.
template <int WIDTH>
__device__ __forceinline__ void store_sums(u32* c, const float (&d)[WIDTH / 2], int row, int column, int M, int N) {
    row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    column += threadIdx.x % 4 * 2;
    u32* place = c + (u64(row) * N + column) / 2;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j)
#pragma unroll
        for (int below = 0; below < 2; ++below) {  // d[4j] and d[4j + 1], then those eight rows below
            const u32 pair = pack_bf16x2(d[4 * j + 2 * below], d[4 * j + 2 * below + 1]);
            if (row + 8 * below < M && column + 8 * j < N) place[4 * N * below + 4 * j] = pair;
        }
}

// Write 64 columns of the sums, from d on, to a box of 64 rows of 128 swizzled bytes. One stmatrix stores 16 x 16
// elements of a warp: lane l passes the address of row l % 16, unit l / 16 of 16 bytes.
__device__ __forceinline__ void stage_sums(u32 box, const float* d) {
    const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16, unit = threadIdx.x % 32 / 16;
#pragma unroll
    for (int j = 0; j < 4; ++j, d += 8)
        stmatrix_x4(box + swizzle_offset(row * 128 + (2 * j + unit) * 16, 128), pack_bf16x2(d[0], d[1]),
                    pack_bf16x2(d[2], d[3]), pack_bf16x2(d[4], d[5]), pack_bf16x2(d[6], d[7]));
}
