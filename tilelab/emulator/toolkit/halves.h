// What cuda_fp16.h and cuda_bf16.h have in common: small floating-point numbers, their rounding, and their functions.
#pragma once

namespace emulator {

enum Rounding { NEAREST, TO_ZERO, UPWARD, DOWNWARD };

// Return the bits of a number rounded to 1 + EXPONENT + MANTISSA bits; infinity where it is too large.
template <int EXPONENT, int MANTISSA>
inline u32 encode(double value, Rounding mode = NEAREST) {
    constexpr u32 INFINITE = ((1u << EXPONENT) - 1) << MANTISSA;
    constexpr int LEAST = 2 - (1 << (EXPONENT - 1));  // exponent of the smallest normal number
    const bool negative = signbit(value);
    const u32 sign = u32(negative) << (EXPONENT + MANTISSA);
    if (value != value) return INFINITE | ((1u << MANTISSA) - 1);
    value = fabs(value);
    if (value == HUGE_VAL) return sign | INFINITE;
    int exponent;
    frexp(value, &exponent);
    exponent = max(exponent - 1, LEAST);
    double units = ldexp(value, MANTISSA - exponent);
    const bool up = mode == (negative ? DOWNWARD : UPWARD);
    units = mode == NEAREST ? nearbyint(units) : up ? ceil(units) : floor(units);
    u32 bits = u32(units);
    if (bits >> MANTISSA) bits += u32(exponent - LEAST) << MANTISSA;  // the leading one adds 1 to the exponent
    if (bits >= INFINITE) bits = mode == NEAREST || up ? INFINITE : INFINITE - 1;
    return sign | bits;
}

template <int EXPONENT, int MANTISSA>
inline float decode(u32 bits) {
    constexpr int LEAST = 2 - (1 << (EXPONENT - 1));
    const int exponent = bits >> MANTISSA & ((1 << EXPONENT) - 1), fraction = bits & ((1 << MANTISSA) - 1);
    const float sign = bits >> (EXPONENT + MANTISSA) & 1 ? -1.0f : 1.0f;
    if (exponent == (1 << EXPONENT) - 1) return fraction ? NAN : sign * HUGE_VALF;
    if (!exponent) return sign * ldexpf(float(fraction), LEAST - MANTISSA);
    return sign * ldexpf(float((1 << MANTISSA) + fraction), exponent - 1 + LEAST - MANTISSA);
}

struct HalfBits {
    static u32 bits(float value) {
        u32 word = __float_as_uint(value);
        const u32 sign = word >> 16 & 0x8000;
        word &= 0x7fffffff;
        if (word > 0x7f800000) return 0x7fff;
        if (word >= 0x47800000) return sign | 0x7c00;
        if (word < 0x38800000) return sign | (__float_as_uint(__uint_as_float(word) + 0.5f) - 0x3f000000);
        return sign | ((word + 0xc8000fff + (word >> 13 & 1)) >> 13);
    }
    static u32 bits(double value, Rounding mode = NEAREST) { return encode<5, 10>(value, mode); }
    static float value(u32 bits) {
        const u32 sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31;
        if (exponent == 0) return __uint_as_float(sign | __float_as_uint(float(bits & 1023) * 0x1p-24f));
        return __uint_as_float(sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | (bits & 1023) << 13);
    }
};
struct BF16Bits {
    static u32 bits(float value) {
        const u32 word = __float_as_uint(value);
        return value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
    }
    static u32 bits(double value, Rounding mode = NEAREST) { return encode<8, 7>(value, mode); }
    static float value(u32 bits) { return __uint_as_float(bits << 16); }
};

}  // namespace emulator

// The types H (one number), H2 (two), and RAW, whose bits FORMAT rounds.
#define HALF_TYPES(H, H2, RAW, RAW2, FORMAT)                                                                    \
    struct __align__(2) RAW {                                                                                   \
        unsigned short x;                                                                                       \
    };                                                                                                          \
    struct __align__(4) RAW2 {                                                                                  \
        unsigned short x, y;                                                                                    \
    };                                                                                                          \
    struct __align__(2) H {                                                                                     \
        unsigned short __x;                                                                                     \
        H() = default;                                                                                          \
        constexpr H(const RAW& raw) : __x(raw.x) {}                                                             \
        H(float value) : __x(FORMAT::bits(value)) {}                                                            \
        H(double value) : __x(FORMAT::bits(value)) {}                                                           \
        H(short value) : H(float(value)) {}                                                                     \
        H(unsigned short value) : H(float(value)) {}                                                            \
        H(int value) : H(double(value)) {}                                                                      \
        H(unsigned value) : H(double(value)) {}                                                                 \
        H(long value) : H(double(value)) {}                                                                     \
        H(unsigned long value) : H(double(value)) {}                                                            \
        H(long long value) : H(double(value)) {}                                                                \
        H(unsigned long long value) : H(double(value)) {}                                                       \
        operator float() const { return FORMAT::value(__x); }                                                   \
        operator RAW() const { return RAW{__x}; }                                                               \
        explicit operator bool() const { return __x & 0x7fff; }                                                 \
        explicit operator char() const { return emulator::to_integer<char>(float(*this)); }                     \
        explicit operator signed char() const { return emulator::to_integer<signed char>(float(*this)); }       \
        explicit operator unsigned char() const { return emulator::to_integer<u8>(float(*this)); }              \
        explicit operator short() const { return emulator::to_integer<short>(float(*this)); }                   \
        explicit operator unsigned short() const { return emulator::to_integer<unsigned short>(float(*this)); } \
        explicit operator int() const { return emulator::to_integer<int>(float(*this)); }                       \
        explicit operator unsigned() const { return emulator::to_integer<unsigned>(float(*this)); }             \
        explicit operator long() const { return emulator::to_integer<long>(float(*this)); }                     \
        explicit operator unsigned long() const { return emulator::to_integer<unsigned long>(float(*this)); }   \
        explicit operator long long() const { return emulator::to_integer<long long>(float(*this)); }           \
        explicit operator unsigned long long() const { return emulator::to_integer<u64>(float(*this)); }        \
    };                                                                                                          \
    struct __align__(4) H2 {                                                                                    \
        H x, y;                                                                                                 \
        H2() = default;                                                                                         \
        H2(const H& x, const H& y) : x(x), y(y) {}                                                              \
        H2(const RAW2& raw) : x(RAW{raw.x}), y(RAW{raw.y}) {}                                                   \
        operator RAW2() const { return RAW2{x.__x, y.__x}; }                                                    \
    };                                                                                                          \
    HALF_OPERATORS(H, H2)                                                                                       \
    HALF_FUNCTIONS(H, H2, FORMAT)

#define HALF_OPERATOR(H, H2, OP)                                                           \
    inline H operator OP(const H& a, const H& b) { return H(float(a) OP float(b)); }       \
    inline H& operator OP## = (H & a, const H& b) { return a = a OP b; }                   \
    inline H2 operator OP(const H2& a, const H2& b) { return H2(a.x OP b.x, a.y OP b.y); } \
    inline H2& operator OP## = (H2 & a, const H2& b) { return a = a OP b; }
#define HALF_COMPARISON(H, H2, OP)                                                   \
    inline bool operator OP(const H& a, const H& b) { return float(a) OP float(b); } \
    inline bool operator OP(const H2& a, const H2& b) { return a.x OP b.x && a.y OP b.y; }
#define HALF_OPERATORS(H, H2)                                                     \
    HALF_OPERATOR(H, H2, +)                                                       \
    HALF_OPERATOR(H, H2, -)                                                       \
    HALF_OPERATOR(H, H2, *)                                                       \
    HALF_OPERATOR(H, H2, /)                                                       \
    HALF_COMPARISON(H, H2, ==)                                                    \
    HALF_COMPARISON(H, H2, !=)                                                    \
    HALF_COMPARISON(H, H2, <)                                                     \
    HALF_COMPARISON(H, H2, <=)                                                    \
    HALF_COMPARISON(H, H2, >)                                                     \
    HALF_COMPARISON(H, H2, >=)                                                    \
    inline H operator+(const H& a) { return a; }                                  \
    inline H operator-(const H& a) { return H(-float(a)); }                       \
    inline H2 operator+(const H2& a) { return a; }                                \
    inline H2 operator-(const H2& a) { return H2(-a.x, -a.y); }                   \
    inline H& operator++(H& a) { return a = a + H(1.0f); }                        \
    inline H& operator--(H& a) { return a = a - H(1.0f); }                        \
    inline H operator++(H& a, int) {                                              \
        const H before = a;                                                       \
        ++a;                                                                      \
        return before;                                                            \
    }                                                                             \
    inline H operator--(H& a, int) {                                              \
        const H before = a;                                                       \
        --a;                                                                      \
        return before;                                                            \
    }                                                                             \
    inline H2& operator++(H2& a) { return a = H2(a.x + H(1.0f), a.y + H(1.0f)); } \
    inline H2& operator--(H2& a) { return a = H2(a.x - H(1.0f), a.y - H(1.0f)); }

// A function of one, two or three numbers, and the same for pairs.
#define HALF_1(H, H2, NAME, NAME2, EXPRESSION)         \
    inline H NAME(const H a) { return H(EXPRESSION); } \
    inline H2 NAME2(const H2 a) { return H2(NAME(a.x), NAME(a.y)); }
#define HALF_2(H, H2, NAME, NAME2, EXPRESSION)                    \
    inline H NAME(const H a, const H b) { return H(EXPRESSION); } \
    inline H2 NAME2(const H2 a, const H2 b) { return H2(NAME(a.x, b.x), NAME(a.y, b.y)); }
#define HALF_3(H, H2, NAME, NAME2, EXPRESSION)                               \
    inline H NAME(const H a, const H b, const H c) { return H(EXPRESSION); } \
    inline H2 NAME2(const H2 a, const H2 b, const H2 c) { return H2(NAME(a.x, b.x, c.x), NAME(a.y, b.y, c.y)); }
#define HALF_TEST(H, H2, NAME, EXPRESSION)                                                                          \
    inline bool __h##NAME(const H a, const H b) { return EXPRESSION; }                                              \
    inline bool __h##NAME##u(const H a, const H b) { return (EXPRESSION) || a != a || b != b; }                     \
    inline H2 __h##NAME##2(const H2 a, const H2 b) {                                                                \
        return H2(float(__h##NAME(a.x, b.x)), float(__h##NAME(a.y, b.y)));                                          \
    }                                                                                                               \
    inline H2 __h##NAME##u2(const H2 a, const H2 b) {                                                               \
        return H2(float(__h##NAME##u(a.x, b.x)), float(__h##NAME##u(a.y, b.y)));                                    \
    }                                                                                                               \
    inline bool __hb##NAME##2(const H2 a, const H2 b) { return __h##NAME(a.x, b.x) && __h##NAME(a.y, b.y); }        \
    inline bool __hb##NAME##u2(const H2 a, const H2 b) { return __h##NAME##u(a.x, b.x) && __h##NAME##u(a.y, b.y); } \
    inline unsigned __h##NAME##2_mask(const H2 a, const H2 b) {                                                     \
        return (__h##NAME(a.x, b.x) ? 0xffffu : 0) | (__h##NAME(a.y, b.y) ? 0xffff0000u : 0);                       \
    }
#define HALF_FUNCTIONS(H, H2, FORMAT)                                                              \
    HALF_2(H, H2, __hadd, __hadd2, float(a) + float(b))                                            \
    HALF_2(H, H2, __hsub, __hsub2, float(a) - float(b))                                            \
    HALF_2(H, H2, __hmul, __hmul2, float(a) * float(b))                                            \
    HALF_2(H, H2, __hdiv, __h2div, float(a) / float(b))                                            \
    HALF_2(H, H2, __hadd_rn, __hadd2_rn, float(a) + float(b))                                      \
    HALF_2(H, H2, __hsub_rn, __hsub2_rn, float(a) - float(b))                                      \
    HALF_2(H, H2, __hmul_rn, __hmul2_rn, float(a) * float(b))                                      \
    HALF_2(H, H2, __hadd_sat, __hadd2_sat, __saturatef(float(a) + float(b)))                       \
    HALF_2(H, H2, __hsub_sat, __hsub2_sat, __saturatef(float(a) - float(b)))                       \
    HALF_2(H, H2, __hmul_sat, __hmul2_sat, __saturatef(float(a) * float(b)))                       \
    HALF_3(H, H2, __hfma, __hfma2, double(float(a)) * float(b) + float(c))                         \
    HALF_3(H, H2, __hfma_sat, __hfma2_sat, __saturatef(H(double(float(a)) * float(b) + float(c)))) \
    HALF_3(H, H2, __hfma_relu, __hfma2_relu, fmax(double(float(a)) * float(b) + float(c), 0.0))    \
    HALF_2(H, H2, __hmax, __hmax2, fmaxf(a, b))                                                    \
    HALF_2(H, H2, __hmin, __hmin2, fminf(a, b))                                                    \
    HALF_2(H, H2, __hmax_nan, __hmax2_nan, a != a || b != b ? NAN : fmaxf(a, b))                   \
    HALF_2(H, H2, __hmin_nan, __hmin2_nan, a != a || b != b ? NAN : fminf(a, b))                   \
    HALF_1(H, H2, __hneg, __hneg2, -float(a))                                                      \
    HALF_1(H, H2, __habs, __habs2, fabsf(a))                                                       \
    HALF_1(H, H2, hsqrt, h2sqrt, sqrtf(a))                                                         \
    HALF_1(H, H2, hrsqrt, h2rsqrt, 1 / sqrt(double(float(a))))                                     \
    HALF_1(H, H2, hrcp, h2rcp, 1 / float(a))                                                       \
    HALF_1(H, H2, hexp, h2exp, expf(a))                                                            \
    HALF_1(H, H2, hexp2, h2exp2, exp2f(a))                                                         \
    HALF_1(H, H2, hexp10, h2exp10, powf(10, a))                                                    \
    HALF_1(H, H2, hlog, h2log, logf(a))                                                            \
    HALF_1(H, H2, hlog2, h2log2, log2f(a))                                                         \
    HALF_1(H, H2, hlog10, h2log10, log10f(a))                                                      \
    HALF_1(H, H2, hsin, h2sin, sinf(a))                                                            \
    HALF_1(H, H2, hcos, h2cos, cosf(a))                                                            \
    HALF_1(H, H2, htanh, h2tanh, tanhf(a))                                                         \
    HALF_1(H, H2, htanh_approx, h2tanh_approx, tanhf(a))                                           \
    HALF_1(H, H2, hfloor, h2floor, floorf(a))                                                      \
    HALF_1(H, H2, hceil, h2ceil, ceilf(a))                                                         \
    HALF_1(H, H2, htrunc, h2trunc, truncf(a))                                                      \
    HALF_1(H, H2, hrint, h2rint, rintf(a))                                                         \
    HALF_TEST(H, H2, eq, float(a) == float(b))                                                     \
    HALF_TEST(H, H2, lt, float(a) < float(b))                                                      \
    HALF_TEST(H, H2, le, float(a) <= float(b))                                                     \
    HALF_TEST(H, H2, gt, float(a) > float(b))                                                      \
    HALF_TEST(H, H2, ge, float(a) >= float(b))                                                     \
    HALF_TEST(H, H2, ne, (float(a) < float(b) || float(a) > float(b)))                             \
    inline bool __hisnan(const H a) { return float(a) != float(a); }                               \
    inline int __hisinf(const H a) { return isinf(float(a)) ? float(a) < 0 ? -1 : 1 : 0; }         \
    inline H2 __hisnan2(const H2 a) { return H2(float(__hisnan(a.x)), float(__hisnan(a.y))); }     \
    inline float __low2float(const H2 a) { return a.x; }                                           \
    inline float __high2float(const H2 a) { return a.y; }

// Conversions, whose names hold the type's: NAME is half or bfloat16, NAME2 the pair's.
#define HALF_TO_AND_FROM(H, NAME, T, WORD, MODE, ROUNDING, FORMAT)    \
    inline H __##WORD##2##NAME##MODE(T value) {                       \
        H result;                                                     \
        result.__x = FORMAT::bits(double(value), emulator::ROUNDING); \
        return result;                                                \
    }
#define HALF_INTEGER(H, NAME, T, WORD, FORMAT)                                                  \
    HALF_TO_AND_FROM(H, NAME, T, WORD, _rn, NEAREST, FORMAT)                                    \
    HALF_TO_AND_FROM(H, NAME, T, WORD, _rz, TO_ZERO, FORMAT)                                    \
    HALF_TO_AND_FROM(H, NAME, T, WORD, _ru, UPWARD, FORMAT)                                     \
    HALF_TO_AND_FROM(H, NAME, T, WORD, _rd, DOWNWARD, FORMAT)                                   \
    inline T __##NAME##2##WORD##_rn(H value) { return emulator::to_integer<T>(rintf(value)); }  \
    inline T __##NAME##2##WORD##_rz(H value) { return emulator::to_integer<T>(truncf(value)); } \
    inline T __##NAME##2##WORD##_ru(H value) { return emulator::to_integer<T>(ceilf(value)); }  \
    inline T __##NAME##2##WORD##_rd(H value) { return emulator::to_integer<T>(floorf(value)); }
#define HALF_CONVERSIONS(H, H2, RAW, NAME, NAME2, FORMAT)                            \
    HALF_TO_AND_FROM(H, NAME, float, float, _rn, NEAREST, FORMAT)                    \
    HALF_TO_AND_FROM(H, NAME, float, float, _rz, TO_ZERO, FORMAT)                    \
    HALF_TO_AND_FROM(H, NAME, float, float, _ru, UPWARD, FORMAT)                     \
    HALF_TO_AND_FROM(H, NAME, float, float, _rd, DOWNWARD, FORMAT)                   \
    HALF_INTEGER(H, NAME, int, int, FORMAT)                                          \
    HALF_INTEGER(H, NAME, unsigned, uint, FORMAT)                                    \
    HALF_INTEGER(H, NAME, short, short, FORMAT)                                      \
    HALF_INTEGER(H, NAME, unsigned short, ushort, FORMAT)                            \
    HALF_INTEGER(H, NAME, long long, ll, FORMAT)                                     \
    HALF_INTEGER(H, NAME, unsigned long long, ull, FORMAT)                           \
    inline H __float2##NAME(float value) { return H(value); }                        \
    inline H __double2##NAME(double value) { return H(value); }                      \
    inline float __##NAME##2float(H value) { return value; }                         \
    inline short __##NAME##_as_short(H value) { return short(value.__x); }           \
    inline unsigned short __##NAME##_as_ushort(H value) { return value.__x; }        \
    inline H __short_as_##NAME(short bits) { return RAW{(unsigned short)bits}; }     \
    inline H __ushort_as_##NAME(unsigned short bits) { return RAW{bits}; }           \
    inline H2 __floats2##NAME2##_rn(float low, float high) { return H2(low, high); } \
    inline H2 __float22##NAME2##_rn(float2 value) { return H2(value.x, value.y); }   \
    inline H2 __float2##NAME2##_rn(float value) { return H2(value, value); }         \
    inline float2 __##NAME2##2float2(H2 value) { return {value.x, value.y}; }        \
    inline H2 __halves2##NAME2(H low, H high) { return H2(low, high); }              \
    inline H2 __##NAME##2##NAME2(H value) { return H2(value, value); }               \
    inline H __low2##NAME(H2 value) { return value.x; }                              \
    inline H __high2##NAME(H2 value) { return value.y; }                             \
    inline H2 __low2##NAME2(H2 value) { return H2(value.x, value.x); }               \
    inline H2 __high2##NAME2(H2 value) { return H2(value.y, value.y); }              \
    inline H2 __lows2##NAME2(H2 a, H2 b) { return H2(a.x, b.x); }                    \
    inline H2 __highs2##NAME2(H2 a, H2 b) { return H2(a.y, b.y); }                   \
    inline H2 __lowhigh2highlow(H2 value) { return H2(value.y, value.x); }           \
    inline H2 make_##NAME2(H low, H high) { return H2(low, high); }
