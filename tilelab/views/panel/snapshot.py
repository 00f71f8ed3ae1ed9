"""Draw what stays in a saved notebook without its widgets: the heat map as PNG, and the top ten as a table."""

from __future__ import annotations

import collections

from IPython.display import HTML

from tilelab.pictures import plots
from tilelab.records import results
from tilelab.runtime import device
from tilelab.views.panel import rows as panel_rows
from tilelab.views.panel.rows import SHOWN_FIELDS, TOP, Choice, get_value
from tilelab.views.panel.sentences import describe_winner

FORMATS = {"ratio": "{:.2f}", "ms": "{:#.3g}", "predicted_ms": "{:#.3g}"}
# The columns of the table and their headings.
COLUMNS = {
    "kernel": "configuration",
    "ratio": "× {peer}",
    "ms": "ms",
    "gbps": "GB/s",
    "predicted_ms": "predicted, ms",
    "registers": "registers",
    "smem": "shared memory, KiB",
}
# What a grey cell of the heat map says.
MARKS = {
    "regs": "too many registers",
    "smem": "too much shared memory",
    "tmem": "too much tensor memory",
    "failed": "it failed",
    "wrong": "its result is wrong",
}
NARROW_COLUMNS = 10  # from here on a cell is too narrow for a word such as "failed"


def make_outputs(choice: Choice, rows: list[dict], x: str, y: str, field: str) -> tuple:
    """Return the picture and the table, or two empty outputs where nothing is known."""
    if not any(row["status"] != "waiting" for row in rows):
        return HTML(""), HTML("")
    return draw_heat_map(choice, rows, x, y, field), make_table(choice, rows)


def draw_heat_map(choice: Choice, rows: list[dict], x: str, y: str, field: str) -> plots.Picture:
    """Draw the best row of each cell, in the colours of the view in the browser."""
    field = choice.choose_field(rows, field)
    values = [value for row in rows if (value := get_value(row, field)) is not None]
    drawn = [
        {**inside[0], "x": i, "y": j, field: get_value(inside[0], field)}
        for (i, j), inside in group_cells(choice.axes, rows, x, y).items()
    ]
    columns, lines = choice.axes[x]["labels"], choice.axes[y]["labels"]
    narrow = len(columns) >= NARROW_COLUMNS
    refused = {panel_rows.short_status(row) for row in drawn if row["status"] != "ok"}
    label = SHOWN_FIELDS[field][0].format(choice.space.peer)
    finding = [*describe_winner(rows, choice.space.peer), label][0]
    meanings = [
        f"{word[0] if narrow else word} = {meaning}" for word, meaning in MARKS.items() if word in refused
    ]
    marks = f"; grey: {', '.join(meanings)}" if meanings else ""
    style = FORMATS.get(field, "{:.3g}")
    words = {
        "title": f"{choice.name}: {finding}",
        "source": f"{label}; {_describe_origin(choice, rows)}{marks}",
    }
    functions = {
        "mark": lambda row: panel_rows.short_status(row)[: 1 if narrow else None],
        "shade": lambda value: panel_rows.shade(value, values, field),
    }
    figure = plots.heat_map(drawn, "x", "y", field, fmt=style, x_label=x, y_label=y, **words, **functions)
    axes = figure.axes[0]
    axes.set_xticks(range(len(columns)), map(plots.escape_math, columns))
    axes.set_yticks(range(len(lines)), map(plots.escape_math, lines))
    if len(columns) > 9 or sum(map(len, columns)) > 80:  # horizontal labels would touch
        axes.tick_params(axis="x", rotation=60)
    shown = [row[field] for row in drawn if row[field] is not None]
    spread = f", from {style.format(min(shown))} to {style.format(max(shown))}" if shown else ""
    return figure.describe(
        f"{choice.name}: {finding}. A heat map of the {label} of the best configuration for each "
        f"{x} and {y}{spread}. The table below lists ten."
    )


def group_cells(axes: dict, rows: list[dict], x: str, y: str) -> dict[tuple[int, int], list[dict]]:
    """Return {(column, line): rows of the cell, best first} over two of the axes that a Choice describes."""
    cells = collections.defaultdict(list)
    for row, place in zip(rows, zip(axes[x]["of"], axes[y]["of"])):
        cells[place].append(row)
    return {place: panel_rows.rank_rows(inside) for place, inside in cells.items()}


def _describe_origin(choice: Choice, rows: list[dict]) -> str:
    overlays = {row.get("overlay") for row in rows}
    built = f"built for {choice.space.target}"
    if overlays == {None}:
        return device.current().name if choice.space.can_measure else f"{built}, not timed"
    return f"{built}; times {choice.source}" if "times" in overlays else choice.source


def make_table(choice: Choice, rows: list[dict]) -> results.Table:
    """Return the top ten with their known columns, or the reasons why nothing runs."""
    top = panel_rows.top_rows(rows)
    counts = ", ".join(
        f"{n} {status}" for status, n in collections.Counter(row["status"] for row in rows).items()
    )
    if not top:
        return results.table(
            [row for row in rows if row.get("reason")][:TOP],
            f"{choice.name}: {counts}",
            ["kernel", "status", "reason"],
        )
    order = "the fastest" if any(row.get("ms") for row in top) else "predicted fastest first"
    if any(row.get("ratio") for row in top):
        order = f"the fastest, ranked by the ratio of timings paired with {choice.space.peer}'s"
    order += ", those timed again before the rest" if any("final_ms" in row for row in top) else ""
    headings = {
        name: heading.format(peer=choice.space.peer)
        for name, heading in COLUMNS.items()
        if any(row.get(name) is not None for row in top)
    }
    shown = [
        {
            heading: row[name] if name == "kernel" else get_value(row, name)
            for name, heading in headings.items()
        }
        for row in top
    ]
    return results.table(shown, f"{choice.name}: {order}, {_describe_origin(choice, rows)} ({counts})")
