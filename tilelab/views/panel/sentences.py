"""The sentences of the sweep panel: how far a sweep is, how it ended, and which configuration is fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tilelab.pictures import scales
from tilelab.sweeps.sweep import Sweep
from tilelab.views.panel.rows import Choice, find_winner, get_value, sort_by_speed


def format_number(value: float | None, field: str = "ms") -> str:
    """Return three digits of a time, two decimals of a ratio, all digits of a count, and a dash for None."""
    if value is None:
        return "–"
    if field == "ratio":
        return f"{value:.2f}"
    return f"{value:,.0f}" if isinstance(value, int) or value >= 99.95 else f"{value:#.3g}"


def format_seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.0f} min"


def describe_progress(running: Sweep) -> str:
    """Return how long a sweep will take."""
    if running.cancelled:
        return "cancelling"
    left = running.left_s
    note = f"about {format_seconds(left)} left" if left else "starting"
    return note + "; another sweep measures on the GPU, and this one waits" * running.waits_for_gpu


def describe_end(finished: Sweep) -> str:
    """Return how a sweep ended."""
    elapsed = format_seconds(finished.elapsed_s)
    if finished.cancelled:
        return f"cancelled after {elapsed}: Run goes on from here"
    if all(row.get("resumed") or "recorded" not in row for row in finished.rows.values()):
        action = "measures" if finished.space.can_measure else "builds"
        return f"everything is kept from before; Start over {action} again"
    return f"done in {elapsed}"


def describe_status(choice: Choice, rows: Sequence[dict], done: Mapping[str, int], note: str) -> str:
    """Return how far the sweep is, with `note`, or else with what to do next. `done` counts its rows by status."""
    measures, total = choice.space.can_measure, len(rows)
    action, did = ("time", "timed") if measures else ("build", "built")
    rejected = sum(row["status"] == "rejected" for row in choice.initial_rows.values())
    untouched = sum(done.values()) <= rejected
    recorded = sum("from_record" in row and bool(row.get("ms")) for row in rows)
    words = {"ok": did, "wrong": "wrong", "failed": "failed", "rejected": "cannot run"}
    counts = [f"{done[status]} {text}" for status, text in words.items() if done.get(status)]
    if untouched and not note:
        counts = [f"{rejected} of {total} cannot run"] if rejected else []
        counts.append(f"press Run to {action} {f'the other {total - rejected}' if rejected else 'them'} here")
        return " · ".join([f"{recorded} of {total} have a recorded time"] * bool(recorded) + counts)
    left = total - sum(done.values())
    note = note or (f"press Run to {action} the other {left}" if left else "kept from before")
    return " · ".join([f"{total - left} of {total} done here: {', '.join(counts)}".rstrip(": "), note])


def describe_winner(rows: Sequence[dict], peer: str) -> list[str]:
    """Return sentences about the fastest configuration, why it stands first, and how well the model predicted it."""

    def ratio_of(row: dict) -> float:
        return get_value(row, "ratio") or 0

    def speed(row: dict) -> float:  # beside the peer, where there is one
        return get_value(row, "ratio") or 1 / get_value(row, "ms")

    best = find_winner(rows)
    if best is None:
        return []
    timed = [row for row in sort_by_speed(rows) if ("from_record" in row) == ("from_record" in best)]
    near = sum(1.01 * speed(row) >= speed(best) for row in timed) - 1
    ratio = f"{format_number(get_value(best, 'ratio'), 'ratio')} × {peer}, " if best.get("ratio") else ""
    sentences = [
        f"fastest{', recorded' * ('from_record' in best)}: {best['kernel']}, {ratio}"
        f"{format_number(get_value(best, 'ms'))} ms"
    ]
    shortest = min(get_value(row, "ms") for row in timed)
    if ratio and shortest < get_value(best, "ms"):
        sentences.append(
            f"Speeds beside {peer} rank, not times, because the clock changes during a sweep: "
            f"the shortest time is {format_number(shortest)} ms, of another configuration."
        )
    if any("final_ms" in row for row in timed) and any(ratio_of(row) > ratio_of(best) for row in timed):
        sentences.append(
            "The finalists were timed once more, side by side. That timing ranks before the first one."
        )
    if near:
        sentences.append(f"{near} more configuration{'s are' if near > 1 else ' is'} within 1 % of it.")
    both = [row for row in timed if row.get("predicted_ms")]
    if len(both) >= 3 and best in both:
        predicted = [row["predicted_ms"] for row in both]
        correlation = scales.rank_correlation(
            predicted, [row["ms"] / (row.get("peer_ms") or 1) for row in both]
        )
        if not math.isnan(correlation):
            place = 1 + sum(ms < best["predicted_ms"] for ms in predicted)
            sentences.append(
                f"The model of the time put it in place {place} of {len(both)}. The rank correlation of predicted and "
                f"measured times is {correlation:.2f}; 1 means the same order."
            )
    return sentences


def describe_cause(choice: Choice, rows: Sequence[dict], roof: dict) -> str:
    """Return what the fastest configuration has that others have not, in one sentence, or "" where it is unknown."""
    best = find_winner(rows)
    if best is None or not best.get("ratio"):
        return ""
    timed = [index for index, row in enumerate(rows) if row["status"] == "ok" and get_value(row, "ratio")]
    at = next(index for index, row in enumerate(rows) if row is best)
    parts, (x, y) = [], list(choice.axes)[:2]
    if "problem" not in roof:
        values = sorted({roof["intensity"][index] for index in timed}, reverse=True)
        place = values.index(roof["intensity"][at])
        label = roof["label"].partition(",")[0]
        if place < min(3, len(values) / 3):
            order = ("the most", "the second most", "the third most")[place]
            parts.append(f"it has {order} {label} ({values[place]:,.0f})")
    column = [index for index in timed if choice.axes[x]["of"][index] == choice.axes[x]["of"][at]]
    worst = min(column, key=lambda index: get_value(rows[index], "ratio"))
    labels, of = choice.axes[y]["labels"], choice.axes[y]["of"]
    if of[worst] != of[at]:
        label, tile = labels[of[worst]], choice.axes[x]["labels"][choice.axes[x]["of"][at]]
        slower = format_number(get_value(rows[worst], "ratio"), "ratio")
        parts.append(f"with {label}, the same {x}, {tile}, reaches only {slower}")
    return f"Why: {'; '.join(parts)}." if parts else ""
