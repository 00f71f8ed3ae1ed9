// What a cell needs to run on the CPU: the words of CUDA C++, and the calls into engine.cpp, which is compiled once.
#pragma once
#include <cstdint>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // Bessel functions and the like, which take half of the time to compile a cell
#include <cmath>
#include <cstdio>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("emulated_shared")))

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct dim3 {
    u32 x = 1, y = 1, z = 1;
};
struct __align__(8) int2 {
    int x, y;
};
struct __align__(16) int4 {
    int x, y, z, w;
};
struct __align__(8) uint2 {
    u32 x, y;
};
struct __align__(16) uint4 {
    u32 x, y, z, w;
};
struct __align__(8) float2 {
    float x, y;
};
struct __align__(16) float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename A, typename B>
constexpr auto min(A a, B b) {
    return a < b ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) {
    return a > b ? a : b;
}
template <typename T>
T __ldg(const T* address) {
    return *address;
}
template <typename T, typename V>
T atomicExch(T* address, V value) {
    T old = *address;
    *address = value;
    return old;
}
template <typename T, typename V>
T atomicAdd(T* address, V value) {
    return atomicExch(address, *address + value);
}
template <typename T, typename V>
T atomicMin(T* address, V value) {
    return atomicExch(address, min(*address, T(value)));
}
template <typename T, typename V>
T atomicMax(T* address, V value) {
    return atomicExch(address, max(*address, T(value)));
}
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(u32 bits) { return __builtin_ffs(int(bits)); }
inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float rsqrtf(float value) { return 1 / sqrtf(value); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(u32) {}

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

extern u8 dynamic_shared[];

[[noreturn]] void fail(const char* format, ...);  // ends the run with a sentence about the current thread
u8* find_shared(u32 address, u32 bytes, const char* what);  // of this block, or of one of its cluster (cluster_address)
u32 cluster_address(u32 address, u32 rank);
u32 address_of(const void* pointer);
u32 lane_number();
u32 rank_in_cluster();
u32 cluster_size();

struct Votes {
    const u64* slots;
    u32 filled;
};
Votes meet(const char* what, u32 mask, u64 value);  // waits for the lanes of `mask`, which exchange values
const u8* exchange(const char* what, const void* value, u32 bytes);  // the values of all 32 lanes
void block_barrier(u32 name, u32 threads, const char* what);
void arrive_at_block_barrier(u32 name, u32 threads, const char* what);
void arrive_at_cluster();
void wait_for_cluster();

void init_barrier(u32 barrier, u32 arrivals);
void make_barriers_visible();
void invalidate_barrier(u32 barrier);
u64 arrive(u32 barrier, u32 bytes, u32 arrivals = 1, bool drops = false);  // returns the phase before
void expect_bytes(u32 barrier, long bytes);
void wait_for_phase(u32 barrier, u32 parity);
bool try_phase(u32 barrier, u32 parity);  // waits too, and returns false if nothing else can run

enum Kind { LOAD, STORE, ADD };
void move_bytes(Kind kind, void* global, u32 tile, u32 bytes, u32 barrier, const char* what, const char* added = "");
void send_bytes(u32 destination, u32 tile, u32 bytes, u32 barrier, const char* what);  // between blocks of the cluster
void send_value(u32 destination, const void* value, u32 bytes, u32 barrier, const char* what);
void move_box(Kind kind, const void* map, u32 dimensions, const int* corner, u32 tile, u32 barrier, int ctas,
              const char* what);
void commit_stores();
void wait_for_reads(u32 pending);
void wait_for_stores(u32 pending);
void fence_views();

enum Elements { BF16, E4M3, F16, TF32, E5M2, S8, U8 };
enum Sums { F32_SUMS, F16_SUMS, S32_SUMS };
struct ProductKind {
    u32 width;
    Elements a, b;
    Sums sums = F32_SUMS;
    int a_scale = 1, b_scale = 1;  // or -1
    bool a_transposed = false, b_transposed = false;
};
void fence_products();
void multiply(const ProductKind& kind, u32* const* d, const u32* a_registers, u64 a, u64 b, bool accumulate);
inline void multiply(Elements elements, float* d, u32 width, u64 a, u64 b, bool accumulate) {
    u32* registers[128];
    for (u32 i = 0; i < width / 2; ++i) registers[i] = reinterpret_cast<u32*>(d + i);
    multiply({width, elements, elements}, registers, nullptr, a, b, accumulate);
}
void commit_products();
void wait_for_products(u32 pending);
void store_matrices(u32 address, const u32 (&rows)[4], bool transposed);

u32 bf16_bits(float value);  // rounded to the nearest even
u32 f16_bits(float value);
float f16_value(u32 bits);
float element_value(Elements elements, u32 bits);
u32 float8_bits(Elements elements, float value);  // E4M3 or E5M2, rounded to the nearest even; the largest for more

// Return what lane `source` gave, or this lane's own value where `source` is none of its group of `width` lanes.
template <typename T>
T shuffle(const char* what, u32 mask, T value, int source, int width) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const Votes votes = meet(what, mask, bits);
    const int first = int(lane_number()) / width * width;
    if (source < first || source >= first + width) return value;
    if (!(votes.filled >> source & 1)) fail("%s reads from lane %d, which does not take part", what, source);
    memcpy(&value, &votes.slots[source], sizeof(T));
    return value;
}

inline u32 vote(const char* what, u32 mask, bool value) {
    const Votes votes = meet(what, mask, value);
    u32 bits = 0;
    for (u32 lane = 0; lane < 32; ++lane) bits |= u32((votes.filled >> lane & 1) && votes.slots[lane]) << lane;
    return bits;
}

}  // namespace emulator

inline void __trap() { emulator::fail("executes __trap()"); }
inline void __syncthreads() { emulator::block_barrier(0, 0, "in __syncthreads()"); }

// The lanes of a warp run one after the other, as on a GPU whose lanes have diverged, so a value reaches another lane
// only by these calls. Each call waits for all lanes of its mask that have not ended.
inline void __syncwarp(u32 mask = 0xffffffff) { emulator::meet("__syncwarp()", mask, 0); }

template <typename T>
T __shfl_sync(u32 mask, T value, int source, int width = 32) {
    const int first = int(emulator::lane_number()) / width * width;
    return emulator::shuffle("__shfl_sync()", mask, value, first + (source & (width - 1)), width);
}
template <typename T>
T __shfl_up_sync(u32 mask, T value, u32 by, int width = 32) {
    return emulator::shuffle("__shfl_up_sync()", mask, value, int(emulator::lane_number()) - int(by), width);
}
template <typename T>
T __shfl_down_sync(u32 mask, T value, u32 by, int width = 32) {
    return emulator::shuffle("__shfl_down_sync()", mask, value, int(emulator::lane_number()) + int(by), width);
}
template <typename T>
T __shfl_xor_sync(u32 mask, T value, int lanes, int width = 32) {
    return emulator::shuffle("__shfl_xor_sync()", mask, value, int(emulator::lane_number()) ^ lanes, width);
}

inline u32 __ballot_sync(u32 mask, int value) { return emulator::vote("__ballot_sync()", mask, value); }
inline int __any_sync(u32 mask, int value) { return emulator::vote("__any_sync()", mask, value) != 0; }
inline int __all_sync(u32 mask, int value) { return emulator::vote("__all_sync()", mask, !value) == 0; }
