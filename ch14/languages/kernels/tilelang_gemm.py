"""C = A B in TileLang: what is copied where, and how many stages; the compiler assigns warps, barriers and layouts."""

import functools

import tilelang
import tilelang.language as T


@functools.cache
@tilelang.jit
def compile_gemm(block_m, block_n, block_k, threads, stages):
    M, N, K = T.dynamic("M"), T.dynamic("N"), T.dynamic("K")

    @T.prim_func
    def gemm(
        A: T.Tensor((M, K), T.bfloat16), B: T.Tensor((N, K), T.bfloat16), C: T.Tensor((M, N), T.bfloat16)
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (tile_n, tile_m):
            a = T.alloc_shared((block_m, block_k), T.bfloat16)
            b = T.alloc_shared((block_n, block_k), T.bfloat16)
            c = T.alloc_shared((block_m, block_n), T.bfloat16)
            acc = T.alloc_fragment((block_m, block_n), T.float32)
            T.use_swizzle(panel_size=10)  # groups of tiles share operands in L2
            T.clear(acc)
            for step in T.Pipelined(T.ceildiv(K, block_k), num_stages=stages):
                T.copy(A[tile_m * block_m, step * block_k], a)
                T.copy(B[tile_n * block_n, step * block_k], b)
                T.gemm(a, b, acc, transpose_B=True)
            T.copy(acc, c)
            T.copy(c, C[tile_m * block_m, tile_n * block_n])

    return gemm


def prepare(a, b, out, **config):
    """Return a function that multiplies a (M, K) by b (K, N), whose columns are contiguous, into out (M, N)."""
    kernel = compile_gemm(**config)
    return lambda: kernel(a, b.T, out)
