"""C = A B in cuTile: a block loads, multiplies and stores tiles; everything below the tile is the compiler's."""

import functools

import cuda.tile as ct
import torch

Number = ct.Constant[int]


@ct.kernel
def gemm(A, B, C, BLOCK_M: Number, BLOCK_N: Number, BLOCK_K: Number, GROUP_M: Number):
    tiles_m = ct.cdiv(C.shape[0], BLOCK_M)
    tiles_n = ct.cdiv(C.shape[1], BLOCK_N)
    tile = ct.bid(0)
    first = tile // (GROUP_M * tiles_n) * GROUP_M  # GROUP_M rows of tiles sweep the columns together
    rows = ct.minimum(tiles_m - first, GROUP_M)
    m = first + tile % (GROUP_M * tiles_n) % rows
    n = tile % (GROUP_M * tiles_n) // rows
    acc = ct.zeros((BLOCK_M, BLOCK_N), dtype=ct.float32)
    for k in range(ct.num_tiles(A, axis=1, shape=(BLOCK_M, BLOCK_K))):
        a = ct.load(A, index=(m, k), shape=(BLOCK_M, BLOCK_K), padding_mode=ct.PaddingMode.ZERO)
        b = ct.load(B, index=(n, k), shape=(BLOCK_N, BLOCK_K), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(a, ct.transpose(b), acc)
    ct.store(C, index=(m, n), tile=ct.astype(acc, C.dtype))


@functools.cache
def give_hints(**hints):
    return gemm.replace_hints(**hints)


def prepare(a, b, out, BLOCK_M, BLOCK_N, BLOCK_K, **hints):
    """Return a function that multiplies a (M, K) by b (K, N), whose columns are contiguous, into out (M, N)."""
    tiles = ct.cdiv(out.shape[0], BLOCK_M) * ct.cdiv(out.shape[1], BLOCK_N)
    kernel, arguments = give_hints(**hints), (a, b.T, out, BLOCK_M, BLOCK_N, BLOCK_K, 8)
    return lambda: ct.launch(torch.cuda.current_stream(), (tiles, 1, 1), kernel, arguments)
