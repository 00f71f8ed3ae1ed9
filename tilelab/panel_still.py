"""What the sweep panel leaves in the notebook when its widgets are gone: the heat map as PNG, the top ten as text."""

from __future__ import annotations

import collections
import dataclasses
import functools
import io

from IPython.display import HTML, Image

from tilelab import device, panel_html, plots, results
from tilelab.panel_rows import RATES, SHOWS, TIMED, TOP, Choice, best, figure, natural, word

FORMATS = {"ratio": "{:.2f}", "ms": "{:#.3g}", "predicted_ms": "{:#.3g}"}
COLUMNS = ("kernel", "ms", "ratio", "tflops", "gbps", "predicted_ms", "registers", "smem", "programs_per_sm")


@functools.total_ordering
@dataclasses.dataclass(frozen=True)
class _Tick:
    """A label on an axis, sorted by its numbers."""

    text: str

    def __lt__(self, other):
        return natural(self.text) < natural(other.text)

    def __str__(self):
        return self.text


def outputs(choice: Choice, rows: list[dict], *axes: str) -> tuple:
    """The picture and the table; nothing to see where nothing is known."""
    if not any(row["status"] != "waiting" for row in rows):
        return HTML(""), HTML("")
    return Image(data=picture(choice, rows, *axes)), table(choice, rows)


def picture(choice: Choice, rows: list[dict], x: str, y: str, show: str) -> bytes:
    """The heat map of the best row of each cell, as PNG."""
    show = choice.shown(rows, show)
    cells = choice.cells(rows, x, y)
    drawn = [{**inside[0], "x": _Tick(across), "y": _Tick(up), show: figure(inside[0], show)}
             for (across, up), inside in cells.items()]
    shows = SHOWS[show][0].format(choice.subject.peer)
    said = [*panel_html.verdict(rows, choice.subject.peer), shows][0]
    drawing = plots.heat_map(drawn, "x", "y", show, mark=word, fmt=FORMATS.get(show, "{:.3g}"),
                             title=f"{choice.name}: {said}", source=f"{shows}; {_provenance(choice, rows)}",
                             x_label=x, y_label=y)
    labels = {across for across, _ in cells}
    if len(labels) > 9 or sum(map(len, labels)) > 80:  # side by side they would touch
        drawing.axes[0].tick_params(axis="x", rotation=60)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png")
    return buffer.getvalue()


def _provenance(choice: Choice, rows: list[dict]) -> str:
    laid = {row.get("laid") for row in rows}
    built = f"built for {choice.space.target}"
    if laid == {None}:
        return device.current().name if choice.space.can_measure else f"{built}, not timed"
    return f"{built}; times {choice.source}" if "times" in laid else choice.source


def table(choice: Choice, rows: list[dict]) -> results.Table:
    """The top ten as text, or why there is none."""
    top = best(rows)
    counts = ", ".join(f"{n} {status}" for status, n in collections.Counter(row["status"] for row in rows).items())
    if not top:
        return results.table([row for row in rows if row["reason"]][:TOP], f"{choice.name}: {counts}",
                             ["kernel", "status", "reason"])
    order = "the fastest" if any(row.get("ms") for row in top) else "predicted fastest first"
    order += ", those timed again before the rest" if any("final_ms" in row for row in top) else ""
    columns = [name for name in COLUMNS if any(row.get(name) is not None for row in top)]
    told = [{name: figure(row, name) if name in TIMED + RATES else row.get(name) for name in columns} for row in top]
    return results.table(told, f"{choice.name}: {order}, {_provenance(choice, rows)} ({counts})", columns)
