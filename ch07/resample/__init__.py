"""Resample trajectories: rows of features at irregular source times, interpolated linearly at target times.

Read the ladder of kernels in resample.cu first, then `prepare` below. Source: the field note "TMA Optimization
Implementation Status", whose three phases are steps of the ladder.
"""

import ctypes
import math
import pathlib

import torch

from ch07.resample import operator
from ch07.resample.configs import (
    BEST,
    ELEMENTS,
    EXAMPLE,
    LADDER,
    ResampleConfig,
    Shape,
    configs,
    fit_config,
    parse,
)
from tilelab.runtime import build, cuda, device, operands, operators
from tilelab.runtime.plans import Plan, Planner

__all__ = [
    "BEST",
    "ELEMENTS",
    "EXAMPLE",
    "LADDER",
    "SOURCE",
    "ResampleConfig",
    "compulsory_bytes",
    "configs",
    "fit_config",
    "job",
    "parse",
    "prepare",
    "resample",
    "spec",
]

SOURCE = pathlib.Path(__file__).with_name("resample.cu")
LARGEST_TIME = 2.0**100  # differences of larger times overflow float32


def _neighbours(source_times, target_times) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of the source at or before each target, and of the next one."""
    last = source_times.shape[1] - 1
    left = (torch.searchsorted(source_times, target_times, right=True) - 1).clamp(0, max(last - 1, 0))
    return left, (left + 1).clamp(max=last)


def spec(
    features: torch.Tensor,  # (B, S, D)
    source_times: torch.Tensor,  # (B, S)
    target_times: torch.Tensor,  # (B, T)
) -> torch.Tensor:  # (B, T, D)
    """Interpolate in float64; source_times ascend.

    A target before the first source time takes the first row, and a target after the last source time the last row. At
    equal source times, a target takes the last of their rows.
    """
    left, right = _neighbours(source_times, target_times)
    begin, end = (source_times.gather(1, index).double()[..., None] for index in (left, right))
    time = target_times.double()[..., None]
    before, after = (
        features.gather(1, index[..., None].expand(-1, -1, features.shape[2])).double()
        for index in (left, right)
    )
    # Weight the rows first and divide afterwards: where the rows cancel, nothing has been rounded before they do.
    between = ((end - time) * before + (time - begin) * after) / (end - begin)
    return torch.where(time >= end, after, torch.where(time <= begin, before, between))


def compulsory_bytes(
    features: torch.Tensor,  # (B, S, D)
    source_times: torch.Tensor,  # (B, S)
    target_times: torch.Tensor,  # (B, T)
) -> int:
    """Return the bytes that every kernel must move: each needed source row once, the result, and all times."""
    left, right = _neighbours(source_times, target_times)
    begin, end = source_times.gather(1, left), source_times.gather(1, right)
    needed = torch.zeros_like(source_times, dtype=torch.int32)
    # A target at a source time, or outside all source times, needs only one row.
    needed.scatter_add_(1, left, (target_times < end).int())
    needed.scatter_add_(1, right, ((target_times >= end) | (target_times > begin)).int())
    row_bytes = features.shape[2] * features.element_size()
    return (
        (int((needed > 0).sum()) + target_times.numel()) * row_bytes
        + source_times.nbytes
        + target_times.nbytes
    )


def _choose_config(config, shape, itemsize: int, sms: int) -> ResampleConfig:
    named = configs(shape, itemsize, sms)
    return operands.choose_config(config, named, ResampleConfig, lambda: named[BEST], parse)


def job(
    config: str | ResampleConfig, target: str, dtype: torch.dtype = torch.bfloat16, shape: Shape = EXAMPLE
) -> build.Job:
    """Return the job that compiles a configuration for `target`, for a problem of `shape` (B, S, T, D) on an H200."""
    config = _choose_config(config, shape, dtype.itemsize, 132)
    return build.Job(
        f"{SOURCE}:{config.kernel}",
        {},
        config.constants(dtype, shape),
        target,
        config.threads // 32,
        smem_bytes=config.smem_bytes(dtype, shape),
        name=config.kernel,
    )


def _check_operands(features, source_times, target_times, out) -> torch.Tensor:
    """Return `out`, or new memory for it; raise ValueError for tensors that a kernel would read or write wrongly."""
    operands.require_tensor("features", features, "resample", dtype=tuple(ELEMENTS), ndim=3, contiguous=True)
    (batches, sources, depth), on = features.shape, features.device
    if not sources or not depth:
        raise ValueError(
            f"features must have at least one source and one feature; its shape is {(*features.shape,)}."
        )
    if sources * depth * features.element_size() >= 1 << 32:  # byte offsets in a batch have 32 bits
        raise ValueError(
            "the features of a batch must take less than 4 GiB; they take "
            f"{sources * depth * features.element_size():,} B."
        )
    operands.require_tensor(
        "source_times",
        source_times,
        "resample",
        dtype=torch.float32,
        shape=(batches, sources),
        on=on,
        contiguous=True,
    )
    operands.require_tensor(
        "target_times", target_times, "resample", dtype=torch.float32, ndim=2, on=on, contiguous=True
    )
    shape = (batches, target_times.shape[1])
    operands.require_tensor("target_times", target_times, "resample", shape=shape)
    if out is None:
        return features.new_empty(*shape, depth)
    operands.require_tensor(
        "out", out, "resample", dtype=features.dtype, shape=(*shape, depth), on=on, contiguous=True
    )
    operands.require_disjoint(
        {"out": out}, {"features": features, "source_times": source_times, "target_times": target_times}
    )
    return out


def _check_times(source_times) -> None:
    """Raise ValueError unless the source times ascend and are small enough for float32; waits for the GPU."""
    if not source_times.numel():
        return
    ascend = (source_times[:, 1:] >= source_times[:, :-1]).all()
    if bool((source_times.abs() <= LARGEST_TIME).all() & ascend):  # one wait; NaN compares false
        return
    if not bool((source_times.abs() <= LARGEST_TIME).all()):
        raise ValueError(f"source_times must be numbers up to {LARGEST_TIME:.0e}; some are larger or NaN.")
    unsorted = source_times[:, 1:] < source_times[:, :-1]
    if bool(unsorted.any()):
        batch, index = unsorted.nonzero()[0].tolist()
        raise ValueError(
            f"source_times must ascend in each batch; in batch {batch}, time {index + 1} is smaller than "
            f"time {index}: sort them, and features alike."
        )


def _plan(features, source_times, target_times, out, config) -> Plan:
    """Check the arguments, choose a configuration, and build its launch."""
    out = _check_operands(features, source_times, target_times, out)
    (batches, sources, depth), targets = features.shape, target_times.shape[1]
    shape, itemsize, sms = (
        (batches, sources, targets, depth),
        features.element_size(),
        device.current().sms or 132,
    )
    config = _choose_config(config, shape, itemsize, sms)
    if config.kernel == "bulk_rows" and (depth * itemsize % 16 or features.data_ptr() % 16):
        raise ValueError(
            f"bulk_rows needs rows that start at multiples of 16 bytes; a row takes {depth * itemsize} "
            f"bytes, and the first starts {features.data_ptr() % 16} past one: choose vectors."
        )
    operands.require_gpu(
        features,
        "resample",
        instead="compile it with ch07.resample.job and read its SASS, or use ch07.resample.spec",
    )
    if not out.numel():
        return Plan(lambda *tensors: None, out.shape, out.dtype, out.device, config)
    items = batches * math.ceil(targets / config.targets)
    grid = {
        "search_a_thread": math.ceil(out.numel() / config.threads),
        "persistent": min(items, 8 * sms),
        "lane0_search": min(items, 2 * sms),
        "ballot_search": min(items, 2 * sms),
    }.get(config.kernel, items)
    if max(grid, items) >= 1 << 31:
        raise ValueError(
            f"the problem has {max(grid, items):,} work items; a grid allows fewer than 2^31: split it."
        )
    vector_bytes = math.gcd(16, depth * itemsize, features.data_ptr(), out.data_ptr())
    macros = tuple(
        f"-D{name}={value}" for name, value in config.constants(features.dtype, shape, vector_bytes).items()
    )
    sizes = [ctypes.c_int(size) for size in (batches, sources, targets)]
    run = cuda.prepare_launch(
        cuda.load_kernel(SOURCE, config.kernel, macros),
        grid,
        config.threads,
        [features, source_times, target_times, out, *sizes],
        config.smem_bytes(features.dtype, shape),
        follows=(0, 1, 2, 3, None, None, None),
    )
    return Plan(run, out.shape, out.dtype, out.device, config)


planner = Planner(_plan, ("features", "source_times", "target_times"))


def prepare(
    features: torch.Tensor,  # (B, S, D)
    source_times: torch.Tensor,  # (B, S)
    target_times: torch.Tensor,  # (B, T)
    *,
    out: torch.Tensor | None = None,  # (B, T, D)
    config: str | ResampleConfig = "best",
    validate: bool = True,
) -> operands.Launch:
    """Return the Launch of out = the interpolation, on the stream that is current when it is called.

    features (B, S, D) and out (B, T, D) are bfloat16, float16 or float32. source_times (B, S) and target_times (B, T)
    are float32. All tensors are contiguous on one GPU. B, S and T are below 2^31 - 1,024. `config` is "best", a step of
    LADDER or a ResampleConfig. `validate` checks once that source_times ascend, and waits for the GPU.

    Targets need not be sorted. A NaN target gives NaN, and a row with NaN or infinity may give NaN. The error is little
    more than half a unit in the last place, unless two rows cancel to less than 2^-40 of themselves (float32: 2^-28).
    Raises ValueError for bad arguments and Unsupported without TMA.
    """
    if validate:
        _check_operands(features, source_times, target_times, out)
        _check_times(source_times)
    return planner.prepare((features, source_times, target_times), out, config)


@operator.register
def resample_operator(
    features: torch.Tensor,  # (B, S, D)
    source_times: torch.Tensor,  # (B, S)
    target_times: torch.Tensor,  # (B, T)
    config: str = "best",
) -> torch.Tensor:  # (B, T, D)
    # To check the times the host would wait for the GPU, which a CUDA graph cannot.
    return planner.run((features, source_times, target_times), None, config)


def resample(
    features: torch.Tensor,  # (B, S, D)
    source_times: torch.Tensor,  # (B, S)
    target_times: torch.Tensor,  # (B, T)
    *,
    out: torch.Tensor | None = None,  # (B, T, D)
    config: str | ResampleConfig = "best",
    validate: bool = True,
) -> torch.Tensor:  # (B, T, D)
    """Return the features of source_times at target_times.

    Arguments and errors as for `prepare`; `validate` checks the times at each call. Under torch.compile and where
    autograd records, this is torch.ops.tiles.resample, which does not check the times, has no backward pass, and takes
    a `config` by name.
    """
    if operators.is_traced(features, source_times, target_times):
        return operators.store(resample_operator(features, source_times, target_times, config), out)
    tensors = features, source_times, target_times
    plan = planner.find(tensors, out, config)
    if validate:
        _check_times(source_times)
    return planner.launch(plan, tensors, out)
