"""Pictures of bulk copies: speed against bytes in flight, and the order of the tiles."""

from tilelab.pictures import plots

BLUE, ORANGE, GREEN = map(plots.colour, ("best", "proposed", "predicted"))


def _kib_loading(row: dict) -> int:
    """Return the KiB that a ring has under way: one stage is being stored, so the others load."""
    return row["kib"] * max(1, row["stages"] - 1)


def draw_in_flight(record, versions=()) -> plots.Picture:
    """Draw the speed of rings against the KiB that each SM has under way, and what Little's law predicts.

    `versions` are rows of the ladder, of which `two_buffers` is drawn: two loads of 8 KiB are under way at most.
    """
    if any("gbps" not in row for row in record.rows):
        return plots.new_figure([record], "These rings are not timed", record.label())[0]
    title = "Speed depends on the bytes under way more than on how they are cut"
    figure, axes = plots.new_figure(record.rows, title, record.label())
    for kib, tone in zip((4, 8, 16), (ORANGE, BLUE, GREEN)):
        rows = [row for row in record.rows if row["kib"] == kib]
        points = [_kib_loading(row) for row in rows], [row["gbps"] for row in rows]
        axes.plot(*points, "o", color=tone, ms=5, label=f"buffers of {kib} KiB")
    first = min(record.rows, key=_kib_loading)
    torch_gbps = first["gbps"] / first["ratio"]
    timed = [row["ratio"] for row in versions if row["version"] == "two_buffers" and row.get("ratio")]
    for ratio in timed[-1:]:
        look = {"color": "none", "mec": BLUE, "mew": 1.3, "ms": 6, "label": "two_buffers, at most 16 KiB"}
        axes.plot(16, ratio * torch_gbps, "D", **look)
    alone = f" A diamond for two_buffers: {timed[-1] * torch_gbps:.0f} at 16." if timed else ""
    reach = torch_gbps / first["gbps"] * _kib_loading(first)
    law = "Little's law with the latency of the smallest buffer"
    axes.plot([0, reach], [0, torch_gbps], ":", color=plots.GREY, linewidth=1.2, label=law)
    axes.axhline(torch_gbps, color=plots.colour("torch"), linewidth=1, linestyle="--", label=first["peer"])
    axes.set_xlabel("KiB under way per SM: (stages − 1) × buffer, or one buffer", fontsize=8)
    axes.set_ylabel("GB/s", fontsize=8)
    axes.set(xlim=(0, None), ylim=(0, 1.12 * torch_gbps))
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    said = ", ".join(
        f"{row['gbps']:.0f} at {_kib_loading(row)}" for row in sorted(record.rows, key=_kib_loading)
    )
    return figure.describe(
        f"{title}. A dot for each ring with buffers of 4, 8 or 16 KiB; a dotted line for Little's law, a dashed one "
        f"for {first['peer']} at {torch_gbps:.0f}. GB/s over the KiB under way per SM: {said}.{alone}"
    )


def draw_fronts(record) -> plots.Picture:
    """Draw each order of the tiles, and the narrowest loads, against torch's copy.

    The title states what the two persistent rings lose. A tile is a chunk in the record, and a block is a CTA.
    """
    rows = [
        row | {"name": row["name"].replace("chunk", "tile").replace("CTA", "block")}
        for row in record.rows
        if "loads" not in row["name"] or "16 B" in row["name"]
    ]
    strided, in_order = (
        f"{row['name'].removeprefix('persistent, ').removeprefix('the ')}: "
        f"{100 * abs(1 - row['ratio']):.0f} % {'slower' if row['ratio'] < 1 else 'faster'}"
        for row in rows[:2]
    )
    title = f"{strided[0].upper()}{strided[1:]} than torch; {in_order}"
    return plots.ratios(rows, label="name", peer=rows[0]["peer"], source=record.label(), title=title)


def describe_littles_law(record) -> str:
    """Return in one line how many bytes per SM the smallest buffer's latency asks for at the peer's bandwidth."""
    first = min(record.rows, key=_kib_loading)
    if "gbps" not in first:
        return record.label()
    sms, peer_gbps = record.device["sms"], first["gbps"] / first["ratio"]
    latency_us = first["kib"] * 1024 * sms / (first["gbps"] / 2) / 1e3
    moved = peer_gbps * latency_us / sms
    return (
        f"{peer_gbps:,.0f} GB/s × {latency_us:.2f} µs / {sms} SMs = {moved:.0f} KB per SM, of which loads are half, "
        f"{moved / 2:.0f} KB; {record.label()}"
    )
