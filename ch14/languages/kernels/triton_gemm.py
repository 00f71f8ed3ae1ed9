"""C = A B in Triton: a program computes tile after tile, and tensor descriptors move the tiles by TMA."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tilelab.runtime import device


@triton.jit
def gemm(a_desc, b_desc, c_desc, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
         GROUP_M: tl.constexpr):  # fmt: skip
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first = tile // (GROUP_M * tiles_n) * GROUP_M  # GROUP_M rows of tiles sweep the columns together
        rows = min(tiles_m - first, GROUP_M)
        m = (first + tile % (GROUP_M * tiles_n) % rows) * BLOCK_M
        n = tile % (GROUP_M * tiles_n) // rows * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
        c_desc.store([m, n], acc.to(tl.bfloat16))


def prepare(a, b, out, BLOCK_M, BLOCK_N, BLOCK_K, **config):
    """Return a function that multiplies a (M, K) by b (K, N), whose columns are contiguous, into out (M, N)."""
    blocks = [BLOCK_M, BLOCK_K], [BLOCK_N, BLOCK_K], [BLOCK_M, BLOCK_N]
    descs = [TensorDescriptor.from_tensor(*each) for each in zip((a, b.T, out), blocks)]
    arguments = (*descs, *out.shape, a.shape[1], BLOCK_M, BLOCK_N, BLOCK_K)
    return lambda: gemm[(device.current().sms or 4,)](*arguments, **config)
