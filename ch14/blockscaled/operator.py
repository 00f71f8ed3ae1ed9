"""torch.ops.tiles.block_scaled_mm: the product of two Packed matrices as torch.compile sees it.

An operator takes tensors, so a Packed is passed as its `values`, `scales` and `pair`, with the name of its format.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ch14.fp8_gemm.operator import INSTEAD
from ch14.mx_formats import Packed, number_formats
from ch14.mx_formats.operator import drop_empty
from tilelab.runtime import operators


def pack(
    values: torch.Tensor, scales: torch.Tensor, pair: torch.Tensor | None, form: str, tiled: bool
) -> Packed:
    """Return a Packed whose K fills whole bytes."""
    bits = number_formats.lookup(form).element.bits
    return Packed(
        form,  # type: ignore[arg-type]
        (values.shape[0], values.shape[1] * 8 // bits),
        values,
        scales,
        drop_empty(pair),
        tiled,
    )


def _fake(
    a, scale_a, pair_a, form_a, tiled_a, b, scale_b, pair_b, form_b, tiled_b, config="best", path="best"
):
    left, weight = (pack(a, scale_a, pair_a, form_a, tiled_a), pack(b, scale_b, pair_b, form_b, tiled_b))
    torch._check(
        left.shape[1] == weight.shape[1],
        lambda: f"a (M, K) and b (N, K) differ in K: {left.shape} and {weight.shape}.",
    )
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


def register(run: Callable) -> Callable:
    """Register a function of these arguments and return the operator.

    b and its scales lie as the weight (N, K), so that the product is a b^T.
    """
    return operators.register(
        "block_scaled_mm(Tensor a, Tensor scale_a, Tensor? pair_a, str form_a, bool tiled_a, Tensor b, "
        'Tensor scale_b, Tensor? pair_b, str form_b, bool tiled_b, str config="best", str path="best") -> Tensor',
        run,
        _fake,
        instead=INSTEAD,
    )
