// The wrappers of tilelab/include/tma_1d.cuh, carried out by the emulator.
#pragma once
#include "tma.cuh"

inline void tma_load_1d(u32 tile, const TensorMap& map, int x, u32 barrier) {
    emulator::move_box(emulator::LOAD, &map, 1, &x, tile, barrier, -1, "tma_load_1d");
}
inline void tma_store_1d(const TensorMap& map, u32 tile, int x) {
    emulator::move_box(emulator::STORE, &map, 1, &x, tile, 0, -1, "tma_store_1d");
}
