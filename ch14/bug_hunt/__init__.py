"""Hunt a compiler bug down without a GPU: build, bisect, name the smallest trigger, write the report.

`find` starts from a suspected configuration and asks a Triton of any version (`ch14.bug_hunt.environments`) to build its way
to the smallest one that still shows the symptom. Every build is a real one, in a worker that may crash or hang.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ch14.bug_hunt import environments
from ch14.bug_hunt.hunts import HUNTS, Hunt, operands, threads
from tilelab import build
from tilelab.device import Unsupported

__all__ = ["HUNTS", "Hunt", "Builds", "Finding", "Step", "find", "bisect", "grid", "failure", "pipeline"]

COUNTS = {"tcgen05": ("tcgen05_mma",), "wgmma": ("wgmma",), "mma_sync": ("mma_sync",),
          "block_scale": ("block_scale",), "tma": ("tma_load", "tma_store"), "setmaxnreg": ("setmaxnreg",)}
LIMIT_S = 60


# ---- what a compiler says


def failure(said: str) -> dict[str, str]:
    """{"stage", "message", "exception"} of a failed build, from all that its compiler said.

    `stage` is the MLIR pass, "ptxas", "process" (it died or hung) or "frontend"; `message` one line without paths;
    `exception` what Python saw, empty for a death.
    """
    died = re.match(r"the compiler (died|gave no answer|closed)", said)
    exception = "" if died else said.partition(":")[0]
    if found := re.search(r"executing \[?`(\w+)`", said):
        told = re.findall(r"error: (?!Failures have been)(.+)|(LLVM ERROR: .+)|(Assertion `.+?') failed", said)
        lines = dict.fromkeys(next(filter(None, each)).strip().rstrip(".") for each in told)
        return {"stage": found[1], "message": "; ".join(lines) or "without a message", "exception": exception}
    if found := re.search(r"ptxas (?:\S+, line \d+; )?(?:fatal|error)\s*: (?:\(C\d+\) )?(.+)", said):
        return {"stage": "ptxas", "message": found[1].strip(), "exception": exception}
    lines = [line.strip() for line in said.splitlines() if line.strip(" ^")] or ["no message"]
    return {"stage": "process" if died else "frontend", "message": lines[0 if died else -1][:300],
            "exception": exception}


def pipeline(said: str) -> str:
    """The failing pass with its options and its place in the pipeline that the compiler dumped; empty where it did
    not: "tritongpu-assign-latencies{num-stages=4}, pass 21 of 46"."""
    dumped, failed = re.search(r'pipeline: "builtin\.module\((.+)\)"', said), re.search(r"executing \[?`(\w+)`", said)
    if not dumped or not failed:
        return ""
    passes = re.findall(r"[\w-]+(?:\{[^}]*\})?", dumped[1])

    def plain(name):
        return re.sub(r"\W", "", name.partition("{")[0]).lower().replace("triton", "")

    places = [index for index, each in enumerate(passes) if plain(each) == plain(failed[1])]
    return f"{passes[places[0]]}, pass {places[0] + 1} of {len(passes)}" if len(places) == 1 else ""


def row_of(hunt: Hunt, triton: str, config: dict, report: build.Report) -> dict:
    """A build, flat: version, target, axes, `outcome`, `status`; then what failed, or of the PTX threads a block, what
    its products take, and how many instructions of each kind it has, where it has any."""
    row = {"hunt": hunt.name, "triton": triton, "target": report.job.target, **config,
           "outcome": hunt.outcome(report), "status": report.status}
    if report.status == "failed":
        return row | failure(report.compiler_output or report.reason)
    counts = {name: sum(report.counts[each] for each in parts) for name, parts in COUNTS.items()}
    found = {"reason": report.reason, "threads": threads(report.ptx), "operands": operands(report.ptx)} | counts
    return row | {name: value for name, value in found.items() if value}


class Builds:
    """What one Triton makes of the configurations of a hunt for one target: built when asked, each once.

    With `recorded` rows nothing is built, and asking for what they lack is Unsupported. `rows` holds the answers in
    their order. `cache` replaces Triton's cache folder.
    """

    def __init__(self, hunt: Hunt, triton: str, target: str, recorded: Sequence[dict] | None = None,
                 cache: str | None = None):
        self.hunt, self.triton, self.target, self.cache = hunt, triton, target, cache
        self.rows: list[dict] = []
        self._reports: dict[tuple, build.Report] = {}
        self._known: dict[tuple, dict] = {}
        self._recorded = None if recorded is None else {
            self._key(row): row for row in recorded
            if (row["hunt"], row["triton"], row["target"]) == (hunt.name, triton, target)}
        self._folder = environments.ready(triton) if recorded is None else None

    def _key(self, config: dict) -> tuple:
        return tuple(config[axis] for axis in self.hunt.axes)

    @property
    def live(self) -> bool:
        """Whether it builds, rather than reads what was built before."""
        return self._recorded is None

    def ask(self, configs: Sequence[dict]) -> list[dict]:
        """A row of each configuration, in order; what is not known is built, in parallel. ValueError for what is no
        configuration of the hunt."""
        for config in configs:
            self.hunt.check(config)
        new = {self._key(config): config for config in configs if self._key(config) not in self._known}
        if self.live:
            jobs = {id(job): (key, job) for key, config in new.items()
                    for job in [self.hunt.job(config, self.target)]}
            for report in build.build([job for _, job in jobs.values()], timeout_s=LIMIT_S, cache=self.cache,
                                      triton=self._folder):
                key = jobs[id(report.job)][0]
                self._reports[key] = report
                self._known[key] = row_of(self.hunt, self.triton, new[key], report)
        elif missing := [config for key, config in new.items() if key not in self._recorded]:
            raise Unsupported(f"no build of {describe(missing[0])} with Triton {self.triton} for {self.target} is "
                              f"recorded: make one with python -m ch14.bug_hunt --triton {self.triton}.")
        else:
            self._known |= {key: self._recorded[key] for key in new}
        self.rows += [self._known[key] for key in new]
        return [self._known[self._key(config)] for config in configs]

    def report(self, config: dict) -> build.Report | None:
        """What came out of a configuration that was asked for, with its PTX; None where it was not built here."""
        return self._reports.get(self._key(config))

    def said(self, config: dict) -> str:
        """All that the compiler said about a build that failed here; empty for any other."""
        report = self.report(config)
        return report.compiler_output if report else ""


# ---- the search


def grid(hunt: Hunt) -> list[dict]:
    """Every configuration of a hunt."""
    return [dict(zip(hunt.axes, values)) for values in itertools.product(*hunt.axes.values())]


def describe(config: dict) -> str:
    """A configuration in one line."""
    return ", ".join(f"{axis}={value}" for axis, value in config.items())


def symptom(row: dict) -> tuple[str, str, str]:
    """What two builds share that show the same bug: the outcome, where it failed, and the message but for sizes."""
    return row["outcome"], row.get("stage", ""), re.sub(r"\d+", "#", row.get("message", ""))


@dataclass(frozen=True)
class Step:
    """One axis simplified: `rows` were asked, in order; `config` is the simplest that shows the symptom `wanted`."""

    axis: str
    rows: list[dict]
    config: dict
    wanted: tuple[str, str, str]

    def told(self) -> dict:
        """What became of each value that was asked, in words: another failure than the one wanted is "elsewhere"."""
        return {row[self.axis]: row["outcome"] + " elsewhere" * (row["outcome"] == self.wanted[0]
                                                                 and symptom(row) != self.wanted) for row in self.rows}

    def __str__(self) -> str:
        asked = ", ".join(f"{value} {what}" for value, what in self.told().items())
        return f"{self.axis}: {asked}; so {self.config[self.axis]}"


def bisect(builds: Builds, config: dict, axis: str, wanted: tuple[str, str, str]) -> Step:
    """The simplest value of `axis` for which `config`, which shows the symptom `wanted`, still does.

    First the simplest of all, then halves: values beyond one that shows it are taken to show it, too.
    """
    values, asked = builds.hunt.axes[axis], []

    def shows(index: int) -> bool:
        asked.extend(builds.ask([config | {axis: values[index]}]))
        return symptom(asked[-1]) == wanted

    without, shown = -1, values.index(config[axis])
    if shown and shows(0):
        shown = 0
    elif shown:
        without = 0
    while shown - without > 1:
        middle = (without + shown) // 2
        without, shown = (without, middle) if shows(middle) else (middle, shown)
    return Step(axis, asked, config | {axis: values[shown]}, wanted)


def suspect(builds: Builds, start: dict, wanted: str = "", reach: int = 2, at_once: int = 8) -> dict | None:
    """The first configuration that is not fine, by the number of axes on which it differs from `start`, up to `reach`.

    `wanted` is an outcome or a stage that it must show. None when there is none.
    """
    axes = builds.hunt.axes

    def changed(count: int):
        for chosen in itertools.combinations(axes, count):
            for values in itertools.product(*([value for value in axes[axis] if value != start[axis]]
                                              for axis in chosen)):
                yield start | dict(zip(chosen, values))

    for count in range(min(reach, len(axes)) + 1):
        following = changed(count)
        while batch := list(itertools.islice(following, at_once)):
            for row in builds.ask(batch):
                if row["outcome"] != builds.hunt.good and wanted in ("", *symptom(row)[:2]):
                    return {axis: row[axis] for axis in axes}
    return None


def _either(values: list) -> str:
    *most, last = [f'"{value}"' if isinstance(value, str) else str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


@dataclass
class Finding:
    """What a search came to: the smallest trigger `config`, its build `row`, and around it, axis by axis, the values
    that `show` the symptom and those that do not (`without`).

    `probes` are (configuration, predicted, built) off these axes: whether their product foretells other builds.
    """

    builds: Builds
    config: dict
    row: dict
    steps: list[Step]
    show: dict[str, list]
    without: dict[str, list]
    probes: list[tuple[dict, bool, bool]] = field(default_factory=list)

    def predicts(self, config: dict) -> bool:
        """Whether the rule says that a configuration shows the symptom: each of its values does."""
        return all(config[axis] in values for axis, values in self.show.items())

    @property
    def sentence(self) -> str:
        """The smallest trigger in words."""
        row, builds = self.row, self.builds
        what = row["outcome"]
        if what == "fails":
            what = f"{row['stage']} fails ({row['message']})"
        limits = [f"{axis} is {_either(self.show[axis])} (not {_either(values)})"
                  for axis, values in self.without.items() if values]
        free = [axis for axis, values in self.without.items() if not values]
        return (f"Triton {builds.triton}, {builds.target}, {builds.hunt.title}: {what}"
                + (f" where {' and '.join(limits)}" if limits else ", whatever the axes")
                + (f"; {', '.join(free)} make{'s' * (len(free) == 1)} no difference" if free and limits else "") + ".")


def find(builds: Builds, start: dict | None = None, wanted: str = "", probes: int = 12,
         reach: int = 2) -> Finding | None:
    """The smallest trigger, from `start` (default: the hunt's suspicion); None when nothing within `reach` is wrong.

    Three phases: changes of `start`, on up to `reach` axes, until a build shows a symptom (`wanted`: an outcome or a
    stage); axis by axis to the simplest value that still shows it, until none gets simpler; then all neighbours along
    the axes, and `probes` random configurations off them, half of which the rule says show it. ValueError for a `start`
    that is no configuration.
    """
    hunt = builds.hunt
    start = hunt.start if start is None else start
    hunt.check(start)
    config = suspect(builds, start, wanted, reach)
    if config is None:
        return None
    showing, steps = symptom(builds.ask([config])[0]), []
    before = None
    while config != before:
        before = config
        for axis in hunt.axes:
            steps.append(bisect(builds, config, axis, showing))
            config = steps[-1].config
    lines = {axis: [config | {axis: value} for value in values] for axis, values in hunt.axes.items()}
    builds.ask([each for line in lines.values() for each in line])  # all at once: they are built side by side
    around = {axis: builds.ask(line) for axis, line in lines.items()}
    show, without = ({axis: [row[axis] for row in rows if (symptom(row) == showing) == shown]
                      for axis, rows in around.items()} for shown in (True, False))
    found = Finding(builds, config, builds.ask([config])[0], [step for step in steps if step.rows], show, without)
    off = [each for each in grid(hunt) if sum(each[axis] != config[axis] for axis in hunt.axes) > 1]
    random.Random(0).shuffle(off)
    chosen = [each for shown in (True, False)
              for each in [each for each in off if found.predicts(each) == shown][:probes // 2]]
    for each, row in zip(chosen, builds.ask(chosen)):
        found.probes.append((each, found.predicts(each), symptom(row) == showing))
    return found
