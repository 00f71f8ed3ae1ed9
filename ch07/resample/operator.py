"""torch.ops.tiles.resample: the interpolation as torch.compile sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilelab.runtime import operators
from tilelab.runtime.operands import require_tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _fake(features, source_times, target_times, config="best"):
    require_tensor("features", features, "resample", dtype=DTYPES, ndim=3, in_memory=False)
    for name, times in (("source_times", source_times), ("target_times", target_times)):
        require_tensor(
            name, times, "resample", dtype=torch.float32, ndim=2, on=features.device, in_memory=False
        )
    torch._check(
        source_times.shape == features.shape[:2] and target_times.shape[0] == features.shape[0],
        lambda: (
            f"features {tuple(features.shape)}, source_times {tuple(source_times.shape)} and target_times "
            f"{tuple(target_times.shape)} must agree in B, and the first two in S."
        ),
    )
    return features.new_empty(features.shape[0], target_times.shape[1], features.shape[2])


def register(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Register `run(features, source_times, target_times, config="best")` and return the operator."""
    return operators.register(
        'resample(Tensor features, Tensor source_times, Tensor target_times, str config="best") -> Tensor',
        run,
        _fake,
        instead="gather the neighbours of each target with torch.searchsorted and interpolate in torch, as "
        "ch07.resample.spec does",
    )
