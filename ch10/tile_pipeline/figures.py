"""Pictures of `ch10_tile_pipeline`: what a tensor map describes, and the box of a stencil."""

from __future__ import annotations

from tilelab import plots
from tilelab.diagrams import box, canvas, lighten, write

MEASURE = "|-|,widthA=0.25,widthB=0.25"
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
OUTSIDE = {"face": "white", "edge": GREEN, "hatch": "/////", "linewidth": 0.6}  # what TMA fills in


def draw_arrow(axes, start, end, tone=plots.GREY, style="-|>"):
    """Draw an arrow, or with another style a measure, from start to end."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": tone, "lw": 1.2, "shrinkA": 0,
                                              "shrinkB": 0})


def draw_tensor_map() -> plots.Picture:
    """Draw a bf16 tensor with padded rows, a box on it, that box in shared memory, and the fields of the tensor map."""
    rows, columns, stride, box_rows, box_columns, x, y = 40, 100, 112, 16, 32, 40, 12
    figure, axes = canvas("The map describes tensor and box; a copy names only a corner",
                          "a bf16 tensor, innermost extent first as in the map", 7.4, 2.75)
    scale, left, top = 2.85 / stride, 0.45, 2.15
    right, low, end = left + columns * scale, top - rows * scale, left + stride * scale
    box(axes, left, low, columns * scale, rows * scale, lighten(BLUE, 0.25))
    box(axes, right, low, end - right, rows * scale, "#eeeeee", "#bbbbbb", hatch="....", linewidth=0)
    box(axes, left, low, columns * scale, rows * scale, edge="black", linewidth=0.8)
    box_x, box_y, width, height = left + x * scale, top - (y + box_rows) * scale, box_columns * scale, box_rows * scale
    box(axes, box_x, box_y, width, height, lighten(GREEN, 0.7), GREEN, "box", linewidth=1.2)
    write(axes, box_x, box_y + height + 0.09, f"corner ({x}, {y})", "left")
    axes.plot(left, top, "o", color="black", markersize=4, clip_on=False)
    write(axes, left - 0.36, top + 0.19, "address", "left")
    draw_arrow(axes, (left, top + 0.08), (right, top + 0.08), BLUE, MEASURE)
    write(axes, (left + right) / 2 + 0.1, top + 0.19, f"{columns} columns")
    draw_arrow(axes, (left - 0.12, low), (left - 0.12, top), BLUE, MEASURE)
    write(axes, left - 0.24, (low + top) / 2, f"{rows} rows", rotation=90)
    draw_arrow(axes, (left, low - 0.1), (end, low - 0.1), ORANGE, MEASURE)
    write(axes, (left + end) / 2, low - 0.22, f"row stride: {stride} elements, {stride * 2} bytes; dots: padding")

    memory_x, pitch = 3.95, 0.085
    ends = top - 0.1 - pitch * box_rows
    for row in range(box_rows):
        tone = lighten(GREEN, 0.35 + 0.35 * (row % 2))
        box(axes, memory_x, ends + pitch * (box_rows - 1 - row), 0.95, pitch, tone, "white", linewidth=0.3)
    for at, text in ((top + 0.19, "shared memory"), (top + 0.05, "row after row"),
                     (ends - 0.12, f"{box_rows} × {box_columns * 2} B = {box_rows * box_columns * 2:,} B"),
                     (ends - 0.26, "swizzled in 16-byte units")):
        write(axes, memory_x + 0.475, at, text)
    draw_arrow(axes, (box_x + width, box_y + height / 2), (memory_x - 0.03, box_y + height / 2))

    fields = (("address", "multiple of 16 bytes", "black"), ("element type", "bfloat16", "none"),
              ("extents", f"{columns}, {rows}", BLUE), ("strides", f"{stride * 2} bytes", ORANGE),
              ("box", f"{box_columns}, {box_rows}", GREEN), ("swizzle", "64B", "none"), ("fill", "zero", "none"),
              ("promotion", "128B of L2", "none"))
    field_x, line = 5.2, 0.215
    box(axes, field_x, top - line * len(fields) - 0.02, 2.1, line * len(fields) + 0.04, "white", "black", linewidth=0.8)
    write(axes, field_x, top + 0.19, "tensor map, 128 bytes", "left", 8, fontweight="bold")
    for index, (name, value, tone) in enumerate(fields):
        at = top - line * (index + 0.5)
        box(axes, field_x + 0.06, at - 0.045, 0.09, 0.09, tone)
        write(axes, field_x + 0.22, at, name, "left")
        write(axes, field_x + 0.98, at, value, "left")
    return figure


def draw_halo() -> plots.Picture:
    """Draw a stencil's tile at the tensor's first corner, and the box with its halo that one load brings.

    A box starts at a multiple of 16 bytes of its row, so it has a whole unit of four floats left and right of the tile.
    """
    rows, columns, unit = 8, 16, 4
    high, wide, x, y = rows + 2, columns + 2 * unit, -unit, -1
    outside = high * wide - (high + y) * (wide + x)
    figure, axes = canvas(f"One box brings tile and halo; {outside} of {high * wide} elements lie outside",
                          f"the barrier expects the whole box: {high} × {wide} × 4 B = {high * wide * 4:,} bytes",
                          plots.SIZE[0] + 0.5, 2.6)
    scale = 3.4 / (wide + 3)
    left, top = 0.35 - x * scale, 2.2 + y * scale  # of the tensor

    def part(column, row, columns, rows, face="none", **rest):  # all in elements
        box(axes, left + column * scale, top - (row + rows) * scale, columns * scale, rows * scale, face, **rest)

    part(0, 0, wide + x + 2, high + y + 1, lighten(BLUE, 0.15))
    part(0, 0, wide + x, high + y, lighten(ORANGE, 0.45))
    part(0, 0, columns + 1, high + y, lighten(GREEN, 0.45))
    part(x, y, wide, -y, **OUTSIDE)
    part(x, 0, -x, high + y, **OUTSIDE)
    part(0, 0, columns, rows, BLUE)
    for column in range(x, x + wide + 1):  # black: where a box may start
        part(column, y, 0, high, edge="white", linewidth=0.4)
    for row in range(y, y + high + 1):
        part(x, row, wide, 0, edge="white", linewidth=0.4)
    for column in range(x, x + wide + 1, unit):
        part(column, y, 0, high, edge="black", linewidth=0.7)
    right, low = left + (wide + x + 2) * scale, top - (high + y + 1) * scale
    axes.plot([left, left, right], [low, top, top], color="black", linewidth=1.5)
    part(x, y, wide, high, edge=GREEN, linewidth=1.5)
    write(axes, left + columns * scale / 2, top - rows * scale / 2, f"tile {rows} × {columns}", color="white", size=8,
          bbox={"facecolor": BLUE, "edgecolor": "none", "pad": 1})
    for index, (style, text) in enumerate((
            ({"face": BLUE}, "written by this CTA"), ({"face": lighten(GREEN, 0.45)}, "halo, from the tensor"),
            ({"face": lighten(ORANGE, 0.45)}, "rest of a unit, not used"), (OUTSIDE, "outside: filled with zero"),
            ({"face": lighten(BLUE, 0.15)}, "rest of the tensor"))):
        box(axes, right + 0.2, 1.94 - 0.22 * index, 0.18, 0.12, **style)
        write(axes, right + 0.44, 2.0 - 0.22 * index, text, "left")
    axes.text(right + 0.2, 0.93, f"box {high} × {wide} at ({x}, {y}), columns first\nblack lines: multiples of 16 "
              f"bytes,\nwhere a box may start: every {unit}\nno branch to load edges", fontsize=7, va="top",
              linespacing=1.5)
    return figure
