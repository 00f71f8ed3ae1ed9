"""Pictures of `03_ch10_tile_pipeline` that depend on data: sweeps. Those that do not lie in notebooks/pictures."""

from __future__ import annotations

from tilelab.pictures import plots
from tilelab.records import results

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))


def draw_curve(
    record: results.Record, key: str, label: str, title: str, logarithmic: bool = False
) -> plots.Picture:
    """Draw the speed of the versions of a sweep against the value of `key`, and the peer as a line."""
    rows = sorted(record.rows, key=lambda row: row[key])
    figure, axes = plots.new_figure(rows, title, record.label(), 2.5)
    axes.plot([row[key] for row in rows], [row["gbps"] for row in rows], "o-", color=BLUE, markersize=5)
    peer = rows[0]["gbps"] / rows[0]["ratio"]
    axes.axhline(peer, color=plots.colour("torch"), linewidth=1, linestyle="--", label=rows[0]["peer"])
    if logarithmic:
        axes.set_xscale("log", base=2)
    axes.set_xticks([row[key] for row in rows], [f"{row[key]:,}" for row in rows])
    axes.set_xlabel(label, fontsize=8)
    axes.set_ylabel("GB/s", fontsize=8)
    axes.set_ylim(0, 1.12 * max(peer, *(row["gbps"] for row in rows)))
    axes.legend(fontsize=7, frameon=False, loc="best")
    speeds = ", ".join(f"{row['gbps']:.0f} at {row[key]:,}" for row in rows)
    return figure.describe(f"{title}. GB/s over {label}: {speeds}; {rows[0]['peer']} {peer:.0f}.")
