// The wrappers of tilelab/include/wgmma.cuh, carried out by the emulator.
#pragma once
#include "tma.cuh"
#include "plain_wgmma.cuh"

template <int COUNT>
void warpgroup_fence_operand(float (&d)[COUNT]) {}

template <int WIDTH>
void wgmma_m64k16(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH % 8 == 0 && WIDTH <= 256, "WIDTH must be a multiple of 8, up to 256");
    emulator::multiply(emulator::BF16, d, WIDTH, a, b, accumulate);
}
template <int WIDTH>
void wgmma_m64k32_e4m3(float (&d)[WIDTH / 2], u64 a, u64 b, u32 accumulate) {
    static_assert(WIDTH % 16 == 0 && WIDTH >= 64 && WIDTH <= 160, "WIDTH must be a multiple of 16, from 64 to 160");
    emulator::multiply(emulator::E4M3, d, WIDTH, a, b, accumulate);
}
