// What g++ calls for each load and store of a cell (-fsanitize=thread), and where its own checks find a fault
// (-fsanitize=alignment,bounds,integer-divide-by-zero). engine.cpp includes this file.

using emulator::access;
using emulator::access_in_order;
using emulator::fail;
using emulator::touch_signal;

#define CALLER __builtin_frame_address(0)
#define HOOK extern "C" void

template <u32 BYTES>
static inline void check_aligned(const void* at, const char* verb) {
    if (reinterpret_cast<u64>(at) % BYTES)
        fail("%s %u bytes at once at ...%03llx, which is no multiple of %u: on a GPU this is a misaligned address",
             verb, BYTES, reinterpret_cast<u64>(at) & 0xfff, BYTES);
}

#define ACCESSES(BYTES)                                                                                             \
    HOOK __tsan_read##BYTES(void* at) {                                                                             \
        check_aligned<BYTES>(at, "reads");                                                                          \
        if (!access_in_order<BYTES, false>(reinterpret_cast<u64>(at), CALLER))                                      \
            access(reinterpret_cast<u64>(at), BYTES, false, false, CALLER);                                         \
    }                                                                                                               \
    HOOK __tsan_write##BYTES(void* at) {                                                                            \
        check_aligned<BYTES>(at, "writes");                                                                         \
        if (!access_in_order<BYTES, true>(reinterpret_cast<u64>(at), CALLER))                                       \
            access(reinterpret_cast<u64>(at), BYTES, true, false, CALLER);                                          \
    }                                                                                                               \
    HOOK __tsan_unaligned_read##BYTES(void* at) { access(reinterpret_cast<u64>(at), BYTES, false, false, CALLER); } \
    HOOK __tsan_unaligned_write##BYTES(void* at) { access(reinterpret_cast<u64>(at), BYTES, true, false, CALLER); } \
    HOOK __tsan_volatile_read##BYTES(void* at) {                                                                    \
        touch_signal(reinterpret_cast<u64>(at), BYTES, true, false, CALLER, false);                                 \
    }                                                                                                               \
    HOOK __tsan_volatile_write##BYTES(void* at) {                                                                   \
        touch_signal(reinterpret_cast<u64>(at), BYTES, false, true, CALLER);                                        \
    }                                                                                                               \
    HOOK __tsan_unaligned_volatile_read##BYTES(void* at) {                                                          \
        touch_signal(reinterpret_cast<u64>(at), BYTES, true, false, CALLER, false);                                 \
    }                                                                                                               \
    HOOK __tsan_unaligned_volatile_write##BYTES(void* at) {                                                         \
        touch_signal(reinterpret_cast<u64>(at), BYTES, false, true, CALLER);                                        \
    }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

HOOK __tsan_read_range(void* at, unsigned long bytes) {
    access(reinterpret_cast<u64>(at), bytes, false, false, CALLER);
}
HOOK __tsan_write_range(void* at, unsigned long bytes) {
    access(reinterpret_cast<u64>(at), bytes, true, false, CALLER);
}
HOOK __tsan_init() {}
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_vptr_update(void*, void*) {}
HOOK __tsan_vptr_read(void*) {}

// The builtins __atomic_…, which cuda::atomic and the like may use. Orders from release on count as fences.
#define ATOMICS(BITS, TYPE)                                                                                     \
    extern "C" TYPE __tsan_atomic##BITS##_load(const volatile TYPE* at, int order) {                            \
        if (order > 2) emulator::fence_memory();                                                                \
        touch_signal(reinterpret_cast<u64>(at), BITS / 8, true, false, CALLER, order > 0);                      \
        return *at;                                                                                             \
    }                                                                                                           \
    HOOK __tsan_atomic##BITS##_store(volatile TYPE* at, TYPE value, int order) {                                \
        if (order > 2) emulator::fence_memory();                                                                \
        touch_signal(reinterpret_cast<u64>(at), BITS / 8, false, true, CALLER);                                 \
        *at = value;                                                                                            \
    }                                                                                                           \
    CHANGE(BITS, TYPE, exchange, value)                                                                         \
    CHANGE(BITS, TYPE, fetch_add, old + value)                                                                  \
    CHANGE(BITS, TYPE, fetch_sub, old - value)                                                                  \
    CHANGE(BITS, TYPE, fetch_and, old& value)                                                                   \
    CHANGE(BITS, TYPE, fetch_or, old | value)                                                                   \
    CHANGE(BITS, TYPE, fetch_xor, old ^ value)                                                                  \
    CHANGE(BITS, TYPE, fetch_nand, ~(old & value))                                                              \
    extern "C" int __tsan_atomic##BITS##_compare_exchange_strong(volatile TYPE* at, TYPE* expected, TYPE value, \
                                                                 int order, int) {                              \
        emulator::begin_atomic(const_cast<TYPE*>(at), BITS / 8, order > 2);                                     \
        const TYPE old = *at;                                                                                   \
        if (old == *expected) return *at = value, 1;                                                            \
        return *expected = old, 0;                                                                              \
    }                                                                                                           \
    extern "C" int __tsan_atomic##BITS##_compare_exchange_weak(volatile TYPE* at, TYPE* expected, TYPE value,   \
                                                               int order, int failed) {                         \
        return __tsan_atomic##BITS##_compare_exchange_strong(at, expected, value, order, failed);               \
    }
#define CHANGE(BITS, TYPE, NAME, VALUE)                                                      \
    extern "C" TYPE __tsan_atomic##BITS##_##NAME(volatile TYPE* at, TYPE value, int order) { \
        emulator::begin_atomic(const_cast<TYPE*>(at), BITS / 8, order > 2);                  \
        const TYPE old = *at;                                                                \
        *at = VALUE;                                                                         \
        return old;                                                                          \
    }
ATOMICS(8, u8)
ATOMICS(16, unsigned short)
ATOMICS(32, u32)
ATOMICS(64, u64)
HOOK __tsan_atomic_thread_fence(int) { emulator::fence_memory(); }
HOOK __tsan_atomic_signal_fence(int) {}

// ---- checks of g++

struct Type {
    unsigned short kind, info;
    char name[1];
};
struct Checked {  // what the three kinds have in common: the place in the source, and a type
    const char* file;
    u32 line, column;
    const Type* type;
};

// `tile[0][i]` may go on in the next rows, as kernels do that take a tile for one array. g++ names the array that an index
// belongs to, 'float [8]' here. Where the cell has arrays of more dimensions, this may be a row; then object-size, which
// checks whole variables, has the last word.
extern "C" u32 most_dimensions;
u32 most_dimensions;
HOOK __ubsan_handle_out_of_bounds(const Checked* checked, u64 index) {
    const char* name = checked->type->name;
    if (std::count(name, name + strlen(name), '[') >= most_dimensions)
        fail("index %lld is out of the bounds of %s", index, name);
}
HOOK __ubsan_handle_divrem_overflow_abort(const Checked*, u64, u64) { fail("divides an integer by zero"); }

struct Mismatch : Checked {
    u8 log_alignment, kind;
};
HOOK __ubsan_handle_type_mismatch_v1_abort(const Mismatch* checked, u64 address) {
    if (address < 4096) fail("uses a null pointer to %s", checked->type->name);
    if (address % (1u << checked->log_alignment) == 0)
        fail("uses %s behind the end of its array: an index is out of the bounds", checked->type->name);
    fail("uses %s at address ...%03llx, which is no multiple of %u: on a GPU this is a misaligned address",
         checked->type->name, address & 0xfff, 1u << checked->log_alignment);
}
