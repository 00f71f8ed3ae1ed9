"""Measure the fp8 kernel beside its peers, and check it against float64 where it is timed.

`impacts` measures the field note's claims.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import ScalingType, scaled_mm

from ch14 import fp8_gemm
from ch14.fp8_gemm.configs import BLOCK, FLOPS_PER_CLOCK, Fp8Config, operand_bytes
from ch14.fp8_gemm.lesson.verification import BF16, fp8_jobs, fp8_operands, verify_fp8
from tilelab.measure import bench, check, layer_shapes, peers
from tilelab.records import results
from tilelab.runtime import build, device, provenance

SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 7168, 16384))
SHAPES += ((4096, 24576, 1536), (4096, 4096, 7168))

LONG, CUBE, SPLIT = SHAPES[2], SHAPES[1], (128, 4096, 16384)

THIN = tuple((m, n, k) for n, k in ((7168, 2048), (24576, 1536), (7168, 16384)) for m in (16, 64, 128))

# The weights (N, K) of DeepSeek-V3 that run in fp8: arXiv 2412.19437 and DeepGEMM's tests.
DEEPSEEK = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))

PEER_SHAPES = tuple((m, n, k) for n, k in DEEPSEEK for m in (1, 16, 64, 256, 1024, 4096, 8192))

HELD_OUT_TOKENS = (24, 100, 240, 384, 1500)  # of layers that no choice was fitted to

FP8_FLOPS = FLOPS_PER_CLOCK

# The measured code, for `provenance.source_hash`.
FP8_SOURCES = (fp8_gemm, fp8_gemm.SOURCE.with_name("configs.py"), fp8_gemm.SOURCE)

experiment = functools.partial(results.experiment, can_run=lambda: device.current().has_wgmma)


def prepare_course(config="best", **options):
    """Return the fp8 kernel as a candidate on `fp8_operands`."""
    return lambda a, b, scale_a, scale_b, out: fp8_gemm.prepare(
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
    if more := -n % BLOCK:
        b = append_zeros(b.T, more).T

    return lambda: scaled_mm(
        a, b, scale_a, ScalingType.BlockWise1x128, scale_b, ScalingType.BlockWise128x128, output_dtype=BF16
    )[:m, :n]


def prepare_one_scale(a, b, scale_a, scale_b, out):
    """Multiply by cuBLASLt with one scale per matrix and fast accumulation. The distance to it is what block scales
    cost."""
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True)


def best_config(shape, mx: bool = False) -> Fp8Config:
    """Return the configuration that "best" stands for on this GPU, for an MXFP8 output with `mx`."""
    return fp8_gemm.find_best(*shape, device.current().sms, mx)[0]


def measure(candidates: dict, shape, checks: dict | None = None, **timing) -> list[dict]:
    """Return rows of `candidates` on `fp8_operands(*shape)`, the peer first. Those that `checks` found wrong are not
    timed."""
    checks, (m, n, k) = checks or {}, shape
    wrong = {name for name, row in checks.items() if row.get("status", "ok") != "ok"}
    right = {name: each for name, each in candidates.items() if name not in wrong}
    timing |= {"flops": 2 * m * n * k, "nbytes": operand_bytes(*shape)}
    found = bench.compare(right, lambda: fp8_operands(*shape), next(iter(candidates)), **timing)
    rows = []
    for name in candidates:
        row = found[name].row() if name in found else {"name": name}
        rows.append(row | ({} if row.get("reason") else checks.get(name, {})) | {"shape": list(shape)})
    return rows


def clock_under_load(launch, seconds: float = 0.5) -> dict:
    """Return {ghz, watts} of the GPU while `launch` runs repeatedly, as nvidia-smi reads them; {} without it."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    command += ["-i", f"GPU-{torch.cuda.get_device_properties().uuid}"]
    query, begun = None, time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        while query is None or not query.done():
            for _ in range(20):
                launch()
            torch.cuda.synchronize()
            # Ask late: the power control takes tenths of a second.
            if query is None and time.perf_counter() - begun > seconds:
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
    candidates = {"torch": prepare_torch, "course": prepare_course(), "one scale": prepare_one_scale}
    rows = []
    build.compile_ahead(fp8_jobs({*map(best_config, SHAPES)}))
    for shape in SHAPES:
        rows += measure(candidates, shape, {"course": _verify_with_config(shape)})
    tensors = fp8_operands(*LONG)
    for row in rows:
        if tuple(row["shape"]) == LONG and row["status"] == "ok":
            row |= clock_under_load(candidates[row["name"]](*tensors))
    return rows


def compare_with_deep_gemm(shapes) -> list[dict]:
    """Check fp8 with block scales and time it beside DeepGEMM, interleaved; return rows of tilelab.measure.peers."""
    deep_gemm, rows = peers.find("deep_gemm"), []
    if not deep_gemm.reason:
        build.compile_ahead(fp8_jobs({*map(best_config, shapes)}))
    for shape in shapes:
        (m, n, k), row = shape, {"shape": list(shape), "config": str(best_config(shape))}
        if deep_gemm.reason:
            rows.append(peers.fail(deep_gemm, deep_gemm.reason) | row)
            continue
        found = peers.compare(
            prepare_course(),
            {deep_gemm: deep_gemm.prepare_fp8},
            functools.partial(fp8_operands, *shape),
            functools.partial(find_fault, fp8_operands(*shape)),
            verify_fp8(shape),
            **{"flops": 2 * m * n * k, "nbytes": operand_bytes(*shape), "rounds": 12, "warm_s": 0.15},
        )
        rows += [each | row for each in found]
    return rows


@experiment(
    "ch14_blockscaled_peers",
    functools.partial(provenance.source_hash, *FP8_SOURCES, peers.DeepGemm, peers.align_columns),
)
def measure_peers():
    """Measure fp8 with block scales beside DeepGEMM at PEER_SHAPES."""
    return compare_with_deep_gemm(PEER_SHAPES)


@experiment(
    "ch14_blockscaled_held_out",
    functools.partial(
        provenance.source_hash, *FP8_SOURCES, peers.DeepGemm, peers.align_columns, layer_shapes.list_held_out
    ),
)
def measure_held_out():
    """Measure fp8 with block scales beside DeepGEMM at shapes that the choice of "best" was not fitted to."""
    weights = [
        layers[name]
        for layers in layer_shapes.HELD_OUT.values()
        for name in ("q, k, v", "down")
        if name in layers
    ]
    return compare_with_deep_gemm([(m, n, k) for m in HELD_OUT_TOKENS for n, k in weights])


def find_fault(tensors, prepare) -> str:
    """Return what is wrong with the product that a candidate of bench.compare computes, or ""."""
    error = check.relative_error(prepare(*tensors)(), fp8_gemm.spec(*tensors[:4]))
    limit = check.TOLERANCE[BF16]
    return "" if error <= limit else f"the error {error:.1e} is above {limit:.1e}"


def unsplit_configs(split: Fp8Config) -> dict[str, Fp8Config]:
    """Return the configurations that a split is compared with: all unsplit ones, including the tile of `split`.

    They start as early as `split` does, so that the split is the only advantage that it may have.
    """
    known = fp8_gemm.configs()
    whole = {f"unsplit, {name}": dataclasses.replace(known[name], pdl=split.pdl) for name in known}
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
    checks = {name: _verify_with_config(SPLIT, config) for name, config in named.items()}
    rows += measure(candidates, SPLIT, checks, **timing)
    copy = bench.ceilings().copy_gbps
    return [row | ({"share": row["gbps"] / copy} if "gbps" in row else {}) for row in rows]
