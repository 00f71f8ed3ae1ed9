"""What moves where in chapter 14's descriptors: pictures that explain, drawn rather than measured."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch

from tilelab import plots
from tilelab.diagrams import box, canvas, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
PALE = "#eeeeee"


def _arrow(axes, start, end, tone=plots.GREY, dashed=False):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": tone, "lw": 1.3, "shrinkA": 0,
                                              "shrinkB": 0, "linestyle": "--" if dashed else "-"})


def _place(axes, x, y, width, height, tone, *lines):
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05", linewidth=1.2,
                                  facecolor=lighten(tone, 0.25), edgecolor=tone))
    for index, line in enumerate(lines):
        write(axes, x + width / 2, y + height / 2 + 0.07 * (len(lines) - 1) - 0.14 * index, line)


def ways_picture() -> plots.Picture:
    """Three ways to move a tile: who makes the map and when, and whether threads carry the data."""
    figure, axes = canvas("The same tile, three ways: who describes it, and who carries it",
                          "dashed: what describes the tile; solid: data", 7.4, 3.3)
    columns = {"CPU, each launch": 0.85, "kernel, each program": 2.75, "global memory": 4.55, "on the SM": 6.3}
    for name, x in columns.items():
        write(axes, x, 2.95, name, size=8, fontweight="bold")
    rows = (("host", 2.1, BLUE), ("device", 1.2, GREEN), ("pointers", 0.3, ORANGE))
    for name, y, tone in rows:
        box(axes, 0.08, y - 0.06, 7.24, 0.78, lighten(tone, 0.08))
        write(axes, 0.13, y + 0.63, name, "left", 8, fontweight="bold", color=tone)
        _place(axes, 3.95, y, 1.2, 0.5, tone, "tile of x", "tile of out")
    for y, tone in ((2.1, BLUE), (1.2, GREEN)):
        _place(axes, 5.85, y, 1.2, 0.5, tone, "shared memory", "TMA, one thread asks")
    _place(axes, 5.85, 0.3, 1.2, 0.5, ORANGE, "registers", "16 bytes a thread")
    for _, y, tone in rows:
        _arrow(axes, (5.15, y + 0.36), (5.85, y + 0.36), tone)
        _arrow(axes, (5.85, y + 0.14), (5.15, y + 0.14), tone)
    _place(axes, 0.2, 2.1, 1.3, 0.5, BLUE, "driver encodes", "the map")
    _place(axes, 2.1, 2.1, 1.3, 0.5, BLUE, "the map is a", "parameter")
    _arrow(axes, (1.5, 2.35), (2.1, 2.35), BLUE, True)
    _place(axes, 0.2, 1.2, 1.3, 0.5, GREEN, "allocates scratch,", "128 B a map")
    _place(axes, 2.1, 1.2, 1.3, 0.5, GREEN, "tensormap.replace,", "to scratch, fence")
    _arrow(axes, (1.5, 1.45), (2.1, 1.45), GREEN, True)
    _place(axes, 0.2, 0.3, 1.3, 0.5, ORANGE, "passes addresses")
    _place(axes, 2.1, 0.3, 1.3, 0.5, ORANGE, "computes 16-byte", "addresses, masks")
    _arrow(axes, (1.5, 0.55), (2.1, 0.55), ORANGE, True)
    for y, tone in ((2.35, BLUE), (1.45, GREEN), (0.55, ORANGE)):
        _arrow(axes, (3.4, y), (3.95, y), tone, True)
    return figure


def boxes_picture(blocks: Sequence[tuple[tuple[int, int], tuple[int, int]]], itemsize: int = 2) -> plots.Picture:
    """Blocks as Triton cuts them into boxes: `blocks` holds (block, box) pairs of (rows, columns), each box an
    instruction. ValueError when a box does not divide its block."""
    for block, cut in blocks:
        if block[0] % cut[0] or block[1] % cut[1]:
            raise ValueError(f"boxes of {cut[0]} × {cut[1]} do not make a block of {block[0]} × {block[1]}.")
    height = 0.5 + 0.62 * len(blocks)
    figure, axes = canvas("A block is cut into boxes: each is one TMA instruction",
                          f"elements of {itemsize} bytes; rows are drawn higher than they are", plots.SIZE[0], height)
    widest, left = max(block[1] for block, _ in blocks), 1.35
    for index, (block, cut) in enumerate(blocks):
        y = height - 0.62 - 0.62 * index
        wide, high = 3.9 * (block[1] / widest) ** 0.5, min(0.36, 0.09 + 0.045 * block[0])
        across, down = block[1] // cut[1], block[0] // cut[0]
        write(axes, 0.1, y + high / 2, f"{block[0]} × {block[1]}", "left", 8, fontweight="bold")
        for i in range(down):
            for j in range(across):
                box(axes, left + wide * j / across, y + high * i / down, wide / across, high / down,
                    lighten(BLUE, 0.35 + 0.3 * ((i + j) % 2)), "white", linewidth=0.6)
        write(axes, left, y - 0.1, f"{across * down} box{'es' * (across * down > 1)} of {cut[0]} × {cut[1]}, "
                                   f"{cut[0] * cut[1] * itemsize:,} B each", "left")
    return figure
