"""tl.dot_scaled: both kernels against float64, what every target makes of them, and what is refused."""

import dataclasses
import itertools

import ml_dtypes
import numpy
import pytest
import sentences
import torch
from cases import cases

from ch14 import mx_formats
from ch14.blockscaled import native
from ch14.blockscaled.native import FORMS, NativeConfig, configs, prepare, spec
from ch14.fp4_decode.lesson.verification import make_packed
from ch14.mx_formats import Packed, number_formats, packing
from tilelab.measure import check
from tilelab.runtime import build, device

HERE = device.current()
WHERE = "cuda" if HERE.capability else "cpu"
NAIVE = NativeConfig(128, 128, 128, 8, 2, "naive")
TILED = [
    NativeConfig(128, 128, 128, 8, 2),
    NativeConfig(128, 256, 256, 8, 2, epilogue_subtile=4),
    NativeConfig(256, 128, 128, 8, 2, epilogue_subtile=2, fused=True),
]


def case(form, m, n, k, tiled=False):
    return make_packed(form, m, k, WHERE, tiled), make_packed(form, n, k, WHERE, tiled).T


def first(form, target=None):
    return next(iter(configs(form, target).values()))


def matmul(a, b, **options):
    return prepare(a, b, **options)()


@pytest.mark.parametrize("form", FORMS)
def test_spec_by_hand(form):
    a, b = case(form, 3, 2, 64)
    element = ml_dtypes.float8_e4m3fn if form == "mxfp8_e4m3" else ml_dtypes.float4_e2m1fn
    scale = ml_dtypes.float8_e4m3fn if form == "nvfp4" else ml_dtypes.float8_e8m0fnu

    def value(of, row, column):
        byte = int(of.values[row, column if form == "mxfp8_e4m3" else column // 2])
        code = byte if form == "mxfp8_e4m3" else byte >> 4 * (column % 2) & 15
        factor = numpy.uint8(int(of.scales[row, column // of.format.block[1]])).view(scale)
        return (
            float(numpy.uint8(code).view(element))
            * float(factor)
            * (1.0 if of.pair is None else float(of.pair[0]))
        )

    for m in range(3):
        for n in range(2):
            total = sum(value(a, m, k) * value(b.T, n, k) for k in range(64))
            assert abs(total - float(spec(a, b)[m, n])) <= 1e-5 * float(spec(a, b).abs().max())


def matches(form, config, shapes, dtypes=(torch.bfloat16,)):
    for (m, n, k), dtype in itertools.product(shapes, dtypes):
        a, b = case(form, m, n, k, config.kernel == "native")
        kept = [each.clone() for matrix in (a, b.T) for each in matrix.tensors().values()]
        out, touched = check.make_poisoned((m, n), dtype, WHERE)
        launch = prepare(a, b, out=out, config=config)
        found = check.relative_error(launch(), spec(a, b))
        assert found < check.TOLERANCE[dtype], (form, config, m, n, k, dtype)
        first = out.clone()
        assert not touched() and (not HERE.capability or torch.equal(launch(), first))
        assert all(torch.equal(*pair) for pair in zip(kept, [*a.tensors().values(), *b.T.tensors().values()]))


IN_THE_INTERPRETER = pytest.mark.skipif(HERE.capability is not None, reason="for the interpreter")


@IN_THE_INTERPRETER
@cases(
    "form, shape, dtype",
    ("mxfp8_e4m3", (1, 1, 32), torch.bfloat16),
    ("mxfp8_e4m3", (3, 5, 256), torch.float16),  # whole steps
    ("mxfp4", (130, 5, 160), torch.float32),
    ("nvfp4", (5, 130, 144), torch.bfloat16),
)
def test_naive_around_the_product(form, shape, dtype):
    matches(form, NAIVE, [shape], [dtype])


@IN_THE_INTERPRETER
@cases(
    "form, config, shape, dtype",
    ("mxfp8_e4m3", TILED[0], (1, 8, 32), torch.bfloat16),
    ("mxfp8_e4m3", TILED[0], (300, 136, 160), torch.float16),  # six tiles for two programs
    ("mxfp4", TILED[1], (130, 264, 288), torch.float32),
    ("nvfp4", TILED[2], (258, 136, 288), torch.float16),
)
def test_native_around_the_product(form, config, shape, dtype):
    matches(form, config, [shape], [dtype])


@IN_THE_INTERPRETER
@pytest.mark.parametrize("config", [NAIVE, TILED[0]], ids=str)
def test_tensor_scales_are_applied_in_an_order_that_stays_finite(config):
    a, b = case("nvfp4", 3, 8, 64, config.kernel == "native")
    for scales in ((3e37, 3e-38), (3e-38, 3e37)):
        for matrix, scale in zip((a, b.T), scales):
            matrix.pair[0] = scale
        assert check.relative_error(matmul(a, b, config=config), spec(a, b)) < check.TOLERANCE[torch.bfloat16]


def nan_stays_in_its_row(config):
    """Past the end of a row lies the next one: its NaN must not be read, as zero times NaN is NaN."""
    a, b = case("mxfp8_e4m3", 10, 16, 160)
    a.values[3, 0], a.scales[5, 0], b.T.values[7, 0], b.T.scales[9, 0] = 0x7F, 255, 0xFF, 255
    wanted, tiled = spec(a, b), config.kernel == "native"
    if tiled:
        a, weight = (
            Packed(of.format, of.shape, of.values, packing.tile_scales(of.scales), tiled=True)
            for of in (a, b.T)
        )
        b = weight.T
    out = matmul(a, b, config=config)
    assert torch.equal(out.isnan(), wanted.isnan()) and int(wanted.isnan().sum()) == 2 * 10 + 2 * 16 - 4
    assert check.relative_error(out[6:, 10:], wanted[6:, 10:]) < check.TOLERANCE[torch.bfloat16]


@IN_THE_INTERPRETER
@pytest.mark.parametrize("config", [NAIVE, TILED[0]], ids=str)
def test_nan_stays_in_its_row(config):
    nan_stays_in_its_row(config)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_naive_on_the_gpu(form):
    if reason := native.rejection(
        native.compile_config(form, NAIVE, HERE.target, torch.bfloat16), form, NAIVE
    ):
        with pytest.raises(device.Unsupported) as caught:
            matmul(*case(form, 4, 8, 64), config=NAIVE)
        assert str(caught.value) == reason and "\n" not in reason
        return
    matches(form, NAIVE, [(1, 1, 32), (130, 257, 1120)], native.OUTPUTS)
    for config in configs(form, kernel="naive").values():
        matches(form, config, [(130, 257, 1120), (1000, 333, 2048)])
    if form == "nvfp4":
        matches(form, NAIVE, [(5, 9, 144)])


@pytest.mark.gpu
def test_nan_stays_in_its_row_on_the_gpu():
    nan_stays_in_its_row(NAIVE)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_native_on_the_gpu(form):
    if not HERE.has_native_block_scale:
        with pytest.raises(device.Unsupported, match="needs block-scaled tensor cores .* here is .*naive"):
            matmul(*case(form, 4, 8, 64, True))
        return
    config = first(form)
    if native.rejection(native.compile_config(form, config, HERE.target, torch.bfloat16), form, config):
        with pytest.raises(device.Unsupported):
            matmul(*case(form, 4, 8, 64, True), config=config)
        return
    for config in configs(form, kernel="native").values():
        matches(form, config, [(1, 8, 32), (130, 264, 1120), (1000, 4096, 2048)])
    matmul(*case(form, 256, 256, 256, True), out=torch.empty(256, 256, device=WHERE))


@pytest.fixture
def gpu(monkeypatch):
    """Return the choice of a kernel as it is made on a GPU that is not here: `gpu(target)(form, scales, out)`."""

    def on(target):
        here = device.Device(f"a GPU of {target}", device.target_limits(target).capability, target, 100)
        monkeypatch.setattr(device, "current", lambda: here)
        monkeypatch.setattr(native, "is_interpreted", lambda: False)

        def choose(form, kernel, out=torch.bfloat16, where="cuda"):
            return native._choose_runnable(
                form, list(configs(form, kernel=kernel).values()), torch.device(where), out
            )

        return choose

    return on


@pytest.mark.compile
def test_the_choice_on_other_gpus(gpu):
    hopper = gpu("sm_90a")
    assert hopper("mxfp8_e4m3", "naive").kernel == hopper("mxfp4", "naive").kernel == "naive"
    with pytest.raises(device.Unsupported, match="native kernel needs block-scaled tensor cores"):
        hopper("mxfp4", "native")
    with pytest.raises(device.Unsupported, match="needs operands on a GPU; they are on cpu"):
        hopper("mxfp4", "naive", where="cpu")
    blackwell = gpu("sm_100a")
    assert str(blackwell("nvfp4", "native")) == str(first("nvfp4", "sm_100a"))
    wide = blackwell("mxfp8_e4m3", "native", torch.float32)  # stored in float32, the first no longer fits
    assert wide != first("mxfp8_e4m3", "sm_100a") and wide in configs("mxfp8_e4m3", "sm_100a").values()
    if (
        native.compile_config("mxfp4", first("mxfp4", "sm_121a"), "sm_121a", torch.bfloat16).counts[
            "block_scale"
        ]
        == 0
    ):
        says = "no block-scaled instruction of mxfp4 for sm_121a .*bf16.bf16"
        with pytest.raises(device.Unsupported, match=says):
            gpu("sm_121a")("mxfp4", "native")


NATIVE = {
    "sm_100a": {
        "mxfp8_e4m3": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X",
        "mxfp4": "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X",
        "nvfp4": "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X",
    },
    "sm_120a": {
        "mxfp8_e4m3": "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32."
        "e4m3.e4m3.f32.ue8m0",
        "mxfp4": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1."
        "e2m1.f32.ue8m0",
        "nvfp4": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1."
        "e2m1.f32.ue4m3",
    },
}


@pytest.mark.compile
def test_every_family_of_targets_gets_what_it_has():
    cases = [(target, form, "native") for target in NATIVE for form in FORMS]
    cases += [("sm_90a", form, "native") for form in ("mxfp4", "nvfp4")]
    cases += [("sm_100a", form, "naive") for form in ("mxfp4", "nvfp4")]
    chosen = {}
    for target, form, kernel in cases:
        config = next(iter(configs(form, target, kernel).values()))
        job = native.job(config, target, form)
        chosen[id(job)] = job, form, config
    for made in build.build(job for job, *_ in chosen.values()):
        _, form, config = chosen[id(made.job)]
        target, reason = made.job.target, native.rejection(made, form, config)
        instruction, count = native.tensor_core_instruction(made.ptx)
        if config.kernel == "native" and target in NATIVE:
            assert made.status == "ok" and instruction == NATIVE[target][form] and not reason
        elif made.status != "ok":  # nvfp4 where Triton 3.6 and 3.7 would have to decode it
            assert form == "nvfp4" and f"does not run on {target} with Triton" in reason
            continue
        elif config.kernel == "native":
            assert "bf16" in instruction and "decodes it to 16 bits" in reason
        # Operands in two dimensions and scales in four.
        loads = [f"cp.async.bulk.tensor.{rank}d.shared" in made.ptx for rank in (2, 4)]
        assert count > 0 and loads == [config.kernel == "native"] * 2, made.job.name
        # Scales that TMA brought go to tensor memory without threads; those that threads loaded do not.
        assert ("tcgen05.cp" in made.ptx) == (config.kernel == "native" and target == "sm_100a")


@pytest.mark.compile
def test_configurations_for_tensor_memory_fit_but_not_two_wide_accumulators():
    """All of one format, and the first of each other."""
    wide = {
        form: NativeConfig(
            128, 256, 1024 // number_formats.lookup(form).element.bits, 8, 3, epilogue_subtile=4, fused=True
        )
        for form in FORMS
    }
    scale_columns = {"mxfp8_e4m3": 4 + 8, "mxfp4": 8 + 16, "nvfp4": 16 + 32}  # of A and B
    jobs = [
        native.job(config, "sm_100a", form)
        for form in FORMS
        for config in [wide[form], *configs(form, "sm_100a").values()][: None if form == "nvfp4" else 2]
    ]
    for report in build.build(jobs):
        form = report.job.name.split()[0]
        if report.job.name == f"{form} {wide[form]}":
            assert (report.status, report.tmem) == ("rejected", 2 * 256 + scale_columns[form])
            # it is a trap
            assert "columns of tensor memory" in report.reason and not report.counts["tcgen05_mma"]
        else:
            assert report.launchable and report.counts["block_scale"] > 0, report.reason
            assert report.spills <= 16, report.reason
            # one accumulator of 256 columns or two of 128, and scales: a power of two
            assert report.tmem == 512


def refused(message, *changes, error=ValueError, form="mxfp4", tiled=False, **options):
    a, b = case(form, 4, 16, 64, tiled)
    given = {"a": a, "b": b} | dict(changes) | options
    with sentences.refused(message, error):
        matmul(**given)


def test_bad_input_gets_one_sentence():
    a, b = case("mxfp4", 4, 16, 64)
    other, wide = case("mxfp8_e4m3", 4, 16, 64)[1], case("mxfp4", 4, 16, 96)[1]
    refused("a must be a Packed", ("a", a.values))
    refused("a must be a Packed .* and b the transpose", ("b", b.T))
    refused("share a format and a layout of scales; they are mxfp4 and mxfp8_e4m3", ("b", other))
    refused("they are mxfp4 and mxfp4 tiled", ("b", case("mxfp4", 4, 16, 64, True)[1]))
    refused("differ in K: a is 4 x 64 and b is 96 x 16", ("b", wide))
    refused("no kernel for mxfp8_e5m2 here; choose mxfp8_e4m3, mxfp4, nvfp4", form="mxfp8_e5m2")
    refused("N is 9; it must be a multiple of 8", ("b", case("mxfp4", 4, 9, 64, True)[1]), tiled=True)
    ragged = case("nvfp4", 4, 16, 80, True)
    refused("4, 16 and 80; K must be a multiple of 32", ("a", ragged[0]), ("b", ragged[1]), tiled=True)
    refused(
        "scales in rows take the naive kernel; config is 128×128×128 · 8 warps · 2 stages · native",
        config=TILED[0],
    )
    refused(
        "unknown configuration '128,128'; choose best, 128×128×128 · 8 warps · 3 stages · naive",
        config="128,128",
    )
    refused(
        "out must be bfloat16, float16 or float32", out=torch.empty(4, 16, dtype=torch.float64, device=WHERE)
    )
    refused(
        "out lies in the memory of the values of a",
        ("a", a),
        out=a.values.view(torch.float16)[:, :16].view(-1)[:64].view(4, 16),
    )
    refused("on the meta device", ("a", mx_formats.empty((4, 64), "mxfp4", "meta")))


@cases(
    "given, message",
    ((64, 128, 128, 4, 3), "block_m is 64; choose one of"),
    ((128, 128, 128, 16.0, 3), "num_warps is 16.0; choose one"),
    ((128, 128, 128, 4, 3, "fast"), "kernel is 'fast'; choose one of native, naive"),
    ((128, 128, 128, 4, 3, "naive", 2), "belong to the native kernel"),
)
def test_bad_configurations_get_one_sentence(given, message):
    with pytest.raises(ValueError, match=message):
        NativeConfig(*given)


def test_a_step_holds_whole_tiles_of_scales():
    with pytest.raises(ValueError, match="block_k is 64; for mxfp4 it must be a multiple of 128"):
        native.job(NativeConfig(128, 128, 64, 8, 2), "sm_100a", "mxfp4")
    assert native.job(NativeConfig(128, 128, 64, 8, 2), "sm_100a", "nvfp4").constants["BLOCK_K"] == 64


def test_a_changed_format_is_not_taken_by_its_name():
    changed = dataclasses.replace(number_formats.FORMATS["mxfp4"], block=(1, 64))
    with pytest.raises(ValueError, match="mxfp4 .* has no kernel"):
        configs(changed, "sm_100a")
