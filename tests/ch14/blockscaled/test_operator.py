"""The front of the block-scaled GEMM: which path, the emulated one against float64 (in the interpreter without a GPU),
the command line, and what they refuse."""

import dataclasses
import itertools
import json
import re

import pytest
import sentences
import torch
from cases import cases

from ch10.wgmma_gemm.configs import WgmmaConfig
from ch14 import blockscaled, fp8_gemm, mx_formats
from ch14.blockscaled import emulated, native
from ch14.blockscaled.emulated import FORMS
from ch14.blockscaled.lesson.command import COMMAND as command
from ch14.fp4_decode.lesson.verification import make_packed
from ch14.fp8_gemm.lesson.verification import fp8_operands
from ch14.mx_formats import number_formats, packing
from tilelab.measure import check
from tilelab.runtime import build, device

HERE = device.current()
WHERE = "cuda" if HERE.capability else "cpu"


def operands(m, n, k, form_a, form_b=None, tiled=False):
    """Return a (M, K) and b (K, N)."""
    return make_packed(form_a, m, k, WHERE, tiled), make_packed(form_b or form_a, n, k, WHERE, tiled).T


def fp8(m, n, k):
    """Return random fp8 with block scales, as the front takes it."""
    a, b, scale_a, scale_b, _ = fp8_operands(m, n, k, WHERE)
    return (a, scale_a), (b, scale_b)


def half_an_ulp(out, reference, sums=4e-6):
    """Return whether C was rounded once: half a unit in the last place, and what float32 loses where terms cancel."""
    bits, lowest = check.FORMAT[out.dtype]
    unit = torch.exp2((torch.frexp(reference)[1] - bits).clamp(min=lowest).double())
    return bool(((out.double() - reference).abs() <= unit / 2 + sums * reference.abs().max()).all())


def expected(form_a, form_b, target):
    """Return the path or the type of the refusal, for sizes that suit all."""
    if form_a == "bf16":
        return "decode" if form_b == "mxfp4" else ValueError
    if form_b == "bf16" or form_a not in (*FORMS, "fp8_1x128") or form_b not in (*FORMS, "fp8_128x128"):
        return ValueError
    if (form_a, form_b) == ("fp8_1x128", "fp8_128x128"):
        return "fp8" if target == "sm_90a" else device.Unsupported
    if "fp8_1x128" == form_a or "fp8_128x128" == form_b:
        return ValueError
    if target == "sm_80":
        return device.Unsupported
    native = form_a == form_b and form_a in ("mxfp8_e4m3", "mxfp4", "nvfp4")
    return "native" if native and target in ("sm_100a", "sm_103a", "sm_120a") else "emulated"


@pytest.mark.parametrize("target", device.TARGETS)
def test_the_path_of_every_pair_of_formats(target):
    found = set()
    for form_a, form_b in itertools.product(("bf16", *number_formats.FORMATS), repeat=2):
        wanted = expected(form_a, form_b, target)
        if isinstance(wanted, str):
            assert blockscaled.choose_path(form_a, form_b, (64, 256, 256), target) == wanted, (form_a, form_b)
            assert wanted in blockscaled.PATHS
            why = blockscaled.explain_path(
                form_a if form_a == form_b else f"{form_a} x {form_b}", target, wanted
            )
            assert why.endswith(".") and target in why and ("is emulated" in why) == (wanted == "emulated")
        else:
            with pytest.raises(wanted) as caught:
                blockscaled.choose_path(form_a, form_b, (64, 256, 256), target)
            assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
        found.add(wanted)
    assert len(found) > 2


def test_what_has_no_path():
    for given, message in (
        (("mxfp4", "mxfp4", (8, 8, 32), "h100"), "unknown target 'h100'"),
        (("mxfp4", "mxfp4", (8, 8, 0), "sm_90a"), "K is 0; it must be a multiple of 32"),
        (("nvfp4", "mxfp8_e4m3", (8, 8, 48), "sm_90a"), "K is 48; it must be a multiple of 32"),
        (("bf16", "mxfp4", (65, 8, 32), "sm_90a"), "takes 1 to 64"),
        (("bf16", "nvfp4", (8, 8, 32), "sm_90a"), "b in mxfp4 only, and b is in 'nvfp4': quantise a"),
        (("bf16", "fp8_128x128", (8, 128, 128), "sm_90a"), "b is in 'fp8_128x128': quantise a"),
        (
            ("fp8_1x128", "fp8_128x128", (8, 204, 128), "sm_90a"),
            "N is 204; it must be a multiple of 8, because",
        ),
        (("fp8_1x128", "fp8_1x128", (8, 128, 128), "sm_90a"), "A in fp8_1x128 goes with B in fp8_128x128"),
        (("mxfp6_e3m2", "mxfp4", (8, 8, 32), "sm_90a"), "a is in mxfp6_e3m2"),
        (("int4", "mxfp4", (8, 8, 32), "sm_90a"), "unknown format 'int4'"),
    ):
        with pytest.raises(ValueError, match=message):
            blockscaled.choose_path(*given)
    assert blockscaled.choose_path("fp8_1x128", "fp8_128x128", (8, 200, 128), "sm_90a") == "fp8"


def test_ragged_rows_of_c_are_not_for_tma():
    assert blockscaled.choose_path("mxfp4", "mxfp4", (7, 44, 64), "sm_100a") == "emulated"
    assert blockscaled.choose_path("nvfp4", "nvfp4", (7, 40, 48), "sm_100a") == "emulated"
    assert blockscaled.choose_path("nvfp4", "nvfp4", (7, 40, 96), "sm_100a") == "native"
    assert "multiple of 8" in blockscaled.explain_path("mxfp4", "sm_100a", "emulated")


def test_decoding_to_bf16_is_exact():
    # Every element times every scale: rows are scales. MX ones whose products lie within bf16's range.
    for form in map(number_formats.lookup, FORMS):
        codes = torch.arange(2**form.element.bits, dtype=torch.uint8, device=WHERE)
        codes = codes[number_formats.decode(codes, form.element).isfinite()]
        codes = codes.repeat(-(-form.block[1] // len(codes)))
        codes = codes[: len(codes) // form.block[1] * form.block[1]]
        scales = torch.arange(0x7F) if form.scale == "e4m3" else torch.arange(20, 230, 15)
        scales = scales.to(WHERE, torch.uint8)[:, None].repeat(1, len(codes) // form.block[1])
        codes = codes.repeat(len(scales), 1)
        pair = torch.ones(2, device=WHERE) if form.scale == "e4m3" else None
        given = mx_formats.Packed(
            form, tuple(codes.shape), packing.pack(codes, form.element.bits), scales, pair
        )
        factor = (
            number_formats.decode(scales, number_formats.E4M3)
            if form.scale == "e4m3"
            else number_formats.decode_e8m0(scales)
        )
        factor = factor.double().repeat_interleave(form.block[1], 1)
        wanted = number_formats.decode(codes, form.element).double() * factor
        assert torch.equal(mx_formats.dequantise(given).double(), wanted)
        assert torch.equal(wanted.bfloat16().double(), wanted)  # the claim itself


@cases(
    "form, shape, dtype, tiled",
    ("mxfp8_e4m3", (66, 72, 160), torch.bfloat16, False),
    ("mxfp8_e5m2", (1, 1, 32), torch.float16, False),
    ("mxfp4", (2, 9, 64), torch.float32, True),
    ("nvfp4", (3, 5, 96), torch.bfloat16, True),
    ("fp4_e8m0_16", (37, 45, 96), torch.float32, False),
)
def test_against_float64(form, shape, dtype, tiled):
    a, b = operands(*shape, form, tiled=tiled)
    kept = [each.clone() for matrix in (a, b.T) for each in matrix.tensors().values()]
    out, touched = check.make_poisoned(shape[:2], dtype, WHERE)
    launch = blockscaled.prepare(a, b, out=out, path="emulated")
    assert launch() is out and launch.out is out
    assert half_an_ulp(out, blockscaled.spec(a, b)) and not touched()
    assert all(torch.equal(*pair) for pair in zip(kept, [*a.tensors().values(), *b.T.tensors().values()]))
    first = out.clone()
    a.values.bitwise_xor_(0x80)  # some signs: a launch reads its operands anew
    assert half_an_ulp(launch(), blockscaled.spec(a, b)) and not torch.equal(out, first)


def set_tensor_scale(matrix, scale):
    return dataclasses.replace(matrix, pair=torch.tensor([scale, 1 / scale], device=WHERE))


@cases(
    "scale_a, scale_b",
    (0.37, 3e-4),
    (2.0**-126, 2.0**100),
    (3e37, 3e-38),
    (3e-38, 3e37),
    (2.0**-70, 2.0**-70),
    (7e12, 3e15),
)
def test_scales_of_tensors_are_applied_in_float32_in_an_order_that_stays_finite(scale_a, scale_b):
    a, b = operands(9, 16, 64, "nvfp4")
    a, b = set_tensor_scale(a, scale_a), set_tensor_scale(b.T, scale_b).T
    reference = blockscaled.spec(a, b)
    assert half_an_ulp(blockscaled.matmul(a, b, path="emulated"), reference)
    if scale_a == 0.37:  # a sum that is rounded before it is scaled is rounded twice
        plain = blockscaled.spec(set_tensor_scale(a, 1.0), set_tensor_scale(b.T, 1.0).T)
        assert not half_an_ulp((plain.bfloat16().double() * scale_a * scale_b).bfloat16(), reference)


def test_formats_may_differ_and_dead_blocks_stay_where_they_are():
    a, b = operands(6, 24, 64, "nvfp4", "mxfp8_e4m3")
    assert half_an_ulp(blockscaled.matmul(a, b), blockscaled.spec(a, b))
    b.T.scales[3, 1] = 255
    out = blockscaled.matmul(a, b)
    assert out[:, 3].isnan().all() and not out[:, :3].isnan().any() and not out[:, 4:].isnan().any()


def test_spec_by_hand():
    a, b = operands(2, 3, 32, "nvfp4", "mxfp4")
    matrices = [number_formats.decode(of.unpack().codes, number_formats.E2M1).double() for of in (a, b.T)]
    scales = (
        number_formats.decode(a.scales, number_formats.E4M3).double() * float(a.pair[0]),
        number_formats.decode_e8m0(b.T.scales).double(),
    )
    found = blockscaled.spec(a, b)
    for m, n in itertools.product(range(2), range(3)):
        total = sum(
            float(matrices[0][m, k] * scales[0][m, k // 16] * matrices[1][n, k] * scales[1][n, k // 32])
            for k in range(32)
        )
        assert float(found[m, n]) == pytest.approx(total, rel=1e-12, abs=1e-12)


def test_spec_of_a_pair_with_float32_scales():
    (a, scale_a), (b, scale_b) = pairs = fp8(5, 128, 256)
    assert torch.equal(blockscaled.spec(*pairs), fp8_gemm.spec(a, b, scale_a, scale_b))


def test_outs_that_lie_elsewhere():
    a, b = operands(6, 40, 64, "mxfp4")
    wide = torch.full((6, 64), 7.0, dtype=torch.float16, device=WHERE)
    for out in (wide[:, :40], wide[:, 3:43]):  # rows further apart; rows that no copy engine can write
        assert half_an_ulp(blockscaled.matmul(a, b, out=out, path="emulated"), blockscaled.spec(a, b))
        assert (wide[:, 43:] == 7).all()
        wide.fill_(7.0)


def refused(message, a, b, error=ValueError, **options):
    with sentences.refused(message, error):
        blockscaled.prepare(a, b, **options)


def test_bad_operands_get_one_sentence():
    a, b = operands(4, 24, 64, "mxfp4")
    x = torch.randn(4, 64, device=WHERE).bfloat16()
    refused("b is a list; it must be the transpose .* of a Packed or a pair", a, [1])
    refused("b is a Packed; it must be the transpose", a, b.T)
    with pytest.raises(ValueError, match="b is a Tensor"):
        blockscaled.spec(x, x)
    refused("a is a Tensor; it must be a Packed, a bfloat16 matrix of tokens or a pair", x.float(), b)
    refused("b is a Tensor", x, x)
    refused("differ in K: a is 4 x 64 and b is 32 x 24", a, operands(4, 24, 32, "mxfp4")[1])
    refused("unknown path 'fast'; choose best, native, fp8, emulated, decode", a, b, path="fast")
    refused("takes the path", a, b, path="fp8")
    refused("takes the path decode; native does not fit", x, b, path="native")
    refused("fused on the fp8 path only", a, b, path="emulated", bias=x[0])
    refused("fused on the fp8 path only, and this is the decode path", x, b, activation="silu")
    refused("decode path reads scales row by row", x, operands(4, 24, 64, "mxfp4", tiled=True)[1])
    refused("takes 1 to 64", torch.randn(65, 64, device=WHERE).bfloat16(), b)


def test_bad_outs_get_one_sentence():
    a, b = operands(4, 24, 64, "mxfp4")

    def room(*shape, **options):
        return torch.empty(shape, device=WHERE, **options)

    for out, message in (
        (room(4, 25), "out must be 4 x 24"),
        (room(4, 24, dtype=torch.int32), "it is int32"),
        (room(24, 4).T, "out must be stored row by row"),
        (room(1, 24).expand(4, 24), "rows of out overlap"),
        ([], "out must be a torch.Tensor"),
        (room(4, 24, requires_grad=True), "no backward pass"),
    ):
        refused(message, a, b, out=out, path="emulated")
    refused(
        "out lies in the memory of the values of b",
        a,
        b,
        out=b.T.values.flatten()[:384].view(torch.float32).view(4, 24),
        path="emulated",
    )


@pytest.mark.parametrize("m, n", [(0, 24), (4, 0), (0, 0)])
def test_an_empty_c(m, n):
    a, b = (mx_formats.empty((rows, 64), "nvfp4", WHERE) for rows in (m, n))
    a.pair.fill_(1), b.pair.fill_(1)
    launch = emulated.prepare(a, b.T)
    assert launch().shape == (m, n) and str(launch.config) in map(str, emulated.configs().values())


def test_the_emulated_path_says_what_it_takes():
    a, _ = operands(4, 4, 128, "fp8_1x128")
    _, b = operands(4, 4, 128, "mxfp4")
    with pytest.raises(ValueError, match="a is in fp8_1x128; the emulated path takes mxfp8_e4m3"):
        emulated.prepare(a, b)
    with pytest.raises(ValueError, match="a must be a Packed .* they are Tensor and Transposed"):
        emulated.prepare(b.T.values, b)
    c, _ = operands(4, 4, 48, "nvfp4")
    _, d = operands(4, 4, 48, "mxfp4")
    with pytest.raises(ValueError, match="K is 48; it must be a multiple of 32"):
        emulated.prepare(c, d)
    long = mx_formats.empty((1, 2**30 + 32), "mxfp4")  # half a GiB, of which no page is touched
    with pytest.raises(ValueError, match="M, N and K are 1, 1 and 1,073,741,856; each must be at most 2.30"):
        emulated.prepare(long, long.T)
    with pytest.raises(ValueError, match="meta"):
        emulated.prepare(mx_formats.empty((4, 128), "mxfp4", "meta"), b)


@pytest.mark.skipif(HERE.capability is not None, reason="without a GPU")
def test_without_a_gpu_there_is_no_native_path_and_no_wgmma():
    refused(
        "Hopper's tensor cores know no block scales, so there is no native path",
        *operands(8, 8, 64, "mxfp4"),
        path="native",
        error=device.Unsupported,
    )
    refused("WGMMA", *fp8(8, 128, 128), error=device.Unsupported)


def test_decode_goes_through_the_front():
    x = torch.randn(3, 64, device=WHERE).bfloat16()
    _, b = operands(1, 20, 64, "mxfp4")
    assert check.relative_error(blockscaled.matmul(x, b), blockscaled.spec(x, b)) < 2**-8


NOTE = (
    "--mnkl 8192,8192,1024,1 --mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --ab_dtype Float4E2M1FN --sf_dtype "
    "Float8E8M0FNU --sf_vec_size 16 --c_dtype Float16"
)
FP8 = "--ab_dtype Float8E4M3FN --sf_dtype Float32 --sf_vec_size 128"


@cases(
    "argv, message",
    ("--mnkl 1,2,3", "--mnkl must be M,N,K,L, each from 1 to 131,072; it is 1,2,3"),
    ("--mnkl 8,8,3²,1", "it is 8,8,3²,1"),
    ("--mnkl 8,8,32,1025", "with L up to 1,024"),
    ("--mnkl 8,8,40,1", "K of --mnkl is 40; it must be a multiple of --sf_vec_size .16"),
    ("--mma_tiler_mn 64,128", "the tile's M is 64; choose one of 128, 256"),
    ("--cluster_shape_mn 1,1", "the cluster's M is 1; .* must be 2 or 4"),
    ("--ab_dtype Float6E3M2FN --sf_vec_size 32", "mxfp6_e3m2 .* has no kernel"),
    ("--sf_vec_size 16.0", "invalid int value"),
    ("--c_dtype Float8E4M3FN", "Float16, BFloat16, Float32"),
    ("--sf_dtype Float32 --sf_vec_size 32", "Float32 scales go over 128"),
    ("--ab_dtype Float8E4M3FN --sf_vec_size 128", "Float32 scales go over 128"),
    (f"{FP8} --c_dtype Float16", "C is BFloat16"),
    ("--kernel naive --use_baseline", "a kernel compared with itself"),
    ("--kernel fast", "invalid choice"),
    ("--target sm_90", "invalid choice"),
    ("--target sm_100a --benchmark_mode", "--target only compiles"),
    ("--skip_ref_check", "there is nothing to do"),
)
def test_bad_usage_is_one_line(capsys, argv, message):
    with pytest.raises(SystemExit) as stopped:
        command.main(argv.split())
    said = capsys.readouterr()
    assert stopped.value.code == 2 and not said.out and said.err.count("\n") == 1
    assert re.search(message, said.err), said.err


@cases(
    "argv, message",
    ("--kernel native --target sm_90a --sf_vec_size 32", "mxfp4 is emulated on sm_90a"),
    ("--kernel native --target sm_100a", "tl.dot_scaled takes E8M0 scales over 32 and E4M3 over 16"),
    ("--kernel naive --target sm_100a", "no kernel for fp4_e8m0_16"),
    (f"{FP8} --target sm_100a", "needs WGMMA"),
    (f"{FP8} --c_dtype BFloat16 --target sm_90a --kernel naive", "take the path fp8"),
)
def test_what_cannot_run_is_one_line(capsys, argv, message):
    assert command.main(argv.split()) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and re.search(message, said.err), said.err


def run_command(capsys, argv):
    status = command.main(f"{argv} --json -".split())
    return status, json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.compile
def test_the_notes_own_command_is_planned_and_named_for_what_it_is(capsys):
    status, rows = run_command(capsys, f"{NOTE} --target sm_100a")
    assert status == 0 and [row["name"] for row in rows] == ["emulated", "emulated", "plan"]
    assert (rows[2]["ab_stages"], rows[2]["c_stages"]) == (7, 3) and rows[1]["tcgen05_mma"] > 0
    assert "neither MXFP4 (E8M0 over 32) nor NVFP4" in rows[0]["note"] and "do not apply" in rows[0]["note"]
    assert all(row["format"] == "fp4_e8m0_16" and row["shape"] == [8192, 8192, 1024, 1] for row in rows)


@pytest.mark.compile
@pytest.mark.parametrize("target, kernel", [("sm_90a", "emulated"), ("sm_100a", "native")])
def test_a_target_is_compiled_with_what_it_would_run(capsys, target, kernel):
    status, rows = run_command(
        capsys, f"--sf_vec_size 32 --target {target} --c_dtype BFloat16 --use_baseline"
    )
    assert status == 0
    found = {row["name"]: row for row in rows}  # of the emulated path the second, its GEMM
    assert found[kernel]["count"] > 0 and found["naive"]["count"] > 0
    assert (found[kernel].get("block_scale", 0) > 0) == (kernel == "native")
    assert ("plan" in found) == (target == "sm_100a")
    said = {"emulated": "whose tile is its own", "native": "what each of two CTAs has of the tile"}[kernel]
    assert said in rows[0]["note"]


@pytest.mark.compile
def test_the_sentences_are_printed_and_a_kernel_can_be_asked_for(capsys):
    tile = "--ab_dtype Float8E4M3FN --sf_vec_size 32 --mma_tiler_mn 128,128 --cluster_shape_mn 1,1"
    assert command.main(f"--target sm_120a {tile}".split()) == 0
    printed = capsys.readouterr().out
    assert "sm_120a multiplies mxfp8_e4m3 in its tensor cores" in printed
    assert "tile that was asked for" in printed
    assert "sm_120a has no tensor memory, so there is no stage plan" in printed
    assert command.main(f"--target sm_120a {tile} --kernel emulated".split()) == 0
    assert "as --kernel emulated asks" in capsys.readouterr().out


@pytest.mark.compile
def test_emulated_jobs_build_for_every_kind_of_format_c_and_target():
    wanted = (
        ("nvfp4", "sm_90a", torch.bfloat16),
        ("mxfp8_e5m2", "sm_100a", torch.float32),
        ("nvfp4", "sm_120a", torch.float16),
    )
    jobs = [
        job
        for form, target, dtype in wanted
        for job in emulated.jobs(form, target, (1000, 1000, 4096), dtype)
    ]
    for report in build.build(jobs):
        assert report.launchable, (report.job.name, report.job.target, report.reason)
        assert "dequantise" in report.job.name or report.counts["tma_load"] > 0


SHAPES = ((1, 8, 32), (333, 520, 96), (1000, 1003, 4096), (129, 4104, 1056), (4096, 4096, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_emulated_path_on_the_gpu(form):
    device.require("has_tma", "this test", "run it elsewhere")
    for m, n, k in SHAPES:
        for dtype in emulated.DTYPES:
            a, b = operands(m, n, k, form, tiled=m == 333)
            out, touched = check.make_poisoned((m, n), dtype, WHERE)
            launch = blockscaled.prepare(a, b, out=out, path="emulated")
            launch()
            assert half_an_ulp(out, blockscaled.spec(a, b), 2e-6 + k * 2.0**-27), (m, n, k, dtype)
            assert not touched(), (m, n, k, dtype)
            first = out.clone()
            assert torch.equal(launch(), first)
            plain = HERE.has_wgmma and dtype == torch.bfloat16 and form != "nvfp4"
            assert isinstance(launch.config, WgmmaConfig) == plain


@pytest.mark.gpu
def test_it_can_be_captured():
    a, b = operands(256, 264, 512, "nvfp4")
    launch = blockscaled.prepare(a, b, path="emulated")
    wanted = launch().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    launch.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(launch.out, wanted)


@pytest.mark.gpu
def test_the_other_paths_on_the_gpu():
    x, (_, b) = torch.randn(16, 1056, device=WHERE).bfloat16(), operands(1, 200, 1056, "mxfp4")
    assert check.relative_error(blockscaled.matmul(x, b), blockscaled.spec(x, b)) < 2**-8
    if HERE.has_wgmma:
        for m in (5, 300):
            a, b = fp8(m, 256, 512)
            assert check.relative_error(blockscaled.matmul(a, b), blockscaled.spec(a, b)) < 2**-7
        packed = make_packed("fp8_1x128", 70, 512, WHERE)
        assert check.relative_error(blockscaled.matmul(packed, b), blockscaled.spec(packed, b)) < 2**-7
        refused(
            "so there is no native path",
            *operands(8, 8, 64, "mxfp4"),
            path="native",
            error=device.Unsupported,
        )
    elif HERE.target in blockscaled.NATIVE:
        for form in native.FORMS:
            a, b = operands(200, 264, 288, form, tiled=True)
            assert check.relative_error(blockscaled.matmul(a, b), blockscaled.spec(a, b)) < 2**-7


@pytest.mark.gpu
@cases(
    "argv, names",
    (NOTE.replace("8192,8192,1024,1", "500,1000,512,2") + " --use_baseline", ["emulated"]),
    ("--mnkl 512,1000,1024,1 --sf_vec_size 32 --use_baseline --c_dtype BFloat16", ["emulated", "naive"]),
    ("--mnkl 300,512,1024,1 --sf_dtype Float8E4M3FN --benchmark_mode --skip_ref_check", ["emulated"]),
    (
        "--mnkl 300,512,1024,1 --ab_dtype Float8E4M3FN --sf_vec_size 32 --kernel naive --c_dtype Float32",
        ["naive"],
    ),
    (
        "--mnkl 300,512,1024,2 --ab_dtype Float8E4M3FN --sf_dtype Float32 --sf_vec_size 128 --c_dtype BFloat16 "
        "--benchmark_mode",
        ["fp8"],
    ),
)
def test_the_command_line_on_hopper(capsys, argv, names):
    if not HERE.has_wgmma:
        pytest.skip("needs Hopper")
    status, rows = run_command(capsys, argv)
    assert status == 0 and [row["name"] for row in rows] == names
    timed = "--benchmark_mode" in argv or "--use_baseline" in argv
    assert all((row.get("ms", 0) > 0 and row["ratio"] > 0) == timed for row in rows)
    assert all(("error" in row) != ("--skip_ref_check" in argv) for row in rows)
    assert all("do not apply to this one" in row["note"] for row in rows)
