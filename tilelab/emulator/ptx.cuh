// The wrappers of tilelab/include/ptx.cuh, carried out by the emulator.
#pragma once
#include "emulator.h"

inline u32 shared_address(const void* pointer) { return emulator::address_of(pointer); }

inline void mbarrier_init(u32 barrier, u32 arrivals) { emulator::init_barrier(barrier, arrivals, true); }
inline void fence_mbarrier_init() { emulator::fence_barriers(); }
inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) { emulator::arrive(barrier, bytes); }
inline void mbarrier_arrive(u32 barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_wait(u32 barrier, u32 phase) { emulator::wait_for_phase(barrier, phase); }

inline void bulk_load(u32 tile, const void* source, u32 bytes, u32 barrier) {
    emulator::move_bytes(emulator::LOAD, const_cast<void*>(source), tile, bytes, barrier, "a bulk_load");
}
inline void bulk_store(void* destination, u32 tile, u32 bytes) {
    emulator::move_bytes(emulator::STORE, destination, tile, bytes, 0, "a bulk_store");
}
inline void bulk_commit() { emulator::commit_stores(); }
template <int PENDING>
void bulk_wait_read() {
    emulator::wait_for_reads(PENDING);
}
inline void fence_proxy_async() { emulator::fence_views(true, false); }

inline void cp_async_16(u32 tile, const void* source) { emulator::copy_async(tile, source, 16, 16); }
inline void cp_async_commit() { emulator::commit_copies(); }
template <int PENDING>
void cp_async_wait() {
    emulator::wait_for_copies(PENDING);
}
