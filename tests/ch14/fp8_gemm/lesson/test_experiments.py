"""The experiments of the fp8 kernel, as far as they go without a GPU."""

import dataclasses
import functools
import math
import sys
import types

import pytest
import torch

from ch14 import fp8_gemm
from ch14.fp8_gemm.lesson import experiments, verification
from ch14.fp8_gemm.lesson import impacts as impacts_module
from ch14.fp8_gemm.lesson.impacts import C_BYTES, group_configs, vary_stages, verdict, verdicts
from tilelab.measure import bench, check, peers
from tilelab.runtime import build, device

WHERE = "cuda" if device.current().capability else "cpu"

HOPPER = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


@pytest.mark.parametrize("m", [1, 3, 70])
def test_operands_are_what_torch_and_the_kernel_take(m):
    a, b, scale_a, scale_b, out = verification.fp8_operands(m, 256, 512, where="cpu")
    assert a.dtype == b.dtype == torch.float8_e4m3fn and a.shape == (m, 512) and b.shape == (512, 256)
    assert scale_a.shape == (m, 4) and scale_a.stride(0) == 1 and scale_a.stride(1) % 4 == 0
    assert scale_b.shape == (4, 2) and scale_b.T.is_contiguous() and out.shape == (m, 256)
    fp8_gemm._check_operands(a, b, scale_a, scale_b, None)
    assert 0.8 < fp8_gemm.spec(a, b, scale_a, scale_b).std() / math.sqrt(512) < 1.25  # of normal data


def test_the_scales_of_b_need_no_padding_for_torch():
    shapes = (*experiments.SHAPES, *experiments.THIN, experiments.SPLIT)
    assert all(k // 128 % 4 == 0 and n % 128 == 0 for _, n, k in shapes)


def test_bytes_of_a_product():
    given = verification.fp8_operands(256, 384, 512, where="cpu")
    assert experiments.operand_bytes(256, 384, 512) == sum(tensor.nbytes for tensor in given)
    given = verification.fp8_operands(8, 328, 512, where="cpu")
    assert experiments.operand_bytes(8, 328, 512) == sum(tensor.nbytes for tensor in given)


def test_judge_sees_what_is_wrong():
    wanted = torch.randn(6, 8).double()
    for harm, word in (
        (lambda out, _: None, ""),
        (lambda out, _: out[3].fill_(float("nan")), "the error inf"),
        (lambda out, _: out.mul_(1.1), "the error"),
        (lambda _, around: around.zero_(), "outside"),
    ):
        out, touched = check.make_poisoned((6, 8), torch.bfloat16, "cpu")
        out.copy_(wanted)
        harm(out, out._base)
        found = verification.judge(out, wanted, touched)
        assert (found["status"] == "ok") == (not word) and word in found["reason"], found
        assert math.isfinite(found.get("error", 0))  # JSON has no infinity


@pytest.mark.parametrize("m, n", [(1, 256), (6, 256), (8, 256), (6, 200), (8, 192)])
def test_torch_gets_whole_blocks_and_scales_without_gaps_at_multiples_of_16_bytes(m, n, monkeypatch):
    def multiply(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
        assert len(a) % 4 == 0 and scale_a.stride() == (1, len(a)) and a.is_contiguous()
        assert len(b.T) % 128 == 0 and b.T.is_contiguous()
        return fp8_gemm.spec(a, b, scale_a, scale_b).to(output_dtype)

    monkeypatch.setattr(experiments, "scaled_mm", multiply)
    given = verification.fp8_operands(m, n, 512, "cpu")
    assert torch.equal(experiments.prepare_torch(*given)(), fp8_gemm.spec(*given[:4]).bfloat16())


@pytest.mark.gpu
def test_peers_compute_the_same_product():
    for m, n in ((256, 512), (1, 512), (3, 512), (64, 2112)):
        given = verification.fp8_operands(m, n, 1024)
        assert check.relative_error(experiments.prepare_torch(*given)(), fp8_gemm.spec(*given[:4])) < 2**-7
    given = verification.fp8_operands(3, 512, 1024)
    plain = given[0].double() @ given[1].double()
    assert check.relative_error(experiments.prepare_one_scale(*given)(), plain) < 2**-5  # fast accumulation


@pytest.mark.parametrize("m, n", [(3, 40), (2, 2056)])
def test_bias_silu(m, n):
    c, bias = (torch.randn(*shape, device=WHERE).bfloat16() for shape in ((m, n), (n,)))
    out, touched = check.make_poisoned((m, n), torch.bfloat16, WHERE)
    impacts_module.bias_silu(c, bias, out)()
    wanted = torch.nn.functional.silu(c.double() + bias.double())
    assert check.relative_error(out, wanted) < 2**-7 and not touched()


@pytest.mark.compile
def test_bias_silu_is_built_wide():
    arguments = {"c_ptr": "*bf16", "bias_ptr": "*bf16", "out_ptr": "*bf16", "N": "i32"}
    kernel, aligned = "ch14.fp8_gemm.lesson.impacts:bias_silu_kernel", tuple(arguments)
    [silu] = build.disassemble([build.Job(kernel, arguments, {"BLOCK": 2048}, "sm_90a", 4, aligned=aligned)])
    assert silu.launchable and "LDG.E.128" in silu.sass and "STG.E.128" in silu.sass and silu.spills == 0


def test_the_clock_is_read_while_it_runs_or_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda: type("Properties", (), {"uuid": "12-34"})
    )
    fake, launches = tmp_path / "nvidia-smi", []
    for answer, found in (
        ("1310, 699.5", {"ghz": 1.31, "watts": 699.5}),
        ("No devices were found", {}),
        ("", {}),
    ):
        fake.write_text(f'#!/bin/sh\ntest "$4" = GPU-12-34 && echo "{answer}"\n')
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        assert experiments.clock_under_load(lambda: launches.append(1), 0.01) == found and launches
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert experiments.clock_under_load(lambda: None, 0.01) == {}


def test_bytes_of_c_on_the_way():
    m, n = 64, 128
    bf16, packed = 2 * m * n, m * n + m * n // 32
    assert C_BYTES["all fused"] * m * n == packed
    assert C_BYTES["bias and SiLU fused"] * m * n == 2 * bf16 + packed
    assert C_BYTES["in passes"] * m * n == 4 * bf16 + packed


def test_groups_can_run_and_differ_in_what_they_are_about():
    for claim, what, shape, configs in group_configs():
        assert claim in impacts_module.CLAIMED and what and len(configs) > 1
        assert len(set(configs.values())) == len(configs)
        assert all(n % 128 == 0 and k % 128 == 0 for _, n, k in [shape])
    kept = [
        {name: (config.consumers, config.scratch, config.splits) for name, config in configs.items()}
        for claim, _, _, configs in group_configs()
        if claim == "latency"
    ]
    assert all(len(set(of.values())) == 1 for of in kept)
    stages = [config.num_stages for config in vary_stages(fp8_gemm.Fp8Config()).values()]
    assert stages == sorted(stages) and len(stages) > 2


def test_verdicts_name_the_band():
    found = [verdict("latency", share) for share in (-0.2, 0.0, 0.39, 0.396, 0.45, 0.504, 0.51)]
    assert found == ["it costs", "less", "less", "as claimed", "as claimed", "as claimed", "more"]


@pytest.mark.parametrize("stages, more", [(7, []), (6, ["same tile, unsplit"])])
def test_a_split_is_held_against_its_own_tile(stages, more):
    split = fp8_gemm.Fp8Config(2, 2, stages, 64, splits=2)
    found = experiments.unsplit_configs(split)
    assert list(found) == [f"unsplit, {name}" for name in fp8_gemm.configs()] + more
    assert dataclasses.replace(split, splits=1) in found.values()
    assert all(each.splits == 1 for each in found.values())


def row(name, ms, moment=1.0, **more):
    """`moment`: how slow the clock was, for the peer too."""
    times = {"ms": ms * moment, "peer_ms": moment, "ratio": 1 / ms} if ms else {}
    return {"name": name, "shape": [1, 2, 3], **times, **more}


def test_verdicts_compare_the_right_rows():
    stages = {"3 stages": 2.0, "4 stages": 1.1, "5 stages": 1.5, "6 stages": None}
    impacts = [row(name, ms, claim="latency", what="x") for name, ms in stages.items()]
    impacts += [row(name, ms, claim="warps", what="y") for name, ms in (("4 warps", 1.0), ("8 warps", 1.2))]
    epilogue = [
        row(name, ms, shape=[1, 2, k])
        for k, times in ((4, (2.0, 1.6, 1.9, 1)), (3, (2.0, 1.5, 2.2, 1)))
        for name, ms in zip(("in passes", "all fused", "bias and SiLU fused", "product alone"), times)
    ]
    timed = [("torch", 3, ""), ("unsplit, a", 0.6, "tile a · early"), ("unsplit, b", 1.0, "tile b · early")]
    timed += [("course", 0.5, "tile b · 12 splits · early")]
    shape = list(experiments.SPLIT)
    split = [row(name, ms, config=config) | {"shape": shape} for name, ms, config in timed]
    bf16 = [row("", 1.0, 2.0, stages=6), row("", 1.1, 0.5, stages=4), row("", 4.0, stages=2)]
    unsplit = [split[0], split[-1] | {"config": "tile b · early"}]
    assert not any(each["claim"] == "split-K" for each in verdicts(impacts, epilogue, unsplit))
    found = verdicts(impacts, epilogue, [row("course", 9), *split], bf16)
    seen = [(each["claim"], each["from"], each["to"], each["time saved"], each["verdict"]) for each in found]
    assert seen == [
        ("latency", "2 stages", "6 stages", "75%", "more"),
        ("latency", "3 stages", "4 stages", "45%", "as claimed"),
        ("warps", "4 warps", "8 warps", "-20%", "it costs"),
        ("epilogue", "in passes", "all fused", "20%", "as claimed"),
        ("epilogue", "in passes", "bias and SiLU fused", "5%", "less"),
        ("epilogue", "in passes", "all fused", "25%", "as claimed"),
        ("epilogue", "in passes", "bias and SiLU fused", "-10%", "it costs"),
        ("split-K", "unsplit, b", "course", "50%", "more"),
        ("split-K", "unsplit, a", "course", "17%", "as claimed"),
    ]
    seen = [each["where"] for each in found if each["claim"] == "epilogue"][::3]
    assert seen == ["bias + SiLU, MXFP8 output, K = 4", "bias + SiLU alone, quantised apart, K = 3"]
    assert {each["note"] for each in found} == {"40 to 50%", "20 to 30%", "15 to 25%", "10 to 20%"}


def test_rows_beside_deep_gemm(monkeypatch):
    """Every shape has a row, with the reason where DeepGEMM is missing, and DeepGEMM gets whole products."""
    monkeypatch.setattr(device, "current", lambda: HOPPER)
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    rows = experiments.measure_peers().rows
    assert [tuple(row["shape"]) for row in rows] == list(experiments.PEER_SHAPES) and len(rows) == 42
    assert all(
        row["status"] == "failed" and row["reason"].startswith("DeepGEMM cannot be imported") for row in rows
    )

    def multiply(a, b, out):
        (codes, scales), (weight, weight_scales) = a, b
        assert all(tensor.is_contiguous() for tensor in (codes, weight, weight_scales, out))
        return out.copy_(fp8_gemm.spec(codes, weight.T, scales, weight_scales.T))

    def compare(candidates, make_inputs, peer, **timing):
        tensors = make_inputs()
        results = [prepare(*tensors)() for name, prepare in candidates.items() if name != "course"]
        assert peer == "course" and all(len(result) == 3 for result in results)
        return {name: bench.Timing(name, 1.0, peer, 1.0, timing["flops"] / 1e9) for name in candidates}

    library = types.SimpleNamespace(fp8_gemm_nt=multiply)
    monkeypatch.setattr(peers, "find", lambda name: peers.DeepGemm("DeepGEMM", "0.1", library=library))
    monkeypatch.setattr(build, "compile_ahead", list)
    monkeypatch.setattr(experiments, "PEER_SHAPES", ((3, 192, 256), (3, 256, 256)))
    monkeypatch.setattr(experiments, "verify_fp8", lambda shape: {"status": "ok", "reason": "", "error": 0.0})
    monkeypatch.setattr(
        experiments, "fp8_operands", functools.partial(verification.fp8_operands, where="cpu")
    )
    monkeypatch.setattr(bench, "compare", compare)
    rows = experiments.measure_peers().rows
    found = [(row["status"], row["ratio"], row["peer_version"]) for row in rows]
    assert found == [("ok", 1.0, "0.1")] * 2, rows
    library.fp8_gemm_nt = lambda a, b, out: out.zero_()
    assert all("the error" in row["reason"] for row in experiments.measure_peers().rows)
