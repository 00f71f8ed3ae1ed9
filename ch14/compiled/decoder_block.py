"""A decoder block of a language model in plain torch, whose linear layers and attention can be exchanged.

Read `DecoderBlock` first. Sources: Llama 3 (arXiv 2407.21783, table 3) for the sizes and the order of operations,
DeepSeek-V3 (arXiv 2412.19437, section 3.3) for the scales of `Fp8Linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ch10 import wgmma_gemm
from ch14 import attention, blockscaled, gemm
from tilelab.runtime import device

BLOCK, E4M3_MAX = 128, 448.0  # columns per scale, and rows per scale of a weight; the largest float8_e4m3fn


@dataclass(frozen=True)
class Sizes:
    """Hold the dimensions of a block; the defaults are those of Llama 3 8B. The rotary table has `most_tokens` rows."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336
    most_tokens: int = 8192
    theta: float = 500000.0
    eps: float = 1e-5

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """The (N, K) of each linear layer. Query, key and value share one weight, and so do gate and up."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "out": (self.hidden, q),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    def count_flops(self, tokens: int) -> float:
        """Return the operations of the products and of causal attention for one sequence of `tokens`."""
        parameters = sum(n * k for n, k in self.weights.values())
        return 2 * tokens * (parameters + self.heads * self.head_dim * (tokens + 1))


LLAMA_3_8B = Sizes()


def make_weights(sizes: Sizes, where: str, dtype: torch.dtype = torch.bfloat16, std: float = 0.02) -> dict:
    """Return {name: (N, K) weight} with normal elements of standard deviation `std`, as at the start of a training."""
    return {name: (torch.randn(*size, device=where) * std).to(dtype) for name, size in sizes.weights.items()}


class TorchLinear(nn.Module):
    """x (..., K) -> x weight.T (..., N), by torch."""

    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., K) -> (..., N)
        return F.linear(x, self.weight)


class TilesLinear(TorchLinear):
    """The same by torch.ops.tiles.wgmma_gemm on Hopper and torch.ops.tiles.gemm on other GPUs, in bfloat16."""

    def __init__(self, weight: torch.Tensor):
        super().__init__(weight)
        self.multiply = (wgmma_gemm if device.current().has_wgmma else gemm).gemm

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., K) -> (..., N)
        return self.multiply(x.flatten(0, -2), self.weight.T).unflatten(0, x.shape[:-1])


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (N, K) in float8_e4m3fn and the float32 scales (N / 128, K / 128) of blocks of 128 x 128."""
    # (N / 128, 128, K / 128, 128)
    blocks = weight.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / E4M3_MAX
    return (blocks / scales).to(torch.float8_e4m3fn).view(weight.shape), scales.squeeze((1, 3))


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (M, K) in float8_e4m3fn and the float32 scales (M, K / 128), which lie column by column."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    by_column = scales.squeeze(2).T.clone(memory_format=torch.contiguous_format).T
    return (blocks / scales).to(torch.float8_e4m3fn).view(x.shape), by_column


class Fp8Linear(nn.Module):
    """x (..., K) -> x weight.T (..., N) by torch.ops.tiles.fp8, from activations that it quantises in each call.

    The quantisation is plain torch: Inductor fuses it with what computes x, so x in bfloat16 need not reach memory.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        for name, tensor in zip(("values", "scales"), quantise_weight(weight)):
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., K) -> (..., N)
        weight = self.values.T, self.scales.T
        return blockscaled.matmul(quantise_rows(x.flatten(0, -2)), weight).unflatten(0, x.shape[:-1])


def attend_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of q (B, H, S, D) over k and v (B, HK, S, D) by torch's SDPA."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attend_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the same by torch.ops.tiles.attention."""
    return attention.attention(q, k, v, is_causal=True)


class DecoderBlock(nn.Module):
    """x (B, S, hidden) -> x (B, S, hidden): x += out(attend(norm(x))); x += down(silu(gate(norm(x))) * up(norm(x))).

    `weights` are those of `make_weights`; `linear` makes a layer of a weight; `attend` computes attention.
    """

    def __init__(
        self,
        sizes: Sizes,
        weights: dict[str, torch.Tensor],
        linear: Callable = TorchLinear,
        attend: Callable = attend_torch,
    ):
        super().__init__()
        self.sizes, self.attend = sizes, attend
        self.qkv, self.out, self.gate_up, self.down = (linear(weights[name]) for name in sizes.weights)
        for name in ("attention_norm", "mlp_norm"):
            self.register_buffer(name, weights["qkv"].new_ones(sizes.hidden))
        rates = sizes.theta ** -(torch.arange(0, sizes.head_dim, 2).double() / sizes.head_dim)
        # (tokens, 1, head_dim)
        angles = (torch.arange(sizes.most_tokens)[:, None] * rates).repeat(1, 2)[:, None]
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            self.register_buffer(name, table.to(weights["qkv"]))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (B, S, H, D) with each pair (i, i + D / 2) turned by its token's angle."""
        first, second = x.chunk(2, -1)
        cos, sin = (table.narrow(0, 0, x.shape[1]) for table in (self.cos, self.sin))
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, hidden) -> (B, S, hidden)
        sizes, queries, kv = self.sizes, self.sizes.heads, self.sizes.kv_heads
        heads = self.qkv(F.rms_norm(x, (sizes.hidden,), self.attention_norm, sizes.eps))
        turned, v = heads.unflatten(-1, (-1, sizes.head_dim)).split((queries + kv, kv), 2)
        q, k = self.rotate(turned).split((queries, kv), 2)
        x = x + self.out(
            self.attend(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2).flatten(2)
        )
        gate, up = self.gate_up(F.rms_norm(x, (sizes.hidden,), self.mlp_norm, sizes.eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
