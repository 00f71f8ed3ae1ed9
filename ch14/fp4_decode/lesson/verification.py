"""Check the decode kernels against float64, in poisoned memory; without a GPU in Triton's interpreter."""

from __future__ import annotations

import math

import torch

from ch14 import fp4_decode
from ch14.fp8_gemm.lesson.verification import BF16, judge
from ch14.mx_formats import Packed, number_formats, packing
from tilelab.measure import check
from tilelab.runtime import device

TOKENS = (1, 2, 4, 8, 16, 32, 64)


def make_packed(form: str, rows: int, columns: int, where="cuda", tiled: bool = False) -> Packed:
    """Return a random matrix in a block format. Its blocks differ in size, so that a scale out of place is seen."""
    sizes = torch.exp2(torch.randint(-3, 4, (rows, math.ceil(columns / 16)), device=where).float())
    x = torch.randn(rows, columns, device=where) * sizes.repeat_interleave(16, 1)[:, :columns]
    made = number_formats.quantise(x, number_formats.lookup(form))
    pair = None if made.tensor_scale is None else torch.cat([made.tensor_scale, 1 / made.tensor_scale])
    values = packing.pack(made.codes, made.format.element.bits).contiguous()
    scales = packing.tile_scales(made.scales) if tiled else made.scales
    return Packed(made.format, (rows, columns), values, scales, pair, tiled)


def places(reference_on: str) -> tuple[str, str]:
    """Return where kernels run and where references are computed: without a GPU both on the CPU."""
    return ("cuda", reference_on) if device.current().has_tma else ("cpu", "cpu")


def verify_decode(m: int, n: int, k: int, config="best", reference_on: str = "cuda") -> dict:
    """Check the decode path against float64."""
    where, reference_on = places(reference_on)
    weight = make_packed("mxfp4", n, k, reference_on)
    tensors = torch.randn(m, k, device=reference_on).to(BF16), weight.values, weight.scales
    out, touched = check.make_poisoned((m, n), BF16, where)
    fp4_decode.decode(*(each.to(where) for each in tensors), out=out, config=config)
    return judge(out, fp4_decode.spec(*tensors), touched)
