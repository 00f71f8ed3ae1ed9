"""torch.ops.tiles.fp8, decode and block_scaled_mm: the block-scaled products as torch.compile sees them.

An operator takes tensors, so a Packed is passed as its `values`, `scales` and `pair`, with the name of its format.
"""

from __future__ import annotations

import torch

from ch14.blockscaled.decode import planner as decode_planner
from ch14.blockscaled.fp8 import planner as fp8_planner
from ch14.mx_formats import Packed, number_formats
from tilelab.runtime import operators


def _run_fp8(a, b, scale_a, scale_b, bias=None, activation=None, config="best"):
    return fp8_planner.run((a, b, scale_a, scale_b, bias, None), None, activation, config, None)


def _fake_fp8(a, b, scale_a, scale_b, bias=None, activation=None, config="best"):
    torch._check(
        a.shape[1] == b.shape[0], lambda: f"a (M, K) and b (K, N) differ in K: {a.shape} and {b.shape}."
    )
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16)


def _run_decode(x, weight, scales, config="best"):
    return decode_planner.run((x, weight, scales), None, config)


def _fake_decode(x, weight, scales, config="best"):
    return x.new_empty(x.shape[0], weight.shape[0])


def pack(values, scales, pair, form, tiled):
    """Return a Packed whose K fills whole bytes."""
    bits = number_formats.lookup(form).element.bits
    return Packed(form, (values.shape[0], values.shape[1] * 8 // bits), values, scales, pair, tiled)


def _fake_block_scaled_mm(
    a, scale_a, pair_a, form_a, tiled_a, b, scale_b, pair_b, form_b, tiled_b, config="best", path="best"
):
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


DEQUANTISE = "dequantise the operands with ch14.mx_formats and use torch.ops.tiles.gemm or torch.mm"
fp8 = operators.register(
    "fp8(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, str? activation=None, "
    'str config="best") -> Tensor',
    _run_fp8,
    _fake_fp8,
    instead=DEQUANTISE,
)
decode = operators.register(
    'decode(Tensor x, Tensor weight, Tensor scales, str config="best") -> Tensor',
    _run_decode,
    _fake_decode,
    instead=DEQUANTISE,
)


def register_block_scaled_mm(run):
    """Register a function of these arguments and return the operator.

    b and its scales lie as the weight (N, K), so that the product is a b^T.
    """
    return operators.register(
        "block_scaled_mm(Tensor a, Tensor scale_a, Tensor? pair_a, str form_a, bool tiled_a, Tensor b, "
        'Tensor scale_b, Tensor? pair_b, str form_b, bool tiled_b, str config="best", str path="best") -> Tensor',
        run,
        _fake_block_scaled_mm,
        instead=DEQUANTISE,
    )
