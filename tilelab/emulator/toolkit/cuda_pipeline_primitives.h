// Asynchronous copies of 4, 8 or 16 bytes, and barriers in shared memory, as functions of C.
#pragma once

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
    if (bytes != 4 && bytes != 8 && bytes != 16)
        emulator::fail("__pipeline_memcpy_async() copies 4, 8 or 16 bytes, not %u", u32(bytes));
    emulator::copy_async(emulator::address_of(to), from, u32(bytes), u32(bytes - zeros));
}
inline void __pipeline_commit() { emulator::commit_copies(); }
inline void __pipeline_wait_prior(size_t pending) { emulator::wait_for_copies(u32(pending)); }
