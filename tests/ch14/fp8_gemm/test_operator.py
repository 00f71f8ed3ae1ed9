"""The fp8 GEMM with block scales: choices and refusals, the SASS it is compiled to, and the GPU against float64."""

import functools
import itertools
import re

import pytest
import sentences
import torch
from cases import cases

from ch14 import fp8_gemm, mx_formats
from ch14.fp8_gemm import BLOCK, Fp8Config, best_config, configs, fp8, prepare, spec
from ch14.fp8_gemm.configs import candidates
from ch14.fp8_gemm.lesson.verification import fp8_operands
from ch14.mx_formats import Packed, number_formats
from tilelab.measure import check
from tilelab.runtime import build, device

HERE = "cuda" if device.current().has_wgmma else "cpu"


def case(m, n, k, where=HERE):
    a, b, scale_a, scale_b, _ = fp8_operands(m, n, k, where)
    scale_a *= torch.exp2(torch.randint(-4, 5, (m, 1), device=where))  # a scale out of place is seen
    return a, b, scale_a, scale_b


def test_spec_is_the_product_of_what_the_blocks_stand_for():
    a, b, scale_a, scale_b = case(5, 256, 384, "cpu")
    left = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)
    right = b.T.double() * scale_b.T.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    bias = torch.randn(256).bfloat16()
    assert torch.allclose(spec(a, b, scale_a, scale_b), left @ right.T, rtol=1e-12)
    wanted = torch.nn.functional.silu(left @ right.T + bias.double())
    assert torch.allclose(spec(a, b, scale_a, scale_b, bias, "silu"), wanted, rtol=1e-12)
    assert torch.allclose(spec(a, b[:, :200], scale_a, scale_b), (left @ right.T)[:, :200], rtol=1e-12)


@cases(
    "given, message",
    (dict(consumers=4), "consumers is 4; it must be a whole number from 1 to 3"),
    (dict(num_stages=2), "num_stages is 2; it must be a whole number from 3"),
    (dict(splits=True), "splits is True"),
    (dict(block_n=72), "block_n is 72; it must be a multiple of 16 from 64 to 160"),
    (dict(consumers=3), "one scratch each"),
    (dict(cluster=3), "cluster is 3; it must be 1, 2 or 4"),
    (dict(block_n=144), "144 columns have registers for one scratch"),
    (dict(num_stages=7), "needs 265,\\d{3} B of shared memory per block; Hopper has 232,448"),
)
def test_bad_configurations_get_one_sentence(given, message):
    with sentences.refused(message):
        Fp8Config(**given)


def test_the_choice():
    assert best_config(256, 2112, 7168, 132).tiles(256, 2112) <= 132  # one wave
    assert best_config(16, 1024, 16384, 132).splits > 1  # few tiles and a long K
    assert best_config(16, 24576, 1536, 132).splits == 1
    for m, n, k in itertools.product((1, 64, 65, 128, 200, 384, 4096), (64, 2112, 7168), (128, 2048, 16384)):
        for mx in (False, True):
            config = best_config(m, n, k, 132, mx)
            assert config.smem_bytes <= 232448 and config.grid(m, n, 132) <= 132 and config.splits <= k // 128
            assert config.block_m < 64 + m and (config.block_n == 128 or not mx)


def test_tiles_below_each_other_may_load_their_columns_together():
    found = candidates(200, 6144, 5120, 132)
    assert found["128×96, cluster 2"].cluster == 2 and found["128×96"].cluster == 1
    assert found["128×96, cluster 2"].grid(200, 6144, 132) == 128
    assert not any(config.cluster > 1 for config in candidates(64, 6144, 5120, 132).values())
    assert Fp8Config(cluster=2).tiles(300, 128) == 4  # three tiles, and one that completes the cluster


@pytest.mark.parametrize("mx", [False, True])
def test_the_longest_k_has_no_more_splits_than_a_configuration(mx):
    assert best_config(1, 128, 2**21, 132, mx).splits == 64


def test_what_no_epilogue_has_is_refused_before_it_is_compiled():
    for given in ("relu", ["silu"]):
        with pytest.raises(ValueError, match="unknown activation .*; choose None, silu or gelu"):
            fp8_gemm.job(configs()["square"], activation=given)
        refused("unknown activation", activation=given)
    with pytest.raises(ValueError, match="MXFP8 output needs tiles of 128 columns"):
        fp8_gemm.job(configs()["thin"], mx=True)


@functools.cache
def small_case():
    return case(5, 256, 256, "cpu")


def refused(message, *changes, error=ValueError, **options):
    given = dict(zip(("a", "b", "scale_a", "scale_b"), small_case())) | dict(changes)
    with sentences.refused(message, error):
        prepare(**given, **options)


def test_bad_input_gets_one_sentence():
    a, b, scale_a, scale_b = small_case()
    refused("a must be float8_e4m3fn; it is bfloat16", ("a", a.bfloat16()))
    refused("b.T must be contiguous; .* use b.T.contiguous", ("b", b.contiguous()))
    shifted = torch.cat([a, a]).flatten()[1:1281].view(5, 256)
    refused("a must start at a multiple of 16 bytes; it starts 1", ("a", shifted))
    refused("a .M, K. and b .K, N. differ in K: a is 5 x 256 and b is 128 x 256", ("b", b[:128]))
    refused(
        "M, N and K are 5, 256 and 64; K must be a multiple of 128",
        ("a", a[:, :64].contiguous()),
        ("b", b.T[:, :64].contiguous().T),
    )
    refused("M, N and K are 5, 252 and 256; .* N a multiple of 8, because TMA stores", ("b", b[:, :252]))
    refused("scale_a must be 5 x 2; it is 5 x 1", ("scale_a", scale_a[:, :1]))
    refused("scale_b must be 2 x 2", ("scale_b", torch.ones(2, 3)))
    refused("requires a gradient", ("scale_b", scale_b.clone().requires_grad_()))
    refused("bias must be 256; it is 128", bias=torch.zeros(128).bfloat16())
    refused(
        "out lies in the memory of b", ("b", b), out=b.T.view(-1)[:2560].view(torch.bfloat16).view(5, 256)
    )
    refused(
        "a Packed out must be .5, 256. in mxfp8_e4m3 with rows of scales",
        out=mx_formats.empty((5, 256), "mxfp4"),
    )
    room = torch.zeros(5 * 256 + 40, dtype=torch.uint8)
    twice = Packed(
        number_formats.lookup("mxfp8_e4m3"), (5, 256), room[:1280].view(5, 256), room[1264:1304].view(5, 8)
    )
    refused("lies in the memory of", out=twice)
    refused("with rows of scales; it is .* tiled", out=mx_formats.empty((5, 256), "mxfp8_e4m3", tiled=True))
    refused(
        "N is 192; an MXFP8 output needs a multiple of 128",
        ("b", b[:, :192]),
        out=mx_formats.empty((5, 192), "mxfp8_e4m3"),
    )


@pytest.mark.skipif(HERE == "cuda", reason="without WGMMA")
def test_without_wgmma_it_says_what_to_do():
    refused("the fp8 kernel", error=device.Unsupported)


@pytest.mark.skipif(HERE == "cpu", reason="on a GPU with WGMMA")
def test_bad_choices_get_one_sentence():
    given = [tensor.cuda() for tensor in case(5, 256, 256)]
    for config in ("fast", 3, None):
        with pytest.raises(ValueError, match="unknown configuration .*; choose best, square"):
            prepare(*given, config=config)
    with pytest.raises(ValueError, match="tiles of 128 columns"):
        prepare(*given, config="thin", out=mx_formats.empty((5, 256), "mxfp8_e4m3", "cuda"))


JOBS = [fp8_gemm.job(config) for config in (*configs().values(), best_config(16, 1024, 16384, 132))]
JOBS += [fp8_gemm.job(configs()["square"], bias=True, activation="silu", mx=True)]


@pytest.mark.compile
def test_the_sass_holds_what_the_kernel_teaches():
    for report in build.disassemble(JOBS):
        check_sass(report)


def check_sass(report):
    assert report.launchable and report.spills == 0, report.reason
    sass = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", report.sass, re.M)
    for instruction in ("UTMALDG.2D", "UTMASTG.2D", "SYNCS.PHASECHK", "QGMMA.64x"):
        assert any(instruction in line for line in sass), instruction
    # Four products in a row, then one wait: where the compiler serialises them it waits after each.
    products = [i for i, line in enumerate(sass) if "QGMMA" in line]
    waits = [i for i, line in enumerate(sass) if "WARPGROUP.DEPBAR" in line]
    assert len(products) % 4 == 0
    for first, last in zip(products[::4], products[3::4]):
        assert not any(first < wait < last for wait in waits)
    if report.job.constants["SCRATCH"] == 2:
        assert any("DEPBAR.LE gsb0, 0x1" in line for line in sass)  # one block stays under way


def run_and_check(config, m, n, k, bias=False, activation=None):
    given = case(m, n, k)
    bias = torch.randn(n, device="cuda").bfloat16() if bias else None
    out, touched = check.make_poisoned((m, n), torch.bfloat16, "cuda")
    launch = prepare(*given, bias=bias, activation=activation, out=out, config=config)
    first = launch().clone()
    for _ in range(3):
        launch()
    assert check.relative_error(out, spec(*given, bias, activation)) < 2**-7 and touched() == ""
    assert torch.equal(out.view(torch.int16), first.view(torch.int16))
    return given, bias, out


@pytest.mark.gpu
@cases(
    "shape",
    (1, 128, 128),
    (7, 384, 128),
    (64, 256, 1664),
    (129, 128, 640),
    (1000, 640, 384),
    (1, 64, 128),
    (65, 8, 256),
    (129, 192, 640),
    (300, 200, 1664),
    (256, 2112, 896),
)
def test_every_configuration_on_the_gpu(shape):
    device.require("has_wgmma", "this test", "skip it")
    for config in configs().values():
        run_and_check(config, *shape)
        for splits in (2, 3, 7):  # more than there are steps, too
            run_and_check(
                Fp8Config(config.consumers, config.scratch, config.num_stages, config.block_n, splits), *shape
            )
    run_and_check("best", *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 100, 333])
def test_epilogues_on_the_gpu(m):
    for bias, activation in itertools.product((False, True), (None, "silu", "gelu")):
        config = best_config(m, 384, 512, device.current().sms, mx=True)
        given, vector, out = run_and_check(config, m, 384, 512, bias, activation)
        packed = fp8(
            *given,
            bias=vector,
            activation=activation,
            config=config,
            out=mx_formats.empty((m, 384), "mxfp8_e4m3", "cuda"),
        )
        wanted = mx_formats.quantise(out, "mxfp8_e4m3")
        assert torch.equal(packed.values, wanted.values) and torch.equal(packed.scales, wanted.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 64, 192, 200, 2112])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_bias_of_an_n_that_ends_within_a_block(n, activation):
    for config in (
        "square",
        "tall",
        "thin",
        Fp8Config(1, 2, 5, 64, splits=2),
        Fp8Config(num_stages=4, epilogue_warps=2),
    ):
        run_and_check(config, 133, n, 512, True, activation)


@pytest.mark.gpu
def test_infinities_and_nans_are_quantised_as_apart():
    a, b, scale_a, scale_b = case(70, 256, 256)
    scale_a[3], scale_a[40], scale_a[50] = float("nan"), float("inf"), 1e38
    out = fp8(a, b, scale_a, scale_b, config="square")
    packed = fp8(
        a, b, scale_a, scale_b, config="square", out=mx_formats.empty((70, 256), "mxfp8_e4m3", "cuda")
    )
    wanted = mx_formats.quantise(out, "mxfp8_e4m3")
    assert torch.equal(packed.values, wanted.values) and torch.equal(packed.scales, wanted.scales)


@pytest.mark.gpu
def test_scales_of_other_strides_are_copied_at_each_launch():
    a, b, scale_a, scale_b = case(50, 128, 512)
    rows = scale_a.contiguous()
    launch = prepare(a, b, rows, scale_b)
    assert torch.equal(launch(), fp8(a, b, scale_a, scale_b))
    rows *= 2
    assert torch.equal(launch(), fp8(a, b, scale_a * 2, scale_b))
    shared = torch.rand(100, device=HERE).as_strided((50, 4), (1, 4))  # columns that overlap
    assert torch.equal(fp8(a, b, shared, scale_b), fp8(a, b, shared.contiguous(), scale_b))


@pytest.mark.gpu
def test_launches_that_follow_each_other_in_a_graph():
    a, b, scale_a, scale_b = case(64, 1024, 1024)
    quantised = mx_formats.empty((64, 1024), "mxfp8_e4m3", "cuda")
    first = prepare(a, b, scale_a, scale_b)
    second = mx_formats.prepare_quantise(first.out, out=quantised)
    first(), second()
    wanted = quantised.values.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            first(), second()
    for _ in range(5):
        quantised.values.zero_()
        graph.replay()
        assert torch.equal(quantised.values, wanted)
