// Wrappers of single PTX instructions: copies by tensor map, clusters, warp groups, dependent launches. PTX ISA:
// "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "mapa", "wgmma", "setmaxnreg", "griddepcontrol".
#pragma once
#include "ptx.cuh"

// The driver encodes a tensor map. A kernel takes it by value as a __grid_constant__ parameter, which stays in constant
// memory, and never copies it: a copy would lie in local memory, where the copy engine cannot read it.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---- copies by tensor map: one thread starts each; x is the innermost coordinate, in elements

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(u32 tile, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(tile),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(u32 tile, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(tile),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The box lands at the same offset in each CTA of the cluster whose bit in `ctas` is set, and signals its barrier.
__device__ __forceinline__ void tma_load_2d_multicast(u32 tile, const TensorMap& map, int x, int y, u32 barrier,
                                                      unsigned short ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(tile),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(ctas)
        : "memory");
}

// The part of the box that lies inside the tensor is written. The tile may be reused after bulk_commit and
// bulk_wait_read.
__device__ __forceinline__ void tma_store_2d(const TensorMap& map, u32 tile, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
                 "r"(tile), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap& map, u32 tile, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(tile), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// Add the tile to the tensor; L2 does the additions.
__device__ __forceinline__ void tma_reduce_add_2d(const TensorMap& map, u32 tile, int x, int y) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(tile), "r"(x), "r"(y)
        : "memory");
}

// Return where byte `offset` of a box lies under a swizzle of `bytes` (32, 64 or 128; 16 is none). The box starts at a
// multiple of 1,024. The number of the 128-byte line is XORed into the number of the 16-byte unit:
//
//     offset bits   9 8 7 | 6 5 4 | 3 2 1 0
//                   line    unit    byte        128: unit ^= line; 64: the two low bits; 32: the lowest bit
__device__ __forceinline__ u32 swizzle_offset(u32 offset, u32 bytes) {
    return offset ^ ((offset >> 7 & (bytes / 16 - 1)) << 4);
}

// ---- clusters: neighbouring CTAs that run at the same time and can address each other's shared memory

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A release: the compiler puts a fence of the whole GPU before it. In a loop, mbarrier_arrive_cluster costs less.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Return the cluster-wide address of the same variable in the shared memory of CTA `rank`.
__device__ __forceinline__ u32 map_shared_rank(u32 address, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Release a stage that was only read. Nothing was written that another CTA must see, so the default scope (the CTA) is
// enough; `.release.cluster` would add a fence of the whole GPU to each arrival.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_shared_rank(barrier, rank)) : "memory");
}

__device__ __forceinline__ float4 load_shared_cluster(u32 address, u32 rank) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(map_shared_rank(address, rank))
                 : "memory");
    return value;
}

// ---- warp groups: four consecutive warps; the number of the first warp is a multiple of four

template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Synchronise `threads` threads at barrier `name`, 1 to 15; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier_sync(u32 name, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Order earlier accesses to the registers of wgmma before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING committed groups of wgmma are still running.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Return the matrix descriptor of a tile with rows of 128 bytes and a swizzle of 128 bytes (PTX ISA, "Matrix
// descriptor"):
//
//     bits  0-13   address / 16
//     bits 16-29   leading dimension offset, unused with this swizzle: 1
//     bits 32-45   stride from one group of eight rows to the next / 16: 1,024 / 16
//     bits 62-63   swizzle mode: 1 is 128 bytes
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    return (1ull << 62) | (static_cast<u64>(1024 >> 4) << 32) | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}

// Store four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8; its registers
// hold elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix. With .trans rows and columns change places.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Round two floats to bf16; `low` takes the low 16 bits.
__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- dependent launches: kernels that follow each other in a stream

// Wait until the previous kernel has finished and its writes are visible. Returns at once if the two do not overlap.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Allow the next kernel to start, if it was launched with programmatic dependent launch: its CTAs start where there is
// room, once each CTA of this kernel has executed this instruction or has ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
