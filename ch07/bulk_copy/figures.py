"""What moves where and when in chapter 7: pictures that explain and do not measure, as in `tilelab.diagrams`."""

from __future__ import annotations

from typing import NamedTuple

import numpy
from matplotlib import colormaps
from matplotlib.patches import Polygon

from tilelab import plots
from tilelab.diagrams import box, canvas, lighten, write

LANES = 32  # of a warp
SECTOR, LINE = 32, 128  # bytes: the least that memory moves, and what a cache keeps together
BANKS = 32  # of shared memory, a word of 4 bytes each
PALE = "#eeeeee"
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))


# ---- the ring of bulk_copy.cu's kernel `bulk`

TONES = {"load": BLUE, "store": ORANGE, "full": GREEN, "read": ORANGE}
WAITS = ("full", "read")  # of the thread


class Span(NamedTuple):
    """Something that lasts: in a slot of the ring, or (slot None) an order or a wait of the thread that leads.

    what: load, full or store of a slot; load, store, and the waits full and read, of the thread.
    """

    slot: int | None
    what: str
    chunk: int
    begin: float
    end: float


def ring_schedule(stages: int, chunks: int, load: float, store: float) -> list[Span]:
    """A model of `bulk` as it copies: orders in the kernel's sequence take a step each, a load and a store `load` and
    `store` steps, however many are in flight."""
    if min(stages, chunks) < 1:
        raise ValueError(f"a ring has a slot and a chunk at least; here it has {stages} and {chunks}.")
    spans, now, landed, read = [], 0, {}, {}

    def order(what, chunk):
        nonlocal now
        spans.append(Span(None, what, chunk, now, now + 1))
        now += 1

    def wait(what, chunk, until):
        nonlocal now
        if until > now:
            spans.append(Span(None, what, chunk, now, until))
            now = until

    def fill(chunk):
        if chunk < chunks:
            order("load", chunk)
            landed[chunk] = now + load
            spans.append(Span(chunk % stages, "load", chunk, now, landed[chunk]))

    for chunk in range(stages):
        fill(chunk)
    behind = int(stages > 1)
    for chunk in range(chunks):
        wait("full", chunk, landed[chunk])
        order("store", chunk)
        read[chunk] = now + store
        spans += [Span(chunk % stages, "full", chunk, landed[chunk], now),
                  Span(chunk % stages, "store", chunk, now, read[chunk])]
        if chunk >= behind:
            wait("read", chunk - behind, read[chunk - behind])
            fill(chunk + stages - behind)
    wait("read", chunks - 1, read[chunks - 1])
    return spans


def ring_picture(stages: int = 4, chunks: int = 7, load: float = 4, store: float = 2) -> plots.Picture:
    """The life of each slot of the ring over time, below the orders of the one thread that leads.

    A slot's load is in flight; then the slot is full, with the parity of the phase that ended; then a store reads it;
    then it is free until the next load. The times are those of `ring_schedule`, a model.
    """
    spans = ring_schedule(stages, chunks, load, store)
    end, serial = spans[-1].end, ring_schedule(1, chunks, load, store)[-1].end
    title = f"{chunks} chunks in {end:g} steps"
    title = (f"One slot: load and store take turns, {title}" if stages == 1 else
             f"A ring of {stages} keeps loading: {title}, one slot takes {serial:g}")
    height, left, pitch, deep = 1.45 + 0.27 * stages, 0.72, 0.27, 0.2
    figure, axes = canvas(title, f"a model, not measured: an order is a step, a load {load:g}, a store {store:g}, "
                          "however many are in flight", plots.SIZE[0], height)
    step, top = (plots.SIZE[0] - 0.15 - left) / end, height - 0.52
    low = top - 0.06 - pitch * stages

    def span(x, y, width, height, face):
        """One colour, or hatched in the colour of what is waited for."""
        if face in WAITS:
            box(axes, x, y, width, height, "white", TONES[face], hatch="/////", linewidth=0.6)
        else:
            box(axes, x, y, width, height, face, "white", linewidth=0.6)

    for row in range(stages + 1):
        y = top - pitch * row - 0.06 * (row > 0)
        write(axes, left - 0.06, y + deep / 2, f"slot {row - 1}" if row else "the thread", "right")
        box(axes, left, y, end * step, deep, PALE if row else "none")
    marks = numpy.arange(0, end, next(every for every in (1, 2, 5, 10, 20, 50, 100, 1000) if every * step > 0.35))
    axes.vlines(left + marks * step, low - 0.04, top + deep + 0.04, color="#cccccc", linewidth=0.5, zorder=0.9)
    for mark in marks:
        write(axes, left + mark * step, low - 0.11, f"{mark:g}", color=plots.GREY)
    write(axes, left - 0.12, low - 0.11, "step", "right", color=plots.GREY)

    for slot, what, chunk, begin, until in spans:
        thread, tone = slot is None, TONES[what]
        x, width = left + begin * step, (until - begin) * step
        y = top if thread else top - 0.06 - pitch * (slot + 1)
        waits = thread and what in WAITS
        span(x, y, width, deep, what if waits else tone if thread else lighten(tone))
        parity = chunk // stages % 2
        texts = [] if waits else [parity] if what == "full" else [chunk] if thread else [f"{what} {chunk}", chunk]
        text = next((str(text) for text in texts if 0.015 + 0.06 * len(str(text)) <= width), "")
        write(axes, x + width / 2, y + deep / 2, text, color="white" if thread and tone == BLUE else "black",
               fontweight="bold" if what == "full" else "normal")

    for y, who, keys in ((low - 0.34, "the thread", ((BLUE, "expect_tx, load"), (ORANGE, "store"),
                                                     ("full", "waits until full"), ("read", "waits until read"))),
                         (low - 0.51, "a slot", ((lighten(BLUE), "load in flight"), (lighten(ORANGE), "store reads it"),
                                                 (lighten(GREEN), "full: phase 0 or 1 ended"), (PALE, "free")))):
        write(axes, left - 0.06, y, who, "right", color=plots.GREY)
        for x, (face, text) in zip((left, left + 1.06, left + 2.06, left + 3.6), keys):
            span(x, y - 0.05, 0.16, 0.1, face)
            write(axes, x + 0.2, y, text, "left")
    return figure


# ---- what a warp's load asks of memory

def touched(stride: int, unit: int) -> list[int]:
    """The units of memory that hold what a warp loads, `stride` bytes a lane, one lane after the other."""
    return sorted({byte // unit for byte in range(LANES * stride)})


def coalescing_picture(narrow: int = 2, wide: int = 16) -> plots.Picture:
    """The sectors and lines that one warp's loads of bf16 features need, at `narrow` and at `wide` bytes a lane.

    Above, as in the field note: a load from the row on the left of the target and one from the row on its right.
    """
    whole, short = LANES * wide, LANES * narrow
    title = f"Two loads of {short} bytes are not one of {2 * short}; {wide} bytes a lane make {whole}"
    figure, axes = canvas(title, f"a row of {whole // 2} features of bf16; thin lines part sectors of {SECTOR} bytes, "
                          f"thick ones lines of {LINE}", plots.SIZE[0], 3.15)
    x, deep, fan = 0.32, 0.17, 0.3
    scale = (plots.SIZE[0] - 2 * x) / whole  # inches a byte

    def shade(tone, byte, share):
        """Sectors in turn lighter and darker."""
        return lighten(tone, share * (1 + byte // SECTOR % 2))

    def memory(y, lit, tone):
        for begin in range(0, whole, SECTOR):
            face = shade(tone, begin, 0.45) if begin // SECTOR in lit else "white"
            box(axes, x + begin * scale, y, SECTOR * scale, deep, face, plots.GREY, linewidth=0.5)
        for begin in range(0, whole, LINE):
            box(axes, x + begin * scale, y, LINE * scale, deep, edge="black", linewidth=1.3)

    def lanes(y):
        write(axes, x - 0.04, y + deep / 2, "lane", "right")
        for lane in range(LANES):
            box(axes, x + lane * wide * scale, y, wide * scale, deep, PALE, "white", linewidth=0.8)
            write(axes, x + (lane + 0.5) * wide * scale, y + deep / 2, str(lane))

    def reach(y, to, stride, tone):
        """From each lane to its bytes, those of one sector in one shade."""
        for lane in range(LANES):
            corners = (lane * wide, y), ((lane + 1) * wide, y), ((lane + 1) * stride, to), (lane * stride, to)
            axes.add_patch(Polygon(numpy.array(corners) * (scale, 1) + (x, 0), edgecolor="white", linewidth=0.3,
                                   facecolor=shade(tone, lane * stride, 0.2), zorder=0.5))

    def count(stride):
        sectors, lines = touched(stride, SECTOR), touched(stride, LINE)
        return f"{LANES} × {stride} B = {LANES * stride} B = {len(sectors)} sectors" + (
            f" = {len(lines)} lines" if LANES * stride >= LINE else "")

    y = 2.5
    write(axes, x, y + 0.28, f"{narrow} bytes a lane, two loads", "left", 8, fontweight="bold")
    write(axes, plots.SIZE[0] - x, y + 0.28, f"the note: {LANES} threads × {narrow} bytes × 2 loads = {2 * short} B",
           "right", color=plots.GREY)
    for up, tone, name in ((0, BLUE, "left"), (1, ORANGE, "right")):
        row = y - 2 * (deep + fan) * up
        memory(row, touched(narrow, SECTOR), tone)
        reach(y - fan - deep * up, row + deep * up, narrow, tone)
        write(axes, plots.SIZE[0] - x, row - 0.09 + (deep + 0.18) * up, f"{name} row: {count(narrow)}", "right")
    lanes(y - fan - deep)
    y = 0.93
    write(axes, x, y + 0.28, f"{wide} bytes a lane, one load", "left", 8, fontweight="bold")
    write(axes, plots.SIZE[0] - x, y + 0.28, count(wide), "right")
    lanes(y)
    reach(y, y - 0.2, wide, BLUE)
    memory(y - 0.2 - deep, touched(wide, SECTOR), BLUE)
    for line in touched(wide, LINE):
        write(axes, x + (line + 0.5) * LINE * scale, y - 0.3 - deep, f"line {line}: {LINE} B")
    return figure


# ---- who searches

def halving(sources: int, target: float) -> list[int]:
    """The source times that a search reads, as search_lane0 of resample.cu does; source time i is i."""
    low, high, reads = 0, sources - 2, []
    while low < high:
        reads.append((low + high + 1) // 2)
        low, high = (reads[-1], high) if reads[-1] <= target else (low, reads[-1] - 1)
    return reads


def ballots(sources: int, target: float) -> list[list[int]]:
    """The source times that the lanes read at each step of search_ballot; -1: that lane has none to read."""
    low, count, reads = 0, sources - 1, []
    while count > 1:
        step = -(-count // LANES)
        reads.append([low + lane * step if lane * step < count else -1 for lane in range(LANES)])
        last = max((lane for lane, word in enumerate(reads[-1]) if 0 <= word <= target), default=0)
        low, count = low + last * step, min(step, count - last * step)
    return reads


def wavefronts(words) -> int:
    """How often shared memory is read for one load of a warp: a word once for all lanes, of a bank one word a time."""
    banks = [word % BANKS for word in set(words) if word >= 0]
    return max(map(banks.count, banks))


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def search_picture(sources: int = 33) -> plots.Picture:
    """Three ways to search `sources` times in shared memory: which lane reads which of them, and what a target costs.

    A row is a step, a column a lane, the colour of a cell that of the source time it reads. Targets are spread evenly.
    """
    if sources < 3:
        raise ValueError(f"up to two sources there is nothing to search; here there are {sources}.")
    targets = [(lane + 0.5) * (sources - 1) / LANES for lane in range(LANES)]
    one = targets[LANES * 5 // 8]  # a warp finds it alone, above
    alone = [[word] * LANES for word in halving(sources, one)]
    searches = [halving(sources, target) for target in targets]
    longest = max(map(len, searches))
    apart = list(zip(*(reads + [-1] * (longest - len(reads)) for reads in searches)))
    panels = (("One search a thread", "a broadcast a step: no more reads than by lane 0 alone", alone, 1),
              ("Ballot", f"{LANES} lanes compare {LANES} pivots at once", ballots(sources, one), 1),
              ("A target a lane", f"{LANES} searches side by side", apart, LANES))
    costs = [sum(map(wavefronts, steps)) for _, _, steps, _ in panels]
    first, second, third = (_short(cost / found) for cost, (*_, found) in zip(costs, panels))
    title = f"A target a lane takes {third} reads, a ballot {second}, a search a thread {first}"

    high, head = 0.13, 0.38
    height = 1.25 + sum(head + high * len(steps) for _, _, steps, _ in panels)
    room = 1 << (sources - 1).bit_length()
    source = "a model, not measured; reads are wavefronts of shared memory, in each one word a bank"
    figure, axes = canvas(title, f"{source}; search_padded, with room for {room}, takes {room.bit_length() - 1} steps",
                          plots.SIZE[0], height)
    x, width, columns = 0.55, 2.95, (3.9, 4.27, 4.69, 5.4)
    shades = colormaps["viridis"].with_extremes(bad="#e6e6e6")

    def cells(y, rows):
        """Rows from the top at y, coloured by source time."""
        rows = numpy.ma.masked_less(numpy.array(rows), 0)
        down, across = rows.shape
        axes.pcolormesh(numpy.linspace(x, x + width, across + 1), y - high * numpy.arange(down + 1), rows, cmap=shades,
                        vmin=0, vmax=sources - 1, edgecolors="white", linewidth=0.5 if across < 64 else 0)

    y = height - 0.53
    cells(y, [range(sources)])
    write(axes, x, y + 0.11, f"{sources} source times, a colour each", "left")
    at = x + (one + 0.5) * width / sources
    write(axes, at + 0.06, y + 0.1, "the one target", "left")
    axes.plot(at, y + 0.06, "v", color="black", markersize=4)
    for at, text in zip(columns, ("steps", "reads", "targets", "reads/target")):
        write(axes, at, y - high / 2, text, "right", color=plots.GREY)
    y -= high
    for (name, words, steps, found), cost in zip(panels, costs):
        write(axes, x, y - 0.13, name, "left", 8, fontweight="bold")
        write(axes, x, y - 0.27, words, "left", color=plots.GREY)
        y -= head
        cells(y, steps)
        for step in range(len(steps)):
            write(axes, x - 0.06, y - (step + 0.5) * high, f"step {step + 1}", "right")
        y -= high * len(steps)
        for at, value in zip(columns, (len(steps), cost, found, cost / found)):
            write(axes, at, y + high * len(steps) / 2, _short(value), "right", 9)
    write(axes, x, y - 0.1, "lane 0", "left", color=plots.GREY)
    write(axes, x + width, y - 0.1, f"lane {LANES - 1}", "right", color=plots.GREY)
    return figure
