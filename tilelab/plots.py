"""The course's pictures: one style, one colour an implementation. Every function returns a Picture.

`rows` are those of results/; `source` says where they come from (Record.label()); `title` states the finding. A `label`
(or x, y, mark) is a key of the rows or a function of one. A row that did not run stays in the picture with its reason.
"""

from __future__ import annotations

import io
import textwrap
import zlib
from collections.abc import Callable, Sequence

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from tilelab import device

SIZE = (5.5, 3.2)
# Okabe and Ito's palette: told apart with any colour vision. The course's best kernel is its persistent one.
COLOURS = {"cuBLAS": "#000000", "torch": "#777777", "conservative": "#D55E00", "proposed": "#E69F00", "best": "#0072B2",
           "course": "#0072B2", "persistent": "#0072B2", "plain": "#CC79A7", "predicted": "#009E73",
           "torch copy_": "#777777", "torch add": "#777777", "torch copy": "#777777", "torch index_select": "#777777",
           "host": "#0072B2", "device": "#009E73", "pointers": "#E69F00", "loads": "#D55E00",
           "cp_async": "#E69F00", "bulk_single": "#88CCEE", "bulk_batch": "#0072B2", "bulk_ring": "#009E73",
           "search_a_thread": "#661100", "lane0_search": "#D55E00", "ballot_search": "#E69F00",
           "shared_search": "#88CCEE", "vectors": "#332288", "bulk_rows": "#009E73", "cuDNN": "#000000",
           "eager": "#777777", "flash": "#777777", "efficient": "#777777", "roles": "#88CCEE", "overlap": "#117733",
           "ping-pong": "#009E73"}
# What ch14_compiled asks of torch.
MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "persistent-tma", "tma-only", "unfused", "math",
         "unfused-default", "flex", "flex-tma", "flex-max-autotune")
COLOURS |= dict.fromkeys(MODES, COLOURS["torch"])
OTHERS = ("#56B4E9", "#882255", "#999933", "#44AA99", "#6A51A3", "#8C510A")  # of none of the above
GREY = "#666666"
UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s", "us": "µs"}
Key = str | Callable[[dict], object]


class Picture(Figure):
    """A matplotlib Figure that a notebook shows once whatever its backend is, and that pyplot does not keep alive."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def colour(name: str) -> str:
    """The colour of an implementation, the same in every picture."""
    return COLOURS.get(name) or OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def new_figure(rows, title: str, source: str, height: float = SIZE[1], layout: str = "constrained"):
    if not rows:
        raise ValueError("there is nothing to draw: the list of rows is empty.")
    figure = Picture(figsize=(SIZE[0], height), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.suptitle(_plain(textwrap.fill(title, 70)), fontsize=9, x=0.01, ha="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if source:
        figure.supxlabel(_plain(textwrap.fill(source, 100)), fontsize=7, color=GREY, x=0.99, ha="right")
    return figure, axes


def _numbers(*sides) -> None:
    """Logarithmic axes with plain numbers, at 1, 2 and 5 where they span less than three decades."""
    for side in sides:
        low, high = side.get_view_interval()
        side.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,)))
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter(NullFormatter())


def _plain(text: object) -> str:
    return str(text).replace("$", r"\$")  # a label is text, not mathematics


def _of(row: dict, key: Key) -> object:
    return row[key] if isinstance(key, str) else key(row)


def _ran(row: dict, value: str) -> bool:
    return row.get("status", "ok") == "ok" and row.get(value) is not None


def _reason(row: dict, width: int = 56, lines: int = 2) -> str:
    """Why it did not run, shortened."""
    text = row.get("reason") or row.get("status", "not measured")
    return _plain(textwrap.fill(text, width, max_lines=lines, placeholder=" …"))


def _steps(axes, rows, label: Key) -> None:
    """Rows from top to bottom, each with its label."""
    axes.set_yticks(range(len(rows))[::-1], [_plain(_of(row, label)) for row in rows], fontsize=7.5)
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _upright(axes, x: float, text: str, style: str, tone: str, left: bool) -> None:
    """A vertical line labelled above the axes, on its left or right."""
    axes.axvline(x, color=tone, linestyle=style, linewidth=1, zorder=1)
    axes.annotate(_plain(text), (x, 1), (-2 if left else 2, 1), xycoords=("data", "axes fraction"), fontsize=7,
                  textcoords="offset points", ha="right" if left else "left", va="bottom", color=tone)


_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps lines out of a text


def ratios(rows: Sequence[dict], *, label: Key, title: str, source: str, peer: str = "cuBLAS",
           floor: float | None = None) -> Picture:
    """Speed against the peer, one line a row: right of 1 ours is faster. `floor` is the least that is asked for."""
    figure, axes = new_figure(rows, title, source, height=1.2 + 0.21 * len(rows))
    _upright(axes, 1, peer, "-", colour(peer), left=False)
    if floor is not None:
        _upright(axes, floor, f"floor {floor:g}", "--", GREY, left=floor <= 1)
    seen = [row["ratio"] for row in rows if _ran(row, "ratio")] + [1, floor or 1]
    digits = 3 if max(seen) - min(seen) < 0.1 else 2
    for y, row in zip(range(len(rows))[::-1], rows):
        if not _ran(row, "ratio"):
            axes.text(0.01, y, _reason(row, 48, 1), transform=axes.get_yaxis_transform(), va="center", fontsize=7,
                      color=GREY, bbox=_BEHIND)
            continue
        ratio, tone = row["ratio"], COLOURS.get(row.get("name"), COLOURS["course"])
        axes.plot([1, ratio], [y, y], color=tone, linewidth=2)
        axes.plot(ratio, y, "o", color=tone, markersize=5)
        axes.annotate(f"{ratio:.{digits}f}", (ratio, y), (6 if ratio >= 1 else -6, 0), textcoords="offset points",
                      ha="left" if ratio >= 1 else "right", va="center", fontsize=7.5, bbox=_BEHIND)
    room = 0.17 * (max(seen) - min(seen) or 1)
    low, high = min(seen) - 2 * room, max(seen) + room  # a figure stands left of its point, and may not touch a name
    axes.set_xlim(low, high)
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)  # few: long names leave little room
    axes.set_xticks([tick for tick in ticks if max(low, 0) <= tick <= high])
    _steps(axes, rows, label)
    axes.set_xlabel(_plain(f"speed, × {peer}"), fontsize=8)
    return figure


def ladder(rows: Sequence[dict], *, label: Key, title: str, source: str, value: str = "tflops",
           unit: str | None = None, ceiling: float | None = None, ceiling_label: str = "") -> Picture:
    """One bar a step, in the order given; a row that did not run, or was wrong, is an outline with its reason."""
    figure, axes = new_figure(rows, title, source, height=1.3 + 0.27 * len(rows))
    top = max([row[value] for row in rows if _ran(row, value)] + [ceiling or 0]) or 1
    for y, row in zip(range(len(rows))[::-1], rows):
        if _ran(row, value):
            axes.barh(y, row[value], color=colour(row.get("name", "course")), height=0.7)
            text = f"{row[value]:,.0f}" if row[value] >= 100 else f"{row[value]:.3g}"
            end = ceiling if ceiling and 0 <= ceiling - row[value] < 0.11 * top else row[value]
            axes.text(end + top * 0.012, y, text, va="center", fontsize=7.5, bbox=_BEHIND)
        else:
            axes.barh(y, top * 0.02, fill=False, edgecolor=GREY, hatch="////", height=0.7)
            axes.text(top * 0.03, y, _reason(row), va="center", fontsize=7, color=GREY, linespacing=1, bbox=_BEHIND)
    if ceiling:
        _upright(axes, ceiling, f"{ceiling_label} {ceiling:,.4g}".strip(), "--", colour("cuBLAS"), left=True)
    axes.set_xlim(0, top * 1.1)
    _steps(axes, rows, label)
    axes.set_xlabel(_plain(unit or UNITS.get(value, value)), fontsize=8)
    return figure


def heat_map(rows: Sequence[dict], x: Key, y: Key, value: str, *, title: str, source: str, fmt: str = "{:.2f}",
             mark: Callable[[dict], str] = lambda row: "x", x_label: str = "", y_label: str = "") -> Picture:
    """`value` over `x` and `y`; a cell that did not run is grey and holds `mark(row)`, one that nobody tried is white.

    ValueError when two rows fall in one cell: choose between them first.
    """
    columns, lines = (sorted({_of(row, key) for row in rows}) for key in (x, y))
    figure, axes = new_figure(rows, title, source, height=max(SIZE[1], 1.2 + 0.3 * len(lines)))
    cells = {(lines.index(_of(row, y)), columns.index(_of(row, x))): row for row in rows}
    if len(cells) < len(rows):
        raise ValueError(f"a cell holds one row, and here {len(rows)} rows fall in {len(cells)}: choose one a cell.")
    grid = numpy.ma.masked_all((len(lines), len(columns)))
    for cell, row in cells.items():
        if _ran(row, value):
            grid[cell] = row[value]
    texts = {cell: fmt.format(row[value]) if _ran(row, value) else mark(row) for cell, row in cells.items()}
    size = max(7, min(12, 400 / len(columns) / max(map(len, texts.values()))))
    shades = axes.imshow(grid, cmap="cividis", aspect="auto", origin="lower")
    for (i, j), text in texts.items():
        known = _ran(cells[i, j], value)
        if not known:
            axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color="#dddddd"))
        dark = known and numpy.dot(shades.cmap(shades.norm(grid[i, j]))[:3], (0.3, 0.59, 0.11)) < 0.5
        axes.text(j, i, _plain(text), ha="center", va="center", fontsize=size, color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), [_plain(column) for column in columns])
    axes.set_yticks(range(len(lines)), [_plain(line) for line in lines])
    axes.set_xlabel(_plain(x_label or (x if isinstance(x, str) else "")), fontsize=8)
    axes.set_ylabel(_plain(y_label or (y if isinstance(y, str) else "")), fontsize=8)
    return figure


def _verdict(row: dict) -> tuple[str, str]:
    """Colour and words of one build."""
    if row.get("status", "ok") != "ok":
        reason = row.get("reason", "")
        causes = {"register": ("#D55E00", "registers"), "shared memory": ("#E69F00", "shared\nmemory"),
                  "tensor memory": ("#E69F00", "tensor\nmemory"), "": ("#bbbbbb", row["status"])}
        return next(verdict for cause, verdict in causes.items() if cause in reason)
    if row["unit"] != "mma.sync":
        return "#0072B2", f"runs:\n{row['unit']}"
    return "#56B4E9", "mma.sync,\nnot tcgen05" if device.target_limits(row["target"]).has_tcgen05 else "runs:\nmma.sync"


def build_table(rows: Sequence[dict], *, title: str, source: str) -> Picture:
    """Configurations by targets: the tensor-core family that a build uses, or what it has too little of.

    Rows hold name, target, status, reason and unit (wgmma, tcgen05 or mma.sync), and perhaps the set they are of.
    """
    names = list(dict.fromkeys((row.get("set", ""), row["name"]) for row in rows))
    targets = list(dict.fromkeys(row["target"] for row in rows))
    figure, axes = new_figure(rows, title, source, height=0.9 + 0.32 * len(names))
    for row in rows:
        x, y = targets.index(row["target"]), len(names) - 1 - names.index((row.get("set", ""), row["name"]))
        tone, words = _verdict(row)
        axes.add_patch(Rectangle((x, y), 0.97, 0.93, color=tone))
        axes.text(x + 0.485, y + 0.45, _plain(words), ha="center", va="center", fontsize=7, linespacing=0.95,
                  color="white" if tone in ("#0072B2", "#D55E00") else "black")
    axes.set_xlim(0, len(targets))
    axes.set_ylim(0, len(names))
    axes.set_xticks([x + 0.485 for x in range(len(targets))], targets)
    labels = [_plain(f"{which}  {name}".strip()) for which, name in reversed(names)]
    axes.set_yticks([y + 0.45 for y in range(len(names))], labels, fontsize=7)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def _label_points(axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) beside its point, clear of points, lines and texts where there is room."""
    figure = axes.figure
    figure.draw_without_rendering()  # places the axes, so that pixels mean something
    taken = [text.get_window_extent() for text in axes.texts]
    for line in axes.lines:
        x, y = axes.transData.transform(line.get_xydata()).T
        half = 9
        if line.get_linestyle() != "None":  # a line is many small boxes
            x, y = (numpy.interp(numpy.linspace(0, len(x) - 1, 200), range(len(x)), side) for side in (x, y))
            half = 4
        taken += [Bbox.from_extents(at - half, up - half, at + half, up + half) for at, up in zip(x, y)]
    shifts = [numpy.array((right * far, up * (far + 3))) for far in (6, 14, 24, 34, 44) for right, up in
              ((1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (1, 1), (-1, 1), (0, 1))]
    for x, y, text, tone in sorted(labels):
        dark = tuple(0.7 * part for part in to_rgb(tone))
        note = axes.annotate(_plain(text), (x, y), (0, 0), textcoords="offset points", fontsize=7, va="center",
                             color=dark, arrowprops={"arrowstyle": "-", "color": dark, "linewidth": 0.5})
        note.set_in_layout(False)
        note.arrow_patch.set_visible(False)
        size = numpy.array(Text.get_window_extent(note).size)  # without the arrow
        choices = []
        for shift in shifts:
            right = numpy.sign(shift[0])
            centre = axes.transData.transform((x, y)) + shift * figure.dpi / 72 + (right * size[0] / 2, 0)
            box = Bbox([centre - size / 2, centre + size / 2])
            inside = axes.bbox.x0 < box.x0 and axes.bbox.y0 < box.y0 and box.y1 < axes.bbox.y1
            inside = inside and box.x1 < figure.bbox.x1 - 4
            choices.append((box.count_overlaps(taken) + 100 * (not inside), len(choices), right, box))
        _, index, right, box = min(choices)
        taken.append(box)
        note.set(position=shifts[index], ha={0: "center", 1: "left", -1: "right"}[right])
        note.arrow_patch.set_visible(index > 0)


def roofline(rows: Sequence[dict], *, peak_tflops: float, bandwidth_gbps: float, title: str, source: str) -> Picture:
    """Rows (name, intensity in FLOP a byte, tflops) under the two measured ceilings, both axes logarithmic."""
    figure, axes = new_figure(rows, title, source)
    ridge = peak_tflops * 1e3 / bandwidth_gbps
    left = min([row["intensity"] for row in rows] + [ridge / 4]) / 2
    right = max([row["intensity"] for row in rows] + [ridge * 4]) * 2
    axes.set(xscale="log", yscale="log")
    axes.plot([left, ridge, right], [left * bandwidth_gbps / 1e3, peak_tflops, peak_tflops], "--", color="black", lw=1)
    axes.text(right, peak_tflops * 1.08, f"{peak_tflops:,.0f} TFLOP/s", fontsize=7, ha="right", va="bottom")
    slope = (left * ridge) ** 0.5  # half way up
    axes.text(slope * 0.9, slope * bandwidth_gbps / 1e3, f"{bandwidth_gbps / 1e3:.2f} TB/s", fontsize=7, ha="right",
              va="bottom")
    lowest = {}
    for row in sorted(rows, key=lambda row: -row["tflops"]):
        axes.plot(row["intensity"], row["tflops"], "o", color=colour(row["name"]), markersize=4.5, alpha=0.85)
        lowest[row["name"]] = (row["intensity"], row["tflops"], row["name"], colour(row["name"]))
    axes.set_ylim(top=peak_tflops * 2)
    _numbers(axes.xaxis, axes.yaxis)
    axes.set_xlabel("operations a byte of memory traffic, FLOP/B", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    _label_points(axes, list(lowest.values()))
    return figure


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 when both put the rows in the same order."""
    import pandas

    return float(pandas.Series(first).rank().corr(pandas.Series(second).rank()))


def scatter_predicted(rows: Sequence[dict], *, title: str, source: str, label: Key | None = None) -> Picture:
    """predicted_ms over ms, both logarithmic, with the diagonal and the rank correlation of the rows that ran."""
    rows = [row for row in rows if _ran(row, "ms") and _ran(row, "predicted_ms")]
    figure, axes = new_figure(rows, title, source)
    measured, predicted = ([row[key] for row in rows] for key in ("ms", "predicted_ms"))
    ends = [min(measured + predicted) / 1.2, max(measured + predicted) * 1.2]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.plot(ends, ends, "--", color="black", linewidth=1)
    axes.plot(measured, predicted, "o", color=colour("predicted"), markersize=4, alpha=0.8)
    if len(set(measured)) > 2 and len(set(predicted)) > 1:  # two points always agree or disagree
        text = f"rank correlation {rank_correlation(measured, predicted):.2f}\n(Spearman, {len(rows)} configurations)"
        axes.text(0.03, 0.97, text, transform=axes.transAxes, fontsize=8, va="top")
    axes.text(0.99, 0.03, "below the line: slower than predicted", transform=axes.transAxes, fontsize=7, ha="right")
    _numbers(axes.xaxis, axes.yaxis)
    axes.set_xlabel("measured, ms", fontsize=8)
    axes.set_ylabel("predicted, ms", fontsize=8)
    if label:
        points = [(row["ms"], row["predicted_ms"], str(_of(row, label)), colour("predicted")) for row in rows]
        _label_points(axes, points)
    return figure
