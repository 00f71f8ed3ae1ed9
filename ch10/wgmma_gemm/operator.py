"""torch.ops.tiles.wgmma_gemm: the GEMM as torch.compile sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor


def _fake(a: torch.Tensor, b: torch.Tensor, config: str = "best") -> torch.Tensor:
    for name, matrix in (("a", a), ("b", b)):
        require_tensor(name, matrix, "wgmma_gemm", dtype=torch.bfloat16, ndim=2, on=a.device, in_memory=False)
    torch._check(
        a.shape[1] == b.shape[0], lambda: f"a (M, K) and b (K, N) must agree in K; {a.shape} and {b.shape}."
    )
    return a.new_empty(a.shape[0], b.shape[1])


def register(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register `run(a, b, config="best")` and return the operator."""
    return operators.register(
        'wgmma_gemm(Tensor a, Tensor b, str config="best") -> Tensor',
        run,
        _fake,
        instead="use torch.ops.tiles.gemm (ch14.gemm), which has one, or torch.mm",
    )
