"""Pictures of block-scaled formats: codes on a line, rounding, scales, programs, memory, and the errors that remain."""

from __future__ import annotations

import torch

from ch14.mx_formats import number_formats, packing
from ch14.mx_formats.lesson import errors
from ch14.mx_formats.number_formats import BlockFormat, Element
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write

SIGN, EXPONENT, MANTISSA = map(plots.colour, ("conservative", "best", "predicted"))
SCALE, QUARTERS = plots.colour("proposed"), ("#88CCEE", "#44AA99", "#DDCC77", "#CC6677")
WIDTH = 7.4  # inches


def block_picture(names=("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4")) -> plots.Picture:
    """Draw one block of each format in memory, to the scale of bits: elements, outlined bytes, and the scale."""
    height = 0.95 + 0.62 * len(names)
    figure, axes = canvas(
        "A block: elements side by side, and one scale for all of them",
        "widths in bits; outlined: bytes. The first element is in the lowest bits",
        WIDTH,
        height,
    )
    inch = (WIDTH - 2.2) / (32 * 8)
    for line, name in enumerate(names):
        format = number_formats.lookup(name)
        y, bits, count = height - 0.95 - 0.62 * line, format.element.bits, format.block[1]
        write(axes, 0.12, y + 0.13, name, "left", 8, fontweight="bold")
        for index in range(count):
            box(
                axes,
                1.15 + index * bits * inch,
                y,
                bits * inch,
                0.26,
                lighten(EXPONENT, 0.25 + 0.3 * (index % 2)),
            )
        for byte in range(count * bits // 8):
            box(axes, 1.15 + byte * 8 * inch, y, 8 * inch, 0.26, edge="black", linewidth=0.5)
        end = 1.15 + count * bits * inch + 0.12
        box(axes, end, y, 8 * inch, 0.26, SCALE, "black", linewidth=0.5)
        scale = {"e8m0": "E8M0", "e4m3": "E4M3; a float32 per tensor"}[format.scale]
        write(axes, end + 8 * inch + 0.06, y + 0.13, scale, "left")
        write(
            axes,
            1.15,
            y - 0.13,
            f"{count} × {bits} bits = {count * bits // 8} B, and 1 B for the scale: "
            f"{format.bits:g} bits per element",
            "left",
        )
    return figure.describe(
        "Blocks of four formats drawn to the scale of bits. MXFP8, MXFP6 and MXFP4 have 32 elements and a scale of one "
        "byte; NVFP4 has 16 elements and a scale of one byte, and a float32 for the whole tensor."
    )


def _arrow(axes, start, end, tone=plots.GREY, style="-|>"):
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": tone, "lw": 1, "shrinkA": 0, "shrinkB": 0}
    )


def number_line_picture() -> plots.Picture:
    """Draw all codes of e2m1 on a line, and the magnitudes of e2m1, e4m3 and e5m2 on a line of powers of two."""
    figure, axes = canvas(
        "Few bits leave few numbers: each tick is a code",
        "above: e2m1 on a plain axis; below: positive magnitudes, one power of two per step of the axis",
        WIDTH,
        3.75,
    )
    numbers = number_formats.magnitudes(number_formats.E2M1).tolist()
    unit, zero, y = 0.55, WIDTH / 2, 2.85
    axes.plot([0.3, WIDTH - 0.3], [y, y], color=plots.GREY, linewidth=0.8)
    for code, number in enumerate(numbers):
        for sign in (1, -1) if number else (1,):
            x = zero + sign * unit * number
            axes.plot([x, x], [y - 0.07, y + 0.07], color="black", linewidth=1)
            write(axes, x, y - 0.17, f"{sign * number:g}", size=7)
            text = f"{8 * (sign < 0) + code:04b}"
            write(axes, x, y + 0.16 + 0.13 * (number < 2 and code % 2), text, color=EXPONENT)
    write(
        axes, 0.1, y + 0.45, "e2m1: sign, two exponent bits, one mantissa bit", "left", 8, fontweight="bold"
    )
    left, right, low, high = 0.75, WIDTH - 0.2, -17, 16
    place = (right - left) / (high - low)
    for line, element in enumerate((number_formats.E2M1, number_formats.E4M3, number_formats.E5M2)):
        y, values = 1.95 - 0.55 * line, number_formats.magnitudes(element)[1:]
        write(axes, 0.1, y, element.name, "left", 8, fontweight="bold")
        axes.plot([left, right], [y, y], color=plots.GREY, linewidth=0.8)
        for value in values.tolist():
            x = left + (torch.tensor(value).log2().item() - low) * place
            tone = SIGN if value < 2.0**element.emin else "black"
            axes.plot([x, x], [y - 0.09, y + 0.09], color=tone, linewidth=0.5)
        for value in (values[0], values[-1]):
            exponent = value.log2().item()
            label = f"{float(value):g}" if value >= 0.1 else f"2^{exponent:.0f}"
            write(axes, left + (exponent - low) * place, y - 0.18, label)
    for exponent in range(-16, 17, 4):
        x = left + (exponent - low) * place
        axes.plot([x, x], [0.45, 0.5], color=plots.GREY, linewidth=0.8)
        write(axes, x, 0.37, f"2^{exponent}", color=plots.GREY)
    axes.plot([left, right], [0.5, 0.5], color=plots.GREY, linewidth=0.8)
    write(axes, right, 2.2, "orange: subnormal numbers, evenly spaced", "right", color=SIGN)
    return figure.describe(
        "The codes of e2m1 on a line from -6 to 6: steps of 0.5 up to 2, of 1 up to 4, and of 2 up to 6. Below, e2m1 "
        "covers 2^-1 to 6, e4m3 2^-9 to 448 with eight numbers per power of two, e5m2 2^-16 to 57344 with four."
    )


def _bits(axes, x, y, text, tones, size=0.2):
    """Draw a string of bits as boxes, from the left; a space is a gap."""
    for index, (bit, tone) in enumerate(zip(text, tones)):
        if bit == "…":
            write(axes, x + (index + 0.5) * size, y + size / 2, "…")
        elif bit != " ":
            box(
                axes,
                x + index * size,
                y,
                size * 0.94,
                size * 0.94,
                lighten(tone, 0.5),
                "black",
                linewidth=0.4,
            )
            write(axes, x + (index + 0.47) * size, y + size * 0.45, bit, size=7.5)


def rounding_picture() -> plots.Picture:
    """Draw how the adder rounds 2.75 and 2.5 to e2m1, and how a product moves the result to the bits of the code."""
    figure, axes = canvas(
        "Add a large number and take it away: the adder has rounded",
        "between 2 and 4 the step of e2m1 is 1, the last place of 2^23 in float32",
        WIDTH,
        3.1,
    )
    keep, drop, size = EXPONENT, SIGN, 0.2
    for panel, (value, whole, rest, total, word) in enumerate(
        (("2.75", "10", "11", "11", "above half: up"), ("2.5", "10", "10", "10", "a tie: to even"))
    ):
        x = 1.0 + panel * 3.4
        last = x + 8 * size
        rows = (("2^23", "100…00000"), (value, "       " + whole + rest), ("sum", "100…000" + total))
        write(axes, x, 2.52, f"a = {value}", "left", 8, fontweight="bold")
        for line, (name, bits) in enumerate(rows):
            y = 2.15 - 0.3 * line
            write(axes, x - 0.1, y + size / 2, name, "right")
            _bits(axes, x, y, bits, [keep] * 9 + [drop] * 4)
        axes.plot([last + size, last + size], [1.45, 2.45], color="black", linewidth=0.8, linestyle=":")
        write(axes, last + size, 2.53, "last place: 1", "right", 7, color=plots.GREY)
        write(axes, last + size + 0.06, 1.65, word, "left", 7, color=SIGN)
        write(axes, x - 0.1, 1.35, "− 2^23", "right")
        write(axes, x + 8 * size, 1.35, {"11": "= 3", "10": "= 2"}[total])
    write(
        axes,
        0.12,
        0.98,
        "The code of 3: times 2^-126, its fields stand where float32 has its lowest exponents",
        "left",
        8,
        fontweight="bold",
    )
    text = "0" + "00000010" + "1" + "000…0"
    _bits(axes, 1.0, 0.6, text, [SIGN] + [EXPONENT] * 8 + [MANTISSA] * 6)
    write(axes, 0.9, 0.7, "3 · 2^-126", "right")
    axes.plot([1.0 + 7 * size, 1.0 + 10 * size], [0.55, 0.55], color="black", linewidth=1.5)
    write(axes, 1.0 + 8.5 * size, 0.44, "bits 24 to 22: code 101", size=7)
    write(
        axes, 1.12 + 15 * size, 0.7, "sign, 8 exponent bits, 23 mantissa bits; code = bits >> 22", "left", 7
    )
    return figure.describe(
        "2^23 plus 2.75 has no room for the two bits after the point, so the adder rounds to 2^23 + 3; 2.5 is a tie "
        "and goes to the even 2. Below, 3 times 2^-126 as a float32 holds the code 101 in bits 24 to 22."
    )


def rules_picture(values=(7.0, 3.4, 1.0, 0.3)) -> plots.Picture:
    """Draw what the scales of the rules floor and ceil make of the elements of a block in MXFP4."""
    mxfp4, unit, left = number_formats.lookup("mxfp4"), 0.76, 0.55
    figure, axes = canvas(
        "Floor saturates the largest element, ceil coarsens the others",
        f"a block of MXFP4 with elements {', '.join(f'{value:g}' for value in values)}; ticks: "
        "scale × magnitudes of e2m1",
        WIDTH,
        3.2,
    )
    x = torch.tensor([[*values] + [0.0] * 28])
    for line, rule in enumerate(number_formats.RULES):
        quantised = number_formats.quantise(x, mxfp4, rule)
        scale, back = (
            float(number_formats.scale_values(quantised)),
            number_formats.dequantise(quantised)[0].tolist(),
        )
        top, bottom = 2.4 - 1.2 * line, 1.85 - 1.2 * line
        write(axes, 0.1, top + 0.3, f"{rule}: scale {scale:g}", "left", 8, fontweight="bold")
        for y in (top, bottom):
            axes.plot([left, left + 8.3 * unit], [y, y], color=plots.GREY, linewidth=0.8)
        if rule == "floor":
            box(axes, left + 6 * unit, bottom, 2 * unit, top - bottom, lighten(SIGN, 0.3))
            write(axes, left + 7.95 * unit, bottom + 0.12, "no code here", "right")
        for number in (number_formats.magnitudes(number_formats.E2M1) * scale).tolist():
            if number <= 8.3:
                axes.plot(
                    [left + number * unit] * 2, [bottom - 0.06, bottom + 0.06], color="black", linewidth=1.2
                )
                write(axes, left + number * unit, bottom - 0.15, f"{number:g}")
        for value, result in zip(values, back):
            tone = SIGN if value == max(values) else EXPONENT
            _arrow(axes, (left + value * unit, top), (left + result * unit, bottom + 0.02), tone)
            axes.plot([left + value * unit], [top], "o", color=tone, markersize=4)
            write(axes, left + value * unit, top + 0.13, f"{value:g}")
    return figure.describe(
        "The elements 7, 3.4, 1 and 0.3. Under floor the scale is 1 and they become 6, 3, 1 and 0.5: 7 saturates. "
        "Under ceil the scale is 2 and they become 8, 3, 1 and 0: the small ones lose a bit."
    )


def program_picture() -> plots.Picture:
    """Draw the tensors of a program that quantises a vector of blocks, with their shapes."""
    figure, axes = canvas(
        "A vector of blocks: reduce along a block, broadcast its scale back",
        "each row is a block of 32 elements; here BLOCKS = 5",
        WIDTH,
        2.45,
    )
    cell, count, y = 0.16, 5, 0.75
    high = cell * count

    def grid(x, columns, tone, name, shape, wide=cell):
        for row in range(count):
            for column in range(columns):
                box(
                    axes,
                    x + column * wide,
                    y + row * cell,
                    wide * 0.92,
                    cell * 0.85,
                    lighten(tone, 0.35 + 0.12 * (row % 2)),
                )
        write(axes, x + columns * wide / 2, y + high + 0.14, name, size=7.5, fontweight="bold")
        write(axes, x + columns * wide / 2, y - 0.14, shape)

    places = {"load": 0.3, "amax": 2.42, "scale": 3.32, "codes": 4.9}
    grid(places["load"], 12, EXPONENT, "elements", "(BLOCKS, 32)", 0.13)
    grid(places["amax"], 1, MANTISSA, "amax", "(BLOCKS,)", 0.2)
    grid(places["scale"], 1, SCALE, "scale", "(BLOCKS,)", 0.2)
    grid(places["codes"], 12, SIGN, "codes", "(BLOCKS, 32)", 0.13)
    middle = y + high / 2
    for begin, end, text in ((1.9, 2.38, "max"), (2.68, 3.26, "exponent"), (3.6, 4.85, "multiply, round")):
        _arrow(axes, (begin, middle), (end, middle))
        write(axes, (begin + end) / 2, middle + 0.12, text)
    write(axes, 2.14, middle - 0.12, "axis 1")
    write(axes, 4.22, middle - 0.12, "scale[:, None]")
    axes.plot([1.08, 1.08, 5.6], [y - 0.24, y - 0.4, y - 0.4], color=plots.GREY, linewidth=1)
    _arrow(axes, (5.6, y - 0.4), (5.6, y - 0.22))
    write(axes, 3.4, y - 0.32, "the elements stay in registers: x is read once")
    return figure.describe(
        "A program loads a tensor of BLOCKS by 32 elements, reduces it along axis 1 to a vector of amax, makes a "
        "vector of scales, broadcasts the scales over the elements in registers, and stores codes and scales."
    )


def packing_picture() -> plots.Picture:
    """Draw how codes of four bits become bytes: even elements in the low nibbles, odd ones in the high."""
    figure, axes = canvas(
        "Two codes of four bits per byte: the even element in the low nibble",
        "a nibble is half a byte; memory is drawn with the highest bit of each byte at the left",
        WIDTH,
        2.35,
    )
    wide, left = 0.78, 0.8
    for index in range(8):
        tone = EXPONENT if index % 2 == 0 else MANTISSA
        box(axes, left + index * wide, 1.55, wide * 0.9, 0.24, lighten(tone, 0.5), "black", linewidth=0.5)
        write(axes, left + (index + 0.45) * wide, 1.67, f"code {index}")
        byte, nibble = index // 2, 1 - index % 2
        x = left + byte * 2 * wide + nibble * 0.9 * wide
        box(axes, x, 0.72, 0.9 * wide, 0.24, lighten(tone, 0.5), "black", linewidth=0.5)
        write(axes, x + 0.45 * wide, 0.84, f"code {index}")
        _arrow(axes, (left + (index + 0.45) * wide, 1.53), (x + 0.45 * wide, 0.98), tone)
    write(axes, left - 0.1, 1.67, "codes", "right", 7.5, fontweight="bold")
    write(axes, left - 0.1, 0.84, "bytes", "right", 7.5, fontweight="bold")
    for byte in range(4):
        write(
            axes,
            left + (2 * byte + 0.9) * wide,
            0.58,
            f"byte {byte}: code {2 * byte} | code {2 * byte + 1} << 4",
        )
    return figure.describe(
        "Eight codes of four bits become four bytes. Codes 0, 2, 4 and 6 go to the low nibbles of bytes 0 to 3, codes "
        "1, 3, 5 and 7 to their high nibbles."
    )


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
            box(
                axes,
                0.45 + 0.18 * column,
                y,
                0.17,
                0.46,
                lighten(QUARTERS[quarter], 0.7),
                "white",
                linewidth=0.5,
            )
            if quarter == 0:
                write(axes, 0.535 + 0.18 * column, 2.66, str(column))
        write(axes, 1.25, y + 0.23, f"rows {32 * quarter} to {32 * quarter + 31}", "left")
    write(axes, 4.95, 2.85, "the tile in memory, 16 bytes per line", size=8, fontweight="bold")
    for line, row in enumerate((0, 1, 2, 30, 31)):
        y = 2.1 - 0.34 * line - (0.16 if line > 2 else 0)
        write(axes, 2.85, y + 0.13, f"byte {16 * row}", "right")
        for column in range(16):
            owner = int(tiled[16 * row + column])
            box(
                axes,
                2.95 + 0.27 * column,
                y,
                0.26,
                0.26,
                lighten(QUARTERS[owner // 32], 0.7),
                "white",
                linewidth=0.5,
            )
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
        return f"{element.name} {code}: {fields} is {value}"
    numbers = number_formats.decode(torch.arange(element.codes), element)
    exponent = magnitude >> element.mantissa_bits
    kind = "zero" if magnitude == 0 else "subnormal" if exponent == 0 else "normal"
    below = f"{float(numbers[magnitude - 1]):g}" if magnitude else "nothing"
    above = f"{float(numbers[magnitude + 1]):g}" if magnitude + 1 < element.codes else "nothing"
    step = 2.0 ** (max(exponent, 1) - element.bias - element.mantissa_bits)
    return (
        f"{element.name} {code}: {fields} is {value:g} ({kind}, exponent {max(exponent, 1) - element.bias}); "
        f"magnitudes beside it: {below} and {above}, step {step:g}"
    )


def code_picture(element: Element, code: int) -> plots.Picture:
    """Draw the bits of a code, and its place among all magnitudes."""
    description = describe(element, code)
    title = description.split(": ")[0] + ": " + description.split(" is ")[1].split(";")[0]
    figure, axes = canvas(
        title, "sign, exponent, mantissa; below, all magnitudes on a logarithmic axis", 5.5, 1.9
    )
    tones = [SIGN] + [EXPONENT] * element.exponent_bits + [MANTISSA] * element.mantissa_bits
    for index, (bit, tone) in enumerate(zip(f"{code:0{element.bits}b}", tones)):
        box(axes, 0.3 + 0.36 * index, 1.05, 0.33, 0.33, lighten(tone, 0.55), "black", linewidth=0.6)
        write(axes, 0.465 + 0.36 * index, 1.215, bit, size=10)
    neighbours = description.split("; ")[-1].replace("magnitudes beside it", "beside it")
    write(axes, 0.45 + 0.36 * element.bits, 1.215, neighbours, "left", 7)
    numbers = number_formats.decode(torch.arange(element.codes), element)
    low, high = float(numbers[1].log2()) - 1, float(numbers[-1].log2())
    positions = [
        0.3 + 4.9 * ((float(number.log2()) if number > 0 else low) - low) / (high - low) for number in numbers
    ]
    axes.plot([0.3, 5.2], [0.6, 0.6], color=plots.GREY, linewidth=0.8)
    magnitude = code & (2 ** (element.bits - 1) - 1)
    for index, x in enumerate(positions):
        here = index == magnitude
        axes.plot(
            [x, x],
            [0.52, 0.78 if here else 0.68],
            color=SIGN if here else "black",
            linewidth=2 if here else 0.6,
        )
    for index in (0, element.codes - 1) if element.codes > 32 else (0, 1, element.codes - 1):
        write(axes, positions[index], 0.4, f"{float(numbers[index]):g}")
    return figure.describe(
        f"{description}. The bits of sign, exponent and mantissa; below, a line of the "
        f"{element.codes} magnitudes up to {float(numbers[-1]):g}, with this one marked."
    )


def values_picture(x: torch.Tensor, format: BlockFormat, rule: str = "floor") -> plots.Picture:
    """Draw a block x, bfloat16 (1, n), as lines, and its values in the format as points on the grid of its scale.

    The title states the scale, the error, and how many elements have the largest code or became zero.
    """
    quantised = number_formats.quantise(x, format, rule)
    back, scale = (
        number_formats.dequantise(quantised)[0],
        float(number_formats.scale_values(quantised).flatten()[0]),
    )
    error = float((back - x[0].float()).norm() / x.float().norm().clamp(min=1e-30))
    largest = int((number_formats.decode(quantised.codes, format.element).abs() == format.element.max).sum())
    code = f" (code {int(quantised.scales.flatten()[0])})" if format.scale != "fp32" else ""
    title = (
        f"{format.name}: scale {scale:.4g}{code}, error {error:.1%} of the block's norm; {largest} at "
        f"±{format.element.max:g}, {int(((back == 0) & (x[0] != 0)).sum())} became zero"
    )
    figure, axes = plots.new_figure(
        [1],
        title,
        "lines: the numbers; points: what is left; grey: what the format can say at this scale",
        2.9,
    )
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


ERROR_FORMATS = ("mxfp8_e4m3", "nvfp4", "fp4_e8m0_16", "mxfp4")


def strip_errors(data: str = "activations", row: int = 0, count: int = 64) -> dict[str, torch.Tensor]:
    """Return the errors of `count` elements of a row, over the RMS of these elements, for each of ERROR_FORMATS."""
    x = errors.make_data(data)
    part = x[row, :count].double()
    return {
        name: (errors.round_trip(x, number_formats.lookup(name))[row, :count] - part)
        / part.square().mean().sqrt()
        for name in ERROR_FORMATS
    }


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
    left, wide, unit = 1.1, 4.7, 0.32 / largest
    for line, (name, strip) in enumerate(strips.items()):
        y, block = 0.72 * (len(strips) - line) - 0.05, number_formats.lookup(name).block[1]
        write(axes, left - 0.1, y, name, "right", 7.5, fontweight="bold")
        axes.plot([left, left + wide], [y, y], color="black", linewidth=0.6)
        for index, error in enumerate(strip.tolist()):
            x = left + (index + 0.5) * wide / 64
            axes.plot([x, x], [y, y + error * unit], color=EXPONENT, linewidth=2.4, solid_capstyle="butt")
        for edge in range(0, 65, block):
            axes.plot([left + edge * wide / 64] * 2, [y - 0.32, y + 0.32], color=plots.GREY, linewidth=0.5)
        rms = float(strip.square().mean().sqrt())
        write(axes, left + wide + 0.1, y, f"RMS {rms:.3f}", "left", 7.5)
        write(axes, left + wide + 0.8, y, f"worst {float(strip.abs().max()):.2f}", "left", 7.5)
    return figure.describe(
        "Errors of the same 64 elements in "
        + ", ".join(
            f"{name} (RMS {float(strip.square().mean().sqrt()):.3f})" for name, strip in strips.items()
        )
        + "."
    )


def errors_picture(rows: list[dict], names: dict[str, str]) -> plots.Picture:
    """Draw the RMS errors of formats for each kind of data, on one logarithmic scale. names: {format: label}."""
    by = {row["format"]: row for row in rows}
    figure, axes = plots.new_figure(
        rows,
        "RMS error of each format, side by side",
        "256 x 1,024 numbers per kind of data; error over the RMS of the data; computed here",
        0.9 + 0.27 * len(names),
    )
    for kind, tone, marker in zip(errors.DATA, QUARTERS, "osD^"):
        axes.plot(
            [by[name][kind] for name in names],
            range(len(names))[::-1],
            marker,
            color=tone,
            markersize=6,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label=kind,
            linestyle="none",
        )
    axes.set_xscale("log")
    ticks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names))[::-1], names.values(), fontsize=7.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure.describe(
        "RMS errors over the RMS of the data: "
        + "; ".join(
            f"{label} {min(by[name][kind] for kind in errors.DATA):.3f} to "
            f"{max(by[name][kind] for kind in errors.DATA):.3f}"
            for name, label in names.items()
        )
        + "."
    )
