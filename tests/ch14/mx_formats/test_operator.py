"""Fused kernels of block-scaled formats: the bits of the spec on ragged shapes, outputs that were poisoned, what was
compiled for each target, and bad input in one sentence."""

from dataclasses import replace

import pretended
import pytest
import torch
import triton
import triton.language as tl
from cases import cases

from ch14 import mx_formats
from ch14.mx_formats import FUSED, MxConfig, configs, kernels, number_formats, packing
from ch14.mx_formats.lesson import errors, experiments
from tilelab.runtime import build, device

WHERE = "cuda" if device.current().capability else "cpu"
SMALL = {
    "cvt": MxConfig(512),
    "arithmetic": MxConfig(512, convert=False),
    "group_a_lane": MxConfig(512, saturate=True),
}


@pytest.mark.parametrize(
    "name, variant",
    [  # the interpreter always rounds by arithmetic
        (name, variant)
        for name in FUSED
        for variant in configs(name)
        if WHERE == "cuda" or variant != "arithmetic"
    ],
)
def test_kernels_have_the_bits_of_the_spec(name, variant):
    """Whole groups as one long row, then rows that end within a group and a byte, under the other rule and layout."""
    scale = number_formats.lookup(name).scale
    for case in (
        ((3, 256), "floor", False),
        ((2, 133), "ceil" if scale == "e8m0" else "floor", scale != "fp32"),
    ):
        row = experiments.verify(name, *case, SMALL[variant])
        assert row["status"] == "ok", (case, row["reason"])


@triton.jit
def place_kernel(out, rows, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    row, group = tl.arange(0, ROWS)[:, None], tl.arange(0, GROUPS)[None, :]
    tl.store(out + row * GROUPS + group, kernels.scale_index(row, group, groups, True))


def test_tiled_scales_of_many_rows():
    places = torch.empty(512, 8, dtype=torch.int32, device=WHERE)
    place_kernel[(1,)](places, 512, 7, 512, 8)
    places = places[:300, :7].cpu()  # of scales (300, 7)
    scales = torch.randint(0, 256, (300, 7), dtype=torch.uint8)
    assert torch.equal(packing.tile_scales(scales)[places.long()], scales)
    row = experiments.verify("mxfp8_e4m3", (33, 32), tiled=True, config=MxConfig(128))
    assert row["status"] == "ok", row["reason"]


@pytest.mark.parametrize("name, first", [("mxfp8_e4m3", 3), ("mxfp4", 0), ("mxfp4", 3)])
def test_rows_of_a_larger_matrix(name, first):
    # 400 bytes apart; from 3 on not even aligned
    x = experiments.make_matrix(3, 200, WHERE)[:, first : first + 96]
    ours = mx_formats.quantise(x, name, config=MxConfig(256)).unpack()
    assert not experiments.find_difference(ours, number_formats.quantise(x, number_formats.lookup(name)))


@pytest.mark.parametrize("scale", [2.0**-10, 1e-6, torch.tensor([1e3])])  # its own would be about 2^-10
def test_given_scales_of_a_tensor_saturate_or_make_blocks_vanish(scale):
    x, form = torch.randn(3, 64, device=WHERE).bfloat16(), number_formats.lookup("nvfp4")
    ours = mx_formats.quantise(x, form, tensor_scale=scale, config=MxConfig(256)).unpack()
    given = torch.tensor([float(scale)], device=WHERE)
    assert not experiments.find_difference(ours, number_formats.quantise(x, form, scale=given))


@pytest.mark.parametrize("name", FUSED)
def test_every_code_comes_back(name):
    form = number_formats.lookup(name)
    codes = torch.arange(2**form.element.bits, dtype=torch.uint8).repeat(2 * form.block[1])[None]
    groups = codes.shape[1] // form.block[1]
    scales = (
        torch.rand(1, groups) + 0.5
        if form.scale == "fp32"
        else (torch.linspace(0, 255, groups).to(torch.uint8)[None] & (0x7F if form.scale == "e4m3" else 0xFF))
    )
    pair = torch.tensor([3.0, 1 / 3], device=WHERE) if form.scale == "e4m3" else None
    values = packing.pack(codes, form.element.bits)
    packed = mx_formats.Packed(form, tuple(codes.shape), values.to(WHERE), scales.to(WHERE), pair)
    wanted = number_formats.dequantise(packed.unpack()).bfloat16()
    found = mx_formats.dequantise(packed, config=MxConfig(8192 if form.element.bits == 8 else 512))
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert wanted.isnan().any() or form.scale == "fp32"


def test_a_format_by_its_name():
    packed = mx_formats.empty((3, 64), "mxfp4")
    named = mx_formats.Packed("mxfp4", packed.shape, packed.values, packed.scales)
    assert named.format is packed.format and named.nbytes == packed.nbytes


def test_launches_run_again_and_take_memory():
    x, out = torch.randn(3, 64, device=WHERE).bfloat16(), mx_formats.empty((3, 64), "mxfp4", WHERE)
    launch = mx_formats.prepare(x, "mxfp4", out=out, config=MxConfig(256))
    assert launch() is out is launch.out and launch.config == MxConfig(256)
    x.neg_()
    assert not experiments.find_difference(launch().unpack(), mx_formats.spec("quantise", x, out.format))
    back = mx_formats.prepare(out, out=torch.empty_like(x))
    assert back() is back.out
    assert torch.equal(back.out, mx_formats.spec("dequantise", out.unpack()).bfloat16())


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty_tensors(shape):
    packed = mx_formats.quantise(torch.empty(shape, dtype=torch.bfloat16, device=WHERE), "nvfp4")
    assert packed.shape == shape and mx_formats.dequantise(packed).shape == shape


def test_a_wrong_bit_is_seen():
    good = number_formats.quantise(torch.randn(4, 64), number_formats.lookup("mxfp4"))
    codes = good.codes.clone()
    codes[3, 63] ^= 1
    words = experiments.find_difference(replace(good, codes=codes), good)
    assert "1 of 256 codes differ, first at (3, 63)" in words


X = torch.ones(2, 2).bfloat16()


def overlapping(x):
    """An output whose values lie in the memory of x."""
    return replace(mx_formats.empty((2, 2), "mxfp8_e4m3"), values=x.view(torch.uint8)[:1].view(2, 2))


@cases(
    "call, words",
    (lambda: mx_formats.quantise(torch.ones(2, 2)), "x must be bfloat16; it is float32"),
    (lambda: mx_formats.quantise(torch.ones(4, 4).bfloat16().T[:, ::2]), "x must be stored row by row"),
    (lambda: mx_formats.quantise(X, "mxfp6_e2m3"), "mxfp6_e2m3 .* has no kernel, only a meaning"),
    (lambda: mx_formats.quantise(X, [7]), "unknown format .7.; choose one of mxfp8_e4m3"),
    (lambda: mx_formats.quantise(X, "fp4"), "unknown format 'fp4'; choose one of mxfp8_e4m3"),
    (lambda: mx_formats.quantise(X, "mxfp4", rule="up"), "unknown rule 'up'; choose floor or ceil"),
    (lambda: mx_formats.quantise(X, "nvfp4", rule="ceil"), "the scales of nvfp4 are e4m3"),
    (lambda: mx_formats.quantise(X.to(WHERE), "nvfp4", tensor_scale=0.0), "tensor_scale must be at"),
    (lambda: mx_formats.quantise(X, "mxfp4", tensor_scale=1.0), "must be None for mxfp4; only nvfp4"),
    (lambda: mx_formats.quantise(X, "fp8_1x128", tiled=True), "scales of one byte"),
    (
        lambda: mx_formats.quantise(X, replace(number_formats.FORMATS["mxfp4"], block=(1, 64))),
        "mxfp4 .e2m1, blocks .1, 64., scales e8m0. has no kernel",
    ),
    (lambda: mx_formats.prepare_quantise(torch.ones(4, 8).bfloat16()[:, :4], "nvfp4"), "must be contiguous"),
    (lambda: mx_formats.Packed("mxfp4", (1, 32), *torch.zeros(2, 1, 16)), "in mxfp4 must be .1, 16. of"),
    (lambda: mx_formats.Packed("nvfp4", (1, 32), *torch.zeros(2, 1, 16)), "nvfp4 needs values, scales"),
    (lambda: mx_formats.Packed("mxfp4", (1, 32), [1], [1]), "values must be a torch.Tensor; it is a"),
    (lambda: mx_formats.empty((-1, 32), "mxfp4"), "shape must be two whole numbers from 0; it is .-1"),
    (lambda: mx_formats.MxConfig(256.0), "elements of a MxConfig must be a whole number; it is 256.0"),
    (lambda: mx_formats.MxConfig(300), "must be a power of two from 128 to 65,536; it is 300"),
    (
        lambda: mx_formats.quantise(X, "mxfp4", out=mx_formats.empty((2, 4), "mxfp4")),
        "must be .2, 2. in mxfp4",
    ),
    (lambda: mx_formats.prepare_quantise(X, out=overlapping(X)), "out.values lies in the memory of x"),
    (lambda: mx_formats.dequantise(mx_formats.empty((2, 4), "mxfp4"), out=torch.empty(2, 4)), "be bfloat16"),
    (lambda: mx_formats.dequantise(X), "packed must be a Packed"),
    (lambda: mx_formats.spec("round", X), "unknown operation 'round'"),
    (lambda: errors.make_data("noise"), "unknown data 'noise'; choose one of gaussian, outliers"),
)
def test_bad_input_is_told_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()


TARGETS = {"sm_90a": FUSED, "sm_100a": ("mxfp8_e4m3",), "sm_120a": ("mxfp4",)}
TILED, BACK = {"rule": "ceil", "tiled": True}, {"operation": "dequantise"}
BUILDS = [
    *((name, target, {}) for target, names in TARGETS.items() for name in names),
    ("mxfp4", "sm_90a", TILED),
    *((name, "sm_90a", BACK) for name in ("mxfp8_e4m3", "nvfp4")),
]


@pytest.fixture(scope="module")
def reports():
    return build.disassemble(
        mx_formats.job("best", target, name, **options) for name, target, options in BUILDS
    )


@pytest.mark.compile
def test_compiled_for_each_target(reports):
    for (name, target, options), report in zip(BUILDS, reports):
        assert report.status == "ok" and report.spills == 0, (name, target, report.reason)
        ptx, eight, found = report.ptx, "fp8" in name, experiments.count_instructions(report)
        if options == BACK:
            assert found["store_bits"] == 128, report
            continue
        assert "ld.global.v4.b32" in ptx, "16-byte loads"
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (eight and "e5m2" not in name)
        assert ("cvt.rn.satfinite.e5m2x2.f32" in ptx) == ("e5m2" in name)
        if not found:  # a cuobjdump may be older than the target
            continue
        assert found["load_bits"] == 128 and found["store_bits"] >= 64, name
        # Every fp4 element is rounded by two fused multiply-adds: one compiler lost some of them, and bits with them.
        assert eight or found["FFMA"] >= 2, (name, found)
        assert found["issued"] < (13 if eight else 20), (name, found)


LAUNCHED = """
import torch
import pretended
from ch14 import mx_formats
from ch14.mx_formats.lesson import experiments
from tilelab.runtime import device


def check(*launches):
    launched = pretended.list_launch_lookups(lambda: [launch() for launch in launches])
    built = pretended.list_build_lookups(job for launch in launches for job in launch.jobs("sm_90a"))
    assert launched and launched == built, (len(launched), len(built), len(launched & built))
    return launched


pretended.begin()
device.current = lambda: device.Device(target="sm_90a", capability=(9, 0))
for name, shape, rule, tiled, variant in experiments.list_cases(shapes=((1, 1), (5, 100), (130, 160), (333, 4099))):
    x = torch.empty(shape, dtype=torch.bfloat16)
    quantise = mx_formats.prepare_quantise(x, name, rule=rule, tiled=tiled, config=variant)
    check(quantise, mx_formats.prepare_dequantise(quantise.out))
for name in mx_formats.FUSED:
    quantise = mx_formats.prepare_quantise(torch.empty((256, 8192), dtype=torch.bfloat16), name)
    assert check(quantise) >= pretended.list_build_lookups([mx_formats.job("best", "sm_90a", name)])
    dequantise = mx_formats.prepare_dequantise(quantise.out)
    job = mx_formats.job("best", "sm_90a", name, operation="dequantise")
    assert check(dequantise) == pretended.list_build_lookups([job])
"""


@pytest.mark.compile
def test_what_is_compiled_ahead_is_what_launches_look_for():
    pretended.run(LAUNCHED)


def test_blocks_lose_less_than_one_scale_and_short_blocks_less_than_long_ones():
    rows = {row["format"]: row for row in errors.matrix_errors(32, 256)}
    assert rows["e2m1, one scale"]["outliers"] > 2 * rows["mxfp4"]["outliers"], "what blocks buy at four bits"
    for name in errors.DATA:
        assert rows["nvfp4"][name] < rows["mxfp4"][name] and rows["nvfp4"][name] < rows["fp4_e8m0_16"][name]


def test_errors_of_products_follow_the_bits():
    products = {row["format"]: row for row in errors.product_errors(16, 32, 256)}
    assert errors.product_errors(16, 32, 256, methods=["nvfp4"]) == [products["nvfp4"]]
    assert products["fp8_1x128"]["gaussian"] < products["nvfp4"]["gaussian"] < products["mxfp4"]["gaussian"]


def test_saturation():
    found = errors.measure_saturation(number_formats.FORMATS["mxfp4"])
    assert 0.05 < found["cut"] < 0.4 and found["by"] <= 0.25


def test_bytes_moved():
    assert experiments.bytes_moved("mxfp8_e4m3", (64, 64)) == 64 * 64 * 3 + 64 * 2
    assert experiments.bytes_moved("nvfp4", (64, 64)) == 64 * 64 * 5 // 2 + 64 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_on_the_gpu(name):
    wrong = [row for row in experiments.check_correctness((name,)) if row["status"] != "ok"]
    assert not wrong, wrong[:3]


@pytest.mark.timing
def test_speed_is_that_of_memory():
    candidates = {name: experiments.quantise_candidate(name) for name in ("mxfp8_e4m3", "mxfp4")}
    nbytes = {name: experiments.bytes_moved(name) for name in candidates}
    rows = experiments.compare_with_copy(candidates, experiments.LARGE, nbytes, rounds=6)
    assert all(row["ratio"] > 0.75 for row in rows), rows
