"""torch.ops.tiles.wgmma_gemm: the GEMM as torch.compile sees it."""

from __future__ import annotations

import torch

from tilelab.runtime import operators


def _fake(a, b, config="best"):
    torch._check(
        a.shape[1] == b.shape[0], lambda: f"a (M, K) and b (K, N) must agree in K; {a.shape} and {b.shape}."
    )
    return a.new_empty(a.shape[0], b.shape[1])


def register(run):
    """Register `run(a, b, config="best")` and return the operator."""
    return operators.register(
        'wgmma_gemm(Tensor a, Tensor b, str config="best") -> Tensor',
        run,
        _fake,
        instead="use torch.ops.tiles.gemm (ch14.gemm), which has one, or torch.mm",
    )
