// A warp loads one box by tensor map and repeats one read. The profiler counts the wavefronts.
//
//   1. Lane 0 loads the box. The warp waits for it, with a limit of time, so that a wrong count of bytes ends, too.
//   2. Each lane takes its address from `offsets`; a lane without an address does not read. ldmatrix needs them all.
//   3. The warp reads `repeats` times: KIND 0 to 4 reads 1, 2, 4, 8 or 16 bytes per lane, and 5 is ldmatrix, for which
//      lanes 0 to 7 name the rows.
//   4. Each lane writes the first word that it found.
//
// `mask` is zero. The compiler does not know that: the address of each read depends on all words of the read before it,
// so no read can leave the loop or become narrower.
#include "tma.cuh"

extern __shared__ __align__(128) unsigned char memory[];

constexpr u32 NO_LANE = 0xFFFFFFFF, WAIT_NS = 200000000;

__device__ __forceinline__ u64 now_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

template <int KIND>
__device__ __forceinline__ uint4 read_once(u32 address) {
    u32 a = 0, b = 0, c = 0, d = 0;
    unsigned short small;
    if constexpr (KIND == 0) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(a) : "r"(address) : "memory");
    if constexpr (KIND == 1) {
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(small) : "r"(address) : "memory");
        a = small;
    }
    if constexpr (KIND == 2) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a) : "r"(address) : "memory");
    if constexpr (KIND == 3)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
    if constexpr (KIND == 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                     : "r"(address)
                     : "memory");
    if constexpr (KIND == 5)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(a) : "r"(address) : "memory");
    return make_uint4(a, b, c, d);
}

template <int KIND>
__device__ __forceinline__ u32 read_many(u32 address, int repeats, u32 mask) {
    u32 first = 0;
#pragma unroll 1
    for (int i = 0; i < repeats; ++i) {
        const uint4 words = read_once<KIND>(address);
        if (i == 0) first = words.x;
        address ^= (words.x ^ words.y ^ words.z ^ words.w) & mask;
    }
    return first;
}

extern "C" __global__ void __launch_bounds__(32)
    read_box(const __grid_constant__ TensorMap x, const u32* offsets, u32* found, u32* landed, u32 bytes, int kind,
             int repeats, u32 mask) {
    __shared__ __align__(8) u64 full;
    const u32 base = (shared_address(memory) + 1023) / 1024 * 1024, barrier = shared_address(&full);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, bytes);
        tma_load_2d(base, x, 0, 0, barrier);
    }
    __syncwarp();
    u32 done = 0;
    const u64 begin = now_ns();
    do {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier)
            : "memory");
    } while (!done && now_ns() - begin < WAIT_NS);
    __syncwarp();
    const u32 offset = offsets[threadIdx.x];
    u32 word = 0;
    if (kind == 5) {
        word = read_many<5>(base + offset, repeats, mask);  // all lanes take part
    } else if (offset != NO_LANE) {
        const u32 address = base + offset;
        switch (kind) {
            case 0: word = read_many<0>(address, repeats, mask); break;
            case 1: word = read_many<1>(address, repeats, mask); break;
            case 2: word = read_many<2>(address, repeats, mask); break;
            case 3: word = read_many<3>(address, repeats, mask); break;
            case 4: word = read_many<4>(address, repeats, mask); break;
        }
    }
    found[threadIdx.x] = word;
    landed[threadIdx.x] = done;
}
