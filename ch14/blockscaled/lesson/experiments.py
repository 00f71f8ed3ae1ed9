"""Measure the emulated path of `ch14.blockscaled` beside its peers, and run the sanitizer over every path."""

from __future__ import annotations

import functools
import math

import torch

from ch10 import wgmma_gemm
from ch14 import mx_formats
from ch14.blockscaled import emulated, native, native_kernels
from ch14.blockscaled.lesson import verification
from ch14.blockscaled.lesson.verification import BF16, FORMS
from ch14.fp4_decode.lesson.experiments import DECODE_SOURCES
from ch14.fp8_gemm.lesson.experiments import CUBE, FP8_SOURCES, experiment
from ch14.gemm import kernels as gemm_kernels
from ch14.mx_formats import kernels as mx_kernels
from tilelab.measure import bench, check
from tilelab.records import results
from tilelab.runtime import build, device, provenance

EMULATED_SOURCES = (emulated, native, native_kernels, mx_formats, mx_kernels)
EMULATED_SOURCES += (wgmma_gemm, wgmma_gemm.SOURCE, gemm_kernels)


@experiment("ch14_blockscaled_emulated", functools.partial(provenance.source_hash, *EMULATED_SOURCES))
def measure_emulated():
    """Measure MX and NVFP4 at CUBE decoded to bf16, beside cuBLAS bf16, the fastest naive dot_scaled, and decoding."""

    def cublas(x, y, a, weight, out):
        return lambda: torch.mm(x, y.T, out=out)

    def decode_and_multiply(x, y, a, weight, out):
        return emulated.prepare(a, weight.T, out=out)

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
        every = {"cuBLAS bf16": cublas} | {str(config): naive(config) for config in configs[form]}
        timing = {"flops": 2 * m * n * k, "rounds": 4, "warm_s": 0.1}
        slow = bench.compare(every, inputs, "cuBLAS bf16", **timing)
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


@results.experiment(
    "ch14_blockscaled_sanitizer",
    functools.partial(provenance.source_hash, *FP8_SOURCES, *EMULATED_SOURCES, *DECODE_SOURCES),
    can_run=lambda: device.current().has_wgmma and check.can_sanitize(),
)
def run_sanitizers():
    """Return what each tool of compute-sanitizer finds in `verification.sanitizer_cases`."""
    return check.sanitize("ch14.blockscaled.lesson.verification")
