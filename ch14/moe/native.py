"""Launch the CUDA kernels of this folder on Hopper: one product per expert, with group sizes that only the GPU knows.

grouped.cu is for fp8 and experts with many rows, swapped.cu for bf16, and for fp8 and experts with few rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ch14.fp8_gemm.configs import BLOCK
from tilelab.runtime import build, cuda, device, spoken
from tilelab.runtime.tensor_map import make_tensor_map

FOLDER = pathlib.Path(__file__).parent
SMEM_BYTES, GROUP_BYTES = 232448, 16  # of a block on sm_90a, and of one group in the kernel's list
SMS = 132
# For more rows, the plain product and a kernel for SwiGLU (fp8), or Triton (bf16), take less time.
SWIGLU_TOKENS = 8, 16, 32, 64
PHRASES = {
    "block_w tokens": "{}×{} swapped",
    "num_stages": "{} stages",
    "consumers": "{} consumers",
    "fragments": "{} fragments",
    "parts": "C in {} parts",
    "group_m": "group {}",
    "swiglu": "SwiGLU",
}
OF_TILED = {"block_m block_n": "{}×{}"} | {
    name: PHRASES[name] for name in ("num_stages", "consumers", "group_m")
}


@dataclass(frozen=True)
class TiledConfig:
    """Hold the tile and the ring of grouped.cu: 64 x `consumers` rows of A by `block_n` columns of C, in fp8.

    A stage holds 128 columns of K.
    """

    consumers: int = 2
    block_n: int = 192
    num_stages: int = 4
    group_m: int = 8
    pdl = True

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def part(self) -> int:
        """The columns of C that a store brings: they divide block_n, so that no store reaches into the next tile."""
        return math.gcd(self.block_n, 64)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×192 · 4 stages · 2 consumers"."""
        return spoken.say(self, OF_TILED, always=("block_m block_n", "num_stages", "consumers"))

    def __str__(self) -> str:
        return self.name

    def smem_bytes(self, fp8: bool = True) -> int:
        """Return the shared memory of a block, without the list of groups."""
        stage = (self.block_m + self.block_n) * BLOCK + 4 * self.block_m + 16
        return self.num_stages * stage + self.block_m * self.block_n * 2

    def constants(self, fp8: bool = True) -> dict[str, int]:
        """Return the -D constants of grouped.cu."""
        names = "CONSUMERS", "BLOCK_N", "STAGES", "GROUP_M"
        return dict(zip(names, (self.consumers, self.block_n, self.num_stages, self.group_m)))


@dataclass(frozen=True)
class SwappedConfig:
    """Hold the tile and the ring of swapped.cu: `tokens` rows of A by 64 x `fragments` x `consumers` columns of C.

    A stage holds 128 bytes of K. A tile of C is stored in `parts`.  With
    `swiglu`, which needs two fragments, half of the columns are gates, and in fp8 the result is quantised.
    """

    tokens: int
    consumers: int = 2
    fragments: int = 1
    num_stages: int = 4
    parts: int = 1
    group_m: int = 8
    swiglu: bool = False
    pdl = True

    @property
    def block_m(self) -> int:
        return self.tokens

    @property
    def block_w(self) -> int:
        """The rows of B in a stage."""
        return 64 * self.fragments * self.consumers

    @property
    def block_n(self) -> int:
        """The columns of C in a tile."""
        return self.block_w // (1 + self.swiglu)

    @property
    def a_box(self) -> int:
        """The rows of A that one load brings."""
        return self.tokens // (1 if self.tokens % 64 else 4)

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def name(self) -> str:
        """Return the spoken name, such as "128×64 swapped · 8 stages · 2 consumers"."""
        return spoken.say(self, PHRASES, always=("block_w tokens", "num_stages", "consumers"))

    def __str__(self) -> str:
        return self.name

    def smem_bytes(self, fp8: bool) -> int:
        """Return the shared memory of a block, without the list of groups."""
        scales = -(-4 * (self.tokens + 4) // 128) * 128 if fp8 else 0
        stage = (self.block_w + self.tokens) * 128 + scales + 16
        staged = min(self.parts, 2) * self.block_n * self.tokens // self.parts * 2
        return self.num_stages * stage + (192 * self.tokens if fp8 and self.swiglu else staged)

    def constants(self, fp8: bool) -> dict[str, int]:
        """Return the -D constants of swapped.cu."""
        return {
            "FP8": int(fp8),
            "TOKENS": self.tokens,
            "CONSUMERS": self.consumers,
            "FRAGMENTS": self.fragments,
            "STAGES": self.num_stages,
            "PARTS": self.parts,
            "GROUP_M": self.group_m,
            "SWIGLU": self.swiglu * (1 + fp8),
        }


Config = TiledConfig | SwappedConfig


@functools.cache
def tile(block_n: int, consumers: int = 2) -> TiledConfig:
    """Return a configuration of grouped.cu whose ring leaves room for a list of 256 groups."""
    for stages in range(16, 2, -1):
        config = TiledConfig(consumers, block_n, stages)
        if config.smem_bytes() + GROUP_BYTES * 257 <= SMEM_BYTES:
            return config
    raise ValueError(f"no ring for {consumers} consumers and {block_n} columns fits into shared memory.")


@functools.cache
def swap(
    tokens: int, fp8: bool, consumers: int = 2, fragments: int = 1, swiglu: bool = False
) -> SwappedConfig:
    """Return a configuration of swapped.cu whose ring leaves room for a list of 256 groups."""
    at_once = 16 if fragments == 2 and not swiglu else 32  # rows of C that are staged
    parts = max(1, tokens // at_once) if tokens % at_once == 0 else 1
    for stages in range(16, 1, -1):
        config = SwappedConfig(tokens, consumers, fragments, stages, parts, swiglu=swiglu)
        if config.smem_bytes(fp8) + GROUP_BYTES * 257 <= SMEM_BYTES:
            return config
    raise ValueError(
        f"no ring for {tokens} tokens and {consumers * fragments} x 64 columns fits into shared memory."
    )


def configs(fp8: bool = True, swiglu: bool = False) -> dict[str, Config]:
    """Return the configurations that `choose_config` chooses from, by name."""
    found: list[Config]
    if swiglu:
        found = [swap(tokens, fp8, 2, 2, swiglu=True) for tokens in SWIGLU_TOKENS[: 3 if fp8 else 4]]
    elif fp8:
        found = [swap(64, fp8), tile(128, 3), tile(192), tile(160)]
    else:
        found = [
            swap(32, fp8),
            swap(64, fp8),
            *(swap(tokens, fp8, 2, 2) for tokens in (128, 144)),
            swap(256, fp8),
        ]
    return {config.name: config for config in found}


def smem_bytes(config: Config, experts: int, fp8: bool = True) -> int:
    """Return the shared memory of a block with a list of groups, which replaces the flags of fp8.cu."""
    return config.smem_bytes(fp8) + GROUP_BYTES * (experts + 1)


def rejection(config: Config, experts: int, fp8: bool = True) -> str:
    """Return in one sentence why `config` cannot compute for so many experts, or an empty string."""
    if isinstance(config, TiledConfig) and not fp8:
        return f"{config} needs fp8; choose another configuration."
    if (needed := smem_bytes(config, experts, fp8)) > SMEM_BYTES:
        return (
            f"{experts} experts need {needed:,} B of shared memory with {config}; Hopper has {SMEM_BYTES:,}."
        )
    return ""


@functools.cache
def choose_config(
    tokens: int, experts: int, n: int, k: int, fp8: bool = True, swiglu: bool = False, masked: bool = False
) -> Config:
    """Return the configuration for so many rows in groups of unknown sizes, which are taken to be random.

    The limits are from times on an H200. In a masked product most rows are taken not to count: it is for decoding.
    """
    rows = tokens / max(experts, 1)

    def cost(config: TiledConfig) -> float:  # so many waves of tiles; narrow ones take longer for their size
        tiles = math.ceil(n / config.block_n) * (tokens / config.block_m + experts / 2)
        return math.ceil(tiles / SMS) * config.block_n * (1.05 if config.block_n < 192 else 1)

    found: list[Config]
    if swiglu:
        wide = SWIGLU_TOKENS[: 3 if fp8 else 4]
        found = [swap(next((each for each in wide if each >= 2 * rows), wide[-1]), fp8, 2, 2, swiglu=True)]
    elif masked or fp8 and rows <= 16:
        found = [swap(64, fp8)]
    elif fp8 and 112 <= rows <= 176:  # one tile of 192 rows per group, or two of 128
        found = [tile(128, 3)]
    elif fp8:
        found = sorted((tile(192), tile(160)), key=cost)
    elif rows <= 16:
        found = [swap(32, fp8)]
    elif rows <= 640:
        found = [swap(128 if rows <= 100 else 144, fp8, 2, 2)]
    else:
        found = [swap(256, fp8)]
    # The list of very many groups takes stages of the ring away.
    fewer = (replace(found[0], num_stages=stages) for stages in range(found[0].num_stages, 0, -1))
    return next(config for config in fewer if not rejection(config, experts, fp8))


def kernel(config: Config, fp8: bool = True) -> tuple[pathlib.Path, str, dict[str, int]]:
    """Return the file, the kernel and the -D constants of a configuration."""
    if isinstance(config, TiledConfig):
        return FOLDER / "grouped.cu", "grouped_fp8", config.constants(fp8)
    return FOLDER / "swapped.cu", "grouped_swapped", config.constants(fp8)


def bind_arguments(
    config: Config, a, b, ends, out, scale_a, scale_b, make_map: Callable[..., Any], out_scale=None
) -> dict[str, Any]:
    """Return the arguments of the kernel by name. `launch` describes the tensors; scale_a has rows side by side."""
    capacity = a.shape[1] if a.ndim == 3 else 0
    a, out, b = a.reshape(-1, a.shape[-1]), out.reshape(-1, out.shape[-1]), b.mT
    (experts, _, k), n = b.shape, out.shape[1]
    fp8 = scale_a is not None
    if fp8:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
        scale_a = scale_a if capacity else scale_a[None]  # a masked product has a layer of scales per expert
    line = BLOCK if fp8 else BLOCK // 2  # 128 bytes of K
    if isinstance(config, TiledConfig):
        rows, columns, scales = config.block_m, config.block_n, config.block_m
        box = 64, config.part
    else:
        rows, columns, scales = config.a_box, config.block_n, config.tokens + 4
        box = config.tokens // config.parts, 64
    a_map = make_map(a, (rows, line), swizzle="128B")
    return {
        "a_map": a_map,
        "b_map": make_map(b, (1, columns, line), swizzle="128B", l2_promotion="256B"),
        "scale_a_map": make_map(scale_a.mT, (1, 1, scales)) if fp8 else a_map,
        "c_map": a_map if out_scale is not None else make_map(out, box, swizzle=f"{2 * box[1]}B"),
        "c": out,
        "scale_b": scale_b,
        "ends": ends,
        **{
            name: ctypes.c_int(value)
            for name, value in dict(experts=experts, capacity=capacity, rows=len(a), n=n, k=k).items()
        },
        **(
            {"c_scales": out_scale, "pitch": ctypes.c_int(0 if out_scale is None else out_scale.stride(1))}
            if isinstance(config, SwappedConfig)
            else {}
        ),
    }


def arrange_scales(scale_a: torch.Tensor) -> torch.Tensor:
    """Return scale_a with the scales of a column side by side, columns at multiples of 16 bytes: copied if needed."""
    rows, blocks = scale_a.shape[-2:]
    outer = scale_a.stride()[:-2] + scale_a.stride()[-1:]
    is_arranged = scale_a.stride(-2) == 1 and scale_a.stride(-1) >= rows
    if is_arranged and scale_a.data_ptr() % 16 == 0 and not any(stride % 4 for stride in outer):
        return scale_a
    made = scale_a.new_empty(*scale_a.shape[:-2], blocks, math.ceil(rows / 4) * 4)
    return made[..., :rows].mT.copy_(scale_a)


def prepare(
    a: torch.Tensor,  # (tokens, K), or masked (experts, capacity, K)
    b: torch.Tensor,  # (experts, K, N)
    ends: torch.Tensor,  # (experts,)
    out: torch.Tensor,  # (tokens, N), or masked (experts, capacity, N)
    scale_a: torch.Tensor | None,  # (tokens, K / 128), or masked (experts, capacity, K / 128)
    scale_b: torch.Tensor | None,  # (experts, K / 128, N / 128)
    config: str | Config = "best",
    swiglu: bool = False,
    out_scale: torch.Tensor | None = None,  # (tokens, N / 128)
) -> Callable[..., None]:
    """Return a function of the six tensors, or seven with out_scale, that launches the product on the current stream.

    Arguments as for `launch`. The function may be called with other tensors of the same shapes and strides. With
    `swiglu`, b has N gates and then N values, and out = silu(a gates) x (a values). It is bfloat16 if the operands are,
    otherwise float8_e4m3fn with out_scale, whose rows lie side by side; then N is a multiple of 128.
    """
    (experts, k, _), n = b.shape, out.shape[-1]
    fp8 = scale_a is not None
    if config == "best":
        config = choose_config(a.numel() // k, experts, n, k, fp8, swiglu, a.ndim == 3)
    elif isinstance(config, str):
        config = configs(fp8, swiglu)[config]
    if getattr(config, "swiglu", False) != swiglu or (out_scale is not None) != (swiglu and fp8):
        raise ValueError(f"{config} does not fit: swiglu is {swiglu}, and fp8 with it needs out_scale.")
    if reason := rejection(config, experts, fp8):
        raise ValueError(reason)

    def arrange(scale_a, scale_b) -> tuple[Any, Any]:
        return (arrange_scales(scale_a), scale_b.mT.contiguous().mT) if fp8 else (None, None)

    source, name, constants = kernel(config, fp8)
    names = ["a_map", "b_map", "ends", "" if out_scale is not None else "c_map"]
    names += ["scale_a_map", "scale_b"] if fp8 else []
    run = cuda.prepare_launch(
        cuda.load_kernel(source, name, tuple(f"-D{name}={value}" for name, value in constants.items())),
        device.current().sms,
        config.threads,
        bind_arguments(config, a, b, ends, out, *arrange(scale_a, scale_b), make_tensor_map, out_scale),
        smem_bytes(config, experts, fp8),
        early=config.pdl,
        follows={**{name: place for place, name in enumerate(names)}, "c": 3}
        | ({"c_scales": 6} if out_scale is not None else {}),
    )

    def call(a, b, ends, out, scale_a=None, scale_b=None, out_scale=None) -> None:
        run(a, b, ends, out, *arrange(scale_a, scale_b), out_scale)

    return call


def launch(
    a: torch.Tensor,  # (tokens, K), or masked (experts, capacity, K)
    b: torch.Tensor,  # (experts, K, N)
    offsets: torch.Tensor,  # (experts,)
    out: torch.Tensor,  # (tokens, N), or masked (experts, capacity, N)
    scale_a: torch.Tensor | None = None,  # (tokens, K / 128), or masked (experts, capacity, K / 128)
    scale_b: torch.Tensor | None = None,  # (experts, K / 128, N / 128)
    config: str | Config = "best",
) -> torch.Tensor:
    """Multiply each group of rows of `a` with its matrix of `b`, store into `out`, and return `out`.

    a and b are float8_e4m3fn with float32 scales, or bfloat16 without; out is bfloat16. K is contiguous in a and b
    (pass weight.mT) and a multiple of 128 in fp8, N is a multiple of 8. `offsets` is int32, on the GPU: the row after
    the last one of each group, or for a masked product the rows that count in each. Other rows of `out` keep what they
    hold. scale_a is copied unless it lies column by column, with columns at multiples of 16 bytes, and scale_b unless
    scale_b.mT is contiguous.
    """
    tensors = a, b, offsets, out, scale_a, scale_b
    prepare(*tensors, config=config)(*tensors)
    return out


def job(config: Config, target: str = "sm_90a", fp8: bool = True) -> build.Job:
    """Return how `config` is compiled, for tilelab.runtime.build."""
    source, name, constants = kernel(config, fp8)
    return build.Job(
        f"{source}:{name}",
        {},
        constants,
        target,
        config.threads // 32,
        smem_bytes=smem_bytes(config, 1, fp8),
        name=str(config),
    )
