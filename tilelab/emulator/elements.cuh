// The functions of tilelab/include/elements.cuh, for the emulator.
#pragma once
#include "emulator.h"
#include "plain_elements.cuh"

inline float low_half(u32 word, bf16) { return __uint_as_float(word << 16); }
inline float high_half(u32 word, bf16) { return __uint_as_float(word & 0xffff0000u); }
inline float low_half(u32 word, f16) { return emulator::f16_value(word & 0xffff); }
inline float high_half(u32 word, f16) { return emulator::f16_value(word >> 16); }
inline u32 pack_halves(float low, float high, bf16) {
    return emulator::bf16_bits(low) | emulator::bf16_bits(high) << 16;
}
inline u32 pack_halves(float low, float high, f16) { return emulator::f16_bits(low) | emulator::f16_bits(high) << 16; }
