"""Pictures of the notebook `ch14_gemm`. Those of mechanisms explain and do not measure."""

from __future__ import annotations

import math

import numpy
from matplotlib.colors import ListedColormap

from ch14.gemm.configs import Rates
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write

BLUE, ORANGE, GREEN, RED = map(plots.colour, ("best", "proposed", "predicted", "conservative"))
PALE = "#eeeeee"
SMS, SMEM_PER_SM, TILE, STEP = 132, 233472, 128, 64  # of an H200, and of the kernels in the notebook


def schedule(
    stages: int, steps: int, latency: float, product: float
) -> list[tuple[float, float, float, float]]:
    """Return (load issued, load landed, product begins, product ends) of each step of K for a ring of `stages`."""
    times = []
    for step in range(steps):
        issued = times[step - stages][3] if step >= stages else 0.0
        begin = max(issued + latency, times[-1][3] if times else 0.0)
        times.append((issued, issued + latency, begin, begin + product))
    return times


def draw_stages(choices=(1, 2, 4), steps: int = 8) -> plots.Picture:
    """Draw the loads and the products of one tile for several numbers of stages, on one time axis."""
    rates = Rates()
    product = 2 * TILE * TILE * STEP / rates.flops_per_us
    plans = {stages: schedule(stages, steps, rates.latency_us, product) for stages in choices}
    longest = max(plan[-1][3] for plan in plans.values())
    left, scale = 0.95, (plots.SIZE[0] - 1.4) / longest
    height = 0.75 + sum(0.21 * min(stages, steps) + 0.42 for stages in choices)
    figure, axes = canvas(
        "More stages: more loads under way, until the tensor core never waits",
        f"one program alone on its SM; a load takes {rates.latency_us:.2f} µs, a product "
        f"{product:.2f} µs; grey: landed, until it is multiplied",
        plots.SIZE[0],
        height,
    )
    top = height - 0.45
    for stages, plan in plans.items():
        write(axes, 0.05, top, f"{stages} stage" + "s" * (stages > 1), "left", 7.5, fontweight="bold")
        for lane in range(stages):
            y = top - 0.21 * (lane + 1)
            write(axes, left - 0.06, y + 0.09, f"buffer {lane}", "right", 6.5)
            box(axes, left, y, longest * scale, 0.18, "#f6f6f6")
        y = top - 0.21 * (stages + 1)
        write(axes, left - 0.06, y + 0.09, "tensor core", "right", 6.5)
        box(axes, left, y, longest * scale, 0.18, "#f6f6f6")
        for step, (issued, landed, begin, end) in enumerate(plan):
            tone, at = lighten(BLUE, 0.35 if step % 2 else 0.6), top - 0.21 * (step % stages + 1)
            box(
                axes,
                left + issued * scale,
                at,
                (landed - issued) * scale,
                0.18,
                tone,
                "white",
                f"load {step}",
            )
            box(axes, left + landed * scale, at, (end - landed) * scale, 0.18, "#d9d9d9", "white")
            box(axes, left + begin * scale, y, (end - begin) * scale, 0.18, ORANGE, "white", str(step))
        write(axes, left + plan[-1][3] * scale + 0.04, y + 0.09, f"{plan[-1][3]:.1f} µs", "left", 6.5)
        top = y - 0.2
    return figure.describe(
        "Timelines of eight steps of K with 1, 2 and 4 stages. With one stage loads and products "
        "alternate; with four, loads overlap and the tensor core works without a gap."
    )


def raster(tiles_m: int, tiles_n: int, group: int) -> numpy.ndarray:
    """Return the number of the program that computes each tile."""
    order = numpy.empty((tiles_m, tiles_n), int)
    for tile in range(tiles_m * tiles_n):
        first = tile // (group * tiles_n) * group
        rows = min(tiles_m - first, group)
        within = tile % (group * tiles_n)
        order[first + within % rows, within // rows] = tile
    return order


def draw_raster(tiles: int = 64, programs: int = 2 * SMS, groups=(1, 8)) -> plots.Picture:
    """Draw which tiles of C run at the same time, without and with groups of rows."""
    figure, axes = plots.new_figure(
        [tiles],
        f"The first {programs} programs: with groups they share more of A and B",
        f"{tiles} × {tiles} tiles of 128 × 128, as at {tiles * TILE} cubed",
        3.0,
    )
    axes.remove()
    for place, group in enumerate(groups):
        part = figure.add_subplot(1, len(groups), place + 1)
        running = raster(tiles, tiles, group) < programs
        rows, columns = int(running.any(1).sum()), int(running.any(0).sum())
        part.imshow(running, cmap=ListedColormap([PALE, BLUE]), interpolation="nearest")
        megabytes = (rows + columns) * TILE * tiles * TILE * 2 / 1e6
        part.set_title(
            f"GROUP_M = {group}: {rows} rows of A, {columns} columns of B\n{megabytes:.0f} MB to read once",
            fontsize=7.5,
        )
        part.set_xlabel("tile_n", fontsize=7)
        part.set_ylabel("tile_m" if not place else "", fontsize=7)
        part.tick_params(labelsize=6)
    return figure.describe(
        "Two maps of the tiles of C. Without groups the running programs fill a few whole rows and "
        "need every column of B; with groups of eight rows they form a block and need fewer strips."
    )


def draw_smem(choices=((6, 1, 1), (3, 1, 2), (3, 2, 2), (3, 4, 2))) -> plots.Picture:
    """Draw how the ring and the staged part of C share an SM, for (stages, parts, programs per SM)."""
    figure, axes = plots.new_figure(
        choices,
        "Staged in parts, C leaves room for two programs per SM",
        "128 × 128 × 64, bf16; ring (blue), staged C (green), 1 KiB of the system per "
        "program; dashed: what an SM has",
        2.4,
    )
    labels = []
    for line, (stages, parts, programs) in enumerate(choices):
        y, at = len(choices) - line, 0.0
        for _ in range(programs):
            ring, staged = stages * 2 * TILE * STEP * 2, TILE * TILE * 2 // parts
            for size, tone in ((ring, BLUE), (staged, GREEN), (1024, "#999999")):
                axes.barh(y, size / 1024, left=at, color=tone, edgecolor="white", height=0.62)
                at += size / 1024
        fits = at * 1024 <= SMEM_PER_SM
        axes.text(
            at + 2,
            y,
            f"{at:.0f} KiB" + ("" if fits else ": does not fit"),
            va="center",
            fontsize=7,
            color="black" if fits else RED,
            bbox=plots._WHITE_BOX,
        )
        labels.append(
            f"{programs} program{'s' * (programs > 1)}, {stages} stages, C in {parts} part{'s' * (parts > 1)}"
        )
    axes.axvline(SMEM_PER_SM / 1024, color=plots.GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(choices), 0, -1), labels, fontsize=7)
    axes.set_xlim(0, 310)
    axes.set_xlabel("KiB of shared memory per SM", fontsize=7)
    return figure.describe(
        "Bars of shared memory per SM. One program with six stages fits. Two programs with three "
        "stages each fit only if C is staged in two or four parts."
    )


def draw_waves(m: int = 512, n: int = 6144, widths=(128, 192)) -> plots.Picture:
    """Draw how the tiles of C fill the SMs in time, for two widths of a tile; time counts in tiles of 128 columns."""
    figure, axes = plots.new_figure(
        [m],
        f"192 tiles are two waves on {SMS} SMs, the second less than half full",
        f"{m} × {n}; one program per SM; time of a tile in proportion to its columns",
        2.5,
    )
    axes.remove()
    for place, width in enumerate(widths):
        part = figure.add_subplot(1, len(widths), place + 1)
        tiles = math.ceil(m / TILE) * math.ceil(n / width)
        cost, waves = width / 128, math.ceil(tiles / SMS)
        for wave in range(waves):
            busy = min(SMS, tiles - wave * SMS)
            part.bar(wave * cost, busy, cost, align="edge", color=BLUE, edgecolor="white")
            part.text(
                (wave + 0.5) * cost,
                busy / 2,
                f"{busy} tiles",
                ha="center",
                va="center",
                fontsize=7.5,
                color="white",
            )
            if busy < SMS:
                part.bar(
                    wave * cost, SMS - busy, cost, bottom=busy, align="edge", color=PALE, edgecolor="#bbbbbb"
                )
                if SMS - busy > 20:
                    part.text(
                        (wave + 0.5) * cost,
                        (SMS + busy) / 2,
                        f"{SMS - busy} SMs\nidle",
                        ha="center",
                        va="center",
                        fontsize=7,
                    )
        part.set(xlim=(0, 2.1), ylim=(0, SMS + 2))
        part.set_title(f"128 × {width}: {tiles} tiles, {tiles / waves / SMS:.0%} busy", fontsize=7.5)
        part.set_xlabel("time, in tiles of 128 columns", fontsize=7)
        part.set_ylabel("SMs" if not place else "", fontsize=7)
        part.tick_params(labelsize=6.5)
    return figure.describe(
        "Two charts of SMs over time. Tiles of 128 columns need two waves, of 132 and 60 tiles. "
        "Tiles of 192 columns need one wave of 128 tiles, which ends after 1.5 instead of 2 units."
    )


def draw_programs() -> plots.Picture:
    """Draw one SM over three tiles for the last steps: who loads, multiplies and stores when."""
    fill, work, store = 1.0, 3.2, 1.1
    one, pair, pale = fill + work + store, 2 * work, lighten(BLUE, 0.5)

    def tile(number, begin):
        """Return the spans of the products and of the store of one tile."""
        return (begin, work, ORANGE, f"products {number}"), (begin + work, store, GREEN, "store")

    plain = [span for t in range(3) for span in ((t * one, fill, pale, "fill"), *tile(t, t * one + fill))]
    loop = [(0, fill, pale, "fill"), *(span for t in range(3) for span in tile(t, fill + t * (work + store)))]
    rows = [
        (
            "a program per tile, one on the SM: the tensor core waits for each fill and each store",
            [("program", plain)],
        ),
        ("persistent: the loads of the next tile run during the store of this one", [("program", loop)]),
        (
            "two programs per SM: while one stores, the other multiplies",
            [
                ("program 0", [(0, fill, pale, "fill"), *tile(0, fill), *tile(2, fill + pair)]),
                ("program 1", [(0, fill, pale, "fill"), *tile(1, fill + work)]),
            ],
        ),
    ]
    height = 0.75 + sum(0.3 + 0.23 * len(lanes) for _, lanes in rows)
    figure, axes = canvas(
        "A persistent loop hides the fill; two programs also hide the store",
        "a sketch, not to scale: one SM, three tiles",
        plots.SIZE[0],
        height,
    )
    left, scale, top = 0.75, (plots.SIZE[0] - 0.85) / (3 * one), height - 0.45
    for title, lanes in rows:
        write(axes, 0.05, top, title, "left", 7.5, fontweight="bold")
        for name, spans in lanes:
            top -= 0.23
            write(axes, left - 0.06, top + 0.0, name, "right", 6.5)
            box(axes, left, top - 0.1, 3 * one * scale, 0.19, "#f6f6f6")
            for begin, length, tone, text in spans:
                box(axes, left + begin * scale, top - 0.1, length * scale, 0.19, tone, "white", text)
        top -= 0.3
    return figure.describe(
        "Three timelines of one SM. A program per tile fills, multiplies and stores in turn. The "
        "persistent loop fills once. With two programs the tensor core works while one of them "
        "stores."
    )


def draw_stage_sweep(record) -> plots.Picture:
    """Draw the speed over the number of stages of one program, for each kernel, with the spread."""
    rows = [row for row in record.rows if row.get("ratio")]
    if not rows:
        return plots.new_figure([1], "Stages are not measured yet", record.label())[0]
    figure, axes = plots.new_figure(
        rows, "Stages hide the latency of a load, and cost programs per SM", record.label(), 2.8
    )
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        tone = {"pointers": ORANGE, "descriptors": BLUE}.get(kernel, GREEN)
        axes.errorbar(
            [row["stages"] for row in mine],
            [row["ratio"] for row in mine],
            [row.get("spread") or 0 for row in mine],
            color=tone,
            marker="o",
            markersize=4,
            label=kernel,
            capsize=2,
        )
        for row in mine:
            # The curves meet at one stage, so the numbers of the descriptors stand below their points.
            axes.annotate(
                f"{row['programs_per_sm']}",
                (row["stages"], row["ratio"]),
                (0, -11 if kernel == "descriptors" else 6),
                fontsize=6.5,
                textcoords="offset points",
                ha="center",
                color=tone,
            )
    axes.axhline(1, color="black", linewidth=1)
    axes.set(ylim=(0, 1.15), xticks=sorted({row["stages"] for row in rows}))
    axes.set_xlabel(
        "stages; numbers at the points: programs per SM; bars: half the distance of the quartiles", fontsize=7
    )
    axes.set_ylabel("× torch.mm", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    said = "; ".join(
        f"{kernel}: "
        + ", ".join(f"{row['ratio']:.2f} at {row['stages']}" for row in rows if row["kernel"] == kernel)
        for kernel in dict.fromkeys(row["kernel"] for row in rows)
    )
    return figure.describe(
        "A line for each kernel: its speed, × torch.mm, over the number of stages, with the number "
        f"of programs per SM at each point. {said}."
    )


def draw_ablation(records: dict[str, object]) -> plots.Picture:
    """Draw each ingredient twice, added to the plain kernel and removed from the winner, for each size."""
    rows = [row for record in records.values() for row in record.rows if row.get("ratio")]
    label = next(iter(records.values())).label()
    if not rows:
        return plots.new_figure([1], "The ablation is not measured yet", label)[0]
    names = list(dict.fromkeys(row["ingredient"] for row in rows if row["kind"] in ("alone", "last")))
    title = "What each ingredient gives, added to the plain kernel and removed from the winner"
    figure, axes = plots.new_figure(rows, title, label, 1.4 + 0.3 * len(names))
    axes.remove()
    for place, (kind, base, title) in enumerate(
        (("alone", "plain", "added: × the plain kernel"), ("last", "winner", "removed: × the winner"))
    ):
        part = figure.add_subplot(1, 2, place + 1)
        for shift, record in enumerate(records.values()):
            of_base = next((row for row in record.rows if row["kind"] == base and row.get("ratio")), None)
            for line, name in enumerate(names):
                row = next(
                    (row for row in record.rows if (row["kind"], row["ingredient"]) == (kind, name)), None
                )
                if not row or not row.get("ratio") or not of_base:
                    continue
                factor = row["ratio"] / of_base["ratio"]
                spread = factor * math.hypot(
                    (row.get("spread") or 0) / row["ratio"], (of_base.get("spread") or 0) / of_base["ratio"]
                )
                part.errorbar(
                    factor,
                    len(names) - line - 0.2 * shift,
                    xerr=spread,
                    fmt="o",
                    markersize=4,
                    capsize=2,
                    color=(BLUE, ORANGE, GREEN)[shift],
                )
        part.axvline(1, color="black", linewidth=1)
        part.set_yticks([y - 0.2 for y in range(len(names), 0, -1)], names if not place else [], fontsize=7)
        part.set_ylim(0.2, len(names) + 0.4)
        part.set_title(title, fontsize=8)
        part.tick_params(axis="x", labelsize=7)
        part.grid(axis="y", color=PALE)
    handles = {str(size): colour for size, colour in zip(records, (BLUE, ORANGE, GREEN))}
    figure.legend(
        [_legend_dot(colour) for colour in handles.values()],
        [f"{size}³" for size in handles],
        fontsize=7,
        frameon=False,
        ncols=len(handles),
        loc="upper right",
        bbox_to_anchor=(1, 0.95),
    )
    return figure.describe(
        "For each ingredient and size, how much faster the plain kernel becomes with it, and how "
        "much slower the winner becomes without it, with the spread of the ratios."
    )


def _legend_dot(colour: str):
    """Return the entry of a legend: a dot."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker="o", linestyle="none", markersize=4)
