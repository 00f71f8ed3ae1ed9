"""Pictures of `ch10_tile_pipeline`: a tensor map, a ring, the box of a stencil, banks, multicast, and sweeps."""

from __future__ import annotations

from ch10.tile_pipeline.lesson.banks import count_wavefronts
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write
from tilelab.runtime import tensor_map

MEASURE = "|-|,widthA=0.25,widthB=0.25"
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
OUTSIDE = {"face": "white", "edge": GREEN, "hatch": "/////", "linewidth": 0.6}  # what TMA fills in


def draw_arrow(axes, start, end, tone=plots.GREY, style="-|>"):
    """Draw an arrow, or with another style a measure, from start to end."""
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": style, "color": tone, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    )


def draw_tensor_map() -> plots.Picture:
    """Draw a bf16 tensor with padded rows, a box on it, that box in shared memory, and the fields of the tensor map."""
    rows, columns, stride, box_rows, box_columns, x, y = 40, 100, 112, 16, 32, 40, 12
    figure, axes = canvas(
        "The map describes tensor and box; a copy names only a corner",
        "a bf16 tensor, innermost extent first as in the map",
        7.4,
        2.75,
    )
    scale, left, top = 2.85 / stride, 0.45, 2.15
    right, low, end = left + columns * scale, top - rows * scale, left + stride * scale
    box(axes, left, low, columns * scale, rows * scale, lighten(BLUE, 0.25))
    box(axes, right, low, end - right, rows * scale, "#eeeeee", "#bbbbbb", hatch="....", linewidth=0)
    box(axes, left, low, columns * scale, rows * scale, edge="black", linewidth=0.8)
    box_x, box_y, width, height = (
        left + x * scale,
        top - (y + box_rows) * scale,
        box_columns * scale,
        box_rows * scale,
    )
    box(axes, box_x, box_y, width, height, lighten(GREEN, 0.7), GREEN, "box", linewidth=1.2)
    write(axes, box_x, box_y + height + 0.09, f"corner ({x}, {y})", "left")
    axes.plot(left, top, "o", color="black", markersize=4, clip_on=False)
    write(axes, left - 0.36, top + 0.19, "address", "left")
    draw_arrow(axes, (left, top + 0.08), (right, top + 0.08), BLUE, MEASURE)
    write(axes, (left + right) / 2 + 0.1, top + 0.19, f"{columns} columns")
    draw_arrow(axes, (left - 0.12, low), (left - 0.12, top), BLUE, MEASURE)
    write(axes, left - 0.24, (low + top) / 2, f"{rows} rows", rotation=90)
    draw_arrow(axes, (left, low - 0.1), (end, low - 0.1), ORANGE, MEASURE)
    write(
        axes,
        (left + end) / 2,
        low - 0.22,
        f"row stride: {stride} elements, {stride * 2} bytes; dots: padding",
    )

    memory_x, pitch = 3.95, 0.085
    ends = top - 0.1 - pitch * box_rows
    for row in range(box_rows):
        tone = lighten(GREEN, 0.35 + 0.35 * (row % 2))
        box(axes, memory_x, ends + pitch * (box_rows - 1 - row), 0.95, pitch, tone, "white", linewidth=0.3)
    for at, text in (
        (top + 0.19, "shared memory"),
        (top + 0.05, "row after row"),
        (ends - 0.12, f"{box_rows} × {box_columns * 2} B = {box_rows * box_columns * 2:,} B"),
        (ends - 0.26, "swizzled in 16-byte units"),
    ):
        write(axes, memory_x + 0.475, at, text)
    draw_arrow(axes, (box_x + width, box_y + height / 2), (memory_x - 0.03, box_y + height / 2))

    fields = (
        ("address", "multiple of 16 bytes", "black"),
        ("element type", "bfloat16", "none"),
        ("extents", f"{columns}, {rows}", BLUE),
        ("strides", f"{stride * 2} bytes", ORANGE),
        ("box", f"{box_columns}, {box_rows}", GREEN),
        ("swizzle", "64B", "none"),
        ("fill", "zero", "none"),
        ("promotion", "128B of L2", "none"),
    )
    field_x, line = 5.2, 0.215
    box(
        axes,
        field_x,
        top - line * len(fields) - 0.02,
        2.1,
        line * len(fields) + 0.04,
        "white",
        "black",
        linewidth=0.8,
    )
    write(axes, field_x, top + 0.19, "tensor map, 128 bytes", "left", 8, fontweight="bold")
    for index, (name, value, tone) in enumerate(fields):
        at = top - line * (index + 0.5)
        box(axes, field_x + 0.06, at - 0.045, 0.09, 0.09, tone)
        write(axes, field_x + 0.22, at, name, "left")
        write(axes, field_x + 0.98, at, value, "left")
    return figure.describe(
        f"Left: a bf16 tensor of {rows} rows and {columns} columns, whose rows are {stride} elements apart, with a box "
        f"of {box_rows} × {box_columns} elements at column {x}, row {y}. Middle: the rows of the box in shared memory, "
        "one after the other. Right: the fields of the tensor map: address, element type, extents, strides, box, "
        "swizzle, fill and promotion."
    )


def draw_halo() -> plots.Picture:
    """Draw a stencil's tile at the tensor's first corner, and the box with its halo that one load brings.

    A box starts at a multiple of 16 bytes of its row, so it has a whole unit of four floats left and right of the tile.
    """
    rows, columns, unit = 8, 16, 4
    high, wide, x, y = rows + 2, columns + 2 * unit, -unit, -1
    outside = high * wide - (high + y) * (wide + x)
    figure, axes = canvas(
        f"One box brings tile and halo; {outside} of {high * wide} elements lie outside",
        f"the barrier expects the whole box: {high} × {wide} × 4 B = {high * wide * 4:,} bytes",
        plots.SIZE[0] + 0.5,
        2.6,
    )
    scale = 3.4 / (wide + 3)
    left, top = 0.35 - x * scale, 2.2 + y * scale  # of the tensor

    def part(column, row, columns, rows, face="none", **rest):  # all in elements
        box(
            axes,
            left + column * scale,
            top - (row + rows) * scale,
            columns * scale,
            rows * scale,
            face,
            **rest,
        )

    part(0, 0, wide + x + 2, high + y + 1, lighten(BLUE, 0.15))
    part(0, 0, wide + x, high + y, lighten(ORANGE, 0.45))
    part(0, 0, columns + 1, high + y, lighten(GREEN, 0.45))
    part(x, y, wide, -y, **OUTSIDE)
    part(x, 0, -x, high + y, **OUTSIDE)
    part(0, 0, columns, rows, BLUE)
    for column in range(x, x + wide + 1):  # black: where a box may start
        part(column, y, 0, high, edge="white", linewidth=0.4)
    for row in range(y, y + high + 1):
        part(x, row, wide, 0, edge="white", linewidth=0.4)
    for column in range(x, x + wide + 1, unit):
        part(column, y, 0, high, edge="black", linewidth=0.7)
    right, low = left + (wide + x + 2) * scale, top - (high + y + 1) * scale
    axes.plot([left, left, right], [low, top, top], color="black", linewidth=1.5)
    part(x, y, wide, high, edge=GREEN, linewidth=1.5)
    write(
        axes,
        left + columns * scale / 2,
        top - rows * scale / 2,
        f"tile {rows} × {columns}",
        color="white",
        size=8,
        bbox={"facecolor": BLUE, "edgecolor": "none", "pad": 1},
    )
    for index, (style, text) in enumerate(
        (
            ({"face": BLUE}, "written by this block"),
            ({"face": lighten(GREEN, 0.45)}, "halo, from the tensor"),
            ({"face": lighten(ORANGE, 0.45)}, "rest of a unit, not used"),
            (OUTSIDE, "outside: filled with zero"),
            ({"face": lighten(BLUE, 0.15)}, "rest of the tensor"),
        )
    ):
        box(axes, right + 0.2, 1.94 - 0.22 * index, 0.18, 0.12, **style)
        write(axes, right + 0.44, 2.0 - 0.22 * index, text, "left")
    axes.text(
        right + 0.2,
        0.93,
        f"box {high} × {wide} at ({x}, {y}), columns first\nblack lines: multiples of 16 "
        f"bytes,\nwhere a box may start: every {unit}\nno branch to load edges",
        fontsize=7,
        va="top",
        linespacing=1.5,
    )
    return figure.describe(
        f"A tile of {rows} × {columns} floats at the upper left corner of a tensor, and its box of {high} × {wide}. "
        "The box has one more row above and below, and four more columns left and right, of which the stencil reads "
        "one. The row above and the columns on the left lie outside of the tensor and are filled with zero."
    )


def draw_ring() -> plots.Picture:
    """Draw which tiles a block takes, the ring's stages at one moment, and the stage and parity of each use."""
    stages, across, down, blocks, now = 4, 5, 4, 2, 5
    figure, axes = canvas(
        "A ring of four stages: two tiles are loading while another is stored", "", plots.SIZE[0] + 0.9, 2.85
    )
    tones = {"stored": lighten(ORANGE, 0.6), "loading": lighten(BLUE, 0.45), "free": "white"}
    write(axes, 0.12, 2.42, "x: block 0 of 2 takes every second tile", "left", 7.5)
    left, top, wide, high = 0.12, 2.28, 0.4, 0.26
    for tile in range(across * down):
        use, x, y = tile // blocks, left + tile % across * wide, top - (tile // across + 1) * high
        mine = tile % blocks == 0
        state = (
            "none"
            if not mine or use < now - 1
            else "stored"
            if use <= now
            else "loading"
            if use < 8
            else "free"
        )
        box(
            axes,
            x,
            y,
            wide,
            high,
            tones.get(state, "#f4f4f4"),
            "#999999",
            f"use {use}" if mine else "",
            linewidth=0.6,
        )
    write(axes, left, 1.1, "row: tile / 5 × ROWS", "left")
    write(axes, left, 0.95, "column: tile % 5 × COLUMNS", "left")

    ring_x, ring_wide, pitch = 2.8, 0.85, 0.26
    rows = (
        ("use 4", "stored", "its store has read it: use 8 may be loaded"),
        ("use 5", "stored", "its store has just been issued"),
        ("use 6", "loading", "loading, or full"),
        ("use 7", "loading", "loading"),
    )
    write(axes, ring_x, 2.42, "shared memory at one moment", "left", 7.5)
    for stage, (use, state, text) in enumerate(rows):
        y = top - (stage + 1) * pitch
        box(
            axes,
            ring_x,
            y,
            ring_wide,
            pitch * 0.86,
            tones[state],
            "#999999",
            f"stage {stage}: {use}",
            linewidth=0.6,
        )
        write(axes, ring_x + ring_wide + 0.08, y + pitch * 0.43, text, "left")
    draw_arrow(axes, (left + across * wide + 0.06, top - 0.52), (ring_x - 0.06, top - 0.52), BLUE)
    write(axes, (left + across * wide + ring_x) / 2, top - 0.4, "load", color=BLUE)
    middle, low = ring_x + ring_wide / 2, top - stages * pitch
    draw_arrow(axes, (middle, low), (middle, low - 0.22), ORANGE)
    write(axes, middle + 0.08, low - 0.14, "store, to the same corner of out", "left", color=ORANGE)
    cell, base = 0.42, 0.52
    for line, (name, value) in enumerate(
        (
            ("use", lambda use: use),
            ("stage: use % 4", lambda use: use % stages),
            ("parity: use / 4 % 2", lambda use: use // stages % 2),
        )
    ):
        y = base - 0.17 * line
        write(axes, 1.25, y + 0.075, name, "right")
        for use in range(10):
            x = 1.35 + use * cell
            box(axes, x, y, cell, 0.16, lighten(GREEN, 0.1 + 0.25 * (use // stages % 2)), "white")
            write(axes, x + cell / 2, y + 0.075, str(value(use)))
    return figure.describe(
        "Left: a matrix of 20 tiles, of which block 0 takes every second one as its uses 0 to 9. Right: a ring of "
        "four stages. Stage 0 held use 4, whose store has read it, so use 8 may be loaded; stage 1 is being stored; "
        "stages 2 and 3 are loading uses 6 and 7. Below: each use with its stage (use modulo 4) and its parity (use "
        "divided by 4, modulo 2)."
    )


def draw_wavefronts(column: int = 5, rows: int = 16) -> plots.Picture:
    """Draw where a warp's column of a box lies in the banks of shared memory, without and with a swizzle of 128 bytes.

    Rows of the box have 32 floats, so a row fills all banks once. The first `rows` of the 32 lanes are drawn.
    """
    addresses = range(column * 4, 32 * 128, 128)
    plain, swizzled = (
        count_wavefronts([tensor_map.swizzle_offset(address, swizzle) for address in addresses], 4)
        for swizzle in ("none", "128B")
    )
    figure, axes = canvas(
        f"A warp reads column {column}: {plain} wavefronts as it lies, {swizzled} with the swizzle",
        "",
        7.4,
        3.2,
    )
    bank, high, top = 0.077, 0.136, 2.6
    for left, swizzle, name in ((0.6, "none", "no swizzle"), (4.12, "128B", "swizzle 128B: unit ^ row % 8")):
        write(axes, left, 2.87, name, "left", 8, fontweight="bold")
        for unit in range(8):
            write(axes, left + unit * 4 * bank, 2.69, str(4 * unit), "left")
        taken: dict[int, int] = {}
        for row in range(rows):
            y = top - (row + 1) * high
            place = tensor_map.swizzle_offset(row * 128 + column * 4, swizzle) // 4 % 32
            front = taken[place] = taken.get(place, 0) + 1
            tone = lighten((BLUE, ORANGE, GREEN)[(front - 1) % 3], 0.75)
            for unit in range(8):
                box(axes, left + unit * 4 * bank, y, 4 * bank, high, "#f4f4f4", "white", linewidth=0.8)
            box(axes, left + place // 4 * 4 * bank, y + 0.01, 4 * bank, high - 0.02, lighten(tone, 0.35))
            box(axes, left + place * bank, y + 0.01, bank, high - 0.02, tone)
            write(axes, left - 0.06, y + high / 2, f"row {row}" if left < 1 else str(row), "right")
            write(axes, left + 32 * bank + 0.06, y + high / 2, f"wavefront {front}", "left")
    write(axes, 0.54, 2.69, "bank", "right")
    write(
        axes,
        0.6,
        0.27,
        "Lane r reads row r; rows 16 to 31 repeat the pattern. A wavefront reads each bank at most "
        "once. Pale: the unit of",
        "left",
    )
    write(
        axes,
        0.6,
        0.12,
        "16 bytes that holds the element; dark: its bank. We chose the order of the wavefronts.",
        "left",
    )
    return figure.describe(
        f"Two tables of 16 rows and 32 banks. Without a swizzle, column {column} lies in bank {column} in every row, "
        "so each lane needs a wavefront of its own. With the swizzle of 128 bytes, rows 0 to 7 have it in eight "
        "different units, and one wavefront serves eight lanes; rows 8 to 15 follow in the second."
    )


def draw_multicast() -> plots.Picture:
    """Draw two blocks that need the same tile: each loads all of it, or each loads half and sends it to both."""
    figure, axes = canvas("Multicast: L2 sends half as much; each block receives all", "", 7.0, 2.5)
    for left, name, total in (
        (0.15, "each block loads the whole tile", "64 KiB leave L2"),
        (3.75, "a cluster of two: each loads half, for both", "32 KiB leave L2"),
    ):
        multicast = left > 1
        write(axes, left, 2.12, name, "left", 8, fontweight="bold")
        box(axes, left, 1.66, 3.05, 0.3, "#eeeeee")
        write(axes, left + 1.52, 1.81, f"L2: {total}", size=7.5)
        for rank in range(2):
            x = left + rank * 1.6
            box(axes, x, 0.42, 1.45, 0.72, "white", BLUE, linewidth=1)
            write(axes, x + 0.06, 0.53, f"block {rank}: its tile of 32 KiB", "left", 7)
            for half, tone in enumerate((BLUE, ORANGE)):
                box(axes, x + 0.05 + half * 0.68, 0.66, 0.67, 0.4, lighten(tone, 0.45), "white")
                write(
                    axes,
                    x + 0.385 + half * 0.68,
                    0.86,
                    "rows 0 to\n127" if half == 0 else "rows 128\nto 255",
                    linespacing=1.2,
                )
                if multicast:
                    draw_arrow(
                        axes, (left + 0.385 + half * 2.28, 1.66), (x + 0.385 + half * 0.68, 1.08), tone
                    )
                else:
                    draw_arrow(axes, (x + 0.385 + half * 0.68, 1.66), (x + 0.385 + half * 0.68, 1.08), tone)
        write(
            axes,
            left,
            0.22,
            "full of each block: 1 arrival of its own, 32,768 bytes" + (" from both" if multicast else ""),
            "left",
        )
    return figure.describe(
        "Left: two blocks load the same tile of 32 KiB from L2, which sends 64 KiB. Right: in a cluster of two, block "
        "0 loads rows 0 to 127 and block 1 rows 128 to 255, each for both blocks; L2 sends 32 KiB. The barrier of each "
        "block expects one arrival and 32,768 bytes in either case."
    )


def draw_curve(record, key: str, label: str, title: str, logarithmic: bool = False) -> plots.Picture:
    """Draw the speed of the versions of a sweep against the value of `key`, and the peer as a line."""
    rows = sorted(record.rows, key=lambda row: row[key])
    figure, axes = plots.new_figure(rows, title, record.label(), 2.5)
    axes.plot([row[key] for row in rows], [row["gbps"] for row in rows], "o-", color=BLUE, markersize=5)
    peer = rows[0]["gbps"] / rows[0]["ratio"]
    axes.axhline(peer, color=plots.colour("torch"), linewidth=1, linestyle="--", label=rows[0]["peer"])
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks([row[key] for row in rows], [f"{row[key]:,}" for row in rows])
    axes.set(xlabel=label, ylabel="GB/s", ylim=(0, 1.12 * max(peer, *(row["gbps"] for row in rows))))
    axes.legend(fontsize=7, frameon=False, loc="best")
    speeds = ", ".join(f"{row['gbps']:.0f} at {row[key]:,}" for row in rows)
    return figure.describe(f"{title}. GB/s over {label}: {speeds}; {rows[0]['peer']} {peer:.0f}.")
