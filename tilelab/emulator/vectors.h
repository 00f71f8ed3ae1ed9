// The vector types of CUDA, float4 and the like, with their alignments.
#ifndef TILELAB_EMULATOR_VECTORS_H
#define TILELAB_EMULATOR_VECTORS_H

#define VECTORS(T, NAME, BYTES_OF_2, BYTES_OF_4)                          \
    struct NAME##1 { T x; };                                              \
    struct __align__(BYTES_OF_2) NAME##2 { T x, y; };                     \
    struct NAME##3 { T x, y, z; };                                        \
    struct __align__(BYTES_OF_4) NAME##4 { T x, y, z, w; };               \
    constexpr NAME##1 make_##NAME##1(T x) { return {x}; }                 \
    constexpr NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }         \
    constexpr NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
    constexpr NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char, 2, 4)
VECTORS(unsigned char, uchar, 2, 4)
VECTORS(short, short, 4, 8)
VECTORS(unsigned short, ushort, 4, 8)
VECTORS(int, int, 8, 16)
VECTORS(unsigned int, uint, 8, 16)
VECTORS(long, long, 16, 16)
VECTORS(unsigned long, ulong, 16, 16)
VECTORS(long long, longlong, 16, 16)
VECTORS(unsigned long long, ulonglong, 16, 16)
VECTORS(float, float, 8, 16)
VECTORS(double, double, 16, 16)
#undef VECTORS

#define WIDE(T, NAME)                                                                     \
    struct __align__(16) NAME##4_16a { T x, y, z, w; };                                   \
    struct __align__(32) NAME##4_32a { T x, y, z, w; };                                   \
    constexpr NAME##4_16a make_##NAME##4_16a(T x, T y, T z, T w) { return {x, y, z, w}; } \
    constexpr NAME##4_32a make_##NAME##4_32a(T x, T y, T z, T w) { return {x, y, z, w}; }
WIDE(long, long)
WIDE(unsigned long, ulong)
WIDE(long long, longlong)
WIDE(unsigned long long, ulonglong)
WIDE(double, double)
#undef WIDE

constexpr dim3::dim3(const uint3& extents) : x(extents.x), y(extents.y), z(extents.z) {}
constexpr dim3::operator uint3() const { return {x, y, z}; }

#endif  // TILELAB_EMULATOR_VECTORS_H
