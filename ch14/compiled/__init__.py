"""What torch.compile makes of a product, an MLP and attention: their meaning in plain torch, and the modes to run them.

A workload has a float64 `spec`, fresh random `inputs()`, and `prepare(workload, mode)` gives the function that a mode
runs. Source: the PyTorch documentation of torch.compile, torch.nn.attention and flex_attention, and the source of
torch._inductor (list_mode_options, config.triton).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tilelab import device

TUNED = "max-autotune-no-cudagraphs"  # torch's own name
TMA_FLAG = "triton.enable_persistent_tma_matmul"
ONLY = "test_configs.autotune_choice_name_regex"  # Inductor drops every other candidate
# What torch.compile is given; a mode that is not here runs as it is.
COMPILED = {"default": {}, "max-autotune": {"mode": "max-autotune"}, TUNED: {"mode": TUNED},
            "persistent-tma": {"mode": TUNED, "options": {TMA_FLAG: True}},
            "tma-only": {"mode": TUNED, "options": {TMA_FLAG: True, ONLY: "mm_persistent_tma"}},
            "pointers-only": {"mode": TUNED, "options": {ONLY: r"^triton_mm_\d+$"}},
            "unfused-default": {}, "flex": {}, "flex-tma": {}, "flex-max-autotune": {"mode": TUNED}}
BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
GEMM_MODES = ("eager", "default", "max-autotune", TUNED, "persistent-tma", "tma-only", "pointers-only")


class Workload:
    """A computation of one shape, on `where`, a torch device. `peer` is the mode that others are measured against."""

    family, sizes = "", ()
    modes, peer = GEMM_MODES, "eager"

    def __init__(self, *shape: int, where: str = "cuda", dtype: torch.dtype = torch.bfloat16):
        if len(shape) != len(self.sizes) or any(
                type(size) is not int or not 1 <= size <= 1 << 20 for size in shape):
            raise ValueError(f"a shape of {self.family} is {','.join(self.sizes)}, each from 1 to 2^20; here it is "
                             f"{','.join(map(str, shape))[:60]}.")
        self.shape, self.where, self.dtype = shape, where, dtype

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.where).to(self.dtype)

    def function(self, mode: str) -> Callable:
        """What `mode` calls, or has torch.compile compile."""
        raise NotImplementedError

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

    The weights are parameters, as in a model: torch.compile may then take their addresses for constants.
    """

    def __init__(self, hidden: int, inner: int, where: str, dtype: torch.dtype):
        super().__init__()
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            # Scaled so that every product has the spread of its input.
            weight = torch.randn(rows, columns, device=where) * columns**-0.5
            self.register_parameter(name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))

    def forward(self, x):
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Mlp(Workload):
    """The gated MLP of a decoder: T tokens, HIDDEN features, INNER between. Its weights are made once."""

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
    modes, peer = ("cuDNN", "flash", "efficient", "eager", "unfused", "default", "max-autotune", "unfused-default",
                   "flex", "flex-tma", "flex-max-autotune", "course"), "cuDNN"
    causal = False

    def __init__(self, *shape: int, **rest):
        super().__init__(*shape, **rest)
        if shape[1] % shape[2] or shape[4] not in (64, 128):
            raise ValueError(f"HK must divide H, and D be 64 or 128; here H, HK, D are {shape[1]}, {shape[2]}, "
                             f"{shape[4]}.")

    @property
    def flops(self) -> float:
        batch, heads, _, length, depth = self.shape
        return 4 * batch * heads * length**2 * depth / (2 if self.causal else 1)

    def inputs(self):
        batch, heads, kv_heads, length, depth = self.shape
        return tuple(self.random(batch, each, length, depth) for each in (heads, kv_heads, kv_heads))

    def spec(self, q, k, v):
        length, group = self.shape[3], self.shape[1] // self.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1) if self.causal else None
        out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
        for batch in range(q.shape[0]):
            for head in range(q.shape[1]):  # one head at a time: its scores alone are S * S * 8 bytes
                queries, keys, values = (t.double() for t in (q[batch, head], k[batch, head // group],
                                                              v[batch, head // group]))
                scores = queries @ keys.T * q.shape[3]**-0.5
                if future is not None:
                    scores.masked_fill_(future, -math.inf)
                out[batch, head] = scores.softmax(-1) @ values
        return out

    def function(self, mode):
        grouped = self.shape[1] != self.shape[2]
        if mode == "course":
            from ch14 import attention

            return functools.partial(attention.attention, is_causal=self.causal)
        if mode.startswith("flex"):
            return self._flex(grouped, {"USE_TMA": True} if mode == "flex-tma" else None)
        if mode.startswith("unfused"):
            return self._unfused
        library = functools.partial(F.scaled_dot_product_attention, is_causal=self.causal, enable_gqa=grouped)
        if mode not in BACKENDS:
            return library
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def pinned(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, BACKENDS[mode])):
                return library(q, k, v)
        return pinned

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

        def past(batch, head, query, key):
            return query >= key

        length = self.shape[3]
        mask = create_block_mask(past, None, None, length, length, device=self.where) if self.causal else None
        return lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped,
                                              kernel_options=kernel_options)


class CausalAttention(Attention):
    """Attention in which query i sees the keys 0 to i."""

    family, causal = "causal attention", True


FAMILIES = {kind.family: kind for kind in (Matmul, Mlp, Attention, CausalAttention)}


def workload(family: str, shape: tuple[int, ...], **rest) -> Workload:
    """The workload of one of FAMILIES; ValueError for another name, and for a shape that it does not take."""
    if family not in FAMILIES:
        raise ValueError(f"the workloads are {', '.join(FAMILIES)}; here it is {family!r}.")
    return FAMILIES[family](*shape, **rest)


def configs(family: str) -> tuple[str, ...]:
    """The modes of a family of workloads, `math` and others that only small shapes can take left out."""
    return FAMILIES[family].modes


def check_mode(work: Workload, mode: str) -> None:
    """ValueError, which names the modes there are, for one that the workload does not have."""
    allowed = (*work.modes, *BACKENDS) if isinstance(work, Attention) else work.modes
    if mode not in allowed:
        raise ValueError(f"the modes of {work.family} are {', '.join(dict.fromkeys(allowed))}; here it is {mode!r}.")


def prepare(work: Workload, mode: str) -> Callable:
    """The function of the workload's inputs that `mode` runs; torch.compile compiles when it is first called.

    Raises ValueError for a mode that the workload does not have.
    """
    check_mode(work, mode)
    function = work.function(mode)
    return torch.compile(function, dynamic=False, fullgraph=True, **arguments(mode)) if mode in COMPILED else function


def launcher(work: Workload, mode: str, function: Callable) -> Callable:
    """A candidate for tilelab.bench.compare: of inputs, what launches `function`, made by `prepare`, on them.

    The course's attention makes its descriptors for given tensors; they are made once here, for a launch is timed.
    """
    if mode == "course":
        from ch14 import attention

        return lambda *inputs: attention.prepare(*inputs, is_causal=work.causal)
    return lambda *inputs: functools.partial(function, *inputs)


def arguments(mode: str) -> dict:
    """What torch.compile is given besides the function. It takes a mode or options, so a mode with options becomes the
    options that torch lists for it."""
    from torch._inductor import list_mode_options

    given = dict(COMPILED[mode])
    if "options" in given:
        given["options"] = {**list_mode_options(given.pop("mode")), **given["options"]}
    return given


def offers_triton_gemm(sms: int) -> bool:
    """Whether the installed torch would offer Triton's products in max-autotune on an NVIDIA GPU of so many SMs.

    It asks Inductor's own function (torch._inductor.utils.is_big_gpu) with that number in place of this machine's.
    """
    import logging
    from unittest import mock

    from torch._inductor import utils

    properties = mock.Mock(multi_processor_count=sms, major=9)
    quiet = mock.patch.object(utils.log, "warning", logging.getLogger(__name__).debug)
    with mock.patch.object(utils.DeviceProperties, "create", lambda _: properties), quiet:
        return utils.is_big_gpu.__wrapped__(torch.device("cuda", 0))


def pointwise_bytes(tokens: int, inner: int, itemsize: int = 2) -> dict[str, int]:
    """Bytes that silu(g) * u moves outside the MLP's products, by how much of it is fused.

    g, u and the result are (tokens, inner). Eager writes silu(g) and reads it again. In the epilogue of the product
    that makes u, g is all that is left to read: the result is written in the place of u.
    """
    one = tokens * inner * itemsize
    return {"eager, two kernels": 5 * one, "one kernel": 3 * one, "in a product's epilogue": one}


def here() -> str:
    """The torch device that a workload of this machine lives on."""
    return "cuda" if device.current().capability else "cpu"
