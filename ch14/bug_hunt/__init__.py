"""Hunt a compiler bug down without a GPU: build, bisect, name the smallest trigger, write the report.

`find` starts from a suspected configuration and builds its way to the smallest one that still shows the symptom, with a
Triton of any version. Every build is real, in a worker that may crash or hang. Read `hunts.py` first: it says what is
searched. `kernels.py` holds what is built, `outcomes.py` reads what the compiler wrote, `environments.py` installs
other Tritons, and `lesson/report.py` writes a report that is ready to file.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ch14.bug_hunt import environments
from ch14.bug_hunt.hunts import HUNTS, Hunt
from ch14.bug_hunt.outcomes import failure, locate_failing_pass, make_row
from tilelab.runtime import build
from tilelab.runtime.device import Unsupported

__all__ = [
    "HUNTS",
    "Builds",
    "Finding",
    "Hunt",
    "Step",
    "bisect",
    "describe",
    "failure",
    "find",
    "grid",
    "locate_failing_pass",
    "symptom",
]

LIMIT_S = 60


class Builds:
    """The builds of a hunt with one Triton for one target. Each configuration is built once, when it is asked for.

    With `recorded_rows` nothing is built, and `ask` raises Unsupported for what they lack. `cache` replaces Triton's
    cache folder.
    """

    def __init__(
        self,
        hunt: Hunt,
        triton: str,
        target: str,
        recorded_rows: Sequence[dict] | None = None,
        cache: str | None = None,
    ) -> None:
        self.hunt, self.triton, self.target, self.cache = hunt, triton, target, cache
        self.live = recorded_rows is None
        folder = environments.locate(triton) if self.live else None
        self.other_triton = (triton, folder) if folder else None  # as tilelab.runtime.build takes it
        self._recorded = {
            self._key(row): row
            for row in recorded_rows or ()
            if (row["hunt"], row["triton"], row["target"]) == (hunt.name, triton, target)
        }
        self._compiler_output: dict[tuple, str] = {}
        self._known: dict[tuple, dict] = {}

    def _key(self, config: dict) -> tuple:
        return tuple(config[axis] for axis in self.hunt.axes)

    @property
    def rows(self) -> list[dict]:
        """The rows that have been asked for, each once, in that order."""
        return list(self._known.values())

    def ask(self, configs: Sequence[dict]) -> list[dict]:
        """Return the row of each configuration, in order. Build the configurations without a row in parallel."""
        for config in configs:
            self.hunt.check_config(config)
        new = {self._key(config): config for config in configs if self._key(config) not in self._known}
        rows = self._build(new) if self.live else self._recorded
        for key, config in new.items():
            if key not in rows:
                raise Unsupported(
                    f"no build of {describe(config)} with Triton {self.triton} for {self.target} is "
                    f"recorded: make one with python -m ch14.bug_hunt --triton {self.triton}."
                )
            self._known[key] = rows[key]
        return [self._known[self._key(config)] for config in configs]

    def _build(self, configs: dict[tuple, dict]) -> dict[tuple, dict]:
        jobs = {key: self.hunt.job(config, self.target) for key, config in configs.items()}
        keys, rows = {id(job): key for key, job in jobs.items()}, {}
        for report in build.build(
            jobs.values(), timeout_s=LIMIT_S, cache=self.cache, triton=self.other_triton
        ):
            key = keys[id(report.job)]
            self._compiler_output[key] = report.compiler_output
            rows[key] = make_row(self.hunt, self.triton, configs[key], report)
        return rows

    def compiler_output(self, config: dict) -> str:
        """Return everything that the compiler wrote about a build that failed here, or ""."""
        return self._compiler_output.get(self._key(config), "")


def grid(hunt: Hunt) -> list[dict]:
    """Return every configuration of a hunt."""
    return [dict(zip(hunt.axes, values)) for values in itertools.product(*hunt.axes.values())]


def describe(config: dict) -> str:
    """Return a configuration in one line."""
    return ", ".join(f"{axis}={value}" for axis, value in config.items())


def symptom(row: dict) -> tuple[str, str, str]:
    """Return what two builds with the same bug share: outcome, failed stage, and the message without its numbers."""
    return row["outcome"], row.get("stage", ""), re.sub(r"\d+", "#", row.get("message", ""))


@dataclass(frozen=True)
class Step:
    """One axis simplified. `rows` were asked for, in order; `config` is the simplest that still shows `wanted`."""

    axis: str
    rows: list[dict]
    config: dict
    wanted: tuple[str, str, str]

    def outcomes(self) -> dict:
        """Return the outcome of each value that was asked for; "fails elsewhere" is another failure than `wanted`."""
        return {
            row[self.axis]: row["outcome"]
            + " elsewhere" * (row["outcome"] == self.wanted[0] and symptom(row) != self.wanted)
            for row in self.rows
        }

    def __str__(self) -> str:
        asked = ", ".join(f"{value} {outcome}" for value, outcome in self.outcomes().items())
        return f"{self.axis}: {asked}; so {self.config[self.axis]} is kept"


def bisect(builds: Builds, config: dict, axis: str, wanted: tuple[str, str, str]) -> Step:
    """Find the simplest value of `axis` with which `config` still shows the symptom `wanted`, which it must show.

    The simplest value is tried first. Then the interval is halved, on the assumption that every value beyond one that
    shows the symptom shows it, too.
    """
    values, rows = builds.hunt.axes[axis], []

    def shows(index: int) -> bool:
        rows.extend(builds.ask([config | {axis: values[index]}]))
        return symptom(rows[-1]) == wanted

    low, high = -1, values.index(config[axis])  # low does not show the symptom, high does
    if high and shows(0):
        high = 0
    elif high:
        low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return Step(axis, rows, config | {axis: values[high]}, wanted)


def find_first_trigger(builds: Builds, start: dict, reach: int, batch: int = 8) -> dict | None:
    """Return the first configuration whose outcome is not good, or None. The nearest to `start` come first."""
    axes = builds.hunt.axes

    def change_axes(count: int):
        for chosen in itertools.combinations(axes, count):
            for values in itertools.product(
                *([value for value in axes[axis] if value != start[axis]] for axis in chosen)
            ):
                yield start | dict(zip(chosen, values))

    for count in range(min(reach, len(axes)) + 1):
        candidates = change_axes(count)
        while configs := list(itertools.islice(candidates, batch)):
            for row in builds.ask(configs):
                if row["outcome"] != builds.hunt.good:
                    return {axis: row[axis] for axis in axes}
    return None


def _join_values(values: list) -> str:
    *most, last = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


@dataclass
class Finding:
    """The result of a search: the smallest trigger `config`, its build `row`, and the `steps` that led to it.

    triggers and harmless: per axis, the values around `config` that show the symptom and those that do not.
    probes: (configuration, predicted, shown), which test the rule where several axes differ from `config`.
    first: the first configuration that showed the symptom, from which the search went on.
    """

    builds: Builds
    config: dict
    row: dict
    steps: list[Step]
    triggers: dict[str, list]
    harmless: dict[str, list]
    probes: list[tuple[dict, bool, bool]] = field(default_factory=list)
    first: dict = field(default_factory=dict)

    def predicts(self, config: dict) -> bool:
        """Return whether the rule says that a configuration shows the symptom: each of its values is a trigger."""
        return all(config[axis] in values for axis, values in self.triggers.items())

    @property
    def correct_probes(self) -> int:
        """The number of probes that the rule predicted correctly."""
        return sum(predicted == shown for _, predicted, shown in self.probes)

    @property
    def sentence(self) -> str:
        """The rule in words."""
        row, builds = self.row, self.builds
        what = f"{row['stage']} fails ({row['message']})" if row["outcome"] == "fails" else row["outcome"]
        limits = [
            f"{axis} is {_join_values(self.triggers[axis])} (not {_join_values(values)})"
            for axis, values in self.harmless.items()
            if values
        ]
        free = [axis for axis, values in self.harmless.items() if not values]
        return (
            f"Triton {builds.triton}, {builds.target}, {builds.hunt.title}: {what}"
            + (f" where {' and '.join(limits)}" if limits else ", whatever the axes")
            + (f"; {', '.join(free)} make{'s' * (len(free) == 1)} no difference" if free and limits else "")
            + "."
        )


def find(builds: Builds, start: dict | None = None, probes: int = 12, reach: int = 2) -> Finding | None:
    """Find the smallest trigger, from `start` (default: the hunt's suspicion), or return None.

    1. Change `start` on up to `reach` axes until a build shows a symptom.
    2. Go axis by axis to the simplest value that still shows it, until no axis gets simpler.
    3. Build all neighbours along the axes, and `probes` random others. The rule predicts the
       symptom for half of these.
    """
    hunt = builds.hunt
    start = hunt.start if start is None else start
    hunt.check_config(start)
    config = find_first_trigger(builds, start, reach)
    if config is None:
        return None
    first, shown_symptom, steps, before = config, symptom(builds.ask([config])[0]), [], None
    while config != before:
        before = config
        for axis in hunt.axes:
            steps.append(bisect(builds, config, axis, shown_symptom))
            config = steps[-1].config
    lines = {axis: [config | {axis: value} for value in values] for axis, values in hunt.axes.items()}
    builds.ask(
        [neighbour for line in lines.values() for neighbour in line]
    )  # one call builds them in parallel
    triggers, harmless = (
        {
            axis: [row[axis] for row in builds.ask(line) if (symptom(row) == shown_symptom) == shown]
            for axis, line in lines.items()
        }
        for shown in (True, False)
    )
    steps = [step for step in steps if step.rows]
    finding = Finding(builds, config, builds.ask([config])[0], steps, triggers, harmless, first=first)
    away = [other for other in grid(hunt) if sum(other[axis] != config[axis] for axis in hunt.axes) > 1]
    random.Random(0).shuffle(away)
    chosen = [
        other
        for predicted in (True, False)
        for other in [other for other in away if finding.predicts(other) == predicted][: probes // 2]
    ]
    finding.probes = [
        (other, finding.predicts(other), symptom(row) == shown_symptom)
        for other, row in zip(chosen, builds.ask(chosen))
    ]
    return finding
