// The wrappers of tilelab/include/ptx.cuh, carried out by the emulator.
#pragma once
#include "runtime.cuh"

inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(static_cast<const u8*>(pointer) - __start_emulated_shared);
}

inline void mbarrier_init(u32 barrier, u32 arrivals) {
    if (barrier % 8) emulator::fail("the mbarrier at shared address %u must lie at a multiple of 8 bytes", barrier);
    emulator::barriers[barrier] = {int(arrivals), int(arrivals)};
}

inline void fence_mbarrier_init() {
    for (auto& [address, barrier] : emulator::barriers) barrier.visible = true;
}

inline void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
    emulator::Barrier& barrier = emulator::find_barrier(address);
    if (barrier.pending == 0)
        emulator::fail("the mbarrier at shared address %u gets more arrivals in a phase than the %d it was initialised for",
                       address, barrier.arrivals);
    barrier.bytes += bytes;
    --barrier.pending;
    emulator::complete_phase_if_due(barrier);
    emulator::engine_may_act();
}

inline void mbarrier_arrive(u32 address) { mbarrier_arrive_expect_tx(address, 0); }

inline void mbarrier_wait(u32 address, u32 parity) {
    emulator::Barrier& barrier = emulator::find_barrier(address);
    emulator::wait_until([&barrier, parity] { return (barrier.phase & 1) != (parity & 1); }, [&barrier, address, parity] {
        char text[300];
        snprintf(text, sizeof text, "for parity %u of the mbarrier at shared address %u. Its phase %u (parity %u) still "
                 "lacks %d of %d arrivals and %s", parity & 1, address, barrier.phase, barrier.phase & 1,
                 barrier.pending, barrier.arrivals, (barrier.bytes >= 0 ? std::to_string(barrier.bytes) + " bytes" :
                 "has got " + std::to_string(-barrier.bytes) + " bytes that were not announced").c_str());
        return std::string(text);
    });
}

inline void bulk_load(u32 tile, const void* source, u32 bytes, u32 barrier) {
    if (!emulator::find_barrier(barrier).visible)
        emulator::fail("bulk_load names an mbarrier that the copy engine cannot see yet: fence_mbarrier_init is missing");
    emulator::start({true, static_cast<u8*>(const_cast<void*>(source)), tile, bytes, barrier}, "a bulk_load");
}

inline void bulk_store(void* destination, u32 tile, u32 bytes) {
    emulator::start({false, static_cast<u8*>(destination), tile, bytes, 0, emulator::current,
                     emulator::threads[emulator::current].groups}, "a bulk_store");
}

inline void bulk_commit() {
    for (auto& operation : emulator::operations)
        if (!operation.is_load && operation.thread == emulator::current) operation.committed = true;
    ++emulator::threads[emulator::current].groups;
}

template <int PENDING>
inline void bulk_wait_read() {
    const u32 thread = emulator::current, groups = emulator::threads[thread].groups;
    emulator::wait_until([=] {
        return std::none_of(emulator::operations.begin(), emulator::operations.end(), [=](auto& operation) {
            return !operation.is_load && operation.thread == thread && operation.committed && !operation.read &&
                   operation.group + PENDING < groups; });
    }, [] { return "for the copy engine to read the tiles of its stores"; });
}

inline void fence_proxy_async() {
    emulator::engine_view.assign(__start_emulated_shared, __stop_emulated_shared);
}
