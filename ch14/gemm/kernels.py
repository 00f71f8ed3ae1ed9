"""The Triton kernels of `ch14.gemm`: C (M, N) = A (M, K) B (K, N), with tiles that tensor descriptors move.

All three kernels compute a tile of C in the same way. A loop over K loads a tile of A and a tile of B by TMA into a
ring of buffers in shared memory, with `num_stages` buffers. `tl.dot` multiplies them into an accumulator in registers
(in tensor memory on sm_100a). Then the tile is scaled, converted, staged in shared memory and stored by TMA.

    A (M, K)              B (K, N)                  C (M, N)
    +------------+        +---+------+----+         +---+------+----+
    |            |        |   |######|    |         |   |      |    |
    |## -> K     |   x    |   |  |   |    |    =    |   | acc  |    |     ## is loaded in one step of K
    |            |        |   |  v K |    |         |   |      |    |
    +------------+        +---+------+----+         +---+------+----+

`gemm_plain_kernel` is the kernel of the field note: a program computes one tile and builds its descriptors itself.
`gemm_persistent_kernel` takes descriptors from the host, and each program computes many tiles, so that the loads of the
next tile run during the epilogue of this one. `gemm_split_kernel` is for a C of few tiles and a long K: several
programs share the steps of a tile, and the last one that is done adds up their parts. Source: Triton's persistent
matmul tutorial; CUTLASS's tile rasters.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    # GROUP_M rows of tiles sweep the columns together. The programs that run at the same time then share rows of A and
    # columns of B, which stay in L2. With GROUP_M = 2 and three columns the tile_ids are:
    #     0 2 4
    #     1 3 5
    #     6 8 10   the next group
    #     7 9 11
    tiles_per_group = GROUP_M * tiles_n
    first_m = (tile_id // tiles_per_group) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)  # the last group may have fewer rows
    return first_m + (tile_id % tiles_per_group) % group_m, (tile_id % tiles_per_group) // group_m


@triton.jit
def apply_scales(acc, scale_a_ptr, scale_b_ptr):
    if scale_a_ptr is not None:
        acc *= tl.load(scale_a_ptr)
    if scale_b_ptr is not None:
        acc *= tl.load(scale_b_ptr)
    return acc


@triton.jit
def split_columns(tile):
    # tl.split takes the last dimension apart: (rows, columns) -> (rows, 2, columns / 2) -> (rows, columns / 2, 2).
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def store_tile(c_desc, acc, m, n, EPILOGUE_SUBTILE: tl.constexpr):
    # Only one part of the tile is staged in shared memory at a time: two parts need half of the staging buffer, which
    # leaves room for one more stage of the ring.
    if EPILOGUE_SUBTILE == 1:
        c_desc.store([m, n], acc.to(c_desc.dtype))
    else:
        left, right = split_columns(acc)
        width: tl.constexpr = acc.shape[1] // 2
        if EPILOGUE_SUBTILE == 2:
            c_desc.store([m, n], left.to(c_desc.dtype))
            c_desc.store([m, n + width], right.to(c_desc.dtype))
        else:
            first, second = split_columns(left)
            third, fourth = split_columns(right)
            c_desc.store([m, n], first.to(c_desc.dtype))
            c_desc.store([m, n + width // 2], second.to(c_desc.dtype))
            c_desc.store([m, n + width], third.to(c_desc.dtype))
            c_desc.store([m, n + width + width // 2], fourth.to(c_desc.dtype))


@triton.jit
def load_b(b_desc, k, n, B_K_MAJOR: tl.constexpr):
    # B is stored as (N, K) rows (K-major, the usual weight) or as (K, N) rows.
    if B_K_MAJOR:
        tile = b_desc.load([n, k]).T
    else:
        tile = b_desc.load([k, n])
    return tile


@triton.jit
def gemm_plain_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    stride_a,
    stride_b,
    stride_c,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
):
    # To make a descriptor on the device, tensormap.replace edits it in shared memory; it is then copied to scratch in
    # global memory, and a fence makes it visible to TMA.
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    if B_K_MAJOR:
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
    else:
        b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N // EPILOGUE_SUBTILE])
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([m, k]), load_b(b_desc, k, n, B_K_MAJOR), acc)
    store_tile(c_desc, apply_scales(acc, scale_a_ptr, scale_b_ptr), m, n, EPILOGUE_SUBTILE)


@triton.jit
def gemm_persistent_kernel(
    a_desc,
    b_desc,
    b_extra_desc,
    c_desc,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    EXTRA_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    # The tile is BLOCK_M x (BLOCK_N + EXTRA_N). Triton's shapes are powers of two, so 192 columns are 128 + 64, and
    # 96 are 64 + 32.
    if PDL:
        # Programmatic dependent launch: this kernel starts while the previous one drains, waits here before its first
        # load, and lets the next kernel start early too.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N + EXTRA_N)
    steps = tl.cdiv(K, BLOCK_K)
    # `flatten` fuses both loops, so that the loads of the next tile run ahead of this tile's epilogue. Loads and
    # epilogue then need the tile_id at different times, and a second counter (tile_id_c) keeps the epilogue's copy out
    # of the pipelined one. With two accumulators ptxas would serialize every wgmma of the fused loop (its remark
    # C7515), at 0.6 of the speed, so these tiles are not flattened.
    tile_id_c = tl.program_id(0) - PROGRAMS
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=EXTRA_N == 0):
        tile_m, tile_n = tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M)
        n = tile_n * (BLOCK_N + EXTRA_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if EXTRA_N > 0:
            acc_extra = tl.zeros((BLOCK_M, EXTRA_N), tl.float32)
        for step in range(steps):
            a = a_desc.load([tile_m * BLOCK_M, step * BLOCK_K])
            acc = tl.dot(a, load_b(b_desc, step * BLOCK_K, n, B_K_MAJOR), acc)
            if EXTRA_N > 0:
                acc_extra = tl.dot(a, load_b(b_extra_desc, step * BLOCK_K, n + BLOCK_N, B_K_MAJOR), acc_extra)
        tile_id_c += PROGRAMS
        tile_m, tile_n = tile_coordinates(tile_id_c, tiles_m, tiles_n, GROUP_M)
        n = tile_n * (BLOCK_N + EXTRA_N)
        store_tile(c_desc, apply_scales(acc, scale_a_ptr, scale_b_ptr), tile_m * BLOCK_M, n, EPILOGUE_SUBTILE)
        if EXTRA_N > 0:
            # The extra columns are as wide as one part of the others, so c_desc serves both.
            store_tile(
                c_desc, apply_scales(acc_extra, scale_a_ptr, scale_b_ptr), tile_m * BLOCK_M, n + BLOCK_N, 1
            )


@triton.jit
def add_parts(acc, parts_ptr, arrivals_ptr, tile_id, split, SPLITS: tl.constexpr):
    # Each program leaves its part of the sum in global memory and counts itself. The one that counts last adds up all
    # parts, in their order, so that the result does not depend on who is last.
    rows: tl.constexpr = acc.shape[0]
    columns: tl.constexpr = acc.shape[1]
    at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    parts_ptr += tile_id.to(tl.int64) * (SPLITS * rows * columns)
    tl.store(parts_ptr + split * (rows * columns) + at, acc)
    tl.debug_barrier()  # all threads have stored their part
    is_last = tl.atomic_add(arrivals_ptr + tile_id, 1) == SPLITS - 1
    if is_last:
        acc = tl.zeros((rows, columns), tl.float32)
        for other in range(SPLITS):
            acc += tl.load(parts_ptr + other * (rows * columns) + at, cache_modifier=".cg")  # from L2
        tl.store(arrivals_ptr + tile_id, 0)  # for the next launch
    return acc, is_last


@triton.jit
def gemm_split_kernel(
    a_desc,
    b_desc,
    c_desc,
    parts_ptr,
    arrivals_ptr,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile_id, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    tile_m, tile_n = tile_coordinates(tile_id, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    steps = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps * split // SPLITS, steps * (split + 1) // SPLITS):
        a = a_desc.load([m, step * BLOCK_K])
        acc = tl.dot(a, load_b(b_desc, step * BLOCK_K, n, B_K_MAJOR), acc)
    acc, is_last = add_parts(acc, parts_ptr, arrivals_ptr, tile_id, split, SPLITS)
    if is_last:
        store_tile(c_desc, apply_scales(acc, scale_a_ptr, scale_b_ptr), m, n, EPILOGUE_SUBTILE)
