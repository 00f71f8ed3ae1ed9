"""torch.ops.tiles.quantise and dequantise: the conversions as torch.compile sees them.

An operator takes and returns tensors, so a Packed is passed as its `values`, `scales` and `pair`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ch14.mx_formats.packing import Packed, empty
from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor


def list_tensors(packed: Packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values, the scales and the pair. An operator cannot return None: a format without a pair has an empty
    one."""
    return (
        packed.values,
        packed.scales,
        packed.scales.new_empty(0, dtype=torch.float32) if packed.pair is None else (packed.pair),
    )


def drop_empty(pair: torch.Tensor | None) -> torch.Tensor | None:
    """Return None for the empty pair that `list_tensors` makes for a format without one."""
    return pair if pair is not None and pair.numel() else None


def _fake_quantise(x, format="mxfp8_e4m3", rule="floor", tiled=False, tensor_scale=None, config="best"):
    require_tensor("x", x, "quantise", dtype=torch.bfloat16, ndim=2, in_memory=False)
    return list_tensors(empty(tuple(x.shape), format, x.device, tiled))


def _fake_dequantise(values, scales, pair, format, columns, tiled=False, config="best"):
    return values.new_empty(values.shape[0], columns, dtype=torch.bfloat16)


def register_quantise(run: Callable) -> Callable:
    """Register a function of these arguments, which returns values, scales and pair; return the operator."""
    return operators.register(
        'quantise(Tensor x, str format="mxfp8_e4m3", str rule="floor", bool tiled=False, float? tensor_scale=None, '
        'str config="best") -> (Tensor, Tensor, Tensor)',
        run,
        _fake_quantise,
        instead="quantise x.detach(), or pass the gradient straight through with x + (y - x).detach()",
    )


def register_dequantise(run: Callable) -> Callable:
    """Register a function of these arguments and return the operator."""

    def run_with_pair(values, scales, pair, *arguments):
        return run(values, scales, drop_empty(pair), *arguments)

    return operators.register(
        "dequantise(Tensor values, Tensor scales, Tensor? pair, str format, SymInt columns, bool tiled=False, "
        'str config="best") -> Tensor',
        run_with_pair,
        _fake_dequantise,
        instead="codes have no gradient",
    )
