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
programs share the steps of a tile, and the last one that is done adds up their parts.

With SWAP the last two kernels compute C^T = B^T A^T. The caller exchanges A with B^T and M with N, and the store
transposes the tile. wgmma takes 64 rows, but as few as 16 columns in Triton, so a tile may be as narrow as A has rows.

Without TMA (`GemmConfig.pointers`), the arguments that are called descriptors are pointers. The threads then compute
addresses and masks, and copy the same tiles, so that a reader can time what TMA brings.
Source: Triton's persistent matmul tutorial; CUTLASS's tile rasters.
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
def locate(row, column, rows, columns, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    # Return the offsets of a tile's elements in a matrix of rows x columns, and a mask of those inside.
    at_row = row + tl.arange(0, HEIGHT)[:, None]
    at_column = column + tl.arange(0, WIDTH)[None, :]
    return at_row.to(tl.int64) * stride + at_column, (at_row < rows) & (at_column < columns)


@triton.jit
def load_box(source, row, column, rows, columns, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    # `source` is a descriptor if there is no stride, and else a pointer.
    if stride is None:
        box = source.load([row, column])
    else:
        offsets, inside = locate(row, column, rows, columns, stride, HEIGHT, WIDTH)
        box = tl.load(source + offsets, mask=inside, other=0.0)
    return box


@triton.jit
def store_part(c_desc, part, m, n, SWAP: tl.constexpr, M, N, stride):
    if SWAP:
        part, m, n, M, N = part.T, n, m, N, M
    if stride is None:
        c_desc.store([m, n], part.to(c_desc.dtype))
    else:
        offsets, inside = locate(m, n, M, N, stride, part.shape[0], part.shape[1])
        tl.store(c_desc + offsets, part.to(c_desc.dtype.element_ty), mask=inside)


@triton.jit
def store_tile(
    c_desc, acc, m, n, EPILOGUE_SUBTILE: tl.constexpr, SWAP: tl.constexpr = False, M=None, N=None, stride=None
):
    # Only one part of the tile is staged in shared memory at a time: two parts need half of the staging buffer, which
    # leaves room for one more stage of the ring.
    if EPILOGUE_SUBTILE == 1:
        store_part(c_desc, acc, m, n, SWAP, M, N, stride)
    else:
        left, right = split_columns(acc)
        width: tl.constexpr = acc.shape[1] // 2
        if EPILOGUE_SUBTILE == 2:
            store_part(c_desc, left, m, n, SWAP, M, N, stride)
            store_part(c_desc, right, m, n + width, SWAP, M, N, stride)
        else:
            first, second = split_columns(left)
            third, fourth = split_columns(right)
            store_part(c_desc, first, m, n, SWAP, M, N, stride)
            store_part(c_desc, second, m, n + width // 2, SWAP, M, N, stride)
            store_part(c_desc, third, m, n + width, SWAP, M, N, stride)
            store_part(c_desc, fourth, m, n + width + width // 2, SWAP, M, N, stride)


@triton.jit
def load_b(b_desc, k, n, K, N, stride, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, B_K_MAJOR: tl.constexpr):
    # B is stored as (N, K) rows (K-major, the usual weight) or as (K, N) rows.
    if B_K_MAJOR:
        tile = load_box(b_desc, n, k, N, K, stride, BLOCK_N, BLOCK_K).T
    else:
        tile = load_box(b_desc, k, n, K, N, stride, BLOCK_K, BLOCK_N)
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
    POINTERS: tl.constexpr,
):
    a_desc, b_desc, c_desc = a_ptr, b_ptr, c_ptr
    if not POINTERS:
        # To make a descriptor on the device, tensormap.replace edits it in shared memory; it is then copied to scratch
        # in global memory, and a fence makes it visible to TMA.
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
        if B_K_MAJOR:
            b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b, 1], [BLOCK_N, BLOCK_K])
        else:
            b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
        c_desc = tl.make_tensor_descriptor(
            c_ptr, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N // EPILOGUE_SUBTILE]
        )
        stride_a, stride_b, stride_c = None, None, None
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = load_box(a_desc, m, k, M, K, stride_a, BLOCK_M, BLOCK_K)
        acc = tl.dot(a, load_b(b_desc, k, n, K, N, stride_b, BLOCK_K, BLOCK_N, B_K_MAJOR), acc)
    acc = apply_scales(acc, scale_a_ptr, scale_b_ptr)
    store_tile(c_desc, acc, m, n, EPILOGUE_SUBTILE, False, M, N, stride_c)


@triton.jit
def multiply_tile(
    a_desc,
    b_desc,
    b_extra_desc,
    b_last_desc,
    m,
    n,
    first_step,
    end_step,
    M,
    N,
    K,
    stride_a,
    stride_b,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA_N: tl.constexpr,
    LAST_N: tl.constexpr,
):
    # The tile is BLOCK_M x (BLOCK_N + EXTRA_N + LAST_N). Triton's shapes are powers of two, so 192 columns are
    # 128 + 64, and 208 are 128 + 64 + 16. Each part has an accumulator, and all parts read the same tile of A. A part
    # that the tile lacks is returned as `acc`, and the caller ignores it.
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    extra = tl.zeros((BLOCK_M, EXTRA_N), tl.float32) if EXTRA_N > 0 else acc
    last = tl.zeros((BLOCK_M, LAST_N), tl.float32) if LAST_N > 0 else acc
    for step in range(first_step, end_step):
        k = step * BLOCK_K
        if A_K_MAJOR:
            a = load_box(a_desc, m, k, M, K, stride_a, BLOCK_M, BLOCK_K)
        else:
            a = load_box(a_desc, k, m, K, M, stride_a, BLOCK_K, BLOCK_M).T
        acc = tl.dot(a, load_b(b_desc, k, n, K, N, stride_b, BLOCK_K, BLOCK_N, B_K_MAJOR), acc)
        if EXTRA_N > 0:
            b = load_b(b_extra_desc, k, n + BLOCK_N, K, N, stride_b, BLOCK_K, EXTRA_N, B_K_MAJOR)
            extra = tl.dot(a, b, extra)
        if LAST_N > 0:
            b = load_b(b_last_desc, k, n + BLOCK_N + EXTRA_N, K, N, stride_b, BLOCK_K, LAST_N, B_K_MAJOR)
            last = tl.dot(a, b, last)
    return acc, extra, last


@triton.jit(do_not_specialize=["M", "N", "K"])  # one build for all shapes
def gemm_persistent_kernel(
    a_desc,
    b_desc,
    b_extra_desc,
    b_last_desc,
    c_desc,
    c_extra_desc,
    c_last_desc,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA_N: tl.constexpr,
    LAST_N: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
    stride_a=None,
    stride_b=None,
    stride_c=None,
    ALIGNMENT: tl.constexpr = 1,
):
    if PDL:
        # Programmatic dependent launch: this kernel starts while the previous one drains, waits here before its first
        # load, and lets the next kernel start early too.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (
        ALIGNMENT > 1
    ):  # tells the compiler that a mask is the same for so many neighbours, so that they load as one
        K = K // ALIGNMENT * ALIGNMENT
        if SWAP:
            M = M // ALIGNMENT * ALIGNMENT
        else:
            N = N // ALIGNMENT * ALIGNMENT
    WIDTH: tl.constexpr = BLOCK_N + EXTRA_N + LAST_N
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, WIDTH)
    # `flatten` fuses both loops, so that the loads of the next tile run ahead of this tile's epilogue. Loads and
    # epilogue then need the tile_id at different times, and a second counter (tile_id_c) keeps the epilogue's copy out
    # of the pipelined one. With two accumulators ptxas would serialize every wgmma of the fused loop (its remark
    # C7515), at 0.6 of the speed, so these tiles are not flattened.
    tile_id_c = tl.program_id(0) - PROGRAMS
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=EXTRA_N == 0):
        tile_m, tile_n = tile_coordinates(tile_id, tiles_m, tiles_n, GROUP_M)
        acc, extra, last = multiply_tile(
            *(a_desc, b_desc, b_extra_desc, b_last_desc),
            *(tile_m * BLOCK_M, tile_n * WIDTH, 0, tl.cdiv(K, BLOCK_K)),
            *(M, N, K, stride_a, stride_b),
            *(A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K, EXTRA_N, LAST_N),
        )
        tile_id_c += PROGRAMS
        tile_m, tile_n = tile_coordinates(tile_id_c, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * WIDTH
        store_tile(
            c_desc, apply_scales(acc, scale_a_ptr, scale_b_ptr), m, n, EPILOGUE_SUBTILE, SWAP, M, N, stride_c
        )
        if EXTRA_N > 0:
            extra = apply_scales(extra, scale_a_ptr, scale_b_ptr)
            store_tile(c_extra_desc, extra, m, n + BLOCK_N, 1, SWAP, M, N, stride_c)
        if LAST_N > 0:
            last = apply_scales(last, scale_a_ptr, scale_b_ptr)
            store_tile(c_last_desc, last, m, n + BLOCK_N + EXTRA_N, 1, SWAP, M, N, stride_c)


@triton.jit
def places(acc):
    rows: tl.constexpr = acc.shape[0]
    columns: tl.constexpr = acc.shape[1]
    return tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def add_parts(acc, parts_ptr, stride, splits):
    # The parts are added in their order, so that the result does not depend on which program is last.
    total = tl.zeros_like(acc)
    for split in range(splits):
        total += tl.load(parts_ptr + split * stride + places(acc), cache_modifier=".cg")  # from L2
    return total


@triton.jit(do_not_specialize=["M", "N", "K", "splits"])
def gemm_split_kernel(
    a_desc,
    b_desc,
    b_extra_desc,
    b_last_desc,
    c_desc,
    c_extra_desc,
    c_last_desc,
    parts_ptr,
    arrivals_ptr,
    scale_a_ptr,
    scale_b_ptr,
    M,
    N,
    K,
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EXTRA_N: tl.constexpr,
    LAST_N: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    PDL: tl.constexpr,
    stride_a=None,
    stride_b=None,
    stride_c=None,
    ALIGNMENT: tl.constexpr = 1,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (
        ALIGNMENT > 1
    ):  # tells the compiler that a mask is the same for so many neighbours, so that they load as one
        K = K // ALIGNMENT * ALIGNMENT
        if SWAP:
            M = M // ALIGNMENT * ALIGNMENT
        else:
            N = N // ALIGNMENT * ALIGNMENT
    WIDTH: tl.constexpr = BLOCK_N + EXTRA_N + LAST_N
    tile_id, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    tile_m, tile_n = tile_coordinates(tile_id, tl.cdiv(M, BLOCK_M), tl.cdiv(N, WIDTH), GROUP_M)
    m = tile_m * BLOCK_M
    n = tile_n * WIDTH
    steps = tl.cdiv(K, BLOCK_K)
    acc, extra, last = multiply_tile(
        *(a_desc, b_desc, b_extra_desc, b_last_desc),
        *(m, n, steps * split // splits, steps * (split + 1) // splits),
        *(M, N, K, stride_a, stride_b),
        *(A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K, EXTRA_N, LAST_N),
    )
    # Each program leaves its part of the sum in global memory and counts itself. The one that counts last adds up all
    # parts.
    STRIDE: tl.constexpr = BLOCK_M * WIDTH
    parts_ptr += tile_id.to(tl.int64) * (splits * STRIDE)
    extra_ptr = parts_ptr + BLOCK_M * BLOCK_N
    last_ptr = extra_ptr + BLOCK_M * EXTRA_N
    tl.store(parts_ptr + split * STRIDE + places(acc), acc)
    if EXTRA_N > 0:
        tl.store(extra_ptr + split * STRIDE + places(extra), extra)
    if LAST_N > 0:
        tl.store(last_ptr + split * STRIDE + places(last), last)
    tl.debug_barrier()  # all threads have stored their part
    if tl.atomic_add(arrivals_ptr + tile_id, 1) == splits - 1:
        tl.store(arrivals_ptr + tile_id, 0)  # for the next launch
        acc = apply_scales(add_parts(acc, parts_ptr, STRIDE, splits), scale_a_ptr, scale_b_ptr)
        store_tile(c_desc, acc, m, n, EPILOGUE_SUBTILE, SWAP, M, N, stride_c)
        if EXTRA_N > 0:
            extra = apply_scales(add_parts(extra, extra_ptr, STRIDE, splits), scale_a_ptr, scale_b_ptr)
            store_tile(c_extra_desc, extra, m, n + BLOCK_N, 1, SWAP, M, N, stride_c)
        if LAST_N > 0:
            last = apply_scales(add_parts(last, last_ptr, STRIDE, splits), scale_a_ptr, scale_b_ptr)
            store_tile(c_last_desc, last, m, n + BLOCK_N + EXTRA_N, 1, SWAP, M, N, stride_c)
