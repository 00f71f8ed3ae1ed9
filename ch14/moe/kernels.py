"""The Triton kernels of `ch14.moe`: products of groups of rows, each with a matrix of its own.

Rows are sorted by group, and `ends` holds the row after the last of each group, in the GPU's memory:

    A (M, K)            B (groups, K, N)       C (M, N)
    +----------+        +-----+                +---+---+---+
    | group 0  |   x    | B_0 |           =    | 0 | 1 | 2 |    a tile, BLOCK_M rows high
    |          |        +-----+                +---+---+---+
    +----------+                               | 3 | 4 | 5 |    its last rows belong to group 1: not stored
    | group 1  |   x    | B_1 |                +---+---+---+
    +----------+        +-----+                | 6 | 7 | 8 |

`grouped_kernel` is persistent. A program reads all ends once, counts the tiles of each group, and keeps the running sum
of the counts. A tile_id belongs to the first group whose sum is above it. So the host knows neither the sizes of the
groups nor the number of tiles, and never waits for them.

A tile that reaches beyond its group may load the next group's rows, but must not store theirs. A descriptor clips at
the end of a tensor only, and one that the program makes for each group costs a copy to global memory and a fence. So C
gets a ragged descriptor, whose coordinates say where the group ends (`ragged_coordinates`).

With fp8 a step covers the 128 columns of one scale, and its product is added to a sum in float32, times both scales.
Triton waits for each product before it adds it. So two programs share an SM, and one multiplies while the other adds.
With SWIGLU half of a tile's columns are gates and half are the values beside them, which lie far apart in B: a box of
the descriptor has both (a dimension of extent 2), so one product fills one accumulator.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 3.3; MegaBlocks (arXiv 2211.15841); triton.tools.ragged_tma.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ch14.gemm.kernels import split_columns, tile_coordinates

LARGEST = tl.constexpr(448.0)  # the largest number of e4m3
RAGGED = tl.constexpr(1 << 30)  # the extent of the rows in a ragged descriptor


@triton.jit
def count_tiles(
    ends_ptr, groups, tiles_n, capacity, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr
):
    # The tiles of each group; in the masked layout `ends` holds the rows of each group. No row is outside of A.
    # A negative end counts as 0 before anything is subtracted from it, because the difference may not fit in 32 bits.
    group = tl.arange(0, GROUPS)
    rows = tl.maximum(tl.minimum(tl.load(ends_ptr + group, group < groups, 0), capacity), 0)
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
def ragged_coordinates(begin, rows, n, HEIGHT: tl.constexpr):
    # Return the coordinates of row `begin` in a ragged descriptor, where `rows` rows of a box of HEIGHT may be read or
    # written. They are (wrap, shift, row, column). The row is RAGGED less `rows`, so TMA clips where the rows end. Wrap
    # and shift restore the address: RAGGED steps of wrap add 2^64 bytes, which is nothing, and take RAGGED rows away.
    # A group may have more rows than RAGGED, so what lies beyond the box does not count.
    rows = tl.minimum(tl.maximum(rows, 0), HEIGHT)
    return [RAGGED, begin + rows, RAGGED - rows, n]


@triton.jit
def store_rows(c_desc, tile, m, n, rows, EPILOGUE_SUBTILE: tl.constexpr):
    if EPILOGUE_SUBTILE > 1:
        left, right = split_columns(tile)
        store_rows(c_desc, left, m, n, rows, EPILOGUE_SUBTILE // 2)
        store_rows(c_desc, right, m, n + tile.shape[1] // 2, rows, EPILOGUE_SUBTILE // 2)
    else:
        part = tl.reshape(tile.to(c_desc.dtype), (1, 1, tile.shape[0], tile.shape[1]))
        c_desc.store(ragged_coordinates(m, rows, n, tile.shape[0]), part)


@triton.jit
def quantise_rows(tile):
    # One scale per row: the tile has the 128 columns of a block.
    scale = tl.maximum(tl.max(tl.abs(tile), 1), 1e-30) / LARGEST
    return (tile / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def load_scales(
    sa_ptr,
    sb_ptr,
    row,
    rows,
    step,
    steps,
    stride_sa_m,
    stride_sa_k,
    stride_sb_k,
    stride_up,
    SWIGLU: tl.constexpr,
    HALVES: tl.constexpr,
):
    # Return a step's scales for the rows, the lower half's rows, the columns, and with SwiGLU the columns that are
    # values. Steps and rows that do not exist get the scales of the last one.
    step = tl.minimum(step, steps - 1)
    sa_ptr += step.to(tl.int64) * stride_sa_k
    sb_ptr += step * stride_sb_k
    of_top = tl.load(sa_ptr + tl.minimum(row, rows - 1) * stride_sa_m)
    of_low = of_top
    if HALVES:
        of_low = tl.load(sa_ptr + tl.minimum(row + row.shape[0], rows - 1) * stride_sa_m)
    of_columns = tl.load(sb_ptr)
    of_values = of_columns
    if SWIGLU:
        of_values = tl.load(sb_ptr + stride_up)
    return of_top, of_low, of_columns, of_values


@triton.jit
def promote(acc, product, of_rows, of_columns, of_values, SWIGLU: tl.constexpr):
    if SWIGLU:
        is_gate = tl.arange(0, acc.shape[1]) < acc.shape[1] // 2
        acc += product * of_rows[:, None] * tl.where(is_gate, of_columns, of_values)[None, :]
    else:
        acc += product * (of_rows * of_columns)[:, None]
    return acc


@triton.jit
def multiply_scaled(
    a_desc,
    b_desc,
    sa_ptr,
    sb_ptr,
    group,
    m,
    rows,
    n,
    N,
    K,
    capacity,
    stride_sa_m,
    stride_sa_k,
    stride_sb_k,
    stride_sb_n,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWIGLU: tl.constexpr,
    HALVES: tl.constexpr,
):
    # Return the sums of the ROWS rows from m on, and with HALVES the sums of the ROWS rows below.
    steps = tl.cdiv(K, 128)
    row = tl.arange(0, ROWS)
    top = tl.zeros((ROWS, BLOCK_N), tl.float32)
    low = tl.zeros((ROWS, BLOCK_N), tl.float32)
    strides = (stride_sa_m, stride_sa_k, stride_sb_k, N // 128 * stride_sb_n)
    # Scales take longer to come than a product takes, so they are loaded a step before.
    now = load_scales(sa_ptr, sb_ptr, row, rows, 0, steps, *strides, SWIGLU, HALVES)
    for step in range(0, steps):
        next = load_scales(sa_ptr, sb_ptr, row, rows, step + 1, steps, *strides, SWIGLU, HALVES)
        of_top, of_low, of_columns, of_values = now
        b = load_matrix(b_desc, group, step * 128, n, SWIGLU, True)
        product = tl.dot(a_desc.load([m, step * 128]), b)
        top = promote(top, product, of_top, of_columns, of_values, SWIGLU)
        if HALVES:
            # A product that starts from what depends on `top` takes the registers of the one before. From plain zeros,
            # ptxas gives it others, which the sums lack. No capacity is negative.
            zeros = tl.where(capacity < 0, top, 0.0)
            product = tl.dot(a_desc.load([m + ROWS, step * 128]), b, zeros)
            low = promote(low, product, of_low, of_columns, of_values, SWIGLU)
        now = next
    return top, low


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
    capacity,
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
    HALVES: tl.constexpr,
):
    # Return the sums of the tile, or with HALVES the sums of its upper and of its lower half.
    if scale_a_ptr is None:
        top = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        low = top
        for k in range(0, K, BLOCK_K):
            top = tl.dot(a_desc.load([m, k]), load_matrix(b_desc, group, k, n, SWIGLU, B_K_MAJOR), top)
    else:
        ROWS: tl.constexpr = BLOCK_M // 2 if HALVES else BLOCK_M
        sa_ptr = scale_a_ptr + group * stride_sa_group + m.to(tl.int64) * stride_sa_m
        sb_ptr = scale_b_ptr + group.to(tl.int64) * stride_sb_group + n // 128 * stride_sb_n
        rest = (sa_ptr, sb_ptr, group, m, rows, n, N, K, capacity)
        strides = (stride_sa_m, stride_sa_k, stride_sb_k, stride_sb_n)
        if HALVES:
            if rows > ROWS:
                top, low = multiply_scaled(a_desc, b_desc, *rest, *strides, ROWS, BLOCK_N, SWIGLU, True)
            else:  # the last tile of a group
                top, low = multiply_scaled(a_desc, b_desc, *rest, *strides, ROWS, BLOCK_N, SWIGLU, False)
        else:
            top, low = multiply_scaled(a_desc, b_desc, *rest, *strides, ROWS, BLOCK_N, SWIGLU, False)
    return top, low


@triton.jit
def finish_rows(
    acc,
    c_desc,
    c_scale_ptr,
    m,
    tile_n,
    rows,
    stride_cs,
    WIDTH: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    if SWIGLU:
        gate, up = split_columns(acc)
        acc = gate / (1 + tl.exp(-gate)) * up
    if c_scale_ptr is not None:
        acc, scale = quantise_rows(acc)
        row = tl.arange(0, acc.shape[0])
        tl.store(c_scale_ptr + tile_n.to(tl.int64) * stride_cs + m + row, scale, row < rows)
    store_rows(c_desc, acc, m, tile_n * WIDTH, rows, EPILOGUE_SUBTILE)


_ONE_BUILD_FOR_ALL = ["groups", "N", "K", "capacity", "stride_cs", "stride_sa_group", "stride_sa_k"]
_ONE_BUILD_FOR_ALL += ["stride_sb_group", "stride_sb_k", "stride_sb_n"]


@triton.jit(do_not_specialize=_ONE_BUILD_FOR_ALL)
def grouped_kernel(
    a_desc,
    b_desc,
    c_desc,
    c_scale_ptr,
    ends_ptr,
    scale_a_ptr,
    scale_b_ptr,
    groups,
    N,  # columns of C
    K,
    capacity,  # rows of A, in the masked layout per group
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
    HALVES: tl.constexpr,
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
        top, low = multiply_tile(
            *(a_desc, b_desc, scale_a_ptr, scale_b_ptr, group, m, rows, tile_n * WIDTH, N, K),
            *(capacity, stride_sa_group, stride_sa_m, stride_sa_k, stride_sb_group, stride_sb_k, stride_sb_n),
            *(BLOCK_M, BLOCK_N, BLOCK_K, B_K_MAJOR, SWIGLU, HALVES),
        )
        if FUSED:
            tile_id_c += PROGRAMS
            group, m, rows, tile_n = find_tile(
                tile_id_c, tiles, tile_ends, ends_ptr, tiles_n, capacity, BLOCK_M, GROUP_M, MASKED
            )
        finish_rows(top, c_desc, c_scale_ptr, m, tile_n, rows, stride_cs, WIDTH, EPILOGUE_SUBTILE, SWIGLU)
        if HALVES:
            m += BLOCK_M // 2
            rows -= BLOCK_M // 2
            if rows > 0:
                finish_rows(
                    low, c_desc, c_scale_ptr, m, tile_n, rows, stride_cs, WIDTH, EPILOGUE_SUBTILE, SWIGLU
                )


@triton.jit
def gradient_tile(
    tile_id, ends_ptr, rows, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    # Return the group of a tile, the group's first row and how many it has, and the tile's row and column.
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = tile_id // (tiles_m * tiles_n)
    tile_m, tile_n = tile_coordinates(tile_id % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    begin = tl.maximum(tl.load(ends_ptr + group - 1, group > 0, 0), 0)
    end = tl.maximum(tl.minimum(tl.load(ends_ptr + group), rows), 0)
    count = tl.maximum(end - begin, 0)
    return group, begin, count, tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def store_gradient(c_desc, tile, group, m, n, EPILOGUE_SUBTILE: tl.constexpr):
    if EPILOGUE_SUBTILE > 1:
        left, right = split_columns(tile)
        store_gradient(c_desc, left, group, m, n, EPILOGUE_SUBTILE // 2)
        store_gradient(c_desc, right, group, m, n + tile.shape[1] // 2, EPILOGUE_SUBTILE // 2)
    else:
        c_desc.store([group, m, n], tl.reshape(tile.to(c_desc.dtype), (1, tile.shape[0], tile.shape[1])))


@triton.jit(do_not_specialize=["groups", "rows", "M", "N"])
def weight_gradient_kernel(
    a_desc,
    b_desc,
    c_desc,
    ends_ptr,
    groups,
    rows,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FUSED: tl.constexpr,
):
    # C[group] (M, N) = A^T B over the rows of the group, of A (rows, M) and B (rows, N). Both have ragged descriptors,
    # so that zeros stand in for the rows of the next group. The loops are fused as in `grouped_kernel`.
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * groups
    tile_id_c = tl.program_id(0) - PROGRAMS
    for tile_id in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FUSED):
        group, begin, count, m, n = gradient_tile(tile_id, ends_ptr, rows, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        end = tl.maximum(count, 1)
        tl.assume(end > 0)  # Triton fuses loops only if the inner one always runs.
        for k in range(0, end, BLOCK_K):
            a_box = a_desc.load(ragged_coordinates(begin + k, count - k, m, BLOCK_K))
            b_box = b_desc.load(ragged_coordinates(begin + k, count - k, n, BLOCK_K))
            a = tl.reshape(a_box, (BLOCK_K, BLOCK_M))
            b = tl.reshape(b_box, (BLOCK_K, BLOCK_N))
            acc = tl.dot(a.T, b, acc)
        tile_id_c += PROGRAMS
        group, begin, count, m, n = gradient_tile(tile_id_c, ends_ptr, rows, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        store_gradient(c_desc, acc, group, m, n, EPILOGUE_SUBTILE)


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
