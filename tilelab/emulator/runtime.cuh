// Run a CUDA C++ kernel on the CPU, one block after the other, with a copy engine that is as awkward as it may be.
//
// Each thread of a block is a coroutine that runs until it waits. The copy engine (bulk copies) holds its operations
// back, or completes them in any order that the PTX manual allows: `seed` 0 completes an operation only when every
// thread waits, the newest first; seed 1 completes it at once; other seeds at random moments. A kernel that is right for every seed does not depend
// on the engine's speed. The engine sees shared memory through a copy of its own (the async proxy), which is brought up
// to date by fence_proxy_async.
#pragma once
#include <signal.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("emulated_shared")))

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct dim3 { u32 x = 1, y = 1, z = 1; };
struct __align__(8) uint2 { u32 x, y; };
struct __align__(16) uint4 { u32 x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename A, typename B> constexpr auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> constexpr auto max(A a, B b) { return a > b ? a : b; }
template <typename T> T __ldg(const T* address) { return *address; }
template <typename T, typename V> T atomicAdd(T* address, V value) { T old = *address; *address += value; return old; }
template <typename T, typename V> T atomicMin(T* address, V value) { T old = *address; if (T(value) < old) *address = value; return old; }
template <typename T, typename V> T atomicMax(T* address, V value) { T old = *address; if (T(value) > old) *address = value; return old; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __clz(u32 bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(u32 bits) { return __builtin_ffs(int(bits)); }
inline float __uint_as_float(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }
inline u32 __float_as_uint(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }

extern u8 __start_emulated_shared[], __stop_emulated_shared[];
__shared__ __align__(128) __attribute__((used)) u8 dynamic_shared[EMULATED_DYNAMIC_SMEM];

static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Barrier {
    int arrivals = 0, pending = 0;  // arrivals per phase; arrivals that the current phase still waits for
    long bytes = 0;                 // bytes that are announced and have not landed
    u32 phase = 0;
    bool visible = false;           // to the copy engine, after fence_mbarrier_init
};

struct Operation {
    bool is_load;
    u8* global;
    u32 tile, bytes, barrier;
    u32 thread, group;  // of a store
    bool committed = false, read = false;
    std::vector<u8> data;
};

struct Thread {
    ucontext_t context;
    std::unique_ptr<u8[]> stack;
    dim3 index;
    bool finished = false;
    std::function<bool()> ready;  // empty: it can run
    std::function<std::string()> waits_for;
    u32 groups = 0;  // bulk groups that it has committed
};

constexpr size_t STACK_BYTES = 64 << 10;
static std::vector<Thread> threads;
static std::vector<Operation> operations;
static std::map<u32, Barrier> barriers;
static std::vector<u8> engine_view;  // shared memory as the copy engine sees it
static std::vector<std::pair<u64, u64>> tensors;
static ucontext_t scheduler;
static u32 current, block_generation, arrived_at_block;

// Lanes of a warp that meet: those of `mask`, in __syncwarp or in an exchange of values.
struct Meeting {
    u32 arrived = 0, generation = 0;
    const char* what = "";     // the call that the first lane has made
    u64 slots[2][32] = {};     // the lanes' values, for even and odd generations
    u32 filled[2] = {0, 0};    // the lanes that have given one
};
static std::map<std::pair<u32, u32>, Meeting> meetings;  // by warp and mask
static std::mt19937 random_numbers;
static u32 seed;
static std::string failure;
static std::function<void()> kernel_call;

inline size_t shared_bytes() { return __stop_emulated_shared - __start_emulated_shared; }

// End the run with a sentence about the current thread.
[[noreturn]] inline void fail(const char* format, ...) {
    char text[400];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    char where[80];
    snprintf(where, sizeof where, "block %u, thread %u: ", blockIdx.x, threadIdx.x);
    failure = where + std::string(text);
    setcontext(&scheduler);
    abort();
}

// While this lives, an access to memory that does not exist ends the run with a sentence, not the process.
class CatchWildAccess {
    static inline u8 stack[64 << 10];
    struct sigaction before[2];
    stack_t stack_before;

    static void say(int, siginfo_t* info, void*) {
        fail("reads or writes at address 0x%llx, where no memory is: an index is out of range, or was read too early",
             reinterpret_cast<u64>(info->si_addr));
    }

public:
    CatchWildAccess() {
        stack_t own = {};
        own.ss_sp = stack, own.ss_size = sizeof stack;
        sigaltstack(&own, &stack_before);
        struct sigaction action = {};
        action.sa_sigaction = say;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &before[0]);
        sigaction(SIGBUS, &action, &before[1]);
    }
    ~CatchWildAccess() {
        sigaction(SIGSEGV, &before[0], nullptr);
        sigaction(SIGBUS, &before[1], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

inline u8* own_view(u32 tile) { return __start_emulated_shared + tile; }

inline Barrier& find_barrier(u32 address) {
    auto found = barriers.find(address);
    if (found == barriers.end()) fail("shared address %u holds no mbarrier that was initialised", address);
    return found->second;
}

inline void complete_phase_if_due(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.pending = barrier.arrivals;
    }
}

// Let the engine do one step: a load lands, a store reads its tile, or a store that has read writes memory.
inline void complete_one() {
    if (operations.empty()) return;
    const size_t which = seed == 0 ? operations.size() - 1 : random_numbers() % operations.size();
    Operation& operation = operations[which];
    if (operation.is_load) {
        memcpy(engine_view.data() + operation.tile, operation.global, operation.bytes);
        memcpy(own_view(operation.tile), operation.global, operation.bytes);
        Barrier& barrier = barriers[operation.barrier];
        barrier.bytes -= operation.bytes;
        complete_phase_if_due(barrier);
    } else if (!operation.read) {
        operation.data.assign(engine_view.begin() + operation.tile,
                              engine_view.begin() + operation.tile + operation.bytes);
        operation.read = true;
        return;
    } else {
        memcpy(operation.global, operation.data.data(), operation.bytes);
    }
    operations.erase(operations.begin() + which);
}

inline void engine_may_act() {
    if (seed == 1)
        while (!operations.empty()) complete_one();
    else if (seed > 1)
        while (!operations.empty() && random_numbers() % 3 == 0) complete_one();
}

inline void wait_until(std::function<bool()> ready, std::function<std::string()> waits_for) {
    engine_may_act();
    if (ready()) return;
    threads[current].ready = std::move(ready);
    threads[current].waits_for = std::move(waits_for);
    swapcontext(&threads[current].context, &scheduler);
}

inline void start(Operation operation, const char* what) {
    const u64 address = reinterpret_cast<u64>(operation.global);
    if (address % 16 || operation.tile % 16 || operation.bytes % 16 || !operation.bytes)
        fail("%s of %u bytes between global address ...%llx and shared address %u: a bulk copy moves whole units of 16 "
             "bytes between multiples of 16", what, operation.bytes, address & 0xfff, operation.tile);
    if (operation.tile + size_t(operation.bytes) > shared_bytes())
        fail("%s of %u bytes at shared address %u leaves shared memory", what, operation.bytes, operation.tile);
    const bool inside = std::any_of(tensors.begin(), tensors.end(), [&](auto& tensor) {
        return tensor.first <= address && address + operation.bytes <= tensor.second; });
    if (!inside) fail("%s of %u bytes leaves the tensors that were passed to the kernel", what, operation.bytes);
    operations.push_back(std::move(operation));
    engine_may_act();
}

inline void run_thread() {
    kernel_call();
    threads[current].finished = true;
    setcontext(&scheduler);
}

inline u32 count_live() {
    return std::count_if(threads.begin(), threads.end(), [](auto& thread) { return !thread.finished; });
}

inline void release_block_barrier() {
    if (arrived_at_block && arrived_at_block >= count_live()) {
        arrived_at_block = 0;
        ++block_generation;
    }
}

inline void release_meeting(u32 warp, u32 mask, Meeting& meeting) {
    u32 members = 0;
    for (u32 lane = 0; lane < 32 && warp * 32 + lane < threads.size(); ++lane)
        members += (mask >> lane & 1) && !threads[warp * 32 + lane].finished;
    if (meeting.arrived && meeting.arrived >= members) {
        meeting.arrived = 0;
        ++meeting.generation;
    }
}

// Wait for the lanes of `mask`; return the values that they gave, and which lanes gave one.
inline std::pair<const u64*, u32> meet(const char* what, u32 mask, u64 value) {
    const u32 warp = current / 32, lane = current % 32;
    if (!(mask >> lane & 1)) fail("lane %u calls %s with mask 0x%x, which does not name it", lane, what, mask);
    Meeting& meeting = meetings[{warp, mask}];
    if (!meeting.arrived) meeting.what = what;
    if (strcmp(meeting.what, what)) fail("lanes of one warp meet in %s and in %s", meeting.what, what);
    const u32 before = meeting.generation, half = before % 2;
    if (!meeting.arrived) meeting.filled[half] = 0;
    meeting.slots[half][lane] = value;
    meeting.filled[half] |= 1u << lane;
    ++meeting.arrived;
    release_meeting(warp, mask, meeting);
    wait_until([&meeting, before] { return meeting.generation != before; }, [what, mask] {
        char text[120];
        snprintf(text, sizeof text, "in %s for the other lanes of mask 0x%x", what, mask);
        return std::string(text);
    });
    return {meeting.slots[half], meeting.filled[half]};
}

// Return what lane `source` gave, or this lane's own value where `source` is none of its group of `width` lanes.
template <typename T>
inline T shuffle(const char* what, u32 mask, T value, int source, int width) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const auto [slots, filled] = meet(what, mask, bits);
    const int first = current % 32 / width * width;
    if (source < first || source >= first + width) return value;
    if (!(filled >> source & 1)) fail("%s reads from lane %d, which does not take part", what, source);
    memcpy(&value, &slots[source], sizeof(T));
    return value;
}

inline u32 vote(const char* what, u32 mask, bool value) {
    const auto [slots, filled] = meet(what, mask, value);
    u32 bits = 0;
    for (u32 lane = 0; lane < 32; ++lane) bits |= u32((filled >> lane & 1) && slots[lane]) << lane;
    return bits;
}

inline void run_block() {
    barriers.clear();
    operations.clear();
    meetings.clear();
    arrived_at_block = 0;
    for (size_t i = 0; i < shared_bytes(); ++i) __start_emulated_shared[i] = u8(random_numbers());
    engine_view.assign(__start_emulated_shared, __stop_emulated_shared);
    threads.clear();
    threads.resize(blockDim.x * blockDim.y * blockDim.z);
    for (u32 i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        thread.stack.reset(new u8[STACK_BYTES]);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_thread, 0);
    }
    while (count_live()) {
        bool someone_ran = false;
        const u32 first = seed > 1 ? random_numbers() % threads.size() : 0;
        for (u32 step = 0; step < threads.size(); ++step) {
            current = (first + step) % threads.size();
            Thread& thread = threads[current];
            if (thread.finished || (thread.ready && !thread.ready())) continue;
            thread.ready = nullptr;
            threadIdx = thread.index;
            someone_ran = true;
            swapcontext(&scheduler, &thread.context);
            if (!failure.empty()) return;
            if (thread.finished) {
                release_block_barrier();
                for (auto& [key, meeting] : meetings)
                    if (key.first == current / 32) release_meeting(key.first, key.second, meeting);
            }
        }
        if (someone_ran) continue;
        if (operations.empty()) {
            const Thread& stuck = *std::find_if(threads.begin(), threads.end(), [](auto& each) { return !each.finished; });
            failure = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(stuck.index.x) +
                      " waits for ever " + stuck.waits_for();
            return;
        }
        complete_one();
    }
    for (auto& operation : operations)
        if (operation.is_load || !operation.read) {
            failure = "block " + std::to_string(blockIdx.x) + " ended while the copy engine " +
                      (operation.is_load ? "was still writing" : "had not yet read") + " its shared memory" +
                      (operation.is_load || operation.committed ? "" : ": a store was not committed with bulk_commit");
            return;
        }
    while (!operations.empty()) complete_one();
}

}  // namespace emulator

inline void __syncthreads() {
    const u32 generation = emulator::block_generation;
    ++emulator::arrived_at_block;
    emulator::release_block_barrier();
    emulator::wait_until([=] { return emulator::block_generation != generation; }, [] { return "in __syncthreads()"; });
}

// The lanes of a warp run one after the other, as on a GPU whose lanes have diverged, so a value reaches another lane
// only by these calls. Each call waits for all lanes of its mask that have not ended.
inline void __syncwarp(u32 mask = 0xffffffff) { emulator::meet("__syncwarp()", mask, 0); }

template <typename T> T __shfl_sync(u32 mask, T value, int source, int width = 32) {
    const int first = emulator::current % 32 / width * width;
    return emulator::shuffle("__shfl_sync()", mask, value, first + (source & (width - 1)), width);
}
template <typename T> T __shfl_up_sync(u32 mask, T value, u32 by, int width = 32) {
    return emulator::shuffle("__shfl_up_sync()", mask, value, int(emulator::current % 32) - int(by), width);
}
template <typename T> T __shfl_down_sync(u32 mask, T value, u32 by, int width = 32) {
    return emulator::shuffle("__shfl_down_sync()", mask, value, int(emulator::current % 32) + int(by), width);
}
template <typename T> T __shfl_xor_sync(u32 mask, T value, int lanes, int width = 32) {
    return emulator::shuffle("__shfl_xor_sync()", mask, value, int(emulator::current % 32) ^ lanes, width);
}

inline u32 __ballot_sync(u32 mask, int value) { return emulator::vote("__ballot_sync()", mask, value); }
inline int __any_sync(u32 mask, int value) { return emulator::vote("__any_sync()", mask, value) != 0; }
inline int __all_sync(u32 mask, int value) { return emulator::vote("__all_sync()", mask, !value) == 0; }
