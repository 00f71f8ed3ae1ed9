"""Explore swizzles: the bank of shared memory that holds each element of a box, and the cost of a warp's read.

    explorer.draw(32, 32, 4, "column", ["128B"])
    explorer.explorer()  # in a notebook: choose a box, its swizzle and its place on a tensor

Addresses come from `tilelab.tensor_map.swizzle_offset`, and wavefronts are counted. Needs no GPU.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence

import ipywidgets as widgets
import numpy
from matplotlib import colormaps
from matplotlib.patches import Rectangle

from ch10.tile_pipeline.banks import BANKS, WORD, count_wavefronts, words_read
from ch10.tile_pipeline.box_dump import check_corner
from ch10.tile_pipeline.figures import BLUE, GREEN, OUTSIDE
from tilelab import diagrams, plots, tensor_map

UNIT, LINE = 16, 128  # bytes that a swizzle moves, and that all banks deliver at once
SHADES = colormaps["viridis"]
READ = plots.COLOURS["conservative"]  # outlines the elements that a warp reads


def addresses(rows: int, columns: int, itemsize: int, swizzle: str = "none") -> numpy.ndarray:
    """Return the address of each element of a box (rows, columns) that starts at a multiple of 1,024 bytes."""
    # Rows that are narrower than the swizzle begin a swizzle apart and leave gaps, as seen on an H200.
    pitch = max(columns * itemsize, tensor_map.SWIZZLES[swizzle])
    return tensor_map.swizzle_offset(numpy.arange(rows)[:, None] * pitch + numpy.arange(columns) * itemsize, swizzle)


def elements_read(rows: int, columns: int, itemsize: int, access: str) -> tuple[list[tuple[int, int]], int]:
    """Return the element (row, column) at which each lane starts to read, and how many elements a lane reads.

    For a row or a column, up to 32 lanes read one element each. For a matrix, up to 8 lanes read 16 bytes each, one row
    per lane, as ldmatrix and stmatrix do.
    """
    if access == "row":
        return [(0, lane) for lane in range(min(32, columns))], 1
    if access == "column":
        return [(lane, 0) for lane in range(min(32, rows))], 1
    return [(lane, 0) for lane in range(min(8, rows))], UNIT // itemsize


def _reads(rows, columns, itemsize, swizzle, access) -> tuple[list[int], int]:
    """Return the addresses at which the lanes read, and the bytes that each lane reads."""
    lanes, count = elements_read(rows, columns, itemsize, access)
    where = addresses(rows, columns, itemsize, swizzle)
    return [where[lane] for lane in lanes], count * itemsize


def conflicts(rows: int, columns: int, itemsize: int, swizzle: str, access: str) -> int:
    """Return how many wavefronts a read takes: 1 without a conflict, n for an n-way conflict."""
    return count_wavefronts(*_reads(rows, columns, itemsize, swizzle, access))


def describe_read(rows: int, columns: int, itemsize: int, swizzle: str, access: str) -> str:
    """Return one line that says what is read, by how many lanes, from how many banks, with which conflict."""
    where, size = _reads(rows, columns, itemsize, swizzle, access)
    groups, ways = words_read(where, size), count_wavefronts(where, size)
    used = len({word % BANKS for words in groups for word in words})
    return (f"{access} of {len(where)} × {size} bytes: {len(where)} lanes touch {used} of {BANKS} banks, "
            + (f"{ways}-way conflict" if ways > 1 else "no conflict")
            + (f" in each of {len(groups)} half warps" if len(groups) > 1 else ""))


# ---- the box in shared memory


def draw(rows: int = 32, columns: int = 32, itemsize: int = 4, access: str = "column",
         swizzles: Sequence[str] = tuple(tensor_map.SWIZZLES)) -> plots.Picture:
    """Draw a box under each of the swizzles, in the colours of its banks, and outline the elements that a warp reads.

    A box is as wide as its swizzle allows, up to `columns` elements. Where there is room, each 16-byte unit has its
    number within its line of 128 bytes. Raises ValueError for a box that no tensor map describes.
    """
    wide = {swizzle: min(columns, (tensor_map.SWIZZLES[swizzle] or columns * itemsize) // itemsize)
            for swizzle in swizzles}
    for swizzle, box_columns in wide.items():
        box = rows, box_columns
        tensor_map.check_describable(box, (box_columns * UNIT, 1), itemsize, 0, box, swizzle=swizzle)
    title = describe_read(rows, wide[swizzles[0]], itemsize, swizzles[0], access)
    if len(swizzles) > 1:
        title = f"wavefronts for a {access}: " + ", ".join(
            f"{conflicts(rows, wide[swizzle], itemsize, swizzle, access)} ({swizzle})" for swizzle in swizzles)
    width, gap = (9.6, 0.95) if len(swizzles) > 1 else (plots.SIZE[0], 0)
    inch = min((width - 0.7 - gap * (len(wide) - 1)) / sum(wide.values()), 0.3)
    high = min(max(0.13 * rows, 0.35), 4.2)
    height = high + 1.68
    figure, axes = diagrams.canvas(title[0].upper() + title[1:], "", width, height)
    axes.remove()
    key = figure.add_axes((0.4 / width, 0.22 / height, 1.9 / width, 0.1 / height))
    key.imshow([range(BANKS)], cmap=SHADES, aspect="auto")
    key.set(yticks=[], xticks=[0, 8, 16, 24, 31])
    key.tick_params(labelsize=7, length=2, pad=1)
    key.set_ylabel("bank", fontsize=7, rotation=0, ha="right", va="center")
    figure.text(0.985, 0.12 / height, "outlined: what is read\nnumbers: 16-byte unit of the 128-byte line", fontsize=7,
                ha="right", va="bottom", color=plots.GREY)
    left = 0.4
    for swizzle, box_columns in wide.items():
        axes = figure.add_axes((left / width, 0.78 / height, max(box_columns * inch, 0.1) / width, high / height))
        _paint(axes, inch, high / rows, rows, box_columns, itemsize, swizzle, access)
        left += box_columns * inch + gap
    return figure


def _paint(axes, column_inches: float, row_inches: float, rows, columns, itemsize, swizzle, access) -> None:
    where, per_unit = addresses(rows, columns, itemsize, swizzle), UNIT // itemsize
    axes.imshow(where // WORD % BANKS, cmap=SHADES, vmin=0, vmax=BANKS - 1, aspect="auto", interpolation="nearest")
    if row_inches >= 0.115 and column_inches * per_unit >= 0.1:
        for row in range(rows):
            for column in range(0, columns, per_unit):
                unit = where[row, column] % LINE // UNIT
                axes.text(column + (per_unit - 1) / 2, row, str(unit), fontsize=7, ha="center", va="center_baseline",
                          color="white" if unit < 5 else "black")
    lanes, count = elements_read(rows, columns, itemsize, access)
    for row, column in lanes:
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), count, 1, fill=False, edgecolor=READ, clip_on=False,
                                 linewidth=1.6 if row_inches > 0.06 else 0.8))
    axes.set(xticks=sorted({0, columns - 1}), yticks=sorted({0, rows - 1}))
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    ways = {name: conflicts(rows, columns, itemsize, name, access) for name in (swizzle, "none")}
    cost = f"{ways[swizzle]}-way conflict" if ways[swizzle] > 1 else "no conflict"
    without = f"\n({ways['none']}-way without)" if swizzle != "none" else ""
    axes.set_title(f"swizzle {swizzle}\n{columns * itemsize} B per row\n{cost}{without}", fontsize=7.5, loc="left",
                   linespacing=1.2)


# ---- the box on the tensor


def draw_box(extents: Sequence[int], corner: Sequence[int], box: Sequence[int], itemsize: int) -> plots.Picture:
    """Draw a box on its tensor, all (rows, columns) in elements; the part outside is hatched, and filled with zero.

    Raises ValueError for a corner within a unit of 16 bytes.
    """
    (rows, columns), (y, x), (high, wide) = extents, corner, box
    check_corner(x, itemsize)
    inner_x, inner_y = max(0, x), max(0, y)
    inner_wide, inner_high = max(0, min(columns, x + wide) - inner_x), max(0, min(rows, y + high) - inner_y)
    total = high * wide * itemsize
    outside = total - inner_high * inner_wide * itemsize
    title = ("All of the box lies outside" if outside == total else
             f"{outside:,} of {total:,} bytes lie outside" if outside else "The whole box lies on the tensor")
    figure, axes = diagrams.canvas(f"{title}; the barrier expects {total:,}", f"a tensor of {rows} × {columns}, a box "
                                   f"of {high} × {wide} × {itemsize} B at x {x}, y {y}; x a multiple of "
                                   f"{UNIT // itemsize} (16 B); outside is zero", plots.SIZE[0], 2.5)
    left, right, top, low = min(0, x), max(columns, x + wide), min(0, y), max(rows, y + high)
    scale = min(4.6 / (right - left), 1.55 / (low - top))
    origin_x, origin_y = (plots.SIZE[0] - scale * (right - left)) / 2 - left * scale, 2.05 + top * scale

    def place(x, y, wide, high):
        return origin_x + x * scale, origin_y - (y + high) * scale, wide * scale, high * scale

    diagrams.box(axes, *place(0, 0, columns, rows), diagrams.lighten(BLUE, 0.25))
    diagrams.box(axes, *place(x, y, wide, high), **OUTSIDE)
    diagrams.box(axes, *place(inner_x, inner_y, inner_wide, inner_high), diagrams.lighten(GREEN, 0.7))
    diagrams.box(axes, *place(0, 0, columns, rows), edge="black", linewidth=1.2)
    diagrams.box(axes, *place(x, y, wide, high), edge=GREEN, linewidth=1.5)
    return figure


# ---- the widget


@functools.lru_cache(100)  # pictures with many numbers are slow to draw, and most changes leave one of the two
def _draw_png(draw, *arguments) -> bytes:
    return draw(*arguments)._repr_png_()


def explorer() -> widgets.VBox:
    """Return menus, with the box in shared memory and the box on its tensor beneath.

    A sentence replaces the pictures if no tensor map describes the box, or if no box may start at the corner. All
    settings stay.
    """
    def menu(kind, description, width="190px", **settings):
        return kind(description=description, style={"description_width": "90px"}, layout={"width": width}, **settings)

    def number(description, value, low, high):
        return menu(widgets.BoundedIntText, description, value=value, min=low, max=high)

    extent = {"width": "320px", "min": 1, "max": 264, "value": 32, "continuous_update": False}
    x = number("box at x", 80, -512, 4608)
    menus = [
        menu(widgets.Dropdown, "bytes each", options=(1, 2, 4, 8), value=4),
        menu(widgets.Dropdown, "swizzle", options=list(tensor_map.SWIZZLES)),
        menu(widgets.Dropdown, "read of a", options=("row", "column", "matrix"), value="column"),
        menu(widgets.IntSlider, "box rows", **extent), menu(widgets.IntSlider, "box columns", **extent),
        number("tensor rows", 48, 1, 4096), number("columns", 96, 1, 4096), x, number("y", -8, -512, 4608)]
    pictures = [widgets.Image(layout={"max_width": "600px", "object_fit": "contain"}) for _ in range(2)]
    problem = widgets.HTML()

    def update(change=None) -> None:
        itemsize, swizzle, access, rows, columns, *extents, left, top = [menu.value for menu in menus]
        x.step = UNIT // itemsize  # for the arrows; a typed number stays
        try:
            tensor_map.check_describable(extents, (extents[1], 1), itemsize, 0, (rows, columns), swizzle=swizzle)
            drawn = (_draw_png(draw, rows, columns, itemsize, access, (swizzle,)),
                     _draw_png(draw_box, tuple(extents), (top, left), (rows, columns), itemsize))
        except ValueError as error:
            problem.value, drawn = f"<p style='font-size: 16px'>{html.escape(str(error))}</p>", ()
        else:
            problem.value = ""
            for picture, png in zip(pictures, drawn):
                picture.value = png
        for picture in pictures:
            picture.layout.display = "flex" if drawn else "none"

    for each in menus:
        each.observe(update, "value")
    update()
    rows = menus[:3], menus[3:5], menus[5:], pictures
    boxes = [widgets.HBox(row, layout={"flex_flow": "row wrap", "align_items": "flex-start"}) for row in rows]
    return widgets.VBox([*boxes[:3], problem, boxes[3]])
