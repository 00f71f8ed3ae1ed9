"""A picture of the ring of bulk_copy.cu. It explains and does not measure."""

from typing import NamedTuple

import numpy

from tilelab import plots
from tilelab.diagrams import box, canvas, lighten, write

PALE = "#eeeeee"
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
COLOURS = {"load": BLUE, "store": ORANGE, "full": GREEN, "read": ORANGE}
WAITS = ("full", "read")  # what the leader waits for


class Interval(NamedTuple):
    """From `begin` to `end`, a stage is in state `what` (load, full or store); or, where `stage` is None, the leading
    thread gives an order (load or store) or waits (full or read)."""

    stage: int | None
    what: str
    chunk: int
    begin: float
    end: float


def ring_schedule(stages: int, chunks: int = 7, load: float = 4, store: float = 2) -> list[Interval]:
    """Return a model of the kernel `bulk` as it copies, its orders in the kernel's sequence.

    An order takes one step, a load `load` steps and a store `store` steps, however many are in flight.
    """
    intervals, now, load_ends, read_ends = [], 0, {}, {}

    def order(what, chunk):
        nonlocal now
        intervals.append(Interval(None, what, chunk, now, now + 1))
        now += 1

    def wait(what, chunk, until):
        nonlocal now
        if until > now:
            intervals.append(Interval(None, what, chunk, now, until))
            now = until

    def fill(chunk):
        if chunk < chunks:
            order("load", chunk)
            load_ends[chunk] = now + load
            intervals.append(Interval(chunk % stages, "load", chunk, now, load_ends[chunk]))

    for chunk in range(stages):
        fill(chunk)
    behind = int(stages > 1)
    for chunk in range(chunks):
        wait("full", chunk, load_ends[chunk])
        order("store", chunk)
        read_ends[chunk] = now + store
        intervals += [Interval(chunk % stages, "full", chunk, load_ends[chunk], now),
                      Interval(chunk % stages, "store", chunk, now, read_ends[chunk])]
        if chunk >= behind:
            wait("read", chunk - behind, read_ends[chunk - behind])
            fill(chunk + stages - behind)
    wait("read", chunks - 1, read_ends[chunks - 1])
    return intervals


def ring_picture(stages: int = 4) -> plots.Picture:
    """Draw the states of each stage of the ring over time, below the orders of the leading thread.

    First a load into the stage is in flight. Then the stage is full; the digit is the parity of the phase that ended.
    Then a store reads the stage, and then the stage is free. The model `ring_schedule` gives the times.
    """
    intervals = ring_schedule(stages)
    end, serial = intervals[-1].end, ring_schedule(1)[-1].end
    title = (f"One stage: load and store take turns, 7 chunks in {end} steps" if stages == 1 else
             f"A ring of {stages} keeps loading: 7 chunks in {end} steps, one stage takes {serial}")
    height, left, pitch, deep = 1.45 + 0.27 * stages, 0.72, 0.27, 0.2
    figure, axes = canvas(title, "a model, not measured: an order takes 1 step, a load 4, a store 2, however many are "
                          "in flight", plots.SIZE[0], height)
    step, top = (plots.SIZE[0] - 0.15 - left) / end, height - 0.52
    low = top - 0.06 - pitch * stages

    def draw_bar(x, y, width, height, face):
        """In one colour, or hatched in the colour of what is waited for."""
        if face in WAITS:
            box(axes, x, y, width, height, "white", COLOURS[face], hatch="/////", linewidth=0.6)
        else:
            box(axes, x, y, width, height, face, "white", linewidth=0.6)

    for row in range(stages + 1):
        y = top - pitch * row - 0.06 * (row > 0)
        write(axes, left - 0.06, y + deep / 2, f"stage {row - 1}" if row else "the thread", "right")
        box(axes, left, y, end * step, deep, PALE if row else "none")
    marks = numpy.arange(0, end, next(every for every in (1, 2, 5, 10) if every * step > 0.35))
    axes.vlines(left + marks * step, low - 0.04, top + deep + 0.04, color="#cccccc", linewidth=0.5, zorder=0.9)
    for mark in marks:
        write(axes, left + mark * step, low - 0.11, f"{mark:g}", color=plots.GREY)
    write(axes, left - 0.12, low - 0.11, "step", "right", color=plots.GREY)

    for stage, what, chunk, begin, until in intervals:
        thread, tone, x, width = stage is None, COLOURS[what], left + begin * step, (until - begin) * step
        y, waits = top if thread else top - 0.06 - pitch * (stage + 1), thread and what in WAITS
        draw_bar(x, y, width, deep, what if waits else tone if thread else lighten(tone))
        parity = chunk // stages % 2
        texts = [] if waits else [parity] if what == "full" else [chunk] if thread else [f"{what} {chunk}", chunk]
        text = next((str(text) for text in texts if 0.015 + 0.06 * len(str(text)) <= width), "")
        write(axes, x + width / 2, y + deep / 2, text, color="white" if thread and tone == BLUE else "black",
              fontweight="bold" if what == "full" else "normal")

    thread_keys = ((BLUE, "expect_tx, load"), (ORANGE, "store"), ("full", "waits until full"),
                   ("read", "waits until read"))
    stage_keys = ((lighten(BLUE), "load in flight"), (lighten(ORANGE), "store reads it"),
                  (lighten(GREEN), "full: phase 0 or 1 ended"), (PALE, "free"))
    for y, who, keys in ((low - 0.34, "the thread", thread_keys), (low - 0.51, "a stage", stage_keys)):
        write(axes, left - 0.06, y, who, "right", color=plots.GREY)
        for x, (face, text) in zip((left, left + 1.06, left + 2.06, left + 3.6), keys):
            draw_bar(x, y - 0.05, 0.16, 0.1, face)
            write(axes, x + 0.2, y, text, "left")
    return figure
