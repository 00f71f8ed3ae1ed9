"""Draw the errors of a sum over K, and the latency that the stages of a plan hide."""

from __future__ import annotations

from tilelab.pictures import plots

BLUE, ORANGE = map(plots.colour, ("best", "proposed"))


def draw_sums(record) -> plots.Picture:
    """Draw the errors of one sum over K and of a sum that is promoted every 128 columns, over K."""
    if not record.rows:
        return plots.new_figure([record], "The errors of this version are not measured", record.label())[0]
    figure = plots.new_figure(
        [record],
        "A sum that stays in the tensor core loses digits as K grows",
        f"elements from 0 to 1; {record.label()}",
        2.7,
    )[0]
    axes = figure.axes[0]
    sizes = [row["K"] for row in record.rows]
    for name, tone in (("one sum", ORANGE), ("promoted", BLUE)):
        axes.plot(sizes, [max(row[name], 1e-9) for row in record.rows], "o-", color=tone, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("K", fontsize=8)
    axes.set_ylabel("largest error / largest element", fontsize=8)
    axes.axhline(2**-9, color="#999999", linewidth=0.8, linestyle="--")
    axes.text(sizes[0], 2**-9 * 1.1, "half a step of bf16", fontsize=7, va="bottom")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left")
    ends = {name: [record.rows[index][name] for index in (0, -1)] for name in ("one sum", "promoted")}
    (one, longest), (first, last) = ends["one sum"], ends["promoted"]
    return figure.describe(
        f"The largest error over the largest element, for K from {sizes[0]:,} to {sizes[-1]:,}. The error of one sum "
        f"in the tensor core goes from {one:.2g} to {longest:.2g}. The error of a sum that is promoted to float32 "
        f"every 128 columns goes from {first:.2g} to {last:.2g}. A dashed line marks half a step of bf16, {2**-9:.2g}."
    )


def draw_in_flight(rows) -> plots.Picture:
    """Draw the latency that the stages of each plan hide, at the tensor core's rate."""
    figure, axes = plots.new_figure(
        rows,
        "How much latency the stages hide, if the tensor core runs at full rate",
        "datasheet rates of a B200; latency fitted to a sweep on an H200",
        2.4,
    )
    names = [f"{row['test']}, {row['plan']}" for row in rows]
    axes.barh(
        names,
        [row["hidden us"] for row in rows],
        color=[ORANGE if row["plan"] == "attempt 2" else BLUE for row in rows],
    )
    axes.axvline(rows[0]["latency us"], color="black", linestyle="--", linewidth=1)
    axes.text(rows[0]["latency us"], -0.75, "latency of a load", fontsize=7, ha="right")
    axes.invert_yaxis()
    axes.set_xlabel("microseconds hidden by the stages in flight", fontsize=8)
    axes.tick_params(labelsize=7)
    bars = "; ".join(f"{name}: {row['hidden us']:.2f}" for name, row in zip(names, rows))
    return figure.describe(
        f"Bars of the microseconds that the stages in flight hide: {bars}. A dashed line marks the "
        f"latency of a load, {rows[0]['latency us']:g} µs."
    )
