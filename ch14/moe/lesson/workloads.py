"""The expert layers of open models, how tokens are routed to them, and random operands.

Sizes come from each model's config.json on huggingface.co. The rule for tiles was fitted to MODELS, and its author had
seen a trial of HELD_OUT before. So headline figures use BLIND, which was chosen when the rule was finished.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ch14 import moe
from tilelab.measure import peers


class Model(NamedTuple):
    """Describe a layer: how many experts it has, how many a token takes, and the extents of their matrices."""

    experts: int
    top_k: int
    hidden: int
    inner: int

    def product(self, part: str) -> tuple[int, int]:
        """Return (N, K) of the first product, "up", which makes gates and values, or of the second, "down"."""
        return (2 * self.inner, self.hidden) if part == "up" else (self.hidden, self.inner)


MODELS = {
    "Mixtral 8x7B": Model(8, 2, 4096, 14336),
    "Qwen 3 30B": Model(128, 8, 2048, 768),
    "Qwen 3 235B": Model(128, 8, 4096, 1536),
    "gpt-oss 20B": Model(32, 4, 2880, 2880),
    "gpt-oss 120B": Model(128, 4, 2880, 2880),
    "DeepSeek-V3": Model(256, 8, 7168, 2048),
}
HELD_OUT = {
    "OLMoE 7B": Model(64, 8, 2048, 1024),
    "Phi 3.5 MoE": Model(16, 2, 4096, 6400),
    "Mixtral 8x22B": Model(8, 2, 6144, 16384),
    "GLM 4.5 Air": Model(128, 8, 4096, 1408),
    "Kimi K2": Model(384, 8, 7168, 2048),
}
BLIND = {  # by rising size; the comments name the repositories
    "MiniMax M2 tiny": Model(8, 4, 512, 256),  # PrimeIntellect/minimax-m2-tiny
    "Granite 3.0 1B": Model(32, 8, 1024, 512),  # ibm-granite/granite-3.0-1b-a400m-base
    "Qwen 1.5 MoE": Model(60, 4, 2048, 1408),  # Qwen/Qwen1.5-MoE-A2.7B
    "LFM2 8B": Model(32, 4, 2048, 1792),  # LiquidAI/LFM2-8B-A1B
    "MiniMax M2": Model(256, 8, 3072, 1536),  # MiniMaxAI/MiniMax-M2
    "Qwen 2 57B": Model(64, 8, 3584, 2560),  # Qwen/Qwen2-57B-A14B
    "DeepSeek-V2": Model(160, 6, 5120, 1536),  # deepseek-ai/DeepSeek-V2
    "Grok-1": Model(8, 2, 6144, 32768),  # hpcai-tech/grok-1
    "Arctic": Model(128, 2, 7168, 4864),  # Snowflake/snowflake-arctic-instruct
    "Jamba 1.5 Large": Model(16, 2, 8192, 24576),  # ai21labs/AI21-Jamba-1.5-Large
}
ROUTINGS = ("equal", "random", "skewed", "one")


class Case(NamedTuple):
    """One product of a model: tokens, their routing, and whether rows are sorted or `masked`."""

    chosen_on: str  # "tuned", "held out" or "blind"
    model: str
    part: str
    tokens: int
    routing: str

    @property
    def layer(self) -> Model:
        return (MODELS | HELD_OUT | BLIND)[self.model]

    @property
    def sizes(self) -> list[int]:
        """The rows of each expert."""
        return route(self.layer, self.tokens, self.routing)


def list_cases(choices: Sequence[tuple[str, int, str]]) -> list[Case]:
    """Return a case for each model and each of `choices` (part, tokens, routing)."""
    sets = {"tuned": MODELS, "held out": HELD_OUT}
    return [
        Case(name, model, *choice) for name, models in sets.items() for model in models for choice in choices
    ]


def list_blind(even: Sequence[tuple[str, int, str]], odd: Sequence[tuple[str, int, str]]) -> list[Case]:
    """Return the cases of BLIND: its models take the choices `even` and `odd` in turn."""
    return [
        Case("blind", model, *choice) for i, model in enumerate(BLIND) for choice in (odd if i % 2 else even)
    ]


def route(layer: Model, tokens: int, routing: str, seed: int = 0) -> list[int]:
    """Return the rows of each expert: "equal" shares, "random" or "skewed" choices, or all rows for "one" expert.

    Each token chooses `top_k` different experts. "skewed" prefers the i-th expert of a random order by 1 / i.
    """
    rows = tokens * layer.top_k
    if routing == "equal":
        share, more = divmod(rows, layer.experts)
        return [share + (expert < more) for expert in range(layer.experts)]
    if routing == "one":
        return [rows * (expert == layer.experts // 2) for expert in range(layer.experts)]
    chance = torch.Generator().manual_seed(seed)
    weight = torch.ones(layer.experts)
    if routing == "skewed":
        weight = 1 / (1 + torch.randperm(layer.experts, generator=chance))
    # The largest of log(weight) minus the log of an exponential number is a choice without putting back.
    noise = torch.empty(tokens, layer.experts).exponential_(generator=chance)
    chosen = (weight.log() - noise.log()).topk(layer.top_k).indices
    return torch.bincount(chosen.flatten(), minlength=layer.experts).tolist()


def make_operand(
    shape: Sequence[int], block_rows: int, fp8: bool, where: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return random numbers, bfloat16 or float8_e4m3fn; float8 has a scale per `block_rows` x 128 elements."""
    values = torch.empty(*shape, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16, device=where)
    for part in values if len(shape) == 3 else [values]:  # one matrix at a time needs little memory
        random = torch.randn(part.shape, device=where)
        part.copy_(random.mul_(100).clamp_(-448, 448) if fp8 else random)
    if not fp8:
        return values, None
    blocks = *shape[:-2], math.ceil(shape[-2] / block_rows), shape[-1] // moe.BLOCK
    return values, (torch.rand(*blocks, device=where) + 0.5) / 100


def make_sorted(sizes: Sequence[int], n: int, k: int, fp8: bool, where: str) -> tuple:
    """Return a (M, K), weight (experts, N, K), offsets, out (M, N), and in fp8 the scales of a and of weight."""
    (a, scale_a), (weight, scale_b) = (
        make_operand((sum(sizes), k), 1, fp8, where),
        make_operand((len(sizes), n, k), moe.BLOCK, fp8, where),
    )
    offsets = torch.tensor(sizes, device=where).cumsum(0).int()
    out = torch.empty(len(a), n, dtype=torch.bfloat16, device=where)
    return a, weight, offsets, out, peers.align_columns(scale_a) if fp8 else None, scale_b


def make_masked(sizes: Sequence[int], capacity: int, n: int, k: int, fp8: bool, where: str) -> tuple:
    """Return what `make_sorted` does in the masked layout: a and out are (experts, capacity, ...)."""
    (a, scale_a), (weight, scale_b) = (
        make_operand((len(sizes), capacity, k), 1, fp8, where),
        make_operand((len(sizes), n, k), moe.BLOCK, fp8, where),
    )
    counts = torch.tensor(sizes, dtype=torch.int32, device=where)
    out = torch.empty(len(sizes), capacity, n, dtype=torch.bfloat16, device=where)
    if fp8:
        scale_a = peers.align_columns(scale_a.flatten(0, 1)).unflatten(0, (len(sizes), capacity))
    return a, weight, counts, out, scale_a, scale_b


def find_bounds(ends: Sequence[int], capacity: int = 0) -> list[tuple[int, int, int]]:
    """Return (expert, first row, row after the last) of experts with rows; masked experts have `capacity` rows each."""
    starts = [capacity * expert for expert in range(len(ends))] if capacity else [0, *ends]
    stops = [start + count for start, count in zip(starts, ends)] if capacity else list(ends)
    return [(e, begin, end) for e, (begin, end) in enumerate(zip(starts, stops)) if end > begin]


def find_error(found: torch.Tensor, tensors: tuple, places: torch.Tensor | None = None) -> float:
    """Return the largest relative error of a product over the first, middle and last rows of up to seven experts.

    `places[row]` is the row of `found` that holds this row of out, if they differ.
    """
    a, weight, ends, out, scale_a, scale_b = tensors
    capacity = a.shape[1] if a.ndim == 3 else 0
    bounds, worst = find_bounds(ends.tolist(), capacity), 0.0
    rows_a, found = a.flatten(0, -2), found.flatten(0, -2)
    rows_s = None if scale_a is None else scale_a.flatten(0, -2)
    for expert, begin, end in bounds[:: max(1, len(bounds) // 6)] + bounds[-1:]:
        rows = torch.tensor(sorted({begin, (begin + end) // 2, end - 1}), device=a.device)
        left = moe._dequantise(rows_a[rows], None if rows_s is None else rows_s[rows], 1)
        right = moe._dequantise(weight[expert], None if scale_b is None else scale_b[expert], moe.BLOCK)
        wanted, got = left @ right.T, found[rows if places is None else places[rows]]
        error = float((got.double() - wanted).abs().max() / wanted.abs().max())
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
