"""The course's pictures: one style, one colour an implementation. Every function returns a Picture.

`rows` are those of results/; `source` says where they come from (Record.label()); `title` states the finding.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

SIZE = (5.5, 3.2)
# Okabe and Ito's palette: told apart with any colour vision
COLOURS = {"cuBLAS": "#000000", "torch": "#000000", "conservative": "#D55E00", "proposed": "#E69F00", "best": "#0072B2",
           "course": "#0072B2", "persistent": "#0072B2", "plain": "#CC79A7", "predicted": "#009E73"}
OTHERS = ("#009E73", "#56B4E9", "#CC79A7", "#D55E00")
GREY = "#666666"


class Picture(Figure):
    """A matplotlib Figure that a notebook shows whatever its backend is, and that pyplot does not keep alive."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def colour(name: str) -> str:
    """The colour of an implementation, the same in every picture."""
    return COLOURS.get(name) or OTHERS[sum(map(ord, name)) % len(OTHERS)]


def _figure(rows, title: str, source: str, height: float = SIZE[1], width: float = SIZE[0]):
    if not rows:
        raise ValueError("there is nothing to draw: the list of rows is empty.")
    figure = Picture(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figure.suptitle(_plain(title), fontsize=9, x=0.01, ha="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if source:
        figure.supxlabel(_plain(source), fontsize=6.5, color=GREY, x=0.99, ha="right")
    return figure, axes


def _numbers(*sides) -> None:
    """Logarithmic axes with plain numbers at 1, 2 and 5."""
    for side in sides:
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter(NullFormatter())


def _plain(text: object) -> str:
    return str(text).replace("$", r"\$")  # a label is text, not mathematics


def ratios(rows: Sequence[dict], *, label: Callable[[dict], str], title: str, source: str,
           peer: str = "cuBLAS") -> Picture:
    """Speed against the peer, one row a shape: right of the line ours is faster. Rows without a ratio are left out."""
    rows = [row for row in rows if row.get("ratio")]
    figure, axes = _figure(rows, title, source, height=1.1 + 0.21 * len(rows))
    for y, row in enumerate(reversed(rows)):
        tone = colour("best") if row["ratio"] >= 1 else colour("proposed")
        axes.plot([1, row["ratio"]], [y, y], color=tone, linewidth=2)
        axes.plot(row["ratio"], y, "o", color=tone, markersize=5)
        right = row["ratio"] >= 1
        axes.annotate(f"{row['ratio']:.2f}", (row["ratio"], y), (6 if right else -6, 0), textcoords="offset points",
                      ha="left" if right else "right", va="center", fontsize=7.5)
    axes.axvline(1, color=colour(peer), linestyle="--", linewidth=1)
    low, high = (edge(row["ratio"] for row in rows) for edge in (min, max))
    axes.set_xlim(min(low, 1) - 0.06 * (1 + high - low), max(high, 1) + 0.06 * (1 + high - low))
    axes.set_yticks(range(len(rows)), [_plain(label(row)) for row in reversed(rows)], fontsize=7.5)
    axes.set_xlabel(f"speed, × {peer}", fontsize=8)
    return figure


def ladder(rows: Sequence[dict], *, label: Callable[[dict], str], title: str, source: str, value: str = "tflops",
           unit: str = "TFLOP/s", ceiling: float | None = None, ceiling_label: str = "") -> Picture:
    """One bar a step, in the order given; a row that did not run is an outline with its reason."""
    figure, axes = _figure(rows, title, source, height=1.2 + 0.27 * len(rows))
    top = max([row[value] for row in rows if row.get(value)] + [ceiling or 0]) or 1
    for y, row in enumerate(reversed(rows)):
        if row.get(value):
            axes.barh(y, row[value], color=colour(row["name"]), height=0.7)
            axes.text(row[value] + top * 0.01, y, f"{row[value]:.0f}", va="center", fontsize=7.5)
        else:
            axes.barh(y, top * 0.02, fill=False, edgecolor=GREY, hatch="////", height=0.7)
            axes.text(top * 0.03, y, _plain(_short(row["reason"])), va="center", fontsize=7, color=GREY)
    if ceiling:
        axes.axvline(ceiling, color=colour("cuBLAS"), linestyle="--", linewidth=1)
        axes.text(ceiling, len(rows) - 0.4, f"{ceiling_label} {ceiling:.0f}", fontsize=7, ha="right", va="bottom")
    axes.set_xlim(0, top * 1.08)
    axes.set_ylim(-0.6, len(rows) + 0.1)
    axes.set_yticks(range(len(rows)), [_plain(label(row)) for row in reversed(rows)], fontsize=7.5)
    axes.set_xlabel(unit, fontsize=8)
    return figure


def _short(reason: str) -> str:
    return reason if len(reason) <= 62 else reason[:60].rsplit(" ", 1)[0] + " …"


def heat_map(rows: Sequence[dict], x: str, y: str, value: str, *, title: str, source: str, fmt: str = "{:.2f}",
             mark: Callable[[dict], str] = lambda row: "x") -> Picture:
    """`value` over the keys `x` and `y`; a cell without one is grey and holds `mark(row)`."""
    figure, axes = _figure(rows, title, source)
    columns, lines = (sorted({row[key] for row in rows}) for key in (x, y))
    grid = [[math.nan] * len(columns) for _ in lines]
    texts = []
    for row in rows:
        i, j = lines.index(row[y]), columns.index(row[x])
        known = row.get(value) is not None
        grid[i][j] = row[value] if known else math.nan
        texts.append((i, j, fmt.format(row[value]) if known else mark(row)))
    axes.set_facecolor("#e8e8e8")  # shows where there is no value
    shades = axes.imshow(grid, cmap="cividis", aspect="auto", origin="lower")
    for i, j, text in texts:
        dark = not math.isnan(grid[i][j]) and shades.norm(grid[i][j]) < 0.55
        axes.text(j, i, _plain(text), ha="center", va="center", fontsize=11, color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_xlabel(_plain(x), fontsize=8)
    axes.set_ylabel(_plain(y), fontsize=8)
    return figure


_VERDICT = {"wgmma": ("#0072B2", "runs: wgmma"), "tcgen05": ("#0072B2", "runs: tcgen05"),
            "mma.sync": ("#56B4E9", "runs: mma.sync")}


def build_table(rows: Sequence[dict], *, title: str, source: str) -> Picture:
    """Configurations by targets. Rows hold name, set, target, status, reason and unit, the tensor-core instruction."""
    names = list(dict.fromkeys((row.get("set", ""), row["name"]) for row in rows))
    targets = list(dict.fromkeys(row["target"] for row in rows))
    figure, axes = _figure(rows, title, source, height=1.0 + 0.27 * len(names), width=6.8)
    for row in rows:
        x, y = targets.index(row["target"]), len(names) - 1 - names.index((row.get("set", ""), row["name"]))
        if row["status"] == "ok":
            tone, word = _VERDICT[row["unit"]]
        else:
            found = [cause for cause in ("register", "shared memory") if cause in row["reason"]]
            tone, word = "#D55E00" if row["status"] == "failed" else "#E69F00", f"no: {(found or ['fails'])[0]}"
        axes.add_patch(Rectangle((x, y), 0.96, 0.9, color=tone))
        light = tone in ("#E69F00", "#56B4E9")
        axes.text(x + 0.48, y + 0.45, word, ha="center", va="center", fontsize=6.3, color="black" if light else "white")
    axes.set_xlim(0, len(targets))
    axes.set_ylim(0, len(names))
    axes.set_xticks([x + 0.48 for x in range(len(targets))], targets)
    labels = [f"{which}  {name}" if which else name for which, name in reversed(names)]
    axes.set_yticks([y + 0.45 for y in range(len(names))], labels, fontsize=7.5)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def roofline(rows: Sequence[dict], *, peak_tflops: float, bandwidth_gbps: float, title: str, source: str) -> Picture:
    """Rows (name, intensity in operations a byte, tflops) under the two measured ceilings, both axes logarithmic."""
    figure, axes = _figure(rows, title, source)
    ridge = peak_tflops * 1e3 / bandwidth_gbps
    left = min([row["intensity"] for row in rows] + [ridge / 4]) / 2
    right = max([row["intensity"] for row in rows] + [ridge * 4]) * 2
    roof = [left * bandwidth_gbps / 1e3, peak_tflops, peak_tflops]
    axes.plot([left, ridge, right], roof, "--", color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.text(right, peak_tflops * 1.08, f"{peak_tflops:.0f} TFLOP/s", fontsize=7, ha="right", va="bottom")
    slope = (left * ridge) ** 0.5  # half way up
    axes.text(slope * 0.9, slope * bandwidth_gbps / 1e3, f"{bandwidth_gbps / 1e3:.2f} TB/s", fontsize=7, ha="right",
              va="bottom")
    names = list(dict.fromkeys(row["name"] for row in rows))
    for name in names:
        points = [row for row in rows if row["name"] == name]
        axes.plot([point["intensity"] for point in points], [point["tflops"] for point in points], "o",
                  color=colour(name), markersize=4.5, alpha=0.85)
        last = min(points, key=lambda point: point["tflops"])
        crowd = names.index(name)
        axes.annotate(_plain(name), (last["intensity"], last["tflops"]), (6, -9 - 9 * (crowd % 3) * (len(names) > 2)),
                      textcoords="offset points", fontsize=7, color=colour(name))
    axes.set_ylim(top=peak_tflops * 2)
    axes.set_xlabel("operations a byte of memory traffic", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    return figure


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: 1 when both put the rows in the same order."""
    import pandas

    return float(pandas.Series(first).rank().corr(pandas.Series(second).rank()))


def scatter_predicted(rows: Sequence[dict], *, title: str, source: str) -> Picture:
    """predicted_ms over ms, both logarithmic, with the diagonal and the rank correlation."""
    figure, axes = _figure(rows, title, source)
    measured, predicted = ([row[key] for row in rows] for key in ("ms", "predicted_ms"))
    low, high = min(measured + predicted) / 1.2, max(measured + predicted) * 1.2
    axes.plot([low, high], [low, high], "--", color="black", linewidth=1)
    axes.plot(measured, predicted, "o", color=colour("predicted"), markersize=4, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _numbers(axes.xaxis, axes.yaxis)
    if len(rows) > 2:
        text = f"rank correlation {rank_correlation(measured, predicted):.2f}, {len(rows)} configurations"
        axes.text(0.03, 0.95, text, transform=axes.transAxes, fontsize=8, va="top")
    axes.set_xlabel("measured, ms", fontsize=8)
    axes.set_ylabel("predicted, ms", fontsize=8)
    return figure


def gemm_picture(config, m: int, n: int, k: int) -> Picture:
    """What moves where in a tiled GEMM, drawn to the scale of `config` (block_m, block_n, block_k, num_stages, ...)."""
    figure, axes = _figure([config], "One tile of C: K steps flow through a ring of stages", "", width=6.4, height=3.3)
    axes.set_axis_off()
    axes.set_aspect("equal")
    unit = 3.0 / max(m, n, k)
    blue, orange, green = colour("best"), colour("proposed"), colour("predicted")

    def matrix(x, y, rows, columns, name, step_rows, step_columns):
        axes.add_patch(Rectangle((x, y), columns * unit, rows * unit, fill=False, color="black"))
        for i in range(step_rows, rows, step_rows):
            axes.plot([x, x + columns * unit], [y + (rows - i) * unit] * 2, color="#cccccc", linewidth=0.5)
        for j in range(step_columns, columns, step_columns):
            axes.plot([x + j * unit] * 2, [y, y + rows * unit], color="#cccccc", linewidth=0.5)
        axes.text(x + 0.08, y + rows * unit - 0.08, name, fontsize=9, va="top", fontweight="bold")

    bm, bn, bk = config.block_m, config.block_n, config.block_k
    ax, ay, gap = 0.0, 0.0, 0.35
    cx, by = ax + k * unit + gap, ay + m * unit + gap
    matrix(ax, ay, m, k, "A", bm, bk)
    matrix(cx, ay, m, n, "C", bm, bn)
    matrix(cx, by, k, n, "B", bk, bn)
    row, column, step = (m // bm) // 2, (n // bn) // 2, (k // bk) // 3
    y, x = ay + (m - (row + 1) * bm) * unit, cx + column * bn * unit
    axes.add_patch(Rectangle((ax, y), k * unit, bm * unit, color=blue, alpha=0.2))
    axes.add_patch(Rectangle((ax + step * bk * unit, y), bk * unit, bm * unit, color=blue))
    axes.add_patch(Rectangle((x, by), bn * unit, k * unit, color=orange, alpha=0.25))
    axes.add_patch(Rectangle((x, by + (k - (step + 1) * bk) * unit), bn * unit, bk * unit, color=orange))
    axes.add_patch(Rectangle((x, y), bn * unit, bm * unit, color=green))
    axes.text(ax, by + k * unit / 2, f"tile {bm} × {bn}\nstep {bk}", fontsize=8)
    ring_x, top = cx + n * unit + 1.3, by + k * unit
    slot = min(0.62, top / (config.num_stages + 2.4))
    size = (bm + bn) * bk * 2 / 1024
    axes.text(ring_x, top + 0.02, f"shared memory: {config.num_stages} × {size:.0f} KB (bf16)", fontsize=8, va="bottom")
    for stage in range(config.num_stages):
        base = top - (stage + 1) * slot
        share = 1.9 * bm / (bm + bn)
        axes.add_patch(Rectangle((ring_x, base), share, slot * 0.85, color=blue, alpha=0.85))
        axes.add_patch(Rectangle((ring_x + share, base), 1.9 - share, slot * 0.85, color=orange, alpha=0.85))
        axes.text(ring_x + 1.97, base + slot * 0.4, f"stage {stage}", fontsize=7, va="center")
    staged = top - (config.num_stages + 1) * slot - 0.35
    axes.add_patch(Rectangle((ring_x, staged), 1.9 / config.epilogue_parts, slot * 0.85, color=green, alpha=0.85))
    parts = f"C staged in {config.epilogue_parts} parts" if config.epilogue_parts > 1 else "C staged"
    axes.text(ring_x, staged - 0.06, parts, fontsize=7, va="top")

    def arrow(start, end, text, at, where):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=GREY, linewidth=1.2))
        axes.text(*at, text, fontsize=7.5, color=GREY, ha="center", va=where)

    middle = top - config.num_stages * slot / 2
    edge, foot = cx + n * unit, staged + slot * 0.4
    arrow((edge + 0.05, middle), (ring_x - 0.05, middle), "TMA load", (edge + 0.67, middle + 0.08), "bottom")
    arrow((ring_x - 0.05, foot), (edge + 0.05, foot), "TMA store", (edge + 0.67, foot + 0.08), "bottom")
    core_x = ring_x + 2.75
    axes.add_patch(Rectangle((core_x, middle - 0.45), 1.5, 0.9, fill=False, color="black"))
    axes.text(core_x + 0.75, middle, "tensor core,\naccumulator", fontsize=7.5, ha="center", va="center")
    arrow((ring_x + 2.45, middle), (core_x - 0.02, middle), "", (0, 0), "bottom")
    arrow((core_x + 0.75, middle - 0.5), (ring_x + 1.9 / config.epilogue_parts + 0.05, foot), "", (0, 0), "bottom")
    axes.set_xlim(-0.1, core_x + 1.6)
    axes.set_ylim(-0.1, top + 0.35)
    return figure
