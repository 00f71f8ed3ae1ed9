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
    torch._check(
        k.shape == v.shape, lambda: f"k and v must have one shape; they are {k.shape} and {v.shape}."
    )
    if q.is_meta:  # a trace checks the rest when it runs
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            require_tensor(name, tensor, "attention", dtype=q.dtype, ndim=4, on=q.device, in_memory=False)
        if k.shape[::3] != q.shape[::3]:
            raise ValueError(
                f"k and v must have q's batch and head dimension; they are {tuple(k.shape)}, and q is "
                f"{tuple(q.shape)}."
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
