"""torch.ops.tiles.attention: flash attention as torch.compile sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor


def make_out(q: torch.Tensor) -> torch.Tensor:
    """Return an empty result for q (B, H, S, D). Where q is a transposed (B, S, H, D), the result is one too, as in
    torch's flash attention: the product that follows reads the heads of a token as one row."""
    b, h, s, d = q.shape
    return q.new_empty(b, s, h, d).transpose(1, 2) if q.stride(1) < q.stride(2) else q.new_empty(q.shape)


def _fake(q, k, v, is_causal=False, scale=None, config="best"):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, tensor, "attention", dtype=q.dtype, ndim=4, on=q.device, in_memory=False)
    torch._check(
        k.shape == v.shape and k.shape[::3] == q.shape[::3],
        lambda: (
            "k and v must have one shape, with q's batch and head dimension; they are "
            f"{tuple(k.shape)} and {tuple(v.shape)}, and q is {tuple(q.shape)}."
        ),
    )
    return make_out(q)


def register(run: Callable) -> Callable:
    """Register `run(q, k, v, is_causal=False, scale=None, config="best")` and return the operator."""
    return operators.register(
        'attention(Tensor q, Tensor k, Tensor v, bool is_causal=False, float? scale=None, str config="best") -> Tensor',
        run,
        _fake,
        instead="use torch.nn.functional.scaled_dot_product_attention",
    )
