"""Draw the course's charts in one style, with one colour per implementation. Every chart is a `Picture`.

`rows` are the rows of a record, `source` states their origin (Record.label()), and `title` states the finding. `label`
(or x, y, mark) is a key of the rows or a function of one row. A row that did not run stays with its reason.
"""

from __future__ import annotations

import base64
import io
import re
import textwrap
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

SIZE = (5.5, 3.2)
# Okabe and Ito's palette, which can be told apart with any colour vision. The best kernel of a topic is dark blue.
TONES = {
    "#000000": "cuBLAS, cuDNN",
    "#777777": "torch, torch copy_, torch add, torch copy, torch index_select, eager, flash, efficient",
    "#D55E00": "conservative, loads, lane0_search",
    "#E69F00": "proposed, pointers, cp_async, ballot_search",
    "#0072B2": "best, course, persistent, host, bulk_batch",
    "#CC79A7": "plain",
    "#009E73": "predicted, device, bulk_ring, bulk_rows, ping-pong",
    "#88CCEE": "bulk_single, shared_search, roles",
    "#661100": "search_a_thread",
    "#332288": "vectors",
    "#117733": "overlap",
}
# The modes of torch.compile in 11_ch14_compiled.
MODES = "default max-autotune max-autotune-no-cudagraphs persistent-tma tma-only unfused math".split()
MODES += "unfused-default flex flex-tma flex-max-autotune".split()
COLOURS = {name: tone for tone, names in TONES.items() for name in names.split(", ")}
COLOURS |= dict.fromkeys(MODES, "#777777")
OTHERS = ("#56B4E9", "#882255", "#999933", "#44AA99", "#6A51A3", "#8C510A")  # for names that are not above
GREY = "#666666"
Key = str | Callable[[dict], object]


class Picture(Figure):
    """A matplotlib Figure that a notebook shows once with any backend, and that pyplot does not keep alive.

    Its alternative text, for readers who cannot see it, is its title, or what `describe` has been given.
    """

    description = ""

    def describe(self, text: str) -> Picture:
        """Return the picture, with `text` as its alternative text: one or two sentences that say what it shows."""
        self.description = text
        return self

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=2 * self.dpi)  # for screens with small pixels
        return buffer.getvalue()

    def _repr_mimebundle_(self, **_) -> tuple[dict, dict]:
        """Return the picture and its alternative text, which a notebook keeps beside it."""
        title = " ".join(self.get_suptitle().replace("\\$", "$").split())
        png = base64.b64encode(self._repr_png_()).decode()
        width, height = map(round, self.get_size_inches() * self.dpi)
        return {"image/png": png}, {
            "image/png": {"alt": self.description or title, "width": width, "height": height}
        }


def colour(name: str) -> str:
    """Return the colour of an implementation, the same in every picture."""
    return COLOURS.get(name) or OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def new_figure(
    rows: Sequence[dict], title: str, source: str, height: float = SIZE[1], layout: str = "constrained"
) -> tuple[Figure, Axes]:
    """Return a Picture with title and source, `height` inches high, and its axes. ValueError if `rows` is empty."""
    if not rows:
        raise ValueError("there is nothing to draw: the list of rows is empty.")
    figure = Picture(figsize=(SIZE[0], height), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.suptitle(escape_math(textwrap.fill(title, 70)), fontsize=9, x=0.01, ha="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if source:
        figure.supxlabel(escape_math(textwrap.fill(source, 100)), fontsize=7, color=GREY, x=0.99, ha="right")
    return figure, axes


def escape_math(text: object) -> str:
    """Return a text in which matplotlib does not take dollar signs for mathematics."""
    return str(text).replace("$", r"\$")


def _value(row: dict, key: Key) -> object:
    return row[key] if isinstance(key, str) else key(row)


def _by_numbers(value: object) -> object:
    """Return a key that sorts texts by the numbers in them: "15360 × 64" after "2048 × 64"."""
    if not isinstance(value, str):
        return value
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", value.strip())]


def _ran(row: dict, value: str) -> bool:
    return row.get("status", "ok") == "ok" and row.get(value) is not None


def _reason(row: dict, width: int = 56, lines: int = 2) -> str:
    """Return why a row did not run, shortened to fit."""
    text = row.get("reason") or row.get("status", "not measured")
    return textwrap.fill(text, width, max_lines=lines, placeholder=" …")


def write_note(axes: Axes, x: float, y: float, text: str, **more: Any) -> None:
    """Write a small grey text at (x, y), such as the reason why a row has no value; `more` goes to matplotlib."""
    axes.text(x, y, escape_math(text), va="center", fontsize=7, color=GREY, **more)


def legend_above(axes: Axes, *entries: Sequence, x: float = 0, columns: int = 4, **more: Any) -> None:
    """Put the legend in a line above the axes, from `x` on; `entries` and `more` go to matplotlib."""
    look = {"loc": "lower left", "frameon": False, "fontsize": 7.5, "borderaxespad": 0} | more
    axes.legend(*entries, bbox_to_anchor=(x, 1), ncols=columns, **look)


def label_lines(axes: Axes, rows: Sequence[dict], label: Key) -> None:
    """Give each row a line of the chart, from top to bottom, with its label."""
    axes.set_yticks(range(len(rows))[::-1], [escape_math(_value(row, label)) for row in rows], fontsize=7.5)
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _draw_vertical(axes, x: float, text: str, style: str, tone: str, left: bool) -> None:
    """Draw a vertical line with a label above the axes, on its left or right."""
    axes.axvline(x, color=tone, linestyle=style, linewidth=1, zorder=1)
    shift, side = (-2, "right") if left else (2, "left")
    places = {
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
        "ha": side,
        "va": "bottom",
    }
    axes.annotate(escape_math(text), (x, 1), (shift, 1), fontsize=7, color=tone, **places)


def _say_values(rows: Sequence[dict], label: Key, value: str, form: str) -> str:
    """Return the value of each row in words; of more than 16 rows the least and the greatest."""

    def say(row):
        name = " ".join(str(_value(row, label)).split())
        return f"{form.format(row[value])} for {name}" if _ran(row, value) else f"none for {name}"

    ran = sorted((row for row in rows if _ran(row, value)), key=lambda row: row[value])
    if len(rows) <= 16 or not ran:
        return "; ".join(map(say, rows))
    which = "" if len(ran) == len(rows) else " with a value"
    return f"of {len(ran)} rows{which}, the least is {say(ran[0])}, and the greatest {say(ran[-1])}"


_WHITE_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps lines from crossing a text


def ratios(rows: Sequence[dict], *, label: Key, title: str, source: str, peer: str = "cuBLAS") -> Picture:
    """Draw each row's speed relative to the peer; right of 1 it is faster."""
    figure, axes = new_figure(rows, title, source, height=1.2 + 0.21 * len(rows))
    _draw_vertical(axes, 1, peer, "-", colour(peer), left=False)
    seen = [row["ratio"] for row in rows if _ran(row, "ratio")] + [1]
    digits = 3 if max(seen) - min(seen) < 0.1 else 2
    for y, row in zip(range(len(rows))[::-1], rows):
        if not _ran(row, "ratio"):
            write_note(
                axes, 0.01, y, _reason(row, 48, 1), transform=axes.get_yaxis_transform(), bbox=_WHITE_BOX
            )
            continue
        ratio, tone = row["ratio"], COLOURS.get(row.get("name"), COLOURS["course"])
        axes.plot([1, ratio], [y, y], color=tone, linewidth=2)
        axes.plot(ratio, y, "o", color=tone, markersize=5)
        shift, side = (6, "left") if ratio >= 1 else (-6, "right")
        places = {"textcoords": "offset points", "ha": side, "va": "center"}
        axes.annotate(f"{ratio:.{digits}f}", (ratio, y), (shift, 0), fontsize=7.5, bbox=_WHITE_BOX, **places)
    room = 0.17 * (max(seen) - min(seen) or 1)
    low, high = min(seen) - 2 * room, max(seen) + room  # room for a number on the left of its point
    axes.set_xlim(low, high)
    # Few ticks, because long names leave little room.
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    axes.set_xticks([tick for tick in ticks if max(low, 0) <= tick <= high])
    label_lines(axes, rows, label)
    axes.set_xlabel(escape_math(f"speed, × {peer}"), fontsize=8)
    return figure.describe(
        f"{title.rstrip('.')}. Each row has a dot at its speed relative to {peer}, and a bar from 1 "
        f"to the dot: {_say_values(rows, label, 'ratio', f'{{:.{digits}f}}')}."
    )


def heat_map(
    rows: Sequence[dict],
    x: Key,
    y: Key,
    value: str,
    *,
    title: str,
    source: str,
    fmt: str = "{:.2f}",
    mark: Callable[[dict], str] = lambda row: "x",
    x_label: str = "",
    y_label: str = "",
    shade: Callable[[float], float] | None = None,
    centre: float | None = None,
    key: dict[float, str] | None = None,
) -> Picture:
    """Draw `value` over `x` and `y`. A cell whose row did not run is grey and holds `mark(row)`; one without is white.

    `shade` maps a value to its place on the colour scale, from 0 (dark) to 1; by default the scale spans the values.
    With `centre`, for ratios, the scale has two colours, which meet in white at that value, and a key beside the map.
    It is logarithmic, reaches as far as the values, and the first row is on top. Rows and columns are sorted, texts by
    the numbers in them.
    `key` labels places on the scale of `shade`, of which it shows the part between them.
    ValueError when two rows fall in one cell.
    """
    columns, lines = (sorted({_value(row, key) for row in rows}, key=_by_numbers) for key in (x, y))
    figure, axes = new_figure(rows, title, source, height=max(SIZE[1], 1.2 + 0.3 * len(lines)))
    cells = {(lines.index(_value(row, y)), columns.index(_value(row, x))): row for row in rows}
    if len(cells) < len(rows):
        raise ValueError(f"{len(rows)} rows fall in {len(cells)} cells: choose one row per cell.")
    grid = numpy.ma.array(numpy.zeros((len(lines), len(columns))), mask=True)
    for cell, row in cells.items():
        if _ran(row, value):
            grid[cell] = shade(row[value]) if shade else row[value]
    texts = {cell: fmt.format(row[value]) if _ran(row, value) else mark(row) for cell, row in cells.items()}
    # A character is about 0.6 points wide per point of its size. The map has what the lines' labels leave.
    room = 72 * (SIZE[0] - 0.6) - 4.8 * max(len(str(line)) for line in lines)
    size = max(7, min(9 if centre else 12, 1.5 * room / len(columns) / max(map(len, texts.values()))))
    look = {"cmap": "cividis" if centre is None else "PuOr"}
    if shade:
        look |= {"vmin": 0, "vmax": 1}
    elif centre is not None:
        found = [row[value] / centre for row in rows if _ran(row, value)]
        reach = max([1.1, *found, *(1 / each for each in found)])
        look["norm"] = LogNorm(centre / reach, centre * reach)
    shades = axes.imshow(grid, aspect="auto", origin="lower" if centre is None else "upper", **look)
    if key or centre is not None:
        ticks = {} if key else {"format": lambda value, _: fmt.format(value)}
        bar = figure.colorbar(shades, ax=axes, pad=0.02, fraction=0.05, **ticks)
        bar.ax.tick_params(labelsize=7)
        bar.ax.minorticks_off()
        if not shade:
            bar.set_ticks([centre * reach**part for part in (-1, -0.5, 0, 0.5, 1)])
        if key:
            bar.set_ticks([*key], labels=[*key.values()])
            if len(key) > 1:
                bar.ax.set_ylim(min(key), max(key))
    for (i, j), text in texts.items():
        known = _ran(cells[i, j], value)
        if not known:
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color="#dddddd"))
        dark = known and numpy.dot(shades.cmap(shades.norm(grid[i, j]))[:3], (0.3, 0.59, 0.11)) < 0.5
        look = {"color": "white" if dark else "black", "ha": "center", "va": "center"}
        # A word is wider than "0.99".
        axes.text(j, i, escape_math(text), fontsize=size if known else max(7, 0.8 * size), **look)
    axes.set_xticks(range(len(columns)), [escape_math(column) for column in columns])
    axes.set_yticks(range(len(lines)), [escape_math(line) for line in lines])
    axes.set_xlabel(escape_math(x_label or (x if isinstance(x, str) else "")), fontsize=8)
    axes.set_ylabel(escape_math(y_label or (y if isinstance(y, str) else "")), fontsize=8)
    ran = sorted((row for row in rows if _ran(row, value)), key=lambda row: row[value])
    least, greatest = (
        [
            f"{fmt.format(row[value])} at {' '.join(str(_value(row, x)).split())}, {_value(row, y)}"
            for row in some
        ]
        for some in (ran[:1], ran[-1:])
    )
    spread = f": the least is {least[0]}, and the greatest {greatest[0]}" if ran else ""
    return figure.describe(
        f"{title.rstrip('.')}. A heat map of {len(rows)} cells, {len(ran)} with a value{spread}."
    )
