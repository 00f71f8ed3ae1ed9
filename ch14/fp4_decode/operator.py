"""torch.ops.tiles.decode: tokens times MXFP4 weights as torch.compile sees it."""

from __future__ import annotations

from tilelab.runtime import operators

INSTEAD = "dequantise the operands with ch14.mx_formats and use torch.ops.tiles.gemm or torch.mm"


def _fake(x, weight, scales, config="best"):
    return x.new_empty(x.shape[0], weight.shape[0])


def register(run):
    """Register `run(x, weight, scales, config="best")` and return the operator."""
    return operators.register(
        'decode(Tensor x, Tensor weight, Tensor scales, str config="best") -> Tensor',
        run,
        _fake,
        instead=INSTEAD,
    )
