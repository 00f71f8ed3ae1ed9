"""Pictures of flash attention: the scores that a tile computes, and when each unit is busy."""

from __future__ import annotations

from ch14.attention.configs import estimate_clocks
from tilelab import plots
from tilelab.diagrams import box, canvas, lanes, lighten, write

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
GROUPS = (BLUE, ORANGE)  # the colours of the two warp groups


def blocks_picture(queries: int = 700, keys: int = 1000, block: int = 128, causal: bool = True) -> plots.Picture:
    """Draw the scores of one head, cut into blocks, and the blocks that one tile of queries visits, to scale."""
    row_blocks, columns = -(-queries // block), -(-keys // block)
    chosen = row_blocks - 2 if row_blocks > 1 else 0
    visited = min(columns, chosen + 1) if causal else columns
    figure, axes = canvas(f"A tile of {block} queries meets {visited} of {columns} blocks of keys, the last one first",
                          f"{queries} queries, {keys} keys" + (", causal" if causal else ""), 7.0, 3.0)
    scale = min(3.6 / keys, 1.95 / queries)
    left, top = 1.05, 2.42
    width, height, step = keys * scale, queries * scale, block * scale
    for row in range(row_blocks):
        for column in range(columns):
            x, y = left + column * step, top - min((row + 1) * block, queries) * scale
            size = min(step, left + width - x), min(step, queries * scale - row * step)
            seen = not causal or column <= row
            mixed = causal and column == row or column == columns - 1 and keys % block
            tone = lighten(GREEN, 0.75 if mixed else 0.3) if row == chosen and seen else "#f2f2f2" if seen else "white"
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
    for line, (tone, text) in enumerate(((lighten(GREEN, 0.3), "whole blocks: no mask"),
                                         (lighten(GREEN, 0.75), "mask: diagonal or end"),
                                         ("#f2f2f2", "other tiles' scores"))):
        box(axes, left + width + 0.7, top - 0.25 - 0.24 * line, 0.14, 0.14, tone, "#aaaaaa", linewidth=0.4)
        write(axes, left + width + 0.92, top - 0.18 - 0.24 * line, text, "left")
    write(axes, left + width + 0.7, top - 1.1, "no score is ever\nwritten to memory", "left")
    return figure


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
            ends = [run("tensor core", group, product, ready[group]) for _ in range((block > 0) + (block < blocks))]
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
    figure, axes = canvas(f"Tensor core busy, D {d}: {schedules['lockstep'][1]:.0%} in lockstep, "
                          f"{schedules['roles'][1]:.0%} free, {schedules['overlap'][1]:.0%} overlapping",
                          "a model of four blocks of keys: throughputs alone, no latency", 7.2, 2.9)
    scale, left = 5.0 / longest, 1.95
    for line, (step, (spans, _)) in enumerate(schedules.items()):
        lanes(axes, 2.35 - 0.72 * line, left, scale, longest, names[step], spans, GROUPS)
    for group, tone in enumerate(GROUPS):
        box(axes, 0.07, 0.12 + 0.18 * (1 - group), 0.1, 0.1, tone)
        write(axes, 0.22, 0.17 + 0.18 * (1 - group), f"warp group {group}", "left", 6.5)
    return figure
