// The instructions of inline PTX, as inline_ptx.py calls them. A register is a u64, of which the low bits count.
#pragma once
#include <type_traits>

#include "emulator.h"

namespace inline_ptx {
using emulator::Elements;
using emulator::fail;

typedef signed char s8;
typedef unsigned char u8;
typedef short s16;
typedef unsigned short u16;
typedef int s32;
typedef long long s64;
typedef float f32;
typedef double f64;

template <Elements KIND>
struct Half {
    u16 bits = 0;
    Half() = default;
    Half(float value) : bits(u16(KIND == emulator::F16 ? emulator::f16_bits(value) : emulator::bf16_bits(value))) {}
    operator float() const { return emulator::element_value(KIND, bits); }
};
typedef Half<emulator::F16> f16;
typedef Half<emulator::BF16> bf16;

template <typename T>
T as(u64 bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T>
u64 bits(T value) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

// ---- operands: "r" is 32 bits wide, "h" 16, "n" as wide as the instruction needs

template <typename T>
u64 get(char constraint, const T& value) {
    if constexpr (std::is_class_v<T>) return bits(value);
    else if constexpr (std::is_floating_point_v<T>) return constraint == 'd' ? bits(double(value)) : bits(float(value));
    else if (constraint == 'r' || constraint == 'f') return u32(s64(value));
    else if (constraint == 'h') return u16(s64(value));
    else return u64(s64(value));
}
template <typename T>
u64 get(char, T* value) {
    return reinterpret_cast<u64>(value);
}
template <typename T>
void put(T& to, u64 bits) {
    memcpy(&to, &bits, sizeof(T));
}

// ---- arithmetic: apply f to one element, or to each of the two in a register

template <int COUNT, typename T, typename F, typename... Registers>
u64 apply(F f, Registers... registers) {
    if constexpr (COUNT == 1) return bits(f(as<T>(registers)...));
    else return bits(f(as<T>(registers)...)) | bits(f(as<T>(registers >> 8 * sizeof(T))...)) << 8 * sizeof(T);
}

inline float flush(float value) { return fabsf(value) < 1.17549435e-38f ? copysignf(0, value) : value; }
template <typename T>
T saturate(T value) {
    return value > T(0) ? value < T(1) ? value : T(1) : T(0);
}
template <typename T>
T fused(T a, T b, T c) {
    if constexpr (sizeof(T) == 8) return fma(a, b, c);
    else if constexpr (sizeof(T) == 4) return fmaf(a, b, c);
    else return T(float(double(a) * double(b) + double(c)));
}
template <typename T>
T smaller(T a, T b) {
    return a != a ? b : b != b ? a : a < b ? a : b;
}
template <typename T>
T larger(T a, T b) {
    return a != a ? b : b != b ? a : a > b ? a : b;
}
template <typename T>
u64 high_product(T a, T b) {
    return u64(T(__int128(a) * __int128(b) >> 8 * sizeof(T)));
}
inline u64 shift_left(u64 value, u32 by, u32 width) { return by >= width ? 0 : value << by; }
template <typename T>
u64 shift_right(T value, u32 by) {
    const u32 width = 8 * sizeof(T);
    return u64(by >= width ? (value < 0 ? T(-1) : T(0)) : T(value >> by));
}
inline u64 funnel(u32 low, u32 high, u32 by, bool left, bool wraps) {
    by = wraps ? by & 31 : by > 32 ? 32 : by;
    const u64 both = u64(high) << 32 | low;
    return left ? u32(both << by >> 32) : u32(both >> by);
}
inline u64 logic3(u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (u32 i = 0; i < 8; ++i)
        if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}
inline u64 permute(u32 a, u32 b, u32 selector) {
    const u64 both = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 choice = selector >> 4 * i & 15, byte = u32(both >> 8 * (choice & 7)) & 255;
        result |= (choice & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return result;
}
template <typename T>
u64 extract_bits(T value, u32 position, u32 length) {
    const u32 width = 8 * sizeof(T);
    position &= 255, length &= 255;
    if (!length) return 0;
    u64 field = position >= width ? 0 : u64(value) << (64 - width) >> (64 - width) >> position;
    if (length < 64) field &= (1ull << length) - 1;
    const u32 sign = position + length - 1 < width - 1 ? position + length - 1 : width - 1;
    if (T(-1) < T(0) && length < width && (u64(value) >> sign & 1)) field |= ~0ull << length;
    return u64(T(field));
}
inline u64 insert_bits(u64 from, u64 into, u32 position, u32 length, u32 width) {
    position &= 255, length &= 255;
    if (position >= width || !length) return into;
    const u64 mask = (length >= 64 ? ~0ull : (1ull << length) - 1) << position;
    return (into & ~mask) | (from << position & mask);
}
inline u64 reverse_bits(u64 value, u32 width) {
    u64 result = 0;
    for (u32 i = 0; i < width; ++i) result |= (value >> i & 1) << (width - 1 - i);
    return result;
}
inline u64 dot4(u64 a, u64 b, u64 c, bool a_signed, bool b_signed) {
    for (u32 i = 0; i < 32; i += 8)
        c += (a_signed ? s32(s8(a >> i)) : s32(u8(a >> i))) * (b_signed ? s32(s8(b >> i)) : s32(u8(b >> i)));
    return u32(c);
}

// ---- conversions: `rounding` is n, z, m, p or a: to the nearest even, to zero, down, up, to the nearest and away

inline double round_to_integer(double value, char rounding) {
    switch (rounding) {
        case 'z': return trunc(value);
        case 'm': return floor(value);
        case 'p': return ceil(value);
        default: return nearbyint(value);
    }
}
template <typename To>
To to_integer(double value, char rounding) {  // the nearest that To has
    if (value != value) return 0;
    value = round_to_integer(value, rounding);
    const u32 width = 8 * sizeof(To) - (To(-1) < To(0));
    const double limit = ldexp(1, width);
    if (value >= limit) return To(width == 64 ? ~0ull : (1ull << width) - 1);
    if (value < (To(-1) < To(0) ? -limit : 0)) return To(-1) < To(0) ? To(1ull << width) : To(0);
    return To(value);
}
template <typename To, typename From>
To clamp_integer(From value) {
    const __int128 low = To(-1) < To(0) ? -(__int128(1) << (8 * sizeof(To) - 1)) : 0;
    const __int128 high = (__int128(1) << (8 * sizeof(To) - (To(-1) < To(0)))) - 1, wide = value;
    return To(wide < low ? low : wide > high ? high : wide);
}
inline u64 to_tf32(float value, char rounding) {
    const u32 word = __float_as_uint(value);
    if ((word & 0x7f800000) == 0x7f800000) return word;
    if (rounding == 'z') return word & 0xffffe000;
    return (word + (rounding == 'a' ? 0x1000 : 0xfff + (word >> 13 & 1))) & 0xffffe000;
}
inline bf16 truncate_to_bf16(float value) {
    bf16 result;
    result.bits = u16(__float_as_uint(value) >> 16);
    return result;
}

// ---- memory

inline void* pointer_to(bool shared, u64 address, u32 bytes, const char* what) {
    if (shared) return emulator::find_shared(u32(address), bytes, what);
    if (address % bytes) fail("%s at address ...%llx, which is no multiple of %u", what, address & 0xffff, bytes);
    return reinterpret_cast<void*>(address);
}
inline u32 shared(u64 generic) { return emulator::address_of(reinterpret_cast<void*>(generic)); }
template <u32 COUNT, u32 BYTES>
void load(bool shared, u64 address, u64 (&values)[COUNT], const char* what) {
    const u8* from = static_cast<u8*>(pointer_to(shared, address, COUNT * BYTES, what));
    for (u32 i = 0; i < COUNT; ++i) values[i] = 0, memcpy(&values[i], from + i * BYTES, BYTES);
}
template <u32 COUNT, u32 BYTES>
void store(bool shared, u64 address, const u64 (&values)[COUNT], const char* what) {
    u8* to = static_cast<u8*>(pointer_to(shared, address, COUNT * BYTES, what));
    for (u32 i = 0; i < COUNT; ++i) memcpy(to + i * BYTES, &values[i], BYTES);
}
// Loads and stores that are volatile, relaxed, acquire or release do not race with each other.
template <u32 COUNT, u32 BYTES>
UNCHECKED void load_signal(bool shared, u64 address, u64 (&values)[COUNT], const char* what, bool acquires,
                           bool in_block) {
    const u8* from = static_cast<u8*>(pointer_to(shared, address, COUNT * BYTES, what));
    emulator::begin_signal(from, COUNT * BYTES, false, acquires, in_block);
    for (u32 i = 0; i < COUNT; ++i) values[i] = 0, memcpy(&values[i], from + i * BYTES, BYTES);
}
template <u32 COUNT, u32 BYTES>
UNCHECKED void store_signal(bool shared, u64 address, const u64 (&values)[COUNT], const char* what, bool releases,
                            bool in_block) {
    u8* to = static_cast<u8*>(pointer_to(shared, address, COUNT * BYTES, what));
    emulator::begin_signal(to, COUNT * BYTES, true, releases, in_block);
    for (u32 i = 0; i < COUNT; ++i) memcpy(to + i * BYTES, &values[i], BYTES);
}
template <typename F>
UNCHECKED u64 update(bool shared, u64 address, u32 bytes, const char* what, bool orders, bool in_block, bool acquires,
                     F f) {
    void* at = pointer_to(shared, address, bytes, what);
    emulator::begin_atomic(at, bytes, orders, in_block, acquires);
    u64 old = 0;
    memcpy(&old, at, bytes);
    const u64 changed = f(old);
    memcpy(at, &changed, bytes);
    return old;
}
inline u64 ticks() {
    static u64 now = 1000;
    return now += 32;
}

// ---- the lanes of a warp

UNCHECKED inline u64 shuffle(char kind, u64 value, u64 by, u64 limits, u64 mask, u64& inside) {
    const emulator::Votes votes = emulator::meet("shfl.sync", u32(mask), u32(value));
    const int lane = int(emulator::lane_number()), segment = int(limits >> 8 & 31), clamp = int(limits & 31),
              b = int(by & 31);
    const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int source = kind == 'u' ? lane - b : kind == 'd' ? lane + b : kind == 'b' ? lane ^ b : first | (b & ~segment);
    inside = kind == 'u' ? source >= last : source <= last;
    if (!inside) source = lane;
    if (!(votes.filled >> source & 1)) fail("shfl.sync reads from lane %d, which does not take part", source);
    return u32(votes.slots[source]);
}
template <typename F>
UNCHECKED u64 reduce(const char* what, u64 mask, u64 value, F f) {
    const emulator::Votes votes = emulator::meet(what, u32(mask), u32(value));
    bool some = false;
    u64 result = 0;
    for (u32 lane = 0; lane < 32; ++lane)
        if (votes.filled >> lane & 1) result = some ? f(result, votes.slots[lane]) : votes.slots[lane], some = true;
    return result;
}
UNCHECKED inline u64 ballot(u64 mask, u64 value) {
    const emulator::Votes votes = emulator::meet("vote.sync", u32(mask), value & 1);
    u64 result = 0;
    for (u32 lane = 0; lane < 32; ++lane) result |= (votes.filled >> lane & votes.slots[lane] & 1) << lane;
    return result;
}
UNCHECKED inline bool elect(u64 mask, u64& leader) {
    const emulator::Votes votes = emulator::meet("elect.sync", u32(mask), 0);
    leader = u64(__builtin_ctz(votes.filled));
    return leader == emulator::lane_number();
}

// The values of all lanes, in memory of the cell.
template <typename T>
struct Lanes {
    T values[32];
    UNCHECKED Lanes(const char* what, const T& own) {
        memcpy(values, emulator::exchange(what, &own, sizeof(T)), sizeof values);
    }
    const T& operator[](u32 lane) const { return values[lane]; }
};

// ---- matrices of 8 x 8 elements of two bytes. Lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; lanes 0
// to 7 give the addresses of the rows of the first matrix, 8 to 15 of the second one, and so on.

template <u32 COUNT>
void load_matrices(bool transposed, u64 address, u64 (&values)[COUNT]) {
    const u32 own = u32(address), lane = emulator::lane_number();
    const Lanes<u32> lines("ldmatrix", own);
    for (u32 matrix = 0; matrix < COUNT; ++matrix) {
        values[matrix] = 0;
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = lane / 4, column = lane % 4 * 2 + half,
                      line = lines[matrix * 8 + (transposed ? column : row)];
            u16 element;
            memcpy(&element, emulator::find_shared(line, 16, "a row of ldmatrix") + 2 * (transposed ? row : column), 2);
            values[matrix] |= u64(element) << 16 * half;
        }
    }
}
template <u32 COUNT>
void store_matrices(bool transposed, u64 address, const u64 (&values)[COUNT]) {
    const u32 own = u32(address), lane = emulator::lane_number();
    const Lanes<u32> lines("stmatrix", own);
    for (u32 matrix = 0; matrix < COUNT; ++matrix)
        for (u32 half = 0; half < 2; ++half) {
            const u32 row = lane / 4, column = lane % 4 * 2 + half,
                      line = lines[matrix * 8 + (transposed ? column : row)];
            const u16 element = u16(values[matrix] >> 16 * half);
            memcpy(emulator::find_shared(line, 16, "a row of stmatrix") + 2 * (transposed ? row : column), &element, 2);
        }
}
inline u64 transpose_matrix(u64 value) {
    const u32 own = u32(value), lane = emulator::lane_number(), row = lane / 4;
    const Lanes<u32> all("movmatrix", own);
    u64 result = 0;
    for (u32 half = 0; half < 2; ++half) {
        const u32 from = lane % 4 * 2 + half;  // the row, and `row` the column, of what this lane gets
        result |= u64(all[from * 4 + row / 2] >> row % 2 * 16 & 0xffff) << 16 * half;
    }
    return result;
}

// mma.sync: 16 x 8 sums. Register i of A holds 4 bytes of row l / 4 + 8 (i % 2) from byte 4 (l % 4) + 16 (i / 2) on, and
// register j of B 4 bytes of column l / 4 from byte 4 (l % 4) + 16 j on.
template <u32 A, u32 B, u32 C>
void multiply(Elements a_type, Elements b_type, emulator::Sums c_type, emulator::Sums d_type, u64 (&d)[C],
              const u64 (&a)[A], const u64 (&b)[B], const u64* c) {
    struct Operands {
        u32 a[A], b[B];
    } own;
    for (u32 i = 0; i < A; ++i) own.a[i] = u32(a[i]);
    for (u32 i = 0; i < B; ++i) own.b[i] = u32(b[i]);
    const Lanes<Operands> all("mma.sync", own);
    const u32 lane = emulator::lane_number(), width = a_type == emulator::TF32                              ? 32
                                                      : a_type == emulator::BF16 || a_type == emulator::F16 ? 16
                                                                                                            : 8;
    float sums[4];
    for (u32 i = 0; i < 4; ++i) {
        const u32 row = lane / 4, column = lane % 4 * 2 + i % 2;
        sums[i] = 0;
        for (u32 part = 0; part < B; ++part)
            for (u32 quarter = 0; quarter < 4; ++quarter) {
                const u32 left = all[row * 4 + quarter].a[part * 2 + i / 2], right = all[column * 4 + quarter].b[part];
                for (u32 shift = 0; shift < 32; shift += width)
                    sums[i] += emulator::element_value(a_type, left >> shift) *
                               emulator::element_value(b_type, right >> shift);
            }
    }
    for (u32 i = 0; i < C; ++i) d[i] = d_type == emulator::F16_SUMS ? 0 : d[i];
    for (u32 i = 0; i < 4; ++i) {
        const u32 shift = i % 2 * 16;
        if (d_type == emulator::S32_SUMS) d[i] = u32(c[i]) + u32(int(sums[i]));
        else {
            const float before =
                c_type == emulator::F16_SUMS ? emulator::f16_value(u32(c[i / 2] >> shift) & 0xffff) : as<float>(c[i]);
            if (d_type == emulator::F16_SUMS) d[i / 2] |= u64(emulator::f16_bits(before + sums[i])) << shift;
            else d[i] = bits(before + sums[i]);
        }
    }
}

// ---- asynchronous copies

inline void copy_async(u64 tile, u64 source, u64 bytes, u64 from_source) {
    emulator::copy_async(u32(tile), reinterpret_cast<void*>(source), u32(bytes), u32(from_source));
}
inline void commit_copies() { emulator::commit_copies(); }
inline void wait_for_copies(u64 pending) { emulator::wait_for_copies(u32(pending)); }
inline void arrive_after_copies(u32 barrier, bool counted) {
    emulator::commit_copies();
    emulator::wait_for_copies(0);
    if (counted) emulator::arrive(barrier, 0);
}

template <u32 COUNT, typename... Registers>
UNCHECKED void multiply_group(const emulator::ProductKind& kind, const u32* a_registers, u64 a, u64 b, bool accumulate,
                              Registers&... d) {
    u32* registers[] = {reinterpret_cast<u32*>(&d)...};
    if (COUNT != sizeof...(d))
        fail("wgmma with %u columns has %u registers of d; it gets %zu", kind.width, COUNT, sizeof...(d));
    emulator::multiply(kind, registers, a_registers, a, b, accumulate);
}
}  // namespace inline_ptx
