"""What moves where and when in chapter 10: pictures that explain, and two that show what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy
from matplotlib.patches import FancyBboxPatch, Rectangle

from tilelab import plots, tensor_map
from tilelab.diagrams import box, canvas, lighten, write

PALE = "#eeeeee"
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
REGISTERS = 65536  # of an SM, 32 bits each
GROUP = 128  # threads of a warp group


def hatched(axes, x, y, width, height, tone=plots.GREY):
    """What the copy engine fills in: it lies outside of the tensor."""
    if width > 0 and height > 0:
        box(axes, x, y, width, height, "white", tone, hatch="/////", linewidth=0.6)


def _arrow(axes, start, end, tone=plots.GREY, style="-|>"):
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": tone, "lw": 1.2, "shrinkA": 0,
                                              "shrinkB": 0})


def _span(axes, start, end, tone):
    """A measure from start to end."""
    _arrow(axes, start, end, tone, "|-|,widthA=0.25,widthB=0.25")


# ---- tensor maps

def tensor_map_picture(rows: int = 40, columns: int = 100, stride: int = 112, box_rows: int = 16,
                       box_columns: int = 32, x: int = 40, y: int = 12, swizzle: str = "64B",
                       l2_promotion: str = "128B") -> plots.Picture:
    """A bf16 tensor (rows, columns) whose rows begin `stride` elements apart, a box of it at column x and row y, that
    box in shared memory, and the fields of the tensor map. ValueError for what no map describes."""
    tensor_map.check_describable((rows, columns), (stride, 1), 2, 0, (box_rows, box_columns), swizzle=swizzle,
                     l2_promotion=l2_promotion)
    if not (0 <= x <= columns - box_columns and 0 <= y <= rows - box_rows):
        raise ValueError(f"the box lies inside of the tensor in this picture; here it is at ({x}, {y}).")
    size = box_rows * box_columns * 2
    figure, axes = canvas("The map describes tensor and box; a copy names only a corner",
                          "a bf16 tensor, innermost extent first as in the map", 7.4, 2.75)
    scale = min(2.85 / stride, 1.55 / rows)
    left, top = 0.45, 2.15
    right, low, end = left + columns * scale, top - rows * scale, left + stride * scale
    box(axes, left, low, columns * scale, rows * scale, lighten(BLUE, 0.25))
    box(axes, right, low, end - right, rows * scale, PALE, "#bbbbbb", hatch="....", linewidth=0)
    box(axes, left, low, columns * scale, rows * scale, edge="black", linewidth=0.8)
    bx, by, wide, high = left + x * scale, top - (y + box_rows) * scale, box_columns * scale, box_rows * scale
    box(axes, bx, by, wide, high, lighten(GREEN, 0.7), GREEN, linewidth=1.2)
    write(axes, bx + wide / 2, by + high / 2, "box")
    write(axes, bx, by + high + 0.09, f"corner ({x}, {y})", "left")
    axes.plot(left, top, "o", color="black", markersize=4, clip_on=False)
    write(axes, left - 0.36, top + 0.19, "address", "left")
    _span(axes, (left, top + 0.08), (right, top + 0.08), BLUE)
    write(axes, (left + right) / 2 + 0.1, top + 0.19, f"{columns} columns")
    _span(axes, (left - 0.12, low), (left - 0.12, top), BLUE)
    write(axes, left - 0.24, (low + top) / 2, f"{rows} rows", rotation=90)
    _span(axes, (left, low - 0.1), (end, low - 0.1), ORANGE)
    padding = "; the dots are padding" if stride > columns else ""
    write(axes, (left + end) / 2, low - 0.22, f"row stride: {stride} elements, {stride * 2} bytes{padding}")

    mx, pitch = 3.95, min(0.085, 1.4 / box_rows)
    ends = top - 0.1 - pitch * box_rows
    for row in range(box_rows):
        box(axes, mx, ends + pitch * (box_rows - 1 - row), 0.95, pitch, lighten(GREEN, 0.35 + 0.35 * (row % 2)), "white",
            linewidth=0.3)
    write(axes, mx + 0.475, top + 0.19, "shared memory")
    write(axes, mx + 0.475, top + 0.05, "row after row")
    write(axes, mx + 0.475, ends - 0.12, f"{box_rows} × {box_columns * 2} B = {size:,} B")
    write(axes, mx + 0.475, ends - 0.26, "swizzled in 16-byte units" if swizzle != "none" else "row after row")
    _arrow(axes, (bx + wide, by + high / 2), (mx - 0.03, by + high / 2))

    fields = (("address", "multiple of 16 bytes", "black"), ("element type", "bfloat16", "none"),
              ("extents", f"{columns}, {rows}", BLUE), ("strides", f"{stride * 2} bytes", ORANGE),
              ("box", f"{box_columns}, {box_rows}", GREEN), ("swizzle", swizzle, "none"), ("fill", "zero", "none"),
              ("promotion", "none" if l2_promotion == "none" else f"{l2_promotion} of L2", "none"))
    fx, line = 5.2, 0.215
    box(axes, fx, top - line * len(fields) - 0.02, 2.1, line * len(fields) + 0.04, "white", "black", linewidth=0.8)
    write(axes, fx, top + 0.19, "tensor map, 128 bytes", "left", 8, fontweight="bold")
    for index, (name, value, tone) in enumerate(fields):
        at = top - line * (index + 0.5)
        if tone != "none":
            box(axes, fx + 0.06, at - 0.045, 0.09, 0.09, tone)
        write(axes, fx + 0.22, at, name, "left")
        write(axes, fx + 0.98, at, value, "left")
    return figure


def halo_picture(rows: int = 8, columns: int = 16, halo: int = 1, itemsize: int = 4) -> plots.Picture:
    """A stencil's tile of rows x columns at the tensor's first corner, and the box with its halo that one copy loads.

    The box has `halo` more rows above and below. A box starts at a multiple of 16 bytes of its row, so left and right
    it has whole units of them, as many as hold `halo` columns. ValueError for what no tensor map describes.
    """
    if halo < 1:
        raise ValueError(f"a halo has a row and a column at least; here it is {halo}.")
    unit = 16 // itemsize  # elements
    side = -(-halo // unit) * unit
    high, wide = rows + 2 * halo, columns + 2 * side
    tensor_map.check_describable((2 * high, 4 * wide), (4 * wide, 1), itemsize, 0, (high, wide))
    x, y = -side, -halo
    outside = high * wide - (high + y) * (wide + x)
    figure, axes = canvas(f"One box brings tile and halo; {outside} of {high * wide} elements lie outside",
                          f"the barrier expects the whole box: {high} × {wide} × {itemsize} B = "
                          f"{high * wide * itemsize:,} bytes", plots.SIZE[0] + 0.5, 2.6)
    scale = min(3.4 / (wide + 3), 2.0 / (high + 2))
    left, top = 0.35 - x * scale, 2.2 + y * scale  # of the tensor
    bx, by = left + x * scale, top - (y + high) * scale
    right, low = bx + (wide + 2) * scale, by - scale
    box(axes, left, low, right - left, top - low, lighten(BLUE, 0.15))
    box(axes, left, by, (wide + x) * scale, (high + y) * scale, lighten(ORANGE, 0.45))
    box(axes, left, by, (columns + halo) * scale, (high + y) * scale, lighten(GREEN, 0.45))
    hatched(axes, bx, top, wide * scale, -y * scale, GREEN)
    hatched(axes, bx, by, -x * scale, (high + y) * scale, GREEN)
    box(axes, left, top - rows * scale, columns * scale, rows * scale, BLUE)
    axes.vlines(numpy.arange(bx, bx + wide * scale + 1e-6, scale), by, by + high * scale, color="white", linewidth=0.4)
    axes.hlines(numpy.arange(by, by + high * scale + 1e-6, scale), bx, bx + wide * scale, color="white", linewidth=0.4)
    axes.vlines(numpy.arange(bx, bx + wide * scale + 1e-6, unit * scale), by, by + high * scale, color="black",
                linewidth=0.7)  # where a box may start
    axes.plot([left, left, right], [low, top, top], color="black", linewidth=1.5)
    box(axes, bx, by, wide * scale, high * scale, edge=GREEN, linewidth=1.5)
    write(axes, left + columns * scale / 2, top - rows * scale / 2, f"tile {rows} × {columns}", color="white", size=8,
          bbox={"facecolor": BLUE, "edgecolor": "none", "pad": 1})
    kx, ky = right + 0.2, 2.0
    for index, (face, text) in enumerate(((BLUE, "written by this CTA"), (lighten(GREEN, 0.45), "halo, from the tensor"),
                                          (lighten(ORANGE, 0.45), "rest of a unit, not used"),
                                          (None, "outside: filled with zero"),
                                          (lighten(BLUE, 0.15), "rest of the tensor"))):
        at = ky - 0.22 * index
        if face is None:
            hatched(axes, kx, at - 0.06, 0.18, 0.12, GREEN)
        else:
            box(axes, kx, at - 0.06, 0.18, 0.12, face)
        write(axes, kx + 0.24, at, text, "left")
    for index, text in enumerate((f"box {high} × {wide} at ({x}, {y}), columns first", "black lines: multiples of 16 "
                                  "bytes,", f"where a box may start: every {unit}", "no branch to load edges")):
        write(axes, kx, ky - 1.15 - 0.16 * index, text, "left")
    return figure


# ---- the product of matrices

def gemm_tiles_picture(block_m: int = 128, block_n: int = 256, block_k: int = 64, cluster: int = 2) -> plots.Picture:
    """What a cluster of CTAs reads in one K step of C (m, n) = A (m, k) B (k, n), bf16; block sizes in elements.

    Its CTAs take tiles of C below each other: each has a tile of A to itself and loads its share of the tile of B for
    all of them. A cluster of 1 is a CTA alone.
    """
    if not 1 <= cluster <= 4 or block_n % cluster:
        raise ValueError(f"the picture shows clusters of 1 to 4 that divide block_n; here {cluster} and {block_n}.")
    a, b = block_m * block_k / 512, block_n * block_k / 512  # KB
    alone, together = cluster * (a + b), cluster * a + b
    title = (f"{cluster} CTAs read {together:g} KB a step as a cluster; without, {alone:g} KB"
             if cluster > 1 else f"A CTA alone reads {alone:g} KB a step, all of it for itself")
    figure, axes = canvas(title, f"tiles of {block_m} × {block_n} × {block_k}, bf16; one step of K; K is not "
                          "to scale", 6.4, 3.5)
    tones = (BLUE, ORANGE, "#CC79A7", "#88CCEE")[:cluster]  # a CTA each
    unit = min(0.66 / block_m, 1.2 / block_n, 1.4 / (block_m * cluster))
    high, wide, step = unit * block_m, unit * block_n, min(max(unit * block_k, 0.17), 0.22)
    deep, part = 5.2 * step, wide / cluster
    left, low = 0.3, 0.42
    cx, cy = left + deep + 0.14, low
    total = high * cluster
    by = cy + total + 0.14
    # A, C and B with the strips that this cluster needs; lit is the step now
    box(axes, left, low, deep, total, "white", "#999999", linewidth=0.6)
    box(axes, cx, by, wide, deep, "white", "#999999", linewidth=0.6)
    for rank, tone in enumerate(tones):
        y = low + total - high * (rank + 1)
        box(axes, left, y, deep, high, lighten(tone, 0.25), "white", linewidth=0.8)
        box(axes, left + 2 * step, y, step, high, tone, "white", linewidth=0.8)
        box(axes, cx, y, wide, high, lighten(tone, 0.5), "white", linewidth=0.8)
        write(axes, cx + wide / 2, y + high / 2, f"CTA {rank}")
        box(axes, cx + part * rank, by, part, deep, lighten(tone, 0.25))
        box(axes, cx + part * rank, by + deep - 3 * step, part, step, tone, "white", linewidth=0.8)
    write(axes, left + 0.02, low + total + 0.09, "A", "left", 9, fontweight="bold")
    write(axes, cx - 0.05, by + deep - 0.08, "B", "right", 9, fontweight="bold")
    write(axes, cx + wide + 0.05, low + total / 2, "C", "left", 9, fontweight="bold")
    write(axes, left + 2.5 * step, low - 0.11, f"step: {block_k} of K")

    # shared memory: of each CTA a tile of A and the whole tile of B, by whose load it came
    mx, width, slot = 3.85, 2.35, min(0.62, 2.5 / cluster - 0.3)
    for rank, tone in enumerate(tones):
        y = 2.78 - (slot + 0.3) * rank
        write(axes, mx, y + 0.1, f"shared memory of CTA {rank}, one stage", "left", 7.5)
        share = width * min(max(a / (a + b), 0.3), 0.6)
        box(axes, mx, y - slot, share, slot, tone, "white", linewidth=0.8)
        write(axes, mx + share / 2, y - slot / 2, f"A {a:g} KB", color="white" if tone == BLUE else "black")
        each = (width - share) / cluster
        for other, from_tone in enumerate(tones):
            at = mx + share + each * other
            box(axes, at, y - slot, each, slot, from_tone, "white", linewidth=0.8)
            ink = "white" if from_tone == BLUE else "black"
            if cluster == 1:
                write(axes, at + each / 2, y - slot / 2, f"B {b:g} KB", color=ink)
            elif each > 0.4:
                write(axes, at + each / 2, y - slot / 2 + 0.08, f"B {b / cluster:g} KB", color=ink)
                write(axes, at + each / 2, y - slot / 2 - 0.08, "own load" if other == rank else f"by CTA {other}",
                      color=ink)
    if cluster > 1:
        write(axes, mx, 2.78 - (slot + 0.3) * cluster + 0.12, f"each CTA loads 1/{cluster} of B, for all of them",
              "left", color=plots.GREY)
        write(axes, mx, 2.78 - (slot + 0.3) * cluster - 0.03, "colour: the CTA whose load brings it", "left",
              color=plots.GREY)
    return figure


def roles_picture(stages: int = 4, consumers: int = 2, producer_registers: int = 40,
                  consumer_registers: int = 232) -> plots.Picture:
    """The producer's warp group, the ring of stages with a full and an empty barrier each, the consumers' warp groups.

    Registers are a thread's. ValueError when the groups together need more than an SM has.
    """
    if not (2 <= stages <= 8 and 1 <= consumers <= 3):
        raise ValueError(f"the picture shows 2 to 8 stages and 1 to 3 consumers; here {stages} and {consumers}.")
    needs = GROUP * (producer_registers + consumers * consumer_registers)
    if needs > REGISTERS:
        raise ValueError(f"an SM has {REGISTERS:,} registers; {producer_registers} a thread of the producer and "
                         f"{consumer_registers} a thread of {consumers} consumers need {needs:,}.")
    figure, axes = canvas("One warp group loads, the others multiply; barriers hand stages round",
                          f"registers: {GROUP} × ({producer_registers} + {consumers} × {consumer_registers}) = "
                          f"{needs:,} of {REGISTERS:,} an SM has", 6.4, 3.2)

    def group(x, y, high, tone, name, lines):
        axes.add_patch(FancyBboxPatch((x, y), 1.45, high, boxstyle="round,pad=0,rounding_size=0.06", linewidth=1.5,
                                      facecolor="white", edgecolor=tone))
        write(axes, x + 0.1, y + high - 0.16, name, "left", 8, fontweight="bold")
        for index, line in enumerate(lines):
            write(axes, x + 0.1, y + high - 0.36 - 0.16 * index, line, "left")

    low, top, x, wide = 0.5, 2.35, 2.6, 1.2
    pitch, middle = (top - low) / stages, (low + top) / 2
    group(0.12, middle - 0.55, 1.1, BLUE, "producer", (f"{producer_registers} registers a thread", "one thread of it:",
                                                       "waits until empty,", "expects bytes, loads"))
    high = min(1.1, (top - low + 0.2) / consumers - 0.1)
    tall = high >= 0.75
    gap = (top - low + 0.2 - high * consumers) / consumers
    ys = [top + 0.1 - high - (high + gap) * index - gap / 2 for index in range(consumers)]
    for index, y in enumerate(ys):
        group(4.8, y, high, GREEN, f"consumer {index}", (f"{consumer_registers} registers a thread",
                                                         "waits until full,", "multiplies, arrives")[:3 if tall else 1])
    write(axes, x + wide / 2, top + 0.28, f"ring of {stages} stages", size=8, fontweight="bold")
    write(axes, x - 0.2, top + 0.12, "empty", color="#8a5a00")
    write(axes, x + wide + 0.2, top + 0.12, "full", color="#00684b")
    for stage in range(stages):
        y = top - pitch * (stage + 1)
        box(axes, x, y + 0.03, wide / 2, pitch - 0.06, lighten(BLUE, 0.35))
        box(axes, x + wide / 2, y + 0.03, wide / 2, pitch - 0.06, lighten(BLUE, 0.6))
        write(axes, x + wide / 4, y + pitch / 2, "A")
        write(axes, x + wide * 3 / 4, y + pitch / 2, "B")
        axes.plot(x - 0.2, y + pitch / 2, "o", color=ORANGE, markersize=7)
        axes.plot(x + wide + 0.2, y + pitch / 2, "o", color=GREEN, markersize=7)
    _arrow(axes, (1.6, middle + 0.25), (x - 0.42, middle + 0.25), BLUE)
    write(axes, (1.6 + x - 0.42) / 2, middle + 0.36, "TMA")
    _arrow(axes, (x - 0.42, middle - 0.25), (1.6, middle - 0.25), ORANGE)
    write(axes, (1.6 + x - 0.42) / 2, middle - 0.38, "free")
    for index, y in enumerate(ys):
        _arrow(axes, (x + wide + 0.38, y + high / 2), (4.77, y + high / 2), GREEN)
        write(axes, 4.47, y + high / 2 + 0.1, "landed" if index == 0 else "")
    write(axes, x + wide / 2, low - 0.13, "full: the bytes have landed; empty: every consumer has arrived",
          color=plots.GREY)
    return figure


# ---- what was measured

EVENTS = {"wait": "waits", "load": "load", "product": "product", "store": "store"}
EVENT_TONES = {"load": BLUE, "product": GREEN, "store": ORANGE}


def _stacked(rows: Sequence[dict]) -> list[tuple[int, dict]]:
    """Each row with the first line in which nothing else is under way."""
    ends, placed = [], []
    for row in sorted(rows, key=lambda row: (row["begin"], row["end"])):
        line = next((line for line, end in enumerate(ends) if end <= row["begin"]), len(ends))
        ends[line:line + 1] = [row["end"]]
        placed.append((line, row))
    return placed


def timeline(rows: Sequence[dict], *, title: str, source: str = "", clock_mhz: float | None = None) -> plots.Picture:
    """Who did what when: a bar an event, from rows with role, event (wait, load, product, store), step, tile, begin and
    end in cycles. Time begins with the first row; with `clock_mhz` it is in microseconds.

    Events of every other tile are lighter; a bar shows its step where there is room. What overlaps within a role is
    drawn below each other. ValueError for no rows, an unknown event, or an end before its beginning.
    """
    for row in rows:
        if row["event"] not in EVENTS:
            raise ValueError(f"an event is one of {', '.join(EVENTS)}; here it is {row['event']!r}.")
        if row["end"] < row["begin"]:
            raise ValueError(f"an event ends after it begins; here one of {row['role']} ends "
                             f"{row['begin'] - row['end']} cycles before.")
    roles = sorted({row["role"] for row in rows}, key=lambda role: (role != "producer", role))
    lines = {role: _stacked([row for row in rows if row["role"] == role]) for role in roles}
    deep = {role: 1 + max(line for line, _ in placed) for role, placed in lines.items()}
    bar = 0.28
    heights = {role: max(bar, min(0.12, 0.9 / deep[role]) * deep[role]) for role in roles}
    figure, axes = plots.new_figure(rows, title, source, height=1.35 + sum(heights.values()) + 0.1 * len(roles))
    figure.set_size_inches(7.4, figure.get_size_inches()[1])
    start, stop = min(row["begin"] for row in rows), max(row["end"] for row in rows)
    unit = clock_mhz or 1
    span = (stop - start) / unit or 1
    tiles = sorted({row["tile"] for row in rows})
    y, ticks = 0.0, []
    for role in roles:
        y -= heights[role]
        ticks.append(y + heights[role] / 2)
        each = heights[role] / deep[role]
        for line, row in lines[role]:
            begin, width = (row["begin"] - start) / unit, (row["end"] - row["begin"]) / unit
            at, other = y + heights[role] - each * (line + 1), tiles.index(row["tile"]) % 2
            if row["event"] == "wait":
                box(axes, begin, at, width, each, "white", "#aaaaaa", hatch="//////", linewidth=0)
                continue
            tone = EVENT_TONES[row["event"]]
            box(axes, begin, at, width, each * 0.94, lighten(tone, 0.55) if other else tone, "white", linewidth=0.3)
            text = str(row["step"])
            if row["event"] != "store" and each > 0.13 and width / span * 6.2 > 0.05 + 0.07 * len(text):
                axes.text(begin + width / 2, at + each / 2, text, fontsize=7, ha="center", va="center_baseline",
                          color="white" if tone == BLUE and not other else "black")
        y -= 0.1
    axes.set(xlim=(-0.005 * span, 1.005 * span), ylim=(y, 0.06))
    axes.set_yticks(ticks, roles, fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time, µs" if clock_mhz else "time, cycles", fontsize=8)
    seen = [event for event in EVENTS if any(row["event"] == event for row in rows)]
    handles = [Rectangle((0, 0), 1, 1, facecolor=EVENT_TONES.get(event, "white"), linewidth=0,
                         edgecolor="#aaaaaa", hatch=None if event in EVENT_TONES else "//////") for event in seen]
    names = [EVENTS[event] for event in seen]
    if len(tiles) > 1:
        handles.append(Rectangle((0, 0), 1, 1, facecolor=lighten(plots.GREY, 0.4)))
        names.append("lighter: every other tile")
    axes.legend(handles, names, fontsize=7, ncols=len(names), frameon=False, loc="lower left", bbox_to_anchor=(0, 1),
                borderaxespad=0.1, handlelength=1.2, columnspacing=1.2)
    return figure


def ladder(rows: Sequence[dict], *, ceiling_tflops: float, title: str, source: str) -> plots.Picture:
    """The kernel's steps as percent of the measured ceiling, cuBLAS's fastest burst, from rows with name, shape,
    tflops, ratio and, where one was made, predicted (TFLOP/s too), which is a hollow marker. cuBLAS in the same run,
    tflops / ratio in the median, is the dashed line.

    A row that did not run is drawn with its reason, as in tilelab.plots. ValueError when rows are of several shapes.
    """
    if len({str(row.get("shape")) for row in rows}) > 1:
        raise ValueError("a ladder has one shape: cuBLAS is another line for another shape.")
    percent = 100 / ceiling_tflops
    steps = [{**row, "name": "course", "step": row["name"],
              "percent": row["tflops"] * percent if row.get("tflops") else None} for row in rows]
    peers = [row["percent"] / row["ratio"] for row in steps if row["percent"] and row.get("ratio")]
    peer = float(f"{statistics.median(peers):.3g}") if peers else None
    figure = plots.ladder(steps, label="step", title=title, source=source, value="percent",
                          unit=f"% of the ceiling, cuBLAS's fastest burst: {ceiling_tflops:,.0f} TFLOP/s", ceiling=peer,
                          ceiling_label="cuBLAS")
    axes, = figure.axes
    marks = {len(rows) - 1 - index: row["predicted"] * percent for index, row in enumerate(rows)
             if row.get("predicted")}
    if not marks:
        return figure
    right = max(axes.get_xlim()[1], 1.12 * max(marks.values()))
    axes.set_xlim(0, right)
    for y, value in marks.items():
        axes.plot(value, y, "D", markerfacecolor="white", markeredgecolor=plots.colour("proposed"), markersize=5,
                  markeredgewidth=1.4, zorder=4)
        for text in axes.texts:  # a figure that the marker, or cuBLAS's line, would cover stands behind it
            at, line = text.get_position()
            for there in sorted((value, peer or value)) if line == y else ():
                if at - 0.02 * right < there < at + 0.065 * right:
                    at = there + 0.025 * right
            text.set_x(at)
    axes.plot([], [], "D", markerfacecolor="white", markeredgecolor=plots.colour("proposed"), markersize=5,
              markeredgewidth=1.4, label="predicted")
    axes.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1,
                handletextpad=0.3)
    return figure
