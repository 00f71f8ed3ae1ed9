"""Pictures of `05_ch10_wgmma_gemm` that depend on data: a timeline. Those that do not lie in notebooks/pictures."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from matplotlib.patches import Rectangle

from ch10.tile_pipeline.lesson.figures import BLUE, GREEN, ORANGE
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, lighten, write

# by event, in the order of the legend
TONES = {
    "wait": "none",
    "load": BLUE,
    "product": GREEN,
    "Q Kᵀ": GREEN,
    "softmax": "#F0E442",
    "P V": "#CC79A7",
    "store": ORANGE,
}


def _stack_rows(rows: Sequence[dict]) -> list[tuple[int, dict]]:
    """Return each row with the first line in which nothing else is drawn at that time."""
    ends, placed = [], []
    for row in sorted(rows, key=lambda row: (row["begin"], row["end"])):
        line = next((line for line, end in enumerate(ends) if end <= row["begin"]), len(ends))
        ends[line : line + 1] = [row["end"]]
        placed.append((line, row))
    return placed


def draw_timeline(rows: Sequence[dict], *, title: str, source: str = "") -> plots.Picture:
    """Draw who did what when, from rows with role, event (one of TONES), step, tile, begin and end in
    cycles.

    Time begins with the first row. Events of every other tile are lighter, and a bar shows its step where there is
    room. Events of one role that overlap are drawn on several lines.
    """
    figure, axes = plots.new_figure(rows, title, source)
    start, stop = min(row["begin"] for row in rows), max(row["end"] for row in rows)
    tiles, duration = sorted({row["tile"] for row in rows}), stop - start
    y, ticks = 0.0, {}
    for role in sorted({row["role"] for row in rows}, key=lambda role: (role != "producer", role)):
        placed = _stack_rows([row for row in rows if row["role"] == role])
        lines = 1 + max(line for line, _ in placed)
        high = 0.28 if lines == 1 else 0.15
        for line, row in placed:
            x, width, bottom = row["begin"] - start, row["end"] - row["begin"], y - high * (line + 1)
            wait, tone, text = (
                row["event"] == "wait",
                TONES[row["event"]],
                "" if row["step"] is None else str(row["step"]),
            )
            if row["event"] == "store" or width / duration * 6.2 < 0.01 + 0.064 * len(text):
                text = ""
            tone = lighten(tone, 0.55) if tiles.index(row["tile"]) % 2 and not wait else tone
            if wait:  # a gap parts it from a wait before
                gap = min(0.002 * duration, width / 4)
                look = {"edge": "#aaaaaa", "hatch": "//////", "linewidth": 0}
                box(axes, x + gap, bottom, width - gap, high * 0.94, "white", **look)
            else:
                box(axes, x, bottom, width, high * 0.94, tone, "white", linewidth=0.3)
            if text:
                ink = "white" if tone == BLUE else "black"
                paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if wait else None
                write(axes, x + width / 2, bottom + high * 0.47, text, color=ink, bbox=paper)
        ticks[y - high * lines / 2] = role
        y -= high * lines + 0.1
    figure.set_size_inches(7.4, 1.35 - y)
    axes.set(xlim=(-0.005 * duration, 1.005 * duration), ylim=(y, 0.06))
    axes.set_yticks(list(ticks), ticks.values(), fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time, cycles", fontsize=8)
    shown = [event for event in TONES if any(row["event"] == event for row in rows)]
    square = functools.partial(Rectangle, (0, 0), 1, 1, linewidth=0, edgecolor="#aaaaaa")
    handles = [square(facecolor=TONES[each], hatch="//////" if each == "wait" else None) for each in shown]
    if len(tiles) > 1:
        handles.append(square(facecolor=lighten(plots.GREY, 0.4)))
        shown.append("lighter: every other tile")
    tight = {"fontsize": 7, "borderaxespad": 0.1, "handlelength": 1.2, "columnspacing": 1.2}
    plots.legend_above(axes, handles, shown, columns=len(shown), **tight)
    said = f"{title}. A row for each of {', '.join(ticks.values())} over {duration:,} cycles ({', '.join(shown)})."
    for tile in tiles[1:]:
        worked = [row for row in rows if row["tile"] == tile and row["event"] != "wait"]
        begins = [[row["begin"] - start for row in worked if row["role"] == role] for role in ticks.values()]
        firsts = [f"{min(each):,} ({role})" for each, role in zip(begins, ticks.values()) if each]
        said += f" Tile {tile} begins at cycle {', '.join(firsts)}."
    return figure.describe(said)
