// What GEMMs of warp groups share: the order of their tiles, the ring between the one that loads and those that
// multiply, their registers, and the product itself.
#pragma once
#include "tma.cuh"

struct Tile {
    int m, n;
};

// `group` rows of tiles sweep the columns together: what runs at one time reads few different tiles, so L2 holds them.
__device__ __forceinline__ Tile tile_at(int index, int tiles_m, int tiles_n, int group) {
    group = min(group, tiles_m);
    const int width = group * tiles_n, first = index / width * group, size = min(tiles_m - first, group);
    return {first + index % width % size, index % width / size};
}

// A place in a ring of SIZE stages.
template <u32 SIZE>
struct Ring {
    u32 stage = 0, parity = 0;  // parity of the phase that this turn waits for
    __device__ __forceinline__ void advance() {
        if (++stage == SIZE) stage = 0, parity ^= 1;
    }
};

// Of a consumer's thread, where `ctas` of one warp group that loads and `consumers` share an SM. All threads start with
// the same share of the registers; then the producer's go to the consumers, in steps of eight.
constexpr int PRODUCER_REGISTERS = 40;
__device__ constexpr int consumer_registers(int consumers, int ctas) {
    const int even = 65536 / ctas / (128 * (1 + consumers)) / 8 * 8, share = even > 248 ? 248 : even;
    const int largest = (share * (consumers + 1) - PRODUCER_REGISTERS) / consumers / 8 * 8;
    return largest > 240 ? 240 : largest;
}

// The product of one warp group: d (64 x N, float32, in registers) += A (64 x 16) B^T (N x 16), bf16 in shared memory.
// PTX ISA, "wgmma.mma_async". The instruction names every register of d, so each width has a line of its own.

// %0 to %7, to %15 and so on; d[0] to d[7], to d[15] and so on.
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define HELD_8 EIGHT(0)
#define HELD_16 HELD_8, EIGHT(8)
#define HELD_24 HELD_16, EIGHT(16)
#define HELD_32 HELD_24, EIGHT(24)
#define HELD_40 HELD_32, EIGHT(32)
#define HELD_48 HELD_40, EIGHT(40)
#define HELD_56 HELD_48, EIGHT(48)
#define HELD_64 HELD_56, EIGHT(56)
#define HELD_72 HELD_64, EIGHT(64)
#define HELD_80 HELD_72, EIGHT(72)
#define HELD_88 HELD_80, EIGHT(80)
#define HELD_96 HELD_88, EIGHT(88)
#define HELD_104 HELD_96, EIGHT(96)
#define HELD_112 HELD_104, EIGHT(104)
#define HELD_120 HELD_112, EIGHT(112)
#define HELD_128 HELD_120, EIGHT(120)

// `a`, `b` and `accumulate` are the operands after the registers; without `accumulate` what d held counts for nothing.
#define PRODUCT(N, REGISTERS, A, B, ACCUMULATE)                                                                  \
    if constexpr (WIDTH == N)                                                                                    \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #ACCUMULATE ", 0;\n"                                 \
                     " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES_##REGISTERS "}, %" #A    \
                     ", %" #B ", p, 1, 1, 0, 0;\n}"                                                              \
                     : HELD_##REGISTERS : "l"(a), "l"(b), "r"(accumulate));

template <int WIDTH>
__device__ __forceinline__ void product(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH % 16 == 0 && WIDTH <= 256, "widths are multiples of 16 up to 256");
    PRODUCT(16, 8, 8, 9, 10)
    PRODUCT(32, 16, 16, 17, 18)
    PRODUCT(48, 24, 24, 25, 26)
    PRODUCT(64, 32, 32, 33, 34)
    PRODUCT(80, 40, 40, 41, 42)
    PRODUCT(96, 48, 48, 49, 50)
    PRODUCT(112, 56, 56, 57, 58)
    PRODUCT(128, 64, 64, 65, 66)
    PRODUCT(144, 72, 72, 73, 74)
    PRODUCT(160, 80, 80, 81, 82)
    PRODUCT(176, 88, 88, 89, 90)
    PRODUCT(192, 96, 96, 97, 98)
    PRODUCT(208, 104, 104, 105, 106)
    PRODUCT(224, 112, 112, 113, 114)
    PRODUCT(240, 120, 120, 121, 122)
    PRODUCT(256, 128, 128, 129, 130)
}
