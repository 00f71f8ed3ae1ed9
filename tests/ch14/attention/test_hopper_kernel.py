"""The hopper kernel in the emulator of Gluon, in every form, against float64, and its power of two."""

import dataclasses
import itertools

import pytest
import torch
import triton

from ch14 import attention
from ch14.attention import AttentionConfig, hopper_kernel, job, spec
from tilelab import build, gluon_emulator

FORMS = [AttentionConfig(groups * 64, 128, groups * 4, stages, "hopper", overlap, ping_pong, True, joint)
         for groups, (overlap, ping_pong), joint, stages in itertools.product(
             (2, 3), ((False, False), (True, False), (True, True)), (False, True), (2, 3))]
CASES = [(1, 2, 1, 500, 500, True), (1, 1, 1, 385, 300, True), (1, 2, 2, 200, 640, False), (1, 1, 1, 64, 1, True)]


def make_plain_classes() -> dict:
    """Return the kernel's aggregates as plain classes, whose fields may be the emulator's tiles and barriers."""
    stand_ins, plain = gluon_emulator._stand_ins(), {}
    for name in ("RingState", "Buffers", "Problem"):
        made = getattr(hopper_kernel, name)
        inner = next((cell.cell_contents for cell in made.__new__.__closure__ or ()
                      if getattr(cell.cell_contents, "__name__", "") == name), made)
        plain[name] = type(name, (), {})
        for key, value in {**vars(made), **vars(inner)}.items():
            if hasattr(value, "fn"):
                setattr(plain[name], key, gluon_emulator._emulated(value, stand_ins, {}, plain))
    return plain


def emulate(config: AttentionConfig, case, seed: int) -> float:
    """Return the largest error of one case, on three programs."""
    b, h, hk, s, t, causal = case
    q, k, v = (torch.randn(b, heads, length, 64).bfloat16() for heads, length in ((h, s), (hk, t), (hk, t)))
    out = torch.full_like(q, float("nan"))
    row_blocks = triton.cdiv(s, config.block_m)
    items = ((row_blocks + 1) // 2 if causal else row_blocks) * b * h
    descriptors = [attention._describe(*each, True) for each in ((q, 64), (k, 128), (v, 128), (out, 64))]
    constants, _ = attention._compile_options(config, causal)
    with gluon_emulator.with_seed(seed), gluon_emulator.replacing(**make_plain_classes()):
        gluon_emulator.run(hopper_kernel.attention_hopper_kernel, (min(items, 3),), *descriptors,
                           64**-0.5 * attention.LOG2_E, items, t, row_blocks, h, h // hk, **constants)
    return float((out.double() - spec(q, k, v, is_causal=causal)).abs().max())


@pytest.mark.parametrize("config", FORMS, ids=str)
def test_every_form_gives_the_right_result_and_breaks_no_rule(config):
    for seed, case in enumerate(CASES):
        assert emulate(config, case, seed) < 0.02, case


def test_the_polynomial_is_a_power_of_two():
    """The instructions of POLYNOMIAL step by step in float32, up to where a product with V would notice."""
    x = -torch.rand(100_000) * 40
    number = torch.floor(x)
    fraction = x - number
    value = torch.full_like(x, 0.07706717)
    for coefficient in (0.22764485, 0.69511682, 1.0):
        value = value * fraction + coefficient
    bits = value.view(torch.int32) + (number.to(torch.int32) << 23)
    assert (bits.view(torch.float32).double() / 2 ** x.double() - 1).abs().max() < 2**-13
    for text, number in (("3D9DD565", 0.07706717), ("3E691BBB", 0.22764485), ("3F31F32D", 0.69511682)):
        assert text in hopper_kernel.POLYNOMIAL
        assert torch.tensor(int(text, 16), dtype=torch.int32).view(torch.float32).item() == pytest.approx(number, 1e-6)


@pytest.mark.compile
def test_three_groups_keep_their_registers_in_the_loop():
    """A group has 160 registers. The few that spill hold addresses, which are used once per tile."""
    best = AttentionConfig(192, 128, 12, 3, "hopper", overlap=True, persistent=True, joint=True)
    jobs = [job(dataclasses.replace(best, poly_exp=poly), "sm_90a", 64, causal)
            for poly, causal in itertools.product((0, 2), (False, True))]
    for report in build.disassemble(jobs):
        assert report.launchable and report.spills <= 80
        assert not build.ptxas_remarks(report.ptx, "sm_90a")  # "wgmma serialized" would be one
        exponentials = report.ptx.count("ex2.approx")
        assert 380 < exponentials < 400 if "polynomial" not in report.job.name else 280 < exponentials < 300
