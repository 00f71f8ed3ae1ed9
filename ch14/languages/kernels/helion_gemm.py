"""C = A B in Helion: a loop over tiles in torch's words; a configuration says how it becomes a Triton kernel."""

import helion
import helion.language as hl
import torch


@helion.kernel(static_shapes=True)  # with other shapes it would not use TMA
def gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    m, k = a.size()
    n = b.size(1)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, a[tile_m, tile_k], b[tile_k, tile_n])
        out[tile_m, tile_n] = acc.to(torch.bfloat16)
    return out


def prepare(a, b, out, **config):
    """Return a function that multiplies a (M, K) by b (K, N), whose columns are contiguous, into out (M, N)."""
    compiled = gemm.bind((a, b, out)).compile_config(helion.Config(**config))
    return lambda: compiled(a, b, out)
