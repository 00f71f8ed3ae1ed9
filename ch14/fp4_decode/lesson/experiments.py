"""Measure the decode kernels beside cuBLAS with bf16 weights, and beside a kernel that only reads."""

from __future__ import annotations

import functools
import pathlib

import torch
import triton
import triton.language as tl

from ch14 import fp4_decode, mx_formats
from ch14.fp4_decode import kernels
from ch14.fp4_decode.lesson.verification import TOKENS, verify_decode
from tilelab.measure import bench, layer_shapes
from tilelab.records import results
from tilelab.runtime import build, device, provenance

DECODE_SOURCES = (
    fp4_decode,
    pathlib.Path(fp4_decode.__file__).with_name("configs.py"),
    kernels,
    fp4_decode.SOURCE,
)


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


def compare(shape: tuple[int, int, int], configs: dict[str, fp4_decode.DecodeConfig]) -> list[dict]:
    """Time configurations at a shape (m, n, k) beside cuBLAS and beside `prepare_stream`; return a row for each."""
    m, n, k = shape

    def cublas(x, weight, scales, dense):
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.mm(x, dense[0].T, out=out)

    def course(config):
        return lambda x, weight, scales, dense: fp4_decode.prepare(x, weight, scales, config=config)

    def inputs():
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        weight = mx_formats.quantise(torch.randn(n, k, device="cuda").to(torch.bfloat16), "mxfp4")
        # The rotation through L2 counts what `decode` reads, and not the bf16 weights in the list.
        return [x, weight.values, weight.scales, [mx_formats.dequantise(weight)]]

    found = bench.compare(
        {"cuBLAS bf16": cublas}
        | {name: course(config) for name, config in configs.items()}
        | {"stream": prepare_stream},
        inputs,
        "cuBLAS bf16",
        nbytes=n * k // 2 + n * k // 32,
        rounds=10,
        warm_s=0.15,
    )
    rows = [timing.row() | {"tokens": m, "shape": [m, n, k]} for timing in found.values()]
    rows[0]["gbps"] = 2 * n * k / found["cuBLAS bf16"].ms / 1e6
    return rows


@results.experiment(
    "ch14_blockscaled_decode",
    functools.partial(provenance.source_hash, *DECODE_SOURCES, stream_kernel),
    can_run=lambda: device.current().has_wgmma,
)
def measure_decode():
    """Measure MXFP4 weights times M tokens beside cuBLAS with bf16 weights, and a kernel that only reads."""
    n = k = 8192
    configs = {m: fp4_decode.best_config(m, n, k, device.current()) for m in TOKENS}
    build.compile_ahead(fp4_decode.job(config, "sm_90a", m) for m, config in configs.items())
    rows = []
    for m, config in configs.items():
        checked = verify_decode(m, n, k) | {"config": str(config)}
        found = compare((m, n, k), {"decode": config})
        rows += [row | (checked if row["name"] == "decode" else {}) for row in found]
    return rows


@results.experiment(
    "ch14_blockscaled_decode_held_out",
    functools.partial(provenance.source_hash, *DECODE_SOURCES, layer_shapes.list_held_out),
    can_run=lambda: device.current().has_wgmma,
)
def measure_held_out():
    """Measure MXFP4 weights beside cuBLAS with bf16 weights, for layers that no choice was fitted to.

    Where `prepare` takes the path in bf16, both are cuBLAS.
    """
    rows = []
    for layers in layer_shapes.HELD_OUT.values():
        for n, k in layers.values():
            configs = {m: fp4_decode.best_config(m, n, k, device.current()) for m in (1, 8, 16, 32, 64)}
            build.compile_ahead(fp4_decode.job(config, "sm_90a", m) for m, config in configs.items())
            for m, config in configs.items():
                bf16 = fp4_decode.is_bf16_faster(m, n, k, device.current())
                checked = verify_decode(m, n, k) | {"config": "bf16" if bf16 else str(config)}
                found = compare((m, n, k), {"decode": "best"})
                rows += [row | checked for row in found if row["name"] == "decode"]
    return rows
