"""torch.ops.tiles.gemm: the GEMM as torch.compile and autograd see it.

The backward pass is two more products: dA = dC B^T and dB = A^T dC.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def _fake(a, b, scale_a=None, scale_b=None, config="best"):
    require_tensor("a", a, "gemm", dtype=DTYPES, ndim=2, in_memory=False)
    require_tensor("b", b, "gemm", dtype=a.dtype, ndim=2, on=a.device, in_memory=False)
    torch._check(
        a.shape[1] == b.shape[0], lambda: f"the inner extents differ: a is {a.shape} and b is {b.shape}."
    )
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.bfloat16 if a.dtype.itemsize == 1 else a.dtype)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _by_rows(matrix):
    """Return a matrix that is stored row by row, with rows of whole 16 bytes: itself or a copy."""
    rows, columns = matrix.shape
    if (
        matrix.stride(1) == 1
        and matrix.stride(0) >= columns
        and not (matrix.stride(0) % 8 or matrix.storage_offset() % 8)
    ):
        return matrix
    return matrix.new_empty(rows, (columns + 7) // 8 * 8)[:, :columns].copy_(matrix)


def _multiply(x, y):
    # The kernel stores rows of whole 16 bytes.
    return torch.ops.tiles.gemm(_by_rows(x), y) if y.shape[1] % 8 == 0 else torch.mm(x, y)


def _backward(ctx, gradient):
    a, b = ctx.saved_tensors
    if a.dtype.itemsize == 1:
        raise RuntimeError(
            "tiles::gemm has no backward pass for float8: use ch14.gemm with bfloat16, or torch.mm."
        )
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _multiply(gradient, b.T)
    if ctx.needs_input_grad[1]:
        if b.stride(0) == 1:  # b is weight.T: the gradient gets the layout of the weight
            grad_b = _multiply(gradient.T, a).T
        else:
            grad_b = _multiply(a.T, _by_rows(gradient))
    return grad_a, grad_b, None, None, None


def register(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register `run(a, b, scale_a=None, scale_b=None, config="best")` and return the operator."""
    return operators.register(
        'gemm(Tensor a, Tensor b, Tensor? scale_a=None, Tensor? scale_b=None, str config="best") -> Tensor',
        run,
        _fake,
        save=_save,
        backward=_backward,
    )
