// Elements of 2 and 4 bytes, and packs of them that a thread moves in one instruction. Includes no other header.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};

// The type of BYTES bytes that a thread moves in one instruction.
template <int BYTES>
struct Word;
template <>
struct Word<1> {
    typedef unsigned char type;
};
template <>
struct Word<2> {
    typedef unsigned short type;
};
template <>
struct Word<4> {
    typedef u32 type;
};
template <>
struct Word<8> {
    typedef uint2 type;
};
template <>
struct Word<16> {
    typedef uint4 type;
};

__device__ __forceinline__ float low_half(u32 word, bf16) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(u32 word, bf16) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ float low_half(u32 word, f16) {
    float value;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(word));
    return value;
}
__device__ __forceinline__ float high_half(u32 word, f16) {
    float value;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(value) : "r"(word));
    return value;
}
// Round to nearest even and pack; `low` takes the low 16 bits.
__device__ __forceinline__ u32 pack_halves(float low, float high, bf16) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
__device__ __forceinline__ u32 pack_halves(float low, float high, f16) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// BYTES of elements of type T in registers, loaded and stored with one instruction.
template <typename T, int BYTES>
struct Pack {
    static constexpr int COUNT = BYTES / sizeof(T);
    typedef typename Word<BYTES>::type word_t;
    union {
        word_t whole;
        u32 word[BYTES < 4 ? 1 : BYTES / 4];
    };

    __device__ __forceinline__ float operator[](int index) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(word[index]);
        else return index % 2 ? high_half(word[index / 2], T{}) : low_half(word[index / 2], T{});
    }
    // Set elements index and index + 1. Elements of 4 bytes and packs of one element take only the first.
    __device__ __forceinline__ void set(int index, float first, float second) {
        if constexpr (sizeof(T) == 4) word[index] = __float_as_uint(first);
        else word[index / 2] = pack_halves(first, second, T{});
    }
};

template <typename T, int BYTES>
__device__ __forceinline__ Pack<T, BYTES> load(const void* address) {
    Pack<T, BYTES> pack;
    if constexpr (BYTES < 4) pack.word[0] = 0;
    pack.whole = __ldg(static_cast<const typename Word<BYTES>::type*>(address));
    return pack;
}

template <typename T, int BYTES>
__device__ __forceinline__ Pack<T, BYTES> load_shared(const void* address) {
    Pack<T, BYTES> pack;
    if constexpr (BYTES < 4) pack.word[0] = 0;
    pack.whole = *static_cast<const typename Word<BYTES>::type*>(address);
    return pack;
}

template <typename T, int BYTES>
__device__ __forceinline__ void store(void* address, const Pack<T, BYTES>& pack) {
    *static_cast<typename Word<BYTES>::type*>(address) = pack.whole;
}
