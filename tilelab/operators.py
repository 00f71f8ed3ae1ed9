"""Register the course's operators with torch.library, as torch.ops.tiles.NAME.

A registered operator works inside torch.compile(fullgraph=True), with dynamic shapes and under CUDA graphs. It costs
some microseconds more per call than the Python function of the same name, so the function calls it only where
`is_traced` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("tiles", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # rows may be padded, and B lies K by K


def register(schema: str, run: Callable, fake: Callable, *, instead: str = "", save: Callable | None = None,
             backward: Callable | None = None):
    """Register an operator and return it.

    `schema` is its name and arguments as torch.library writes them. `run` computes it. `fake` returns empty tensors of
    the shapes, strides and dtypes that `run` returns. torch.library.register_autograd describes `save(ctx, inputs,
    output)` and `backward(ctx, *gradients)`. Without them a backward pass raises RuntimeError, which names `instead`.
    """
    name = schema.partition("(")[0]

    def refuse(ctx, *gradients):
        raise RuntimeError(f"tiles::{name} has no backward pass: {instead}.")

    LIBRARY.define(schema, tags=TAGS)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tiles::{name}", fake, lib=LIBRARY)
    torch.library.register_autograd(f"tiles::{name}", backward or refuse, setup_context=save, lib=LIBRARY)
    return getattr(torch.ops.tiles, name).default


def is_traced(*tensors: Any) -> bool:
    """Return whether torch.compile traces this call, autograd records it, or a tensor has no memory of its own."""
    if torch.compiler.is_compiling():
        return True
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (records and tensor.requires_grad or type(tensor) not in (
                torch.Tensor, torch.nn.Parameter)):
            return True
    return False


def store(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return `result`, or `out` after copying the result there. An operator of torch.library returns new memory."""
    if out is None:
        return result
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise ValueError(f"out must be {tuple(result.shape)} of {result.dtype}; it is {tuple(out.shape)} of "
                         f"{out.dtype}.")
    return out.copy_(result)
