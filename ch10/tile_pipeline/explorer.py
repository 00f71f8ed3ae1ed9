"""Swizzles to play with: which bank of shared memory holds what of a box, and what a warp's read of it costs.

    explorer.draw(32, 32, 4, "128B", "column")
    explorer.explorer()  # in a notebook: choose a box, its swizzle and its place on a tensor

A model: addresses are those of `tilelab.tensor_map.swizzle_offset`, costs are counted. Needs no GPU.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Sequence

import ipywidgets as widgets
import numpy
from matplotlib import colormaps
from matplotlib.patches import Rectangle

from ch10.tile_pipeline import figures
from tilelab import plots, tensor_map

BANKS, WORD = 32, 4  # of shared memory, a word of 4 bytes each
LANES = 32  # of a warp
UNIT, LINE = 16, 128  # bytes: what a swizzle moves, and what all banks give at once
ITEMSIZES = (1, 2, 4, 8)
ACCESSES = ("row", "column", "matrix")
SHADES = colormaps["viridis"]
READ = plots.COLOURS["conservative"]  # outlines what a warp reads


def _places(rows: int, columns: int, itemsize: int, swizzle: str) -> numpy.ndarray:
    """The byte of shared memory at which each element begins; (rows, columns)."""
    if itemsize not in ITEMSIZES:
        raise ValueError(f"an element has {', '.join(map(str, ITEMSIZES))} bytes; here it has {itemsize}.")
    if min(rows, columns) < 1:
        raise ValueError(f"a box has a row and a column at least; here it is {(rows, columns)}.")
    if swizzle not in tensor_map.SWIZZLES:
        raise ValueError(f"swizzle is one of {', '.join(tensor_map.SWIZZLES)}; here it is {swizzle!r}.")
    # Rows narrower than the swizzle begin that far apart, and leave gaps: seen on the H200.
    pitch = max(columns * itemsize, tensor_map.SWIZZLES[swizzle])
    return tensor_map.swizzle_offset(numpy.arange(rows)[:, None] * pitch + numpy.arange(columns) * itemsize, swizzle)


def banks(rows: int, columns: int, itemsize: int, swizzle: str = "none") -> numpy.ndarray:
    """The first bank, 0 to 31, of each element of a box; integers of shape (rows, columns).

    Rows lie one after the other from a multiple of 1,024 bytes on; narrower than the swizzle they begin a swizzle
    apart. Rows wider than it, which no tensor map describes, are shuffled by the same rule. ValueError for what has no
    address.
    """
    return _places(rows, columns, itemsize, swizzle) // WORD % BANKS


def accessed(rows: int, columns: int, itemsize: int, access: str) -> list[list[tuple[int, int]]]:
    """The elements (row, column) that each lane reads, from the box's first on.

    row, column: a lane reads one element, up to 32 lanes. matrix: up to 8 lanes, as of ldmatrix and stmatrix, give the
    address of 16 bytes, one lane a row. ValueError for another access, and for a matrix in narrower rows.
    """
    if access == "row":
        return [[(0, lane)] for lane in range(min(LANES, columns))]
    if access == "column":
        return [[(lane, 0)] for lane in range(min(LANES, rows))]
    if access != "matrix":
        raise ValueError(f"access is one of {', '.join(ACCESSES)}; here it is {access!r}.")
    if columns * itemsize < UNIT:
        raise ValueError(f"a row of a matrix has 16 bytes; a row of this box has {columns * itemsize}.")
    return [[(lane, column) for column in range(UNIT // itemsize)] for lane in range(min(8, rows))]


def _reads(rows, columns, itemsize, swizzle, access) -> list[set[int]]:
    """The words that go together: lanes of 4 bytes all at once, of 8 by half warps, of 16 by quarter warps."""
    places = _places(rows, columns, itemsize, swizzle)
    lanes = [{(int(places[cell]) + byte) // WORD for cell in cells for byte in range(0, itemsize, min(WORD, itemsize))}
             for cells in accessed(rows, columns, itemsize, access)]
    together = LANES * WORD // max(WORD, UNIT if access == "matrix" else itemsize)
    return [set.union(*lanes[begin:begin + together]) for begin in range(0, len(lanes), together)]


def conflicts(rows: int, columns: int, itemsize: int, swizzle: str, access: str) -> int:
    """How many wavefronts each group of lanes that goes together takes: 1 is none, n an n-way conflict.

    Different words of one bank come one a wavefront; a word comes once for all lanes that read it. ValueError as
    `banks` and `accessed` do. Source: CUDA C++ Programming Guide, "Shared Memory".
    """
    return max(int(numpy.bincount([word % BANKS for word in words]).max())
               for words in _reads(rows, columns, itemsize, swizzle, access))


def finding(rows: int, columns: int, itemsize: int, swizzle: str, access: str) -> str:
    """One line: what is read, by how many lanes, from how many banks, and the conflict."""
    groups, ways = _reads(rows, columns, itemsize, swizzle, access), conflicts(rows, columns, itemsize, swizzle, access)
    lanes = len(accessed(rows, columns, itemsize, access))
    used = len({word % BANKS for words in groups for word in words})
    what = {"row": f"a row of {columns}", "column": f"a column of {_count(rows, 'row')}",
            "matrix": f"a matrix of {_count(lanes, 'row')} × 16 bytes"}[access]
    cost = f"{ways}-way conflict" if ways > 1 else "no conflict"
    return (f"{what}: {_count(lanes, 'lane')} in {_count(used, 'bank')}, {cost}"
            + (f" in each of {len(groups)} half warps" if len(groups) > 1 else ""))


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


def _check(rows, columns, itemsize, swizzle) -> None:
    """ValueError for a box that no tensor map describes."""
    pitch = -(-columns * itemsize // UNIT) * UNIT // itemsize
    tensor_map.check_describable((rows, columns), (pitch, 1), itemsize, 0, (rows, columns), swizzle=swizzle)


def _paint(axes, rows, columns, itemsize, swizzle, access) -> str:
    """The box's elements in axes whose place is fixed; what the numbers in it are."""
    places = _places(rows, columns, itemsize, swizzle)
    of_banks = places // WORD % BANKS
    axes.imshow(of_banks, cmap=SHADES, vmin=0, vmax=BANKS - 1, aspect="auto", interpolation="nearest")
    share, (width, height) = axes.get_position(), axes.figure.get_size_inches()
    wide, high = share.width * width / columns, share.height * height / rows
    each = UNIT // itemsize  # elements of a unit
    said = ""
    if high >= 0.115 and wide >= 0.145:
        said, across, texts = "bank", 1, of_banks
    elif high >= 0.115 and wide * each >= 0.1:
        said, across, texts = "16-byte unit of the 128-byte line", each, places % LINE // UNIT
    if said:
        for row in range(rows):
            for column in range(0, columns, across):
                dark = of_banks[row, column] < 20
                axes.text(column + (across - 1) / 2, row, str(texts[row, column]), fontsize=7, ha="center",
                          va="center_baseline", color="white" if dark else "black")
    for cells in accessed(rows, columns, itemsize, access):
        (row, column), span = cells[0], len(cells)
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), span, 1, fill=False, edgecolor=READ, clip_on=False,
                                 linewidth=1.6 if high > 0.06 else 0.8))
    axes.set_xticks([0, columns - 1] if columns > 1 else [0])
    axes.set_yticks([0, rows - 1] if rows > 1 else [0])
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    return said


def _key(figure, x: float, y: float) -> None:
    """The colours of the banks, at x and y inches from the figure's lower left corner."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((x / width, y / height, 1.9 / width, 0.1 / height))
    axes.imshow([range(BANKS)], cmap=SHADES, aspect="auto")
    axes.set_yticks([])
    axes.set_xticks([0, 8, 16, 24, 31])
    axes.tick_params(labelsize=7, length=2, pad=1)
    axes.set_ylabel("bank", fontsize=7, rotation=0, ha="right", va="center")


def _blank(title: str, source: str, width: float, height: float) -> plots.Picture:
    figure, axes = figures.canvas(title, source, width, height)
    axes.remove()
    return figure


def _size(rows: int) -> float:
    """Inches for the rows of a box."""
    return min(max(0.13 * rows, 0.35), 4.2)


def draw(rows: int, columns: int, itemsize: int, swizzle: str = "none", access: str = "column",
         axes=None) -> plots.Picture:
    """A box as rows and columns, each element in the colour of its bank, what a warp reads outlined.

    Numbers are banks, or those of 16-byte units, where there is room for them. With `axes`, whose place is fixed, it is
    drawn there and has no key. ValueError for a box that no tensor map describes, and as `accessed` does.
    """
    _check(rows, columns, itemsize, swizzle)
    title = finding(rows, columns, itemsize, swizzle, access)
    if axes is not None:
        _paint(axes, rows, columns, itemsize, swizzle, access)
        axes.set_title(plots.escape_math(title), fontsize=8, loc="left")
        return axes.figure
    high, wide = _size(rows), min(max(0.16 * columns, 0.5), 5.0)
    height = high + 1.15
    figure = _blank(title[0].upper() + title[1:], "", plots.SIZE[0], height)
    axes = figure.add_axes((0.4 / plots.SIZE[0], 0.78 / height, wide / plots.SIZE[0], high / height))
    said = _paint(axes, rows, columns, itemsize, swizzle, access)
    _key(figure, 0.4, 0.22)
    words = [f"numbers: {said}"] if said else []
    words.append(f"swizzle {swizzle}, {columns} × {itemsize} B a row; outlined: what is read")
    figure.text(0.985, 0.12 / height, "\n".join(words), fontsize=7, ha="right", va="bottom", color=plots.GREY)
    return figure


def draw_all(rows: int = 32, columns: int = 32, itemsize: int = 4, access: str = "column") -> plots.Picture:
    """Four boxes side by side, one a swizzle, each as wide as its swizzle allows and at most `columns` elements."""
    boxes = {swizzle: min(columns, span // itemsize) if span else columns
             for swizzle, span in tensor_map.SWIZZLES.items()}
    for swizzle, wide in boxes.items():
        _check(rows, wide, itemsize, swizzle)
    ways = {swizzle: conflicts(rows, wide, itemsize, swizzle, access) for swizzle, wide in boxes.items()}
    high, width, gap = _size(rows), 9.6, 0.95
    height = high + 1.68
    title = (f"A {access}, rows of {columns * itemsize} bytes: {ways['none']}-way without a swizzle, "
             f"{ways['128B']}-way with 128B")
    figure = _blank(title, "", width, height)
    inch = min((width - 0.7 - 3 * gap) / sum(boxes.values()), 0.3)
    x, said = 0.4, set()
    for swizzle, wide in boxes.items():
        axes = figure.add_axes((x / width, 0.78 / height, max(wide * inch, 0.1) / width, high / height))
        said.add(_paint(axes, rows, wide, itemsize, swizzle, access))
        without = conflicts(rows, wide, itemsize, "none", access)
        text = f"swizzle {swizzle}\n{wide * itemsize} B a row\n" + (
            f"{ways[swizzle]}-way conflict" if ways[swizzle] > 1 else "no conflict")
        text += f"\n({without}-way without)" if swizzle != "none" else ""
        axes.set_title(text, fontsize=7.5, loc="left", linespacing=1.2)
        x += wide * inch + gap
    _key(figure, 0.4, 0.22)
    words = " or ".join(sorted(said - {""}))
    figure.text(0.985, 0.12 / height, (f"numbers: {words}\n" if words else "") + "outlined: what is read; each "
                "box is as wide as its swizzle allows", fontsize=7, ha="right", va="bottom", color=plots.GREY)
    return figure


# ---- the box on the tensor

def outside(extents: Sequence[int], corner: Sequence[int], box: Sequence[int]) -> int:
    """How many elements of a box (rows, columns) at corner (row, column) lie outside of a tensor (rows, columns)."""
    inside = [max(0, min(extent, at + size) - max(0, at)) for extent, at, size in zip(extents, corner, box)]
    return box[0] * box[1] - inside[0] * inside[1]


def check_corner(column: int, itemsize: int) -> None:
    """ValueError, in the words of `tile_dump.dump_box`, for a box that starts within a unit of 16 bytes."""
    if column * itemsize % UNIT:
        raise ValueError(f"a box starts at a multiple of 16 bytes of its row ({UNIT // itemsize} elements), or the "
                         f"load is an illegal instruction; here at column {column}.")


def draw_box(extents: Sequence[int], corner: Sequence[int], box: Sequence[int], itemsize: int) -> plots.Picture:
    """A box on its tensor, all (rows, columns) in elements; what lies outside is hatched, and filled with zero.

    ValueError as `check_corner`.
    """
    (rows, columns), (y, x), (high, wide) = extents, corner, box
    check_corner(x, itemsize)
    out = outside(extents, corner, box) * itemsize
    total = high * wide * itemsize
    title = "All of the box lies outside" if out == total else f"{out:,} of {total:,} bytes lie outside" if out else (
        "The whole box lies on the tensor")
    figure, axes = figures.canvas(f"{title}; the barrier expects {total:,}", f"a tensor of {rows} × {columns}, a box "
                                   f"of {high} × {wide} × {itemsize} B at x {x}, y {y}; x a multiple of "
                                   f"{UNIT // itemsize} (16 B); outside is zero",
                                   plots.SIZE[0], 2.5)
    left, right, top, low = min(0, x), max(columns, x + wide), min(0, y), max(rows, y + high)
    scale = min(4.6 / (right - left), 1.55 / (low - top))
    ox, oy = (plots.SIZE[0] - scale * (right - left)) / 2 - left * scale, 2.05 + top * scale

    def place(x, y, wide, high):
        return ox + x * scale, oy - (y + high) * scale, wide * scale, high * scale

    figures.box(axes, *place(0, 0, columns, rows), figures.light(figures.BLUE, 0.25))
    figures.hatched(axes, *place(x, y, wide, high), figures.GREEN)
    ix, iy = max(0, x), max(0, y)
    iw, ih = min(columns, x + wide) - ix, min(rows, y + high) - iy
    if iw > 0 and ih > 0:
        figures.box(axes, *place(ix, iy, iw, ih), figures.light(figures.GREEN, 0.7))
    figures.box(axes, *place(0, 0, columns, rows), edge="black", linewidth=1.2)
    figures.box(axes, *place(x, y, wide, high), edge=figures.GREEN, linewidth=1.5)
    return figure


# ---- the widget

@functools.lru_cache(100)
def _png(draw, *arguments) -> bytes:
    """A thousand numbered cells are slow to draw, and most changes leave one of the two pictures as it is."""
    return draw(*arguments)._repr_png_()


def _number(text: str, value: int, low: int, high: int) -> widgets.BoundedIntText:
    return widgets.BoundedIntText(value=value, min=low, max=high, description=text, layout={"width": "190px"},
                                  style={"description_width": "90px"})


class Explorer:
    """The explorer's widgets: `menus` by name, `bank_picture` and `tensor_picture` (PNG), `problem`; `box` holds all.

    A cell that ends with it shows it. What no tensor map describes, and a corner where no box may start, is told in
    one sentence in place of the pictures; every setting stays as it is.
    """

    def __init__(self):
        style, layout = {"description_width": "90px"}, {"width": "190px"}
        slider = {"style": style, "layout": {"width": "320px"}, "continuous_update": False, "min": 1, "max": 264}
        self.menus = {
            "itemsize": widgets.Dropdown(options=[(f"{_count(size, 'byte')}", size) for size in ITEMSIZES], value=4,
                                         description="element", style=style, layout=layout),
            "swizzle": widgets.Dropdown(options=list(tensor_map.SWIZZLES), description="swizzle", style=style,
                                        layout=layout),
            "access": widgets.Dropdown(options=list(ACCESSES), value="column", description="read of a",
                                       style=style, layout=layout),
            "rows": widgets.IntSlider(value=32, description="box rows", **slider),
            "columns": widgets.IntSlider(value=32, description="box columns", **slider),
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
            menu.observe(self._changed, "value")
        self._changed()

    def _changed(self, change=None) -> None:
        chosen = {name: menu.value for name, menu in self.menus.items()}
        itemsize, swizzle, access, rows, columns, *extents, x, y = chosen.values()
        try:
            self.menus["x"].step = UNIT // itemsize  # of its arrows; what is typed stays as it is
            tensor_map.check_describable(extents, (extents[1], 1), itemsize, 0, (rows, columns), swizzle=swizzle)
            shown = (_png(draw, rows, columns, itemsize, swizzle, access),
                     _png(draw_box, tuple(extents), (y, x), (rows, columns), itemsize))
        except ValueError as error:
            sentence = html.escape(str(error))
            self.problem.value = f"<p style='font-size: 16px; line-height: 1.4'>{sentence[0].upper()}{sentence[1:]}</p>"
            self.pictures.layout.display = "none"
            return
        self.problem.value = ""
        self.bank_picture.value, self.tensor_picture.value = shown
        self.pictures.layout.display = "flex"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


def explorer() -> Explorer:
    """The explorer, to end a notebook's cell with."""
    return Explorer()
