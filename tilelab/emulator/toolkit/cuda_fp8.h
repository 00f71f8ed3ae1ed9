// Numbers of eight bits, for the emulator.
#pragma once
#include "cuda_bf16.h"
#include "cuda_fp16.h"

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
typedef unsigned int __nv_fp8x4_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace emulator {

inline __nv_fp8_storage_t fp8_bits(double value, __nv_saturation_t saturation, __nv_fp8_interpretation_t kind) {
    const u8 sign = signbit(value) ? 0x80 : 0;
    if (value != value) return 0x7f;
    if (kind == __NV_E5M2) {
        const u32 bits = encode<5, 2>(value);
        return u8((bits & 0x7f) == 0x7c && saturation == __NV_SATFINITE ? sign | 0x7b : bits);
    }
    // E4M3 has no infinity: it uses the largest exponent for numbers up to 448.
    u32 magnitude = 0x7f;
    if (fabs(value) <= 464) {
        int exponent;
        frexp(value, &exponent);
        exponent = max(exponent - 1, -6);
        magnitude = u32(nearbyint(ldexp(fabs(value), 3 - exponent)));
        if (magnitude >> 3) magnitude += u32(exponent + 6) << 3;
    }
    if (magnitude >= 0x7f) magnitude = saturation == __NV_SATFINITE ? 0x7e : 0x7f;
    return u8(sign | magnitude);
}
inline float fp8_value(u32 bits, __nv_fp8_interpretation_t kind) {
    if (kind == __NV_E5M2) return decode<5, 2>(bits);
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 127) == 127) return NAN;
    return (bits >> 7 & 1 ? -1 : 1) *
           (exponent ? ldexpf(float(8 + fraction), exponent - 10) : ldexpf(float(fraction), -9));
}

}  // namespace emulator

inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float x, __nv_saturation_t s, __nv_fp8_interpretation_t k) {
    return emulator::fp8_bits(x, s, k);
}
inline __nv_fp8_storage_t __nv_cvt_double_to_fp8(double x, __nv_saturation_t s, __nv_fp8_interpretation_t k) {
    return emulator::fp8_bits(x, s, k);
}
inline __nv_fp8_storage_t __nv_cvt_halfraw_to_fp8(__half_raw x, __nv_saturation_t s, __nv_fp8_interpretation_t k) {
    return emulator::fp8_bits(__half(x), s, k);
}
inline __nv_fp8_storage_t __nv_cvt_bfloat16raw_to_fp8(__nv_bfloat16_raw x, __nv_saturation_t s,
                                                      __nv_fp8_interpretation_t k) {
    return emulator::fp8_bits(__nv_bfloat16(x), s, k);
}
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t s, __nv_fp8_interpretation_t k) {
    return __nv_fp8x2_storage_t(emulator::fp8_bits(x.x, s, k) | emulator::fp8_bits(x.y, s, k) << 8);
}
inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t k) {
    return __half(emulator::fp8_value(x, k));
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t k) {
    return __half2(__half(emulator::fp8_value(x & 0xff, k)), __half(emulator::fp8_value(x >> 8, k)));
}

#define FP8_TYPES(NAME, KIND)                                                                                    \
    struct __nv_fp8_##NAME {                                                                                     \
        __nv_fp8_storage_t __x;                                                                                  \
        __nv_fp8_##NAME() = default;                                                                             \
        explicit __nv_fp8_##NAME(float value) : __x(emulator::fp8_bits(value, __NV_SATFINITE, KIND)) {}          \
        explicit __nv_fp8_##NAME(double value) : __x(emulator::fp8_bits(value, __NV_SATFINITE, KIND)) {}         \
        explicit __nv_fp8_##NAME(int value) : __nv_fp8_##NAME(double(value)) {}                                  \
        explicit __nv_fp8_##NAME(__half value) : __nv_fp8_##NAME(float(value)) {}                                \
        explicit __nv_fp8_##NAME(__nv_bfloat16 value) : __nv_fp8_##NAME(float(value)) {}                         \
        explicit operator float() const { return emulator::fp8_value(__x, KIND); }                               \
        explicit operator double() const { return emulator::fp8_value(__x, KIND); }                              \
        explicit operator __half() const { return emulator::fp8_value(__x, KIND); }                              \
        explicit operator __nv_bfloat16() const { return emulator::fp8_value(__x, KIND); }                       \
        explicit operator int() const { return int(emulator::fp8_value(__x, KIND)); }                            \
        explicit operator bool() const { return __x & 0x7f; }                                                    \
    };                                                                                                           \
    struct __nv_fp8x2_##NAME {                                                                                   \
        __nv_fp8x2_storage_t __x;                                                                                \
        __nv_fp8x2_##NAME() = default;                                                                           \
        explicit __nv_fp8x2_##NAME(float2 value) : __x(__nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, KIND)) {} \
        explicit operator float2() const {                                                                       \
            return {emulator::fp8_value(__x & 0xff, KIND), emulator::fp8_value(__x >> 8, KIND)};                 \
        }                                                                                                        \
        explicit operator __half2() const { return __nv_cvt_fp8x2_to_halfraw2(__x, KIND); }                      \
    };                                                                                                           \
    struct __nv_fp8x4_##NAME {                                                                                   \
        __nv_fp8x4_storage_t __x;                                                                                \
        __nv_fp8x4_##NAME() = default;                                                                           \
        explicit __nv_fp8x4_##NAME(float4 v)                                                                     \
            : __x(u32(__nv_cvt_float2_to_fp8x2({v.x, v.y}, __NV_SATFINITE, KIND)) |                              \
                  u32(__nv_cvt_float2_to_fp8x2({v.z, v.w}, __NV_SATFINITE, KIND)) << 16) {}                      \
        explicit operator float4() const {                                                                       \
            return {emulator::fp8_value(__x & 0xff, KIND), emulator::fp8_value(__x >> 8 & 0xff, KIND),           \
                    emulator::fp8_value(__x >> 16 & 0xff, KIND), emulator::fp8_value(__x >> 24, KIND)};          \
        }                                                                                                        \
    };
FP8_TYPES(e4m3, __NV_E4M3)
FP8_TYPES(e5m2, __NV_E5M2)
#undef FP8_TYPES
