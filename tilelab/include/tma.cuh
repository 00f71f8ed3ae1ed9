// PTX of chapter 10, wrapped once: copies by tensor map, clusters, warp groups and their products. PTX ISA:
// "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", "mapa", "wgmma", "setmaxnreg", "griddepcontrol".
#pragma once
#include "ptx.cuh"

// What the driver fills in: opaque, passed by value as a __grid_constant__ parameter, never copied.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// ---- copies by tensor map: one thread starts one; x is the coordinate of the innermost dimension, in elements

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tensor_load(u32 tile, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(tile), "l"(&map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// The box lands at the same offset in every CTA of the cluster whose bit is set, and signals the barrier there.
__device__ __forceinline__ void tensor_load_multicast(u32 tile, const TensorMap& map, int x, int y, u32 barrier,
                                                      unsigned short ctas) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(tile), "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(ctas) : "memory");
}

// Writes what lies inside the tensor; shared memory may be reused after bulk_commit and bulk_wait_read.
__device__ __forceinline__ void tensor_store(const TensorMap& map, u32 tile, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(tile), "r"(x), "r"(y) : "memory");
}

// Adds to what lies there, in the L2 cache.
__device__ __forceinline__ void tensor_add(const TensorMap& map, u32 tile, int x, int y) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(tile), "r"(x), "r"(y) : "memory");
}

// Where the byte `offset` of a box lies under a swizzle of `bytes` (32, 64 or 128; 16 is none): the unit of 16 bytes is
// XORed with bits of the number of the 128-byte line. The box starts at a multiple of 1,024.
__device__ __forceinline__ u32 swizzled(u32 offset, u32 bytes) {
    return offset ^ ((offset >> 7 & (bytes / 16 - 1)) << 4);
}

// ---- clusters: neighbouring CTAs that run together and reach each other's shared memory

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same address in the shared memory of CTA `rank`.
__device__ __forceinline__ u32 shared_of(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// For a stage that has been read: nothing was written that the other CTA must see, so no scope wider than the CTA's is
// named; `.release.cluster` would cost a fence of the whole GPU each time.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(shared_of(barrier, rank)) : "memory");
}

__device__ __forceinline__ float4 load_shared_of(u32 address, u32 rank) {
    float4 value;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(shared_of(address, rank)) : "memory");
    return value;
}

// ---- warp groups: four warps, of which the first has a number divisible by four

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Barrier `name` (1 to 15; 0 is __syncthreads) for `threads` threads.
__device__ __forceinline__ void group_sync(u32 name, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Registers and shared memory that the next product reads are ready.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING groups of products are still under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// How a product finds a tile of 64-element (128-byte) rows: the address and the 1,024 bytes from one group of eight rows
// to the next, both in units of 16; bit 62 says that the swizzle is of 128 bytes, for which the field at bit 16 means
// nothing and is 1. PTX ISA, "Matrix descriptor".
__device__ __forceinline__ u64 wgmma_descriptor(u32 address) {
    return (1ull << 62) | (static_cast<u64>(1024 >> 4) << 32) | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}

// Stores four 8 x 8 matrices of two-byte elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_matrices_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Two floats, rounded to bf16: `low` in the low half.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// ---- kernels that follow each other in a stream

// Returns when the kernel before this one has finished and its writes are visible: at once where none overlaps.
__device__ __forceinline__ void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Once every CTA of this kernel has said so, or has ended, CTAs of the next kernel start where there is room, if it was
// launched to do so (programmatic dependent launch).
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- time

__device__ __forceinline__ u64 clock_cycles() {
    u64 now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}
