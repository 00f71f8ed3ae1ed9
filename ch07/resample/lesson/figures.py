"""Pictures of what the kernels of resample.cu ask of memory. They explain and do not measure."""

import itertools

import numpy
from matplotlib import colormaps
from matplotlib.patches import Polygon

from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write
from tilelab.records import results

LANES = 32  # of a warp
SECTOR, LINE = 32, 128  # bytes: the smallest transfer from memory, and a line of a cache
BANKS = 32  # of shared memory, each 4 bytes wide
NARROW, WIDE = 2, 16  # bytes that a lane loads
BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))
PALE = "#eeeeee"


def coalescing_picture() -> plots.Picture:
    """Draw the sectors and lines that one warp's loads of bf16 features need, at 2 and at 16 bytes per lane.

    The upper part is the field note's: one load from the row before the target, one from the row after it.
    """
    title = "Two loads of 64 bytes are not one of 128; 16 bytes per lane make 512"
    figure, axes = canvas(
        title,
        f"rows of 256 bf16 features; thin lines bound sectors of {SECTOR} B, thick lines "
        f"cache lines of {LINE} B",
        plots.SIZE[0],
        3.15,
    )
    x, right, deep, fan, row_bytes = 0.32, plots.SIZE[0] - 0.32, 0.17, 0.3, LANES * WIDE
    scale = (right - x) / row_bytes  # inches per byte

    def shade(tone, byte, share):
        """Neighbouring sectors differ in shade."""
        return lighten(tone, share * (1 + byte // SECTOR % 2))

    def draw_memory(y, loaded_bytes, tone):
        for begin in range(0, row_bytes, SECTOR):
            face = shade(tone, begin, 0.45) if begin < loaded_bytes else "white"
            box(axes, x + begin * scale, y, SECTOR * scale, deep, face, plots.GREY, linewidth=0.5)
        for begin in range(0, row_bytes, LINE):
            box(axes, x + begin * scale, y, LINE * scale, deep, edge="black", linewidth=1.3)

    def draw_lanes(y):
        write(axes, x - 0.04, y + deep / 2, "lane", "right")
        for lane in range(LANES):
            box(axes, x + lane * WIDE * scale, y, WIDE * scale, deep, "#eeeeee", "white", linewidth=0.8)
            write(axes, x + (lane + 0.5) * WIDE * scale, y + deep / 2, str(lane))

    def connect(y, to, stride, tone):
        """Draw a band from each lane to its bytes; bands to the same sector have the same shade."""
        for lane in range(LANES):
            corners = (lane * WIDE, y), ((lane + 1) * WIDE, y), ((lane + 1) * stride, to), (lane * stride, to)
            axes.add_patch(
                Polygon(
                    numpy.array(corners) * (scale, 1) + (x, 0),
                    edgecolor="white",
                    linewidth=0.3,
                    facecolor=shade(tone, lane * stride, 0.2),
                    zorder=0.5,
                )
            )

    y = 2.5
    write(axes, x, y + 0.28, "2 bytes per lane, two loads", "left", 8, fontweight="bold")
    write(
        axes, right, y + 0.28, "the note: 32 threads × 2 bytes × 2 loads = 128 B", "right", color=plots.GREY
    )
    for up, tone, name in ((0, BLUE, "left"), (1, ORANGE, "right")):
        row = y - 2 * (deep + fan) * up
        draw_memory(row, LANES * NARROW, tone)
        connect(y - fan - deep * up, row + deep * up, NARROW, tone)
        write(
            axes, right, row - 0.09 + (deep + 0.18) * up, f"{name} row: 32 × 2 B = 64 B = 2 sectors", "right"
        )
    draw_lanes(y - fan - deep)
    y = 0.93
    write(axes, x, y + 0.28, "16 bytes per lane, one load", "left", 8, fontweight="bold")
    write(axes, right, y + 0.28, "32 × 16 B = 512 B = 16 sectors = 4 lines", "right")
    draw_lanes(y)
    connect(y, y - 0.2, WIDE, BLUE)
    draw_memory(y - 0.2 - deep, row_bytes, BLUE)
    for line in range(row_bytes // LINE):
        write(axes, x + (line + 0.5) * LINE * scale, y - 0.3 - deep, f"line {line}: {LINE} B")
    return figure.describe(
        "Bands from the 32 lanes of a warp to the bytes that they load. Above, 2 bytes per lane: one load needs two "
        "sectors of the row on the left of the target, and another load two sectors of the row on the right. Below, 16 "
        "bytes per lane: one load needs 16 sectors, four whole cache lines."
    )


def binary_search_reads(sources: int, target: float) -> list[int]:
    """Return the source times that search_lane0 of resample.cu reads; source time i is i."""
    low, high, reads = 0, sources - 2, []
    while low < high:
        reads.append((low + high + 1) // 2)
        low, high = (reads[-1], high) if reads[-1] <= target else (low, reads[-1] - 1)
    return reads


def ballot_search_reads(sources: int, target: float) -> list[list[int]]:
    """Return the source times that the lanes of search_ballot read, step by step; -1 stands for no read."""
    low, count, reads = 0, sources - 1, []
    while count > 1:
        step = -(-count // LANES)
        reads.append([low + lane * step if lane * step < count else -1 for lane in range(LANES)])
        last = max((lane for lane, word in enumerate(reads[-1]) if 0 <= word <= target), default=0)
        low, count = low + last * step, min(step, count - last * step)
    return reads


def count_wavefronts(words) -> int:
    """Return the number of wavefronts (reads of one word per bank) that one load of a warp takes.

    Lanes that read the same word share a read.
    """
    banks = [word % BANKS for word in set(words) if word >= 0]
    return max(map(banks.count, banks))


def _format(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def search_picture() -> plots.Picture:
    """Draw three ways to search 33 times in shared memory: which lane reads which time, and the cost per target.

    Rows are steps and columns are lanes. The colour of a cell stands for the source time that the lane reads. The
    targets are spread evenly.
    """
    sources = 33
    targets = [(lane + 0.5) * (sources - 1) / LANES for lane in range(LANES)]
    one = targets[LANES * 5 // 8]  # the target of the first two panels
    searches = [binary_search_reads(sources, target) for target in targets]
    panels = (
        (
            "One search per thread",
            "a broadcast per step: no more reads than by lane 0 alone",
            [[word] * LANES for word in binary_search_reads(sources, one)],
            1,
        ),
        ("Ballot", f"{LANES} lanes compare {LANES} pivots at once", ballot_search_reads(sources, one), 1),
        (
            "A target per lane",
            f"{LANES} searches side by side",
            list(itertools.zip_longest(*searches, fillvalue=-1)),
            LANES,
        ),
    )
    costs = [sum(map(count_wavefronts, steps)) for *_, steps, _ in panels]
    first, second, third = (_format(cost / found) for cost, (*_, found) in zip(costs, panels))
    title = f"A target per lane takes {third} reads, a ballot {second}, a search per thread {first}"

    high, head = 0.13, 0.38
    height = 1.25 + sum(head + high * len(steps) for *_, steps, _ in panels)
    figure, axes = canvas(
        title,
        "a model, not measured; reads are wavefronts of shared memory, one word per bank "
        "each; search_padded, with room for 64, takes 6 steps",
        plots.SIZE[0],
        height,
    )
    x, width, columns = 0.55, 2.95, (3.9, 4.27, 4.69, 5.4)
    shades = colormaps["viridis"].with_extremes(bad="#e6e6e6")

    def draw_cells(y, rows):
        """Draw rows downwards from y, coloured by source time."""
        rows = numpy.ma.masked_less(numpy.array(rows), 0)
        down, across = rows.shape
        axes.pcolormesh(
            numpy.linspace(x, x + width, across + 1),
            y - high * numpy.arange(down + 1),
            rows,
            cmap=shades,
            vmin=0,
            vmax=sources - 1,
            edgecolors="white",
            linewidth=0.5,
        )

    y = height - 0.53
    draw_cells(y, [range(sources)])
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
        draw_cells(y, steps)
        for step in range(len(steps)):
            write(axes, x - 0.06, y - (step + 0.5) * high, f"step {step + 1}", "right")
        y -= high * len(steps)
        for at, value in zip(columns, (len(steps), cost, found, cost / found)):
            write(axes, at, y + high * len(steps) / 2, _format(value), "right", 9)
    write(axes, x, y - 0.1, "lane 0", "left", color=plots.GREY)
    write(axes, x + width, y - 0.1, f"lane {LANES - 1}", "right", color=plots.GREY)
    return figure


def count_search_wavefronts(sources: int = 1024, targets: int = 2048) -> list[dict]:
    """Return, for three ways to search, the steps and the wavefronts per target, by the model of `count_wavefronts`.

    The source times and the targets are spread evenly. A warp step is one comparison by a warp.
    """
    at = [(target + 0.5) * (sources - 1) / targets for target in range(targets)]
    single = [binary_search_reads(sources, target) for target in at]
    groups = [
        list(itertools.zip_longest(*single[first : first + LANES], fillvalue=-1))
        for first in range(0, targets, LANES)
    ]
    searches = {
        "32 lanes read one word": [[[word] * LANES for word in reads] for reads in single],
        "lane 0 reads alone": [[[word] for word in reads] for reads in single],
        "32 lanes read 32 pivots": [ballot_search_reads(sources, target) for target in at[::16]],
        "32 lanes search 32 targets": groups,
    }
    rows = []
    for name, runs in searches.items():
        found = len(runs) * (LANES if runs is groups else 1)
        steps, wavefronts = sum(map(len, runs)), sum(count_wavefronts(step) for run in runs for step in run)
        rows.append(
            {
                "search": name,
                "steps": steps / len(runs),
                "warp steps per target": steps / found,
                "wavefronts per target": wavefronts / found,
            }
        )
    return rows


def wavefront_table() -> results.Table:
    """Return the table of `count_search_wavefronts` for the problem of the notebook."""
    return results.table(count_search_wavefronts(), "counted, not measured: 1,024 sources, 2,048 targets")


def draw_banks(sources: int = 1024, padded: bool = False) -> plots.Picture:
    """Draw which banks of shared memory the lanes read in one step of a binary search and of a ballot search.

    With `padded`, one unused word stands after every 32 source times.
    """
    target = sources * 0.37
    steps = (
        ("one word for 32 lanes", [binary_search_reads(sources, target)[0]] * LANES),
        ("32 pivots, first step", ballot_search_reads(sources, target)[0]),
        ("32 pivots, second step", ballot_search_reads(sources, target)[1]),
    )
    steps = [(name, [word + word // BANKS * padded for word in words]) for name, words in steps]
    counts = {name: count_wavefronts(words) for name, words in steps}
    most = max(counts.values())
    figure, axes = canvas(
        f"A bank gives one word per wavefront: a step takes up to {most}", "", plots.SIZE[0], 2.6
    )
    left, wide, low, high = 1.35, 0.098, 0.42, 0.36
    for row, (name, words) in enumerate(steps):
        y = 1.72 - row * 0.62
        read = {
            bank: len({word for word in words if word >= 0 and word % BANKS == bank}) for bank in range(BANKS)
        }
        write(axes, left - 0.08, y + high / 2, name, "right", 7.5)
        for bank in range(BANKS):
            box(axes, left + bank * wide, y, wide, high, PALE, "white", linewidth=0.6)
            if read[bank]:
                box(
                    axes,
                    left + bank * wide,
                    y,
                    wide,
                    high * (0.15 + 0.85 * read[bank] / LANES),
                    ORANGE if read[bank] > 1 else BLUE,
                    "white",
                    linewidth=0.6,
                )
        count = counts[name]
        write(
            axes,
            left + BANKS * wide + 0.08,
            y + high / 2,
            f"{count} wavefront{'s' * (count > 1)}",
            "left",
            7.5,
        )
    write(axes, left, low - 0.18, "bank 0", "left", color=plots.GREY)
    write(axes, left + BANKS * wide, low - 0.18, "bank 31", "right", color=plots.GREY)
    write(
        axes,
        left + BANKS * wide / 2,
        low - 0.32,
        "height: how many different words of this bank the lanes read",
    )
    return figure.describe(
        "A row for each step, with a bar for each of the 32 banks: how many different words of it the lanes read. "
        f"Wavefronts: {'; '.join(f'{name}: {count}' for name, count in counts.items())}."
    )


def draw_who_searches() -> plots.Picture:
    """Draw when warps search and load: each for its own targets, or a block together for a chunk. A model."""
    figure, axes = canvas(
        "Search together first, and every warp has loads under way all the time",
        "a model, not measured; widths are not to scale between the two parts",
        plots.SIZE[0],
        2.85,
    )
    left, step, high, pitch = 0.75, 0.205, 0.2, 0.25

    def draw(y, name, spans):
        write(axes, left - 0.06, y + high / 2, name, "right")
        for begin, width, tone, text in spans:
            box(axes, left + begin * step, y, width * step, high, tone, "white", linewidth=0.6)
            write(axes, left + (begin + width / 2) * step, y + high / 2, text)

    search, load, blend = lighten(ORANGE), lighten(BLUE), lighten(GREEN)
    write(
        axes,
        0.1,
        2.33,
        "a search per warp: each target waits for its search, then for its rows",
        "left",
        8,
        fontweight="bold",
    )
    for warp in range(3):
        spans = []
        for turn in range(2):
            begin = turn * 11 + 0.5 * warp
            spans += [
                (begin, 6, search, f"search {3 * turn + warp}"),
                (begin + 6, 4, load, f"rows {3 * turn + warp}"),
                (begin + 10, 1, blend, ""),
            ]
        draw(2.02 - pitch * warp, f"warp {warp}", spans)
    write(
        axes,
        0.1,
        1.27,
        "a search per block: one pass finds 32 targets per warp, then all rows are independent",
        "left",
        8,
        fontweight="bold",
    )
    for warp, first in enumerate(
        ((0, 6, search, "search 0 … 31"), (0, 6, search, "search 32 … 63"), (0, 6, PALE, "waits"))
    ):
        draw(
            0.96 - pitch * warp,
            f"warp {warp}",
            [first, *((6.2 + 4.0 * turn, 4, load, f"rows {3 * turn + warp}") for turn in range(4))],
        )
    axes.plot([left + 6.1 * step] * 2, [0.4, 1.18], color="black", linewidth=1)
    write(axes, left + 6.1 * step, 0.3, "__syncthreads")
    return figure.describe(
        "Timelines of three warps. With a search per warp, each searches for one target, loads its rows, blends them, "
        "and begins the next search. With a search per block, two warps search for 32 targets each while the third one "
        "waits; after __syncthreads all three load rows without a pause."
    )


def draw_chunk() -> plots.Picture:
    """Draw what a block of the shared search does with a chunk: stage the times, search, blend."""
    figure, axes = canvas(
        "A chunk is searched once; then all threads share its rows", "", plots.SIZE[0], 2.75
    )

    def arrow(start, end, tone=plots.GREY):
        axes.annotate(
            "",
            end,
            start,
            arrowprops={"arrowstyle": "-|>", "color": tone, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
        )

    for x, name in (
        (0.1, "1. stage the times"),
        (1.95, "2. a target per thread"),
        (3.7, "3. an element per thread"),
    ):
        write(axes, x, 2.42, name, "left", 8, fontweight="bold")
    box(axes, 0.1, 1.95, 1.5, 0.26, PALE)
    write(axes, 0.85, 2.08, "source_times, 1 batch")
    box(axes, 0.1, 1.05, 1.5, 0.36, lighten(ORANGE))
    write(axes, 0.85, 1.23, "shared memory: times")
    arrow((0.85, 1.95), (0.85, 1.42))
    write(axes, 0.92, 1.68, "256 threads", "left")
    for lane in range(6):
        x = 1.95 + 0.245 * lane
        box(axes, x, 1.72, 0.21, 0.26, lighten(BLUE), "white")
        write(axes, x + 0.105, 1.85, f"t{lane}" if lane < 5 else "…")
        box(axes, x, 1.05, 0.21, 0.36, lighten(ORANGE), "white")
        arrow((x + 0.105, 1.72), (x + 0.105, 1.42))
    write(axes, 2.68, 2.1, "64 threads search 64 targets")
    write(axes, 2.68, 0.92, "shared memory: found = (left row, weight)")
    arrow((1.6, 1.3), (1.93, 1.8))
    for row in range(3):
        y = 1.72 - 0.33 * row
        write(axes, 3.7, y + 0.13, f"target {row}" if row < 2 else "…", "left")
        for column in range(8):
            box(axes, 4.12 + 0.155 * column, y, 0.15, 0.26, lighten(GREEN), "white")
    write(axes, 4.55, 2.1, "256 threads, 64 × 128 elements")
    arrow((3.4, 1.23), (3.68, 1.5))
    write(axes, 0.1, 0.62, "__syncthreads after 1: all times are there before anyone searches.", "left")
    write(axes, 0.1, 0.44, "__syncthreads after 2: all targets are found before anyone blends.", "left")
    write(
        axes,
        0.1,
        0.2,
        "A target is searched once per chunk, not once per element or per warp.",
        "left",
        color=plots.GREY,
    )
    return figure.describe(
        "Three steps of a block. 256 threads copy the source times of one batch to shared memory. 64 threads search 64 "
        "targets, one each, and write the left row and the weight to shared memory. 256 threads blend the 64 × 128 "
        "elements. A __syncthreads follows the first and the second step."
    )
