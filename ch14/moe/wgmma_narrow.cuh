// wgmma in fp8 for fewer than 64 columns; wgmma.cuh has the others, and says what the operands are.
#pragma once
#include "wgmma.cuh"

#define NARROW_NAMES_4 "%0, %1, %2, %3"
#define NARROW_NAMES_8 NARROW_NAMES_4 ", %4, %5, %6, %7"
#define NARROW_NAMES_16 NARROW_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NARROW_NAMES_24 NARROW_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FOUR_SUMS(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define NARROW_SUMS_4 FOUR_SUMS(0)
#define NARROW_SUMS_8 NARROW_SUMS_4, FOUR_SUMS(4)
#define NARROW_SUMS_16 NARROW_SUMS_8, FOUR_SUMS(8), FOUR_SUMS(12)
#define NARROW_SUMS_24 NARROW_SUMS_16, FOUR_SUMS(16), FOUR_SUMS(20)
#define NARROW_WGMMA(N, R, A, B, P)                                                                      \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                 "k32.f32.e4m3.e4m3 {" NARROW_NAMES_##R "}, %" #A ", %" #B ", p, 1, 1;\n}"               \
                 : NARROW_SUMS_##R                                                                       \
                 : "l"(a), "l"(b), "r"(accumulate))

// A (64 x 32) and B (WIDTH x 32) are fp8 e4m3.
template <int WIDTH>
__device__ __forceinline__ void wgmma_any_e4m3(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH >= 64 || WIDTH == 8 || WIDTH % 16 == 0, "WIDTH must be 8, or a multiple of 16");
    if constexpr (WIDTH >= 64) wgmma_m64k32_e4m3<WIDTH>(d, a, b, accumulate);
    else if constexpr (WIDTH == 8) NARROW_WGMMA(8, 4, 4, 5, 6);
    else if constexpr (WIDTH == 16) NARROW_WGMMA(16, 8, 8, 9, 10);
    else if constexpr (WIDTH == 32) NARROW_WGMMA(32, 16, 16, 17, 18);
    else NARROW_WGMMA(48, 24, 24, 25, 26);
}
