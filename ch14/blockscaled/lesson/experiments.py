"""Measure every path of `ch14.blockscaled` beside its peer, and check it against float64 where it is timed.

`impacts` measures the field note's claims.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm

from ch10 import wgmma_gemm
from ch14 import mx_formats
from ch14.blockscaled import decode as decode_path
from ch14.blockscaled import decode_kernels, fp8, native, native_kernels
from ch14.blockscaled import emulated as emulated_path
from ch14.blockscaled.fp8 import Fp8Config, operand_bytes
from ch14.blockscaled.lesson import verification
from ch14.blockscaled.lesson.verification import BF16, FORMS, TOKENS, fp8_jobs, fp8_operands, verify_fp8
from ch14.gemm import kernels as gemm_kernels
from ch14.mx_formats import kernels as mx_kernels
from tilelab.measure import bench, check, peers
from tilelab.records import results
from tilelab.runtime import build, device, provenance

SHAPES = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 7168, 16384),
    (4096, 24576, 1536),
    (4096, 4096, 7168),
)
LONG, CUBE, SPLIT = SHAPES[2], SHAPES[1], (128, 4096, 16384)
THIN = tuple((m, n, k) for n, k in ((7168, 2048), (24576, 1536), (7168, 16384)) for m in (16, 64, 128))
# The weights (N, K) of DeepSeek-V3 that run in fp8: arXiv 2412.19437 and DeepGEMM's tests.
DEEPSEEK = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
PEER_SHAPES = tuple((m, n, k) for n, k in DEEPSEEK for m in (1, 16, 64, 256, 1024, 4096, 8192))
FP8_FLOPS = fp8.FLOPS_PER_CLOCK
# The measured code, for `provenance.source_hash`.
FP8_SOURCES = (fp8, fp8.SOURCE)
EMULATED_SOURCES = (
    emulated_path,
    native,
    native_kernels,
    mx_formats,
    mx_kernels,
    wgmma_gemm,
    wgmma_gemm.SOURCE,
    gemm_kernels,
)
DECODE_SOURCES = (decode_path, decode_kernels)


experiment = functools.partial(results.experiment, can_run=lambda: device.current().has_wgmma)


# ---- candidates for bench.compare: each takes the inputs and returns a launch


def prepare_course(config="best", **options):
    """Return the fp8 kernel as a candidate on `fp8_operands`."""
    return lambda a, b, scale_a, scale_b, out: fp8.prepare(
        a, b, scale_a, scale_b, out=out, config=config, **options
    )


def prepare_torch(a, b, scale_a, scale_b, out):
    """Multiply by torch with the same scales, in cuBLASLt. It needs padded scales unless 4 divides K / 128.

    torch wants no gap between the columns of `scale_a`, and cuBLASLt wants each at a multiple of 16 bytes. Its scales
    of B are of whole blocks. So where 4 does not divide M, or 128 does not divide N, the launch multiplies rows of
    zeros, too; they are appended here.
    """

    def append_zeros(matrix, more):
        zeros = matrix.new_zeros(more, matrix.shape[1], dtype=torch.uint8)
        return torch.cat([matrix.view(torch.uint8), zeros]).view(matrix.dtype)

    m, n = a.shape[0], b.shape[1]
    if more := -m % 4:
        a = append_zeros(a, more)
        scale_a = torch.cat([scale_a.T, scale_a.new_ones(scale_a.shape[1], more)], 1).T
    if more := -n % fp8.BLOCK:
        b = append_zeros(b.T, more).T

    return lambda: scaled_mm(
        a, b, scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128, output_dtype=BF16
    )[:m, :n]


def prepare_one_scale(a, b, scale_a, scale_b, out):
    """Multiply by cuBLASLt with one scale per matrix and fast accumulation. The distance to it is what block scales
    cost."""
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)


@triton.jit
def stream_kernel(weight_ptr, scales_ptr, out_ptr, words, scale_words, BLOCK: tl.constexpr):
    # Read all words and keep one per program. Scales are a sixteenth of the elements.
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale_word = tl.program_id(0) * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
    elements = tl.load(weight_ptr + word, mask=word < words, other=0)
    scales = tl.load(scales_ptr + scale_word, mask=scale_word < scale_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(elements, 0) ^ tl.xor_sum(scales, 0))


def prepare_stream(x, weight, scales, dense):
    """Only read the packed weights and their scales: the floor of `decode`."""
    words, scale_words, block = weight.view(torch.int32), scales.view(torch.int32), 4096
    programs = triton.cdiv(words.numel(), block)
    out = torch.empty(programs, dtype=torch.int32, device=weight.device)

    def launch():
        stream_kernel[(programs,)](
            words, scale_words, out, words.numel(), scale_words.numel(), block, num_warps=4
        )
        return out

    return launch


# ---- experiments


def best_config(shape, mx: bool = False) -> Fp8Config:
    """Return the configuration that "best" stands for on this GPU, for an MXFP8 output with `mx`."""
    return fp8.find_best(*shape, device.current().sms, mx)[0]


def measure(candidates: dict, shape, checks: dict | None = None, **timing) -> list[dict]:
    """Return rows of `candidates` on `fp8_operands(*shape)`, the peer first. Those that `checks` found wrong are not
    timed."""
    checks, (m, n, k) = checks or {}, shape
    right = {
        name: each for name, each in candidates.items() if checks.get(name, {}).get("status", "ok") == "ok"
    }
    found = bench.compare(
        right,
        lambda: fp8_operands(*shape),
        next(iter(candidates)),
        flops=2 * m * n * k,
        nbytes=operand_bytes(*shape),
        **timing,
    )
    rows = []
    for name in candidates:
        row = found[name].row() if name in found else {"name": name}
        rows.append(row | ({} if row.get("reason") else checks.get(name, {})) | {"shape": list(shape)})
    return rows


def clock_under_load(launch, seconds: float = 0.5) -> dict:
    """Return {ghz, watts} of the GPU while `launch` runs repeatedly, as nvidia-smi reads them; {} without it."""
    command = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
        "-i",
        f"GPU-{torch.cuda.get_device_properties().uuid}",
    ]
    query, begun = None, time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        while query is None or not query.done():
            for _ in range(20):
                launch()
            torch.cuda.synchronize()
            if (
                query is None and time.perf_counter() - begun > seconds
            ):  # the power control takes tenths of a second
                query = pool.submit(subprocess.run, command, capture_output=True, text=True, timeout=10)
    try:
        mhz, watts = map(float, query.result().stdout.strip().split(","))
    except (ValueError, OSError, subprocess.TimeoutExpired):
        return {}
    return {"ghz": mhz / 1e3, "watts": watts}


def _verify_with_config(shape, config=None) -> dict:
    return verify_fp8(shape, config or "best") | {"config": str(config or best_config(shape))}


@experiment("ch14_blockscaled_fp8", functools.partial(provenance.source_hash, *FP8_SOURCES))
def measure_shapes():
    """Measure fp8 with block scales beside torch's, and fp8 with one scale per matrix; at LONG also the clock."""
    rows, candidates = (
        [],
        {"torch": prepare_torch, "course": prepare_course(), "one scale": prepare_one_scale},
    )
    build.compile_ahead(fp8_jobs({*map(best_config, SHAPES)}))
    for shape in SHAPES:
        rows += measure(candidates, shape, {"course": _verify_with_config(shape)})
    tensors = fp8_operands(*LONG)
    for row in rows:
        if tuple(row["shape"]) == LONG and row["status"] == "ok":
            row |= clock_under_load(candidates[row["name"]](*tensors))
    return rows


@experiment(
    "ch14_blockscaled_peers",
    functools.partial(provenance.source_hash, *FP8_SOURCES, peers.DeepGemm, peers.align_columns),
)
def measure_peers():
    """Check fp8 with block scales and time it beside DeepGEMM, interleaved, at PEER_SHAPES.

    Rows are those of tilelab.measure.peers.compare.
    """
    deep_gemm, rows = peers.find("deep_gemm"), []
    if not deep_gemm.reason:
        build.compile_ahead(fp8_jobs({*map(best_config, PEER_SHAPES)}))
    for shape in PEER_SHAPES:
        (m, n, k), row = shape, {"shape": list(shape), "config": str(best_config(shape))}
        if deep_gemm.reason:
            rows.append(peers.fail(deep_gemm, deep_gemm.reason) | row)
            continue
        rows += [
            found | row
            for found in peers.compare(
                prepare_course(),
                {deep_gemm: deep_gemm.prepare_fp8},
                functools.partial(fp8_operands, *shape),
                functools.partial(find_fault, fp8_operands(*shape)),
                verify_fp8(shape),
                flops=2 * m * n * k,
                nbytes=operand_bytes(*shape),
                rounds=12,
                warm_s=0.15,
            )
        ]
    return rows


def find_fault(tensors, prepare) -> str:
    """Return what is wrong with the product that a candidate of bench.compare computes, or ""."""
    error = check.relative_error(prepare(*tensors)(), fp8.spec(*tensors[:4]))
    return (
        ""
        if error <= check.TOLERANCE[BF16]
        else f"the error {error:.1e} is above {check.TOLERANCE[BF16]:.1e}"
    )


def unsplit_configs(split: Fp8Config) -> dict[str, Fp8Config]:
    """Return the configurations that a split is compared with: all unsplit ones, including the tile of `split`.

    They start as early as `split` does, so that the split is the only advantage that it may have.
    """
    whole = {
        f"unsplit, {name}": dataclasses.replace(config, pdl=split.pdl)
        for name, config in fp8.configs().items()
    }
    same = dataclasses.replace(split, splits=1)
    return whole if same in whole.values() else whole | {"same tile, unsplit": same}


@experiment("ch14_blockscaled_thin", functools.partial(provenance.source_hash, *FP8_SOURCES))
def measure_thin_products():
    """Measure few rows of A; `share` is of the copy's bandwidth. At SPLIT every `unsplit_configs` is measured too."""
    named = {"course": best_config(SPLIT)} | unsplit_configs(best_config(SPLIT))
    build.compile_ahead(fp8_jobs({*map(best_config, THIN), *named.values()}))
    rows, timing = [], dict(rounds=10, warm_s=0.15)
    for shape in THIN:
        checks = {"course": _verify_with_config(shape)}
        rows += measure({"torch": prepare_torch, "course": prepare_course()}, shape, checks, **timing)
    candidates = {"torch": prepare_torch} | {name: prepare_course(config) for name, config in named.items()}
    rows += measure(
        candidates,
        SPLIT,
        {name: _verify_with_config(SPLIT, config) for name, config in named.items()},
        **timing,
    )
    copy = bench.ceilings().copy_gbps
    return [row | ({"share": row["gbps"] / copy} if "gbps" in row else {}) for row in rows]


@experiment("ch14_blockscaled_emulated", functools.partial(provenance.source_hash, *EMULATED_SOURCES))
def measure_emulated():
    """Measure MX and NVFP4 at CUBE decoded to bf16, beside cuBLAS bf16, the fastest naive dot_scaled, and decoding."""

    def cublas(x, y, a, weight, out):
        return lambda: torch.mm(x, y.T, out=out)

    def decode_and_multiply(x, y, a, weight, out):
        return emulated_path.prepare(a, weight.T, out=out)

    def only_decode(x, y, a, weight, out):
        launches = [mx_formats.prepare_dequantise(matrix) for matrix in (a, weight)]
        return lambda: [launch() for launch in launches]

    def naive(config):
        return lambda x, y, a, weight, out: native.prepare(a, weight.T, out=out, config=config)

    m, n, k = CUBE
    configs = {form: native.configs(form, kernel="naive").values() for form in FORMS}
    build.compile_ahead(native.job(config, "sm_90a", form) for form in FORMS for config in configs[form])
    rows = []
    for form in FORMS:

        def inputs(form=form):
            x, y = (torch.randn(size, k, device="cuda").to(BF16) for size in (m, n))
            return [
                x,
                y,
                *(mx_formats.quantise(each, form) for each in (x, y)),
                torch.empty(m, n, dtype=BF16, device="cuda"),
            ]

        found = bench.compare(
            {"cuBLAS bf16": cublas, "emulated": decode_and_multiply, "decoding": only_decode},
            inputs,
            "cuBLAS bf16",
            flops=2 * m * n * k,
        )
        slow = bench.compare(
            {"cuBLAS bf16": cublas} | {str(config): naive(config) for config in configs[form]},
            inputs,
            "cuBLAS bf16",
            flops=2 * m * n * k,
            rounds=4,
            warm_s=0.1,
        )
        del slow["cuBLAS bf16"]
        fastest = min(slow.values(), key=lambda timing: timing.ms or math.inf)
        about = {"format": form, "shape": list(CUBE)}
        rows += [
            found["cuBLAS bf16"].row() | about,
            found["emulated"].row() | about | verification.verify_emulated((form, form), CUBE),
            {key: value for key, value in found["decoding"].row().items() if key != "tflops"} | about,
            fastest.row() | about | {"name": "naive", "config": fastest.name},
        ]
    return rows


@experiment(
    "ch14_blockscaled_decode", functools.partial(provenance.source_hash, *DECODE_SOURCES, stream_kernel)
)
def measure_decode():
    """Measure MXFP4 weights times M tokens beside cuBLAS with bf16 weights, and a kernel that only reads."""

    def cublas(x, weight, scales, dense):
        out = torch.empty(x.shape[0], n, dtype=BF16, device="cuda")
        return lambda: torch.mm(x, dense[0].T, out=out)

    def decode_weights(x, weight, scales, dense):
        return decode_path.prepare(x, weight, scales)

    n = k = 8192
    configs = {m: decode_path.best_config(m, n, k, device.current()) for m in TOKENS}
    build.compile_ahead(decode_path.job(config, "sm_90a", m) for m, config in configs.items())
    rows = []
    for m, config in configs.items():

        def inputs(m=m):
            x = torch.randn(m, k, device="cuda").to(BF16)
            weight = mx_formats.quantise(torch.randn(n, k, device="cuda").to(BF16), "mxfp4")
            # The rotation through L2 counts what `decode` reads, and not the bf16 weights in the list.
            return [x, weight.values, weight.scales, [mx_formats.dequantise(weight)]]

        found = bench.compare(
            {"cuBLAS bf16": cublas, "decode": decode_weights, "stream": prepare_stream},
            inputs,
            "cuBLAS bf16",
            nbytes=n * k // 2 + n * k // 32,
            rounds=10,
            warm_s=0.15,
        )
        more = {
            "cuBLAS bf16": {"gbps": 2 * n * k / found["cuBLAS bf16"].ms / 1e6},
            "decode": verification.verify_decode(m, n, k) | {"config": str(config)},
        }
        rows += [
            timing.row() | {"tokens": m, "shape": [m, n, k]} | more.get(name, {})
            for name, timing in found.items()
        ]
    return rows


@results.experiment(
    "ch14_blockscaled_sanitizer",
    functools.partial(provenance.source_hash, *FP8_SOURCES, *EMULATED_SOURCES, *DECODE_SOURCES),
    can_run=lambda: device.current().has_wgmma and check.can_sanitize(),
)
def run_sanitizers():
    """Return what each tool of compute-sanitizer finds in `verification.sanitizer_cases`."""
    return check.sanitize("ch14.blockscaled.lesson.verification")
