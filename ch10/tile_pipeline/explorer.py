"""Explore swizzles: the bank of shared memory that holds each element of a box, and the cost of a warp's read.

    explorer.draw(32, 32, 4, "128B", "column")
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

from ch10.tile_pipeline.box_dump import check_corner
from ch10.tile_pipeline.figures import BLUE, GREEN, draw_outside
from tilelab import diagrams, plots, tensor_map

BANKS, WORD = 32, 4  # shared memory has 32 banks of 4-byte words
LANES = 32  # of a warp
UNIT, LINE = 16, 128  # bytes that a swizzle moves, and that all banks deliver at once
ITEMSIZES = (1, 2, 4, 8)
ACCESSES = ("row", "column", "matrix")
SHADES = colormaps["viridis"]
READ = plots.COLOURS["conservative"]  # outlines the elements that a warp reads


def _addresses(rows: int, columns: int, itemsize: int, swizzle: str) -> numpy.ndarray:
    if itemsize not in ITEMSIZES:
        raise ValueError(f"itemsize must be {' or '.join(map(str, ITEMSIZES))}; it is {itemsize}.")
    if min(rows, columns) < 1:
        raise ValueError(f"a box has at least one row and one column; it is {rows} x {columns}.")
    if swizzle not in tensor_map.SWIZZLES:
        raise ValueError(f"unknown swizzle {swizzle!r}; choose {', '.join(tensor_map.SWIZZLES)}.")
    # Rows that are narrower than the swizzle begin a swizzle apart and leave gaps, as seen on an H200.
    pitch = max(columns * itemsize, tensor_map.SWIZZLES[swizzle])
    return tensor_map.swizzle_offset(numpy.arange(rows)[:, None] * pitch + numpy.arange(columns) * itemsize, swizzle)


def banks(rows: int, columns: int, itemsize: int, swizzle: str = "none") -> numpy.ndarray:
    """Return the first bank, 0 to 31, of each element of a box (rows, columns) that starts at a multiple of 1,024."""
    return _addresses(rows, columns, itemsize, swizzle) // WORD % BANKS


def elements_read(rows: int, columns: int, itemsize: int, access: str) -> list[list[tuple[int, int]]]:
    """Return the elements (row, column) that each lane reads, from the first element of the box on.

    For a row or a column, up to 32 lanes read one element each. For a matrix, up to 8 lanes read 16 bytes each, one row
    per lane, as ldmatrix and stmatrix do.
    """
    if access == "row":
        return [[(0, lane)] for lane in range(min(LANES, columns))]
    if access == "column":
        return [[(lane, 0)] for lane in range(min(LANES, rows))]
    if access != "matrix":
        raise ValueError(f"unknown access {access!r}; choose {', '.join(ACCESSES)}.")
    if columns * itemsize < UNIT:
        raise ValueError(f"a row of a matrix has 16 bytes; a row of this box has {columns * itemsize}.")
    return [[(lane, column) for column in range(UNIT // itemsize)] for lane in range(min(8, rows))]


def _words_read(rows, columns, itemsize, swizzle, access) -> list[set[int]]:
    """Return the words of each group of lanes that is served together: 32 lanes of 4 bytes, 16 of 8, 8 of 16."""
    addresses = _addresses(rows, columns, itemsize, swizzle)
    lanes = [{(int(addresses[cell]) + byte) // WORD for cell in cells
              for byte in range(0, itemsize, min(WORD, itemsize))}
             for cells in elements_read(rows, columns, itemsize, access)]
    together = LANES * WORD // max(WORD, UNIT if access == "matrix" else itemsize)
    return [set.union(*lanes[begin:begin + together]) for begin in range(0, len(lanes), together)]


def conflicts(rows: int, columns: int, itemsize: int, swizzle: str, access: str) -> int:
    """Return how many wavefronts a group of lanes takes: 1 without a conflict, n for an n-way conflict.

    Different words of one bank take one wavefront each; a word that several lanes read is delivered once. Source: CUDA
    C++ Programming Guide, "Shared Memory".
    """
    return max(int(numpy.bincount([word % BANKS for word in words]).max())
               for words in _words_read(rows, columns, itemsize, swizzle, access))


def describe_read(rows: int, columns: int, itemsize: int, swizzle: str, access: str) -> str:
    """Return one line that says what is read, by how many lanes, from how many banks, with which conflict."""
    groups, ways = (_words_read(rows, columns, itemsize, swizzle, access),
                    conflicts(rows, columns, itemsize, swizzle, access))
    lanes = len(elements_read(rows, columns, itemsize, access))
    used = len({word % BANKS for words in groups for word in words})
    subject = {"row": f"a row of {columns}", "column": f"a column of {_plural(rows, 'row')}",
               "matrix": f"a matrix of {_plural(lanes, 'row')} × 16 bytes"}[access]
    cost = f"{ways}-way conflict" if ways > 1 else "no conflict"
    return (f"{subject}: {_plural(lanes, 'lane')} in {_plural(used, 'bank')}, {cost}"
            + (f" in each of {len(groups)} half warps" if len(groups) > 1 else ""))


def _plural(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _check_box(rows, columns, itemsize, swizzle) -> None:
    pitch = -(-columns * itemsize // UNIT) * UNIT // itemsize
    tensor_map.check_describable((rows, columns), (pitch, 1), itemsize, 0, (rows, columns), swizzle=swizzle)


def _paint(axes, rows, columns, itemsize, swizzle, access) -> str:
    """Paint the elements of a box, and return what the numbers in them are."""
    addresses = _addresses(rows, columns, itemsize, swizzle)
    bank = addresses // WORD % BANKS
    axes.imshow(bank, cmap=SHADES, vmin=0, vmax=BANKS - 1, aspect="auto", interpolation="nearest")
    share, (width, height) = axes.get_position(), axes.figure.get_size_inches()
    wide, high, per_unit = share.width * width / columns, share.height * height / rows, UNIT // itemsize
    numbers, step, texts = "", 1, bank
    if high >= 0.115 and wide >= 0.145:
        numbers = "bank"
    elif high >= 0.115 and wide * per_unit >= 0.1:
        numbers, step, texts = "16-byte unit of the 128-byte line", per_unit, addresses % LINE // UNIT
    for row in range(rows if numbers else 0):
        for column in range(0, columns, step):
            axes.text(column + (step - 1) / 2, row, str(texts[row, column]), fontsize=7, ha="center",
                      va="center_baseline", color="white" if bank[row, column] < 20 else "black")
    for cells in elements_read(rows, columns, itemsize, access):
        row, column = cells[0]
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), len(cells), 1, fill=False, edgecolor=READ, clip_on=False,
                                 linewidth=1.6 if high > 0.06 else 0.8))
    axes.set_xticks([0, columns - 1] if columns > 1 else [0])
    axes.set_yticks([0, rows - 1] if rows > 1 else [0])
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    return numbers


def _frame(title: str, width: float, height: float, note: str):
    """Return a figure with a title, the colours of the banks and a note below."""
    figure, axes = diagrams.canvas(title, "", width, height)
    axes.remove()
    key = figure.add_axes((0.4 / width, 0.22 / height, 1.9 / width, 0.1 / height))
    key.imshow([range(BANKS)], cmap=SHADES, aspect="auto")
    key.set_yticks([])
    key.set_xticks([0, 8, 16, 24, 31])
    key.tick_params(labelsize=7, length=2, pad=1)
    key.set_ylabel("bank", fontsize=7, rotation=0, ha="right", va="center")
    return figure, lambda numbers: figure.text(
        0.985, 0.12 / height, (f"numbers: {numbers}\n" if numbers else "") + note, fontsize=7, ha="right", va="bottom",
        color=plots.GREY)


def _inches(rows: int) -> float:
    return min(max(0.13 * rows, 0.35), 4.2)


def draw(rows: int, columns: int, itemsize: int, swizzle: str = "none", access: str = "column") -> plots.Picture:
    """Draw a box with each element in the colour of its bank, and outline what a warp reads.

    Numbers are banks, or 16-byte units, where there is room. Raises ValueError for a box that no tensor map describes.
    """
    _check_box(rows, columns, itemsize, swizzle)
    title = describe_read(rows, columns, itemsize, swizzle, access)
    high, wide = _inches(rows), min(max(0.16 * columns, 0.5), 5.0)
    width, height = plots.SIZE[0], high + 1.15
    figure, write_note = _frame(title[0].upper() + title[1:], width, height,
                                f"swizzle {swizzle}, {columns} × {itemsize} B a row; outlined: what is read")
    axes = figure.add_axes((0.4 / width, 0.78 / height, wide / width, high / height))
    write_note(_paint(axes, rows, columns, itemsize, swizzle, access))
    return figure


def draw_all(rows: int = 32, columns: int = 32, itemsize: int = 4, access: str = "column") -> plots.Picture:
    """Draw four boxes side by side, one per swizzle, each as wide as its swizzle allows, up to `columns` elements."""
    boxes = {swizzle: min(columns, span // itemsize) if span else columns
             for swizzle, span in tensor_map.SWIZZLES.items()}
    for swizzle, wide in boxes.items():
        _check_box(rows, wide, itemsize, swizzle)
    ways = {swizzle: conflicts(rows, wide, itemsize, swizzle, access) for swizzle, wide in boxes.items()}
    high, width, gap = _inches(rows), 9.6, 0.95
    height = high + 1.68
    title = (f"A {access}, rows of {columns * itemsize} bytes: {ways['none']}-way without a swizzle, "
             f"{ways['128B']}-way with 128B")
    figure, write_note = _frame(title, width, height,
                                "outlined: what is read; each box is as wide as its swizzle allows")
    inch = min((width - 0.7 - 3 * gap) / sum(boxes.values()), 0.3)
    x, numbers = 0.4, set()
    for swizzle, wide in boxes.items():
        axes = figure.add_axes((x / width, 0.78 / height, max(wide * inch, 0.1) / width, high / height))
        numbers.add(_paint(axes, rows, wide, itemsize, swizzle, access))
        text = f"swizzle {swizzle}\n{wide * itemsize} B a row\n" + (
            f"{ways[swizzle]}-way conflict" if ways[swizzle] > 1 else "no conflict")
        text += f"\n({conflicts(rows, wide, itemsize, 'none', access)}-way without)" if swizzle != "none" else ""
        axes.set_title(text, fontsize=7.5, loc="left", linespacing=1.2)
        x += wide * inch + gap
    write_note(" or ".join(sorted(numbers - {""})))
    return figure


# ---- the box on the tensor

def count_outside(extents: Sequence[int], corner: Sequence[int], box: Sequence[int]) -> int:
    """Return how many elements of a box (rows, columns) at a corner (row, column) lie outside of a tensor."""
    inside = [max(0, min(extent, at + size) - max(0, at)) for extent, at, size in zip(extents, corner, box)]
    return box[0] * box[1] - inside[0] * inside[1]


def draw_box(extents: Sequence[int], corner: Sequence[int], box: Sequence[int], itemsize: int) -> plots.Picture:
    """Draw a box on its tensor, all (rows, columns) in elements; the part outside is hatched, and filled with zero.

    Raises ValueError for a corner within a unit of 16 bytes.
    """
    (rows, columns), (y, x), (high, wide) = extents, corner, box
    check_corner(x, itemsize)
    outside, total = count_outside(extents, corner, box) * itemsize, high * wide * itemsize
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
    draw_outside(axes, *place(x, y, wide, high), GREEN)
    if outside < total:
        inner_x, inner_y = max(0, x), max(0, y)
        inner = place(inner_x, inner_y, min(columns, x + wide) - inner_x, min(rows, y + high) - inner_y)
        diagrams.box(axes, *inner, diagrams.lighten(GREEN, 0.7))
    diagrams.box(axes, *place(0, 0, columns, rows), edge="black", linewidth=1.2)
    diagrams.box(axes, *place(x, y, wide, high), edge=GREEN, linewidth=1.5)
    return figure


# ---- the widget

@functools.lru_cache(100)  # pictures with a thousand numbers are slow to draw, and most changes leave one of the two
def _draw_png(draw, *arguments) -> bytes:
    return draw(*arguments)._repr_png_()


def _number(text: str, value: int, low: int, high: int) -> widgets.BoundedIntText:
    return widgets.BoundedIntText(value=value, min=low, max=high, description=text, layout={"width": "190px"},
                                  style={"description_width": "90px"})


class Explorer:
    """The explorer's widgets: `menus` by name, `bank_picture` and `tensor_picture` (PNG), `problem`; `box` holds all.

    A cell that ends with the object shows the widgets. If no tensor map describes the box, or no box may start at the
    corner, a sentence replaces the pictures. All settings stay.
    """

    def __init__(self):
        def dropdown(text, options, **more):
            return widgets.Dropdown(options=options, description=text, style={"description_width": "90px"},
                                    layout={"width": "190px"}, **more)

        slider = {"style": {"description_width": "90px"}, "layout": {"width": "320px"}, "continuous_update": False,
                  "min": 1, "max": 264, "value": 32}
        self.menus = {
            "itemsize": dropdown("element", [(_plural(size, "byte"), size) for size in ITEMSIZES], value=4),
            "swizzle": dropdown("swizzle", list(tensor_map.SWIZZLES)),
            "access": dropdown("read of a", list(ACCESSES), value="column"),
            "rows": widgets.IntSlider(description="box rows", **slider),
            "columns": widgets.IntSlider(description="box columns", **slider),
            "tensor_rows": _number("tensor rows", 48, 1, 4096), "tensor_columns": _number("columns", 96, 1, 4096),
            "x": _number("box at x", 80, -512, 4608), "y": _number("y", -8, -512, 4608)}
        self.bank_picture, self.tensor_picture = widgets.Image(format="png"), widgets.Image(format="png")
        for picture, width in ((self.bank_picture, "600px"), (self.tensor_picture, "520px")):
            picture.layout.width = picture.layout.max_width = width
            picture.layout.object_fit = "contain"
        self.problem = widgets.HTML()
        self.pictures = widgets.HBox([self.bank_picture, self.tensor_picture],
                                     layout={"flex_flow": "row wrap", "align_items": "flex-start"})
        menus = list(self.menus.values())
        lines = (menus[:3], menus[3:5], menus[5:])
        self.box = widgets.VBox([*(widgets.HBox(line, layout={"flex_flow": "row wrap"}) for line in lines),
                                 self.problem, self.pictures])
        for name, widget in {**self.menus, "problem": self.problem, "banks": self.bank_picture,
                             "tensor": self.tensor_picture}.items():
            widget.add_class(f"explorer-{name.replace('_', '-')}")
        for menu in menus:
            menu.observe(self._update, "value")
        self._update()

    def _update(self, change=None) -> None:
        itemsize, swizzle, access, rows, columns, *extents, x, y = [menu.value for menu in self.menus.values()]
        try:
            self.menus["x"].step = UNIT // itemsize  # for the arrows; a typed number stays
            tensor_map.check_describable(extents, (extents[1], 1), itemsize, 0, (rows, columns), swizzle=swizzle)
            pictures = (_draw_png(draw, rows, columns, itemsize, swizzle, access),
                        _draw_png(draw_box, tuple(extents), (y, x), (rows, columns), itemsize))
        except ValueError as error:
            sentence = html.escape(str(error))
            self.problem.value = f"<p style='font-size: 16px; line-height: 1.4'>{sentence[0].upper()}{sentence[1:]}</p>"
            self.pictures.layout.display = "none"
            return
        self.problem.value = ""
        self.bank_picture.value, self.tensor_picture.value = pictures
        self.pictures.layout.display = "flex"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


def explorer() -> Explorer:
    """Return the explorer, for the last line of a notebook's cell."""
    return Explorer()
