"""The split kernel of two warp groups in the emulator of Gluon, against float64."""

import torch
import triton
from cases import cases

from ch14 import attention
from ch14.attention import spec, split_hopper_kernel
from tilelab.emulator import gluon as gluon_emulator

ROWS = 128


def emulate(shape, causal: bool, splits: int, seed: int = 0) -> float:
    """Return the largest error of one case. torch merges the parts of several splits."""
    b, h, hk, s, t, d = shape
    q, k, v = (torch.randn(b, heads, length, d).bfloat16() for heads, length in ((h, s), (hk, t), (hk, t)))
    out, group = torch.full_like(q, float("nan")), h // hk
    blocks = triton.cdiv(s * group, ROWS)
    programs = b * hk * blocks * splits
    parts = torch.full((programs, ROWS * (d + 2)), float("nan")) if splits > 1 else None
    given = (q, attention.describe(k, 128, True), attention.describe(v, 128, True), out, parts)
    given += (d**-0.5 * attention.LOG2_E, *q.stride()[:3], *out.stride()[:3], t, hk, s, group, blocks, splits)
    options = {"CAUSAL": causal, "BLOCK_M": ROWS, "BLOCK_N": 128, "STAGES": 2}
    with gluon_emulator.with_seed(seed):
        kernel = split_hopper_kernel.attention_split_hopper_kernel
        gluon_emulator.run(kernel, (programs,), *given, **options)
    if parts is not None:
        parts = parts.view(b, hk, blocks, splits, -1)
        acc, (row_max, row_sum) = (
            parts[..., : ROWS * d].unflatten(-1, (ROWS, d)),
            parts[..., ROWS * d :].unflatten(-1, (2, ROWS)).unbind(-2),
        )
        weight = torch.exp2(row_max - row_max.amax(3, keepdim=True))
        merged = (weight[..., None] * acc).sum(3) / (weight * row_sum).sum(3)[..., None]
        rows = merged.reshape(b, hk, blocks * ROWS, d)[:, :, : s * group]
        out = rows.reshape(b, hk, s, group, d).transpose(2, 3).reshape(q.shape)
    return float((out.double() - spec(q, k, v, is_causal=causal)).abs().max())


@cases(
    "shape, causal, splits",
    ((1, 4, 2, 3, 300, 64), False, 1),  # the second warp group has no rows
    ((2, 10, 2, 31, 333, 64), False, 3),  # a group of five heads, two tiles
    ((1, 2, 1, 100, 300, 128), True, 2),  # the first tile's second split sees no key
    ((1, 1, 1, 1, 1, 64), False, 3),
)
def test_a_tile_holds_the_rows_of_a_group_of_heads(shape, causal, splits):
    assert emulate(shape, causal, splits) < 0.02
