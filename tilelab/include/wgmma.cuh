// Warp groups that multiply: the order of their tiles, the ring that feeds them, their registers, and wgmma itself.
// Used by ch10/wgmma_gemm and ch14/fp8_gemm. PTX ISA: "wgmma.mma_async", "setmaxnreg".
#pragma once
#include "tma.cuh"

struct Tile {
    int m, n;
};

// Return the row and column, in tiles, of the tile that is computed as number `tile_id`.
// Bands of `group_m` rows of tiles are finished one after the other, each band column by column. CTAs that run at the
// same time then read few different tiles of A and B, so these stay in L2. With group_m = 2:
//
//     0  2  4  6
//     1  3  5  7
//     8 10 12 14
//     9 11 13 15
__device__ __forceinline__ Tile tile_coordinates(int tile_id, int tiles_m, int tiles_n, int group_m) {
    group_m = min(group_m, tiles_m);
    const int band = group_m * tiles_n, first = tile_id / band * group_m, size = min(tiles_m - first, group_m);
    return {first + tile_id % band % size, tile_id % band / size};
}

// The position of a producer or a consumer in a ring of SIZE stages. `phase` is the parity that a wait asks for; it
// flips each time the position passes the end of the ring.
template <u32 SIZE>
struct Ring {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == SIZE) stage = 0, phase ^= 1;
    }
};

// Registers per thread after setmaxnreg, for `ctas` CTAs per SM, each with one producer warp group and `consumers`
// others. All threads start with an equal share of the SM's 65,536 registers. The producer keeps 40, and the consumers
// receive the rest in steps of eight, up to 240.
constexpr int PRODUCER_REGISTERS = 40;
__device__ constexpr int consumer_registers(int consumers, int ctas) {
    const int equal = 65536 / ctas / (128 * (1 + consumers)) / 8 * 8, share = equal > 248 ? 248 : equal;
    const int largest = (share * (consumers + 1) - PRODUCER_REGISTERS) / consumers / 8 * 8;
    return largest > 240 ? 240 : largest;
}

// The compiler does not know that wgmma writes d until wgmma_wait returns. This fence stops it from reading d earlier.
template <int COUNT>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- wgmma: 128 threads compute d (64 x WIDTH, float32) = or += A (64 x K) B^T (WIDTH x K)
//
// d is in registers, A and B are in shared memory, found by their descriptors; `accumulate` 0 ignores the old d. Thread
// t of the warp group (warp w = t / 32, lane l = t % 32) holds, for each group j of eight columns, two pairs:
//
//                     column 8j + 2 (l % 4)   column 8j + 2 (l % 4) + 1
//     row 16w + l / 4        d[4j]                    d[4j + 1]
//     eight rows below       d[4j + 2]                d[4j + 3]
//
// The instruction lists each register of d by name, and inline PTX has no arrays. REGISTERS_r(FIRST, NEXT) lists the
// numbers 0 to r - 1 in groups of four, from which WGMMA makes the names (%0, %1, ...) and the operands (d[0], ...).
// OPERANDS has no parameter called d, because d is the array.

#define REGISTERS_4(FIRST, NEXT) FIRST(0, 1, 2, 3)
#define REGISTERS_8(FIRST, NEXT) REGISTERS_4(FIRST, NEXT) NEXT(4, 5, 6, 7)
#define REGISTERS_12(FIRST, NEXT) REGISTERS_8(FIRST, NEXT) NEXT(8, 9, 10, 11)
#define REGISTERS_16(FIRST, NEXT) REGISTERS_12(FIRST, NEXT) NEXT(12, 13, 14, 15)
#define REGISTERS_20(FIRST, NEXT) REGISTERS_16(FIRST, NEXT) NEXT(16, 17, 18, 19)
#define REGISTERS_24(FIRST, NEXT) REGISTERS_20(FIRST, NEXT) NEXT(20, 21, 22, 23)
#define REGISTERS_28(FIRST, NEXT) REGISTERS_24(FIRST, NEXT) NEXT(24, 25, 26, 27)
#define REGISTERS_32(FIRST, NEXT) REGISTERS_28(FIRST, NEXT) NEXT(28, 29, 30, 31)
#define REGISTERS_36(FIRST, NEXT) REGISTERS_32(FIRST, NEXT) NEXT(32, 33, 34, 35)
#define REGISTERS_40(FIRST, NEXT) REGISTERS_36(FIRST, NEXT) NEXT(36, 37, 38, 39)
#define REGISTERS_44(FIRST, NEXT) REGISTERS_40(FIRST, NEXT) NEXT(40, 41, 42, 43)
#define REGISTERS_48(FIRST, NEXT) REGISTERS_44(FIRST, NEXT) NEXT(44, 45, 46, 47)
#define REGISTERS_52(FIRST, NEXT) REGISTERS_48(FIRST, NEXT) NEXT(48, 49, 50, 51)
#define REGISTERS_56(FIRST, NEXT) REGISTERS_52(FIRST, NEXT) NEXT(52, 53, 54, 55)
#define REGISTERS_60(FIRST, NEXT) REGISTERS_56(FIRST, NEXT) NEXT(56, 57, 58, 59)
#define REGISTERS_64(FIRST, NEXT) REGISTERS_60(FIRST, NEXT) NEXT(60, 61, 62, 63)
#define REGISTERS_68(FIRST, NEXT) REGISTERS_64(FIRST, NEXT) NEXT(64, 65, 66, 67)
#define REGISTERS_72(FIRST, NEXT) REGISTERS_68(FIRST, NEXT) NEXT(68, 69, 70, 71)
#define REGISTERS_76(FIRST, NEXT) REGISTERS_72(FIRST, NEXT) NEXT(72, 73, 74, 75)
#define REGISTERS_80(FIRST, NEXT) REGISTERS_76(FIRST, NEXT) NEXT(76, 77, 78, 79)
#define REGISTERS_84(FIRST, NEXT) REGISTERS_80(FIRST, NEXT) NEXT(80, 81, 82, 83)
#define REGISTERS_88(FIRST, NEXT) REGISTERS_84(FIRST, NEXT) NEXT(84, 85, 86, 87)
#define REGISTERS_92(FIRST, NEXT) REGISTERS_88(FIRST, NEXT) NEXT(88, 89, 90, 91)
#define REGISTERS_96(FIRST, NEXT) REGISTERS_92(FIRST, NEXT) NEXT(92, 93, 94, 95)
#define REGISTERS_100(FIRST, NEXT) REGISTERS_96(FIRST, NEXT) NEXT(96, 97, 98, 99)
#define REGISTERS_104(FIRST, NEXT) REGISTERS_100(FIRST, NEXT) NEXT(100, 101, 102, 103)
#define REGISTERS_108(FIRST, NEXT) REGISTERS_104(FIRST, NEXT) NEXT(104, 105, 106, 107)
#define REGISTERS_112(FIRST, NEXT) REGISTERS_108(FIRST, NEXT) NEXT(108, 109, 110, 111)
#define REGISTERS_116(FIRST, NEXT) REGISTERS_112(FIRST, NEXT) NEXT(112, 113, 114, 115)
#define REGISTERS_120(FIRST, NEXT) REGISTERS_116(FIRST, NEXT) NEXT(116, 117, 118, 119)
#define REGISTERS_124(FIRST, NEXT) REGISTERS_120(FIRST, NEXT) NEXT(120, 121, 122, 123)
#define REGISTERS_128(FIRST, NEXT) REGISTERS_124(FIRST, NEXT) NEXT(124, 125, 126, 127)
#define NAMES(a, b, c, e) "%" #a ", %" #b ", %" #c ", %" #e
#define MORE_NAMES(...) ", " NAMES(__VA_ARGS__)
#define OPERANDS(a, b, c, e) "+f"(d[a]), "+f"(d[b]), "+f"(d[c]), "+f"(d[e])
#define MORE_OPERANDS(...) , OPERANDS(__VA_ARGS__)

// N is the width of d, and R the number of its registers in a thread. A, B and P are the numbers of the operands after
// these registers: R, R + 1 and R + 2. SCALES are the last operands of the instruction: 1, 1 keeps the signs of A and
// B. For bf16, 0, 0 says that neither is transposed, because the rows of both run along K.
#define WGMMA(N, R, A, B, P, TYPES, SCALES)                                                                        \
    if constexpr (WIDTH == N)                                                                                      \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N TYPES \
                     " {" REGISTERS_##R(NAMES, MORE_NAMES) "}, %" #A ", %" #B ", p, " SCALES ";\n}"                \
                     : REGISTERS_##R(OPERANDS, MORE_OPERANDS)                                                      \
                     : "l"(a), "l"(b), "r"(accumulate));

// A and B are bf16, 16 columns of each.
template <int WIDTH>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH % 8 == 0 && WIDTH <= 256, "WIDTH must be a multiple of 8, up to 256");
    WGMMA(8, 4, 4, 5, 6, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(16, 8, 8, 9, 10, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(24, 12, 12, 13, 14, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(32, 16, 16, 17, 18, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(40, 20, 20, 21, 22, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(48, 24, 24, 25, 26, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(56, 28, 28, 29, 30, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(64, 32, 32, 33, 34, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(72, 36, 36, 37, 38, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(80, 40, 40, 41, 42, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(88, 44, 44, 45, 46, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(96, 48, 48, 49, 50, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(104, 52, 52, 53, 54, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(112, 56, 56, 57, 58, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(120, 60, 60, 61, 62, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(128, 64, 64, 65, 66, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(136, 68, 68, 69, 70, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(144, 72, 72, 73, 74, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(152, 76, 76, 77, 78, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(160, 80, 80, 81, 82, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(168, 84, 84, 85, 86, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(176, 88, 88, 89, 90, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(184, 92, 92, 93, 94, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(192, 96, 96, 97, 98, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(200, 100, 100, 101, 102, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(208, 104, 104, 105, 106, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(216, 108, 108, 109, 110, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(224, 112, 112, 113, 114, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(232, 116, 116, 117, 118, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(240, 120, 120, 121, 122, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(248, 124, 124, 125, 126, "k16.f32.bf16.bf16", "1, 1, 0, 0")
    WGMMA(256, 128, 128, 129, 130, "k16.f32.bf16.bf16", "1, 1, 0, 0")
}

// A and B are fp8 e4m3, 32 columns of each.
template <int WIDTH>
__device__ __forceinline__ void wgmma_m64k32_e4m3(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH % 16 == 0 && WIDTH >= 64 && WIDTH <= 160, "WIDTH must be a multiple of 16, from 64 to 160");
    WGMMA(64, 32, 32, 33, 34, "k32.f32.e4m3.e4m3", "1, 1")
    WGMMA(80, 40, 40, 41, 42, "k32.f32.e4m3.e4m3", "1, 1")
    WGMMA(96, 48, 48, 49, 50, "k32.f32.e4m3.e4m3", "1, 1")
    WGMMA(112, 56, 56, 57, 58, "k32.f32.e4m3.e4m3", "1, 1")
    WGMMA(128, 64, 64, 65, 66, "k32.f32.e4m3.e4m3", "1, 1")
    WGMMA(144, 72, 72, 73, 74, "k32.f32.e4m3.e4m3", "1, 1")
    WGMMA(160, 80, 80, 81, 82, "k32.f32.e4m3.e4m3", "1, 1")
}
#undef WGMMA
