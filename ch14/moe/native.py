"""Launch the CUDA kernels of grouped.cu: one product per expert, on Hopper, with group sizes that only the GPU knows."""

from __future__ import annotations

import ctypes
import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from ch14.fp8_gemm.configs import BLOCK, Fp8Config, fill_ring
from tilelab.runtime import build, cuda, device
from tilelab.runtime.tensor_map import make_tensor_map

SOURCE = pathlib.Path(__file__).with_name("grouped.cu")
SMEM_BYTES, GROUP_BYTES = 232448, 16  # of a block on sm_90a, and of one group in the kernel's list


def configs() -> dict[str, Fp8Config]:
    """Return configurations by name, all of them worth a try for experts with many rows."""
    tiles = [
        (2, 2, 128),
        (2, 2, 64),
        (2, 2, 96),
        (2, 2, 112),
        (1, 2, 128),
        (1, 2, 64),
        (3, 1, 128),
        (3, 1, 96),
        (2, 1, 160),
    ]
    found = [fill_ring(*tile, cluster=cluster) for tile in tiles for cluster in (1, 2)]
    found += [
        fill_ring(2, 2, n, epilogue_warps=3, cluster=cluster) for n in (64, 96, 128) for cluster in (1, 2)
    ]
    found += [fill_ring(2, 2, 128, epilogue_warps=3, cluster=2, group_m=16)]
    return {config.name: config for config in found}


def smem_bytes(config: Fp8Config, experts: int) -> int:
    """Return the shared memory of a block: as in fp8.cu, with a list of groups in place of its flags."""
    return config.smem_bytes - 4 * config.consumers + GROUP_BYTES * (experts + 1)


def rejection(config: Fp8Config, experts: int, n: int) -> str:
    """Return in one sentence why `config` cannot multiply these experts' matrices of N columns, or an empty string."""
    if (needed := smem_bytes(config, experts)) > SMEM_BYTES:
        return (
            f"{experts} experts need {needed:,} B of shared memory with {config}; Hopper has {SMEM_BYTES:,}."
        )
    if config.splits > 1:
        return "groups do not split K: splits must be 1."
    if config.cluster > 1 and n % (config.block_n * config.cluster):
        return (
            f"N is {n}; a cluster of {config.cluster} needs a multiple of {config.block_n * config.cluster}."
        )
    return ""


def choose_config(tokens: int, experts: int, n: int, k: int) -> Fp8Config:
    """Return a configuration for so many rows in so many groups of sizes that the host does not know."""
    rows = tokens / max(experts, 1)
    family = (1, 2, 128) if rows <= 64 else (2, 2, 128)
    cluster = 2 if n % 256 == 0 and rows > 64 else 1
    epilogue = {"epilogue_warps": 3} if family[0] == 2 else {}
    return fill_ring(*family, cluster=cluster, **epilogue)


def bind_arguments(
    config: Fp8Config, a, b, ends, out, scale_a, scale_b, make_map: Callable[..., Any]
) -> dict[str, Any]:
    """Return the arguments of the kernel by name. `launch` describes the tensors; scale_a has rows side by side."""
    capacity = a.shape[1] if a.ndim == 3 else 0
    a, out = a.reshape(-1, a.shape[-1]), out.reshape(-1, out.shape[-1])
    experts, k, n = b.shape
    return {
        "a_map": make_map(a.view(torch.uint8), (config.block_m // config.cluster, BLOCK), swizzle="128B"),
        "b_map": make_map(b.mT.view(torch.uint8), (1, config.block_n, BLOCK), swizzle="128B"),
        "scale_a_map": make_map(scale_a.T, (1, config.block_m)),
        "c_map": make_map(
            out,
            (16 if config.epilogue_warps else 64, config.subtile_columns),
            swizzle=f"{2 * config.subtile_columns}B",
        ),
        "c": out,
        "scale_b": scale_b,
        "ends": ends,
        **{
            name: ctypes.c_int(value)
            for name, value in dict(experts=experts, capacity=capacity, n=n, k=k).items()
        },
    }


def arrange_scales(scale_a: torch.Tensor) -> torch.Tensor:
    """Return scale_a as (rows, K / 128) with rows side by side in columns at multiples of 16 bytes: copied if needed."""
    scale_a = scale_a.reshape(-1, scale_a.shape[-1])
    rows, blocks = scale_a.shape
    if scale_a.stride(0) == 1 and scale_a.stride(1) % 4 == 0 and scale_a.data_ptr() % 16 == 0:
        if scale_a.stride(1) >= rows:
            return scale_a
    pitch = math.ceil(rows / 4) * 4
    return torch.empty_strided((rows, blocks), (1, pitch), dtype=torch.float32, device=scale_a.device).copy_(
        scale_a
    )


def prepare(
    a: torch.Tensor,  # (tokens, K), or masked (experts, capacity, K)
    b: torch.Tensor,  # (experts, K, N)
    ends: torch.Tensor,  # (experts,)
    out: torch.Tensor,  # (tokens, N), or masked (experts, capacity, N)
    scale_a: torch.Tensor,  # (tokens, K / 128), or masked (experts, capacity, K / 128)
    scale_b: torch.Tensor,  # (experts, K / 128, N / 128)
    config: str | Fp8Config = "best",
) -> Callable[..., None]:
    """Return a function of the six tensors that launches the product on torch's current stream.

    Arguments as for `launch`. The function may be called with other tensors of the same shapes and strides.
    """
    experts, k, n = b.shape
    if config == "best":
        config = choose_config(a.numel() // k, experts, n, k)
    elif isinstance(config, str):
        config = configs()[config]
    if reason := rejection(config, experts, n):
        raise ValueError(reason)
    sms = device.current().sms // config.cluster * config.cluster
    arguments = bind_arguments(config, a, b, ends, out, arrange_scales(scale_a), scale_b, make_tensor_map)
    names = ("a_map", "b_map", "ends", "c_map", "scale_a_map", "scale_b")
    run = cuda.prepare_launch(
        cuda.load_kernel(
            SOURCE, "grouped_fp8", tuple(f"-D{name}={value}" for name, value in config.constants().items())
        ),
        sms,
        config.threads,
        arguments,
        smem_bytes(config, experts),
        cluster=config.cluster,
        early=config.pdl,
        follows={**{name: place for place, name in enumerate(names)}, "c": 3},
    )

    def call(a, b, ends, out, scale_a, scale_b) -> None:
        run(a, b, ends, out, arrange_scales(scale_a), scale_b)

    return call


def launch(
    a: torch.Tensor,  # (tokens, K), or masked (experts, capacity, K)
    b: torch.Tensor,  # (experts, K, N)
    offsets: torch.Tensor,  # (experts,)
    out: torch.Tensor,  # (tokens, N), or masked (experts, capacity, N)
    scale_a: torch.Tensor | None = None,  # (tokens, K / 128), or masked (experts, capacity, K / 128)
    scale_b: torch.Tensor | None = None,  # (experts, K / 128, N / 128)
    config: str | Fp8Config = "best",
) -> torch.Tensor:
    """Multiply each group of rows of `a` with its matrix of `b`, store into `out`, and return `out`.

    a and b are float8_e4m3fn, out is bfloat16, scales are float32. K is a multiple of 128 and contiguous in a and b
    (pass weight.mT), N a multiple of 8; scale_b has K / 128 contiguous. `offsets` is int32, on the GPU: the row after
    the last one of each group, or for a masked product the rows that count in each. Other rows of `out` keep what they
    hold. scale_a is copied unless its rows lie side by side, in columns at multiples of 16 bytes.
    """
    tensors = a, b, offsets, out, scale_a, scale_b
    prepare(*tensors, config=config)(*tensors)
    return out


def job(config: Fp8Config, target: str = "sm_90a") -> build.Job:
    """Return how `config` is compiled, for tilelab.runtime.build."""
    return build.Job(
        f"{SOURCE}:grouped_fp8",
        {},
        config.constants(),
        target,
        config.threads // 32,
        smem_bytes=smem_bytes(config, 1),
        name=str(config),
    )
