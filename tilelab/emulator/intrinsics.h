// Functions of CUDA's device library: loads and stores with hints, integers, conversions, and mathematics.
#ifndef TILELAB_EMULATOR_INTRINSICS_H
#define TILELAB_EMULATOR_INTRINSICS_H
#include <fenv.h>

// ---- loads and stores with a hint for the caches

#define LOAD_WITH_HINT(NAME)   \
    template <typename T>      \
    T NAME(const T* address) { \
        return *address;       \
    }
template <typename T>
T __ldg(const T* address) {
    emulator::require_constant(address, sizeof(T));
    return *address;
}
LOAD_WITH_HINT(__ldca)
LOAD_WITH_HINT(__ldcg)
LOAD_WITH_HINT(__ldcs)
LOAD_WITH_HINT(__ldlu)
LOAD_WITH_HINT(__ldcv)
#undef LOAD_WITH_HINT
#define STORE_WITH_HINT(NAME)         \
    template <typename T, typename V> \
    void NAME(T* address, V value) {  \
        *address = value;             \
    }
STORE_WITH_HINT(__stwb)
STORE_WITH_HINT(__stcg)
STORE_WITH_HINT(__stcs)
STORE_WITH_HINT(__stwt)
#undef STORE_WITH_HINT

// ---- minimum and maximum: of two floats the one that is a number

template <typename A, typename B>
constexpr auto min(A a, B b) {
    return a < b ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
    return a > b ? a : b;
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
constexpr u32 umin(u32 a, u32 b) { return a < b ? a : b; }
constexpr u32 umax(u32 a, u32 b) { return a > b ? a : b; }
constexpr long long llmin(long long a, long long b) { return a < b ? a : b; }
constexpr long long llmax(long long a, long long b) { return a > b ? a : b; }
constexpr u64 ullmin(u64 a, u64 b) { return a < b ? a : b; }
constexpr u64 ullmax(u64 a, u64 b) { return a > b ? a : b; }

// ---- integers

inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __popcll(u64 bits) { return __builtin_popcountll(bits); }
inline int __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __clzll(u64 bits) { return bits ? __builtin_clzll(bits) : 64; }
inline int __ffs(u32 bits) { return __builtin_ffs(int(bits)); }
inline int __ffsll(u64 bits) { return __builtin_ffsll((long long)bits); }
inline u64 __brevll(u64 bits) {
    u64 reversed = 0;
    for (int i = 0; i < 64; ++i) reversed |= (bits >> i & 1) << (63 - i);
    return reversed;
}
inline u32 __brev(u32 bits) { return u32(__brevll(bits) >> 32); }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
    const u64 bytes = u64(high) << 32 | low;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 choice = selector >> 4 * i & 15;
        u32 byte = u32(bytes >> 8 * (choice & 7)) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
inline u32 __funnelshift_l(u32 low, u32 high, u32 by) { return u32((u64(high) << 32 | low) << (by & 31) >> 32); }
inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return u32((u64(high) << 32 | low) >> (by & 31)); }
inline u32 __funnelshift_lc(u32 low, u32 high, u32 by) { return by >= 32 ? low : __funnelshift_l(low, high, by); }
inline u32 __funnelshift_rc(u32 low, u32 high, u32 by) { return by >= 32 ? high : __funnelshift_r(low, high, by); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline u32 __umul24(u32 a, u32 b) { return (a & 0xffffff) * (b & 0xffffff); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline u64 __umul64hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
inline int __hadd(int a, int b) { return int(((long long)a + b) >> 1); }
inline int __rhadd(int a, int b) { return int(((long long)a + b + 1) >> 1); }
inline u32 __uhadd(u32 a, u32 b) { return u32((u64(a) + b) >> 1); }
inline u32 __urhadd(u32 a, u32 b) { return u32((u64(a) + b + 1) >> 1); }
inline u32 __sad(int a, int b, u32 sum) { return (a > b ? u32(a) - u32(b) : u32(b) - u32(a)) + sum; }
inline u32 __usad(u32 a, u32 b, u32 sum) { return (a > b ? a - b : b - a) + sum; }
inline u32 __fns(u32 mask, u32 base, int offset) {
    if (offset == 0) return mask >> base & 1 ? base : 0xffffffff;
    const int step = offset < 0 ? -1 : 1;
    int left = offset < 0 ? -offset : offset;
    for (int i = int(base); i >= 0 && i < 32; i += step)
        if ((mask >> i & 1) && !--left) return u32(i);
    return 0xffffffff;
}

namespace emulator {

template <typename T, typename A, typename B>
T dot_bytes(A a, B b, T sum, int first, int count) {  // the products of `count` parts of a and bytes of b
    for (int i = 0; i < count; ++i) {
        if (count == 4) sum += T(a.part(i)) * T(b.part(i));
        else sum += T(a.part(i)) * T(b.part(first + i));
    }
    return sum;
}
template <typename T>
struct Parts {
    u32 word;
    T part(int i) const { return T(word >> 8 * sizeof(T) * i); }
};

// Apply an operation to each part of T of two words.
template <typename T, typename Operation>
u32 on_parts(u32 a, u32 b, Operation operation) {
    constexpr u32 BITS = 8 * sizeof(T), MASK = u32((u64(1) << BITS) - 1);
    u32 result = 0;
    for (u32 shift = 0; shift < 32; shift += BITS)
        result |= (u32(operation((long long)T(a >> shift), (long long)T(b >> shift))) & MASK) << shift;
    return result;
}

}  // namespace emulator

inline int __dp4a(int a, int b, int sum) {
    return emulator::dot_bytes(emulator::Parts<signed char>{u32(a)}, emulator::Parts<signed char>{u32(b)}, sum, 0, 4);
}
inline u32 __dp4a(u32 a, u32 b, u32 sum) {
    return emulator::dot_bytes(emulator::Parts<u8>{a}, emulator::Parts<u8>{b}, sum, 0, 4);
}
inline int __dp4a(char4 a, char4 b, int sum) { return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
inline u32 __dp4a(uchar4 a, uchar4 b, u32 sum) { return sum + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
inline int __dp2a_lo(int a, int b, int sum) {
    return emulator::dot_bytes(emulator::Parts<short>{u32(a)}, emulator::Parts<signed char>{u32(b)}, sum, 0, 2);
}
inline int __dp2a_hi(int a, int b, int sum) {
    return emulator::dot_bytes(emulator::Parts<short>{u32(a)}, emulator::Parts<signed char>{u32(b)}, sum, 2, 2);
}
inline u32 __dp2a_lo(u32 a, u32 b, u32 sum) {
    return emulator::dot_bytes(emulator::Parts<unsigned short>{a}, emulator::Parts<u8>{b}, sum, 0, 2);
}
inline u32 __dp2a_hi(u32 a, u32 b, u32 sum) {
    return emulator::dot_bytes(emulator::Parts<unsigned short>{a}, emulator::Parts<u8>{b}, sum, 2, 2);
}

#define ON_PARTS_OF(NAME, T, EXPRESSION)                                                                   \
    inline u32 NAME(u32 a_word, u32 b_word) {                                                              \
        typedef T Part;                                                                                    \
        return emulator::on_parts<T>(a_word, b_word, [](long long a, long long b) { return EXPRESSION; }); \
    }
#define ON_SIGNED(NAME, EXPRESSION)         \
    ON_PARTS_OF(NAME##2, short, EXPRESSION) \
    ON_PARTS_OF(NAME##4, signed char, EXPRESSION)
#define ON_UNSIGNED(NAME, EXPRESSION)                \
    ON_PARTS_OF(NAME##2, unsigned short, EXPRESSION) \
    ON_PARTS_OF(NAME##4, u8, EXPRESSION)
#define CLAMP(VALUE)                                                                                 \
    max((VALUE), 0LL) * 0 + min(max((VALUE), Part(-1) < 0 ? -(1LL << (8 * sizeof(Part) - 1)) : 0LL), \
                                Part(-1) < 0 ? (1LL << (8 * sizeof(Part) - 1)) - 1 : (1LL << 8 * sizeof(Part)) - 1)
ON_UNSIGNED(__vadd, a + b)
ON_UNSIGNED(__vsub, a - b)
ON_SIGNED(__vaddss, CLAMP(a + b))
ON_UNSIGNED(__vaddus, CLAMP(a + b))
ON_SIGNED(__vsubss, CLAMP(a - b))
ON_UNSIGNED(__vsubus, CLAMP(a - b))
ON_SIGNED(__vmaxs, max(a, b))
ON_UNSIGNED(__vmaxu, max(a, b))
ON_SIGNED(__vmins, min(a, b))
ON_UNSIGNED(__vminu, min(a, b))
ON_SIGNED(__vavgs, (a + b + (a + b >= 0)) >> 1)
ON_UNSIGNED(__vavgu, (a + b + 1) >> 1)
ON_UNSIGNED(__vhaddu, (a + b) >> 1)
ON_SIGNED(__vabsdiffs, a > b ? a - b : b - a)
ON_UNSIGNED(__vabsdiffu, a > b ? a - b : b - a)
ON_UNSIGNED(__vcmpeq, -(a == b))
ON_UNSIGNED(__vcmpne, -(a != b))
ON_SIGNED(__vcmpges, -(a >= b))
ON_UNSIGNED(__vcmpgeu, -(a >= b))
ON_SIGNED(__vcmpgts, -(a > b))
ON_UNSIGNED(__vcmpgtu, -(a > b))
ON_SIGNED(__vcmples, -(a <= b))
ON_UNSIGNED(__vcmpleu, -(a <= b))
ON_SIGNED(__vcmplts, -(a < b))
ON_UNSIGNED(__vcmpltu, -(a < b))
ON_UNSIGNED(__vseteq, a == b)
ON_UNSIGNED(__vsetne, a != b)
ON_SIGNED(__vsetges, a >= b)
ON_UNSIGNED(__vsetgeu, a >= b)
ON_SIGNED(__vsetgts, a > b)
ON_UNSIGNED(__vsetgtu, a > b)
ON_SIGNED(__vsetles, a <= b)
ON_UNSIGNED(__vsetleu, a <= b)
ON_SIGNED(__vsetlts, a < b)
ON_UNSIGNED(__vsetltu, a < b)
#define ON_ONE(NAME, EXPRESSION)                                                                              \
    inline u32 NAME##2(u32 word) {                                                                            \
        typedef short Part;                                                                                   \
        return emulator::on_parts<short>(word, 0, [](long long a, long long b) { return EXPRESSION; });       \
    }                                                                                                         \
    inline u32 NAME##4(u32 word) {                                                                            \
        typedef signed char Part;                                                                             \
        return emulator::on_parts<signed char>(word, 0, [](long long a, long long b) { return EXPRESSION; }); \
    }
ON_ONE(__vabs, a < 0 ? -a : a)
ON_ONE(__vneg, -a)
ON_ONE(__vabsss, CLAMP(a < 0 ? -a : a))
ON_ONE(__vnegss, CLAMP(-a))
inline u32 __vsads2(u32 a, u32 b) {
    u32 d = __vabsdiffs2(a, b);
    return (d & 0xffff) + (d >> 16);
}
inline u32 __vsadu2(u32 a, u32 b) {
    u32 d = __vabsdiffu2(a, b);
    return (d & 0xffff) + (d >> 16);
}
inline u32 __vsads4(u32 a, u32 b) { return __dp4a(__vabsdiffs4(a, b), 0x01010101u, 0u); }
inline u32 __vsadu4(u32 a, u32 b) { return __dp4a(__vabsdiffu4(a, b), 0x01010101u, 0u); }
#undef ON_ONE
#undef CLAMP
#undef ON_UNSIGNED
#undef ON_SIGNED
#undef ON_PARTS_OF

// ---- bits of numbers

#define SAME_BITS(NAME, FROM, TO)                      \
    inline TO NAME(FROM value) {                       \
        static_assert(sizeof(FROM) == sizeof(TO), ""); \
        TO result;                                     \
        memcpy(&result, &value, sizeof result);        \
        return result;                                 \
    }
SAME_BITS(__int_as_float, int, float)
SAME_BITS(__float_as_int, float, int)
SAME_BITS(__longlong_as_double, long long, double)
SAME_BITS(__double_as_longlong, double, long long)
#undef SAME_BITS
inline int __double2hiint(double value) { return int(__double_as_longlong(value) >> 32); }
inline int __double2loint(double value) { return int(__double_as_longlong(value)); }
inline double __hiloint2double(int high, int low) {
    return __longlong_as_double((long long)(u64(u32(high)) << 32 | u32(low)));
}

// ---- arithmetic and conversions with a rounding mode

namespace emulator {

template <int MODE, typename Operation, typename... Values>
auto rounded(Operation operation, Values... values) {
    const int before = fegetround();
    fesetround(MODE);
    const auto result = operation(values...);
    fesetround(before);
    return result;
}

// Convert to an integer as the GPU does: out of range to the nearest, NaN to 0 (or to the smallest of 64 bits).
template <typename To, typename From>
To to_integer(From value) {
    constexpr bool SIGNED = To(-1) < To(0);
    constexpr To LEAST = SIGNED ? To(u64(1) << (8 * sizeof(To) - 1)) : To(0), MOST = To(~LEAST);
    if (value != value) return sizeof(To) == 8 ? To(u64(1) << 63) : To(0);
    if (value <= From(LEAST)) return LEAST;
    return value >= From(MOST) ? MOST : To(value);
}
inline float round_to_even(float value) { return rintf(value); }
inline double round_to_even(double value) { return rint(value); }

}  // namespace emulator

#define IN_MODE(NAME, SUFFIX, MODE, T, EXPRESSION, ...)                     \
    __attribute__((noinline, noclone)) inline T NAME##SUFFIX(__VA_ARGS__) { \
        const int before = fegetround();                                    \
        fesetround(MODE);                                                   \
        volatile T result = EXPRESSION;                                     \
        fesetround(before);                                                 \
        return result;                                                      \
    }
#define IN_MODES(NAME, T, EXPRESSION, ...)                        \
    IN_MODE(NAME, _rn, FE_TONEAREST, T, EXPRESSION, __VA_ARGS__)  \
    IN_MODE(NAME, _rz, FE_TOWARDZERO, T, EXPRESSION, __VA_ARGS__) \
    IN_MODE(NAME, _ru, FE_UPWARD, T, EXPRESSION, __VA_ARGS__)     \
    IN_MODE(NAME, _rd, FE_DOWNWARD, T, EXPRESSION, __VA_ARGS__)
#define BINARY(NAME, T, OPERATOR) IN_MODES(NAME, T, (T)a OPERATOR(T) b, volatile T a, volatile T b)
BINARY(__fadd, float, +)
BINARY(__fsub, float, -)
BINARY(__fmul, float, *)
BINARY(__fdiv, float, /)
BINARY(__dadd, double, +)
BINARY(__dsub, double, -)
BINARY(__dmul, double, *)
BINARY(__ddiv, double, /)
IN_MODES(__fmaf, float, fmaf(a, b, c), volatile float a, volatile float b, volatile float c)
IN_MODES(__fma, double, fma(a, b, c), volatile double a, volatile double b, volatile double c)
IN_MODES(__frcp, float, 1 / a, volatile float a)
IN_MODES(__drcp, double, 1 / a, volatile double a)
IN_MODES(__fsqrt, float, sqrtf(a), volatile float a)
IN_MODES(__dsqrt, double, sqrt(a), volatile double a)
IN_MODES(__double2float, float, float(a), volatile double a)
IN_MODES(__int2float, float, float(a), volatile int a)
IN_MODES(__uint2float, float, float(a), volatile u32 a)
IN_MODES(__ll2float, float, float(a), volatile long long a)
IN_MODES(__ull2float, float, float(a), volatile u64 a)
IN_MODES(__ll2double, double, double(a), volatile long long a)
IN_MODES(__ull2double, double, double(a), volatile u64 a)
inline double __int2double_rn(int a) { return a; }
inline double __uint2double_rn(u32 a) { return a; }
inline float __frsqrt_rn(float a) { return float(1 / sqrt(double(a))); }
inline float __fmaf_ieee_rn(float a, float b, float c) { return fmaf(a, b, c); }
#define TO_INTEGER(NAME, FROM, TO)                                                               \
    inline TO NAME##_rn(FROM a) { return emulator::to_integer<TO>(emulator::round_to_even(a)); } \
    inline TO NAME##_rz(FROM a) { return emulator::to_integer<TO>(trunc(a)); }                   \
    inline TO NAME##_ru(FROM a) { return emulator::to_integer<TO>(ceil(a)); }                    \
    inline TO NAME##_rd(FROM a) { return emulator::to_integer<TO>(floor(a)); }
TO_INTEGER(__float2int, float, int)
TO_INTEGER(__float2uint, float, u32)
TO_INTEGER(__float2ll, float, long long)
TO_INTEGER(__float2ull, float, u64)
TO_INTEGER(__double2int, double, int)
TO_INTEGER(__double2uint, double, u32)
TO_INTEGER(__double2ll, double, long long)
TO_INTEGER(__double2ull, double, u64)
#undef TO_INTEGER
#undef BINARY
#undef IN_MODES
#undef IN_MODE

// ---- fast and further mathematics. The C library may declare these names too, so they are functions of C.

inline float __fdividef(float a, float b) { return a / b; }
inline float fdividef(float a, float b) { return a / b; }
inline double fdivide(double a, double b) { return a / b; }
inline float __saturatef(float a) { return a >= 0 ? a < 1 ? a : 1.0f : 0.0f; }

extern "C" {
inline float __expf(float a) noexcept { return expf(a); }
inline float __exp10f(float a) noexcept { return powf(10, a); }
inline float __exp2f(float a) noexcept { return exp2f(a); }
inline float __logf(float a) noexcept { return logf(a); }
inline float __log2f(float a) noexcept { return log2f(a); }
inline float __log10f(float a) noexcept { return log10f(a); }
inline float __powf(float a, float b) noexcept { return powf(a, b); }
inline float __sinf(float a) noexcept { return sinf(a); }
inline float __cosf(float a) noexcept { return cosf(a); }
inline float __tanf(float a) noexcept { return tanf(a); }
inline float __tanhf(float a) noexcept { return tanhf(a); }
inline void __sincosf(float a, float* sine, float* cosine) noexcept { *sine = sinf(a), *cosine = cosf(a); }
#define BOTH(NAME, EXPRESSION)                                   \
    inline double NAME(double a) noexcept { return EXPRESSION; } \
    inline float NAME##f(float value) noexcept {                 \
        double a = value;                                        \
        return float(EXPRESSION);                                \
    }
BOTH(rsqrt, 1 / sqrt(a))
BOTH(rcbrt, 1 / cbrt(a))
BOTH(sinpi, sin(M_PI* fmod(a, 2)))
BOTH(cospi, cos(M_PI* fmod(a, 2)))
BOTH(normcdf, 0.5 * erfc(-a * M_SQRT1_2))
BOTH(erfcx, exp(a* a) * erfc(a))
#undef BOTH
}

namespace emulator {

inline double inverse_erf(double y) {
    if (y <= -1 || y >= 1) return y == 1 ? HUGE_VAL : y == -1 ? -HUGE_VAL : NAN;
    const double l = log((1 - y) * (1 + y)), t = 2 / (M_PI * 0.147) + l / 2;
    double x = copysign(sqrt(sqrt(t * t - l / 0.147) - t), y);
    for (int i = 0; i < 4; ++i) x -= (erf(x) - y) / (2 / sqrt(M_PI) * exp(-x * x));
    return x;
}

}  // namespace emulator

inline double erfinv(double a) { return emulator::inverse_erf(a); }
inline float erfinvf(float a) { return float(emulator::inverse_erf(a)); }
inline double erfcinv(double a) { return emulator::inverse_erf(1 - a); }
inline float erfcinvf(float a) { return float(emulator::inverse_erf(1 - double(a))); }
inline double normcdfinv(double a) { return M_SQRT2 * emulator::inverse_erf(2 * a - 1); }
inline float normcdfinvf(float a) { return float(normcdfinv(a)); }
inline double norm3d(double a, double b, double c) { return sqrt(a * a + b * b + c * c); }
inline float norm3df(float a, float b, float c) { return float(norm3d(a, b, c)); }
inline double norm4d(double a, double b, double c, double d) { return sqrt(a * a + b * b + c * c + d * d); }
inline float norm4df(float a, float b, float c, float d) { return float(norm4d(a, b, c, d)); }
inline double rnorm3d(double a, double b, double c) { return 1 / norm3d(a, b, c); }
inline float rnorm3df(float a, float b, float c) { return float(rnorm3d(a, b, c)); }
inline double rnorm4d(double a, double b, double c, double d) { return 1 / norm4d(a, b, c, d); }
inline float rnorm4df(float a, float b, float c, float d) { return float(rnorm4d(a, b, c, d)); }
inline double rhypot(double a, double b) { return 1 / hypot(a, b); }
inline float rhypotf(float a, float b) { return float(rhypot(a, b)); }
template <typename T>
double norm_of(int count, const T* values) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += double(values[i]) * values[i];
    return sqrt(sum);
}
inline double norm(int count, const double* values) { return norm_of(count, values); }
inline float normf(int count, const float* values) { return float(norm_of(count, values)); }
inline double rnorm(int count, const double* values) { return 1 / norm_of(count, values); }
inline float rnormf(int count, const float* values) { return float(1 / norm_of(count, values)); }
inline void sincospif(float a, float* sine, float* cosine) { *sine = sinpif(a), *cosine = cospif(a); }
inline void sincospi(double a, double* sine, double* cosine) { *sine = sinpi(a), *cosine = cospi(a); }
inline float rsqrt(float a) { return rsqrtf(a); }

#endif  // TILELAB_EMULATOR_INTRINSICS_H
