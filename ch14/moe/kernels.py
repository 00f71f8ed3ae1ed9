"""The Triton kernels of `ch14.moe`: products of groups of rows, each with a matrix of its own.

Rows are sorted by group, and `ends` holds the row after the last of each group, in the GPU's memory:

    A (M, K)            B (groups, K, N)       C (M, N)
    +----------+        +-----+                +---+---+---+
    | group 0  |   x    | B_0 |           =    | 0 | 1 | 2 |    a tile, BLOCK_M rows high
    |          |        +-----+                +---+---+---+
    +----------+                               | 3 | 4 | 5 |    its last rows belong to group 1: masked store
    | group 1  |   x    | B_1 |                +---+---+---+
    +----------+        +-----+                | 6 | 7 | 8 |

`grouped_kernel` is persistent. A program reads all ends once, counts the tiles of each group, and keeps the running sum
of the counts. A tile_id belongs to the first group whose sum is above it. So the host knows neither the sizes of the
groups nor the number of tiles, and never waits for them.

A tile that reaches beyond its group may load the next group's rows, but must not store theirs. A descriptor clips at
the end of a tensor only, and one that the program makes for each group costs a copy to global memory and a fence. So
whole tiles are stored by TMA, and only the last tile of a group by masked stores from registers.

With fp8 a step covers the 128 columns of one scale, and its product is added to a sum in float32, times both scales.
With SWIGLU half of a tile's columns are gates and half are the values beside them, which lie far apart in B: a box of
the descriptor has both (a dimension of extent 2), so one product fills one accumulator.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 3.3; MegaBlocks (arXiv 2211.15841).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ch14.gemm.kernels import split_columns, store_part, tile_coordinates

LARGEST = tl.constexpr(448.0)  # the largest number of e4m3


@triton.jit
def count_tiles(
    ends_ptr, groups, tiles_n, capacity, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr
):
    # The tiles of each group; in the masked layout `ends` holds the rows of each group. No row is outside of A.
    group = tl.arange(0, GROUPS)
    rows = tl.minimum(tl.load(ends_ptr + group, group < groups, 0), capacity)
    if not MASKED:
        rows -= tl.maximum(tl.load(ends_ptr + group - 1, (group > 0) & (group < groups), 0), 0)
    return tl.cdiv(tl.maximum(rows, 0), BLOCK_M) * tiles_n


@triton.jit
def find_tile(
    tile_id,
    tiles,
    tile_ends,
    ends_ptr,
    tiles_n,
    capacity,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Return the group of a tile, its first row in A, how many rows of the group are left there, and its column.
    is_before = tile_ends <= tile_id
    group = tl.sum(is_before.to(tl.int32), 0)
    first = tl.sum(tl.where(is_before, tiles, 0), 0)
    end = tl.minimum(tl.load(ends_ptr + group), capacity)
    if MASKED:
        begin = group * capacity
        end += begin
    else:
        begin = tl.maximum(tl.load(ends_ptr + group - 1, group > 0, 0), 0)
    tile_m, tile_n = tile_coordinates(tile_id - first, tl.cdiv(end - begin, BLOCK_M), tiles_n, GROUP_M)
    m = begin + tile_m * BLOCK_M
    return group, m, end - m, tile_n


@triton.jit
def load_matrix(b_desc, group, k, n, SWIGLU: tl.constexpr, B_K_MAJOR: tl.constexpr):
    # Each matrix is a box of its own, so that a tile at its edge is filled with zeros, not with the next matrix.
    if SWIGLU:
        tile = b_desc.load([group, 0, n, k])
        b = tl.reshape(tile, (2 * tile.shape[2], tile.shape[3])).T
    elif B_K_MAJOR:
        tile = b_desc.load([group, n, k])
        b = tl.reshape(tile, (tile.shape[1], tile.shape[2])).T
    else:
        tile = b_desc.load([group, k, n])
        b = tl.reshape(tile, (tile.shape[1], tile.shape[2]))
    return b


@triton.jit
def store_masked(c_desc, c_ptr, stride_c, part, m, n, rows, N):
    row = tl.arange(0, part.shape[0])
    column = n + tl.arange(0, part.shape[1])
    places = c_ptr + (m + row).to(tl.int64)[:, None] * stride_c + column[None, :]
    tl.store(places, part.to(c_desc.dtype), (row < rows)[:, None] & (column < N)[None, :])


@triton.jit
def store_rows(
    c_desc, c_ptr, stride_c, tile, m, n, rows, N, EPILOGUE_SUBTILE: tl.constexpr, FUSED: tl.constexpr
):
    is_whole = rows >= tile.shape[0]
    if EPILOGUE_SUBTILE > 1:
        left, right = split_columns(tile)
        width: tl.constexpr = tile.shape[1] // 2
        store_rows(c_desc, c_ptr, stride_c, left, m, n, rows, N, EPILOGUE_SUBTILE // 2, FUSED)
        store_rows(c_desc, c_ptr, stride_c, right, m, n + width, rows, N, EPILOGUE_SUBTILE // 2, FUSED)
    elif FUSED:
        # Triton's pass that fuses the loops fails on a branch here. So both stores run, and one of them stores nothing:
        # a box beyond the end of C, or a mask without rows.
        store_part(c_desc, tile, tl.where(is_whole, m, 1 << 30), n, False)
        store_masked(c_desc, c_ptr, stride_c, tile, m, n, tl.where(is_whole, 0, rows), N)
    elif is_whole:
        store_part(c_desc, tile, m, n, False)
    else:
        store_masked(c_desc, c_ptr, stride_c, tile, m, n, rows, N)


@triton.jit
def quantise_rows(tile):
    # One scale per row: the tile has the 128 columns of a block.
    scale = tl.maximum(tl.max(tl.abs(tile), 1), 1e-30) / LARGEST
    return (tile / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def load_scales(
    sa_ptr, sb_ptr, step, steps, is_row, stride_sa_k, stride_sb_k, stride_up, SWIGLU: tl.constexpr
):
    # The scales of a step: of each row, of the columns, and with SWIGLU of the columns that are values.
    is_step = step < steps
    of_rows = tl.load(sa_ptr + step * stride_sa_k, is_row & is_step, 0.0)
    of_columns = tl.load(sb_ptr + step * stride_sb_k, is_step, 0.0)
    of_values = of_columns
    if SWIGLU:
        of_values = tl.load(sb_ptr + step * stride_sb_k + stride_up, is_step, 0.0)
    return of_rows, of_columns, of_values


@triton.jit
def promote(acc, product, of_rows, of_columns, of_values, SWIGLU: tl.constexpr):
    if SWIGLU:
        is_gate = tl.arange(0, acc.shape[1]) < acc.shape[1] // 2
        acc += product * of_rows[:, None] * tl.where(is_gate, of_columns, of_values)[None, :]
    else:
        acc += product * (of_rows * of_columns)[:, None]
    return acc


@triton.jit
def multiply_tile(
    a_desc,
    b_desc,
    scale_a_ptr,
    scale_b_ptr,
    group,
    m,
    rows,
    n,
    N,
    K,
    stride_sa_group,
    stride_sa_m,
    stride_sa_k,
    stride_sb_group,
    stride_sb_k,
    stride_sb_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if scale_a_ptr is None:
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([m, k]), load_matrix(b_desc, group, k, n, SWIGLU, B_K_MAJOR), acc)
    else:
        row = tl.arange(0, BLOCK_M)
        sa_ptr = scale_a_ptr + group * stride_sa_group + (m + row).to(tl.int64) * stride_sa_m
        sb_ptr = scale_b_ptr + group.to(tl.int64) * stride_sb_group + n // 128 * stride_sb_n
        steps = tl.cdiv(K, 128)
        strides = (stride_sa_k, stride_sb_k, N // 128 * stride_sb_n)
        if BLOCK_K == 128:
            for step in range(0, steps):
                rows_0, columns_0, values_0 = load_scales(
                    sa_ptr, sb_ptr, step, steps, row < rows, *strides, SWIGLU
                )
                a = a_desc.load([m, step * 128])
                product = tl.dot(a, load_matrix(b_desc, group, step * 128, n, SWIGLU, B_K_MAJOR))
                acc = promote(acc, product, rows_0, columns_0, values_0, SWIGLU)
        else:
            # Scales take longer to come than one product takes. So a pass multiplies twice, and loads the scales of the
            # next pass before. After the last step, operands and scales are zero.
            rows_0, columns_0, values_0 = load_scales(sa_ptr, sb_ptr, 0, steps, row < rows, *strides, SWIGLU)
            rows_1, columns_1, values_1 = load_scales(sa_ptr, sb_ptr, 1, steps, row < rows, *strides, SWIGLU)
            for step in range(0, steps, 2):
                next_0 = load_scales(sa_ptr, sb_ptr, step + 2, steps, row < rows, *strides, SWIGLU)
                next_1 = load_scales(sa_ptr, sb_ptr, step + 3, steps, row < rows, *strides, SWIGLU)
                a = a_desc.load([m, step * 128])
                product = tl.dot(a, load_matrix(b_desc, group, step * 128, n, SWIGLU, B_K_MAJOR))
                acc = promote(acc, product, rows_0, columns_0, values_0, SWIGLU)
                a = a_desc.load([m, step * 128 + 128])
                product = tl.dot(a, load_matrix(b_desc, group, step * 128 + 128, n, SWIGLU, B_K_MAJOR))
                acc = promote(acc, product, rows_1, columns_1, values_1, SWIGLU)
                rows_0, columns_0, values_0 = next_0
                rows_1, columns_1, values_1 = next_1
    return acc


_ONE_BUILD_FOR_ALL = ["groups", "N", "K", "capacity", "stride_cs", "stride_sa_group", "stride_sa_k"]
_ONE_BUILD_FOR_ALL += ["stride_sb_group", "stride_sb_k", "stride_sb_n"]


@triton.jit(do_not_specialize=_ONE_BUILD_FOR_ALL)
def grouped_kernel(
    a_desc,
    b_desc,
    c_desc,
    c_ptr,
    c_scale_ptr,
    ends_ptr,
    scale_a_ptr,
    scale_b_ptr,
    groups,
    N,  # columns of C
    K,
    capacity,  # rows of A, in the masked layout per group
    stride_c,
    stride_cs,
    stride_sa_group,
    stride_sa_m,
    stride_sa_k,
    stride_sb_group,
    stride_sb_k,
    stride_sb_n,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    MASKED: tl.constexpr,
    SWIGLU: tl.constexpr,
    FUSED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N  # columns of C in a tile
    N = tl.multiple_of(N, 8)
    tiles_n = tl.cdiv(N, WIDTH)
    tiles = count_tiles(ends_ptr, groups, tiles_n, capacity, GROUPS, BLOCK_M, MASKED)
    tile_ends = tl.cumsum(tiles, 0)
    # As in gemm_persistent_kernel, FUSED loops load the next tile's operands during this tile's epilogue, which has its
    # own count of the tiles.
    tile_id_c = tl.program_id(0) - PROGRAMS
    for tile_id in tl.range(tl.program_id(0), tl.sum(tiles, 0), PROGRAMS, flatten=FUSED):
        group, m, rows, tile_n = find_tile(
            tile_id, tiles, tile_ends, ends_ptr, tiles_n, capacity, BLOCK_M, GROUP_M, MASKED
        )
        acc = multiply_tile(
            *(a_desc, b_desc, scale_a_ptr, scale_b_ptr, group, m, rows, tile_n * WIDTH, N, K),
            *(stride_sa_group, stride_sa_m, stride_sa_k, stride_sb_group, stride_sb_k, stride_sb_n),
            *(BLOCK_M, BLOCK_N, BLOCK_K, B_K_MAJOR, SWIGLU),
        )
        if FUSED:
            tile_id_c += PROGRAMS
            group, m, rows, tile_n = find_tile(
                tile_id_c, tiles, tile_ends, ends_ptr, tiles_n, capacity, BLOCK_M, GROUP_M, MASKED
            )
        if SWIGLU:
            gate, up = split_columns(acc)
            acc = gate / (1 + tl.exp(-gate)) * up
        if c_scale_ptr is not None:
            acc, scale = quantise_rows(acc)
            row = tl.arange(0, BLOCK_M)
            tl.store(c_scale_ptr + tile_n.to(tl.int64) * stride_cs + m + row, scale, row < rows)
        store_rows(c_desc, c_ptr, stride_c, acc, m, tile_n * WIDTH, rows, N, EPILOGUE_SUBTILE, FUSED)


@triton.jit
def load_rows(ptr, stride, row, end, column, columns):
    keep = (row < end)[:, None] & (column < columns)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], keep, 0.0)


@triton.jit(do_not_specialize=["rows", "M", "N"])
def weight_gradient_kernel(
    a_desc,
    b_desc,
    c_desc,
    a_ptr,
    b_ptr,
    ends_ptr,
    rows,
    M,
    N,
    stride_a,
    stride_b,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # C[group] (M, N) = A^T B over the rows of the group, of A (rows, M) and B (rows, N). The groups come first in the
    # grid, because they differ in length: whichever SM is free takes the next tile.
    group = tl.program_id(1)
    begin = tl.maximum(tl.load(ends_ptr + group - 1, group > 0, 0), 0)
    end = tl.minimum(tl.load(ends_ptr + group), rows)
    tile_m, tile_n = tile_coordinates(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M
    n = tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK_K * BLOCK_K
    for k in range(begin, whole, BLOCK_K):
        acc = tl.dot(a_desc.load([k, m]).T, b_desc.load([k, n]), acc)
    if whole < end:  # the last rows: zeros stand in for rows of the next group
        row = whole + tl.arange(0, BLOCK_K)
        a = load_rows(a_ptr, stride_a, row, end, m + tl.arange(0, BLOCK_M), M)
        b = load_rows(b_ptr, stride_b, row, end, n + tl.arange(0, BLOCK_N), N)
        acc = tl.dot(a.T, b, acc)
    c_desc.store([group, m, n], tl.reshape(acc.to(c_desc.dtype), (1, BLOCK_M, BLOCK_N)))


@triton.jit(do_not_specialize=["entries", "groups"])
def rank_kernel(ids_ptr, ranks_ptr, counts_ptr, entries, groups, BLOCK: tl.constexpr):
    # Count the rows of each group, and give each entry its place within the group. Places depend on which program is
    # first, but a row's result does not depend on its place.
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(ids_ptr + entry, entry < entries, -1)
    rank = tl.atomic_add(counts_ptr + group, 1, (group >= 0) & (group < groups), sem="relaxed")
    tl.store(ranks_ptr + entry, rank, entry < entries)


@triton.jit(do_not_specialize=["groups", "K", "pitch"])
def permute_kernel(
    x_ptr,
    rows_ptr,
    scale_ptr,
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    ends_ptr,
    places_ptr,
    groups,
    K,
    stride_x,
    pitch,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # A program copies BLOCK_K columns of a token to the rows of its TOP_K groups; with scales it quantises them once.
    token = tl.program_id(0)
    part = tl.program_id(1)
    each = tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + each, each < groups, 0)
    if (token == 0) & (part == 0):
        tl.store(ends_ptr + each, tl.cumsum(counts, 0), each < groups)
    column = part * BLOCK_K + tl.arange(0, BLOCK_K)
    values = tl.load(x_ptr + token.to(tl.int64) * stride_x + column, column < K, 0.0)
    if scale_ptr is not None:
        values, scale = quantise_rows(tl.reshape(values.to(tl.float32), (BLOCK_K // 128, 128)))
        values = tl.reshape(values, (BLOCK_K,))
        block = part * (BLOCK_K // 128) + tl.arange(0, BLOCK_K // 128)
    for choice in range(TOP_K):
        group = tl.load(ids_ptr + token * TOP_K + choice)
        is_here = (group >= 0) & (group < groups)
        place = tl.sum(tl.where(each < group, counts, 0), 0) + tl.load(ranks_ptr + token * TOP_K + choice)
        if part == 0:
            tl.store(places_ptr + token * TOP_K + choice, tl.where(is_here, place, -1).to(tl.int32))
        tl.store(rows_ptr + place.to(tl.int64) * K + column, values, (column < K) & is_here)
        if scale_ptr is not None:
            tl.store(scale_ptr + block.to(tl.int64) * pitch + place, scale, (block * 128 < K) & is_here)


@triton.jit(do_not_specialize=["N", "pitch"])
def swiglu_kernel(both_ptr, out_ptr, scale_ptr, N, pitch, BLOCK_N: tl.constexpr):
    # A program makes BLOCK_N columns of a row of N gates and N values, and quantises them. N is a multiple of 128.
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(both_ptr + row * 2 * N + column, column < N, 0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * N + N + column, column < N, 0.0).to(tl.float32)
    tile = tl.reshape(gate / (1 + tl.exp(-gate)) * up, (BLOCK_N // 128, 128))
    values, scale = quantise_rows(tile)
    block = part * (BLOCK_N // 128) + tl.arange(0, BLOCK_N // 128)
    tl.store(out_ptr + row * N + column, tl.reshape(values, (BLOCK_N,)), column < N)
    tl.store(scale_ptr + block.to(tl.int64) * pitch + row, scale, block * 128 < N)


@triton.jit(do_not_specialize=["N"])
def combine_kernel(y_ptr, places_ptr, weights_ptr, out_ptr, N, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr):
    # Add the results of a token's groups, times their weights, always in the same order.
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + choice)
        weight = tl.load(weights_ptr + token * TOP_K + choice, place >= 0, 0.0).to(tl.float32)
        y = tl.load(y_ptr + place.to(tl.int64) * N + column, (column < N) & (place >= 0), 0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + column, total.to(out_ptr.dtype.element_ty), column < N)
