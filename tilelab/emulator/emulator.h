// The calls of a cell into engine.cpp, which is compiled once. Its guard is no #pragma once: g++ would take the file of
// another clone for a second one, beside a header that it has compiled before. cuda.h adds the words of CUDA C++.
#ifndef TILELAB_EMULATOR_EMULATOR_H
#define TILELAB_EMULATOR_EMULATOR_H
#include <cstdint>
#include <initializer_list>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // Bessel functions and the like, which take half of the time to compile a cell
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct uint3;
struct dim3 {
    u32 x, y, z;
    constexpr dim3(u32 x = 1, u32 y = 1, u32 z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(const uint3& extents);
    constexpr operator uint3() const;
};

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

#ifndef ENGINE
extern const dim3 threadIdx, blockIdx, blockDim, gridDim;
#endif

// The code of a function with this attribute may touch the engine's own memory.
#define UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

namespace emulator {

extern u8 dynamic_shared[];

[[noreturn]] void fail(const char* format, ...);  // ends the run with a sentence about the current thread
u8* find_shared(u32 address, u32 bytes, const char* what);  // of this block, or of one of its cluster (cluster_address)
u32 cluster_address(u32 address, u32 rank);
u32 address_of(const void* pointer);
u32 lane_number();
u32 rank_in_cluster();
bool is_shared(const void* pointer);
bool is_in_tensor(const void* pointer);
u32 cluster_size();

struct Votes {
    const u64* slots;
    u32 filled;
};
Votes meet(const char* what, u32 mask, u64 value);  // waits for the lanes of `mask`, which exchange values
// `orders`: with a fence. `in_block`: which acts in this block alone.
void begin_atomic(const void* address, u32 bytes, bool orders = false, bool in_block = false, bool acquires = true);
// A volatile, relaxed, acquiring or releasing load or store.
void begin_signal(const void* address, u32 bytes, bool writes, bool orders, bool in_block = false);
void require_constant(const void* address, u32 bytes);  // for a load through the cache for read-only data
void fence_memory(bool in_block = false);
void pause();  // lets others run, in a loop that waits for memory
u32 active_lanes();  // of this warp: those that have come to this call, while no other lane can run
int count_in_block(bool value);  // waits for all threads, and counts those that give true
void print(const char* format, ...);
u64 cycles();  // grows
const u8* exchange(const char* what, const void* value, u32 bytes);  // the values of all 32 lanes
void block_barrier(u32 name, u32 threads, const char* what);
void arrive_at_block_barrier(u32 name, u32 threads, const char* what);
void require_together(const char* what);  // the lanes of the warp, which have not parted since __syncwarp()
void arrive_at_cluster(bool releases = true);
void wait_for_cluster();

void init_barrier(u32 barrier, u32 arrivals, bool needs_fence = false);
void fence_barriers();
void invalidate_barrier(u32 barrier);
// Returns the phase before.
u64 arrive(u32 barrier, u32 bytes, u32 arrivals = 1, bool drops = false, bool releases = true);
void expect_bytes(u32 barrier, long bytes);
void wait_for_phase(u32 barrier, u32 parity);
bool try_phase(u32 barrier, u32 parity, bool acquires = true);  // waits too, or returns false

enum Kind { LOAD, STORE, ADD };  // ADD: or another reduction, the `change`
void move_bytes(Kind kind, void* global, u32 tile, u32 bytes, u32 barrier, const char* what, const char* type = "",
                int ctas = -1, const char* change = "add");
void prefetch_bytes(const void* global, u32 bytes, const char* what);  // into the L2 cache
void send_bytes(u32 destination, u32 tile, u32 bytes, u32 barrier, const char* what);  // between blocks of the cluster
void send_value(u32 destination, const void* value, u32 bytes, u32 barrier, const char* what);
void move_box(Kind kind, const void* map, u32 dimensions, const int* corner, u32 tile, u32 barrier, int ctas,
              const char* what, const char* change = "add");
void commit_stores();
void wait_for_reads(u32 pending);
void wait_for_stores(u32 pending);
void fence_views(bool of_shared, bool of_global);
void copy_async(u32 tile, const void* source, u32 bytes, u32 source_bytes);  // the rest of `bytes` becomes zero
void commit_copies();
void wait_for_copies(u32 pending);

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
UNCHECKED inline void multiply(Elements elements, float* d, u32 width, u64 a, u64 b, bool accumulate) {
    u32* registers[128];
    for (u32 i = 0; i < width / 2; ++i) registers[i] = reinterpret_cast<u32*>(d + i);
    multiply({width, elements, elements}, registers, nullptr, a, b, accumulate);
}
void change_registers(u32 count);
void commit_products();
void wait_for_products(u32 pending);
void store_matrices(u32 address, std::initializer_list<u32> rows, bool transposed);

u32 bf16_bits(float value);  // rounded to the nearest even
u32 f16_bits(float value);
float f16_value(u32 bits);
float element_value(Elements elements, u32 bits);
u32 float8_bits(Elements elements, float value);  // E4M3 or E5M2, rounded to the nearest even; the largest for more

}  // namespace emulator

#endif  // TILELAB_EMULATOR_EMULATOR_H
