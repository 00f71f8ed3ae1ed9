"""Draw what stays in a saved notebook without its widgets: the heat map as PNG, and the top ten as a table."""

from __future__ import annotations

import collections
import functools
import io

from IPython.display import HTML, Image

from tilelab import device, plots, results
from tilelab.panel.rows import (
    RATES,
    SHOWN_FIELDS,
    TIMES,
    TOP,
    Choice,
    get_value,
    natural_key,
    shade,
    short_status,
    top_rows,
)
from tilelab.panel.sentences import describe_winner

FORMATS = {"ratio": "{:.2f}", "ms": "{:#.3g}", "predicted_ms": "{:#.3g}"}
COLUMNS = ("kernel", "ms", "ratio", "tflops", "gbps", "predicted_ms", "registers", "smem", "programs_per_sm")
NARROW_COLUMNS = 10  # from here on a cell is too narrow for a word such as "failed"


class _Tick(str):
    """A label on an axis, which sorts by its numbers."""

    def __lt__(self, other):
        return natural_key(self) < natural_key(other)


def make_outputs(choice: Choice, rows: list[dict], x: str, y: str, field: str) -> tuple:
    """Return the picture and the table, or two empty outputs where nothing is known."""
    if not any(row["status"] != "waiting" for row in rows):
        return HTML(""), HTML("")
    label = SHOWN_FIELDS[choice.choose_field(rows, field)][0].format(choice.kernel.peer)
    told = f"A heat map: the {label} of the best configuration for each {x} and {y}. The table below lists ten."
    return Image(data=draw_heat_map(choice, rows, x, y, field), alt=told), make_table(choice, rows)


def draw_heat_map(choice: Choice, rows: list[dict], x: str, y: str, field: str) -> bytes:
    """Return a PNG of the best row of each cell, in the colours of the view in the browser."""
    field = choice.choose_field(rows, field)
    values = [value for row in rows if (value := get_value(row, field)) is not None]
    cells = choice.group_cells(rows, x, y)
    drawn = [{**inside[0], "x": _Tick(x_label), "y": _Tick(y_label), field: get_value(inside[0], field)}
             for (x_label, y_label), inside in cells.items()]
    x_labels = {x_label for x_label, _ in cells}
    narrow = len(x_labels) >= NARROW_COLUMNS
    label = SHOWN_FIELDS[field][0].format(choice.kernel.peer)
    finding = [*describe_winner(rows, choice.kernel.peer), label][0]
    marks = "; first letters stand for regs, smem, tmem, failed and wrong" if narrow else ""
    figure = plots.heat_map(drawn, "x", "y", field, mark=lambda row: short_status(row)[:1 if narrow else None],
                            fmt=FORMATS.get(field, "{:.3g}"), title=f"{choice.name}: {finding}",
                            source=f"{label}; {_describe_origin(choice, rows)}{marks}", x_label=x, y_label=y,
                            shade=functools.partial(shade, values=values, field=field))
    if len(x_labels) > 9 or sum(map(len, x_labels)) > 80:  # horizontal labels would touch
        figure.axes[0].tick_params(axis="x", rotation=60)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _describe_origin(choice: Choice, rows: list[dict]) -> str:
    overlays = {row.get("overlay") for row in rows}
    built = f"built for {choice.space.target}"
    if overlays == {None}:
        return device.current().name if choice.space.can_measure else f"{built}, not timed"
    return f"{built}; times {choice.source}" if "times" in overlays else choice.source


def make_table(choice: Choice, rows: list[dict]) -> results.Table:
    """Return the top ten with their known columns, or the reasons why nothing runs."""
    top = top_rows(rows)
    counts = ", ".join(f"{n} {status}" for status, n in collections.Counter(row["status"] for row in rows).items())
    if not top:
        return results.table([row for row in rows if row.get("reason")][:TOP], f"{choice.name}: {counts}",
                             ["kernel", "status", "reason"])
    order = "the fastest" if any(row.get("ms") for row in top) else "predicted fastest first"
    if any(row.get("ratio") for row in top):
        order = f"the fastest, ranked by the ratio of timings paired with {choice.kernel.peer}'s"
    order += ", those timed again before the rest" if any("final_ms" in row for row in top) else ""
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in top)]
    shown = [{name: get_value(row, name) if name in TIMES + RATES else row.get(name) for name in columns}
             for row in top]
    return results.table(shown, f"{choice.name}: {order}, {_describe_origin(choice, rows)} ({counts})", columns)
