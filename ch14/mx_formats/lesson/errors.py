"""The accuracy that block-scaled formats cost: errors of matrices and of a product, on a GPU if there is one.

A matrix with one scale stands beside the matrices with one scale per block, so that the gain from blocks shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch

from ch14.mx_formats import number_formats
from ch14.mx_formats.number_formats import E2M1, E4M3, FORMATS, BlockFormat
from tilelab.runtime import device

LARGE_CHANNELS = 4  # this many columns of the realistic data are much larger than the others
WHOLE = (1 << 20, 1 << 20)  # a block that is larger than any matrix here


def _gaussian(rows, columns, random):
    return torch.randn(rows, columns, generator=random)


def _outliers(rows, columns, random):
    """Return Student's t with three degrees of freedom: its tails make single elements tens of times the others."""
    squares = sum(torch.randn(rows, columns, generator=random) ** 2 for _ in range(3))
    return _gaussian(rows, columns, random) / (squares / 3).sqrt()


def _enlarge_channels(x, factor, random):
    """Multiply some columns by `factor`, as in trained transformers."""
    x[:, torch.randperm(x.shape[1], generator=random)[:LARGE_CHANNELS]] *= factor
    return x


def _weights(rows, columns, random):
    """Return a linear layer as torch initialises it, with a few large input channels."""
    return _enlarge_channels((2 * torch.rand(rows, columns, generator=random) - 1) / columns**0.5, 10, random)


def _activations(rows, columns, random):
    """Return SiLU(gate) * up of a gated layer, with a few large channels."""
    gate, up = (
        torch.randn(rows, 64, generator=random) @ torch.randn(64, columns, generator=random) / 8
        for _ in range(2)
    )
    return _enlarge_channels(torch.nn.functional.silu(gate) * up, 30, random)


DATA = {"gaussian": _gaussian, "outliers": _outliers, "weights": _weights, "activations": _activations}


def make_data(name: str, rows: int = 256, columns: int = 1024, seed: int = 0) -> torch.Tensor:
    """Return a bfloat16 matrix of one of the kinds in DATA, the same with and without a GPU."""
    if name not in DATA:
        raise ValueError(f"unknown data {name!r:.40}; choose one of {', '.join(DATA)}.")
    return DATA[name](rows, columns, torch.Generator().manual_seed(seed)).bfloat16()


def list_methods() -> dict[str, tuple[BlockFormat, str]]:
    """Return formats with the rule of their scale, by a name for a table: one scale per matrix, then per block."""
    whole = {
        f"{element.name}, one scale": (BlockFormat("one scale", element, WHOLE, "fp32", ""), "floor")
        for element in (E4M3, E2M1)
    }
    blocks = {name: (format, "floor") for name, format in FORMATS.items()}
    ceil = {f"{name}, ceil": (FORMATS[name], "ceil") for name in ("mxfp8_e4m3", "mxfp4", "fp4_e8m0_16")}
    return whole | blocks | ceil


def _move(x: torch.Tensor) -> torch.Tensor:
    """Return x on the GPU, if there is one: it rounds as the CPU does, and is much faster."""
    return x.cuda() if device.current().capability else x


def round_trip(x: torch.Tensor, format: BlockFormat, rule: str = "floor") -> torch.Tensor:
    """Return x as it comes back from the format, float64."""
    if format.block == WHOLE:
        format = dataclasses.replace(format, block=tuple(x.shape))
    return number_formats.dequantise(number_formats.quantise(_move(x), format, rule)).double().to(x.device)


def matrix_errors(rows: int = 256, columns: int = 1024, methods: Collection[str] = ()) -> list[dict]:
    """Return one row for each of `methods` (default: all of `list_methods`).

    A row has the bits per element, and for each kind of data the RMS error over the RMS ("gaussian") and the largest
    error over the RMS ("worst gaussian").
    """
    table = []
    data = {name: make_data(name, rows, columns) for name in DATA}
    for method, (format, rule) in list_methods().items():
        if methods and method not in methods:
            continue
        row = {"format": method, "bits": format.element.bits if format.block == WHOLE else format.bits}
        for name, x in data.items():
            error, rms = round_trip(x, format, rule) - x.double(), x.double().square().mean().sqrt()
            row |= {
                name: float(error.square().mean().sqrt() / rms),
                f"worst {name}": float(error.abs().max() / rms),
            }
        table.append(row)
    return table


def product_errors(
    rows: int = 128, columns: int = 256, inner: int = 1024, methods: Collection[str] = ()
) -> list[dict]:
    """Return one row for each of `methods` (default: all).

    A row has the RMS error over the RMS of x @ weight.T with both operands rounded, in float64.
    """
    weight, table = make_data("weights", columns, inner, seed=1), []
    for method, (format, rule) in list_methods().items():
        if format.name == "fp8_128x128" or methods and method not in methods:
            continue
        weight_format = FORMATS["fp8_128x128"] if format.name == "fp8_1x128" else format
        row = {"format": method}
        for name in ("gaussian", "activations"):
            x = make_data(name, rows, inner)
            exact = x.double() @ weight.double().T
            product = round_trip(x, format, rule) @ round_trip(weight, weight_format, rule).T
            row[name] = float((product - exact).norm() / exact.norm())
        table.append(row)
    return table


def measure_saturation(format: BlockFormat, data: str = "gaussian") -> dict:
    """Return the share of blocks whose largest element loses more under rule floor than rounding would take (`cut`),
    and the largest relative error that saturation makes (`by`)."""
    x = _move(make_data(data))
    quantised = number_formats.quantise(x, format)
    block_amax = x.float().unflatten(1, (-1, format.block[1])).abs().amax(-1)
    scaled_amax = block_amax / number_formats.scale_values(quantised)
    step = format.element.max - float(number_formats.magnitudes(format.element)[-2])
    cut = scaled_amax > format.element.max + step / 2  # by more than rounding alone
    return {
        "format": format.name,
        "data": data,
        "cut": float(cut.double().mean()),
        "by": float((1 - format.element.max / scaled_amax).max()),
    }
