"""The sentences of the sweep panel: how far a sweep is, how it ended, and which configuration is fastest."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from tilelab.pictures import plots
from tilelab.sweeps.sweep import Sweep
from tilelab.views.panel.rows import Choice, find_winner, get_value


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
    return note + "; another sweep has the GPU" * running.waits_for_gpu


def describe_end(finished: Sweep) -> str:
    """Return how a sweep ended."""
    elapsed = format_seconds(finished.elapsed_s)
    if finished.cancelled:
        return f"cancelled after {elapsed}: Run goes on from here"
    if all(row.get("resumed") or "recorded" not in row for row in finished.rows.values()):
        action = "measures" if finished.space.can_measure else "builds"
        return f"everything is kept from before; Start over {action} again"
    return f"done in {elapsed}"


def describe_status(choice: Choice, rows: Sequence[dict], done: int, note: str) -> str:
    """Return how far the sweep is, with `note`, or else with what to do next."""
    counts, progress = collections.Counter(row["status"] for row in rows), f"{done} of {len(rows)} swept"
    press = f"press Run to {'time' if choice.space.can_measure else 'build'}"
    if not note and any(row.get("overlay") == "row" for row in rows):
        progress, note = (
            f"not swept here yet; the record has a time for {counts.pop('ok', 0)} of {len(rows)}",
            press,
        )
    elif not note:
        note = (
            f"{press} {'the rest' if len(counts) > 1 else 'them'}"
            if counts["waiting"]
            else "kept from before"
        )
    found = ", ".join(
        f"{counts[name]} {name}" for name in ("ok", "rejected", "wrong", "failed") if counts[name]
    )
    return " · ".join(filter(None, (progress, found, note)))


def describe_winner(rows: Sequence[dict], peer: str) -> list[str]:
    """Return sentences about the fastest configuration, why it stands first, and how well the model predicted it."""

    def speed(row: dict) -> float:  # beside the peer, where there is one
        return get_value(row, "ratio") or 1 / get_value(row, "ms")

    best = find_winner(rows)
    if best is None:
        return []
    timed = [row for row in rows if row["status"] == "ok" and row.get("ms")]
    near = sum(1.01 * speed(row) >= speed(best) for row in timed) - 1
    ratio = f"{format_number(get_value(best, 'ratio'), 'ratio')} × {peer}, " if best.get("ratio") else ""
    sentences = [
        f"fastest{', recorded' * ('overlay' in best)}: {best['kernel']}, {ratio}"
        f"{format_number(get_value(best, 'ms'))} ms"
    ]
    shortest = min(get_value(row, "ms") for row in timed)
    if ratio and shortest < get_value(best, "ms"):
        sentences.append(
            f"ranked by × {peer}, not by ms, because the clock changes during a sweep; "
            f"the shortest time is {format_number(shortest)} ms"
        )
    if near:
        sentences.append(f"within 1 %: {near} more configuration{'s' * (near > 1)}")
    both = [row for row in timed if row.get("predicted_ms")]
    if len(both) >= 3 and best in both:
        predicted = [row["predicted_ms"] for row in both]
        correlation = plots.rank_correlation(
            predicted, [row["ms"] / (row.get("peer_ms") or 1) for row in both]
        )
        if not math.isnan(correlation):
            place = 1 + sum(ms < best["predicted_ms"] for ms in predicted)
            sentences.append(f"the model: rank correlation {correlation:.2f}; predicted place {place}")
    return sentences
