"""Check the fp8 kernel against float64, in poisoned memory and on ragged shapes."""

from __future__ import annotations

import math

import torch

from ch14 import fp8_gemm, mx_formats
from ch14.fp8_gemm.configs import Fp8Config, best_config
from ch14.mx_formats import number_formats
from tilelab.measure import check
from tilelab.runtime import build

BF16 = torch.bfloat16

EPILOGUES = (
    dict(bias=True),
    dict(bias=True, activation="silu"),
    dict(bias=True, activation="silu", packed=True),
    dict(activation="gelu", packed=True),
)

SPLIT_CONFIG = best_config(64, 128, 128 * 96, 3, mx=True)  # three CTAs share the K steps of a tile

EPILOGUE_CONFIG = Fp8Config(num_stages=4, epilogue_warps=2)


def fp8_operands(m: int, n: int, k: int, where="cuda") -> list[torch.Tensor]:
    """Return random a (M, K) and b (K, N) in fp8, their scales, and room for C, as `fp8_gemm.prepare` takes them.

    The scales of A lie column by column, each column at a multiple of 16 bytes.
    """
    a, weight = (
        number_formats.quantise(torch.randn(rows, k, device=where), number_formats.lookup(form))
        for rows, form in ((m, "fp8_1x128"), (n, "fp8_128x128"))
    )
    scale_a = torch.empty(k // 128, math.ceil(m / 4) * 4, device=where)[:, :m].copy_(a.scales.T).T
    a_codes, b_codes = a.codes.view(torch.float8_e4m3fn), weight.codes.view(torch.float8_e4m3fn).T
    return [a_codes, b_codes, scale_a, weight.scales.T, torch.empty(m, n, dtype=BF16, device=where)]


def judge(out, reference, touched, tolerance: float = check.TOLERANCE[BF16], also: str = "") -> dict:
    """Return {status, reason, error, tolerance} of a result in poisoned memory. `also` is a fault found otherwise."""
    error = check.relative_error(out, reference.to(out.device))
    reason = (
        touched() or also or ("" if error <= tolerance else f"the error {error:.1e} is above {tolerance:.1e}")
    )
    return {"status": "wrong" if reason else "ok", "reason": reason, "tolerance": tolerance} | (
        {"error": error} if math.isfinite(error) else {}
    )


def verify_fp8(
    shape,
    config="best",
    bias: bool = False,
    activation: str | None = None,
    packed: bool = False,
    reference_on: str = "cuda",
) -> dict:
    """Check three launches of the fp8 kernel against float64 and each other. A `packed` output must be bit for bit what
    `mx_formats.quantise` makes of the bf16 result."""
    tensors = fp8_operands(*shape, where=reference_on)[:4]
    vector = torch.randn(shape[1], device=reference_on).to(BF16) if bias else None
    reference = fp8_gemm.spec(*tensors, vector, activation)
    tensors = [each.cuda() for each in tensors]  # keeps strides
    options = dict(bias=None if vector is None else vector.cuda(), activation=activation, config=config)
    out, touched = check.make_poisoned(shape[:2], BF16, "cuda")
    launch = fp8_gemm.prepare(*tensors, out=out, **options)
    first = launch().clone()
    for _ in range(2):
        launch()
    also = "" if torch.equal(first, out) else "another launch gives other bits"
    if packed:
        room = mx_formats.empty(shape[:2], "mxfp8_e4m3", "cuda")
        room.values.fill_(0x7F), room.scales.fill_(0x7F)
        fp8_gemm.fp8(*tensors, out=room, **options)
        expected = mx_formats.quantise(out, "mxfp8_e4m3")
        if not (torch.equal(room.values, expected.values) and torch.equal(room.scales, expected.scales)):
            also = also or "the epilogue quantises to other bits than mx_formats.quantise"
    return judge(out, reference, touched, also=also)


def fp8_jobs(configs, options: dict | None = None) -> list[build.Job]:
    """Return the compilations that `verify_fp8` needs for each configuration, with an epilogue of EPILOGUES or none."""
    options = options or {}
    return [
        fp8_gemm.job(config, "sm_90a", options.get("bias", False), options.get("activation"), mx)
        for config in configs
        for mx in sorted({False, options.get("packed", False)})
    ]


def epilogue_words(options: dict) -> str:
    return " + ".join(key if value is True else str(value) for key, value in options.items())
