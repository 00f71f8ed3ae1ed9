"""Draw what stays in a saved notebook without its widgets: the heat map as PNG, and the top ten as a table."""

from __future__ import annotations

import collections

from IPython.display import HTML

from tilelab.pictures import plots, scales
from tilelab.records import results
from tilelab.runtime import device
from tilelab.views.panel import rows as panel_rows
from tilelab.views.panel.rows import SHOWN_FIELDS, TOP, Choice, get_value
from tilelab.views.panel.sentences import describe_winner

FORMATS = {"ratio": "{:.2f}", "ms": "{:#.3g}", "predicted_ms": "{:#.3g}"}
HEADINGS = {  # of the table's columns; {} is the peer
    "kernel": "configuration",
    "ratio": "× {}",
    "ms": "time, ms",
    "gbps": "GB/s",
    "predicted_ms": "predicted time, ms",
    "registers": "registers per thread",
    "smem": "shared memory, KiB",
}
LETTERS = {  # what a cell of the picture holds; its source line explains them
    "too many registers": "R",
    "over shared memory": "S",
    "over tensor memory": "T",
    "cannot run": "–",
    "failed": "F",
    "wrong": "W",
    "not built": "·",
}


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
    label = SHOWN_FIELDS[field][0].format(choice.space.peer)
    finding = [*describe_winner(rows, choice.space.peer), label][0]
    reasons = {panel_rows.short_status(row) for row in drawn if row["status"] != "ok"}
    marks = "".join(f"; {letter}: {words}" for words, letter in LETTERS.items() if words in reasons)
    style = FORMATS.get(field, "{:.3g}")
    words = {
        "title": f"{choice.name}: {finding}",
        "source": f"{label}; {_describe_origin(choice, rows)}{marks}",
    }
    if field == "ratio" and values:
        words |= {"centre": 1, "key": scales.label_around_one(values)}
    functions = {
        "mark": lambda row: LETTERS.get(panel_rows.short_status(row), "–"),
        "shade": lambda value: panel_rows.shade(value, values, field),
    }
    figure = plots.heat_map(drawn, "x", "y", field, fmt=style, x_label=x, y_label=y, **words, **functions)
    axes = figure.axes[0]
    axes.set_xticks(range(len(columns)), map(plots.escape_math, columns))
    axes.set_yticks(range(len(lines)), map(plots.escape_math, lines))
    if len(columns) > 7 or sum(map(len, columns)) > 60:  # horizontal labels would touch
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
    """Return where the figures come from: the record, this machine or both."""
    origins = [choice.source] if any("from_record" in row for row in rows) else []
    here = (
        f"on {device.current().name}" if choice.space.can_measure else f"for {choice.space.target}, not timed"
    )
    if any("here" in row for row in rows if "from_record" not in row):
        origins.append(f"{'measured' if choice.space.can_measure else 'built'} here {here}")
    return "; ".join(origins) or "nothing is built yet"


def make_table(choice: Choice, rows: list[dict]) -> results.Table:
    """Return the top ten with their known columns, or the reasons why nothing runs."""
    top = panel_rows.top_rows(rows)
    said = collections.Counter(
        ("timed" if row.get("ms") else "built") if row["status"] == "ok" else panel_rows.short_status(row)
        for row in rows
    )
    counts = ", ".join(f"{n} {words}" for words, n in said.items())
    if not top:
        refused = [row for row in rows if row.get("reason")][:TOP]
        return results.table(
            [{"configuration": row["kernel"], "reason": row["reason"]} for row in refused],
            f"{choice.name}: {counts}",
            ["configuration", "reason"],
        )
    order = "the fastest" if any(row.get("ms") for row in top) else "predicted fastest first"
    if any(row.get("ratio") for row in top):
        order = f"the fastest, ranked by the ratio of timings paired with {choice.space.peer}'s"
    order += ", those timed again before the rest" if any("final_ms" in row for row in top) else ""
    columns = [name for name in HEADINGS if any(get_cell(row, name) is not None for row in top)]
    headings = {name: HEADINGS[name].format(choice.space.peer) for name in columns}
    shown = [{headings[name]: get_cell(row, name) for name in columns} for row in top]
    caption = f"{choice.name}: {order}, {_describe_origin(choice, rows)} ({counts})"
    return results.table(shown, caption, list(headings.values()))


def get_cell(row: dict, name: str) -> float | str | None:
    """Return what a cell of the table shows."""
    return row["kernel"] if name == "kernel" else get_value(row, name)
