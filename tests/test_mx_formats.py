"""Fused kernels of block-scaled formats: the bits of the spec on ragged shapes, outputs that were poisoned, what was
compiled for each target, and bad input in one sentence."""

import json
from dataclasses import replace

import pretended
import pytest
import torch
import triton
import triton.language as tl

from ch14 import mx_formats
from ch14.mx_formats import FUSED, MxConfig, configs, errors, experiments, number_formats, packing, quantise_kernels
from ch14.mx_formats import __main__ as command
from tilelab import build, device, results

SMALL = {"cvt": MxConfig(256), "arithmetic": MxConfig(512, convert=False), "group_a_lane": MxConfig(256),
         "spread": MxConfig(256, lanes=0)}
CASES = [(name, variant, rule) for name in FUSED for variant in configs(name) for rule in number_formats.RULES
         if not (rule == "ceil" and number_formats.lookup(name).scale != "e8m0") and variant != "arithmetic"]


@pytest.mark.parametrize("name, variant, rule", CASES)
def test_kernels_have_the_bits_of_the_spec(name, variant, rule):
    torch.manual_seed(CASES.index((name, variant, rule)))
    tiled = rule == "floor" and number_formats.lookup(name).scale != "fp32"
    for shape, layout in (((3, 256), False), ((2, 133), tiled), ((1, 1), tiled)):
        row = experiments.verify(name, shape, rule, layout, SMALL[variant])
        assert row["status"] == "ok", (shape, row["reason"])


@triton.jit
def place_kernel(out, rows, groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    row, group = tl.arange(0, ROWS)[:, None], tl.arange(0, GROUPS)[None, :]
    tl.store(out + row * GROUPS + group, quantise_kernels.place(row, group, groups, True))


def test_tiled_scales_of_many_rows():
    places = torch.empty(512, 8, dtype=torch.int32, device="cuda" if device.current().capability else "cpu")
    place_kernel[(1,)](places, 512, 7, 512, 8)
    places = places[:300, :7].cpu()  # of scales (300, 7)
    scales = torch.randint(0, 256, (300, 7), dtype=torch.uint8)
    assert torch.equal(packing.tile_scales(scales)[places.long()], scales)
    row = experiments.verify("mxfp4", (35, 64), tiled=True, config=MxConfig(128))
    assert row["status"] == "ok", row["reason"]


def test_rows_of_a_larger_matrix_and_given_scales():
    wide = experiments.data(4, 200)
    for x in (wide[:, :96], wide[:, 3:99]):  # rows 400 bytes apart, and not even aligned
        for name in ("mxfp8_e4m3", "mxfp4"):
            assert not experiments.same(mx_formats.quantise(x, name, config=MxConfig(256)).unpacked(),
                                      number_formats.quantise(x, number_formats.lookup(name)))
    x, form = torch.randn(4, 64).bfloat16(), number_formats.lookup("nvfp4")
    for scale in (2.0**-10, 1e-6, 1e3):  # its own would be about 2^-10; then blocks saturate, then vanish
        ours = mx_formats.quantise(x, form, tensor_scale=scale, config=MxConfig(256)).unpacked()
        assert not experiments.same(ours, number_formats.quantise(x, form, scale=torch.tensor([scale])))


@pytest.mark.parametrize("name", FUSED)
def test_every_code_comes_back(name):
    form = number_formats.lookup(name)
    codes = torch.arange(2**form.element.bits, dtype=torch.uint8).repeat(2 * form.block[1])[None]
    groups = codes.shape[1] // form.block[1]
    scales = torch.rand(1, groups) + 0.5 if form.scale == "fp32" else (
        torch.linspace(0, 255, groups).to(torch.uint8)[None] & (0x7F if form.scale == "e4m3" else 0xFF))
    pair = torch.tensor([3.0, 1 / 3]) if form.scale == "e4m3" else None
    packed = mx_formats.Packed(form, tuple(codes.shape), packing.pack(codes, form.element.bits), scales, pair)
    wanted = number_formats.dequantise(packed.unpacked()).bfloat16()
    found = mx_formats.dequantise(packed, MxConfig(512))
    assert torch.equal(found.isnan(), wanted.isnan()) and torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert wanted.isnan().any() or form.scale == "fp32"


def test_a_format_by_its_name():
    packed = mx_formats.quantise(torch.randn(3, 64).bfloat16(), "mxfp4", config=MxConfig(256))
    named = mx_formats.Packed("mxfp4", packed.shape, packed.values, packed.scales)
    assert named.format is packed.format and named.nbytes == packed.nbytes
    assert torch.equal(mx_formats.dequantise(named, MxConfig(512)), mx_formats.dequantise(packed, MxConfig(512)))


def test_a_wrong_bit_is_seen():
    x = torch.randn(4, 64).bfloat16()
    good = number_formats.quantise(x, number_formats.lookup("mxfp4"))
    packed = mx_formats.quantise(x, "mxfp4", config=MxConfig(256))
    packed.values[3, 31] ^= 0x10
    assert "1 of 256 codes differ, first at (3, 63)" in experiments.same(packed.unpacked(), good)


@pytest.mark.parametrize("call, words", [
    (lambda: mx_formats.quantise(torch.ones(2, 2)), "bfloat16 matrix, not empty; it is \\(2, 2\\) of float32"),
    (lambda: mx_formats.quantise(torch.ones(2).bfloat16()), "x must be a bfloat16 matrix"),
    (lambda: mx_formats.quantise(torch.ones(0, 4).bfloat16()), "not empty; it is \\(0, 4\\)"),
    (lambda: mx_formats.quantise(torch.ones(4, 4).bfloat16().T[:, ::2]), "rows of x must be contiguous"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "mxfp6_e2m3"), "mxfp6_e2m3 has no kernel, only its spec"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "fp4"), "the formats are mxfp8_e4m3"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "mxfp4", "up"), "are floor and ceil; here it is 'up'"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "nvfp4", "ceil"), "those of nvfp4 are e4m3"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "nvfp4", tensor_scale=0.0), "2\\^-126 at least"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "mxfp4", tensor_scale=1.0), "NVFP4's; mxfp4 has none"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), "fp8_1x128", tiled=True), "scales of one byte"),
    (lambda: mx_formats.quantise(torch.ones(2, 2).bfloat16(), replace(number_formats.FORMATS["mxfp4"], block=(1, 64))),
     "^mxfp4 with another block has no kernel, only its spec"),
    (lambda: mx_formats.configs(replace(number_formats.FORMATS["nvfp4"], scale="e8m0", element=number_formats.E4M3)),
     "^nvfp4 with another element and scale has no kernel"),
    (lambda: mx_formats.Packed("fp4", (1, 32), *torch.zeros(2, 1, 16)), "the formats are mxfp8_e4m3"),
    (lambda: mx_formats.Packed("mxfp6_e2m3", (1, 32), *torch.zeros(2, 1, 16)), "mxfp6_e2m3 has no kernel"),
    (lambda: mx_formats.Packed("mxfp4", (1, 32), *torch.zeros(2, 1, 16)), "in mxfp4 are \\(1, 16\\) of uint8"),
    (lambda: mx_formats.MxConfig(300), "a power of two from 128 to 65,536; here it is 300"),
    (lambda: mx_formats.prepare_quantise(torch.ones(2, 2).bfloat16(), mx_formats.empty((2, 4), "mxfp4")), "must agree"),
    (lambda: mx_formats.prepare_dequantise(mx_formats.empty((2, 4), "mxfp4"), torch.empty(2, 4)), "bfloat16 matrix"),
    (lambda: errors.make("noise"), "the data are gaussian, outliers, weights, activations")])
def test_bad_input_is_told_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("target", device.TARGETS[1:])
def test_compiled_for_each_target(target):
    names = FUSED if target == "sm_90a" else ("mxfp8_e4m3", "mxfp4", "nvfp4")
    jobs = {name: mx_formats.job(name, next(iter(configs(name).values())), target) for name in names}
    jobs["tiled"] = mx_formats.job("mxfp4", next(iter(configs("mxfp4").values())), target, "ceil", tiled=True)
    reports = {report.job.name + str(report.job.constants["TILED"]): report for report in build.build(jobs.values())}
    for name, job in jobs.items():
        report = reports[job.name + str(job.constants["TILED"])]
        assert report.status == "ok" and report.spills == 0, (name, report.reason)
        ptx = report.ptx
        eight = "fp8" in name
        assert "ld.global.v4.b32" in ptx, "16-byte loads"
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (eight and "e5m2" not in name)
        assert ("cvt.rn.satfinite.e5m2x2.f32" in ptx) == ("e5m2" in name)
        if not (found := experiments.instructions(report)):  # a cuobjdump may be older than the target
            continue
        assert found["load_bits"] == 128 and found["store_bits"] >= 64, name
        # Every fp4 element is rounded by two fused multiply-adds: one compiler lost some of them, and bits with them.
        assert eight or found["FFMA"] >= 2, (name, found)
        assert found["issued"] < (13 if eight else 20), (name, found)


LAUNCHED = """
import torch
import pretended
from ch14 import mx_formats, mx_spec, mx_trials
from tilelab import device


def launch(candidates, shape, *_, **__):
    x, y = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    for name in candidates:
        if not name.endswith("spec"):
            candidates[name](x, y)()
    return []


def check(name, launches, jobs):
    launched, built = pretended.keys(launches), pretended.built(jobs)
    assert launched and launched == built, (name, len(launched), len(built), len(launched & built))


pretended.begin()
device.current = lambda: device.Device(target="sm_90a")  # tensors are on the CPU, where there is a GPU too
torch.cuda.get_device_capability = lambda where: (9, 0)
mx_trials.data = lambda *shape: torch.empty(shape[:2], dtype=torch.bfloat16)
mx_trials.same, mx_trials.unlike = lambda *_: "", lambda *_: torch.zeros(1)
mx_spec.quantise, mx_spec.dequantise = lambda *_: None, lambda of: torch.empty(1)
mx_trials.against_copy, jobs = launch, []
mx_trials.warm = jobs.extend
for case in mx_trials.cases():
    name, shape, rule, tiled, variant = case
    check(case, lambda: mx_trials.verify(name, shape, rule, tiled, mx_formats.configs(name)[variant]),
          mx_trials.case_jobs(*case, "sm_90a"))
check("speed", mx_trials.speed.__wrapped__, jobs)
jobs.clear()
check("sweep", mx_trials.swept.__wrapped__, jobs)
"""


def test_what_is_compiled_ahead_is_what_launches_look_for():
    pretended.run(LAUNCHED)


def test_the_way_back_is_compiled_for_hopper():
    jobs = [mx_formats.job(name, MxConfig(2048), "sm_90a", back=True) for name in ("mxfp8_e4m3", "mxfp4", "nvfp4")]
    for report in build.build(jobs):
        assert report.status == "ok" and experiments.instructions(report)["store_bits"] == 128, report


def test_errors_say_what_is_measured():
    rows = {row["format"]: row for row in errors.matrix_errors(32, 256)}
    assert rows["e2m1, one scale"]["outliers"] > 2 * rows["mxfp4"]["outliers"], "what blocks buy at four bits"
    for name in errors.DATA:
        assert rows["nvfp4"][name] < rows["mxfp4"][name] and rows["nvfp4"][name] < rows["fp4_e8m0_16"][name]
    products = {row["format"]: row for row in errors.product_errors(16, 32, 256)}
    assert products["fp8_1x128"]["gaussian"] < products["nvfp4"]["gaussian"] < products["mxfp4"]["gaussian"]
    assert 0.05 < errors.saturated(number_formats.FORMATS["mxfp4"])["cut"] < 0.4
    assert errors.saturated(number_formats.FORMATS["mxfp4"])["by"] <= 0.25


def test_bytes_moved():
    assert experiments.moved("mxfp8_e4m3", (64, 64)) == 64 * 64 * 3 + 64 * 2
    assert experiments.moved("nvfp4", (64, 64)) == 64 * 64 * 5 // 2 + 64 * 4


def test_the_command_line(capsys):
    assert command.main(["--format", "mxfp4", "--shape", "64,64", "--target", "sm_100a", "--json", "-"]) == 0
    record = json.loads(capsys.readouterr().out)
    row, = record["rows"]
    assert record["experiment"] == "ch14_mx_formats" and row["variant"] == "group_a_lane" and row["load_bits"] == 128
    for argv, words in ((["--shape", "3"], "--shape is R,C"),
                        (["--variant", "cvt", "--format", "mxfp4"], "group_a_lane"),
                        (["--format", "fp8_1x128", "--tiled"], "scales of one byte"),
                        (["--format", "nvfp4", "--rule", "ceil"], "those of nvfp4 are e4m3"),
                        (["--format", "fp4"], "invalid choice: 'fp4'")):
        with pytest.raises(SystemExit) as left:
            command.main(argv)
        said = capsys.readouterr().err
        assert left.value.code == 2 and words in said and said.count("\n") == 1
    if device.current().capability is None:
        assert command.main([]) == 2
        assert "timing needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_on_the_gpu(name):
    wrong = [row for row in experiments.checked((name,)) if row["status"] != "ok"]
    assert not wrong, wrong[:3]


@pytest.mark.gpu
def test_speed_is_that_of_memory():
    rows = experiments.against_copy({"mxfp8": experiments.quantiser("mxfp8_e4m3"), "mxfp4": experiments.quantiser("mxfp4")},
                                  experiments.LARGE, {"mxfp8": experiments.moved("mxfp8_e4m3"),
                                                    "mxfp4": experiments.moved("mxfp4")}, rounds=6)
    assert all(row["ratio"] > 0.75 for row in rows), rows


def test_the_hash_sees_kernels():
    assert experiments.source() == results.source_hash(experiments.mx_kernels, experiments.mx_back_kernels, mx_formats)
