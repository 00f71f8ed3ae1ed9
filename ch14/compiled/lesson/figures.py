"""The chart of the notebook `ch14_compiled`."""

from __future__ import annotations

from matplotlib.lines import Line2D

from tilelab.pictures import plots


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
            look = {"fmt": "o" if row["tma_loads"] else "x", "color": tones[row["kind"]], "capsize": 2}
            axes.errorbar(row["ratio"], index, xerr=row["spread"], ms=5, lw=1, **look)
        else:
            axes.text(0.02, index, row["status"], va="center", fontsize=7.5, color=tones[row["kind"]])
    keys = [
        Line2D([], [], color="black", marker=mark, lw=0, ms=5, label=text)
        for mark, text in (("o", "loads by TMA"), ("x", "loads by pointers"))
    ]
    keys += [Line2D([], [], color=tone, lw=4, label=kind) for kind, tone in tones.items()]
    tight = {"borderpad": 0, "handlelength": 1.2, "handletextpad": 0.4, "columnspacing": 1.4}
    plots.legend_above(axes, x=-0.02, handles=keys, **tight)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.axvline(1, color=plots.GREY, lw=0.8)
    axes.set_yticks(range(len(rows)), [row["case"] for row in reversed(rows)], fontsize=7.5)
    said = "time by pointers / time by descriptors; bars: ± half of the interquartile distance"
    axes.set_xlabel(said, fontsize=8)
    paid = [row["case"] for row in timed if row["ratio"] > 1 + max(0.02, row["spread"])]
    missing = [f"{row['case']} ({row['status']})" for row in rows if not row.get("ratio")]
    return figure.describe(
        f"{len(rows)} cases; dots load by TMA, crosses do not; blue: pointwise, orange: reductions. "
        f"Faster with descriptors: {', '.join(paid) or 'none'}. "
        f"Without a time: {', '.join(missing) or 'none'}."
    )
