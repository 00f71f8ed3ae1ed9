"""Chapter 7's pictures: what moves when, who searches what, who loads what. They explain; nothing is measured."""

from __future__ import annotations

import math

from matplotlib.patches import Rectangle

from tilelab import plots

LOAD, STORE, WAIT = plots.colour("best"), plots.colour("proposed"), "#dddddd"


def _canvas(title: str, source: str, height: float):
    """A figure whose coordinates are inches, and two pens: a box with words in it, and words alone."""
    figure, axes = plots.figure_of([title], title, source, height)
    figure.set_layout_engine("none")
    axes.set(position=(0, 0, 1, 1), xlim=(0, plots.SIZE[0]), ylim=(0, height))
    axes.set_axis_off()

    def write(x, y, text, size=7, ha="left", **rest):
        axes.text(x, y, text, fontsize=size, ha=ha, va="center", **rest)

    def box(x, y, width, high, face="white", edge="white", text="", tone="white", **rest):
        axes.add_patch(Rectangle((x, y), width, high, facecolor=face, edgecolor=edge, linewidth=0.8, **rest))
        if text:
            write(x + width / 2, y + high / 2, text, ha="center", color=tone)

    return figure, axes, box, write


def ring_schedule(stages: int, chunks: int, load: float, store: float) -> list[dict]:
    """When each chunk's load begins and has landed, and its store begins and has been read: {chunk, slot, parity, load,
    landed, store, read}, as the kernel `bulk` issues them; a store waits for its own chunk and for the store before."""
    found, behind = [], int(stages > 1)
    issued = {chunk: 0.0 for chunk in range(min(stages, chunks))}
    free = 0.0  # when the one thread can give its next order
    for chunk in range(chunks):
        landed = issued[chunk] + load
        begin = max(free, landed)
        found.append({"chunk": chunk, "slot": chunk % stages, "parity": chunk // stages % 2, "load": issued[chunk],
                      "landed": landed, "store": begin, "read": begin + store})
        free = found[chunk - behind]["read"] if chunk >= behind else begin  # bulk_wait_read<behind>
        free = max(free, begin)
        if chunk >= behind and chunk - behind + stages < chunks:
            issued[chunk - behind + stages] = free
    return found


def ring_picture(stages: int = 4, chunks: int = 9, load: float = 4, store: float = 1.5) -> plots.Picture:
    """The life of each slot of a ring: load in flight, store being read, with the parity that the wait names.

    `load` and `store` are durations in the same unit of time; a model, of the order in which `bulk` gives its orders.
    """
    schedule = ring_schedule(stages, chunks, load, store)
    end = schedule[-1]["read"]
    title = f"{stages} slots: loads stay in flight while one is stored" if stages > 1 else \
        "One buffer: nothing is in flight while it is stored"
    figure, _, box, write = _canvas(title, f"a model: a load takes {load:g}, a store {store:g} units of time",
                                    0.95 + 0.36 * stages)
    left, right, bottom = 0.75, 5.35, 0.62
    scale = (right - left) / end
    for slot in range(stages):
        y = bottom + 0.36 * (stages - 1 - slot)
        write(0.1, y + 0.14, f"slot {slot}", 7.5)
        box(left, y, right - left, 0.28, WAIT, WAIT)
        for row in (row for row in schedule if row["slot"] == slot):
            begin, landed, stored = (left + scale * row[key] for key in ("load", "landed", "store"))
            box(begin, y, landed - begin, 0.28, LOAD, text=f"load {row['chunk']}" if scale * load > 0.45 else "")
            box(stored, y, scale * store, 0.28, STORE, text=f"{row['chunk']}", tone="black")
            write(landed - 0.03, y + 0.22, f"p{row['parity']}", 5.5, "right", color="white")
    x = left
    for tone, words in ((LOAD, "load in flight"), (STORE, "store reads it"), (WAIT, "idle")):
        box(x, 0.34, 0.12, 0.12, tone, tone)
        write(x + 0.17, 0.4, words)
        x += 1.05
    write(x, 0.4, "p0, p1: the phase's parity")
    return figure


def coalescing_picture() -> plots.Picture:
    """What one load of a warp asks of memory, in sectors of 32 bytes: 2 bytes a lane, and 16."""
    figure, axes, box, write = _canvas("2 bytes a lane ask for 64 bytes of a row, 16 bytes a lane for 512",
                                    "a sector is 32 bytes; a row of 256 features in bf16 has 16", 2.45)
    left, lane = 0.25, 5.0 / 32
    for y, each, words in ((1.45, 2, "one load of 2 bytes a lane"), (0.45, 16, "one load of 16 bytes a lane")):
        write(left, y + 0.66, f"{words}: 32 × {each} = {32 * each} bytes, {32 * each // 32} sectors", 7.5)
        for index in range(32):
            box(left + lane * index, y + 0.38, lane, 0.16, LOAD if index % 2 else "#56B4E9")
        for index in range(16):
            asked = index < each
            box(left + 2 * lane * index, y, 2 * lane, 0.2, STORE if asked else "white", plots.GREY,
                "32 B" if asked else "", "black")
        for index in range(0, 33, 4):  # lines from lanes to what they ask for
            axes.plot([left + lane * index, left + lane * index * each / 16], [y + 0.37, y + 0.21],
                                color=plots.GREY, linewidth=0.6)
    return figure


def searches(sources: int) -> list[dict]:
    """For 32 targets of one warp among `sources` times: steps that follow each other, and reads of shared memory.

    A read of one word by all lanes is one, a broadcast; 32 lanes that read 32 words at random are up to 32 words, in as
    many banks as they hit: counted is one read a step all the same.
    """
    halves, ballots = math.ceil(math.log2(max(sources - 1, 1))), math.ceil(math.log(max(sources - 1, 1), 32) - 1e-9)
    return [{"who": "every lane, the same target", "lanes": 32, "steps": 32 * halves, "extra": ""},
            {"who": "lane 0, and a shuffle", "lanes": 1, "steps": 32 * halves, "extra": f"+ {32 * halves} shuffles"},
            {"who": "32 pivots, one target", "lanes": 32, "steps": 32 * ballots, "extra": f"+ {32 * ballots} ballots"},
            {"who": "a target a lane", "lanes": 32, "steps": halves, "extra": ""}]


def search_picture(sources: int = 1025) -> plots.Picture:
    """Four ways for a warp to search 32 targets: steps after one another, each one read of shared memory."""
    rows = searches(sources)
    figure, _, box, write = _canvas(f"A warp finds 32 targets among {sources:,} times: steps, one after the other",
                                    "a step is one read of shared memory, of one word or of 32", 2.2)
    most = max(row["steps"] for row in rows)
    for line, row in enumerate(rows):
        y, width = 1.62 - 0.42 * line, max(1.9 * row["steps"] / most, 0.04)
        write(0.1, y + 0.19, row["who"], 7.5)
        write(0.1, y + 0.03, "reads one word, a broadcast" if line < 2 else "reads 32 words", 6, color=plots.GREY)
        box(1.85, y, width, 0.22, plots.colour("predicted") if line == 3 else LOAD if line != 1 else STORE)
        write(1.9 + width, y + 0.11, f"{row['steps']} steps {row['extra']}".strip())
    return figure
