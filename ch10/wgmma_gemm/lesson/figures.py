"""Pictures of `ch10_wgmma_gemm`: tiles, the descriptor, the sums in registers, the roles of warps, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import FancyBboxPatch, Rectangle

from ch10.tile_pipeline.lesson.figures import BLUE, GREEN, ORANGE, draw_arrow
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write


def draw_gemm_tiles() -> plots.Picture:
    """Draw what a CTA reads in one step of K for a tile of C with 128 x 128 and with 128 x 256 elements."""
    figure, axes = canvas("What one step along K loads, and how often it uses each byte", "", 6.4, 2.75)
    unit = 0.68  # inches of 128 rows or columns
    for left, columns in ((0.35, 128), (3.4, 256)):
        wide, deep, low, x = unit * columns / 128, unit / 2, 0.72, left + 0.75
        box(axes, left - 0.2, low, 4 * 0.2, unit, "white", "#aaaaaa", linewidth=0.6)
        box(axes, left + 0.1, low, deep, unit, BLUE, "white", "A")
        y = low + unit + 0.12
        box(axes, x, y, wide, 4 * 0.2, "white", "#aaaaaa", linewidth=0.6)
        box(axes, x, y + 0.25, wide, deep, ORANGE, "white", "B")
        box(axes, x, low, wide, unit, lighten(GREEN), "white", f"C\n128 × {columns}")
        write(axes, left - 0.2, 0.53, "64 columns of A: 16 KiB", "left")
        write(axes, left - 0.2, 0.39, f"64 columns of B: {columns // 8} KiB", "left")
        operations, loaded = 2 * 128 * columns * 64, (128 + columns) * 128
        write(
            axes,
            left - 0.2,
            0.22,
            f"{operations / 1e6:.1f} M operations, {operations / loaded:.0f} per byte",
            "left",
            7.5,
            fontweight="bold",
        )
        write(axes, x + wide + 0.08, y + 0.4, "B, a row per\ncolumn of C", "left", linespacing=1.2)
    return figure.describe(
        "A tile of 128 by 128 elements of C needs 32 KiB per step along K and makes 64 operations "
        "per byte. A tile of 128 by 256 needs 48 KiB and makes 85 operations per byte."
    )


def draw_descriptor() -> plots.Picture:
    """Draw eight rows of a swizzled box in shared memory, and the fields of the descriptor that finds them."""
    figure, axes = canvas(
        "A descriptor finds a swizzled box of 128-byte rows in shared memory", "", 6.4, 3.25
    )
    left, top, cell, high = 0.75, 2.62, 0.47, 0.145
    tones = [lighten(tone, 0.45) for tone in (BLUE, ORANGE, GREEN)] + ["#dddddd"]
    for row in range(8):
        y = top - high * (row + 1)
        write(axes, left - 0.06, y + high / 2, f"row {row}", "right")
        for place in range(8):
            unit = place ^ row
            box(
                axes,
                left + cell * place,
                y,
                cell,
                high,
                tones[unit // 2],
                "white",
                f"unit {unit}",
                linewidth=0.6,
            )
    write(
        axes,
        left + 4 * cell,
        top + 0.1,
        "shared memory: eight rows of 128 bytes are one group of 1,024 bytes",
    )
    write(axes, left + 8 * cell + 0.1, top - 0.1, "colour: the 16 columns", "left")
    for k, tone in enumerate(tones):
        box(axes, left + 8 * cell + 0.1, top - 0.37 - 0.16 * k, 0.14, 0.11, tone)
        write(
            axes, left + 8 * cell + 0.29, top - 0.32 - 0.16 * k, f"of product {k}: + {32 * k} bytes", "left"
        )
    write(axes, left + 8 * cell + 0.1, top - 1.08, "unit: 16 bytes, 8 columns", "left", color=plots.GREY)
    low, bit = 0.5, 5.6 / 64
    fields = (
        (0, 14, "address / 16", lighten(BLUE)),
        (16, 30, "1 (not used)", "#eeeeee"),
        (32, 46, "1,024 / 16 = 64", lighten(ORANGE)),
        (62, 64, "1", lighten(GREEN)),
    )
    box(axes, 0.4, low, 64 * bit, 0.27, "white", "#999999", linewidth=0.6)
    for begin, end, text, tone in fields:
        box(axes, 6.0 - end * bit, low, (end - begin) * bit, 0.27, tone, "#999999", text, linewidth=0.6)
        if end - begin > 2:
            write(axes, 6.0 - begin * bit, low + 0.35, str(begin), "right", color=plots.GREY)
        write(axes, 6.0 - end * bit, low + 0.35, str(end - 1), "left", color=plots.GREY)
    write(axes, 0.4, low + 0.56, "the descriptor: 64 bits, of which bits 62 and 63 name the swizzle", "left")
    for x, text in (
        (6.0 - 7 * bit, "where the box starts"),
        (6.0 - 39 * bit, "to the next group of eight rows"),
        (0.43, "swizzle: 128 bytes"),
    ):
        write(axes, x, low - 0.12, text, "left" if x < 1 else "center")
    write(
        axes,
        0.4,
        0.14,
        "The next 16 columns start 32 bytes further. The tensor core applies the XOR to the sum.",
        "left",
        color=plots.GREY,
    )
    return figure.describe(
        "Eight rows of 128 bytes in shared memory. Row r holds unit u of 16 bytes at place u XOR r. The 16 columns of "
        "each product are two units, at different places in each row. Below: the descriptor, with the address in bits "
        "0 to 13, a 1 in bit 16, the distance of 1,024 bytes between groups of eight rows in bits 32 to 45, and the "
        "swizzle in bits 62 and 63."
    )


def draw_accumulators() -> plots.Picture:
    """Draw which lane of a warp group holds which of the 64 x WIDTH sums, and in which register."""
    figure, axes = canvas("Who holds the sums: warp, lane and register of each element of d", "", 6.4, 3.35)
    left, top, warp_high = 0.3, 2.72, 0.52
    for warp in range(4):
        y = top - warp_high * (warp + 1)
        box(axes, left, y, 1.7, warp_high * 0.94, lighten(BLUE, 0.5 - 0.1 * warp), "white")
        write(axes, left + 1.0, y + warp_high / 2, f"warp {warp}: rows {16 * warp} to {16 * warp + 15}")
    box(axes, left, top - warp_high, 0.28, warp_high * 0.94, "none", "black", linewidth=1.2)
    write(axes, left + 0.85, top + 0.1, "d: 64 rows × WIDTH columns")
    write(axes, left, 0.48, "the frame: 16 rows × 8 columns,", "left", color=plots.GREY)
    write(axes, left, 0.34, "group j of the columns", "left", color=plots.GREY)
    x, high, cell = 3.0, 0.138, 0.52
    axes.annotate(
        "",
        (x - 0.45, top - 0.08),
        (left + 0.3, top - 0.08),
        arrowprops={"arrowstyle": "-|>", "color": plots.GREY, "linewidth": 0.8},
    )
    for row in range(16):
        y = top - high * (row + 1) - 0.05 * (row > 7)
        write(axes, x - 0.06, y + high / 2, f"row {row}", "right")
        for pair in range(4):
            lane = row % 8 * 4 + pair
            tone = lighten(GREEN if row < 8 else ORANGE, 0.45 if lane else 0.8)
            box(axes, x + cell * pair, y, cell, high, tone, "white", f"lane {lane}", linewidth=0.6)
    for pair in range(4):
        write(axes, x + cell * (pair + 0.5), top + 0.1, f"8j + {2 * pair}, {2 * pair + 1}")
    for y, text in ((top - 4 * high, "d[4j], d[4j + 1]"), (top - 12 * high - 0.05, "d[4j + 2], d[4j + 3]")):
        write(axes, x + 4 * cell + 0.1, y, text, "left", 8)
    write(
        axes,
        left,
        0.14,
        "Each lane holds two neighbours in a row, and two more eight rows below.",
        "left",
        color=plots.GREY,
    )
    return figure.describe(
        "The 64 rows of sums belong to four warps, 16 rows each. In each group j of eight columns, lane l of a warp "
        "holds row l / 4, columns 8j + 2 (l mod 4) and the next one, in registers d[4j] and d[4j + 1], and the same "
        "columns eight rows below in d[4j + 2] and d[4j + 3]."
    )


def draw_warp_roles(consumers: int = 1, columns: int = 128) -> plots.Picture:
    """Draw one stage of the ring with its two barriers, and every signal between the producer and the consumers of a
    tile of 128 x `columns`."""
    stage_bytes, warps = (128 + columns) * 128, 4 * consumers
    figure, axes = canvas("One stage and its two barriers: every signal on its way round", "", 6.4, 3.1)

    def draw_part(x, y, width, height, tone, name, *lines):
        axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.06",
                linewidth=1.5,
                facecolor="white",
                edgecolor=tone,
            )
        )
        write(axes, x + width / 2, y + height - 0.15, name, size=8, fontweight="bold")
        for index, line in enumerate(lines):
            write(axes, x + width / 2, y + height - 0.33 - 0.14 * index, line)

    draw_part(0.12, 1.05, 1.1, 0.72, BLUE, "producer", "one thread of", "a warp group")
    draw_part(2.45, 2.22, 1.5, 0.5, GREEN, "full", f"1 arrival + {stage_bytes:,} bytes")
    draw_part(2.45, 0.16, 1.5, 0.5, ORANGE, "empty", f"{warps} arrivals, one per warp")
    draw_part(1.95, 1.16, 0.62, 0.5, plots.GREY, "TMA", "engine")
    for shift in (0.16, 0.08, 0):
        box(axes, 3.05 + shift, 1.1 + shift, 0.9, 0.55, "white", "#999999", linewidth=0.7)
    share = 0.9 * 128 / (128 + columns)
    box(axes, 3.05, 1.1, share, 0.55, lighten(BLUE), "white", "A")
    box(axes, 3.05 + share, 1.1, 0.9 - share, 0.55, lighten(BLUE, 0.35), "white", "B")
    write(axes, 3.5, 0.98, f"a stage: {stage_bytes // 1024} KiB", color=plots.GREY)
    name = "consumer" if consumers == 1 else f"{consumers} consumers"
    draw_part(5.0, 1.05, 1.28, 0.72, GREEN, name, f"{warps} warps: wait,", "multiply, arrive")
    for start, end, tone, (x, y), text in (
        ((2.43, 0.41), (0.67, 1.03), ORANGE, (1.3, 0.6), "1  wait returns"),
        ((0.67, 1.79), (2.43, 2.47), BLUE, (1.0, 2.32), "2  arrive, expect bytes"),
        ((1.24, 1.41), (1.93, 1.41), BLUE, (1.58, 1.53), "3  load"),
        ((2.59, 1.41), (3.03, 1.41), BLUE, (2.81, 1.53), "4"),
        ((2.26, 1.68), (2.75, 2.2), BLUE, (2.98, 1.93), "5  bytes landed"),
        ((3.97, 2.47), (5.64, 1.79), GREEN, (5.25, 2.4), "6  wait returns"),
        ((4.13, 1.41), (4.98, 1.41), plots.GREY, (4.56, 1.53), "7  wgmma"),
        ((5.64, 1.03), (3.97, 0.41), ORANGE, (5.2, 0.5), "8  arrive: read"),
    ):
        draw_arrow(axes, start, end, tone)
        write(axes, x, y, text)
    return figure.describe(
        f"The producer waits on empty (1), arrives on full and announces {stage_bytes:,} bytes (2), and issues two "
        "loads (3). The TMA engine writes the stage (4) and counts the bytes on full (5). When all have landed, the "
        "consumers return from their wait (6), and their products read the stage (7). When a warp's products are done, "
        f"it arrives on empty (8); {warps} arrivals end the phase, and the round begins again."
    )


def draw_raster(groups: Sequence[int] = (1, 16), side: int = 8192, running: int = 132) -> plots.Picture:
    """Draw which tiles of C (side x side) the first `running` CTAs make, in bands of so many rows of tiles, and what
    they read per step along K."""
    rows, columns = side // 128, side // 256
    figure, axes = canvas(f"The first {running} tiles at {side}³, and what they read per step", "", 6.4, 3.1)
    high, wide, said = 2.0 / rows, 2.0 / columns, []
    for left, group in zip((0.5, 3.6), groups):
        chosen = set()
        for number in range(running):
            band = group * columns
            first = number // band * group
            chosen.add((first + number % band % group, number % band // group))
        box(axes, left, 0.5, 2.0, 2.0, "white", "#999999", linewidth=0.6)
        for row, column in chosen:
            box(
                axes,
                left + wide * column,
                2.5 - high * (row + 1),
                wide,
                high,
                lighten(GREEN),
                "white",
                linewidth=0.2,
            )
        tall, broad = len({row for row, _ in chosen}), len({column for _, column in chosen})
        box(axes, left - 0.16, 2.5 - high * tall, 0.1, high * tall, BLUE)
        box(axes, left, 2.56, wide * broad, 0.1, ORANGE)
        write(
            axes,
            left + 1.0,
            2.76,
            f"bands of {group} row{'s' * (group > 1)} of tiles",
            size=8,
            fontweight="bold",
        )
        text = f"{tall} tiles of A + {broad} of B: {(tall * 16 + broad * 32) / 1024:.2f} MiB"
        write(axes, left + 1.0, 0.34, text, size=8)
        said.append(f"in bands of {group}, {text}")
    write(
        axes,
        3.2,
        0.13,
        "C in tiles of 128 × 256; green: the tiles that run; blue: rows of A; orange: columns of B",
        color=plots.GREY,
    )
    return figure.describe(f"The first {running} tiles of C read per step along K: {'; '.join(said)}.")


# ---- what was measured

TONES = {"wait": "none", "load": BLUE, "product": GREEN, "store": ORANGE}  # by event


def _stack_rows(rows: Sequence[dict]) -> list[tuple[int, dict]]:
    """Return each row with the first line in which nothing else is drawn at that time."""
    ends, placed = [], []
    for row in sorted(rows, key=lambda row: (row["begin"], row["end"])):
        line = next((line for line, end in enumerate(ends) if end <= row["begin"]), len(ends))
        ends[line : line + 1] = [row["end"]]
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
            box(
                axes,
                x,
                bottom,
                width,
                high * 0.94,
                lighten(tone, 0.55) if tiles.index(row["tile"]) % 2 else tone,
                "white",
                text,
                linewidth=0.3,
            )
        ticks[y - high * lines / 2] = role
        y -= high * lines + 0.1
    figure.set_size_inches(7.4, 1.35 - y)
    axes.set(xlim=(-0.005 * duration, 1.005 * duration), ylim=(y, 0.06))
    axes.set_yticks(list(ticks), ticks.values(), fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time, cycles", fontsize=8)
    shown = [event for event in TONES if any(row["event"] == event for row in rows)]
    handles = [
        Rectangle(
            (0, 0),
            1,
            1,
            facecolor=TONES[event],
            linewidth=0,
            edgecolor="#aaaaaa",
            hatch="//////" if event == "wait" else None,
        )
        for event in shown
    ]
    if len(tiles) > 1:
        handles.append(Rectangle((0, 0), 1, 1, facecolor=lighten(plots.GREY, 0.4)))
        shown.append("lighter: every other tile")
    axes.legend(
        handles,
        shown,
        fontsize=7,
        ncols=len(shown),
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.1,
        handlelength=1.2,
        columnspacing=1.2,
    )
    said = f"{title}. A row for each of {', '.join(ticks.values())} over {duration:,} cycles ({', '.join(shown)})."
    for tile in tiles[1:]:
        firsts = [
            min(
                (
                    row["begin"] - start
                    for row in rows
                    if (row["tile"], row["role"]) == (tile, role) and row["event"] != "wait"
                ),
                default=None,
            )
            for role in ticks.values()
        ]
        begins = [f"{first:,} ({role})" for first, role in zip(firsts, ticks.values()) if first is not None]
        said += f" Tile {tile} begins at cycle {', '.join(begins)}."
    return figure.describe(said)
