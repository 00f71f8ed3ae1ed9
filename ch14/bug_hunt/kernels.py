"""The kernels that `ch14.bug_hunt` compiles. They import nothing but Triton and run under 3.5.1 to 3.9.0.

`loop_kernel` is a GEMM whose loop over K has six forms, `specialized_kernel` a GEMM whose warps are to be specialised,
`scaled_kernel` a GEMM on block-scaled operands. Constexpr arguments choose a form, and a report folds them away. LOADS
says how tiles are loaded: through "pointers", through descriptors that the kernel makes ("device"), or through
descriptors that are passed to it ("host").

The hash of the recorded builds covers this file without its comments. Its code stays as it was recorded.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr
):
    # Load the tile of a (rows, columns) matrix whose corner is (row, column), with zeros outside of the matrix.
    if LOADS == "pointers":
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        return tl.load(
            source + r[:, None] * columns + c[None, :], (r < rows)[:, None] & (c < columns)[None, :], 0.0
        )
    else:
        return source.load([row, column])


@triton.jit
def store_tile(
    target, tile, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOADS: tl.constexpr
):
    if LOADS == "pointers":
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        tl.store(
            target + r[:, None] * columns + c[None, :], tile, (r < rows)[:, None] & (c < columns)[None, :]
        )
    else:
        target.store([row, column], tile)


@triton.jit
def loop_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOADS: tl.constexpr,
    LOOP: tl.constexpr,
):
    # C (M, N) = A (M, K) B (K, N), one tile per program, the loop over K in one of six forms. "guarded": loads stand in
    # an `if`. "carry b", "carry both": a product reads what the previous iteration loaded, a manual double buffer.
    if LOADS == "device":
        a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
        c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    m = tl.program_id(0) * BLOCK_M
    n = tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if LOOP == "plain":
        for k in range(0, K, BLOCK_K):
            left = load_tile(a, m, k, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
            right = load_tile(b, k, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
            acc = tl.dot(left, right, acc)
    elif LOOP == "guarded":
        for k in range(0, K + BLOCK_K, BLOCK_K):
            if k < K:
                left = load_tile(a, m, k, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
                right = load_tile(b, k, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
                acc = tl.dot(left, right, acc)
    elif LOOP == "carry b" or LOOP == "carry b guarded":
        right = load_tile(b, 0, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
        for k in range(0, K, BLOCK_K):
            left = load_tile(a, m, k, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
            acc = tl.dot(left, right, acc)
            if LOOP == "carry b":
                right = load_tile(b, k + BLOCK_K, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
            elif k + BLOCK_K < K:
                right = load_tile(b, k + BLOCK_K, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
    else:
        left = load_tile(a, m, 0, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
        right = load_tile(b, 0, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(left, right, acc)
            if LOOP == "carry both":
                left = load_tile(a, m, k + BLOCK_K, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
                right = load_tile(b, k + BLOCK_K, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
            elif k + BLOCK_K < K:
                left = load_tile(a, m, k + BLOCK_K, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
                right = load_tile(b, k + BLOCK_K, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
    store_tile(c, acc.to(tl.float16), m, n, M, N, BLOCK_M, BLOCK_N, LOADS=LOADS)


@triton.jit
def specialized_kernel(
    a,
    b,
    c,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOADS: tl.constexpr,
    LOOP: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):
    # C (M, N) = A (M, K) B (K, N). Warps are to be specialised in the loop over K or in a persistent loop over tiles.
    # "flat" asks Triton to fuse the two loops, too.
    if LOADS == "device":
        a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
        b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
        c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    if LOOP == "over K" or LOOP == "over K flat":
        m = tl.program_id(0) * BLOCK_M
        n = tl.program_id(1) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K, flatten=LOOP == "over K flat", warp_specialize=WARP_SPECIALIZE):
            left = load_tile(a, m, k, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
            right = load_tile(b, k, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
            acc = tl.dot(left, right, acc)
        store_tile(c, acc.to(tl.float16), m, n, M, N, BLOCK_M, BLOCK_N, LOADS=LOADS)
    else:
        across = tl.cdiv(N, BLOCK_N)
        for tile in tl.range(
            tl.program_id(0),
            tl.cdiv(M, BLOCK_M) * across,
            tl.num_programs(0),
            flatten=LOOP == "over tiles flat",
            warp_specialize=WARP_SPECIALIZE,
        ):
            m = tile // across * BLOCK_M
            n = tile % across * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(0, K, BLOCK_K):
                left = load_tile(a, m, k, M, K, BLOCK_M, BLOCK_K, LOADS=LOADS)
                right = load_tile(b, k, n, K, N, BLOCK_K, BLOCK_N, LOADS=LOADS)
                acc = tl.dot(left, right, acc)
            store_tile(c, acc.to(tl.float16), m, n, M, N, BLOCK_M, BLOCK_N, LOADS=LOADS)


@triton.jit
def scaled_kernel(
    a,
    a_scale,
    b,
    b_scale,
    c,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):
    # C (M, N) = A (M, K) B (K, N), with sizes that are multiples of the tile. PACKED elements of FORMAT share a byte
    # along K, and GROUP of them share a scale: a_scale (M, K / GROUP), b_scale (N, K / GROUP).
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // PACKED)
    group = tl.arange(0, BLOCK_K // GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * (K // PACKED) + (k // PACKED + byte)[None, :])
        right = tl.load(b + (k // PACKED + byte)[:, None] * N + n[None, :])
        left_scale = tl.load(a_scale + m[:, None] * (K // GROUP) + (k // GROUP + group)[None, :])
        right_scale = tl.load(b_scale + n[:, None] * (K // GROUP) + (k // GROUP + group)[None, :])
        acc = tl.dot_scaled(left, left_scale, FORMAT, right, right_scale, FORMAT, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc)
