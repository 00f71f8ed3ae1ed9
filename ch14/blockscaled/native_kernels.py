"""Kernels of ch14.blockscaled.native: products by tl.dot_scaled, from tiles that TMA moves and from pointers.

Sources: PTX ISA, "tcgen05.mma: block scaling"; Triton's block-scaled matmul tutorial (a descriptor of tiles of scales).
"""

import triton
import triton.language as tl

from ch14.gemm import scaled, store_tile, tile_at


@triton.jit
def load_scales(desc, row, group, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    # A tile is 512 bytes, in the order (row % 32, row // 32, group). On sm_100a the compiler sees through the
    # permutation: no thread moves a byte, tcgen05.cp takes the tile from shared to tensor memory as it lies.
    tiles = desc.load([row // 128, group // 4, 0, 0]).reshape(ROWS // 128, GROUPS // 4, 32, 4, 4)
    return tiles.trans(0, 3, 2, 1, 4).reshape(ROWS, GROUPS)


@triton.jit
def native_kernel(a_desc, a_scale_desc, b_desc, b_scale_desc, c_desc, a_tensor_ptr, b_tensor_ptr, M, N, row,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
                  PACKED: tl.constexpr, GROUP: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
                  FUSED: tl.constexpr, PROGRAMS: tl.constexpr):
    # A row of A or B has `row` bytes of PACKED elements; GROUP elements share a scale. What lies past an edge is zero:
    # elements because TMA fills with zeros, so that the scales beside them do not count.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(row, BLOCK_K // PACKED)
    # Fused, the loops load and multiply for the next tile while this one is stored: into a second accumulator. `stored`
    # is the tile of the epilogue, which then lags behind.
    stored = tl.program_id(0) - PROGRAMS
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FUSED):
        tile_m, tile_n = tile_at(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            group = step * (BLOCK_K // GROUP)
            a = a_desc.load([tile_m * BLOCK_M, step * (BLOCK_K // PACKED)])
            b = b_desc.load([tile_n * BLOCK_N, step * (BLOCK_K // PACKED)])
            a_scale = load_scales(a_scale_desc, tile_m * BLOCK_M, group, BLOCK_M, BLOCK_K // GROUP)
            b_scale = load_scales(b_scale_desc, tile_n * BLOCK_N, group, BLOCK_N, BLOCK_K // GROUP)
            acc = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, FORMAT, acc)
        stored += PROGRAMS
        tile_m, tile_n = tile_at(stored, tiles_m, tiles_n, GROUP_M)
        store_tile(c_desc, scaled(acc, a_tensor_ptr, b_tensor_ptr), tile_m * BLOCK_M, tile_n * BLOCK_N, PARTS)


@triton.jit
def naive_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, a_tensor_ptr, b_tensor_ptr, M, N, row, groups,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
                 PACKED: tl.constexpr, GROUP: tl.constexpr, GROUP_M: tl.constexpr, WHOLE: tl.constexpr):
    # Bytes, all of them: `row` of elements and `groups` of scales a row. WHOLE: steps of BLOCK_K divide K.
    tile_m, tile_n = tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = (m % M).to(tl.int64)  # rows past the edge read others and are not stored: no mask in the loop
    in_n = (n % N).to(tl.int64)
    byte = tl.arange(0, BLOCK_K // PACKED)
    group = tl.arange(0, BLOCK_K // GROUP)
    a_at = a_ptr + in_m[:, None] * row + byte[None, :]
    b_at = b_ptr + in_n[None, :] * row + byte[:, None]
    a_scale_at = a_scale_ptr + in_m[:, None] * groups + group[None, :]
    b_scale_at = b_scale_ptr + in_n[:, None] * groups + group[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(row, BLOCK_K // PACKED)):
        if WHOLE:
            a = tl.load(a_at)
            b = tl.load(b_at)
            a_scale = tl.load(a_scale_at)
            b_scale = tl.load(b_scale_at)
        else:
            there = byte < row - step * (BLOCK_K // PACKED)
            scaled_there = group < groups - step * (BLOCK_K // GROUP)
            a = tl.load(a_at, there[None, :], 0)
            b = tl.load(b_at, there[:, None], 0)
            a_scale = tl.load(a_scale_at, scaled_there[None, :], 0)
            b_scale = tl.load(b_scale_at, scaled_there[None, :], 0)
        if GROUP == 16:  # NVFP4's scales are e4m3; bytes are taken for e8m0
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, a_scale, FORMAT, b, b_scale, FORMAT, acc)
        a_at += BLOCK_K // PACKED
        b_at += BLOCK_K // PACKED
        a_scale_at += BLOCK_K // GROUP
        b_scale_at += BLOCK_K // GROUP
    acc = scaled(acc, a_tensor_ptr, b_tensor_ptr)
    c_at = c_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(c_at, acc.to(c_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
