"""Kernels of `native`: products by tl.dot_scaled, from tiles that TMA moves (`native_kernel`) and from pointers.

In both, a program loads tiles of A and B with their scales, and tl.dot_scaled multiplies and adds them. After the last
step of K the program applies NVFP4's tensor scales and stores the tile of C. `native_kernel` is persistent: each
program computes many tiles. `naive_kernel` computes one. `factors_kernel` prepares the tensor scales for the GEMM of
`emulated`. Sources: PTX ISA, "tcgen05.mma: block scaling", and Triton's tutorial of block-scaled matmul, for the
descriptor of scales.
"""

import triton
import triton.language as tl

from ch14.gemm.kernels import store_tile, tile_coordinates


@triton.jit
def order_factors(a_tensor_ptr, b_tensor_ptr):
    # Return two factors with the product of both tensor scales. A sum times a scale of 2^100 may overflow although the
    # other scale, 2^-100, would bring it back. So a scale below 1 and one above it are multiplied first, which gives a
    # number between them. If both are on one side of 1, each of them moves the sum towards the result.
    a = tl.load(a_tensor_ptr)
    b = tl.load(b_tensor_ptr)
    opposite = (a < 1) != (b < 1)
    return tl.where(opposite, a * b, a), tl.where(opposite, 1.0, b)


@triton.jit
def factors_kernel(a_tensor_ptr, b_tensor_ptr, first_ptr, second_ptr):
    first, second = order_factors(a_tensor_ptr, b_tensor_ptr)
    tl.store(first_ptr, first)
    tl.store(second_ptr, second)


@triton.jit
def apply_tensor_scales(acc, a_tensor_ptr, b_tensor_ptr):
    if a_tensor_ptr is not None:  # both operands have one format, so both or neither have a tensor scale
        first, second = order_factors(a_tensor_ptr, b_tensor_ptr)
        acc = acc * first * second
    return acc


@triton.jit
def load_scales(desc, row, group, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    # Load ROWS x GROUPS scales from tiles of 128 x 4. In memory a tile is 512 bytes in this order:
    #
    #     byte       0     1     2     3     4    ...  15     16   ...
    #     row        0     0     0     0    32    ...  96      1   ...
    #     group      0     1     2     3     0    ...   3      0   ...
    #
    # On sm_100a the compiler recognises the permutation. Then tcgen05.cp copies a tile from shared to tensor memory,
    # and no thread moves a byte.
    tiles = desc.load([row // 128, group // 4, 0, 0]).reshape(ROWS // 128, GROUPS // 4, 32, 4, 4)
    return tiles.trans(0, 3, 2, 1, 4).reshape(ROWS, GROUPS)


@triton.jit
def native_kernel(
    a_desc,
    a_scale_desc,
    b_desc,
    b_scale_desc,
    c_desc,
    a_tensor_ptr,
    b_tensor_ptr,
    M,
    N,
    row_bytes,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    FUSED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    # A row of A or B has `row_bytes` bytes of PACKED elements, and GROUP elements share a scale. TMA fills the part
    # past an edge with zeros, so the scales beside them do not matter.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(row_bytes, BLOCK_K // PACKED)
    # In fused loops, the loads and products of the next tile run while this one is stored, so they need a second
    # accumulator, and `tile_id_c`, the tile of the epilogue, lags behind `tile_id`.
    tile_id_c = tl.program_id(0) - PROGRAMS
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FUSED):
        tile_m, tile_n = tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            group = step * (BLOCK_K // GROUP)
            a = a_desc.load([tile_m * BLOCK_M, step * (BLOCK_K // PACKED)])
            b = b_desc.load([tile_n * BLOCK_N, step * (BLOCK_K // PACKED)])
            a_scale = load_scales(a_scale_desc, tile_m * BLOCK_M, group, BLOCK_M, BLOCK_K // GROUP)
            b_scale = load_scales(b_scale_desc, tile_n * BLOCK_N, group, BLOCK_N, BLOCK_K // GROUP)
            acc = tl.dot_scaled(a, a_scale, FORMAT, b.T, b_scale, FORMAT, acc)
        tile_id_c += PROGRAMS
        tile_m, tile_n = tile_coordinates(tile_id_c, tiles_m, tiles_n, GROUP_M)
        acc = apply_tensor_scales(acc, a_tensor_ptr, b_tensor_ptr)
        store_tile(c_desc, acc, tile_m * BLOCK_M, tile_n * BLOCK_N, EPILOGUE_SUBTILE)


@triton.jit
def naive_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    c_ptr,
    a_tensor_ptr,
    b_tensor_ptr,
    M,
    N,
    row_bytes,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_M: tl.constexpr,
    WHOLE: tl.constexpr,
):
    # All operands are bytes: a row has `row_bytes` of elements and `groups` scales. WHOLE: BLOCK_K divides K.
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the edge wrap around and are not stored, so the loop needs no mask.
    in_m = (m % M).to(tl.int64)
    in_n = (n % N).to(tl.int64)
    byte = tl.arange(0, BLOCK_K // PACKED)
    group = tl.arange(0, BLOCK_K // GROUP)
    a_ptrs = a_ptr + in_m[:, None] * row_bytes + byte[None, :]
    b_ptrs = b_ptr + in_n[None, :] * row_bytes + byte[:, None]
    a_scale_ptrs = a_scale_ptr + in_m[:, None] * groups + group[None, :]
    b_scale_ptrs = b_scale_ptr + in_n[:, None] * groups + group[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(row_bytes, BLOCK_K // PACKED)):
        if WHOLE:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
            a_scale = tl.load(a_scale_ptrs)
            b_scale = tl.load(b_scale_ptrs)
        else:
            byte_mask = byte < row_bytes - step * (BLOCK_K // PACKED)
            group_mask = group < groups - step * (BLOCK_K // GROUP)
            a = tl.load(a_ptrs, byte_mask[None, :], 0)
            b = tl.load(b_ptrs, byte_mask[:, None], 0)
            a_scale = tl.load(a_scale_ptrs, group_mask[None, :], 0)
            b_scale = tl.load(b_scale_ptrs, group_mask[None, :], 0)
        if GROUP == 16:  # NVFP4's scales are e4m3; tl.dot_scaled takes bytes for e8m0
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, a_scale, FORMAT, b, b_scale, FORMAT, acc)
        a_ptrs += BLOCK_K // PACKED
        b_ptrs += BLOCK_K // PACKED
        a_scale_ptrs += BLOCK_K // GROUP
        b_scale_ptrs += BLOCK_K // GROUP
    acc = apply_tensor_scales(acc, a_tensor_ptr, b_tensor_ptr)
    c_ptrs = c_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
