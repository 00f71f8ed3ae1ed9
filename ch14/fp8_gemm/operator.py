"""torch.ops.tiles.fp8: the product with float32 block scales as torch.compile sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor

INSTEAD = "dequantise the operands with ch14.mx_formats and use torch.ops.tiles.gemm or torch.mm"


def _fake(a, b, scale_a, scale_b, bias=None, activation=None, config="best"):
    for name, matrix in (("a", a), ("b", b)):
        require_tensor(name, matrix, "fp8", dtype=torch.float8_e4m3fn, ndim=2, on=a.device, in_memory=False)
    torch._check(
        a.shape[1] == b.shape[0], lambda: f"a (M, K) and b (K, N) differ in K: {a.shape} and {b.shape}."
    )
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


def register(run: Callable) -> Callable:
    """Register `run(a, b, scale_a, scale_b, bias=None, activation=None, config="best")` and return the operator."""
    return operators.register(
        "fp8(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, str? activation=None, "
        'str config="best") -> Tensor',
        run,
        _fake,
        instead=INSTEAD,
    )
