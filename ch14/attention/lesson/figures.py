"""Pictures of flash attention: the scores that a tile computes, and when each unit is busy."""

from __future__ import annotations

from ch14.attention.configs import estimate_clocks
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lanes, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
GROUPS = (BLUE, ORANGE)  # the colours of the two warp groups


def blocks_picture(
    queries: int = 700, keys: int = 1000, block: int = 128, causal: bool = True
) -> plots.Picture:
    """Draw the scores of one head, cut into blocks, and the blocks that one tile of queries visits, to scale."""
    row_blocks, columns = -(-queries // block), -(-keys // block)
    chosen = row_blocks - 2 if row_blocks > 1 else 0
    visited = min(columns, chosen + 1) if causal else columns
    figure, axes = canvas(
        f"A tile of {block} queries meets {visited} of {columns} blocks of keys, the last one first",
        f"{queries} queries, {keys} keys" + (", causal" if causal else ""),
        7.0,
        3.0,
    )
    scale = min(3.6 / keys, 1.95 / queries)
    left, top = 1.05, 2.42
    width, height, step = keys * scale, queries * scale, block * scale
    for row in range(row_blocks):
        for column in range(columns):
            x, y = left + column * step, top - min((row + 1) * block, queries) * scale
            size = min(step, left + width - x), min(step, queries * scale - row * step)
            seen = not causal or column <= row
            mixed = causal and column == row or column == columns - 1 and keys % block
            tone = (
                lighten(GREEN, 0.75 if mixed else 0.3)
                if row == chosen and seen
                else "#f2f2f2"
                if seen
                else "white"
            )
            box(axes, x, y, *size, tone, "#aaaaaa", linewidth=0.4)
    if causal:
        end = min(queries, keys)
        axes.plot([left, left + end * scale], [top, top - end * scale], color="black", linewidth=0.8)
    y = top - min((chosen + 1) * block, queries) * scale
    tall = min(step, (queries - chosen * block) * scale)
    for x, name in ((left - 0.42, "Q"), (left + width + 0.15, "O")):
        box(axes, x, top - height, 0.3, height, lighten(BLUE, 0.25), "black", linewidth=0.6)
        box(axes, x, y, 0.3, tall, BLUE)
        write(axes, x + 0.15, top + 0.1, name)
    write(axes, left + width / 2, top + 0.34, "K, V: by TMA, a ring of blocks")
    box(axes, left, top + 0.1, width, 0.14, lighten(ORANGE, 0.25), "black", linewidth=0.6)
    box(axes, left, top + 0.1, min(visited * step, width), 0.14, ORANGE)
    for line, (tone, text) in enumerate(
        (
            (lighten(GREEN, 0.3), "whole blocks: no mask"),
            (lighten(GREEN, 0.75), "mask: diagonal or end"),
            ("#f2f2f2", "other tiles' scores"),
        )
    ):
        box(axes, left + width + 0.7, top - 0.25 - 0.24 * line, 0.14, 0.14, tone, "#aaaaaa", linewidth=0.4)
        write(axes, left + width + 0.92, top - 0.18 - 0.24 * line, text, "left")
    write(axes, left + width + 0.7, top - 1.1, "no score is ever\nwritten to memory", "left")
    mask = "the diagonal or the end of the keys" if causal else "the end of the keys"
    return figure.describe(
        f"The scores of {queries} queries and {keys} keys in blocks of {block} × {block}, with Q and O on their sides "
        f"and K and V above. One tile of queries is marked: it meets {visited} of {columns} blocks of keys, the last "
        f"one first. Only a block at {mask} needs a mask. No score is written to memory."
    )


def schedule(step: str, d: int, blocks: int = 4) -> tuple[list[tuple[str, int, float, float]], float]:
    """Model one SM with two warp groups of 64 queries and blocks of 128 keys; `step` is lockstep, roles or overlap.

    Return the spans (unit, group, begin, end) in clocks, and the share of the time, from the first product to the last,
    in which the tensor core is busy. The model counts throughput alone: loads and latencies are free.
    """
    cost = {name: 64 * 128 * each for name, each in estimate_clocks(d).items()}
    product, softmax = cost["products"] / 2, cost["exponential"] + cost["float32"]
    free, ready, spans = {"tensor core": 0.0, "softmax": 0.0}, [0.0, 0.0], []

    def run(unit, group, duration, after):
        begin = max(free[unit], after)
        free[unit] = begin + duration
        spans.append((unit, group, begin, free[unit]))
        return free[unit]

    for block in range(blocks + 1):
        scored = []
        for group in range(2):  # the product with V of the last block, and the scores of this block
            ends = [
                run("tensor core", group, product, ready[group])
                for _ in range((block > 0) + (block < blocks))
            ]
            scored.append(ends[0 if step == "overlap" else -1])  # overlap computes the scores first
            if step != "lockstep" and block < blocks:
                ready[group] = run("softmax", group, softmax, scored[group])
        if step == "lockstep" and block < blocks:
            ready = [max(run("softmax", group, softmax, max(scored)) for group in range(2))] * 2
    busy = sum(end - begin for unit, _, begin, end in spans if unit == "tensor core")
    return spans, busy / max(end for unit, _, _, end in spans if unit == "tensor core")


def timeline_picture(d: int = 128) -> plots.Picture:
    """Draw the `schedule` of three steps, one below the other."""
    names = {"lockstep": "in lockstep", "roles": "free of each other", "overlap": "and overlapping"}
    schedules = {step: schedule(step, d) for step in names}
    longest = max(end for spans, _ in schedules.values() for *_, end in spans)
    lockstep, roles, overlap = (f"{busy:.0%}" for _, busy in schedules.values())
    title = f"Tensor core busy, D {d}: {lockstep} in lockstep, {roles} free, {overlap} overlapping"
    figure, axes = canvas(title, "a model of four blocks of keys: throughputs alone, no latency", 7.2, 2.9)
    scale, left = 5.0 / longest, 1.95
    for line, (step, (spans, _)) in enumerate(schedules.items()):
        lanes(axes, 2.35 - 0.72 * line, left, scale, longest, names[step], spans, GROUPS)
    for group, tone in enumerate(GROUPS):
        box(axes, 0.07, 0.12 + 0.18 * (1 - group), 0.1, 0.1, tone)
        write(axes, 0.22, 0.17 + 0.18 * (1 - group), f"warp group {group}", "left", 6.5)
    return figure.describe(
        f"{title}. Three timelines of the tensor core and the softmax, which two warp groups use in turn. In lockstep "
        "the tensor core is idle while the groups compute the softmax; free of each other, one group multiplies while "
        "the other computes the softmax."
    )


def draw_rescaling(blocks=((1, 3), (5, 2), (4, 1))) -> plots.Picture:
    """Draw the weights of one row after each block of keys: where the maximum rises, all earlier weights shrink."""
    figure, axes = canvas(
        "Where the maximum rises, all that was summed before shrinks",
        "one query, three blocks of two keys; weights are powers of two of score - maximum",
        7.2,
        2.95,
    )
    seen, row_max, row_sum = [], None, 0.0
    for column, block in enumerate(blocks):
        left, base = 0.35 + 2.35 * column, 1.15
        new_max = max(block) if row_max is None else max(row_max, *block)
        rescale = 0.0 if row_max is None else 2.0 ** (row_max - new_max)
        write(
            axes, left, 2.5, f"block {column}: scores {block[0]} and {block[1]}", "left", 8, fontweight="bold"
        )
        for key, score in enumerate([*seen, *block]):
            new = key >= len(seen)
            weight = 2.0 ** (score - new_max)
            x = left + 0.34 * key
            if not new and rescale < 1:
                box(
                    axes,
                    x,
                    base,
                    0.26,
                    2.0 ** (score - row_max),
                    "none",
                    "#999999",
                    linestyle=":",
                    linewidth=0.8,
                )
            box(axes, x, base, 0.26, weight, BLUE if new else lighten(BLUE, 0.35))
            write(axes, x + 0.13, base - 0.1, f"{weight:g}", size=6)
        axes.plot([left - 0.05, left + 2.0], [base, base], color="black", linewidth=0.6)
        total = row_sum * rescale + sum(2.0 ** (score - new_max) for score in block)
        factor = "" if row_max is None else f"2^({row_max} - {new_max}) = {rescale:g}"
        write(axes, left, 0.82, f"maximum {'' if row_max is None else f'{row_max} → '}{new_max}", "left", 7.5)
        write(axes, left, 0.62, f"factor {factor}" if factor else "nothing before", "left", 7.5)
        sums = " + ".join(f"{2.0 ** (score - new_max):g}" for score in block)
        before = "" if row_max is None else f"{row_sum:g} × {rescale:g} + "
        write(axes, left, 0.42, f"sum {before}{sums} = {total:g}", "left", 7.5)
        seen, row_max, row_sum = [*seen, *block], new_max, total
    return figure.describe(
        "Three charts of the weights of one row. After block 0, with scores 1 and 3, the weights are 0.25 and 1. In "
        "block 1 the maximum rises from 3 to 5: the two old weights shrink to a quarter, and the sum becomes 1.25 "
        "times 0.25 plus 1.125. In block 2 the maximum stays and nothing shrinks; the sum is 2."
    )


def draw_fragment(columns: int = 128) -> plots.Picture:
    """Draw which thread of a warp group holds which element of a 64 x `columns` accumulator of wgmma."""
    figure, axes = canvas(
        "A row of the accumulator lies in four neighbouring threads of one warp",
        f"layout of a 64 × {columns} product: version [3, 0], warps [4, 1], instruction [16, {columns}, 16]",
        7.2,
        3.1,
    )
    left, top, tall = 0.9, 2.55, 0.5
    for warp in range(4):
        y = top - (warp + 1) * tall
        box(axes, left, y, 1.7, tall * 0.94, lighten(GREEN, 0.2 + 0.15 * warp), "white")
        write(axes, left + 0.85, y + tall / 2, f"warp {warp}")
        write(axes, left - 0.06, y + tall / 2, f"rows {16 * warp}–{16 * warp + 15}", "right", 6.5)
    write(axes, left + 0.85, top + 0.1, f"{columns} columns", size=7)
    x0, y0, size, high = 3.45, 2.4, 0.27, 0.17
    write(axes, x0 - 0.08, y0 + 0.27, "warp 0", "right", 7.5, fontweight="bold")
    for line, row in enumerate((0, 1, 7, 8, 9, 15)):
        y = y0 - line * (high + 0.03) - (line > 1) * 0.1 - (line > 4) * 0.1 - (line > 2) * 0.06
        write(axes, x0 - 0.08, y + high / 2, f"row {row}", "right", 6.5)
        for column in range(12):
            lane = row % 8 * 4 + column % 8 // 2
            tone = lighten(BLUE, 0.25 + 0.25 * (lane % 4)) if row % 8 == 0 else "#eeeeee"
            box(axes, x0 + column * size, y, size * 0.96, high, tone)
            write(
                axes,
                x0 + (column + 0.5) * size,
                y + high / 2,
                str(lane),
                size=6,
                color="white" if row % 8 == 0 and lane % 4 == 3 else "black",
            )
        write(axes, x0 + 12 * size + 0.1, y + high / 2, "…", size=7)
    for column in range(0, 12, 2):
        write(axes, x0 + (column + 0.5) * size, y0 + high + 0.08, str(column), size=6, color=plots.GREY)
    write(axes, x0, 0.85, "The number is the lane (thread) that holds the element. Lane 0 holds", "left", 7)
    write(axes, x0, 0.69, f"columns 0, 1, 8, 9, … of the rows 0 and 8: {columns // 2} registers.", "left", 7)
    write(axes, x0, 0.53, "A maximum or a sum of a row takes two exchanges", "left", 7)
    write(axes, x0, 0.37, "among the lanes 0 to 3, and no shared memory.", "left", 7)
    return figure.describe(
        f"Left: a 64 by {columns} accumulator, cut into four bands of 16 rows, one per warp. Right: the first 12 "
        "columns of some rows of warp 0. In rows 0 and 8, columns 0 and 1 belong to lane 0, 2 and 3 to lane 1, 4 and 5 "
        "to lane 2, 6 and 7 to lane 3, and columns 8 and 9 again to lane 0."
    )


def draw_phases(uses: int = 4) -> plots.Picture:
    """Draw one stage of the ring over time: its tile, the phases of its two barriers, and who waits for which."""
    figure, axes = canvas(
        "One stage: full and empty end their phases in turn",
        "digits are the parity of the current phase; a wait for parity p ends when the phase that "
        "has it ends",
        7.2,
        3.2,
    )
    left, step, end = 1.25, 0.42, 5.75
    names = (
        "producer",
        "tile of K",
        "full: 1 arrival, bytes",
        "empty: 1 arrival per group",
        "group 0",
        "group 1",
    )
    tops = {name: 2.6 - 0.36 * line for line, name in enumerate(names)}
    for name, y in tops.items():
        write(axes, left - 0.08, y + 0.11, name.partition(":")[0], "right", 7.5)
        box(axes, left, y, end, 0.22, "#f2f2f2")
    full, empty, x = [0.0], [0.0], 0.0
    for use in range(uses):
        issue, landed = x, x + 1.0
        done = (landed + 1.05, landed + 1.45)
        box(axes, left + issue * step, tops["producer"], 0.1, 0.22, BLUE)
        write(axes, left + issue * step + 0.14, tops["producer"] + 0.11, f"load {use}", "left", 6)
        box(axes, left + issue * step, tops["tile of K"], (landed - issue) * step, 0.22, lighten(BLUE, 0.35))
        write(axes, left + (issue + landed) / 2 * step, tops["tile of K"] + 0.11, "landing", size=5.5)
        box(
            axes,
            left + landed * step,
            tops["tile of K"],
            (done[1] - landed) * step,
            0.22,
            lighten(GREEN, 0.5),
        )
        write(axes, left + (landed + done[1]) / 2 * step, tops["tile of K"] + 0.11, f"block {use}", size=6)
        for group, until in enumerate(done):
            y = tops[f"group {group}"]
            box(axes, left + landed * step, y, (until - landed) * step, 0.22, lighten(GROUPS[group], 0.5))
            write(axes, left + (landed + until) / 2 * step, y + 0.11, "S", size=6)
            axes.annotate(
                "",
                (left + until * step, tops[names[3]]),
                (left + until * step, y + 0.22),
                arrowprops=dict(arrowstyle="-|>", color=plots.GREY, lw=0.7, shrinkA=0, shrinkB=0),
            )
        for y0, y1, at in ((tops["tile of K"], tops[names[2]] + 0.22, landed),):
            axes.annotate(
                "",
                (left + at * step, y1),
                (left + at * step, y0),
                arrowprops=dict(arrowstyle="-|>", color=plots.GREY, lw=0.7, shrinkA=0, shrinkB=0),
            )
        full.append(landed)
        empty.append(done[1])
        x = done[1] + 0.25
    for name, marks in ((names[2], full), (names[3], empty)):
        for phase, (begin, until) in enumerate(zip(marks, [*marks[1:], end / step])):
            box(
                axes,
                left + begin * step,
                tops[name],
                (until - begin) * step,
                0.22,
                lighten(ORANGE, 0.25 if phase % 2 else 0.6),
                "white",
                linewidth=0.8,
            )
            write(axes, left + (begin + until) / 2 * step, tops[name] + 0.11, str(phase % 2), size=7)
    write(
        axes,
        0.1,
        0.48,
        "The groups wait for full with parity 0, 1, 0, …  The producer waits for empty with parity "
        "1, 0, 1, …: a new barrier is in phase 0,",
        "left",
        6.5,
    )
    write(
        axes,
        0.1,
        0.33,
        "so a wait for parity 1 returns at once, and the first load of a stage waits for nobody.",
        "left",
        6.5,
    )
    return figure.describe(
        "A timeline of one stage of the ring. The producer issues load 0, the tile lands, and the phase of full "
        "changes from 0 to 1. Both groups then compute their scores and arrive at empty, whose phase changes from 0 "
        "to 1 with the second arrival. Then the producer issues load 1, and so on, in turn."
    )


def deal_tiles(row_blocks: int, heads: int, programs: int, paired: bool) -> list[list[int]]:
    """Return the numbers of key blocks of the tiles that each program takes under a causal mask, in order.

    Longest first, tile by tile; or in pairs of a long and a short tile.
    """
    tiles = list(range(row_blocks, 0, -1)) * heads
    if paired:
        order = [row_blocks - index // 2 if index % 2 == 0 else index // 2 + 1 for index in range(row_blocks)]
        tiles = order * heads
    width = 2 if paired else 1
    return [
        [
            blocks
            for first in range(program * width, len(tiles), programs * width)
            for blocks in tiles[first : first + width]
        ]
        for program in range(programs)
    ]


def draw_dealing(row_blocks: int = 8, heads: int = 3, programs: int = 6) -> plots.Picture:
    """Draw the work of persistent programs under a causal mask: tiles in a fixed stride, and pairs of tiles."""
    dealt = {
        name: deal_tiles(row_blocks, heads, programs, paired)
        for name, paired in (("tile by tile", False), ("in pairs", True))
    }
    longest = max(sum(tiles) for ways in dealt.values() for tiles in ways)
    busy = {name: sum(map(sum, ways)) / (programs * max(map(sum, ways))) for name, ways in dealt.items()}
    figure, axes = canvas(
        "Causal: a fixed stride deals unequal work, pairs deal equal work",
        f"{heads} heads of {row_blocks} tiles on {programs} programs; the number is the blocks of "
        "keys that a tile meets",
        7.2,
        2.6,
    )
    scale = 2.9 / longest
    for side, (name, ways) in enumerate(dealt.items()):
        left = 0.35 + 3.5 * side
        write(
            axes,
            left,
            2.15,
            f"{name}: programs are busy {busy[name]:.0%} of the time",
            "left",
            7.5,
            fontweight="bold",
        )
        for program, tiles in enumerate(ways):
            y, x = 1.8 - 0.26 * program, left
            for place, blocks in enumerate(tiles):
                box(
                    axes,
                    x,
                    y,
                    blocks * scale,
                    0.2,
                    lighten(GROUPS[place // 2 % 2 if name == "in pairs" else place % 2], 0.55),
                    "white",
                    linewidth=0.8,
                )
                write(axes, x + blocks * scale / 2, y + 0.1, str(blocks), size=5.5)
                x += blocks * scale
        axes.plot(
            [left + max(map(sum, ways)) * scale] * 2,
            [0.45, 2.02],
            color="black",
            linewidth=0.8,
            linestyle=":",
        )
    write(axes, 0.35, 0.3, "time →", "left", 7)
    return figure.describe(
        f"Bars for {programs} programs. Tile by tile, the first program gets the longest tiles of every round and ends "
        f"last; programs are busy {busy['tile by tile']:.0%} of the time. In pairs of a long and a short tile, all "
        f"pairs are equal, and programs are busy {busy['in pairs']:.0%} of the time."
    )
