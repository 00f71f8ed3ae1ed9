"""Plan an operator once for each kind of arguments, so that a later call only fills in addresses and launches.

A plan is made from arguments that were checked. It holds for all tensors of the same kind: the same shapes, strides,
dtypes and devices, and addresses with the same remainder by 16. It holds no tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilelab.runtime.operands import Launch, require_disjoint, require_tensor

MOST_PLANS = 1024  # of one operator; a program with more kinds of arguments plans them again


@dataclasses.dataclass(frozen=True)
class Plan:
    """The way an operator runs on one kind of arguments.

    `launch` takes the input tensors (None for one that was left out) and then `out`, a tensor of `shape` and `dtype` on
    `device`, contiguous unless `strides` says otherwise. `skipped`, `fallback` and `chosen` mean the same as in a
    `Launch`.
    """

    launch: Callable[..., object]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    config: Any
    skipped: Sequence[tuple[Any, str]] = ()
    fallback: str = ""
    chosen: str = ""
    strides: tuple[int, ...] | None = None

    def make_out(self) -> torch.Tensor:
        """Return new memory for the result."""
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


def describe(tensor: torch.Tensor | None) -> tuple | None:
    """Return all that a plan may depend on of a tensor, hashable: not its contents, of its address the last bits."""
    if tensor is None:
        return None
    bits = tensor.data_ptr() % 16
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, bits, tensor.is_neg()


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, where nothing can be measured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Planner:
    """Run an operator by its plans. `names` are the names of its input tensors, for messages.

    `make(*inputs, out, *options)` checks the arguments and returns a Plan, or raises an error that says what is wrong.
    """

    def __init__(self, make: Callable[..., Any], names: Sequence[str]):
        self.make, self.names = make, names
        self.plans: dict[tuple, Any] = {}
        _planners.append(self)

    def find(self, inputs: tuple, out: torch.Tensor | None, *options: Any) -> Any:
        """Return the plan for arguments of this kind, made now if there is none."""
        try:
            # A plan is for the current GPU. torch.cuda.current_device takes three times longer than this function.
            gpu = inputs[0].is_cuda and torch._C._cuda_getDevice()
            key: Any = (*map(describe, inputs), describe(out), options, gpu)
            plan = self.plans.get(key)
        except (AttributeError, RuntimeError, TypeError):
            key = plan = None  # no dense tensor: `make` says what is wrong with it
        if plan is None:
            plan = self._make(inputs, out, options)
            if key is not None and not ("tune" in options and is_capturing()):  # tuned at a later call
                if len(self.plans) >= MOST_PLANS:
                    self.plans.clear()
                self.plans[key] = plan
        return plan

    def _make(self, inputs: tuple, out: torch.Tensor | None, options: tuple) -> Any:
        """Make a plan. Where `make` refuses an operand without rows, plan for one row and launch nothing."""
        try:
            return self.make(*inputs, out, *options)
        except ValueError:
            if not (isinstance(inputs[0], torch.Tensor) and inputs[0].ndim and not inputs[0].shape[0]):
                raise
        rows = {"scale_a", self.names[0]}  # the operands that have a row for each row of the result
        one_row = (
            each.new_zeros(1, *each.shape[1:]) if name in rows and each is not None else each
            for name, each in zip(self.names, inputs)
        )
        plan = self.make(*one_row, None, *options)
        shape = (0, *plan.shape[1:])
        if out is not None:
            require_tensor("out", out, "an operator", dtype=plan.dtype, shape=shape, on=plan.device)
        return dataclasses.replace(plan, launch=lambda *tensors: None, shape=shape)

    def run(self, inputs: tuple, out: torch.Tensor | None, *options: Any) -> torch.Tensor:
        """Run the operator and return `out`, or new memory."""
        return self.launch(self.find(inputs, out, *options), inputs, out)

    def launch(self, plan: Plan, inputs: tuple, out: torch.Tensor | None) -> torch.Tensor:
        """Run a plan that was found for these tensors, and return `out`, or new memory."""
        if plan.fallback:
            warnings.warn(plan.fallback, stacklevel=4)
        if out is None:
            out = plan.make_out()
        else:  # which depends on the addresses
            require_disjoint({"out": out}, dict(zip(self.names, inputs)))
        plan.launch(*inputs, out)
        return out

    def prepare(self, inputs: tuple, out: torch.Tensor | None, *options: Any) -> Launch:
        """Make a new plan for these tensors, and return a Launch that keeps them alive."""
        plan = self._make(inputs, out, options)
        out = plan.make_out() if out is None else out
        return Launch(
            functools.partial(plan.launch, *inputs, out),
            out,
            plan.config,
            skipped=plan.skipped,
            fallback=plan.fallback,
            chosen=plan.chosen,
        )


_planners: list[Planner] = []


def forget_plans() -> None:
    """Let every operator plan its next call anew, for example after the file of a kernel was edited."""
    for planner in _planners:
        planner.plans.clear()
