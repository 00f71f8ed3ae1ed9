"""torch.ops.tiles.grouped_gemm, masked_grouped_gemm and moe, as torch.compile and autograd see them.

The backward pass of grouped_gemm is a grouped product for dA, and for dB a product whose sums run over the rows of a
group, torch.ops.tiles.grouped_weight_gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor

DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
INSTEAD = "use torch.ops.tiles.grouped_gemm with bfloat16, or torch.nn.functional.grouped_mm"


def _check(a, b, ends, dims, op):
    require_tensor("a", a, op, dtype=DTYPES, ndim=dims, in_memory=False)
    require_tensor("b", b, op, dtype=a.dtype, ndim=3, on=a.device, in_memory=False)
    name = "offsets" if dims == 2 else "counts"
    require_tensor(name, ends, op, dtype=torch.int32, ndim=1, on=a.device, in_memory=False)
    torch._check(
        a.shape[-1] == b.shape[1], lambda: f"the inner extents differ: a is {a.shape} and b is {b.shape}."
    )
    torch._check(
        ends.shape[0] == b.shape[0],
        lambda: f"{name} has {ends.shape[0]} elements; b has {b.shape[0]} groups.",
    )


def _fake(a, b, offsets, scale_a=None, scale_b=None, config="best"):
    _check(a, b, offsets, 2, "grouped_gemm")
    return a.new_empty(a.shape[0], b.shape[2], dtype=torch.bfloat16)


def _fake_masked(a, b, counts, scale_a=None, scale_b=None, config="best"):
    _check(a, b, counts, 3, "masked_grouped_gemm")
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2], dtype=torch.bfloat16)


def _fake_gradient(a, b, offsets):
    return a.new_empty(offsets.shape[0], a.shape[1], b.shape[1])


def _fake_moe(x, gate_up, down, topk_ids, topk_weights, scale_gate_up=None, scale_down=None, config="best"):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


def _backward(ctx, gradient):
    a, b, offsets = ctx.saved_tensors
    if a.dtype.itemsize == 1:
        raise RuntimeError("tiles::grouped_gemm has no backward pass for float8: use bfloat16.")
    gradient = gradient.contiguous()
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = torch.ops.tiles.grouped_gemm(gradient, b.transpose(1, 2), offsets)
        row = torch.arange(a.shape[0], device=a.device)
        grad_a = grad_a.masked_fill((row >= offsets[-1])[:, None], 0)  # rows of no group
    if ctx.needs_input_grad[1]:
        multiply = torch.ops.tiles.grouped_weight_gradient
        if b.stride(1) == 1:  # b is weight.transpose(1, 2): the gradient gets the layout of the weight
            grad_b = multiply(gradient, a, offsets).transpose(1, 2)
        else:
            grad_b = multiply(a, gradient, offsets)
    return grad_a, grad_b, None, None, None, None


def register(run: Callable, run_masked: Callable, run_gradient: Callable, run_moe: Callable) -> tuple:
    """Register the four operators and return them."""
    rest = 'Tensor? scale_a=None, Tensor? scale_b=None, str config="best") -> Tensor'
    return (
        operators.register(
            f"grouped_gemm(Tensor a, Tensor b, Tensor offsets, {rest}",
            run,
            _fake,
            save=_save,
            backward=_backward,
        ),
        operators.register(
            f"masked_grouped_gemm(Tensor a, Tensor b, Tensor counts, {rest}",
            run_masked,
            _fake_masked,
            instead=INSTEAD,
        ),
        operators.register(
            "grouped_weight_gradient(Tensor a, Tensor b, Tensor offsets) -> Tensor",
            run_gradient,
            _fake_gradient,
            instead=INSTEAD,
        ),
        operators.register(
            "moe(Tensor x, Tensor gate_up, Tensor down, Tensor topk_ids, Tensor topk_weights, "
            'Tensor? scale_gate_up=None, Tensor? scale_down=None, str config="best") -> Tensor',
            run_moe,
            _fake_moe,
            instead="call ch14.moe.moe, which differentiates in bfloat16",
        ),
    )
