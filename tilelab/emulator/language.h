// The words of CUDA C++ for g++: attributes, built-in variables, synchronisation, and what it takes to call a kernel.
#ifndef TILELAB_EMULATOR_LANGUAGE_H
#define TILELAB_EMULATOR_LANGUAGE_H
#include "emulator.h"

#include <float.h>
#include <limits.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__
#define __inline_hint__
#define __noinline__
#define __managed__
#define __constant__
#define __nv_pure__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __block_size__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// Of templates g++ ignores the section; a linker script (__init__.py) collects their static variables.
#define __shared__ static __attribute__((section("emulated_shared")))

#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __NVCC__ 1
#define __CUDA_ARCH__ EMULATED_ARCH
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUDART_VERSION 13000

namespace emulator {

template <typename T>
constexpr u32 alignment() {
    return alignof(T);
}
template <int BYTES>
constexpr u32 alignment() {
    return BYTES;
}

extern "C" u32 dynamic_alignment;  // the largest that the cell asks for, known once it is loaded
inline u32 note_alignment(u32 bytes) {
    return dynamic_alignment = dynamic_alignment < bytes ? bytes : dynamic_alignment;
}
template <u32 BYTES>
struct Alignment {
    static const u32 noted;
};
template <u32 BYTES>
const u32 Alignment<BYTES>::noted = note_alignment(BYTES);

template <typename Array, u32 ALIGNMENT = 16>
inline Array& dynamic_array() {
    (void)&Alignment<ALIGNMENT>::noted;
    return *reinterpret_cast<Array*>(dynamic_shared);
}

template <typename T>
struct Plain {
    typedef T type;
};
template <typename T>
struct Plain<const T> {
    typedef T type;
};
template <typename... Parameters>
UNCHECKED inline void call(void (*kernel)(Parameters...), void** values) {
    u32 index = sizeof...(Parameters);  // braces evaluate from the left to the right
    struct Values {
        void** next;
        UNCHECKED void* take() { return *next++; }
    } list = {values};
    struct Call {
        Call(void (*kernel)(Parameters...), typename Plain<Parameters>::type... given) { kernel(given...); }
    };
    Call{kernel, *static_cast<typename Plain<Parameters>::type*>(list.take())...};
}

// Return what lane `source` gave, or this lane's own value where `source` is none of its group of `width` lanes.
template <typename T>
UNCHECKED T shuffle(const char* what, u32 mask, T value, int source, int width) {
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

UNCHECKED inline u32 vote(const char* what, u32 mask, bool value) {
    const Votes votes = meet(what, mask, value);
    u32 bits = 0;
    for (u32 lane = 0; lane < 32; ++lane) bits |= u32((votes.filled >> lane & 1) && votes.slots[lane]) << lane;
    return bits;
}

// Return the lanes that gave the same value as this one.
template <typename T>
UNCHECKED u32 match(const char* what, u32 mask, T value, bool* all = nullptr) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const Votes votes = meet(what, mask, bits);
    u32 same = 0;
    for (u32 lane = 0; lane < 32; ++lane) same |= u32((votes.filled >> lane & 1) && votes.slots[lane] == bits) << lane;
    if (all) *all = same == votes.filled;
    return same;
}

template <typename T, typename Operation>
UNCHECKED T reduce_lanes(const char* what, u32 mask, T value, Operation operation) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const Votes votes = meet(what, mask, bits);
    bool is_first = true;
    T result = value;
    for (u32 lane = 0; lane < 32; ++lane)
        if (votes.filled >> lane & 1) {
            T given;
            memcpy(&given, &votes.slots[lane], sizeof(T));
            result = is_first ? given : operation(result, given);
            is_first = false;
        }
    return result;
}

}  // namespace emulator

#include "vectors.h"
#include "intrinsics.h"
#include "atomics.h"

constexpr int warpSize = 32;
struct __align__(64) CUtensorMap_st {
    u64 opaque[16];
};
typedef CUtensorMap_st CUtensorMap;

#define printf emulator::print
#define assert(...)          \
    ((__VA_ARGS__) ? (void)0 \
                   : emulator::fail("the assertion '%s' of line %d does not hold", #__VA_ARGS__, int(__LINE__)))
extern "C"
    [[noreturn]] inline void __assert_fail(const char* condition, const char*, unsigned line, const char*) noexcept {
    emulator::fail("the assertion '%s' of line %u does not hold", condition, line);
}

inline void __trap() { emulator::fail("executes __trap()"); }
inline void __brkpt() { emulator::fail("executes __brkpt()"); }
inline void __syncthreads() { emulator::block_barrier(0, 0, "in __syncthreads()"); }
inline void __barrier_sync(u32 name) { emulator::block_barrier(name, 0, "in __barrier_sync()"); }
inline void __barrier_sync_count(u32 name, u32 threads) {
    emulator::block_barrier(name, threads, "in __barrier_sync_count()");
}
inline int __syncthreads_count(int value) { return emulator::count_in_block(value != 0); }
inline int __syncthreads_and(int value) { return emulator::count_in_block(value == 0) == 0; }
inline int __syncthreads_or(int value) { return emulator::count_in_block(value != 0) != 0; }

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
inline int __uni_sync(u32 mask, int value) {
    bool all;
    emulator::match("__uni_sync()", mask, value != 0, &all);
    return all;
}
inline u32 __activemask() { return emulator::active_lanes(); }
template <typename T>
u32 __match_any_sync(u32 mask, T value) {
    return emulator::match("__match_any_sync()", mask, value);
}
template <typename T>
u32 __match_all_sync(u32 mask, T value, int* all) {
    bool same;
    const u32 lanes = emulator::match("__match_all_sync()", mask, value, &same);
    *all = same;
    return same ? lanes : 0;
}
#define REDUCE_LANES(NAME, T, EXPRESSION)                                                            \
    inline T NAME(u32 mask, T value) {                                                               \
        return emulator::reduce_lanes(#NAME "()", mask, value, [](T a, T b) { return EXPRESSION; }); \
    }
REDUCE_LANES(__reduce_add_sync, u32, a + b)
REDUCE_LANES(__reduce_add_sync, int, int(u32(a) + u32(b)))
REDUCE_LANES(__reduce_min_sync, u32, a < b ? a : b)
REDUCE_LANES(__reduce_min_sync, int, a < b ? a : b)
REDUCE_LANES(__reduce_max_sync, u32, a > b ? a : b)
REDUCE_LANES(__reduce_max_sync, int, a > b ? a : b)
REDUCE_LANES(__reduce_and_sync, u32, a& b)
REDUCE_LANES(__reduce_or_sync, u32, a | b)
REDUCE_LANES(__reduce_xor_sync, u32, a ^ b)
#undef REDUCE_LANES

inline void __threadfence() { emulator::fence_memory(); }
inline void __threadfence_block() { emulator::fence_memory(true); }
inline void __threadfence_system() { emulator::fence_memory(); }
inline void __nanosleep(u32) { emulator::pause(); }
inline void __prof_trigger(int) {}
inline long long clock64() { return (long long)emulator::cycles(); }
inline unsigned long long __nv_clock64() { return emulator::cycles(); }
namespace cell {  // before the C library's
inline long clock() { return (long)emulator::cycles(); }
}  // namespace cell
inline unsigned long long globaltimer() { return emulator::cycles(); }

// Kernels run one after the other here.
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() {}

inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::address_of(pointer); }
inline size_t __cvta_generic_to_global(const void* pointer) { return reinterpret_cast<size_t>(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return emulator::find_shared(u32(address), 1, "a pointer"); }
inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
inline u32 __isShared(const void* pointer) { return emulator::is_shared(pointer); }
inline u32 __isGlobal(const void* pointer) { return emulator::is_in_tensor(pointer); }

inline dim3 __clusterDim() { return dim3(emulator::cluster_size()); }
inline u32 __clusterSizeInBlocks() { return emulator::cluster_size(); }
inline u32 __clusterRelativeBlockRank() { return emulator::rank_in_cluster(); }
inline dim3 __clusterRelativeBlockIdx() { return dim3(emulator::rank_in_cluster(), 0, 0); }
inline dim3 __clusterIdx() { return dim3(blockIdx.x / emulator::cluster_size(), blockIdx.y, blockIdx.z); }
inline dim3 __clusterGridDimInClusters() { return dim3(gridDim.x / emulator::cluster_size(), gridDim.y, gridDim.z); }
inline void __cluster_barrier_arrive() { emulator::arrive_at_cluster(); }
inline void __cluster_barrier_arrive_relaxed() { emulator::arrive_at_cluster(false); }
inline void __cluster_barrier_wait() { emulator::wait_for_cluster(); }

#define __builtin_assume(condition) ((void)0)
#define __assume(condition) ((void)0)
#define __nv_is_extended_device_lambda_closure_type(T) false

// A cell may add overloads of these, which would hide those above.
#define BUILTINS_THAT_CELLS_OVERLOAD                                                                                   \
    using ::atomicAdd, ::atomicSub, ::atomicMin, ::atomicMax, ::atomicExch, ::atomicCAS, ::atomicAnd, ::atomicOr,      \
        ::atomicXor, ::min, ::max, ::__ldg, ::__ldcs, ::__stcs, ::__shfl_sync, ::__shfl_down_sync, ::__shfl_up_sync,   \
        ::__shfl_xor_sync, ::exp, ::log, ::sqrt, ::abs, ::fabs, ::pow, ::floor, ::ceil, ::fmin, ::fmax, ::tanh, ::sin, \
        ::cos;

#endif  // TILELAB_EMULATOR_LANGUAGE_H
