"""Pictures of the notebook `ch14_compiled`. Those of mechanisms explain and do not measure."""

from __future__ import annotations

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write

PALE = "#eeeeee"

# Each candidate, how it loads its tiles, and its colour. OFFERED lists which of them a mode lets Inductor time.
CANDIDATES = (
    ("library kernel", "closed: count what\nit executes", "cuBLAS"),
    ("Triton, pointers", "threads\ncopy tiles", "conservative"),
    ("Triton, descriptors", "the copy engine\nmoves tiles", "best"),
)
OFFERED = (
    ("eager, default", (1, 0, 0)),
    ("max-autotune", (1, 1, 0)),
    ("max-autotune, TMA flag set", (1, 1, 1)),
    ("either, below 68 SMs", (1, 0, 0)),
    ("attention: SDPA, any mode", (1, 0, 0)),
    ("attention: flex", (0, 1, 0)),
    ("attention: flex, USE_TMA", (0, 0, 1)),
)


def candidates_picture() -> plots.Picture:
    """Draw modes by candidates: a filled cell is a candidate that the mode may choose, a white one is not offered."""
    figure, axes = plots.new_figure(
        OFFERED, "A mode decides who may compete; the clock decides who wins", "", height=3.0
    )
    for column, (name, how, tone) in enumerate(CANDIDATES):
        axes.text(column + 0.48, len(OFFERED) + 0.95, name, ha="center", fontsize=8, fontweight="bold")
        axes.text(column + 0.48, len(OFFERED) + 0.08, how, ha="center", fontsize=7, linespacing=1.1)
        for row, (_, offered) in enumerate(OFFERED):
            y = len(OFFERED) - 1 - row
            face = plots.colour(tone) if offered[column] else "white"
            axes.add_patch(
                Rectangle((column, y), 0.96, 0.88, facecolor=face, edgecolor=plots.GREY, linewidth=0.6)
            )
    axes.set(xlim=(0, len(CANDIDATES)), ylim=(-0.1, len(OFFERED) + 1.5), xticks=[])
    axes.set_yticks(
        [len(OFFERED) - 1 - row + 0.44 for row in range(len(OFFERED))],
        [name for name, _ in OFFERED],
        fontsize=7.5,
    )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


# ---- mechanisms


def _arrow(axes, begin, end, tone=plots.GREY, style="-|>", **rest) -> None:
    axes.annotate(
        "",
        end,
        begin,
        arrowprops={"arrowstyle": style, "color": tone, "lw": 1.1, "shrinkA": 0, "shrinkB": 0, **rest},
    )


def draw_compile() -> plots.Picture:
    """Draw what torch.compile does at a first call and at a later one."""
    figure, axes = canvas(
        "The first call traces and writes kernels; a later call checks guards and launches", "", 7.6, 3.3
    )
    blue, orange, green = (plots.colour(name) for name in ("best", "proposed", "predicted"))
    steps = (
        (0.1, "your function", "Python that\ncalls torch", PALE),
        (1.65, "Dynamo", "runs the bytecode\nwithout data", lighten(orange)),
        (3.2, "graph", "operations, one\nafter another", PALE),
        (4.75, "Inductor", "fuses, writes Triton,\ntimes candidates", lighten(orange)),
        (6.3, "program", "call(): allocate,\nlaunch kernels", lighten(blue)),
    )
    for x, name, text, tone in steps:
        box(axes, x, 1.75, 1.2, 0.95, tone, plots.GREY)
        write(axes, x + 0.6, 2.5, name, size=8.5, fontweight="bold")
        write(axes, x + 0.6, 2.07, text, size=7)
    for x in (1.3, 2.85, 4.4, 5.95):
        _arrow(axes, (x, 2.22), (x + 0.35, 2.22))
    box(axes, 1.65, 0.45, 2.75, 0.75, lighten(green), plots.GREY)
    write(axes, 3.02, 0.98, "guards", size=8.5, fontweight="bold")
    write(axes, 3.02, 0.69, "dtype, device, sizes, strides, Python values\nthat the trace relied on", size=7)
    _arrow(axes, (1.9, 1.75), (1.9, 1.2))
    write(axes, 1.84, 1.47, "writes down", "right", 7)
    write(axes, 0.7, 1.02, "a later call", size=8)
    _arrow(axes, (0.25, 0.82), (1.65, 0.82))
    _arrow(axes, (4.4, 0.82), (6.9, 0.82))
    _arrow(axes, (6.9, 0.82), (6.9, 1.75))
    write(axes, 5.6, 0.95, "all hold: launch the program", size=7.5)
    _arrow(axes, (2.6, 1.2), (2.6, 1.75), plots.colour("conservative"))
    write(axes, 2.67, 1.47, "one fails: trace again", "left", 7, color=plots.colour("conservative"))
    return figure.describe(
        "Your function goes through Dynamo, which makes a graph and guards, and through Inductor, "
        "which writes a program. A later call checks the guards: if all hold it launches the "
        "program, otherwise Dynamo traces again."
    )


def draw_break(graphs: int = 2) -> plots.Picture:
    """Draw a function that a plain call cuts into `graphs` graphs, and the same with a registered operator."""
    figure, axes = canvas("A call that Dynamo cannot trace cuts the graph into pieces", "", 7.6, 2.55)
    inside = f" and {graphs - 2} more graphs" if graphs > 2 else ""
    blue, orange = plots.colour("best"), plots.colour("proposed")
    for y, name, middle, tone, text in (
        (
            1.35,
            "plain call",
            f"launcher: Python{inside}",
            lighten(plots.colour("conservative")),
            f"{graphs or 'no'} graphs; between them Python runs, and the values go through memory",
        ),
        (
            0.3,
            "operator",
            "lesson::silu_mul",
            lighten(orange),
            "one graph; Inductor knows shape and dtype of the result, not what is inside",
        ),
    ):
        write(axes, 0.1, y + 0.3, name, "left", 8.5, fontweight="bold")
        cut = 0.12 if name == "plain call" else 0.0
        for x, width, label, face in (
            (1.2, 1.5, "graph: g * 2", lighten(blue)),
            (2.7, 2.1, middle, tone),
            (4.8, 1.5, "graph: … + 1", lighten(blue)),
        ):
            label = label if cut else label.removeprefix("graph: ")
            box(axes, x + (cut if x > 2 else 0) + (cut if x > 4 else 0), y, width, 0.6, face, plots.GREY)
            write(axes, x + width / 2 + (cut if x > 2 else 0) + (cut if x > 4 else 0), y + 0.3, label, size=8)
        if not cut:
            box(axes, 1.12, y - 0.08, 5.26, 0.76, "none", "black", linewidth=1.2)
        write(axes, 1.2, y - 0.18, text, "left", 7)
    return figure.describe(
        f"With a plain call, the function becomes {graphs or 'no'} graphs with Python between them. "
        "With a registered operator, its three parts lie in one graph."
    )


def draw_transfers() -> plots.Picture:
    """Draw what one program does for one block: by pointers, by descriptors that it builds, and by the host's."""
    figure, axes = canvas(
        "One program, one block: what happens before the bytes move",
        "not to scale; the three descriptors of silu(g)·u are built one after the other",
        7.6,
        2.9,
    )
    blue, orange, green = (plots.colour(name) for name in ("best", "proposed", "predicted"))
    red = plots.colour("conservative")
    rows = (
        ("pointers", (("load g, u", 0, 2.2, blue), ("compute", 2.2, 0.8, green), ("store", 3.0, 1.2, blue))),
        (
            "descriptors, built\nin the kernel",
            (
                ("build 3 × 128 B, fence", 0, 1.9, red),
                ("TMA load", 1.9, 2.3, orange),
                ("compute", 4.2, 0.8, green),
                ("TMA store", 5.0, 1.2, orange),
            ),
        ),
        (
            "descriptors from\nthe host",
            (("TMA load", 0, 2.3, orange), ("compute", 2.3, 0.8, green), ("TMA store", 3.1, 1.2, orange)),
        ),
    )
    for index, (name, parts) in enumerate(rows):
        y = 1.95 - 0.75 * index
        write(axes, 0.1, y + 0.22, name, "left", 8)
        for text, begin, length, tone in parts:
            box(axes, 1.35 + begin, y, length, 0.44, lighten(tone, 0.55), "white")
            write(axes, 1.35 + begin + length / 2, y + 0.22, text, size=7.5)
    return figure.describe(
        "Three timelines of one program. By pointers it loads, computes and stores. With "
        "descriptors built in the kernel, building and a fence come before the loads. With the "
        "host's descriptors they do not."
    )


def draw_pointwise(record) -> plots.Picture | str:
    """Draw the ratio of descriptors to pointers with its spread for each case, or say that it is not measured.

    A case that failed, or gave a wrong result, has that word in place of a point.
    """
    rows = record.rows
    timed = [row for row in rows if row.get("ratio")]
    if not timed:
        return "not timed yet: the record ch14_compiled_pointwise does not exist"
    figure, axes = plots.new_figure(
        rows, "Descriptors instead of pointers: above 1 they are faster", record.label(), height=4.7
    )
    tones = {"pointwise": plots.colour("best"), "reduction": plots.colour("proposed")}
    for index, row in enumerate(reversed(rows)):
        if row.get("ratio"):
            axes.errorbar(
                row["ratio"],
                index,
                xerr=row["spread"],
                fmt="o" if row["tma_loads"] else "x",
                ms=5,
                color=tones[row["kind"]],
                capsize=2,
                lw=1,
            )
        else:
            axes.text(0.02, index, row["status"], va="center", fontsize=7.5, color=tones[row["kind"]])
    keys = [
        Line2D([], [], color="black", marker=mark, lw=0, ms=5, label=text)
        for mark, text in (("o", "loads by TMA"), ("x", "loads by pointers"))
    ]
    keys += [Line2D([], [], color=tone, lw=4, label=kind) for kind, tone in tones.items()]
    axes.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1),
        ncol=4,
        fontsize=7.5,
        frameon=False,
        borderpad=0,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=1.4,
    )
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.axvline(1, color=plots.GREY, lw=0.8)
    axes.set_yticks(range(len(rows)), [row["case"] for row in reversed(rows)], fontsize=7.5)
    axes.set_xlabel(
        "time by pointers / time by descriptors; bars: ± half of the interquartile distance", fontsize=8
    )
    paid = [row["case"] for row in timed if row["ratio"] > 1 + max(0.02, row["spread"])]
    missing = [f"{row['case']} ({row['status']})" for row in rows if not row.get("ratio")]
    return figure.describe(
        f"{len(rows)} cases; dots load by TMA, crosses do not; blue: pointwise, orange: reductions. "
        f"Faster with descriptors: {', '.join(paid) or 'none'}. "
        f"Without a time: {', '.join(missing) or 'none'}."
    )
