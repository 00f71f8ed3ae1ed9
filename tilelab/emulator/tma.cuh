// The wrappers of tilelab/include/tma.cuh, carried out by the emulator.
#pragma once
#include "ptx.cuh"
#include "plain_tma.cuh"

inline void prefetch_tensormap(const TensorMap&) {}

inline void tma_load_2d(u32 tile, const TensorMap& map, int x, int y, u32 barrier) {
    const int corner[] = {x, y};
    emulator::move_box(emulator::LOAD, &map, 2, corner, tile, barrier, -1, "tma_load_2d");
}
inline void tma_load_3d(u32 tile, const TensorMap& map, int x, int y, int z, u32 barrier) {
    const int corner[] = {x, y, z};
    emulator::move_box(emulator::LOAD, &map, 3, corner, tile, barrier, -1, "tma_load_3d");
}
inline void tma_load_2d_multicast(u32 tile, const TensorMap& map, int x, int y, u32 barrier, unsigned short ctas) {
    const int corner[] = {x, y};
    emulator::move_box(emulator::LOAD, &map, 2, corner, tile, barrier, ctas, "tma_load_2d_multicast");
}
inline void tma_store_2d(const TensorMap& map, u32 tile, int x, int y) {
    const int corner[] = {x, y};
    emulator::move_box(emulator::STORE, &map, 2, corner, tile, 0, -1, "tma_store_2d");
}
inline void tma_store_3d(const TensorMap& map, u32 tile, int x, int y, int z) {
    const int corner[] = {x, y, z};
    emulator::move_box(emulator::STORE, &map, 3, corner, tile, 0, -1, "tma_store_3d");
}
inline void tma_reduce_add_2d(const TensorMap& map, u32 tile, int x, int y) {
    const int corner[] = {x, y};
    emulator::move_box(emulator::ADD, &map, 2, corner, tile, 0, -1, "tma_reduce_add_2d");
}

inline u32 cluster_rank() { return emulator::rank_in_cluster(); }
// The wrappers are stricter than instructions in inline PTX: kernels often leave to the compiler that lanes meet again.
inline void cluster_arrive() {
    emulator::require_together("cluster_arrive()");
    emulator::arrive_at_cluster();
}
inline void cluster_wait() {
    emulator::require_together("cluster_wait()");
    emulator::wait_for_cluster();
}
inline u32 map_shared_rank(u32 address, u32 rank) { return emulator::cluster_address(address, rank); }
inline void mbarrier_arrive_cluster(u32 barrier, u32 rank) { emulator::arrive(map_shared_rank(barrier, rank), 0); }
inline float4 load_shared_cluster(u32 address, u32 rank) {
    float4 value;
    memcpy(&value, emulator::find_shared(map_shared_rank(address, rank), 16, "load_shared_cluster"), 16);
    return value;
}

template <int REGISTERS>
void warpgroup_reg_dealloc() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "setmaxnreg takes 24, 32, ... or 256");
}
template <int REGISTERS>
void warpgroup_reg_alloc() {
    warpgroup_reg_dealloc<REGISTERS>();
}
inline void named_barrier_sync(u32 name, u32 threads) {
    emulator::block_barrier(name, threads, "in named_barrier_sync()");
}

inline void wgmma_fence() { emulator::fence_products(); }
inline void wgmma_commit() { emulator::commit_products(); }
template <int PENDING>
void wgmma_wait() {
    emulator::wait_for_products(PENDING);
}

inline void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    emulator::store_matrices(address, {a, b, c, d}, false);
}
inline void stmatrix_x2_trans(u32 address, u32 a, u32 b) { emulator::store_matrices(address, {a, b}, true); }
inline void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
    emulator::store_matrices(address, {a, b, c, d}, true);
}
inline u32 pack_bf16x2(float low, float high) { return emulator::bf16_bits(low) | emulator::bf16_bits(high) << 16; }

// Kernels run one after the other here.
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
