"""Views to explore formats: one code bit by bit, a block of numbers under its scale, and the layout of scales.

    explorer.number_line("e2m1", 2.9)  # at the end of a notebook cell

The views `tilelab/views/formats.js` and `microscope.js` compute in the browser what `number_formats` and `packing`
compute here; a test compares the two. They need no GPU.
"""

from __future__ import annotations

import torch

from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.lesson import errors, figures
from ch14.mx_formats.number_formats import ELEMENTS, FORMATS, BlockFormat
from tilelab import views
from tilelab.records import results

SCALE_LABELS = {"mxfp8_e4m3": "MXFP8, 32 per scale", "mxfp4": "MXFP4, 32 per scale"}
SCALE_LABELS["nvfp4"] = "NVFP4, 16 per scale"


def make_block(data: str, format: BlockFormat, seed: int = 0) -> torch.Tensor:
    """Return a block (1, n), bfloat16, of a kind in errors.DATA, or of "ramp": from 0 to 7 in equal steps."""
    count = min(format.block[1], 128)
    if data == "ramp":
        return torch.linspace(0, 7, count).bfloat16()[None]
    return errors.make_data(data, 8, 1024, seed)[:1, :count].contiguous()


def _elements() -> dict:
    found = {}
    for name, each in ELEMENTS.items():
        bits = {"exponentBits": each.exponent_bits, "mantissaBits": each.mantissa_bits}
        found[name] = {"name": name, **bits, "specials": each.specials}
    return found


def number_line(element: str = "e2m1", value: float = 2.9) -> views.View:
    """Return the number line of a format, with the bits of the code that `value` rounds to.

    A saved notebook keeps a picture of this code, and a sentence about it. Raises ValueError for an unknown element,
    and for NaN in a format without NaN.
    """
    if element not in ELEMENTS:
        raise ValueError(f"unknown element {element!r:.40}; choose one of {', '.join(ELEMENTS)}.")
    format = ELEMENTS[element]
    code = int(number_formats.encode(torch.tensor(value), format))
    finite = value if abs(value) < float("inf") else format.max if value > 0 else -format.max
    data = {"kind": "code", "elements": _elements(), "start": {"element": element, "value": finite}}
    said = results.table([{"number": f"{value:g}", "rounds to": figures.describe(format, code)}], "one code")
    return views.View("formats", data, picture=figures.code_picture(format, code, value), table=said)


def block(format: str = "mxfp4", data: str = "outliers", rule: str = "floor", seed: int = 0) -> views.View:
    """Return a block of numbers under its scale, whose elements can be changed.

    `data` is a kind in errors.DATA or "ramp", and `rule` is floor or ceil. A saved notebook keeps a picture, whose
    title states the error. Raises ValueError for a format whose blocks have several rows, and for a rule that it lacks.
    """
    chosen = number_formats.lookup(format)
    number_formats.check_rule(rule, chosen)
    one_row = {name: each for name, each in FORMATS.items() if each.block[0] == 1}
    if format not in one_row:
        raise ValueError(f"the view shows blocks of one row; choose one of {', '.join(one_row)}.")
    widest = max(one_row.values(), key=lambda each: each.block[1])
    kinds = {kind: make_block(kind, widest, seed)[0].tolist() for kind in (*errors.DATA, "ramp")}
    kinds["ramp"] = make_block("ramp", chosen)[0].tolist()
    if chosen.block[1] < widest.block[1]:  # wider blocks repeat the ramp
        kinds["ramp"] *= widest.block[1] // chosen.block[1]
    content = {"kind": "block", "elements": _elements(), "blocks": kinds}
    content["formats"] = {
        name: {"element": each.element.name, "scale": each.scale, "block": each.block[1]}
        for name, each in one_row.items()
    }
    content["start"] = {"format": format, "rule": rule, "data": data}
    picture = figures.values_picture(make_block(data, chosen, seed), chosen, rule)
    return views.View("formats", content, picture=picture)


def scale_layout(
    format: str = "mxfp8_e4m3", shape: tuple[int, int] = (192, 256), row: int = 33, scale: int = 2
) -> views.View:
    """Return the layout of the scales of a matrix of `shape` in tiles of 128 × 4, pointing at one scale of one row.

    A saved notebook keeps a picture of one tile, and a line that gives the byte of the scale. Raises ValueError for a
    format other than the keys of SCALE_LABELS, and for a scale outside of the matrix.
    """
    if format not in SCALE_LABELS:
        raise ValueError(f"unknown format {format!r:.40}; choose one of {', '.join(SCALE_LABELS)}.")
    columns = -(-shape[1] // FORMATS[format].block[1])
    if not (0 <= row < shape[0] and 0 <= scale < columns):
        raise ValueError(f"row and scale must be below {shape[0]} and {columns}; they are {row} and {scale}.")
    marked = torch.zeros(shape[0], columns, dtype=torch.uint8)
    marked[row, scale] = 1
    byte = int(packing.tile_scales(marked).argmax())
    blocks = {name: FORMATS[name].block[1] for name in SCALE_LABELS}
    formats = {name: {"label": label, "block": blocks[name]} for name, label in SCALE_LABELS.items()}
    start = {"format": format, "rows": shape[0], "columns": shape[1], "scale": [row, scale]}
    content = {"kind": "scales", "formats": formats, "start": start}
    place = {"row": row, "scale": scale, "byte": byte, "tile": byte // 512, "line": byte % 512 // 16}
    place["byte of the line"] = byte % 16
    said = results.table([place], f"{format}, {shape[0]} × {shape[1]} elements")
    return views.View("microscope", content, picture=figures.scales_picture(), table=said)
