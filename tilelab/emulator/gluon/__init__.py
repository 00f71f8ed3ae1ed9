"""Run Gluon kernels on CPU tensors, one program after the other, and name the rule that a kernel breaks.

Triton has no interpreter for Gluon. Here the Python text of a kernel runs as it stands, with stand-ins for
`triton.experimental.gluon.language` and its modules for Ampere, Hopper and Blackwell. The roles of `gl.warp_specialize`
take turns at random. TMA lands its bytes late, in any order. An asynchronous product reads its operands late, and a
tile stays in use until a role has waited for the engine, so a read or an overwrite before that is a fault. Registers,
bank conflicts and races between the warps of one role are not modelled: a role is one thread. What the emulator lacks
raises GluonError, which names it.

After `enable()`, a launch `kernel[grid](…)` on CPU tensors runs here; one on CUDA tensors is unchanged.

Read `translate` first: it leads the names of a kernel to stand-ins. `values` holds blocks, numbers and pointers,
`memory` tiles, `instructions` the engines with their rules, and `program` the turns.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tilelab.emulator.gluon.program import SEEDS, GluonError, Program, order_programs, with_seed

__all__ = ["SEEDS", "GluonError", "enable", "is_enabled", "replacing", "run", "with_seed"]

_replaced = contextvars.ContextVar("replaced", default=None)


@contextlib.contextmanager
def replacing(**functions: Callable) -> Iterator[None]:
    """Let kernels call these functions instead of those of the same names."""
    token = _replaced.set(functions)
    try:
        yield
    finally:
        _replaced.reset(token)


def enable() -> None:
    """Let launches of Gluon kernels on CPU tensors run in the emulator, in this process."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch, tune = JITFunction.run, Autotuner.run
    if hasattr(launch, "emulates"):
        return

    def run_or_launch(kernel, *arguments, grid, warmup, **options):
        if warmup or not kernel.is_gluon() or not _is_on_cpu([*arguments, *options.values()]):
            return launch(kernel, *arguments, grid=grid, warmup=warmup, **options)
        return run(kernel, grid, *arguments, **options)

    def run_or_tune(tuner, *arguments, **options):
        """Run the first configuration, since nothing is timed here."""
        kernel = tuner
        while hasattr(kernel, "fn") and not isinstance(kernel, JITFunction):
            kernel = kernel.fn
        if not getattr(kernel, "is_gluon", bool)() or not _is_on_cpu([*arguments, *options.values()]):
            return tune(tuner, *arguments, **options)
        config = tuner.configs[0]
        if config.pre_hook:
            config.pre_hook({**dict(zip(tuner.arg_names, arguments)), **options, **config.all_kwargs()})
        return tuner.fn.run(*arguments, **{**options, **config.all_kwargs()})

    run_or_launch.emulates = True
    JITFunction.run, Autotuner.run = run_or_launch, run_or_tune


def _is_on_cpu(arguments: Sequence[Any]) -> bool:
    tensors = [getattr(each, "base", each) for each in arguments]
    tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
    return not any(each.is_cuda for each in tensors) and (bool(tensors) or not torch.cuda.is_available())


def is_enabled() -> bool:
    """Return whether `enable` was called in this process."""
    from triton.runtime.jit import JITFunction

    return hasattr(JITFunction.run, "emulates")


def run(kernel: Any, grid: int | Sequence[int] | Callable, *arguments: Any, **options: Any) -> None:
    """Run every program of `kernel[grid](*arguments, **options)` on CPU tensors. GluonError names a broken rule."""
    from tilelab.emulator.gluon.translate import Translator
    from tilelab.emulator.gluon.values import unwrap

    options = {
        name: value
        for name, value in options.items()
        if name in kernel.arg_names or _check_option(name, value)
    }
    num_warps = options.get("num_warps", 4)
    given = {name: value for name, value in options.items() if name in kernel.arg_names}
    bound = inspect.signature(kernel.fn).bind(*arguments, **given)
    bound.apply_defaults()
    grid = grid(dict(bound.arguments)) if callable(grid) else grid
    grid = [grid] if isinstance(grid, int) else [int(extent) for extent in grid]
    if not 1 <= len(grid) <= 3 or any(extent < 0 for extent in grid):
        raise ValueError(f"a grid has one to three extents that are not negative; this one is {grid}")
    extents = (*grid, 1, 1)[:3]
    translator = Translator(_replaced.get() or {})
    function = translator.function(kernel)
    constants = {each.name for each in kernel.params if each.is_constexpr}
    values = {
        name: translator.resolve(unwrap(value), name) if name in constants else _take(value)
        for name, value in bound.arguments.items()
    }
    indices = list(itertools.product(*(range(extent) for extent in reversed(extents))))
    for number in order_programs(len(indices)):
        program = Program(indices[number][::-1], extents, number, num_warps)
        program.run(functools.partial(function, **values))


def _check_option(name: str, value: Any) -> bool:
    """Return whether to keep an option of the launch that is no parameter of the kernel."""
    from triton.backends.nvidia.compiler import CUDAOptions

    if name == "num_ctas" and value != 1:
        raise GluonError(f"the emulator does not know num_ctas={value}: it runs no clusters")
    if name not in {*CUDAOptions.__dataclass_fields__, "pre_hook", "stream", "device_type"}:
        raise GluonError(f"the launch has no option {name!r}, and the kernel has no such parameter")
    return name == "num_warps"


def _take(value: Any) -> Any:
    """Return an argument of the launch as the kernel sees it."""
    from triton.experimental.gluon import language as gl

    from tilelab.emulator.gluon import instructions, program
    from tilelab.emulator.gluon.values import GLUON, Memory, Value, as_value, unwrap

    value = unwrap(value)
    if hasattr(value, "block_shape"):
        if getattr(value, "round_f32_to_tf32", False):
            program.refuse("round_f32_to_tf32=True of a TensorDescriptor")
        layout, padding = value.layout, getattr(value, "padding", "zero")
        return instructions.Descriptor(value.base, value.block_shape, layout, padding)
    if isinstance(value, torch.Tensor):
        if value.dtype not in GLUON:
            program.refuse(f"a tensor of {value.dtype}")
        return Value(0, gl.pointer_type(GLUON[value.dtype]), None, Memory(value))
    if isinstance(value, tuple):
        return tuple(_take(each) for each in value)
    return as_value(value) if isinstance(value, int | float) else value
