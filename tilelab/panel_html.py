"""What the sweep panel says and draws, as functions of rows (those of panel_rows) that return text; and its CSS."""

from __future__ import annotations

import collections
import html
import math
import re
from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.colors import to_hex

from tilelab import plots
from tilelab.panel_rows import SHOWS, Choice, figure, winner
from tilelab.tunable import Roofline
from tilelab.sweep import Sweep

SHADES = 24


def number(value: float | None, show: str = "ms") -> str:
    """Three digits of a figure, all of a count; a dash for none."""
    if value is None:
        return "–"
    if show == "ratio":
        return f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 99.95 else f"{value:#.3g}"


def escaped(text: str) -> str:
    """As HTML, where no line breaks within a date."""
    return re.sub(r"\d{4}-\d\d-\d\d", r"<span class='tiles-date'>\g<0></span>", html.escape(text))


def colour(value: float, values: Sequence[float], show: str) -> str:
    """The class of a cell: bright is better (q), or dark is more (n)."""
    return f"tiles-{'n' if SHOWS[show][1] is None else 'q'}{shade(value, values, show)}"


def shade(value: float, values: Sequence[float], show: str) -> int:
    """0 to SHADES - 1 (better, or more): speed from nothing to the peer's or more, others over their range."""
    if show == "ratio":
        low, high = 0, max(1, *values)
    else:
        value, low, high = (math.log(max(figure, 1e-9)) for figure in (value, min(values), max(values)))
    part = (value - low) / (high - low) if high > low else 1
    return round((1 - part if SHOWS[show][1] and high > low else part) * (SHADES - 1))


# ---- sentences


def summary(row: dict, peer: str) -> str:
    """A row in one line."""
    name = row.get("kernel", "")
    if row["status"] not in ("ok", "waiting"):
        return f"{name}: {row['status']}: {row['reason']}"
    parts = []
    if row.get("ms"):
        parts += [f"{number(figure(row, 'ms'))} ms"]
        parts += [f"{number(figure(row, 'ratio'), 'ratio')} × {peer}"] if row.get("ratio") else []
        parts[-1] += " (recorded)" * bool(row.get("laid"))
    if row.get("predicted_ms"):
        parts.append(f"predicted {number(row['predicted_ms'])} ms")
    if row.get("registers"):
        parts.append(f"{row['registers']} registers, {row.get('smem') or 0:,} B of shared memory")
    return f"{name}: {', '.join(parts) or row['status']}"


def seconds(value: float) -> str:
    """A duration for people."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 100 else f"{value / 60:.0f} min"


def ended(walk: Sweep) -> str:
    """What became of a sweep."""
    took, does = seconds(walk.elapsed_s), "measures" if walk.space.can_measure else "builds"
    if walk.cancelled:
        return f"cancelled after {took}: Run goes on from here"
    if all(row.get("resumed") or "recorded" not in row for row in walk.rows.values()):
        return f"everything is kept from before; Start over {does} again"
    return f"done in {took}"


def verdict(rows: Sequence[dict], peer: str) -> list[str]:
    """Sentences on the fastest, and on how well the model had predicted it."""
    best = winner(rows)
    if best is None:
        return []
    timed = [row for row in rows if row["status"] == "ok" and row.get("ms")]
    ratio = f", {number(figure(best, 'ratio'), 'ratio')} × {peer}" if best.get("ratio") else ""
    laid = ", recorded" if best.get("laid") else ""
    near = sum(_time(row) <= 1.01 * _time(best) for row in timed) - 1
    said = [f"fastest{laid}: {best['kernel']}, {number(figure(best, 'ms'))} ms{ratio}"]
    if near:
        said.append(f"within 1 %: {near} more configuration{'s' * (near > 1)}")
    both = [row for row in timed if row.get("predicted_ms")]
    if len(both) >= 3 and best in both:
        predicted = [row["predicted_ms"] for row in both]
        agree = plots.rank_correlation(predicted, [row["ms"] / (row.get("peer_ms") or 1) for row in both])
        if not math.isnan(agree):
            place = 1 + sum(ms < best["predicted_ms"] for ms in predicted)
            shared = predicted.count(best["predicted_ms"])
            said.append(f"the model: rank correlation {agree:.2f}; predicted place {place}"
                        + f", shared by {shared}" * (shared > 1))
    return said


def _time(row: dict) -> float:
    """The peer's is 1, where there is one."""
    ratio = figure(row, "ratio")
    return 1 / ratio if ratio else figure(row, "ms")


def status(choice: Choice | None, rows: Sequence[dict], done: int, note: str, problem: str) -> str:
    """What went wrong, how far it is (with `note`, or what to do next), and the verdict."""
    said = [f"<p class='tiles-problem'>{html.escape(problem)}</p>"] if problem else []
    if choice:
        counts = collections.Counter(row["status"] for row in rows)
        found = ", ".join(f"{counts[name]} {name}" for name in ("ok", "rejected", "wrong", "failed") if counts[name])
        press = f"press Run to {'time' if choice.space.can_measure else 'build'}"
        if not note and any(row.get("laid") == "row" for row in rows):
            found, note = f"recorded: {found}", press
        elif not note:
            note = f"{press} {'the rest' if found else 'them'}" if counts["waiting"] else "swept before"
        line = " · ".join(filter(None, (f"{done} of {len(rows)}", found, note)))
        said.append(f"<p class='tiles-count'>{escaped(line)}</p>")
        said += [f"<p>{html.escape(text)}</p>" for text in verdict(rows, choice.subject.peer)]
    return f"<div role='status'>{''.join(said)}</div>"


# ---- HTML


def detail(rows: Sequence[dict], peer: str, source: str) -> str:
    """Everything about the rows of one cell; an invitation where there are none."""
    if not rows:
        return "<p>Select a cell for its figures.</p>"
    return "".join(_detail_of(row, peer, source) for row in rows)


def _detail_of(row: dict, peer: str, source: str) -> str:
    facts = []
    if row.get("ms"):
        error = f"; largest error {row['error']:.1e}" if row.get("error") is not None else ""
        own = f" ({peer}'s {row['peer_error']:.1e})" if error and row.get("peer_error") is not None else ""
        ratio = f", {number(figure(row, 'ratio'), 'ratio')} × {peer}" if row.get("ratio") else ""
        again = ", timed again" if row.get("final_ms") else ""
        facts.append(("measured", f"{number(row.get('final_ms') or row['ms'])} ms{ratio}{again}{error}{own}"
                                  + (f"; {source}" if row.get("laid") else "")))
    if row.get("predicted_ms") and row["status"] in ("ok", "waiting"):
        facts.append(("predicted", f"{number(row['predicted_ms'])} ms"))
    if row.get("registers"):
        built = [f"{row['registers']} registers", f"{row.get('spills') or 0} B spilled",
                 f"{row.get('smem') or 0:,} B shared memory"]
        built += [f"{row['threads']} threads"] if row.get("threads") else []
        built += [f"{row['programs_per_sm']} per SM"] if row.get("programs_per_sm") is not None else []
        facts.append(("build", ", ".join(built)))
    if row.get("counts"):
        facts.append(("code", ", ".join(f"{count} {name}" for name, count in row["counts"].items())))
    state = row["status"] + (f": {row['reason']}" if row.get("reason") else "")
    state = "" if facts and state == "ok" else f"<p>{html.escape(state)}</p>"
    lines = "".join(f"<dt>{name}</dt><dd>{escaped(text)}</dd>" for name, text in facts)
    return f"<h3>{html.escape(row['kernel'])}</h3>{state}<dl>{lines}</dl>"


def heading(text: str, source: str = "", legend: str = "") -> str:
    """A heading, with where the figures are from in a line of its own."""
    return f"<h3>{legend}{html.escape(text)}{f'<small>{escaped(source)}</small>' if source else ''}</h3>"


def top(rows: Sequence[dict], peer: str, title: str) -> str:
    """The best of the rows as a table; those not timed in the order that is predicted."""
    if not rows:
        return ""
    timed = any(row.get("ms") for row in rows)
    short = len({row.get("config") for row in rows}) == len(rows)  # else only the full name tells them apart
    heads = {"ms": "ms", "ratio": f"× {peer}", "predicted_ms": "predicted ms"} if timed else {
        "predicted_ms": "predicted ms", "registers": "registers", "programs_per_sm": "per SM"}
    keys = [key for key in heads if any(row.get(key) for row in rows)]
    again = sum("final_ms" in row for row in rows)  # these stand first
    body = "".join(f"<tr{' class=tiles-rule' if place == again else ''}><td>" + "<td>".join(
        [html.escape(str(row["config"] if short else row["kernel"])), *(number(figure(row, key), key) for key in keys)])
        for place, row in enumerate(rows, 1))
    named = "<th>".join(html.escape(heads[key]) for key in keys)
    told = "above the line: timed again" if again else ""
    return f"{heading(title, told)}<table><tr><th>configuration<th>{named}</tr>{body}</table>"


def scale(values: Sequence[float], show: str) -> str:
    """The colours' legend."""
    low, high = (0, max(1, *values)) if show == "ratio" else (min(values), max(values))
    ends = [number(high, show), number(low, show)] if SHOWS[show][1] else [number(low, show), number(high, show)]
    neutral = " tiles-neutral" if SHOWS[show][1] is None else ""
    return f"<span class='tiles-scale{neutral}'>{ends[0]} <i></i> {ends[1]}</span>"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between the ends of a logarithmic axis, at most about six."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        found = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if len(found) >= 3:
            break
    return found


WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 480, 290, 58, 56, 30, 14  # of the roofline, whose text is 17 high


def roofline(points: Sequence[tuple[float, dict]], reaches: Sequence[float], roof: Roofline) -> str:
    """An SVG: (reach, row) of timed rows under the roofs, both axes logarithmic; recorded ones are hollow."""
    speeds = [row[roof.speed] for _, row in points]
    left, right = min(reaches) / 1.35, max(reaches) * 1.35
    ceiling = max([*roof.flat.values()] or speeds or [slope * right for slope in roof.slopes.values()] or [1])
    high = 2 * max([ceiling, *speeds])  # leaves room for the labels, above everything drawn
    low = min([0.6 * value for value in speeds] + [high / 14])

    def x(reach):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(reach / left) / math.log(right / left)

    def y(speed):
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * math.log(speed / low) / math.log(high / low)

    parts = []
    for tick in _ticks(left, right):
        parts.append(f"<path class='tick' d='M{x(tick):.1f} {TOP}V{HEIGHT - BOTTOM}'/>"
                     f"<text x='{x(tick):.1f}' y='{HEIGHT - BOTTOM + 22}' text-anchor='middle'>{tick:,g}</text>")
    for tick in _ticks(low, high):
        parts.append(f"<path class='tick' d='M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}'/>"
                     f"<text x='{LEFT - 6}' y='{y(tick) + 6:.1f}' text-anchor='end'>{tick:,g}</text>")
    for label, speed in roof.flat.items():
        parts.append(f"<path class='roof' d='M{LEFT} {y(speed):.1f}H{WIDTH - RIGHT}'/>"
                     f"<text x='{LEFT + 5}' y='{y(speed) - 12:.1f}'>"
                     f"{html.escape(label)}, {speed:,.0f}</text>")
    for place, (label, slope) in enumerate(roof.slopes.items()):
        start, end = max(left, low / slope), min(right, ceiling / slope)
        if start < end:
            parts.append(f"<path class='roof' d='M{x(start):.1f} {y(slope * start):.1f}"
                         f"L{x(end):.1f} {y(slope * end):.1f}'/>"
                         f"<text x='{LEFT + 5}' y='{TOP + 15 + 19 * place}'>slope: {html.escape(label)}</text>")
    best = winner(row for _, row in points)
    for reach, row in sorted(points, key=lambda point: point[1] is best):
        kind = ("hollow" if row.get("laid") else "full") + " best" * (row is best)
        parts.append(f"<circle class='{kind}' cx='{x(reach):.1f}' cy='{y(row[roof.speed]):.1f}' "
                     f"r='{8 if row is best else 5}'><title>{html.escape(row['kernel'])}</title></circle>")
    if not points:
        parts.append(f"<text x='{(LEFT + WIDTH) / 2}' y='{HEIGHT / 2}' text-anchor='middle'>nothing is timed</text>")
    parts.append(f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 8}' text-anchor='middle'>"
                 f"{html.escape(roof.reach_label)}</text><text x='0' y='{TOP - 14}'>{html.escape(roof.unit)}</text>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='roofline'>{''.join(parts)}</svg>"


# ---- CSS


def _shades() -> str:
    """Two scales: bright is better (q), and dark is more but not better (n)."""
    rules = []
    for kind, scale, colour_map, first, last in (("q", ".tiles-scale", "cividis", 0, 1),
                                                 ("n", ".tiles-scale.tiles-neutral", "Blues", .1, .8)):
        colours = [colormaps[colour_map](first + (last - first) * level / (SHADES - 1))[:3] for level in range(SHADES)]
        for level, (red, green, blue) in enumerate(colours):
            ink = "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "#000"
            rules.append(f".tiles-panel .tiles-{kind}{level}{{background:{to_hex((red, green, blue))};color:{ink}}}")
        stops = ",".join(map(to_hex, colours[::4] + colours[-1:]))
        rules.append(f".tiles-panel {scale} i{{background:linear-gradient(90deg,{stops})}}")
    return "\n".join(rules)


CSS = f"""<style>
.tiles-panel {{ --ink: #111; --page: #fff; --soft: #555; --pale: #f1f1f1; --line: #bbb; --grey: #d4d4d4;
  --stripe: #c8c8c8; --accent: {plots.COLOURS["best"]}; --star: {plots.COLOURS["conservative"]};
  background: var(--page); color: var(--ink); padding: 10px 14px; font-size: 18px; line-height: 1.35;
  overflow: hidden; color-scheme: light; }}
.tiles-panel.tiles-dark {{ --ink: #f4f4f4; --page: #16181b; --soft: #b8b8b8; --pale: #24272b; --line: #5a5a5a;
  --grey: #4b4f54; --stripe: #43474c; --accent: #56B4E9; --star: #E69F00; color-scheme: dark; }}
.tiles-panel, .tiles-panel * {{ font-family: Arial, Helvetica, sans-serif !important; }}
.tiles-panel .widget-box {{ color: inherit; }}
.tiles-panel .widget-html, .tiles-panel .widget-html-content {{ height: auto; line-height: inherit;
  font-size: inherit; color: inherit; margin: 0; min-width: 0; }}
.tiles-panel .tiles-controls, .tiles-panel .tiles-main {{ flex-flow: row wrap; gap: 6px 10px; overflow: visible; }}
.tiles-panel .tiles-actions {{ gap: 10px; overflow: visible; }}
.tiles-panel .widget-dropdown, .tiles-panel .widget-text {{ flex: 1 0 auto; height: auto;
  flex-direction: column; align-items: stretch; margin: 0; width: auto; min-width: 0; }}
.tiles-panel .widget-label {{ width: auto; height: auto; font-size: 16px; line-height: 1.3; text-align: left;
  color: var(--soft); margin: 0; }}
.tiles-panel .widget-label ~ select, .tiles-panel .widget-label ~ input[type="text"] {{ flex: 0 0 34px; font-size: 18px;
  height: 34px; width: 100%; background-color: var(--page); color: var(--ink); border: 1px solid var(--line); }}
.tiles-panel .widget-label ~ select {{ appearance: auto; background-image: none; padding: 0 2px 0 4px;
  field-sizing: content; }}
.tiles-panel .tiles-sizes {{ flex: 1 1 140px; }}
.tiles-panel .tiles-sizes input {{ padding: 0 4px !important; }}
.tiles-panel select:disabled, .tiles-panel input:disabled {{ opacity: .55; }}
.tiles-panel .tiles-button {{ font-size: 20px; height: 42px; line-height: 1; width: auto; padding: 0 13px; margin: 0;
  background: var(--pale); color: var(--ink); border: 1px solid var(--line); }}
.tiles-panel .tiles-run:enabled {{ background: var(--accent); color: #fff; font-weight: bold; }}
.tiles-panel.tiles-dark .tiles-run:enabled {{ color: #000; }}
.tiles-panel .tiles-button:disabled {{ opacity: .45; }}
.tiles-panel button:focus-visible {{ outline: 3px solid var(--star); outline-offset: -3px; }}
.tiles-panel .tiles-controls {{ margin-bottom: 8px; }}
.tiles-panel .tiles-status {{ flex: 1 1 520px; min-height: 82px; }}
.tiles-panel .tiles-progress {{ width: auto; height: 22px; margin: 10px 0 0; }}
.tiles-panel .tiles-progress .progress {{ background: var(--pale); }}
.tiles-panel .tiles-progress .progress-bar {{ background: var(--accent); }}
.tiles-panel .tiles-status p {{ margin: 0; font-size: 20px; }}
.tiles-panel .tiles-status .tiles-count {{ font-size: 22px; font-weight: bold; }}
.tiles-panel .tiles-status .tiles-problem {{ font-size: 22px; font-weight: bold; border-left: 8px solid var(--star);
  padding-left: 10px; }}
.tiles-panel .widget-html-content :is(h2, h3, p, dt, dd, th, td) {{ color: var(--ink); }}
.tiles-panel .widget-html-content :is(h2, h3) {{ font-size: 22px; line-height: 1.25; margin: 6px 0 4px; }}
.tiles-panel .widget-html-content small {{ font-size: 18px; font-weight: normal; display: block; }}
.tiles-panel .tiles-left {{ min-width: 0; max-width: 100%; overflow: visible; }}
.tiles-panel .tiles-right {{ flex: 2 1 340px; min-width: 0; overflow: visible; }}
.tiles-panel .tiles-map {{ gap: 2px; overflow-x: auto; overflow-y: hidden; padding-bottom: 2px; }}
.tiles-panel .tiles-map > * {{ width: auto; min-width: 0; margin: 0; }}
.tiles-panel .tiles-cell {{ font-size: 19px; height: 34px; line-height: 32px; padding: 0; overflow: hidden;
  text-overflow: clip; border: 1px solid transparent; border-radius: 2px; box-shadow: none; }}
.tiles-panel .tiles-ok {{ background: var(--page); color: var(--ink); border: 1px solid var(--line); }}
.tiles-panel .tiles-waiting {{ background: var(--pale); color: var(--soft); border: 1px dashed var(--line); }}
.tiles-panel .tiles-rejected, .tiles-panel .tiles-failed, .tiles-panel .tiles-wrong {{ color: var(--ink);
  font-size: 16px; letter-spacing: -.4px;
  background: repeating-linear-gradient(135deg, var(--grey) 0 7px, var(--stripe) 7px 9px); }}
.tiles-panel .tiles-failed, .tiles-panel .tiles-wrong {{ border: 2px solid var(--star); }}
.tiles-panel .tiles-best {{ font-size: 17px; font-weight: bold; border: 3px solid var(--star); line-height: 28px; }}
.tiles-panel .tiles-selected {{ outline: 4px solid var(--ink) !important; outline-offset: -4px; }}
.tiles-panel .tiles-tick {{ font-size: 16px; line-height: 1.1; color: var(--ink); }}
.tiles-panel .tiles-tick .widget-html-content {{ text-align: center; }}
.tiles-panel .tiles-line {{ font-size: 18px; white-space: nowrap; align-self: center; }}
.tiles-panel .tiles-line .widget-html-content {{ text-align: right; padding-right: 6px; }}
.tiles-panel .tiles-date {{ white-space: nowrap; }}
.tiles-panel .tiles-scale {{ float: right; font-size: 18px; font-weight: normal; }}
.tiles-panel .tiles-scale i {{ display: inline-block; width: 110px; height: 14px; border: 1px solid var(--line); }}
.tiles-panel .tiles-detail {{ max-height: 340px; overflow-y: auto; }}
.tiles-panel .tiles-detail p {{ margin: 0 0 4px; font-size: 20px; }}
.tiles-panel .tiles-detail dl {{ display: grid; grid-template-columns: auto 1fr; gap: 2px 12px; margin: 0; }}
.tiles-panel .tiles-detail dt {{ font-weight: bold; }}
.tiles-panel .tiles-detail :is(dt, dd) {{ float: none; width: auto; padding: 0; }}
.tiles-panel .tiles-detail dd {{ margin: 0; overflow-wrap: anywhere; }}
.tiles-panel .tiles-top table {{ width: 100%; border-collapse: collapse; font-size: 19px; border: 0;
  font-variant-numeric: tabular-nums; }}
.tiles-panel .tiles-top th, .tiles-panel .tiles-top td {{ text-align: right; padding: 0 5px; background: none;
  border-bottom: 1px solid var(--line); }}
.tiles-panel .tiles-top td {{ white-space: nowrap; }}
.tiles-panel .tiles-top .tiles-rule td {{ border-bottom: 3px solid var(--ink); }}
.tiles-panel .tiles-top th {{ font-size: 16px; line-height: 1.1; vertical-align: bottom; }}
.tiles-panel .tiles-top :is(th, td):first-child {{ text-align: left; white-space: normal; }}
.tiles-panel .tiles-roofline svg {{ width: 100%; max-width: 620px; display: block; font-size: 17px;
  overflow: visible; }}
.tiles-panel .tiles-roofline text {{ fill: currentColor; }}
.tiles-panel .tiles-roofline .tick {{ stroke: currentColor; opacity: .18; }}
.tiles-panel .tiles-roofline .roof {{ stroke: currentColor; stroke-width: 2; stroke-dasharray: 7 4; }}
.tiles-panel .tiles-roofline circle {{ stroke: var(--accent); stroke-width: 2; }}
.tiles-panel .tiles-roofline .full {{ fill: var(--accent); }}
.tiles-panel .tiles-roofline .hollow {{ fill: none; }}
.tiles-panel .tiles-roofline .best {{ stroke: var(--star); stroke-width: 4; }}
body[data-voila]:has(.tiles-dark) {{ --jp-layout-color0: #16181b; --jp-layout-color1: #16181b;
  --jp-content-font-color0: #f4f4f4; --jp-content-font-color1: #f4f4f4; background: #16181b; }}
body[data-voila] h1 {{ font-size: 22px; margin: 0; }}
{_shades()}
</style>"""
