"""Draw mechanisms rather than measurements, in the style of `pictures.plots`: what moves where, and who does what."""

from __future__ import annotations

import functools
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tilelab.pictures import plots


def canvas(title: str, source: str, width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of width x height inches and its axes, whose coordinates are inches."""
    figure, axes = plots.new_figure([title], title, source, height, layout="none")  # any other draws twice
    figure.set_size_inches(width, height)
    axes.set(position=(0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    face: str = "none",
    edge: str = "none",
    text: str = "",
    **rest: Any,
) -> None:
    """Draw a rectangle whose lower left corner is (x, y), with a text in its middle; `rest` goes to matplotlib."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, **rest))
    if text:
        ink = "white" if face == plots.colour("best") else "black"
        write(axes, x + width / 2, y + height / 2, text, color=ink)


def write(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", size: float = 7, **rest: Any
) -> None:
    """Draw text at (x, y), which is the middle of its height."""
    axes.text(x, y, text, fontsize=size, ha=ha, va="center_baseline", **rest)


def lighten(tone: str, share: float = 0.4) -> tuple:
    """Return the colour mixed with white."""
    return tuple(1 - share * (1 - part) for part in to_rgb(tone))


def draw_gemm(config: Any, m: int, n: int, k: int) -> plots.Picture:
    """Draw how tiles move in a bf16 GEMM, C (m, n) = A (m, k) B (k, n), on sm_90a.

    `config` has block_m, block_n, block_k, num_stages, epilogue_subtile and smem_bytes(dtype, target). A tile is to the
    scale of its matrix, and the matrices roughly to one scale, with very long sides shortened.
    """
    bm, bn, bk, stages = config.block_m, config.block_n, config.block_k, config.num_stages
    needs = f"{config.smem_bytes('bf16', 'sm_90a') / 1024:.0f} KiB of shared memory per block"
    title = f"One {bm} × {bn} tile of C: its K steps flow through a ring of stages"
    figure, axes = canvas(title, f"{m} × {n} × {k}, bf16; needs {needs}", *plots.SIZE)
    blue, orange, green = map(plots.colour, ("best", "proposed", "predicted"))  # A, B, C

    draw = functools.partial(box, axes)

    def label(x, y, text, ha="left", size=7, **rest):
        write(axes, x, y, text, ha, size, **rest)

    def grid(start, end, pitch):
        # a finer grid would be a blot
        return numpy.arange(start, end, pitch)[1:] if abs(pitch) > 0.03 else []

    inch = min(2.4 / (k + n), 2.25 / (k + m))
    high, wide, deep = (min(max(size * inch, 0.95), 1.4) for size in (m, n, k))
    tile_m, tile_n, step = high * min(1, bm / m), wide * min(1, bn / n), deep * min(1, bk / k)
    low, cx = 0.28, 0.2 + deep
    by, row = low + high + 0.08, max(low, low + high - tile_m * (m // bm // 2 + 1))
    column, done = cx + tile_n * (n // bn // 2), step * (k // bk // 3)
    draw(0.05, low - 0.06, deep + wide + 0.21, 2.58, "#f0f0f0")
    label(0.12, 2.7, "global memory", size=7.5)
    # For each matrix the rows of A or columns of B that the tile of C needs, and the corner of one K step's tile.
    needed = {
        "A": ((0.12, row, deep, tile_m), (0.12 + done, row)),
        "B": ((column, by, tile_n, deep), (column, by + deep - done - step)),
        "C": ((column, row, tile_n, tile_m), (column, row)),
    }
    matrices = (
        ("A", blue, 0.12, low, deep, high, step, tile_m, (bm, bk)),
        ("B", orange, cx, by, wide, deep, tile_n, step, (bk, bn)),
        ("C", green, cx, low, wide, high, tile_n, tile_m, (bm, bn)),
    )
    for line, (name, tone, x, y, width, height, dx, dy, shape) in enumerate(matrices):
        strip, lit = needed[name]
        draw(x, y, width, height, "white")
        draw(*strip, tone, alpha=0.3)
        draw(*lit, dx, dy, tone)
        axes.vlines(grid(x, x + width, dx), y, y + height, color="#999999", linewidth=0.3)
        axes.hlines(grid(y + height, y, -dy), x, x + width, color="#999999", linewidth=0.3)
        draw(x, y, width, height, edge="black", linewidth=0.8)
        label(x + 0.05, y + height - 0.1, name, size=9, fontweight="bold")
        draw(0.12, 2.46 - 0.16 * line, 0.08, 0.08, tone)
        label(0.24, 2.5 - 0.16 * line, "{} {} × {}".format(name, *shape))

    x, width, top = 3.5, 1.45, 2.68
    size_a, size_b = bm * bk / 512, bn * bk / 512  # KiB of two-byte elements
    share = width * min(max(bm / (bm + bn), 0.3), 0.7)
    label(x, top + 0.11, f"shared memory: ring of {stages} × {size_a + size_b:g} KiB", size=7.5)
    shown = list(range(stages)) if stages <= 6 else [0, 1, 2, 3, 4, stages - 1]
    slot = min(0.26, 1.14 / len(shown))
    for line, stage in enumerate(shown):
        y = top - (line + 1) * slot
        draw(x, y, share, slot * 0.88, blue)
        draw(x + share, y, width - share, slot * 0.88, orange)
        label(x + share / 2, y + slot * 0.42, f"A {size_a:g} KiB", "center", color="white")
        label(x + (share + width) / 2, y + slot * 0.42, f"B {size_b:g} KiB", "center")
        label(x + width + 0.04, y + slot * 0.42, f"stage {stage}")
    bottom, middle, edge = top - len(shown) * slot, x + width / 2, cx + wide + 0.06
    draw(x, 1.0, width, 0.34, edge="black", linewidth=0.8)
    label(middle, 1.17, "tensor core,\naccumulator in registers", "center")
    part = getattr(config, "columns", (bn, 0))[0] // config.epilogue_subtile  # columns of C per store
    count = bn // part
    for index in range(count):
        face, line = (green, "none") if index == 0 else ("none", plots.GREY)
        draw(x + index * width / count, 0.46, width / count, 0.26, face, line, linestyle=":")
    label(x + width / count / 2, 0.59, f"{bm * part / 512:g} KiB", "center", color="white")
    label(x, 0.36, "staged C" + (f", one of {count} parts at a time" if count > 1 else ""))
    arrow = {"arrowstyle": "-|>", "color": plots.GREY, "lw": 1.3, "shrinkA": 0, "shrinkB": 0}
    for start, end in (
        ((edge, (top + bottom) / 2), (x, (top + bottom) / 2)),
        ((middle, bottom), (middle, 1.34)),
        ((middle, 1.0), (middle, 0.72)),
        ((x, 0.59), (cx + wide, 0.59)),
    ):
        axes.annotate("", end, start, arrowprops=arrow)
    label((edge + x) / 2, (top + bottom) / 2 + 0.1, "TMA load", "center", 7.5)
    label((edge + x) / 2, 0.69, "TMA store", "center", 7.5)
    parts = f" in {count} parts, one at a time" if count > 1 else ""
    return figure.describe(
        f"Left: A, B and C in global memory. A tile of {bm} × {bn} of C needs a row of tiles of A and a column of "
        f"tiles of B; one step of K is a tile of {bm} × {bk} of A and one of {bk} × {bn} of B. Right: TMA loads the "
        f"steps into a ring of {stages} stages of {size_a + size_b:g} KiB each. The tensor core reads a stage and adds "
        f"to its sums in registers. C is staged in shared memory{parts}, and TMA stores it."
    )
