"""Pictures of block-scaled formats: a block in memory, a tile of scales, the bits of a code, a rounded block."""

from __future__ import annotations

import torch

from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.number_formats import BlockFormat, Element
from tilelab import plots
from tilelab.diagrams import box, canvas, lighten, write

SIGN, EXPONENT, MANTISSA = map(plots.colour, ("conservative", "best", "predicted"))
SCALE, QUARTERS = plots.colour("proposed"), ("#88CCEE", "#44AA99", "#DDCC77", "#CC6677")
WIDTH = 7.4  # inches


def block_picture(names=("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4")) -> plots.Picture:
    """Draw one block of each format in memory, to the scale of bits: elements, outlined bytes, and the scale."""
    height = 0.95 + 0.62 * len(names)
    figure, axes = canvas("A block: elements side by side, and one scale for all of them", "widths in bits; outlined: "
                          "bytes. The first element is in the lowest bits", WIDTH, height)
    inch = (WIDTH - 2.2) / (32 * 8)
    for line, name in enumerate(names):
        format = number_formats.lookup(name)
        y, bits, count = height - 0.95 - 0.62 * line, format.element.bits, format.block[1]
        write(axes, 0.12, y + 0.13, name, "left", 8, fontweight="bold")
        for index in range(count):
            box(axes, 1.15 + index * bits * inch, y, bits * inch, 0.26, lighten(EXPONENT, 0.25 + 0.3 * (index % 2)))
        for byte in range(count * bits // 8):
            box(axes, 1.15 + byte * 8 * inch, y, 8 * inch, 0.26, edge="black", linewidth=0.5)
        end = 1.15 + count * bits * inch + 0.12
        box(axes, end, y, 8 * inch, 0.26, SCALE, "black", linewidth=0.5)
        scale = {"e8m0": "E8M0", "e4m3": "E4M3, and float32 a tensor"}[format.scale]
        write(axes, end + 8 * inch + 0.06, y + 0.13, scale, "left")
        write(axes, 1.15, y - 0.13, f"{count} × {bits} bits = {count * bits // 8} B, and 1 B: {format.bits:g} bits an "
              "element", "left")
    return figure


def scales_picture() -> plots.Picture:
    """Draw a tile of 128 rows x 4 scales as its 32 x 16 bytes; the number in a byte is the row whose scale it holds."""
    tiled = packing.tile_scales(torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4).contiguous())
    shown = (0, 1, 2, 30, 31)
    figure, axes = canvas("128 rows × 4 scales in 512 bytes: four rows, 32 apart, share 16 bytes",
                          "a line is 16 bytes; numbers: the row whose scale it is; colours: quarters of 32 rows", WIDTH,
                          2.55)
    for line, row in enumerate(shown):
        y = 1.75 - 0.28 * line - (0.2 if line > 2 else 0)
        write(axes, 0.62, y + 0.12, f"byte {16 * row}", "right")
        for column in range(16):
            owner = int(tiled[16 * row + column])
            box(axes, 0.75 + 0.4 * column, y, 0.38, 0.24, lighten(QUARTERS[owner // 32], 0.7), "white", linewidth=0.5)
            write(axes, 0.94 + 0.4 * column, y + 0.12, str(owner))
    for quarter in range(4):
        write(axes, 0.75 + 1.6 * quarter + 0.8, 2.1, f"scales 0 1 2 3 of row {32 * quarter} + r")
    write(axes, 0.62, 1.08, "…", "right")
    return figure


def describe(element: Element, code: int) -> str:
    """Return a sentence about a code: its bits, value, neighbours and spacing."""
    if not 0 <= code < 2**element.bits:
        raise ValueError(f"code must be from 0 to {2**element.bits - 1} for {element.name}; it is {code}.")
    text, value = f"{code:0{element.bits}b}", float(number_formats.decode(torch.tensor(code), element))
    fields = f"{text[0]} {text[1:1 + element.exponent_bits]} {text[1 + element.exponent_bits:]}"
    magnitude = code & (2**(element.bits - 1) - 1)
    if magnitude >= element.codes:
        return f"{element.name} {code}: {fields} is {value}"
    numbers = number_formats.decode(torch.arange(element.codes), element)
    exponent = magnitude >> element.mantissa_bits
    kind = "zero" if magnitude == 0 else "subnormal" if exponent == 0 else "normal"
    below = f"{float(numbers[magnitude - 1]):g}" if magnitude else "nothing"
    above = f"{float(numbers[magnitude + 1]):g}" if magnitude + 1 < element.codes else "nothing"
    step = 2.0**(max(exponent, 1) - element.bias - element.mantissa_bits)
    return (f"{element.name} {code}: {fields} is {value:g} ({kind}, exponent {max(exponent, 1) - element.bias}); "
            f"magnitudes beside it: {below} and {above}, step {step:g}")


def code_picture(element: Element, code: int) -> plots.Picture:
    """Draw the bits of a code, and its place among all magnitudes."""
    description = describe(element, code)
    title = description.split(": ")[0] + ": " + description.split(" is ")[1].split(";")[0]
    figure, axes = canvas(title, "sign, exponent, mantissa; below, all magnitudes on a logarithmic axis", 5.5, 1.9)
    tones = [SIGN] + [EXPONENT] * element.exponent_bits + [MANTISSA] * element.mantissa_bits
    for index, (bit, tone) in enumerate(zip(f"{code:0{element.bits}b}", tones)):
        box(axes, 0.3 + 0.36 * index, 1.05, 0.33, 0.33, lighten(tone, 0.55), "black", linewidth=0.6)
        write(axes, 0.465 + 0.36 * index, 1.215, bit, size=10)
    neighbours = description.split("; ")[-1].replace("magnitudes beside it", "beside it")
    write(axes, 0.45 + 0.36 * element.bits, 1.215, neighbours, "left", 7)
    numbers = number_formats.decode(torch.arange(element.codes), element)
    low, high = float(numbers[1].log2()) - 1, float(numbers[-1].log2())
    positions = [0.3 + 4.9 * ((float(number.log2()) if number > 0 else low) - low) / (high - low) for number in numbers]
    axes.plot([0.3, 5.2], [0.6, 0.6], color=plots.GREY, linewidth=0.8)
    magnitude = code & (2**(element.bits - 1) - 1)
    for index, x in enumerate(positions):
        here = index == magnitude
        axes.plot([x, x], [0.52, 0.78 if here else 0.68], color=SIGN if here else "black", linewidth=2 if here else 0.6)
    for index in (0, element.codes - 1) if element.codes > 32 else (0, 1, element.codes - 1):
        write(axes, positions[index], 0.4, f"{float(numbers[index]):g}")
    return figure


def values_picture(x: torch.Tensor, format: BlockFormat, rule: str = "floor") -> plots.Picture:
    """Draw a block x, bfloat16 (1, n), as lines, and its values in the format as points on the grid of its scale.

    The title states the scale, the error, and how many elements saturated or became zero.
    """
    quantised = number_formats.quantise(x, format, rule)
    back, scale = number_formats.dequantise(quantised)[0], float(number_formats.scale_values(quantised).flatten()[0])
    error = float((back - x[0].float()).norm() / x.float().norm().clamp(min=1e-30))
    largest = int((number_formats.decode(quantised.codes, format.element).abs() == format.element.max).sum())
    code = f" (code {int(quantised.scales.flatten()[0])})" if format.scale != "fp32" else ""
    title = (f"{format.name}: scale {scale:.4g}{code}, error {error:.1%} of the block's norm; {largest} at "
             f"±{format.element.max:g}, {int(((back == 0) & (x[0] != 0)).sum())} became zero")
    figure, axes = plots.new_figure([1], title, "lines: the numbers; points: what is left; grey: what the format can "
                                   "say at this scale", 2.9)
    numbers = number_formats.decode(torch.arange(format.element.codes), format.element) * scale
    for number in numbers.tolist() if format.element.codes <= 32 else [float(numbers[-1])]:
        for sign in (1, -1):
            axes.axhline(sign * number, color="#dddddd", linewidth=0.7, zorder=0)
    index = range(x.shape[1])
    axes.vlines(index, 0, x[0].float(), color=plots.GREY, linewidth=3, alpha=0.6)
    axes.plot(index, back, "o", color=EXPONENT, markersize=4)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlabel("element of the block", fontsize=8)
    return figure
