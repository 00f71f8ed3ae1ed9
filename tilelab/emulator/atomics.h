// Atomic functions. A thread runs until it waits, so each is one step of the emulator.
#ifndef TILELAB_EMULATOR_ATOMICS_H
#define TILELAB_EMULATOR_ATOMICS_H

namespace emulator {

template <typename T>
struct Same {
    typedef T type;
};
template <typename T, typename Change>
UNCHECKED T update(T* address, Change change, bool in_block = false) {
    begin_atomic(address, sizeof(T), false, in_block);
    const T old = *address;
    *address = change(old);
    return old;
}

}  // namespace emulator

#define ATOMIC_IN_SCOPE(NAME, EXPRESSION, IN_BLOCK)                                       \
    template <typename T>                                                                 \
    T NAME(T* address, typename emulator::Same<T>::type value) {                          \
        return emulator::update(address, [&](T old) { return T(EXPRESSION); }, IN_BLOCK); \
    }
#define ATOMIC(NAME, EXPRESSION)                    \
    ATOMIC_IN_SCOPE(NAME, EXPRESSION, false)        \
    ATOMIC_IN_SCOPE(NAME##_block, EXPRESSION, true) \
    ATOMIC_IN_SCOPE(NAME##_system, EXPRESSION, false)
ATOMIC(atomicExch, value)
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicSub, old - value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicAnd, old& value)
ATOMIC(atomicOr, old | value)
ATOMIC(atomicXor, old ^ value)
ATOMIC(atomicInc, old >= value ? 0 : old + 1)
ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef ATOMIC
#undef ATOMIC_IN_SCOPE

#define ATOMIC_CAS(NAME, IN_BLOCK)                                                                          \
    template <typename T>                                                                                   \
    T NAME(T* address, typename emulator::Same<T>::type expected, typename emulator::Same<T>::type value) { \
        return emulator::update(                                                                            \
            address, [&](T old) { return memcmp(&old, &expected, sizeof(T)) ? old : value; }, IN_BLOCK);    \
    }
ATOMIC_CAS(atomicCAS, false)
ATOMIC_CAS(atomicCAS_block, true)
ATOMIC_CAS(atomicCAS_system, false)
#undef ATOMIC_CAS

#define ADD_VECTOR(T, EXPRESSION)                                                 \
    inline T atomicAdd(T* address, T value) {                                     \
        return emulator::update(address, [&](T old) -> T { return EXPRESSION; }); \
    }
ADD_VECTOR(float2, (float2{old.x + value.x, old.y + value.y}))
ADD_VECTOR(float4, (float4{old.x + value.x, old.y + value.y, old.z + value.z, old.w + value.w}))
#undef ADD_VECTOR

#endif  // TILELAB_EMULATOR_ATOMICS_H
