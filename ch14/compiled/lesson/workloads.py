"""torch.compile on a GEMM, an MLP and attention: the workloads in plain torch, and the modes that run them.

`make_workload` gives a workload, with fresh random `inputs()`; `prepare(work, mode)` gives the function that runs it.
Read `reading` next: it finds out which kernels a compilation chose. There is no kernel of our own here, so no `job`.
Source: the PyTorch documentation of torch.compile, torch.nn.attention and flex_attention, and the source of
torch._inductor (list_mode_options, config.triton).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F

from ch14 import attention
from ch14.attention.configs import HEAD_DIMS
from ch14.attention.lesson.experiments import BACKENDS, compute_reference, run_backend
from tilelab.runtime import device

TUNED = "max-autotune-no-cudagraphs"  # torch's own name
TMA_FLAG = "triton.enable_persistent_tma_matmul"
CANDIDATE_FILTER = "test_configs.autotune_choice_name_regex"  # Inductor drops every other candidate
# The arguments of torch.compile by mode. Modes that are not here run without it.
COMPILED = {
    "default": {},
    "max-autotune": {"mode": "max-autotune"},
    TUNED: {"mode": TUNED},
    "persistent-tma": {"mode": TUNED, "options": {TMA_FLAG: True}},
    "tma-only": {"mode": TUNED, "options": {TMA_FLAG: True, CANDIDATE_FILTER: "mm_persistent_tma"}},
    "pointers-only": {"mode": TUNED, "options": {CANDIDATE_FILTER: r"^triton_mm_\d+$"}},
    "unfused-default": {},
    "flex": {},
    "flex-tma": {},
    "flex-max-autotune": {"mode": TUNED},
}
GEMM_MODES = ("eager", "default", "max-autotune", TUNED, "persistent-tma", "tma-only", "pointers-only")


class Workload:
    """A computation of one shape, on the torch device `where`. Other modes are compared with the mode `peer`.

    `function(mode)` is what that mode calls, or what torch.compile compiles; `spec` gives the result in float64.
    """

    family, sizes = "", ()
    modes, peer = GEMM_MODES, "eager"

    def __init__(self, *shape: int, where: str = "cuda", dtype: torch.dtype = torch.bfloat16):
        if len(shape) != len(self.sizes) or not all(1 <= size <= 1 << 20 for size in shape):
            raise ValueError(
                f"a shape of {self.family} is {','.join(self.sizes)}, each from 1 to 2^20; it is "
                f"{','.join(map(str, shape))[:60]}."
            )
        self.shape, self.where, self.dtype = shape, where, dtype

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.where).to(self.dtype)

    def __str__(self):
        return f"{self.family} {','.join(map(str, self.shape))}"


class Matmul(Workload):
    """C (M, N) = A (M, K) @ B (K, N), both stored row by row."""

    family, sizes = "matmul", ("M", "N", "K")

    @property
    def flops(self) -> float:
        return 2 * math.prod(self.shape)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        m, n, k = self.shape
        return self.random(m, k), self.random(k, n)

    def spec(self, a, b):
        return a.double() @ b.double()

    def function(self, mode):
        return torch.matmul


class GatedMlp(torch.nn.Module):
    """down(silu(gate(x)) * up(x)): x (tokens, HIDDEN), gate and up HIDDEN -> INNER, down INNER -> HIDDEN, no bias.

    The weights are parameters, as in a model: torch.compile may treat their addresses as constants.
    """

    def __init__(self, hidden: int, inner: int, where: str, dtype: torch.dtype):
        super().__init__()
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            # The factor keeps the variance of every product equal to the variance of its input.
            weight = torch.randn(rows, columns, device=where) * columns**-0.5
            self.register_parameter(name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))

    def forward(self, x):
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Mlp(Workload):
    """The gated MLP of a decoder for T tokens, with HIDDEN features and INNER between its layers."""

    family, sizes = "mlp", ("T", "HIDDEN", "INNER")

    @functools.cached_property
    def module(self) -> GatedMlp:
        return GatedMlp(*self.shape[1:], self.where, self.dtype)

    @property
    def flops(self) -> float:
        return 6 * math.prod(self.shape)

    def inputs(self):
        return (self.random(*self.shape[:2]),)

    def spec(self, x):
        x, gate, up, down = (t.double() for t in (x, self.module.gate, self.module.up, self.module.down))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def function(self, mode):
        return self.module


class Attention(Workload):
    """softmax(Q K^T / sqrt(D)) V: Q (B, H, S, D), K and V (B, HK, S, D), where HK divides H; D is 64 or 128."""

    family, sizes = "attention", ("B", "H", "HK", "S", "D")
    modes = tuple("cuDNN flash efficient eager unfused default max-autotune unfused-default".split())
    modes += ("flex", "flex-tma", "flex-max-autotune", "course")
    peer = "cuDNN"
    causal = False

    def __init__(self, *shape: int, **options):
        super().__init__(*shape, **options)
        if shape[1] % shape[2] or shape[4] not in HEAD_DIMS:
            raise ValueError(f"HK must divide H, and D be 64 or 128; the shape is {shape}.")

    @property
    def flops(self) -> float:
        batch, heads, _, length, depth = self.shape
        return 4 * batch * heads * length**2 * depth / (2 if self.causal else 1)

    def inputs(self):
        batch, heads, kv_heads, length, depth = self.shape
        return tuple(self.random(batch, count, length, depth) for count in (heads, kv_heads, kv_heads))

    def spec(self, q, k, v):
        return compute_reference(q, k, v, self.causal)

    def function(self, mode):
        grouped = self.shape[1] != self.shape[2]
        if mode == "course":
            return functools.partial(attention.attention, is_causal=self.causal)
        if mode.startswith("flex"):
            return self._flex(grouped, {"USE_TMA": True} if mode == "flex-tma" else None)
        if mode.startswith("unfused"):
            return self._unfused
        if mode in BACKENDS:
            return functools.partial(run_backend, mode, self.causal)
        return functools.partial(F.scaled_dot_product_attention, is_causal=self.causal, enable_gqa=grouped)

    def _unfused(self, q, k, v):
        group = self.shape[1] // self.shape[2]
        if group > 1:
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.shape[4])
        if self.causal:
            ones = torch.ones(self.shape[3], self.shape[3], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(ones.triu(1), -math.inf)
        return scores.softmax(-1).matmul(v)

    def _flex(self, grouped: bool, kernel_options: dict | None):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def is_visible(batch, head, query, key):
            return query >= key

        length = self.shape[3]
        mask = (
            create_block_mask(is_visible, None, None, length, length, device=self.where)
            if self.causal
            else None
        )
        return lambda q, k, v: flex_attention(
            q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options=kernel_options
        )


class CausalAttention(Attention):
    """Attention in which query i sees the keys 0 to i."""

    family, causal = "causal attention", True


FAMILIES = {kind.family: kind for kind in (Matmul, Mlp, Attention, CausalAttention)}


def make_workload(family: str, shape: tuple[int, ...], **options) -> Workload:
    """Return the workload of one of FAMILIES; ValueError for another name or a bad shape."""
    if family not in FAMILIES:
        raise ValueError(f"unknown workload {family!r}; choose {', '.join(FAMILIES)}.")
    return FAMILIES[family](*shape, **options)


def check_mode(work: Workload, mode: str) -> None:
    """Raise ValueError, which lists the modes, unless the workload has `mode`."""
    modes = (*work.modes, *BACKENDS) if isinstance(work, Attention) else work.modes
    if mode not in modes:
        raise ValueError(f"unknown mode {mode!r} of {work.family}; choose {', '.join(dict.fromkeys(modes))}.")


def prepare(work: Workload, mode: str) -> Callable:
    """Return the function of `work.inputs()` that `mode` runs; torch.compile compiles it at its first call.

    It allocates its result, as torch does, so it is no Launch. ValueError for a mode that the workload does not have.
    """
    check_mode(work, mode)
    function = work.function(mode)
    if mode not in COMPILED:
        return function
    return torch.compile(function, dynamic=False, fullgraph=True, **compile_arguments(mode))


def compile_arguments(mode: str) -> dict:
    """Return the arguments of torch.compile for `mode`.

    torch.compile takes a mode or options, not both, so a mode becomes the options that torch lists for it.
    """
    from torch._inductor import list_mode_options

    chosen = dict(COMPILED[mode])
    if "options" in chosen:
        chosen["options"] = {**list_mode_options(chosen.pop("mode")), **chosen["options"]}
    return chosen


def offers_triton_gemm(sms: int) -> bool:
    """Return whether the installed torch offers Triton's GEMMs in max-autotune on an NVIDIA GPU with `sms` SMs.

    It asks Inductor's own function (torch._inductor.utils.is_big_gpu) with this number instead of this machine's.
    """
    from torch._inductor import utils

    properties = mock.Mock(multi_processor_count=sms, major=9)
    quiet = mock.patch.object(utils.log, "warning", logging.getLogger(__name__).debug)
    with mock.patch.object(utils.DeviceProperties, "create", lambda _: properties), quiet:
        return utils.is_big_gpu.__wrapped__(torch.device("cuda", 0))


def pointwise_bytes(tokens: int, inner: int, itemsize: int = 2) -> dict[str, int]:
    """Return the bytes that silu(g) * u moves besides the MLP's products, for three degrees of fusion.

    g, u and the result are (tokens, inner). Eager writes silu(g) and reads it again. In the epilogue of the product
    that computes u, only g is read in addition, and the result is written instead of u.
    """
    one = tokens * inner * itemsize
    return {"eager, two kernels": 5 * one, "one kernel": 3 * one, "in a product's epilogue": one}


def device_here() -> str:
    """Return the torch device that a workload of this machine lives on."""
    return "cuda" if device.current().capability else "cpu"
