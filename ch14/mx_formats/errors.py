"""What block-scaled formats cost in accuracy: errors of matrices and of a product, computed on the CPU.

A matrix scaled as a whole stands beside the blocks, so that what the blocks buy is seen.
"""

from __future__ import annotations

import torch

from ch14.mx_formats import number_formats
from ch14.mx_formats.number_formats import E2M1, E4M3, FORMATS, BlockFormat

LARGE = 4  # channels of the real-looking data that stand out
WHOLE = (1 << 20, 1 << 20)  # a block larger than any matrix here: one scale for all


def _gaussian(rows, columns, random):
    return torch.randn(rows, columns, generator=random)


def _outliers(rows, columns, random):
    """Student's t with three degrees of freedom: its tails make single elements tens of times the rest."""
    squares = sum(torch.randn(rows, columns, generator=random)**2 for _ in range(3))
    return _gaussian(rows, columns, random) / (squares / 3).sqrt()


def _channels(x, factor, random):
    """Some columns are `factor` times the rest, as in trained transformers."""
    x[:, torch.randperm(x.shape[1], generator=random)[:LARGE]] *= factor
    return x


def _weights(rows, columns, random):
    """A linear layer as torch initialises it, with a few large input channels."""
    return _channels((2 * torch.rand(rows, columns, generator=random) - 1) / columns**0.5, 10, random)


def _activations(rows, columns, random):
    """SiLU(gate) * up of a gated layer, with a few large channels."""
    gate, up = (torch.randn(rows, 64, generator=random) @ torch.randn(64, columns, generator=random) / 8
                for _ in range(2))
    return _channels(torch.nn.functional.silu(gate) * up, 30, random)


DATA = {"gaussian": _gaussian, "outliers": _outliers, "weights": _weights, "activations": _activations}


def make(name: str, rows: int = 256, columns: int = 1024, seed: int = 0) -> torch.Tensor:
    """A bfloat16 matrix of one of DATA; ValueError names them."""
    if name not in DATA:
        raise ValueError(f"the data are {', '.join(DATA)}; here it is {name!r:.40}.")
    return DATA[name](rows, columns, torch.Generator().manual_seed(seed)).bfloat16()


def methods() -> dict[str, tuple[BlockFormat, str]]:
    """Formats with the rule of their scale, by a name for a table: a scale for the whole matrix, then the blocks."""
    whole = {f"{element.name}, one scale": (BlockFormat(f"{element.name}, one scale", element, WHOLE, "fp32", ""),
                                            "floor") for element in (E4M3, E2M1)}
    every = {name: (form, "floor") for name, form in FORMATS.items()}
    ceil = {f"{name}, ceil": (FORMATS[name], "ceil") for name in ("mxfp8_e4m3", "mxfp4", "fp4_e8m0_16")}
    return whole | every | ceil


def rounded(x: torch.Tensor, form: BlockFormat, rule: str = "floor") -> torch.Tensor:
    """What is left of x after the format, float64."""
    if form.block == WHOLE:
        form = BlockFormat(form.name, form.element, tuple(x.shape), form.scale, form.source)
    return number_formats.dequantise(number_formats.quantise(x, form, rule)).double()


def matrix_errors(rows: int = 256, columns: int = 1024) -> list[dict]:
    """A row a method: bits an element, and for each of DATA the RMS error over the RMS (`gaussian` and so on), and the
    worst error over the RMS (`worst gaussian` ...)."""
    table = []
    data = {name: make(name, rows, columns) for name in DATA}
    for method, (form, rule) in methods().items():
        row = {"format": method, "bits": form.element.bits if form.block == WHOLE else form.bits}
        for name, x in data.items():
            error, size = rounded(x, form, rule) - x.double(), x.double().square().mean().sqrt()
            row |= {name: float(error.square().mean().sqrt() / size), f"worst {name}": float(error.abs().max() / size)}
        table.append(row)
    return table


def partner(form: BlockFormat) -> BlockFormat:
    """What the weights of a product are in when the activations are in `form`."""
    return FORMATS["fp8_128x128"] if form.name == "fp8_1x128" else form


def product_errors(rows: int = 128, columns: int = 256, inner: int = 1024) -> list[dict]:
    """A row a method: RMS error of x @ weight.T over its RMS, both operands rounded, the product itself in float64."""
    weight, table = make("weights", columns, inner, seed=1), []
    for method, (form, rule) in methods().items():
        if form.name == "fp8_128x128":
            continue
        row = {"format": method}
        for name in ("gaussian", "activations"):
            x = make(name, rows, inner)
            exact = x.double() @ weight.double().T
            found = rounded(x, form, rule) @ rounded(weight, partner(form), rule).T
            row[name] = float((found - exact).norm() / exact.norm())
        table.append(row)
    return table


def saturated(form: BlockFormat, data: str = "gaussian") -> dict:
    """Of blocks under the rule floor: the share whose largest element is cut, and by how much at most (relative)."""
    x = make(data)
    of = number_formats.quantise(x, form)
    blocks = x.float().unflatten(1, (-1, form.block[1])).abs().amax(-1)
    top = blocks / number_formats.scale_values(of)  # the largest element, as the format's number is to represent it
    step = form.element.max - float(number_formats._magnitudes(form.element)[-2])
    cut = top > form.element.max + step / 2  # beyond what rounding alone would do
    return {"format": form.name, "data": data, "cut": float(cut.double().mean()),
            "by": float((1 - form.element.max / top).max())}
