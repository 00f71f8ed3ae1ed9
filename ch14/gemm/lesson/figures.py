"""The charts of the notebook `08_ch14_gemm`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from matplotlib.lines import Line2D

from tilelab.pictures import plots
from tilelab.records import results

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))


def draw_stage_sweep(record) -> plots.Picture:
    """Draw the speed over the number of stages of one program, for each kernel, with the spread."""
    rows = [row for row in record.rows if row.get("ratio")]
    if not rows:
        return plots.new_figure([1], "Stages are not measured yet", record.label())[0]
    title = "Stages hide the latency of a load, and cost programs per SM: 4096³"
    figure, axes = plots.new_figure(rows, title, record.label(), 2.8)
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        mine = [row for row in rows if row["kernel"] == kernel]
        tone = {"pointers": ORANGE, "descriptors": BLUE}.get(kernel, GREEN)
        points = zip(*((row["stages"], row["ratio"], row.get("spread") or 0) for row in mine))
        axes.errorbar(*points, color=tone, marker="o", ms=4, label=kernel, capsize=2)
        for row in mine:
            # The curves meet at one stage, so the numbers of the descriptors stand below their points.
            shift = (0, -11 if kernel == "descriptors" else 6)
            look = {"fontsize": 6.5, "textcoords": "offset points", "ha": "center", "color": tone}
            axes.annotate(f"{row['programs_per_sm']}", (row["stages"], row["ratio"]), shift, **look)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(ylim=(0, 1.15), xticks=sorted({row["stages"] for row in rows}))
    axes.set_xlabel(
        "stages; numbers at the points: programs per SM; bars: half the distance of the quartiles", fontsize=7
    )
    axes.set_ylabel("× torch.mm", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    said = {row["kernel"]: [] for row in rows}
    for row in rows:
        said[row["kernel"]].append(f"{row['ratio']:.2f} at {row['stages']}")
    speeds = "; ".join(f"{name}: {', '.join(each)}" for name, each in said.items())
    return figure.describe(
        "A line for each kernel: its speed, × torch.mm, over the number of stages, with the number "
        f"of programs per SM at each point. {speeds}."
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
    colours = dict(zip(records, (BLUE, ORANGE, GREEN)))
    sides = (("alone", "plain", "added: × the plain kernel"), ("last", "winner", "removed: × the winner"))
    part = None
    for place, (kind, base, title) in enumerate(sides):
        part = figure.add_subplot(1, 2, place + 1, sharex=part)
        for shift, (size, record) in enumerate(records.items()):
            ran = {(row["kind"], row["ingredient"]): row for row in record.rows if row.get("ratio")}
            of_base = ran.get((base, ""))
            for line, name in enumerate(names):
                row = ran.get((kind, name))
                if not row or not of_base:
                    continue
                factor, y = row["ratio"] / of_base["ratio"], len(names) - line - 0.2 * shift
                shares = [(each.get("spread") or 0) / each["ratio"] for each in (row, of_base)]
                look = {"fmt": "o", "ms": 4, "capsize": 2, "color": colours[size]}
                part.errorbar(factor, y, xerr=factor * math.hypot(*shares), **look)
        part.axvline(1, color="black", linewidth=1)
        part.set_yticks([y - 0.2 for y in range(len(names), 0, -1)], names if not place else [], fontsize=7)
        part.set_ylim(0.2, len(names) + 0.4)
        part.set_title(title, fontsize=8)
        part.tick_params(axis="x", labelsize=7)
        part.grid(axis="y", color="#eeeeee")
    part.set_xscale("log")  # so that half as fast is as far from 1 as twice as fast
    ticks = (0.25, 0.33, 0.5, 0.7, 1, 1.4, 2, 3, 4)
    low, high = part.get_xlim()
    part.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    part.set_xlim(low, high)
    part.minorticks_off()
    dots = [Line2D([], [], color=colour, marker="o", lw=0, ms=4) for colour in colours.values()]
    sizes = [f"{size}³" for size in colours]
    options = dict(fontsize=7, frameon=False, ncols=len(sizes), loc="upper right", bbox_to_anchor=(1, 0.95))
    figure.legend(dots, sizes, **options)
    return figure.describe(
        "For each ingredient and size, how much faster the plain kernel becomes with it, and how "
        "much slower the winner becomes without it, with the spread of the ratios. Both parts have one scale."
    )


TOKENS = {"1 to 64": (1, 64), "65 to 400": (65, 400), "above 400": (401, math.inf), "all": (1, math.inf)}


def describe_means(sets: dict[str, list[dict]]) -> str:
    """Return a text table of the sets of shapes: the geometric mean of the ratios by tokens (M), and the lowest."""
    lines = [f"{'× torch.mm, by tokens':30}" + "".join(f"{name:>15}" for name in (*TOKENS, "lowest shape"))]
    for name, rows in sets.items():
        found = [
            results.geometric_mean(row["ratio"] for row in rows if low <= row["shape"][0] <= high)
            for low, high in TOKENS.values()
        ]
        found.append(min(row["ratio"] for row in rows))
        lines.append(f"{f'{name}, {len(rows)} shapes':30}" + "".join(f"{value:15.2f}" for value in found))
    return "\n".join(lines)


def find_means(rows: list[dict]) -> dict[int, float]:
    """Return {tokens: geometric mean of the ratios}, by tokens, where a number of tokens has several shapes."""
    found: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["shape"][0]):
        found.setdefault(row["shape"][0], []).append(row["ratio"])
    return {tokens: results.geometric_mean(each) for tokens, each in found.items() if len(each) > 1}


def draw_held_out(sets: dict[str, list[dict]], source: str) -> plots.Picture:
    """Draw the ratio of each shape over its tokens (M) for each set, and the mean of each number of tokens.

    The title is about the first set.
    """
    means = {name: find_means(rows) for name, rows in sets.items()}
    lowest = {name: min(each, key=each.get) for name, each in means.items()}
    first = next(iter(sets))
    behind = [tokens for tokens, mean in means[first].items() if mean < 0.98]  # nearer to 1 is level
    title = f"Untuned shapes: {first} keeps up at all numbers of tokens"
    if behind:
        title = (
            f"Untuned shapes: {first} first falls behind at {behind[0]:,} tokens, most at {lowest[first]:,}"
        )
    figure, axes = plots.new_figure(list(sets), title, source, 3)
    for (name, rows), tone in zip(sets.items(), (ORANGE, BLUE)):
        axes.plot(*zip(*((row["shape"][0], row["ratio"]) for row in rows)), ".", color=tone, ms=3, alpha=0.35)
        axes.plot(*zip(*means[name].items()), color=tone, marker="o", ms=3.5, lw=1.5, label=name)
    said = [
        f"{name}: the lowest mean, {means[name][at]:.2f}, is at {at} tokens" for name, at in lowest.items()
    ]
    axes.axhline(1, color="black", linewidth=1)
    ticks = (1, 4, 16, 64, 256, 1024, 4096)
    axes.set(xscale="log", ylim=(0.45, 1.5))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens (M); a dot is a shape, a line their geometric mean", fontsize=8)
    axes.set_ylabel("× torch.mm", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    return figure.describe(
        f"A dot for each shape: its speed, × torch.mm, over its tokens, and a line of means. {'; '.join(said)}."
    )


def describe_losses(records: dict[int, object], switched: Iterable[dict]) -> str:
    """Return a text table: the speed of the winner at each size, and the share that is left without each ingredient.

    `switched` are rows of `experiments.measure_without_tma`, of which those of the winner's tile are taken.
    """
    columns = []
    left = {
        row["shape"][0]: row["without_tma"]
        for row in switched
        if "without_tma" in row and "2 per SM" in row["config"]
    }
    for size, record in records.items():
        speed = {(row["kind"], row["ingredient"]): row.get("ratio") for row in record.rows}
        if not (winner := speed["winner", ""]):
            return ""
        column = {"3 stages alone, × torch.mm": speed["alone", "3 stages"], "winner, × torch.mm": winner}
        column |= {f"without {name}": speed[kind, name] / winner for kind, name in speed if kind == "last"}
        column["without TMA"] = left.get(size, math.nan)
        columns.append(column | {"one per SM, 6 stages": speed["winner, one per SM, 6 stages", ""] / winner})
    lines = [" " * 28 + "".join(f"{size:6}³" for size in records)]
    return "\n".join(
        lines + [f"{name:28}" + "".join(f"{each[name]:7.2f}" for each in columns) for name in columns[0]]
    )
