"""The measurements behind `ch14_blockscaled`: every path beside its peer, checked against float64 where it is timed.

What the field note's claims come to is in `ch14.blockscaled.impacts`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import subprocess
import time

import torch
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm

from ch10 import wgmma_gemm
from ch14 import gemm, mx_formats
from ch14.blockscaled import (
    decode as blockscaled_decode,
)
from ch14.blockscaled import (
    decode_kernels,
    fp8,
    native,
    native_kernels,
)
from ch14.blockscaled import (
    emulated as blockscaled_emulated,
)
from ch14.blockscaled.checks import BF16, FORMS, TOKENS, fp8_jobs, scaled, verify, verify_decode, verify_emulated
from ch14.blockscaled.fp8 import Fp8Config
from ch14.mx_formats import dequantise_kernels
from tilelab import bench, build, check, device, results

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 16384), (4096, 24576, 1536), (4096, 4096, 7168))
LONG, CUBE, SPLIT = SHAPES[2], SHAPES[1], (128, 4096, 16384)
THIN = tuple((m, n, k) for n, k in ((7168, 2048), (24576, 1536), (7168, 16384)) for m in (16, 64, 128))
FP8_FLOPS = 8192  # that an SM of Hopper does a clock: twice those of bf16


def course(config="best", **options):
    """A candidate for `bench.compare` on what `scaled` makes."""
    return lambda a, b, scale_a, scale_b, out: fp8.prepare(a, b, scale_a, scale_b, out=out, config=config,
                                                                       **options)


def torch_blocks(a, b, scale_a, scale_b, out):
    """torch's product with the same scales, cuBLASLt's. (K / 128 must be a multiple of 4, or B's scales be padded.)"""
    return lambda: scaled_mm(a, b.T, scale_a, ScalingType.BlockWise1x128, scale_b.T, ScalingType.BlockWise128x128,
                             output_dtype=BF16)


def one_scale(a, b, scale_a, scale_b, out):
    """cuBLASLt's fp8 product with one scale a matrix and fast accumulation: what block scales cost is the distance."""
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)


# What the experiments measure, for `results.source_hash`.
OF_FP8 = (fp8, fp8.SOURCE)
OF_EMULATED = (blockscaled_emulated, native, native_kernels, mx_formats, dequantise_kernels,
               wgmma_gemm, wgmma_gemm.SOURCE, gemm)
OF_DECODE = (blockscaled_decode, decode_kernels)


def hash_of(*things):
    """A function that returns the source hash of `things`."""
    return lambda: results.source_hash(*things)


def has_wgmma() -> bool:
    return device.current().has_wgmma


experiment = functools.partial(results.experiment, can_run=has_wgmma)


def best(shape) -> Fp8Config:
    """What `config="best"` stands for here."""
    return fp8.best(*shape, device.current().sms)


def operand_bytes(m: int, n: int, k: int) -> int:
    """Bytes that a product reads and writes once: fp8 operands, their scales, C in bf16."""
    return (m + n) * k + 4 * (m * k // 128 + n * k // 128**2) + 2 * m * n


def timed(candidates: dict, shape, checks: dict | None = None, **timing) -> list[dict]:
    """Rows of `candidates` on what `scaled` makes of `shape`, those that `checks` finds right, the peer first."""
    checks, (m, n, k) = checks or {}, shape
    right = {name: each for name, each in candidates.items() if checks.get(name, {}).get("status", "ok") == "ok"}
    found = bench.compare(right, lambda: scaled(*shape), next(iter(candidates)), flops=2 * m * n * k,
                          nbytes=operand_bytes(*shape), **timing)
    rows = []
    for name in candidates:
        row = found[name].row() if name in found else {"name": name}
        rows.append(row | ({} if row.get("reason") else checks.get(name, {})) | {"shape": list(shape)})
    return rows


def under_load(launch, seconds: float = 0.5) -> dict:
    """{ghz, watts}: clock of the SMs and power of the GPU while it runs over and over, as nvidia-smi says; empty where
    it says nothing."""
    if not shutil.which("nvidia-smi"):
        return {}
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits",
               "-i", f"GPU-{torch.cuda.get_device_properties().uuid}"]
    asked, begun = None, time.perf_counter()
    while asked is None or asked.poll() is None:
        for _ in range(20):
            launch()
        torch.cuda.synchronize()
        passed = time.perf_counter() - begun
        if asked is None and passed > seconds:  # the power control takes tenths of a second
            asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        elif asked is not None and passed > seconds + 10:
            asked.kill()
            break
    try:
        mhz, watts = map(float, asked.communicate()[0].strip().split(","))
    except ValueError:
        return {}
    return {"ghz": mhz / 1e3, "watts": watts}


@experiment("ch14_blockscaled_fp8", hash_of(*OF_FP8))
def shapes():
    """fp8 with block scales beside torch's and beside fp8 with one scale a matrix; at LONG the clock under each."""
    rows, candidates = [], {"torch": torch_blocks, "course": course(), "one scale": one_scale}
    build.compile_ahead(fp8_jobs({*map(best, SHAPES)}))
    for shape in SHAPES:
        rows += timed(candidates, shape, {"course": verify(shape) | {"config": str(best(shape))}})
    made = scaled(*LONG)
    for row in rows:
        if tuple(row["shape"]) == LONG and row["status"] == "ok":
            row |= under_load(candidates[row["name"]](*made))
    return rows


def unsplit(split: Fp8Config) -> dict[str, Fp8Config]:
    """By name what a split is held against: every configuration whole, the tile of `split` among them."""
    whole = {f"unsplit, {name}": config for name, config in fp8.configs().items()}
    same = dataclasses.replace(split, splits=1)
    return whole if same in whole.values() else whole | {"same tile, unsplit": same}


@experiment("ch14_blockscaled_thin", hash_of(*OF_FP8))
def thin():
    """The same with few rows of A, `share` of the copy's bandwidth; and at SPLIT every `unsplit` tile."""
    whole = unsplit(best(SPLIT))
    build.compile_ahead(fp8_jobs({*map(best, (*THIN, SPLIT)), *whole.values()}))
    rows = []
    for shape in THIN:
        rows += timed({"torch": torch_blocks, "course": course()}, shape,
                      {"course": verify(shape) | {"config": str(best(shape))}}, rounds=10, warm_s=0.15)
    named = {"course": best(SPLIT)} | whole
    rows += timed({"torch": torch_blocks} | {name: course(config) for name, config in named.items()}, SPLIT,
                  {name: verify(SPLIT, config) | {"config": str(config)} for name, config in named.items()},
                  rounds=10, warm_s=0.15)
    copy = bench.ceilings().copy_gbps
    return [row | ({"share": row["gbps"] / copy} if "gbps" in row else {}) for row in rows]


def naive(config):
    """A candidate: dot_scaled from pointers, by a configuration of `blockscaled_native`."""
    return lambda x, y, a, b, out: native.prepare(a, b, out=out, config=config, scales="pointers")


def decoding(x, y, a, b, out):
    """A candidate: only what the emulated path does before it multiplies."""
    both = [mx_formats.prepare_dequantise(of, torch.empty(of.shape, dtype=BF16, device=x.device)) for of in (a, b)]
    return lambda: [launch() for launch in both]


@experiment("ch14_blockscaled_emulated", hash_of(*OF_EMULATED))
def emulated():
    """MX and NVFP4 at CUBE by way of bf16, beside cuBLAS bf16 and the fastest naive dot_scaled; the decoding apart."""
    m, n, k = CUBE
    every = {form: native.configs(form, scales="pointers") for form in FORMS}
    build.compile_ahead(native.job(form, config, "sm_90a") for form in FORMS for config in every[form])
    rows = []
    for form in FORMS:
        def inputs(form=form):
            x, y = (torch.randn(size, k, device="cuda").to(BF16) for size in (m, n))
            return [x, y, *(mx_formats.quantise(each, form) for each in (x, y)), torch.empty(m, n, dtype=BF16,
                                                                                             device="cuda")]

        def cublas(x, y, a, b, out):
            return lambda: torch.mm(x, y.T, out=out)

        def way(x, y, a, b, out):
            return blockscaled_emulated.prepare(a, b, out=out)

        tried = {f"naive {config}": naive(config) for config in every[form]}
        found = bench.compare({"cuBLAS bf16": cublas, "emulated": way, "decoding": decoding}, inputs, "cuBLAS bf16",
                              flops=2 * m * n * k)
        slow = bench.compare({"cuBLAS bf16": cublas} | tried, inputs, "cuBLAS bf16", flops=2 * m * n * k, rounds=4,
                             warm_s=0.1)
        top = min((slow[name] for name in tried), key=lambda timing: timing.ms or math.inf)
        about = {"format": form, "shape": list(CUBE)}
        rows += [found["cuBLAS bf16"].row() | about,
                 found["emulated"].row() | about | verify_emulated((form, form), CUBE),
                 {key: value for key, value in found["decoding"].row().items() if key != "tflops"} | about,
                 top.row() | about | {"name": "naive", "config": top.name.removeprefix("naive ")}]
    return rows


@triton.jit
def stream_kernel(packed_ptr, scales_ptr, out_ptr, words, scale_words, BLOCK: tl.constexpr):
    # Reads all, and keeps a word a program: scales are a sixteenth of what the elements are.
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    scale_at = tl.program_id(0) * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
    seen = tl.load(packed_ptr + at, mask=at < words, other=0)
    scales = tl.load(scales_ptr + scale_at, mask=scale_at < scale_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.xor_sum(seen, 0) ^ tl.xor_sum(scales, 0))


def stream(x, packed, scales, dense):
    """A candidate: reads the packed weights and their scales, and does nothing with them."""
    words, of_scales, block = packed.view(torch.int32), scales.view(torch.int32), 4096
    programs = triton.cdiv(words.numel(), block)
    out = torch.empty(programs, dtype=torch.int32, device=packed.device)

    def launch():
        stream_kernel[(programs,)](words, of_scales, out, words.numel(), of_scales.numel(), block, num_warps=4)
        return out

    return launch


@experiment("ch14_blockscaled_decode", hash_of(*OF_DECODE, stream_kernel))
def decode():
    """MXFP4 weights times M tokens beside cuBLAS on the same weights in bf16, and a kernel that only reads them."""
    n = k = 8192
    build.compile_ahead(blockscaled_decode.job(blockscaled_decode.best(m, n, k, device.current()), "sm_90a", m) for m in TOKENS)
    rows = []
    for m in TOKENS:
        def inputs(m=m):
            x, of = torch.randn(m, k, device="cuda").to(BF16), mx_formats.quantise(
                torch.randn(n, k, device="cuda").to(BF16), "mxfp4")
            # bf16 weights in a list: the rotation then counts what `decode` reads, and L2 does not hold it.
            return [x, of.values, of.scales, [mx_formats.dequantise(of)]]

        def cublas(x, packed, scales, dense):
            out = torch.empty(x.shape[0], n, dtype=BF16, device="cuda")
            return lambda: torch.mm(x, dense[0].T, out=out)

        found = bench.compare({"cuBLAS bf16": cublas, "decode": lambda x, packed, scales, _: blockscaled_decode.prepare(
            x, packed, scales), "stream": stream}, inputs, "cuBLAS bf16", nbytes=n * k // 2 + n * k // 32, rounds=10,
            warm_s=0.15)
        for name, timing in found.items():
            row = timing.row() | {"tokens": m, "shape": [m, n, k]}
            if name == "cuBLAS bf16":
                row["gbps"] = 2 * n * k / timing.ms / 1e6
            if name == "decode":
                row |= verify_decode(m, n, k) | {"config": str(blockscaled_decode.best(m, n, k, device.current()))}
            rows.append(row)
    return rows


@results.experiment("ch14_blockscaled_sanitizer", hash_of(*OF_FP8, *OF_EMULATED, *OF_DECODE),
                    can_run=lambda: has_wgmma() and check.can_sanitize())
def sanitized():
    """What compute-sanitizer finds in `sanitizer_cases` of `ch14.blockscaled.checks`, tool by tool."""
    return check.sanitize("ch14.blockscaled.checks")
