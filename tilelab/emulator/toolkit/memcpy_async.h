// cuda::memcpy_async of a thread or of a group, for the emulator: cp.async where it can be, else a plain copy.
#pragma once
#include <type_traits>

namespace cuda {
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
template <size_t ALIGNMENT>
struct aligned_size_t {
    static constexpr size_t align = ALIGNMENT;
    size_t value;
    explicit constexpr aligned_size_t(size_t value) : value(value) {}
    constexpr operator size_t() const { return value; }
};
}  // namespace cuda

namespace emulator {
inline void copy_to_shared(void* to, const void* from, size_t bytes) {
    const u64 both = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes;
    const u32 unit = both % 4 || !is_shared(to) || is_shared(from) ? 1 : both % 8 ? 4 : both % 16 ? 8 : 16;
    if (unit == 1) memcpy(to, from, bytes);
    else
        for (size_t i = 0; i < bytes; i += unit)
            copy_async(address_of(static_cast<char*>(to) + i), static_cast<const char*>(from) + i, unit, unit);
}
template <typename Group>
void copy_to_shared(const Group& group, void* to, const void* from, size_t bytes) {  // each thread takes its share
    const u64 both = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes;
    const size_t unit = both % 16 ? both % 4 ? 1 : 4 : 16;
    for (size_t i = group.thread_rank() * unit; i < bytes; i += group.size() * unit)
        copy_to_shared(static_cast<char*>(to) + i, static_cast<const char*>(from) + i, unit);
}
}  // namespace emulator
