// Copies by tensor map of tensors of one dimension; x counts elements. PTX ISA: "cp.async.bulk.tensor".
#pragma once
#include "tma.cuh"

__device__ __forceinline__ void tma_load_1d(u32 tile, const TensorMap& map, int x, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::"r"(
            tile),
        "l"(&map), "r"(barrier), "r"(x)
        : "memory");
}

__device__ __forceinline__ void tma_store_1d(const TensorMap& map, u32 tile, int x) {
    asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%2}], [%1];" ::"l"(&map), "r"(tile),
                 "r"(x)
                 : "memory");
}
