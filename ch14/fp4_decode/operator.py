"""torch.ops.tiles.decode: tokens times MXFP4 weights as torch.compile sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor

INSTEAD = "dequantise the operands with ch14.mx_formats and use torch.ops.tiles.gemm or torch.mm"


def _fake(x, weight, scales, config="best"):
    require_tensor("x", x, "decode", dtype=torch.bfloat16, ndim=2, in_memory=False)
    for name, codes in (("weight", weight), ("scales", scales)):
        require_tensor(name, codes, "decode", dtype=torch.uint8, ndim=2, on=x.device, in_memory=False)
    torch._check(
        x.shape[1] == 2 * weight.shape[1],
        lambda: f"x (M, K) and weight (N, K / 2) differ in K: {tuple(x.shape)} and {tuple(weight.shape)}.",
    )
    return x.new_empty(x.shape[0], weight.shape[0])


def register(run: Callable) -> Callable:
    """Register `run(x, weight, scales, config="best")` and return the operator."""
    return operators.register(
        'decode(Tensor x, Tensor weight, Tensor scales, str config="best") -> Tensor',
        run,
        _fake,
        instead=INSTEAD,
    )
