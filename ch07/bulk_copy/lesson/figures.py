"""Pictures of bulk copies: the ring over time, speed against bytes in flight, and the order of the chunks."""

from typing import NamedTuple

import numpy

from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write
from tilelab.records import results

PALE = "#eeeeee"
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
COLOURS = {"load": BLUE, "store": ORANGE, "full": GREEN, "read": ORANGE}
WAITS = ("full", "read")  # what the leader waits for


class Interval(NamedTuple):
    """From `begin` to `end`, a stage is in state `what` (load, full or store); or, where `stage` is None, the leading
    thread issues a load or a store, or waits (full or read)."""

    stage: int | None
    what: str
    chunk: int
    begin: float
    end: float


def ring_schedule(stages: int, chunks: int = 7, load: float = 4, store: float = 2) -> list[Interval]:
    """Return a model of the kernel `bulk` as it copies: it issues its loads and stores in the kernel's sequence.

    Issuing takes one step, a load `load` steps and a store `store` steps, however many are in flight.
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
        intervals += [
            Interval(chunk % stages, "full", chunk, load_ends[chunk], now),
            Interval(chunk % stages, "store", chunk, now, read_ends[chunk]),
        ]
        if chunk >= behind:
            wait("read", chunk - behind, read_ends[chunk - behind])
            fill(chunk + stages - behind)
    wait("read", chunks - 1, read_ends[chunks - 1])
    return intervals


def ring_picture(stages: int = 4) -> plots.Picture:
    """Draw the states of each stage of the ring over time, below what the leading thread issues.

    First a load into the stage is in flight. Then the stage is full; the digit is the parity of the phase that ended.
    Then a store reads the stage, and then the stage is free. The model `ring_schedule` gives the times.
    """
    intervals = ring_schedule(stages)
    end, serial = intervals[-1].end, ring_schedule(1)[-1].end
    title = (
        f"One stage: load and store take turns, 7 chunks in {end} steps"
        if stages == 1
        else f"A ring of {stages} keeps loading: 7 chunks in {end} steps, one stage takes {serial}"
    )
    height, left, pitch, deep = 1.45 + 0.27 * stages, 0.72, 0.27, 0.2
    figure, axes = canvas(
        title,
        "a model, not measured: issuing takes 1 step, a load 4, a store 2, however many are in flight",
        plots.SIZE[0],
        height,
    )
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
    axes.vlines(
        left + marks * step, low - 0.04, top + deep + 0.04, color="#cccccc", linewidth=0.5, zorder=0.9
    )
    for mark in marks:
        write(axes, left + mark * step, low - 0.11, f"{mark:g}", color=plots.GREY)
    write(axes, left - 0.12, low - 0.11, "step", "right", color=plots.GREY)

    for stage, what, chunk, begin, until in intervals:
        thread, tone, x, width = stage is None, COLOURS[what], left + begin * step, (until - begin) * step
        y, waits = top if thread else top - 0.06 - pitch * (stage + 1), thread and what in WAITS
        draw_bar(x, y, width, deep, what if waits else tone if thread else lighten(tone))
        parity = chunk // stages % 2
        texts = (
            [] if waits else [parity] if what == "full" else [chunk] if thread else [f"{what} {chunk}", chunk]
        )
        text = next((str(text) for text in texts if 0.015 + 0.06 * len(str(text)) <= width), "")
        write(
            axes,
            x + width / 2,
            y + deep / 2,
            text,
            color="white" if thread and tone == BLUE else "black",
            fontweight="bold" if what == "full" else "normal",
        )

    thread_keys = (
        (BLUE, "expect_tx, load"),
        (ORANGE, "store"),
        ("full", "waits until full"),
        ("read", "waits until read"),
    )
    stage_keys = (
        (lighten(BLUE), "load in flight"),
        (lighten(ORANGE), "store reads it"),
        (lighten(GREEN), "full; digit: parity of the ended phase"),
        (PALE, "free"),
    )
    for y, who, keys, last in (
        (low - 0.34, "the thread", thread_keys, 3.6),
        (low - 0.51, "a stage", stage_keys, 4.25),
    ):
        write(axes, left - 0.06, y, who, "right", color=plots.GREY)
        for x, (face, text) in zip((left, left + 1.06, left + 2.06, left + last), keys):
            draw_bar(x, y - 0.05, 0.16, 0.1, face)
            write(axes, x + 0.2, y, text, "left")
    return figure.describe(
        f"{title}. A timeline with a row for the thread, which issues loads and stores or waits, and a row for each "
        "stage: load in flight, full, read by a store, free. The digit in a full stage is the parity of the phase that "
        "has ended: 0 for the stage's first chunk, 1 for its second one, and so on in turn."
    )


def _kib_loading(row: dict) -> int:
    """Return the KiB that a ring has under way: one stage is being stored, so the others load."""
    return row["kib"] * max(1, row["stages"] - 1)


def draw_in_flight(record) -> plots.Picture:
    """Draw the speed of rings against the KiB that each SM has under way, and what Little's law predicts."""
    title = "Speed depends on the bytes under way more than on how they are cut"
    figure, axes = plots.new_figure(record.rows, title, record.label())
    for kib, tone in zip((4, 8, 16), (ORANGE, BLUE, GREEN)):
        rows = [row for row in record.rows if row["kib"] == kib]
        axes.plot(
            [_kib_loading(row) for row in rows],
            [row["gbps"] for row in rows],
            "o",
            color=tone,
            markersize=5,
            label=f"buffers of {kib} KiB",
        )
    first = min(record.rows, key=_kib_loading)
    torch_gbps = first["gbps"] / first["ratio"]
    reach = torch_gbps / first["gbps"] * _kib_loading(first)
    axes.plot(
        [0, reach],
        [0, torch_gbps],
        ":",
        color=plots.GREY,
        linewidth=1.2,
        label="Little's law with the latency of the smallest buffer",
    )
    axes.axhline(torch_gbps, color=plots.colour("torch"), linewidth=1, linestyle="--", label=first["peer"])
    axes.set(
        xlabel="KiB under way per SM: (stages − 1) × buffer, or one buffer",
        ylabel="GB/s",
        xlim=(0, None),
        ylim=(0, 1.12 * torch_gbps),
    )
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    said = ", ".join(
        f"{row['gbps']:.0f} at {_kib_loading(row)}" for row in sorted(record.rows, key=_kib_loading)
    )
    return figure.describe(
        f"{title}. A dot for each ring with buffers of 4, 8 or 16 KiB; a dotted line for Little's law, a dashed one "
        f"for {first['peer']} at {torch_gbps:.0f}. GB/s over the KiB under way per SM: {said}."
    )


def draw_fronts(record) -> plots.Picture:
    """Draw each order of the chunks against torch's copy. The title states what the two persistent rings lose."""
    strided, in_order = (
        f"{row['name'].removeprefix('persistent, ').removeprefix('the ')}: "
        f"{100 * abs(1 - row['ratio']):.0f} % {'slower' if row['ratio'] < 1 else 'faster'}"
        for row in record.rows[:2]
    )
    title = f"{strided[0].upper()}{strided[1:]} than torch; {in_order}"
    return plots.ratios(
        record.rows, label="name", peer=record.rows[0]["peer"], source=record.label(), title=title
    )


def little_table(record) -> results.Table:
    """Return the rings in the order of the KiB that they have under way; the caption has the smallest one's latency."""
    rows = [
        {
            "KiB under way per SM": _kib_loading(row),
            "stages": row["stages"],
            "KiB per buffer": row["kib"],
            "GB/s": row["gbps"],
            "× torch": row["ratio"],
        }
        for row in sorted(record.rows, key=_kib_loading)
    ]
    first = min(record.rows, key=_kib_loading)
    turn_us = first["kib"] * 1024 * record.device["sms"] / (first["gbps"] / 2) / 1e3
    turn = f"a buffer of {first['kib']} KiB is loaded and stored in {turn_us:.2f} µs"
    return results.table(rows, f"{record.label()}; {turn}")
