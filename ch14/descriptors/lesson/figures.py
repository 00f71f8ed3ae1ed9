"""Pictures for the notebook `ch14_descriptors`: how a tile moves, and how a block is cut into boxes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch

from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))


def _draw_arrow(axes, start, end, tone, dashed=False):
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": tone,
            "lw": 1.3,
            "shrinkA": 0,
            "shrinkB": 0,
            "linestyle": "--" if dashed else "-",
        },
    )


def _draw_part(axes, x, y, width, tone, lines):
    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            0.5,
            boxstyle="round,pad=0,rounding_size=0.05",
            linewidth=1.2,
            facecolor=lighten(tone, 0.25),
            edgecolor=tone,
        )
    )
    for index, line in enumerate(lines):
        write(axes, x + width / 2, y + 0.25 + 0.07 * (len(lines) - 1) - 0.14 * index, line)


def draw_ways() -> plots.Picture:
    """Draw three ways to move a tile, with who makes the map and whether threads carry the data."""
    figure, axes = canvas(
        "The same tile, three ways: who describes it, and who carries it",
        "dashed: what describes the tile; solid: data",
        7.4,
        3.3,
    )
    for name, x in {
        "CPU, each launch": 0.85,
        "kernel, each program": 2.75,
        "global memory": 4.55,
        "on the SM": 6.3,
    }.items():
        write(axes, x, 2.95, name, size=8, fontweight="bold")
    by_tma = ("shared memory", "TMA, one thread asks")
    rows = (
        ("host", 2.1, BLUE, ("driver encodes", "the map"), ("the map is a", "parameter"), by_tma),
        (
            "device",
            1.2,
            GREEN,
            ("allocates scratch,", "128 B per map"),
            ("tensormap.replace,", "to scratch, fence"),
            by_tma,
        ),
        (
            "pointers",
            0.3,
            ORANGE,
            ("passes addresses",),
            ("computes 16-byte", "addresses, masks"),
            ("registers", "16 bytes per thread"),
        ),
    )
    for name, y, tone, on_cpu, in_kernel, on_sm in rows:
        box(axes, 0.08, y - 0.06, 7.24, 0.78, lighten(tone, 0.08))
        write(axes, 0.13, y + 0.63, name, "left", 8, fontweight="bold", color=tone)
        for x, width, lines in (
            (0.2, 1.3, on_cpu),
            (2.1, 1.3, in_kernel),
            (3.95, 1.2, ("tile of x", "tile of out")),
            (5.85, 1.2, on_sm),
        ):
            _draw_part(axes, x, y, width, tone, lines)
        _draw_arrow(axes, (5.15, y + 0.36), (5.85, y + 0.36), tone)
        _draw_arrow(axes, (5.85, y + 0.14), (5.15, y + 0.14), tone)
        for start, end in ((1.5, 2.1), (3.4, 3.95)):
            _draw_arrow(axes, (start, y + 0.25), (end, y + 0.25), tone, dashed=True)
    return figure.describe(
        "Three rows. Host: at each launch the driver encodes a map, which is a parameter of the kernel. Device: the "
        "CPU allocates scratch, and each program writes its map there. Both ways, one thread asks TMA to move tiles "
        "between global and shared memory. Pointers: the threads compute addresses and move 16 bytes each through "
        "registers."
    )


def draw_boxes(blocks: Sequence[tuple[tuple[int, int], tuple[int, int]]], itemsize: int = 2) -> plots.Picture:
    """Draw how Triton cuts blocks into boxes, one TMA instruction each.

    `blocks` holds (block, box) pairs of (rows, columns); ValueError when a box does not divide its block.
    """
    for block, cut in blocks:
        if block[0] % cut[0] or block[1] % cut[1]:
            raise ValueError(f"boxes of {cut[0]} × {cut[1]} do not make a block of {block[0]} × {block[1]}.")
    height = 0.5 + 0.62 * len(blocks)
    figure, axes = canvas(
        "A block is cut into boxes: each is one TMA instruction",
        f"elements of {itemsize} bytes; not to scale",
        plots.SIZE[0],
        height,
    )
    widest, left, found = max(block[1] for block, _ in blocks), 1.35, []
    for index, (block, cut) in enumerate(blocks):
        y = height - 0.62 - 0.62 * index
        wide, high = 3.9 * (block[1] / widest) ** 0.5, min(0.36, 0.09 + 0.045 * block[0])
        across, down = block[1] // cut[1], block[0] // cut[0]
        write(axes, 0.1, y + high / 2, f"{block[0]} × {block[1]}", "left", 8, fontweight="bold")
        for i in range(down):
            for j in range(across):
                box(
                    axes,
                    left + wide * j / across,
                    y + high * i / down,
                    wide / across,
                    high / down,
                    lighten(BLUE, 0.35 + 0.3 * ((i + j) % 2)),
                    "white",
                    linewidth=0.6,
                )
        boxes = f"{across * down} box{'es' * (across * down > 1)} of {cut[0]} × {cut[1]}"
        write(axes, left, y - 0.1, f"{boxes}, {cut[0] * cut[1] * itemsize:,} B each", "left")
        found.append(f"{block[0]} × {block[1]} makes {boxes}")
    return figure.describe(
        f"{len(blocks)} blocks of elements of {itemsize} bytes, and the boxes that Triton cuts them "
        f"into: {', '.join(found)}."
    )
