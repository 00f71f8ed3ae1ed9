"""Pictures of builds: the path of a search, versions by targets, and a rule beside what was built."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Callable, Sequence

from ch14.bug_hunt.hunts import Hunt
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write

TONES = {
    "builds": "#009E73",
    "native": "#009E73",
    "real": "#009E73",
    "ignored": "#E69F00",
    "emulated": "#E69F00",
    "fails": "#D55E00",
}
PALE = "#e6e6e6"


def path_picture(hunt: Hunt, steps: Sequence, title: str, source: str) -> plots.Picture:
    """Draw the path of a search: one line per Step with the outcomes of its axis. The chosen value has a frame."""
    most = max(len(hunt.axes[step.axis]) for step in steps)
    width, pitch = 8.4, 0.36
    figure, axes = canvas(title, source, width, pitch * len(steps) + 0.95)
    wide = (width - 1.45) / most
    for line, step in enumerate(steps):
        y = pitch * (len(steps) - line) + 0.05
        write(axes, 0.1, y + 0.13, f"{line + 1}  {step.axis}", "left", 7.5, fontweight="bold")
        outcomes = {step.config[step.axis]: f"{step.wanted[0]}, known"} | step.outcomes()
        for column, value in enumerate(hunt.axes[step.axis]):
            x, outcome = 1.4 + column * wide, outcomes.get(value)
            box(
                axes,
                x,
                y,
                wide - 0.05,
                0.31,
                lighten(TONES[re.match(r"\w+", outcome)[0]]) if outcome else PALE,
            )
            write(axes, x + wide / 2 - 0.025, y + 0.215, value)
            write(
                axes,
                x + wide / 2 - 0.025,
                y + 0.085,
                outcome or "not asked",
                color="black" if outcome else plots.GREY,
            )
            if value == step.config[step.axis]:
                box(axes, x, y, wide - 0.05, 0.31, edge="black", linewidth=1.6)
    facts = []
    for step in steps:
        outcomes = [f"{outcome} at {value}" for value, outcome in step.outcomes().items()]
        facts.append(
            f"{step.axis} {' and '.join(outcomes) or 'was not asked'}, so {step.config[step.axis]} is kept."
        )
    return figure.describe(
        f"{title}. One axis after another, the search keeps the simplest value that still shows the "
        f"bug. {' '.join(facts)}"
    )


def matrix_picture(
    rows: Sequence[dict], title: str, source: str, x: str = "target", y: str = "triton"
) -> plots.Picture:
    """Draw versions by targets, or other columns of the rows. A cell counts the builds of each outcome, and names the
    stage of those that failed."""
    columns, lines = (list(dict.fromkeys(row[name] for row in rows)) for name in (x, y))
    cells = {
        (column, line): _count_outcomes([row for row in rows if (row[x], row[y]) == (column, line)])
        for column in columns
        for line in lines
    }
    wide, high = 1.5, max(0.42, 0.15 * max(map(len, cells.values())) + 0.1)
    figure, axes = canvas(title, source, 0.75 + wide * len(columns), high * len(lines) + 0.95)
    for index, column in enumerate(columns):
        write(axes, 0.7 + wide * (index + 0.5), high * len(lines) + 0.45, column, size=8)
    for index, line in enumerate(lines):
        write(axes, 0.1, 0.32 + high * (len(lines) - 0.5 - index), line, "left", 8)
    for (column, line), counts in cells.items():
        left, bottom = 0.7 + wide * columns.index(column), 0.32 + high * (len(lines) - 1 - lines.index(line))
        total, begin = sum(counts.values()), left
        for (outcome, _), number in counts.items():
            share = (wide - 0.05) * number / total
            box(axes, begin, bottom, share, high - 0.05, lighten(TONES[outcome]))
            begin += share
        for index, ((outcome, stage), number) in enumerate(counts.items()):
            write(
                axes,
                left + wide / 2 - 0.025,
                bottom + high / 2 - 0.03 + 0.14 * ((len(counts) - 1) / 2 - index),
                _describe_outcome((outcome, stage), number, ", "),
            )
    alike: dict[str, list[str]] = {}  # lines with the same outcomes share a sentence
    for line in lines:
        found: dict[str, list[str]] = {}
        for column in columns:
            counts = cells[column, line].items()
            found.setdefault(", ".join(itertools.starmap(_describe_outcome, counts)), []).append(column)
        said = "; ".join(f"{outcomes} ({', '.join(where)})" for outcomes, where in found.items())
        alike.setdefault(said, []).append(line)
    facts = " ".join(f"{', '.join(names)}: {said}." for said, names in alike.items())
    return figure.describe(f"{title}. Builds per cell. {facts}")


def _describe_outcome(outcome: tuple[str, str], number: int, between: str = " in ") -> str:
    """Return words such as "12 build" or "1 fails in ptxas"."""
    verb, stage = outcome
    return f"{number} {verb if number == 1 else verb.rstrip('s')}{between + stage if stage else ''}"


def _count_outcomes(rows: Sequence[dict]) -> dict[tuple[str, str], int]:
    """Return the number of rows per outcome and shortened stage, in the order of TONES."""
    counts = collections.Counter(
        (row["outcome"], re.sub("^(TritonGPU|NVGPU)", "", row.get("stage", ""))) for row in rows
    )
    return dict(sorted(counts.items(), key=lambda item: list(TONES).index(item[0][0])))


def rule_picture(
    rows: Sequence[dict],
    says: Callable[[dict], bool],
    lines: str,
    columns: Sequence[str],
    title: str,
    source: str,
) -> plots.Picture:
    """Draw one cell per build: axis `lines` down and the axes `columns` across. Red cells failed; the rule `says` that
    framed cells fail."""
    down = list(dict.fromkeys(row[lines] for row in rows))
    across = list(itertools.product(*(sorted({row[axis] for row in rows}) for axis in columns)))
    wide, high = 6.9 / len(across), 0.22
    figure, axes = canvas(title, source, 8.4, high * len(down) + 0.17 * len(columns) + 0.75)
    for row in rows:
        x = 1.4 + wide * across.index(tuple(row[axis] for axis in columns))
        y = 0.3 + high * (len(down) - 1 - down.index(row[lines]))
        fails = row["outcome"] == "fails"
        box(axes, x, y, wide * 0.92, high * 0.9, TONES["fails"] if fails else lighten(TONES["builds"], 0.35))
        if fails:
            write(axes, x + wide * 0.46, y + high * 0.43, "×", size=7, color="white")
        if says(row):
            box(axes, x, y, wide * 0.92, high * 0.9, edge="black", linewidth=1.4)
    for line, name in enumerate(down):
        write(axes, 0.1, 0.3 + high * (len(down) - line - 0.5), name, "left", 7.5)
    for level, axis in enumerate(columns):
        y = 0.3 + high * len(down) + 0.17 * (len(columns) - 1 - level) + 0.1
        write(axes, 1.34, y, axis, "right")
        inner = len(across) // len({values[: level + 1] for values in across})
        for first in range(0, len(across), inner):
            write(axes, 1.4 + wide * (first + inner / 2), y, across[first][level])
    failed, framed = [row for row in rows if row["outcome"] == "fails"], [row for row in rows if says(row)]
    facts = []
    for axis in (lines, *columns):
        counts = collections.Counter(row[axis] for row in failed)
        facts.append(
            f"by {axis}: "
            + ", ".join(f"{counts[value]} at {value}" for value in dict.fromkeys(row[axis] for row in rows))
        )
    return figure.describe(
        f"{title}. {len(failed)} of {len(rows)} builds fail; {'; '.join(facts)}. {len(framed)} "
        f"builds are framed, and {sum(map(says, failed))} of them fail."
    )
