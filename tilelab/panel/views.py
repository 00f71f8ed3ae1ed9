"""The texts, tables and plots of the sweep panel, as functions from rows to HTML or SVG; and its style sheet."""

from __future__ import annotations

import collections
import html
import math
import pathlib
import re
from collections.abc import Iterable, Sequence

from matplotlib import colormaps
from matplotlib.colors import to_hex

from tilelab import plots
from tilelab.panel.rows import SHOWN_FIELDS, Choice, find_winner, get_value
from tilelab.sweep import Sweep
from tilelab.tunable import Roofline

SHADES = 24


def format_number(value: float | None, field: str = "ms") -> str:
    """Return three digits of a time, two decimals of a ratio, all digits of a count, and a dash for None."""
    if value is None:
        return "–"
    if field == "ratio":
        return f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 99.95 else f"{value:#.3g}"


def format_seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.0f} min"


def escape(text: str) -> str:
    """Return the text as HTML in which no line breaks within a date."""
    return re.sub(r"\d{4}-\d\d-\d\d", r"<span class='tiles-date'>\g<0></span>", html.escape(text))


def shade_class(value: float, values: Sequence[float], field: str) -> str:
    """Return the CSS class of a cell, from tiles-shade0 (dark, worst or least) to tiles-shade23.

    A ratio is shaded from 0 to the peer's speed or above, any other field logarithmically over its range.
    """
    if field == "ratio":
        low, high = 0, max(1, *values)
    else:
        value, low, high = (math.log(max(number, 1e-9)) for number in (value, min(values), max(values)))
    part = (value - low) / (high - low) if high > low else 1
    return f"tiles-shade{round((1 - part if SHOWN_FIELDS[field][1] and high > low else part) * (SHADES - 1))}"


# ---- sentences


def _speed(row: dict, peer: str) -> str:
    ratio = f", {format_number(get_value(row, 'ratio'), 'ratio')} × {peer}" if row.get("ratio") else ""
    return f"{format_number(get_value(row, 'ms'))} ms{ratio}"


def describe_end(finished: Sweep) -> str:
    """Return how a sweep ended."""
    elapsed = format_seconds(finished.elapsed_s)
    if finished.cancelled:
        return f"cancelled after {elapsed}: Run goes on from here"
    if all(row.get("resumed") or "recorded" not in row for row in finished.rows.values()):
        action = "measures" if finished.space.can_measure else "builds"
        return f"everything is kept from before; Start over {action} again"
    return f"done in {elapsed}"


def verdict(rows: Sequence[dict], peer: str) -> list[str]:
    """Return sentences about the fastest configuration, and about how well the model had predicted it."""
    def speed(row: dict) -> float:  # beside the peer, where there is one
        return get_value(row, "ratio") or 1 / get_value(row, "ms")

    best = find_winner(rows)
    if best is None:
        return []
    timed = [row for row in rows if row["status"] == "ok" and row.get("ms")]
    near = sum(1.01 * speed(row) >= speed(best) for row in timed) - 1
    sentences = [f"fastest{', recorded' * ('overlay' in best)}: {best['kernel']}, {_speed(best, peer)}"]
    if near:
        sentences.append(f"within 1 %: {near} more configuration{'s' * (near > 1)}")
    both = [row for row in timed if row.get("predicted_ms")]
    if len(both) >= 3 and best in both:
        predicted = [row["predicted_ms"] for row in both]
        correlation = plots.rank_correlation(predicted, [row["ms"] / (row.get("peer_ms") or 1) for row in both])
        if not math.isnan(correlation):
            place = 1 + sum(ms < best["predicted_ms"] for ms in predicted)
            sentences.append(f"the model: rank correlation {correlation:.2f}; predicted place {place}")
    return sentences


def status(choice: Choice | None, rows: Sequence[dict], done: int, note: str, problem: str) -> str:
    """Return what went wrong, how far the sweep is (with `note`, or what to do next), and the verdict."""
    lines = [f"<p class='tiles-problem'>{html.escape(problem)}</p>"] if problem else []
    if choice:
        counts = collections.Counter(row["status"] for row in rows)
        found = ", ".join(f"{counts[name]} {name}" for name in ("ok", "rejected", "wrong", "failed") if counts[name])
        press = f"press Run to {'time' if choice.space.can_measure else 'build'}"
        if not note and any(row.get("overlay") == "row" for row in rows):
            found, note = f"recorded: {found}", press
        elif not note:
            note = f"{press} {'the rest' if found else 'them'}" if counts["waiting"] else "swept before"
        progress = " · ".join(filter(None, (f"{done} of {len(rows)}", found, note)))
        lines.append(f"<p class='tiles-count'>{escape(progress)}</p>")
        lines += [f"<p>{html.escape(sentence)}</p>" for sentence in verdict(rows, choice.kernel.peer)]
    return f"<div role='status'>{''.join(lines)}</div>"


# ---- tables


def details(rows: Sequence[dict], peer: str, source: str) -> str:
    """Return everything about the rows of one cell, or an invitation to select one."""
    if not rows:
        return "<p>Select a cell for its figures.</p>"
    return "".join(_row_details(row, peer, source) for row in rows)


def _row_details(row: dict, peer: str, source: str) -> str:
    facts = []
    if row.get("ms"):
        measured = _speed(row, peer) + ", timed again" * bool(row.get("final_ms"))
        if row.get("error") is not None:
            measured += f"; largest error {row['error']:.1e}"
            measured += f" ({peer}'s {row['peer_error']:.1e})" if row.get("peer_error") is not None else ""
        facts.append(("measured", measured + f"; {source}" * ("overlay" in row)))
    if row.get("predicted_ms") and row["status"] in ("ok", "waiting"):
        facts.append(("predicted", f"{format_number(row['predicted_ms'])} ms"))
    if row.get("registers"):
        build = (f"{row['registers']} registers, {row.get('spills') or 0} B spilled, "
                 f"{row.get('smem') or 0:,} B shared memory")
        facts.append(("build", build + (f", {row['programs_per_sm']} per SM" if row.get("programs_per_sm") else "")))
    if row.get("counts"):
        facts.append(("code", ", ".join(f"{count} {name}" for name, count in row["counts"].items())))
    state = row["status"] + (f": {row['reason']}" if row.get("reason") else "")
    state = "" if facts and state == "ok" else f"<p>{html.escape(state)}</p>"
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<h3>{html.escape(row['kernel'])}</h3>{state}<dl>{items}</dl>"


def heading(text: str, source: str, legend: str = "") -> str:
    """Return a heading with a legend, and beneath it where the figures come from."""
    return f"<h3>{legend}{html.escape(text)}{f'<small>{escape(source)}</small>' if source else ''}</h3>"


def color_scale(values: Sequence[float], field: str) -> str:
    """Return the legend of the cells' colours."""
    low, high = (0, max(1, *values)) if field == "ratio" else (min(values), max(values))
    ends = [format_number(low, field), format_number(high, field)]
    if SHOWN_FIELDS[field][1]:
        ends.reverse()
    return f"<span class='tiles-scale'>{ends[0]} <i></i> {ends[1]}</span>"


# ---- the roofline


def _ticks(low: float, high: float) -> list[float]:
    """Return three to about six round numbers between the ends of a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        found = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if len(found) >= 3:
            break
    return found


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 480, 290, 58, 56, 30, 14  # of the plot and its margins; text is 17 high


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{html.escape(text)}</text>"


def roofline(configs: Iterable, rows: Sequence[dict], roof: Roofline) -> str:
    """Return an SVG of the timed rows under the roofs, both axes logarithmic; recorded rows are hollow."""
    intensities = [roof.intensity(config) for config in configs]
    points = [(intensity, row) for intensity, row in zip(intensities, rows)
              if row["status"] == "ok" and row.get(roof.speed_field)]
    speeds = [row[roof.speed_field] for _, row in points]
    left, right = min(intensities) / 1.35, max(intensities) * 1.35
    slopes = roof.bandwidth_roofs
    ceiling = max([*roof.flat_roofs.values()] or speeds or [slope * right for slope in slopes.values()] or [1])
    high = 2 * max([ceiling, *speeds])  # leaves room for labels above everything drawn
    low = min([0.6 * value for value in speeds] + [high / 14])

    def x(intensity):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(intensity / left) / math.log(right / left)

    def y(speed):
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(speed / low) / math.log(high / low)

    parts = [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, roof.intensity_label, "middle"),
             _text(0, TOP - 14, roof.unit)]
    for tick in _ticks(left, right):
        parts.append(f"<path class='tick' d='M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}'/>")
        parts.append(_text(x(tick), HEIGHT - BOTTOM + 22, f"{tick:,g}", "middle"))
    for tick in _ticks(low, high):
        parts.append(f"<path class='tick' d='M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}'/>")
        parts.append(_text(LEFT - 6, y(tick) + 6, f"{tick:,g}", "end"))
    for label, speed in roof.flat_roofs.items():
        parts.append(f"<path class='roof' d='M{LEFT} {y(speed):.1f}H{WIDTH - RIGHT}'/>")
        parts.append(_text(LEFT + 5, y(speed) - 12, f"{label}, {speed:,.0f}"))
    for index, (label, slope) in enumerate(slopes.items()):
        start, end = max(left, low / slope), min(right, ceiling / slope)
        if start < end:
            parts.append(f"<path class='roof' d='M{x(start):.1f} {y(slope * start):.1f}"
                         f"L{x(end):.1f} {y(slope * end):.1f}'/>")
            parts.append(_text(LEFT + 5, TOP + 15 + 19 * index, f"slope: {label}"))
    best = find_winner(row for _, row in points)
    for intensity, row in sorted(points, key=lambda point: point[1] is best):
        kind = ("hollow" if "overlay" in row else "full") + " best" * (row is best)
        parts.append(f"<circle class='{kind}' cx='{x(intensity):.1f}' cy='{y(row[roof.speed_field]):.1f}' "
                     f"r='{8 if row is best else 5}'><title>{html.escape(row['kernel'])}</title></circle>")
    if not points:
        parts.append(_text((LEFT + WIDTH) / 2, HEIGHT / 2, "nothing is timed", "middle"))
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='roofline'>{''.join(parts)}</svg>"


# ---- the style sheet


def _color_rules() -> str:
    """Return the rules for the colours that come from matplotlib: those of the plots, and the shades of the cells."""
    rules = [f".tiles-panel {{ --accent: {plots.COLOURS['best']}; --star: {plots.COLOURS['conservative']}; }}"]
    shades = [colormaps["cividis"](level / (SHADES - 1))[:3] for level in range(SHADES)]
    for level, (red, green, blue) in enumerate(shades):
        text = "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#000"
        rules.append(f".tiles-panel .tiles-shade{level}{{background:{to_hex((red, green, blue))};color:{text}}}")
    stops = ",".join(map(to_hex, shades[::4] + shades[-1:]))
    rules.append(f".tiles-panel .tiles-scale i{{background:linear-gradient(90deg,{stops})}}")
    return "\n".join(rules)


CSS = f"<style>\n{pathlib.Path(__file__).with_name('style.css').read_text()}{_color_rules()}\n</style>"
