"""Pictures of `ch10_wgmma_gemm`: the tiles of a cluster, the roles of warp groups, a timeline and the ladder."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch, Rectangle

from ch10.tile_pipeline.figures import BLUE, GREEN, ORANGE, draw_arrow
from tilelab import plots
from tilelab.diagrams import box, canvas, lighten, write


def draw_gemm_tiles(cluster: int = 2) -> plots.Picture:
    """Draw what a cluster of 1 or 2 CTAs reads in one K step of C (m, n) = A (m, k) B (k, n), with bf16 tiles of 128 x
    256 x 64.

    The CTAs take tiles of C one below the other. Each loads its own tile of A, and its share of the tile of B for all
    of them.
    """
    a, b = 16, 32  # KB of a tile
    alone, together = cluster * (a + b), cluster * a + b
    title = (f"{cluster} CTAs read {together} KB per step as a cluster; without, {alone} KB"
             if cluster > 1 else f"A CTA alone reads {alone} KB per step, all of it for itself")
    figure, axes = canvas(title, "tiles of 128 × 256 × 64, bf16; one step of K; K is not to scale", 6.4, 3.5)
    tones = (BLUE, ORANGE)[:cluster]  # one per CTA
    high, wide, step = 0.6, 1.2, 0.22
    deep, part = 5.2 * step, wide / cluster
    left, low = 0.3, 0.42
    total, c_x = high * cluster, left + deep + 0.14
    b_y = low + total + 0.14
    # A, C and B with the strips that this cluster reads; the tiles of this step are darker
    box(axes, left, low, deep, total, "white", "#999999", linewidth=0.6)
    box(axes, c_x, b_y, wide, deep, "white", "#999999", linewidth=0.6)
    for rank, tone in enumerate(tones):
        y = low + total - high * (rank + 1)
        box(axes, left, y, deep, high, lighten(tone, 0.25), "white", linewidth=0.8)
        box(axes, left + 2 * step, y, step, high, tone, "white", linewidth=0.8)
        box(axes, c_x, y, wide, high, lighten(tone, 0.5), "white", f"CTA {rank}", linewidth=0.8)
        box(axes, c_x + part * rank, b_y, part, deep, lighten(tone, 0.25))
        box(axes, c_x + part * rank, b_y + deep - 3 * step, part, step, tone, "white", linewidth=0.8)
    write(axes, left + 0.02, low + total + 0.09, "A", "left", 9, fontweight="bold")
    write(axes, c_x - 0.05, b_y + deep - 0.08, "B", "right", 9, fontweight="bold")
    write(axes, c_x + wide + 0.05, low + total / 2, "C", "left", 9, fontweight="bold")
    write(axes, left + 2.5 * step, low - 0.11, "step: 64 of K")

    memory_x, a_width, b_width, height = 3.85, 0.78, 1.57, 0.62
    for rank, tone in enumerate(tones):
        y = 2.78 - (height + 0.3) * rank
        write(axes, memory_x, y + 0.1, f"shared memory of CTA {rank}, one stage", "left", 7.5)
        box(axes, memory_x, y - height, a_width, height, tone, "white", f"A {a} KB", linewidth=0.8)
        share = b_width / cluster
        for other, other_tone in enumerate(tones):
            text = f"B {b // cluster} KB\n" + ("own load" if other == rank else f"by CTA {other}")
            box(axes, memory_x + a_width + share * other, y - height, share, height, other_tone, "white", text,
                linewidth=0.8)
    if cluster > 1:
        write(axes, memory_x, 1.06, "each CTA loads 1/2 of B, for both of them", "left", color=plots.GREY)
        write(axes, memory_x, 0.91, "colour: the CTA whose load brings it", "left", color=plots.GREY)
    return figure


def draw_warp_roles() -> plots.Picture:
    """Draw the producer's warp group, the ring of stages with their full and empty barriers, and two consumers."""
    stages, registers = 4, 128 * (40 + 2 * 232)
    figure, axes = canvas("One warp group loads, the others multiply; barriers hand stages round",
                          f"registers: 128 × (40 + 2 × 232) = {registers:,} of 65,536 an SM has", 6.4, 3.2)

    def draw_group(x, y, tone, name, lines):
        axes.add_patch(FancyBboxPatch((x, y), 1.45, 0.92, boxstyle="round,pad=0,rounding_size=0.06", linewidth=1.5,
                                      facecolor="white", edgecolor=tone))
        write(axes, x + 0.1, y + 0.76, name, "left", 8, fontweight="bold")
        for index, line in enumerate(lines):
            write(axes, x + 0.1, y + 0.56 - 0.14 * index, line, "left")

    low, top, x, wide = 0.5, 2.35, 2.6, 1.2
    pitch, middle = (top - low) / stages, (low + top) / 2
    draw_group(0.12, middle - 0.46, BLUE, "producer", ("40 registers per thread", "one thread of it:",
                                                       "waits until empty,", "expects bytes, loads"))
    consumers = 1.48, 0.45
    for index, y in enumerate(consumers):
        draw_group(4.8, y, GREEN, f"consumer {index}", ("232 registers per thread", "waits until full,",
                                                        "multiplies, arrives"))
        draw_arrow(axes, (x + wide + 0.38, y + 0.46), (4.77, y + 0.46), GREEN)
    write(axes, 4.47, consumers[0] + 0.56, "landed")
    write(axes, x + wide / 2, top + 0.28, f"ring of {stages} stages", size=8, fontweight="bold")
    write(axes, x - 0.2, top + 0.12, "empty", color="#8a5a00")
    write(axes, x + wide + 0.2, top + 0.12, "full", color="#00684b")
    for stage in range(stages):
        y = top - pitch * (stage + 1)
        box(axes, x, y + 0.03, wide / 2, pitch - 0.06, lighten(BLUE, 0.35), text="A")
        box(axes, x + wide / 2, y + 0.03, wide / 2, pitch - 0.06, lighten(BLUE, 0.6), text="B")
        axes.plot(x - 0.2, y + pitch / 2, "o", color=ORANGE, markersize=7)
        axes.plot(x + wide + 0.2, y + pitch / 2, "o", color=GREEN, markersize=7)
    draw_arrow(axes, (1.6, middle + 0.25), (x - 0.42, middle + 0.25), BLUE)
    write(axes, (1.6 + x - 0.42) / 2, middle + 0.36, "TMA")
    draw_arrow(axes, (x - 0.42, middle - 0.25), (1.6, middle - 0.25), ORANGE)
    write(axes, (1.6 + x - 0.42) / 2, middle - 0.38, "free")
    write(axes, x + wide / 2, low - 0.13, "full: the bytes have landed; empty: every consumer has arrived",
          color=plots.GREY)
    return figure


# ---- what was measured

TONES = {"wait": "none", "load": BLUE, "product": GREEN, "store": ORANGE}  # by event


def _stack_rows(rows: Sequence[dict]) -> list[tuple[int, dict]]:
    """Return each row with the first line in which nothing else is drawn at that time."""
    ends, placed = [], []
    for row in sorted(rows, key=lambda row: (row["begin"], row["end"])):
        line = next((line for line, end in enumerate(ends) if end <= row["begin"]), len(ends))
        ends[line:line + 1] = [row["end"]]
        placed.append((line, row))
    return placed


def draw_timeline(rows: Sequence[dict], *, title: str, source: str = "") -> plots.Picture:
    """Draw who did what when, from rows with role, event (wait, load, product, store), step, tile, begin and end in
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
            if row["event"] == "wait":
                box(axes, x, bottom, width, high, "white", "#aaaaaa", hatch="//////", linewidth=0)
                continue
            tone, text = TONES[row["event"]], str(row["step"])
            if row["event"] == "store" or width / duration * 6.2 < 0.05 + 0.07 * len(text):
                text = ""
            box(axes, x, bottom, width, high * 0.94, lighten(tone, 0.55) if tiles.index(row["tile"]) % 2 else tone,
                "white", text, linewidth=0.3)
        ticks[y - high * lines / 2] = role
        y -= high * lines + 0.1
    figure.set_size_inches(7.4, 1.35 - y)
    axes.set(xlim=(-0.005 * duration, 1.005 * duration), ylim=(y, 0.06))
    axes.set_yticks(list(ticks), ticks.values(), fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time, cycles", fontsize=8)
    shown = [event for event in TONES if any(row["event"] == event for row in rows)]
    handles = [Rectangle((0, 0), 1, 1, facecolor=TONES[event], linewidth=0, edgecolor="#aaaaaa",
                         hatch="//////" if event == "wait" else None) for event in shown]
    if len(tiles) > 1:
        handles.append(Rectangle((0, 0), 1, 1, facecolor=lighten(plots.GREY, 0.4)))
        shown.append("lighter: every other tile")
    axes.legend(handles, shown, fontsize=7, ncols=len(shown), frameon=False, loc="lower left", bbox_to_anchor=(0, 1),
                borderaxespad=0.1, handlelength=1.2, columnspacing=1.2)
    return figure


def draw_ladder(rows: Sequence[dict], *, title: str, source: str) -> plots.Picture:
    """Draw the speed of the kernel's steps beside cuBLAS in the same run, the median of tflops / ratio.

    Rows have name, shape, tflops, ratio and perhaps `predicted` (TFLOP/s), which is a hollow marker on the bar's edge.
    A row that did not run is drawn with its reason.
    """
    if len({str(row.get("shape")) for row in rows}) > 1:
        raise ValueError("all rows of a ladder must have one shape, because cuBLAS is one line.")
    peers = [row["tflops"] / row["ratio"] for row in rows if row.get("ratio")]
    figure = plots.ladder([{**row, "name": "course", "step": row["name"]} for row in rows], label="step", title=title,
                          source=source, ceiling=float(f"{statistics.median(peers):.3g}") if peers else None,
                          ceiling_label="cuBLAS")
    axes, = figure.axes
    marks = {y + 0.35: row["predicted"] for y, row in zip(range(len(rows))[::-1], rows) if row.get("predicted")}
    if marks:
        axes.plot(marks.values(), marks.keys(), "D", markerfacecolor="white", markeredgecolor=GREEN, markersize=5,
                  markeredgewidth=1.4, label="predicted")
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * max(marks.values())))
        axes.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1,
                    handletextpad=0.3)
    return figure
