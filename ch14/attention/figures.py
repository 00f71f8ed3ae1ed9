"""Pictures of flash attention: which scores a tile computes, and who is busy when."""

from __future__ import annotations

from ch14.attention.configs import clocks
from tilelab import plots
from tilelab.diagrams import box, canvas, lanes, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
GROUPS = (BLUE, ORANGE)  # the colours of the two warp groups


def blocks_picture(queries: int = 700, keys: int = 1000, block: int = 128, causal: bool = True) -> plots.Picture:
    """The scores of one head, cut into blocks, and what one tile of queries visits, to scale."""
    row_blocks, columns = -(-queries // block), -(-keys // block)
    chosen = row_blocks - 2 if row_blocks > 1 else 0
    visited = min(columns, chosen + 1) if causal else columns
    figure, axes = canvas(f"A tile of {block} queries meets {visited} of {columns} blocks of keys, the last one first",
                          f"{queries} queries, {keys} keys" + (", causal" if causal else ""), 7.0, 3.0)
    scale = min(3.6 / keys, 1.95 / queries)
    left, top = 1.05, 2.42
    wide, high, step = keys * scale, queries * scale, block * scale
    for row in range(row_blocks):
        for column in range(columns):
            x, y = left + column * step, top - min((row + 1) * block, queries) * scale
            size = min(step, left + wide - x), min(step, queries * scale - row * step)
            seen = not causal or column <= row
            mixed = causal and column == row or column == columns - 1 and keys % block
            tone = lighten(GREEN, 0.75 if mixed else 0.3) if row == chosen and seen else "#f2f2f2" if seen else "white"
            box(axes, x, y, *size, tone, "#aaaaaa", linewidth=0.4)
    if causal:
        end = min(queries, keys)
        axes.plot([left, left + end * scale], [top, top - end * scale], color="black", linewidth=0.8)
    y = top - min((chosen + 1) * block, queries) * scale
    tall = min(step, (queries - chosen * block) * scale)
    box(axes, left - 0.42, top - high, 0.3, high, lighten(BLUE, 0.25), "black", linewidth=0.6)
    box(axes, left - 0.42, y, 0.3, tall, BLUE)
    write(axes, left - 0.27, top + 0.1, "Q")
    write(axes, left + wide / 2, top + 0.34, "K, V: by TMA, a ring of blocks")
    box(axes, left, top + 0.1, wide, 0.14, lighten(ORANGE, 0.25), "black", linewidth=0.6)
    box(axes, left, top + 0.1, min(visited * step, wide), 0.14, ORANGE)
    box(axes, left + wide + 0.15, top - high, 0.3, high, lighten(BLUE, 0.25), "black", linewidth=0.6)
    box(axes, left + wide + 0.15, y, 0.3, tall, BLUE)
    write(axes, left + wide + 0.3, top + 0.1, "O")
    for line, (tone, text) in enumerate(((lighten(GREEN, 0.3), "whole blocks: no mask"),
                                         (lighten(GREEN, 0.75), "mask: diagonal or end"),
                                         ("#f2f2f2", "other tiles' scores"))):
        box(axes, left + wide + 0.7, top - 0.25 - 0.24 * line, 0.14, 0.14, tone, "#aaaaaa", linewidth=0.4)
        write(axes, left + wide + 0.92, top - 0.18 - 0.24 * line, text, "left")
    write(axes, left + wide + 0.7, top - 1.1, "no score is ever\nwritten to memory", "left")
    return figure


def schedule(step: str, d: int, blocks: int = 4) -> tuple[list[tuple[str, int, float, float]], float]:
    """Who is busy when, in a model of one SM with two warp groups of 64 queries and blocks of 128 keys: spans (unit,
    group, begin, end) in clocks, and the share of the time that the tensor core is busy between the first product and
    the last. Loads and latencies are free. `step` is lockstep, roles or overlap."""
    cost = {name: 64 * 128 * each for name, each in clocks(d).items()}
    product, softmax = cost["products"] / 2, cost["exponential"] + cost["float32"]
    free, ready, spans = {"tensor core": 0.0, "softmax": 0.0}, [0.0, 0.0], []

    def run(unit, group, takes, after):
        begin = max(free[unit], after)
        free[unit] = begin + takes
        spans.append((unit, group, begin, begin + takes))
        return begin + takes

    scored = [0.0, 0.0]
    for block in range(blocks + 1):
        done = []
        for group in range(2):
            now = ready[group]
            if step == "overlap":  # the product with V of the last block runs under this block's softmax
                if block < blocks:
                    scored[group] = run("tensor core", group, product, now)
                if block:
                    run("tensor core", group, product, now)
                done.append(scored[group])
            else:
                if block:
                    now = run("tensor core", group, product, now)
                if block < blocks:
                    now = run("tensor core", group, product, now)
                done.append(now)
            if step != "lockstep" and block < blocks:
                ready[group] = run("softmax", group, softmax, done[-1])
        if step == "lockstep" and block < blocks:
            for group in range(2):
                ready[group] = run("softmax", group, softmax, max(done))
            ready = [max(ready)] * 2
    busy = sum(end - begin for unit, _, begin, end in spans if unit == "tensor core")
    return spans, busy / max(end for unit, _, _, end in spans if unit == "tensor core")


def timeline_picture(d: int = 128) -> plots.Picture:
    """`schedule` of three steps, one below the other."""
    names = {"lockstep": "in lockstep", "roles": "free of each other", "overlap": "and overlapping"}
    made = {step: schedule(step, d) for step in names}
    longest = max(end for spans, _ in made.values() for *_, end in spans)
    figure, axes = canvas(f"Tensor core busy, D {d}: {made['lockstep'][1]:.0%} in lockstep, "
                          f"{made['roles'][1]:.0%} free, {made['overlap'][1]:.0%} overlapping",
                          "a model of four blocks of keys: throughputs alone, no latency", 7.2, 2.9)
    scale, left = 5.0 / longest, 1.95
    for line, (step, (spans, _)) in enumerate(made.items()):
        lanes(axes, 2.35 - 0.72 * line, left, scale, longest, names[step], spans, GROUPS)
    for group, tone in enumerate(GROUPS):
        box(axes, 0.07, 0.12 + 0.18 * (1 - group), 0.1, 0.1, tone)
        write(axes, 0.22, 0.17 + 0.18 * (1 - group), f"warp group {group}", "left", 6.5)
    return figure
