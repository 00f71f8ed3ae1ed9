"""The hopper kernel in the emulator of Gluon, in every form, against float64."""

import dataclasses
import itertools

import pytest
import torch
import triton

from ch14 import attention
from ch14.attention import AttentionConfig, hopper_kernel, job, spec
from tilelab.emulator import gluon as gluon_emulator
from tilelab.runtime import build

FOUR_GROUPS = attention.configs(64)["four groups"]
FORMS = [
    dataclasses.replace(FOUR_GROUPS, num_stages=stages, overlap=overlap, ping_pong=ping_pong)
    for (overlap, ping_pong), stages in itertools.product(
        ((False, False), (True, False), (True, True)), (2, 5)
    )
]
FORMS += [
    AttentionConfig(128, 128, 8, stages, "hopper", overlap, ping_pong, True)
    for (overlap, ping_pong), stages in itertools.product(
        ((False, False), (True, False), (True, True)), (2, 3)
    )
]
CASES = [
    (1, 2, 1, 500, 500, True),
    (1, 1, 1, 385, 300, True),
    (1, 2, 2, 200, 640, False),
    (1, 1, 1, 64, 1, True),
]


def emulate(config: AttentionConfig, case, seed: int) -> float:
    """Return the largest error of one case, on three programs. An odd seed gives each program one tile at a time."""
    b, h, hk, s, t, causal = case
    q, k, v = (torch.randn(b, heads, length, 64).bfloat16() for heads, length in ((h, s), (hk, t), (hk, t)))
    out = torch.full_like(q, float("nan"))
    row_blocks = triton.cdiv(s, config.block_m)
    paired = causal and seed % 2 == 0
    items = ((row_blocks + 1) // 2 if paired else row_blocks) * b * h
    rows = (q, 64), (k, config.block_n), (v, config.block_n), (out, 64)
    descriptors = [attention.describe(*each, True) for each in rows]
    constants, _ = attention._compile_options(config, causal)
    given = (*descriptors, 64**-0.5 * attention.LOG2_E, items, t, row_blocks, h, h // hk, int(paired))
    with gluon_emulator.with_seed(seed):
        gluon_emulator.run(hopper_kernel.attention_hopper_kernel, (min(items, 3),), *given, **constants)
    return float((out.double() - spec(q, k, v, is_causal=causal)).abs().max())


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_every_form_gives_the_right_result_and_breaks_no_rule(config):
    for seed, case in enumerate(CASES):
        assert emulate(config, case, seed) < 0.02, case


@pytest.mark.compile
def test_the_kernels_for_64_features_keep_their_registers_in_the_loop():
    """A group has 112 registers. The few that spill hold addresses, which are used once per tile."""
    for causal in (False, True):
        report = build.build_one(job(FOUR_GROUPS, "sm_90a", 64, causal))
        assert report.launchable and report.spills <= 80
        assert not build.ptxas_remarks(report.ptx, "sm_90a")  # "wgmma serialized" would be one
