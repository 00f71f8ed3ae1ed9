"""Register the course's operators with torch.library, as torch.ops.tiles.NAME.

A registered operator works inside torch.compile(fullgraph=True), with dynamic shapes and under CUDA graphs. It costs
some microseconds more per call than the Python function of the same name, so the function calls it only where
`is_traced` says so.

torch.library.register_autograd would let each call pass the dispatcher twice: once to find that no gradient is wanted,
and once more to find the kernel. `_register_autograd` registers a kernel for the key Autograd that calls `run` at once
where nothing is left to dispatch to.

The transforms of torch.func work on the operators: `vmap` runs one after the other for each element of the batch, and
`grad`, `vjp` and `jacrev` use the backward pass. Forward-mode derivatives are refused, also those of `jvp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction  # at one level of torch.func's transforms

from tilelab.runtime.operands import refuse_tangents

LIBRARY = torch.library.Library("tiles", "FRAGMENT")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)  # rows may be padded, and B lies K by K


def register(
    schema: str,
    run: Callable,
    fake: Callable,
    *,
    instead: str = "",
    save: Callable | None = None,
    backward: Callable | None = None,
) -> Callable:
    """Register an operator and return it.

    `schema` is its name and arguments as torch.library writes them. `run` computes it. `fake` returns empty tensors of
    the shapes, strides and dtypes that `run` returns. torch.library.register_autograd describes `save(ctx, inputs,
    output)` and `backward(ctx, *gradients)`; `inputs` ends before arguments that were left at their defaults. Without
    them a backward pass raises RuntimeError, which names `instead`.
    """
    name = schema.partition("(")[0]

    def refuse(ctx, *gradients):
        raise RuntimeError(f"tiles::{name} has no backward pass: {instead}.")

    LIBRARY.define(schema, tags=TAGS)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tiles::{name}", fake, lib=LIBRARY)
    _register_autograd(name, run, save, backward or refuse)
    operator = getattr(torch.ops.tiles, name).default
    torch.library.register_vmap(f"tiles::{name}", functools.partial(_map_batch, operator), lib=LIBRARY)
    return operator


def _map_batch(operator: torch._ops.OpOverload, info: Any, batch_dims: tuple, *arguments: Any) -> tuple:
    """Run an operator for each element of a batch, as torch.vmap asks; return the stacked results."""
    if not info.batch_size:
        raise RuntimeError(
            f"{operator.name()} cannot be mapped over a batch of no elements: leave out the call."
        )
    results = [
        operator(
            *(each if dim is None else each.select(dim, index) for each, dim in zip(arguments, batch_dims))
        )
        for index in range(info.batch_size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])


def _register_autograd(name: str, run: Callable, save: Callable | None, differentiate: Callable) -> None:
    """Register what an operator does at the dispatch key Autograd. The arguments are those of `register`.

    `differentiate` is the backward pass.
    """
    operator = getattr(torch.ops.tiles, name).default
    keysets: dict[int, bool] = {}  # does `run` come next? by the bits of the set of dispatch keys

    def dispatch(keyset, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    class Recorded(_SingleLevelFunction):
        @staticmethod
        def forward(ctx, *arguments_and_keyset):
            *arguments, keyset = arguments_and_keyset
            if torch._C._are_functorch_transforms_active():  # the levels below may differentiate too
                with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                    output = dispatch(keyset, *arguments)
            else:
                output = dispatch(keyset, *arguments)
            if save:
                save(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx, *gradients):
            return *differentiate(ctx, *gradients), None  # the keyset has no gradient

    def run_or_record(keyset, *arguments):
        if forward_ad._current_level >= 0:
            refuse_tangents(f"tiles::{name}", *arguments)
        bits = keyset.raw_repr()
        if bits not in keysets:
            after = keyset & torch._C._after_autograd_keyset
            # While torch.compile or make_fx traces, and for a subclass of Tensor, another key precedes the device's.
            keysets[bits] = after.highestPriorityTypeId() in (
                torch._C.DispatchKey.CUDA,
                torch._C.DispatchKey.CPU,
            )
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if torch._C._are_functorch_transforms_active():
                with enable_single_level_autograd_function():
                    return Recorded.apply(*arguments, keyset)
            return Recorded.apply(*arguments, keyset)
        return run(*arguments) if keysets[bits] else dispatch(keyset, *arguments)

    LIBRARY.impl(name, run_or_record, "Autograd", with_keyset=True)


def is_traced(*tensors: Any) -> bool:
    """Return whether a call must pass torch's dispatcher.

    That is so where torch.compile traces it, autograd records it, a transform of torch.func or forward-mode AD is
    active, or a tensor has no memory of its own.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level >= 0:
        return True
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and (
            records
            and tensor.requires_grad
            or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.is_meta
        ):
            return True
    return False


def store(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return `result`, or `out` after copying the result there. An operator of torch.library returns new memory."""
    if out is None:
        return result
    if (out.shape, out.dtype) != (result.shape, result.dtype):
        raise ValueError(
            f"out must be {tuple(result.shape)} of {result.dtype}; it is {tuple(out.shape)} of {out.dtype}."
        )
    return out.copy_(result)
