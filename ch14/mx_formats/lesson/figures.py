"""Pictures of block-scaled formats: a code, a block, a tile of scales, and the errors that remain."""

from __future__ import annotations

import math

import torch

from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.lesson import errors
from ch14.mx_formats.number_formats import BlockFormat, Element
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write

SIGN, EXPONENT, MANTISSA = map(plots.colour, ("conservative", "best", "predicted"))
QUARTERS = ("#88CCEE", "#44AA99", "#DDCC77", "#CC6677")
WIDTH = 7.4  # inches


def scales_picture() -> plots.Picture:
    """Draw a tile of 128 rows x 4 scales: the rows as a matrix has them, and the 32 x 16 bytes of the tile."""
    tiled = packing.tile_scales(torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4).contiguous())
    figure, axes = canvas(
        "128 rows × 4 scales in 512 bytes: four rows, 32 apart, share 16 bytes",
        "numbers: the row whose scale it is; scale c of row r is byte r % 32 · 16 + r // 32 · 4 + c",
        WIDTH,
        3.3,
    )
    write(axes, 0.8, 2.85, "scales, row by row", size=8, fontweight="bold")
    for quarter in range(4):
        y = 2.1 - 0.52 * quarter
        for column in range(4):
            tone = lighten(QUARTERS[quarter], 0.7)
            box(axes, 0.45 + 0.18 * column, y, 0.17, 0.46, tone, "white", linewidth=0.5)
            if quarter == 0:
                write(axes, 0.535 + 0.18 * column, 2.66, str(column))
        write(axes, 1.25, y + 0.23, f"rows {32 * quarter} to {32 * quarter + 31}", "left")
    write(axes, 4.95, 2.85, "the tile in memory, 16 bytes per line", size=8, fontweight="bold")
    for line, row in enumerate((0, 1, 2, 30, 31)):
        y = 2.1 - 0.34 * line - (0.16 if line > 2 else 0)
        write(axes, 2.85, y + 0.13, f"byte {16 * row}", "right")
        for column in range(16):
            owner = int(tiled[16 * row + column])
            tone = lighten(QUARTERS[owner // 32], 0.7)
            box(axes, 2.95 + 0.27 * column, y, 0.26, 0.26, tone, "white", linewidth=0.5)
            write(axes, 3.08 + 0.27 * column, y + 0.13, str(owner))
    for column in range(16):
        write(axes, 3.08 + 0.27 * column, 2.5, str(column % 4), color=plots.GREY)
    write(axes, 2.85, 2.5, "scale", "right", color=plots.GREY)
    write(axes, 2.85, 1.28, "…", "right")
    return figure.describe(
        "Left, scales of 128 rows by 4, in four quarters of 32 rows. Right, the tile: line r of 16 bytes holds the "
        "four scales of row r, then those of rows r + 32, r + 64 and r + 96."
    )


def describe(element: Element, code: int) -> str:
    """Return a sentence about a code: its bits, value, neighbours and spacing."""
    if not 0 <= code < 2**element.bits:
        raise ValueError(f"code must be from 0 to {2**element.bits - 1} for {element.name}; it is {code}.")
    text, value = f"{code:0{element.bits}b}", float(number_formats.decode(torch.tensor(code), element))
    fields = f"{text[0]} {text[1 : 1 + element.exponent_bits]} {text[1 + element.exponent_bits :]}"
    magnitude = code & (2 ** (element.bits - 1) - 1)
    if magnitude >= element.codes:
        return f"code {code} of {element.name}, {fields}, is {value}"
    numbers = number_formats.decode(torch.arange(element.codes), element)
    exponent = magnitude >> element.mantissa_bits
    kind = "zero" if magnitude == 0 else "subnormal" if exponent == 0 else "normal"
    below = f"{float(numbers[magnitude - 1]):g}" if magnitude else "nothing"
    above = f"{float(numbers[magnitude + 1]):g}" if magnitude + 1 < element.codes else "nothing"
    step = 2.0 ** (max(exponent, 1) - element.bias - element.mantissa_bits)
    return (
        f"code {code} of {element.name}, {fields}, is {value:g} ({kind}, exponent {max(exponent, 1) - element.bias}); "
        f"magnitudes beside it: {below} and {above}, step {step:g}"
    )


def code_picture(element: Element, code: int, typed: float | None = None) -> plots.Picture:
    """Draw the bits of a code, and its place among all magnitudes, with that of the number that rounds to it."""
    description = describe(element, code)
    head, value = description.split(";")[0].split(" is ")
    title = (
        f"{head.split(',')[0]} is {value}"
        if typed is None
        else f"In {element.name}, {typed:g} rounds to {value}"
    )
    source = "sign, exponent, mantissa; below, all magnitudes on a logarithmic axis"
    figure, axes = canvas(title, source, 5.5, 1.9)
    tones = [SIGN] + [EXPONENT] * element.exponent_bits + [MANTISSA] * element.mantissa_bits
    for index, (bit, tone) in enumerate(zip(f"{code:0{element.bits}b}", tones)):
        box(axes, 0.3 + 0.36 * index, 1.05, 0.33, 0.33, lighten(tone, 0.55), "black", linewidth=0.6)
        write(axes, 0.465 + 0.36 * index, 1.215, bit, size=10)
    for line, words in enumerate(description.split("; ")[-1].split(", step ")):
        y = 1.29 - 0.15 * line
        write(axes, 0.45 + 0.36 * element.bits, y, f"step here: {words}" if line else words, "left", 7)
    numbers = number_formats.decode(torch.arange(element.codes), element)
    low, high = float(numbers[1].log2()) - 1, float(numbers[-1].log2())

    def place(number: float) -> float:
        return 0.3 + 4.9 * (min(math.log2(number), high) - low) / (high - low) if number > 2**low else 0.3

    positions = [place(float(number)) for number in numbers]
    axes.plot([0.3, 5.2], [0.6, 0.6], color=plots.GREY, linewidth=0.8)
    magnitude = code & (2 ** (element.bits - 1) - 1)
    for index, x in enumerate(positions):
        top, tone, width = (0.78, SIGN, 2) if index == magnitude else (0.68, "black", 0.6)
        axes.plot([x, x], [0.52, top], color=tone, linewidth=width)
    if typed is not None:
        axes.plot(place(abs(typed)), 0.82, "v", color=EXPONENT, markersize=5)
        write(axes, place(abs(typed)), 0.94, f"{typed:g}", color=EXPONENT)
    for index in (0, element.codes - 1) if element.codes > 32 else (0, 1, element.codes - 1):
        write(axes, positions[index], 0.4, f"{float(numbers[index]):g}")
    return figure.describe(
        f"{description}. The bits of sign, exponent and mantissa; below, a line of the "
        f"{element.codes} magnitudes up to {float(numbers[-1]):g}, with this one marked"
        f"{'' if typed is None else f', and above it {typed:g}'}."
    )


def values_picture(x: torch.Tensor, format: BlockFormat, rule: str = "floor") -> plots.Picture:
    """Draw a block x, bfloat16 (1, n), as lines, and its values in the format as points on the grid of its scale.

    The title states the scale, the error, and how many elements have the largest code or became zero.
    """
    quantised = number_formats.quantise(x, format, rule)
    back = number_formats.dequantise(quantised)[0]
    scale = float(number_formats.scale_values(quantised).flatten()[0])
    error = float((back - x[0].float()).norm() / x.float().norm().clamp(min=1e-30))
    largest = int((number_formats.decode(quantised.codes, format.element).abs() == format.element.max).sum())
    code = f" (code {int(quantised.scales.flatten()[0])})" if format.scale != "fp32" else ""
    name = format.name.upper().replace("_", " ")
    title = (
        f"{name}: scale {scale:.4g}{code}, error {error:.1%} of the block's norm; {largest} at "
        f"±{format.element.max:g}, {int(((back == 0) & (x[0] != 0)).sum())} became zero"
    )
    source = "lines: the numbers; points: what is left; grey: what the format can say at this scale"
    figure, axes = plots.new_figure([1], title, source, 2.9)
    numbers = number_formats.decode(torch.arange(format.element.codes), format.element) * scale
    for number in numbers.tolist() if format.element.codes <= 32 else [float(numbers[-1])]:
        for sign in (1, -1):
            axes.axhline(sign * number, color="#dddddd", linewidth=0.7, zorder=0)
    index = range(x.shape[1])
    axes.vlines(index, 0, x[0].float(), color=plots.GREY, linewidth=3, alpha=0.6)
    axes.plot(index, back, "o", color=EXPONENT, markersize=4)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlabel("element of the block", fontsize=8)
    spans = [f"from {float(values.min()):.3g} to {float(values.max()):.3g}" for values in (x, back)]
    return figure.describe(
        f"{title}. Lines of the {x.shape[1]} numbers of the block, {spans[0]}, and points of their "
        f"values in the format, {spans[1]}."
    )


ERROR_FORMATS = {"mxfp8_e4m3": "MXFP8, floor", "nvfp4": "NVFP4"}
ERROR_FORMATS |= {"fp4_e8m0_16": "the note's format", "mxfp4": "MXFP4, floor"}


def strip_errors(data: str = "activations", row: int = 0, count: int = 64) -> dict[str, torch.Tensor]:
    """Return the errors of `count` elements of a row, over the RMS of these elements, for each of ERROR_FORMATS."""
    x = errors.make_data(data)
    part = x[row, :count].double()
    rms = part.square().mean().sqrt()
    rounded = {name: errors.round_trip(x, number_formats.lookup(name)) for name in ERROR_FORMATS}
    return {name: (each[row, :count] - part) / rms for name, each in rounded.items()}


def strip_picture(data: str = "gaussian", row: int = 0) -> plots.Picture:
    """Draw the errors of the same 64 elements in four formats, with one vertical scale."""
    strips = strip_errors(data, row)
    largest = max(float(strip.abs().max()) for strip in strips.values())
    figure, axes = canvas(
        "The errors of four formats for the same 64 numbers, side by side",
        f"errors over the RMS of the numbers ({data}, row {row}); vertical lines separate blocks",
        WIDTH,
        0.7 + 0.72 * len(strips),
    )
    left, wide, unit = 1.35, 4.45, 0.32 / largest
    for line, (name, strip) in enumerate(strips.items()):
        y, block = 0.72 * (len(strips) - line) - 0.05, number_formats.lookup(name).block[1]
        write(axes, left - 0.1, y, ERROR_FORMATS[name], "right", 7.5, fontweight="bold")
        axes.plot([left, left + wide], [y, y], color="black", linewidth=0.6)
        for index, error in enumerate(strip.tolist()):
            x = left + (index + 0.5) * wide / 64
            axes.plot([x, x], [y, y + error * unit], color=EXPONENT, linewidth=2.4, solid_capstyle="butt")
        for edge in range(0, 65, block):
            axes.plot([left + edge * wide / 64] * 2, [y - 0.32, y + 0.32], color=plots.GREY, linewidth=0.5)
        rms = float(strip.square().mean().sqrt())
        write(axes, left + wide + 0.1, y, f"RMS {rms:.3f}", "left", 7.5)
        write(axes, left + wide + 0.8, y, f"worst {float(strip.abs().max()):.2f}", "left", 7.5)
    rms = {name: float(strip.square().mean().sqrt()) for name, strip in strips.items()}
    said = ", ".join(f"{ERROR_FORMATS[name]} (RMS {each:.3f})" for name, each in rms.items())
    return figure.describe(f"Errors of the same 64 elements in {said}.")


def errors_picture(rows: list[dict], names: dict[str, str]) -> plots.Picture:
    """Draw the RMS errors of formats for each kind of data, on one logarithmic scale. names: {format: label}."""
    by = {row["format"]: row for row in rows}
    figure, axes = plots.new_figure(
        rows,
        "RMS error of each format, side by side",
        "256 × 1,024 numbers per kind of data; error over the RMS of the data; computed here",
        0.9 + 0.36 * len(names),
    )
    for index, (kind, tone, marker) in enumerate(zip(errors.DATA, QUARTERS, "osD^")):
        look = {"color": tone, "ms": 5, "mec": "black", "mew": 0.5, "ls": "none"}
        lines = [line + 0.24 - 0.16 * index for line in range(len(names))[::-1]]  # no marker hides another
        axes.plot([by[name][kind] for name in names], lines, marker, label=kind, **look)
    axes.set_xscale("log")
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names))[::-1], names.values(), fontsize=7.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    for line in range(len(names) - 1):
        axes.axhline(line + 0.5, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    found = {label: [by[name][kind] for kind in errors.DATA] for name, label in names.items()}
    said = "; ".join(f"{label} {min(each):.3f} to {max(each):.3f}" for label, each in found.items())
    return figure.describe(f"RMS errors over the RMS of the data: {said}.")
