"""Pictures of bulk copies: the two ways, the mbarrier, the ring, the two proxies, and speed against bytes in flight."""

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


def _arrow(axes, start, end, tone=plots.GREY, **style) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": tone,
            "linewidth": 1.3,
            "shrinkA": 0,
            "shrinkB": 0,
            **style,
        },
    )


def draw_two_ways() -> plots.Picture:
    """Draw how a tile gets from memory to memory: through the registers of many threads, or by the copy engine."""
    figure, axes = canvas(
        "The same 4 KiB: by 256 threads, or by one thread and the engine", "", plots.SIZE[0], 2.75
    )
    for left, name, tone in ((0.1, "plain loads and stores", ORANGE), (2.85, "bulk copy (TMA)", BLUE)):
        write(axes, left, 2.38, name, "left", 8, fontweight="bold")
        box(axes, left, 1.86, 2.5, 0.32, PALE)
        write(axes, left + 1.25, 2.02, "global memory: DRAM behind L2", size=7.5)
        box(axes, left, 0.3, 2.5, 1.2, "white", tone, linewidth=1.2)
        write(axes, left + 0.06, 1.38, "SM", "left", 7.5, color=tone)
    for index in range(8):  # the threads
        x = 0.42 + 0.265 * index
        box(axes, x - 0.02, 0.72, 0.26, 0.3, lighten(ORANGE), "white")
        write(axes, x + 0.11, 0.87, "16 B")
        _arrow(axes, (x + 0.06, 1.86), (x + 0.06, 1.03))
        _arrow(axes, (x + 0.17, 1.03), (x + 0.17, 1.86))
    write(axes, 1.35, 0.56, "each thread: an address, a load, a wait, a store;")
    write(axes, 1.35, 0.42, "the bytes in flight occupy registers")
    box(axes, 2.97, 0.72, 0.62, 0.42, lighten(GREEN), "white")
    write(axes, 3.28, 0.93, "one\nthread", linespacing=1.2)
    box(axes, 3.84, 0.72, 0.62, 0.42, lighten(BLUE), "white")
    write(axes, 4.15, 0.93, "copy\nengine", linespacing=1.2)
    box(axes, 4.7, 0.72, 0.58, 0.42, lighten(BLUE), "white")
    write(axes, 4.99, 0.93, "shared\nmemory", linespacing=1.2)
    _arrow(axes, (3.59, 0.93), (3.84, 0.93))
    _arrow(axes, (4.46, 0.99), (4.7, 0.99), BLUE)
    _arrow(axes, (4.7, 0.86), (4.46, 0.86), BLUE)
    _arrow(axes, (4.06, 1.86), (4.06, 1.14), BLUE)
    _arrow(axes, (4.24, 1.14), (4.24, 1.86), BLUE)
    write(axes, 4.1, 0.56, "one thread: two instructions per tile;")
    write(axes, 4.1, 0.42, "the bytes in flight occupy shared memory")
    write(
        axes,
        0.1,
        0.12,
        "An arrow is one transfer. 256 threads move 16 bytes each; the engine moves all 4,096.",
        "left",
        color=plots.GREY,
    )
    return figure.describe(
        "Left, plain loads and stores: each of 256 threads loads 16 bytes from global memory into its registers and "
        "stores them again. Right, a bulk copy: one thread instructs the copy engine, which moves all 4,096 bytes from "
        "global memory to shared memory and back."
    )


# What happens to the mbarrier of a buffer that is used twice: (time, event, pending arrivals, pending bytes, phase).
BARRIER_EVENTS = (
    (0, "init(1)", 1, 0, 0),
    (1, "arrive.expect_tx 4096", 0, 4096, 0),
    (3, "half has landed", 0, 2048, 0),
    (4, "all has landed", 1, 0, 1),
    (6, "arrive.expect_tx 4096", 0, 4096, 1),
    (9, "all has landed", 1, 0, 2),
)


def draw_barrier(events=BARRIER_EVENTS) -> plots.Picture:
    """Draw pending arrivals, pending bytes and the phase of one mbarrier over time."""
    figure, axes = canvas(
        "An mbarrier counts arrivals and bytes; both at zero end a phase", "", plots.SIZE[0], 2.75
    )
    left, step, end = 1.0, 0.38, 10
    rows = (
        ("pending arrivals", 2, 1.42, lambda value: value),
        ("pending bytes", 3, 1.0, lambda value: value / 4096),
        ("phase (parity)", 4, 0.58, None),
    )
    tones = (ORANGE, BLUE, GREEN)
    for (name, field, low, share), tone in zip(rows, tones):
        write(axes, left - 0.08, low + 0.13, name, "right")
        for number, event in enumerate(events):
            begin = event[0]
            until = events[number + 1][0] if number + 1 < len(events) else end
            x, width = left + begin * step, (until - begin) * step
            height = 0.26 if share is None else 0.03 + 0.23 * share(event[field])
            box(
                axes,
                x,
                low,
                width,
                height,
                lighten(tone, 0.25 + 0.3 * (event[field] % 2) if share is None else 0.4),
                "white",
                linewidth=0.5,
            )
            text = f"{event[field]} ({event[field] % 2})" if share is None else f"{event[field]:,}"
            write(axes, x + width / 2, low + 0.13, text)
    for time, event, *_ in events:
        x = left + time * step
        axes.plot([x, x], [0.55, 1.76], color="#bbbbbb", linewidth=0.6, zorder=0.5)
        axes.text(x + 0.02, 1.8, event, fontsize=7, rotation=28, ha="left", va="bottom")
    for x, until, text in ((1, 4, "wait(parity 0) waits here"), (6, 9, "wait(parity 1) waits here")):
        box(axes, left + x * step, 0.2, (until - x) * step, 0.2, "white", GREEN, hatch="/////", linewidth=0.6)
        write(axes, left + (x + until) * step / 2, 0.1, text)
    write(axes, left - 0.08, 0.3, "thread 0", "right")
    said = "; ".join(
        f"{event}: {arrivals}, {pending:,}, phase {phase}" for _, event, arrivals, pending, phase in events
    )
    return figure.describe(
        f"A timeline of one mbarrier: pending arrivals, pending bytes and phase after each event. {said}. Thread 0 "
        "waits for parity 0 until phase 0 ends, and for parity 1 until phase 1 ends."
    )


def draw_proxies() -> plots.Picture:
    """Draw the two paths to shared memory, and what the proxy fence orders between them."""
    figure, axes = canvas(
        "Threads and the copy engine reach shared memory on different paths", "", plots.SIZE[0], 2.1
    )
    for x, name, tone in ((0.1, "threads", ORANGE), (4.0, "copy engine", BLUE)):
        box(axes, x, 0.75, 1.35, 0.5, lighten(tone), "white")
        write(axes, x + 0.675, 1.0, name, size=8)
    box(axes, 2.2, 0.55, 1.05, 0.9, PALE, plots.GREY, linewidth=0.8)
    write(axes, 2.725, 1.0, "shared\nmemory", size=8, linespacing=1.2)
    _arrow(axes, (1.45, 1.1), (2.2, 1.1), ORANGE)
    _arrow(axes, (2.2, 0.9), (1.45, 0.9), ORANGE)
    _arrow(axes, (3.25, 0.9), (4.0, 0.9), BLUE)
    _arrow(axes, (4.0, 1.1), (3.25, 1.1), BLUE)
    write(axes, 1.825, 1.22, "generic proxy", color=plots.GREY)
    write(axes, 3.625, 1.22, "async proxy", color=plots.GREY)
    write(
        axes,
        0.1,
        1.66,
        "1. threads write results    2. fence.proxy.async    3. __syncthreads    4. thread 0 starts "
        "the bulk store",
        "left",
    )
    write(
        axes,
        0.1,
        0.34,
        "Without step 2 a write can still be on the left path when the engine reads on the right.",
        "left",
    )
    write(
        axes,
        0.1,
        0.18,
        "A load needs no fence: the wait on its mbarrier makes the engine's writes visible.",
        "left",
    )
    return figure.describe(
        "Threads reach shared memory through the generic proxy, and the copy engine through the async proxy. The order "
        "of a store: threads write results, fence.proxy.async, __syncthreads, and thread 0 starts the bulk store."
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
