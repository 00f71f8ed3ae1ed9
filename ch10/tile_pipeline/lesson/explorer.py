"""Explore swizzles: the bank of shared memory that holds each element of a box, and the cost of a warp's read.

    explorer.draw(32, 32, 4, "column", ["128B"])
    explorer.microscope()  # in a notebook: drag a box over a tensor, choose its swizzle and a warp's read

Addresses come from `tilelab.runtime.tensor_map.swizzle_offset`, and wavefronts are counted. Needs no GPU. The view
`tilelab/views/microscope.js` computes the same in the browser; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
from matplotlib import colormaps
from matplotlib.patches import Rectangle

from ch10.tile_pipeline.lesson import map_report
from ch10.tile_pipeline.lesson.banks import BANKS, WORD, count_wavefronts, total_wavefronts, words_read
from tilelab import views
from tilelab.pictures import diagrams, plots
from tilelab.records import results
from tilelab.runtime import device, tensor_map

UNIT, LINE = 16, 128  # bytes that a swizzle moves, and that all banks deliver at once
SHADES = colormaps["viridis"]
DRAWN_ROWS = 32  # a swizzle repeats after eight rows, and a warp reads at most 32
READ = plots.COLOURS["conservative"]  # outlines the elements that a warp reads


def addresses(rows: int, columns: int, itemsize: int, swizzle: str = "none") -> numpy.ndarray:
    """Return the address of each element of a box (rows, columns) that starts at a multiple of 1,024 bytes."""
    # Rows that are narrower than the swizzle begin a swizzle apart and leave gaps, as seen on an H200.
    pitch = max(columns * itemsize, tensor_map.SWIZZLES[swizzle])
    return tensor_map.swizzle_offset(
        numpy.arange(rows)[:, None] * pitch + numpy.arange(columns) * itemsize, swizzle
    )


def elements_read(
    rows: int, columns: int, itemsize: int, access: str, lane_bytes: int = 0, first: tuple[int, int] = (0, 0)
) -> tuple[list[tuple[int, int]], int]:
    """Return the element (row, column) at which each lane starts to read, and how many elements a lane reads.

    Up to 32 lanes read along a row or down a column: one element each, or `lane_bytes`. Up to 8 lanes read a matrix: 16
    bytes of one row per lane, as ldmatrix and stmatrix do. The first lane reads at `first` (row, column). No lane reads
    outside of the box. ValueError where the first lane would not read at a multiple of its bytes.
    """
    count = max(1, (UNIT if access == "matrix" else lane_bytes) // itemsize)
    row, column = first
    if column % count:
        raise ValueError(
            f"a lane that reads {count * itemsize} bytes starts at a multiple of {count} elements; column "
            f"is {column}."
        )
    if access == "row":
        return [(row, column + lane * count) for lane in range(min(32, (columns - column) // count))], count
    lanes = min(8 if access == "matrix" else 32, rows - row) if column + count <= columns else 0
    return [(row + lane, column) for lane in range(lanes)], count


def _reads(
    rows: int,
    columns: int,
    itemsize: int,
    swizzle: str,
    access: str,
    lane_bytes: int = 0,
    first: tuple[int, int] = (0, 0),
) -> tuple[list[int], int]:
    """Return the addresses at which the lanes read a box, and the bytes that each lane reads."""
    lanes, count = elements_read(rows, columns, itemsize, access, lane_bytes, first)
    places = addresses(rows, columns, itemsize, swizzle)
    return [places[lane] for lane in lanes], count * itemsize


def conflicts(*read) -> int:
    """Return how many wavefronts a group of lanes takes for a read as in `_reads`: n for an n-way conflict."""
    return count_wavefronts(*_reads(*read))


def wavefronts(*read) -> int:
    """Return how many wavefronts a whole read as in `_reads` takes."""
    return total_wavefronts(*_reads(*read))


def describe_read(*read) -> str:
    """Return one line about a read as in `_reads`: what, by how many lanes, from how many banks, with what conflict."""
    where, size = _reads(*read)
    groups, ways = words_read(where, size), count_wavefronts(where, size)
    used = len({word % BANKS for words in groups for word in words})
    group = "half" if size == 8 else "quarter"
    return (
        f"{read[4]} of {len(where)} × {size} bytes: {len(where)} lanes touch {used} of {BANKS} banks, "
        + (f"{ways}-way conflict" if ways > 1 else "no conflict")
        + (f" in each of {len(groups)} {group} warps" if len(groups) > 1 else "")
    )


# ---- the box in shared memory


def draw(
    rows: int = 32,
    columns: int = 32,
    itemsize: int = 4,
    access: str = "column",
    swizzles: Sequence[str] = tuple(tensor_map.SWIZZLES),
) -> plots.Picture:
    """Draw a box under each of the swizzles, in the colours of its banks, and outline the elements that a warp reads.

    A box is as wide as its swizzle allows, up to `columns` elements, and its first DRAWN_ROWS rows are drawn. Where
    there is room, each 16-byte unit has its number within its line of 128 bytes. Raises ValueError for a box that no
    tensor map describes.
    """
    wide = {
        swizzle: min(columns, (tensor_map.SWIZZLES[swizzle] or columns * itemsize) // itemsize)
        for swizzle in swizzles
    }
    for swizzle, box_columns in wide.items():
        box = rows, box_columns
        tensor_map.check_describable(box, (box_columns * UNIT, 1), itemsize, 0, box, swizzle=swizzle)
    title = describe_read(rows, wide[swizzles[0]], itemsize, swizzles[0], access)
    if len(swizzles) > 1:
        title = f"wavefronts for a {access}: " + ", ".join(
            f"{conflicts(rows, wide[swizzle], itemsize, swizzle, access)} ({swizzle})" for swizzle in swizzles
        )
    width, gap = (9.6, 0.95) if len(swizzles) > 1 else (plots.SIZE[0], 0)
    inch = min((width - 0.7 - gap * (len(wide) - 1)) / sum(wide.values()), 0.3)
    drawn = min(rows, DRAWN_ROWS)
    high = max(0.13 * drawn, 0.35)
    height = high + 1.68
    figure, axes = diagrams.canvas(title[0].upper() + title[1:], "", width, height)
    axes.remove()
    key = figure.add_axes((0.4 / width, 0.22 / height, 1.9 / width, 0.1 / height))
    key.imshow([range(BANKS)], cmap=SHADES, aspect="auto")
    key.set(yticks=[], xticks=[0, 8, 16, 24, 31])
    key.tick_params(labelsize=7, length=2, pad=1)
    key.set_ylabel("bank", fontsize=7, rotation=0, ha="right", va="center")
    left, has_numbers = 0.4, False
    for swizzle, box_columns in wide.items():
        axes = figure.add_axes(
            (left / width, 0.78 / height, max(box_columns * inch, 0.1) / width, high / height)
        )
        has_numbers |= _paint(axes, inch, drawn, rows, box_columns, itemsize, swizzle, access)
        left += box_columns * inch + gap
    notes = [f"drawn: the first {drawn} of {rows} rows"] * (drawn < rows) + ["outlined: what is read"]
    notes += ["numbers: 16-byte unit of the 128-byte line"] * has_numbers
    figure.text(0.985, 0.12 / height, "\n".join(notes), fontsize=7, ha="right", va="bottom", color=plots.GREY)
    return figure.describe(
        f"{figure.get_suptitle()}. Each box is coloured by the bank of shared memory that holds an "
        "element. A column has one colour without a swizzle, and several colours with a swizzle."
    )


def _paint(axes, column_inches: float, drawn: int, rows, columns, itemsize, swizzle, access) -> bool:
    """Draw the first rows of one box, and return whether its units have numbers."""
    where, per_unit = addresses(drawn, columns, itemsize, swizzle), UNIT // itemsize
    axes.imshow(
        where // WORD % BANKS, cmap=SHADES, vmin=0, vmax=BANKS - 1, aspect="auto", interpolation="nearest"
    )
    has_numbers = column_inches * per_unit >= 0.1
    if has_numbers:
        for row in range(drawn):
            for column in range(0, columns, per_unit):
                unit = where[row, column] % LINE // UNIT
                ink = "white" if unit < 5 else "black"
                diagrams.write(axes, column + (per_unit - 1) / 2, row, str(unit), color=ink)
    lanes, count = elements_read(rows, columns, itemsize, access)
    for row, column in lanes:
        look = {"fill": False, "edgecolor": READ, "clip_on": False, "linewidth": 1.6}
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), count, 1, **look))
    axes.set(xticks=sorted({0, columns - 1}), yticks=sorted({0, drawn - 1}))
    axes.tick_params(labelsize=7, length=2)
    axes.spines[:].set_visible(False)
    ways = {name: conflicts(rows, columns, itemsize, name, access) for name in (swizzle, "none")}
    cost = f"{ways[swizzle]}-way conflict" if ways[swizzle] > 1 else "no conflict"
    without = f"\n({ways['none']}-way without)" if swizzle != "none" else ""
    title = f"swizzle {swizzle}\n{columns * itemsize} B per row\n{cost}{without}"
    axes.set_title(title, fontsize=7.5, loc="left", linespacing=1.2)
    return has_numbers


# ---- the microscope


def microscope(
    dtype: str = "float32",
    shape: Sequence[int] = (48, 96),
    box: Sequence[int] = (32, 32),
    corner: Sequence[int] = (-8, 80),
    swizzle: str = "none",
    access: str = "column",
    lane_bytes: int = 0,
) -> views.View:
    """Return the microscope of a box, which starts with these settings: see tilelab/views/microscope.js.

    `shape`, `box` and `corner` are (rows, columns) in elements, `access` is row, column or matrix, and each lane reads
    `lane_bytes`, or one element. A saved notebook keeps a picture of the box under each swizzle, and a table of the
    wavefronts of each read. Raises ValueError for a box that no tensor map describes.
    """
    (rows, columns), itemsize = box, map_report.DTYPES[dtype].itemsize
    picture = draw(rows, columns, itemsize, access)
    spans = tensor_map.SWIZZLES.items()
    wide = {name: min(columns, (span or columns * itemsize) // itemsize) for name, span in spans}
    table = []
    for kind in ("row", "column", "matrix"):
        counts = {name: wavefronts(rows, wide[name], itemsize, name, kind) for name in wide}
        table.append({"a warp reads": f"a {kind}"} | counts)
    start = {"dtype": dtype, "shape": list(shape), "box": list(box), "corner": list(corner)}
    start |= {"swizzle": swizzle, "access": access, "laneBytes": lane_bytes}
    data = {"swizzles": tensor_map.SWIZZLES, "alignment": map_report.ALIGNMENT, "start": start}
    data["dtypes"] = {
        name: {"bytes": each.itemsize, "floating": each.is_floating_point}
        for name, each in map_report.DTYPES.items()
    }
    data["targets"] = {}
    for target in device.TARGETS:
        gpu = ", ".join(name for name, gpu in device.KNOWN.items() if gpu.target == target)
        limits = device.target_limits(target)
        if limits.has_tma:
            data["targets"][target] = {"smem": limits.smem_per_block, "gpu": gpu}
    caption = f"wavefronts of one read, by swizzle; the box has {rows} rows, and {columns} columns or as many as the "
    said = results.table(table, f"{caption}swizzle allows")
    return views.View("microscope", data, picture=picture, table=said)
