// wgmma in fp8 for widths that wgmma.cuh lacks: fewer than 64 columns, and 192. It says what the operands are.
#pragma once
#include "wgmma.cuh"

#define NAMES_OF_4 "%0, %1, %2, %3"
#define NAMES_OF_8 NAMES_OF_4 ", %4, %5, %6, %7"
#define NAMES_OF_16 NAMES_OF_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_OF_24 NAMES_OF_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define EIGHT_NAMES(A, B, C, D, E, F, G, H) ", %" #A ", %" #B ", %" #C ", %" #D ", %" #E ", %" #F ", %" #G ", %" #H
#define NAMES_OF_96                                                                                     \
    NAMES_OF_24 EIGHT_NAMES(24, 25, 26, 27, 28, 29, 30, 31) EIGHT_NAMES(32, 33, 34, 35, 36, 37, 38, 39) \
        EIGHT_NAMES(40, 41, 42, 43, 44, 45, 46, 47) EIGHT_NAMES(48, 49, 50, 51, 52, 53, 54, 55)         \
            EIGHT_NAMES(56, 57, 58, 59, 60, 61, 62, 63) EIGHT_NAMES(64, 65, 66, 67, 68, 69, 70, 71)     \
                EIGHT_NAMES(72, 73, 74, 75, 76, 77, 78, 79) EIGHT_NAMES(80, 81, 82, 83, 84, 85, 86, 87) \
                    EIGHT_NAMES(88, 89, 90, 91, 92, 93, 94, 95)
#define SUMS_OF_4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define SUMS_OF_8(I) SUMS_OF_4(I), SUMS_OF_4(I + 4)
#define SUMS_OF_16(I) SUMS_OF_8(I), SUMS_OF_8(I + 8)
#define SUMS_OF_24(I) SUMS_OF_16(I), SUMS_OF_8(I + 16)
#define SUMS_OF_96(I) SUMS_OF_24(I), SUMS_OF_24(I + 24), SUMS_OF_24(I + 48), SUMS_OF_24(I + 72)
#define WGMMA_OF(N, R, A, B, P)                                                                          \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N \
                 "k32.f32.e4m3.e4m3 {" NAMES_OF_##R "}, %" #A ", %" #B ", p, 1, 1;\n}"                   \
                 : SUMS_OF_##R(0)                                                                        \
                 : "l"(a), "l"(b), "r"(accumulate))

// A (64 x 32) and B (WIDTH x 32) are fp8 e4m3.
template <int WIDTH>
__device__ __forceinline__ void wgmma_any_e4m3(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH == 8 || WIDTH % 16 == 0, "WIDTH must be 8, or a multiple of 16");
    if constexpr (WIDTH == 8) WGMMA_OF(8, 4, 4, 5, 6);
    else if constexpr (WIDTH == 16) WGMMA_OF(16, 8, 8, 9, 10);
    else if constexpr (WIDTH == 32) WGMMA_OF(32, 16, 16, 17, 18);
    else if constexpr (WIDTH == 48) WGMMA_OF(48, 24, 24, 25, 26);
    else if constexpr (WIDTH == 192) WGMMA_OF(192, 96, 96, 97, 98);
    else wgmma_m64k32_e4m3<WIDTH>(d, a, b, accumulate);
}
