"""Claims, and how they are judged.

A claim is a sentence in our words, with a short quotation from a field note. It has a test in words, a rule that
carries out this test, and the heading of the cells that show why. A TOML file per note holds all of this but the rules.
A rule is a function of the evidence in `claims.rules`: it reads rows of records, or builds, or computes, and returns a
ruling. The texts of the claim then make the verdict and the figure of that ruling, so neither can be out of date.
`policy.md` states in words how claims are judged.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import pathlib
import tomllib
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tilelab import ROOT
from tilelab.records import margins, results
from tilelab.runtime import device

HOLDS, ONLY_IF, REFUTED, UNTESTED = "holds", "holds only if", "refuted", "not settled"
# The verdicts on a figure that a note gives for another GPU, where this one was measured.
HOLDS_HERE, ONLY_IF_HERE, NOT_HERE = "holds on an H200", "holds on an H200 only if", "not on an H200"
ELSEWHERE = {HOLDS: HOLDS_HERE, ONLY_IF: ONLY_IF_HERE, REFUTED: NOT_HERE}
NO_RECORD = "not recorded yet"
VERDICTS = (HOLDS, ONLY_IF, REFUTED, HOLDS_HERE, ONLY_IF_HERE, NOT_HERE, UNTESTED, NO_RECORD)
CONDITIONAL = (ONLY_IF, ONLY_IF_HERE)
KINDS = "measured built arithmetic argument".split()
MEASURED, BUILT, ARITHMETIC, ARGUMENT = KINDS

MARGIN = 0.02  # of what is not timed, such as a profiler's counts
ABOUT = 0.2  # "about 2" means 1.6 to 2.4


def agrees(
    value: float,
    gain: float | Sequence[float] = (),
    state: Sequence[float] = (),
    about: bool = False,
    margin: float = MARGIN,
) -> bool:
    """Return whether a measured value agrees with what a note says: the one place where the policy is applied.

    `gain` is a figure or a range that speaks for the note's advice: its lower end is a lower bound. `state` is a range
    with two ends. The margin widens each end, and ABOUT does if the note says "about" or "~".
    """
    margin = max(margin, ABOUT * about)
    low, high = state or (min(gain) if isinstance(gain, Sequence) else gain, math.inf)
    return low * (1 - margin) <= value <= high * (1 + margin)


def is_better(value: float, other: float, margin: float = MARGIN) -> bool:
    """Return whether one measured value exceeds another by more than the margin."""
    return value > other * (1 + margin)


# ---- rulings


@dataclasses.dataclass(frozen=True)
class Ruling:
    """Hold the result of a rule: whether the claim holds, and the values that the answer quotes.

    `holds` is None if the evidence cannot decide. `holds_then` says whether the claim holds under its condition.
    `case` selects texts of the claim that replace its usual ones.
    """

    holds: bool | None
    values: dict[str, Any]
    holds_then: bool = False
    case: str = ""


def decide(holds: object, holds_then: object = False, case: str = "", **values: Any) -> Ruling:
    """Return that a claim holds, or holds under its condition, or does not hold."""
    return Ruling(bool(holds), values, bool(holds_then), case or "holds" * bool(holds))


def leave_open(case: str = "open", **values: Any) -> Ruling:
    """Return that the evidence cannot decide a claim."""
    return Ruling(None, values, case=case)


Rule = Callable[..., Ruling]
RULES: dict[str, Rule] = {"leave_open": lambda evidence: leave_open()}


def rule(function: Rule) -> Rule:
    """Add a function of (evidence, **parameters) to RULES under its name."""
    assert function.__name__ not in RULES, function.__name__
    RULES[function.__name__] = function
    return function


def format_range(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest, as in "2.88 to 3.34"; one figure if both look the same."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in (ordered[0], ordered[-1])))


class _Several(tuple):
    """Several values of a figure. Numbers are formatted as their range, and names are joined by the format."""

    def __format__(self, form: str) -> str:
        return form.join(self) if all(isinstance(each, str) for each in self) else format_range(self, form)


def fill_in(text: str, values: dict[str, Any]) -> str:
    """Return a text with `values` in its places: "{gains:.2f} ×" is a range where `gains` has several numbers."""
    several = {name: _Several(value) for name, value in values.items() if isinstance(value, list | tuple)}
    return text.format_map(values | several)


class Evidence:
    """The rows of a record: of the H200, or of builds if no GPU took part.

    `used` lists the records that a rule read, and `margin` is what its comparisons allowed, once it made one.
    """

    def __init__(self) -> None:
        self.used: list[str] = []
        self.margin: float | None = None
        self._kinds: set[str] = set()

    def __call__(self, experiment: str, **fields: Any) -> list[dict]:
        """Return the rows of a record that have these fields; FileNotFoundError if there is no record."""
        self.used.append(experiment)
        rows = [row for row in self.load(experiment) if fields.items() <= row.items()]
        self._kinds |= {margins.classify(row, experiment) for row in rows if row.get("ratio")}
        return rows

    def find_margin(self) -> float:
        """Return the largest margin of the kinds of timings that were read, or MARGIN if nothing was timed."""
        found = margins.find_margins(results.PREFERRED) if self._kinds else {}
        self.margin = max((found[kind] for kind in self._kinds), default=MARGIN)
        return self.margin

    def agrees(self, value: float, **said: Any) -> bool:
        """Return what `agrees` says with the margin of the rows that were read."""
        return agrees(value, margin=self.find_margin(), **said)

    def is_better(self, value: float, other: float) -> bool:
        """Return what `is_better` says with the margin of the rows that were read."""
        return is_better(value, other, self.find_margin())

    @contextlib.contextmanager
    def explain_errors(self, reader: str) -> Iterator[None]:
        """Turn what `reader` raises for rows without a field, or with a field of another type, into a ValueError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            records = " and ".join(dict.fromkeys(self.used))
            why = f"{type(error).__name__}: {device.first_line(error)}"
            raise ValueError(f"{reader} cannot be judged by {records} ({why}).") from error

    def load(self, experiment: str) -> list[dict]:
        """Return all rows of a record; FileNotFoundError without it, ValueError if it is damaged."""
        try:
            record = results.load(experiment, results.PREFERRED)
        except FileNotFoundError:
            record = results.load(experiment, results.NO_GPU.slug)
        if not record["rows"]:
            raise ValueError("the record has no rows")  # a rule about all rows would hold
        return record["rows"]


# ---- claims


@dataclasses.dataclass(frozen=True)
class Finding:
    """A verdict and its figure; `reason` is the condition of ONLY_IF, or says what is missing."""

    verdict: str
    figure: str
    reason: str = ""

    def describe(self) -> str:
        """Return the verdict in words: "holds only if the tile grows too"."""
        separator = " " if self.verdict in CONDITIONAL else ": "
        return f"{self.verdict}{separator}{self.reason}" if self.reason else self.verdict


@dataclasses.dataclass(frozen=True)
class Quote:
    """A few words of a field note, verbatim, and the heading of the section that they stand in."""

    words: str
    section: str
    note: str = ""  # the note's title, where it is not the claim's own

    def mark_words(self) -> str:
        """Return the words in quotation marks, without marks that Markdown would read."""
        words = self.words.replace("`", "").replace("**", "")
        for mark, written in (("|", "\\|"), ("*", "\\*"), ("<", "&lt;")):
            words = words.replace(mark, written)
        return f"“{words}”"

    def markdown(self) -> str:
        """Return the words with their place."""
        return f"{self.mark_words()} ({', '.join(filter(None, (self.note, self.section)))})"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim in our words, with its quotations; the first is of the note that the claim belongs to.

    `test` says in words what the rule asks ("holds if …"), `kind` is one of KINDS, and `judged_on` names what was
    measured, built for or read. `about` is the GPU that the note gives its figure for, where that is not an H200.
    `shown_in` is the notebook (its stem) and the heading of the cells that show the figure. `rule` names a function of
    RULES, and `given` holds its parameters. `figure`, `condition` and `missing` (why nothing that was measured decides)
    are texts with places for the rule's values, and `cases` holds other texts for the cases that a rule names.
    """

    name: str
    text: str
    quotes: tuple[Quote, ...]
    test: str
    shown_in: tuple[str, str]
    about: str
    rule: str
    kind: str = MEASURED
    judged_on: str = "NVIDIA H200"
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    figure: str = ""
    condition: str = ""
    missing: str = ""
    cases: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, name: str, note: dict[str, str], fields: dict[str, Any]) -> Claim:
        """Return the claim of a table in a note's file. Its rule has its name unless the table names another."""
        quotes = tuple(Quote(**quote) for quote in fields.pop("quotes"))
        shown_in = tuple(fields.pop("shown_in"))
        return cls(name, quotes=quotes, shown_in=shown_in, **{"about": note["about"], "rule": name} | fields)

    @property
    def path(self) -> pathlib.Path:
        """The notebook that shows the figure."""
        return ROOT / "notebooks" / f"{self.shown_in[0]}.ipynb"

    def judge(self) -> Judgement:
        """Return the judgement by today's records; ValueError if a record that the rule reads is damaged."""
        evidence = Evidence()
        try:
            with evidence.explain_errors(f"the claim {self.name!r}"):
                finding = self.apply(evidence)
        except FileNotFoundError:
            finding = Finding(NO_RECORD, "", evidence.used[-1])
        return Judgement(self, finding, tuple(dict.fromkeys(evidence.used)), evidence.margin)

    def apply(self, evidence: Evidence) -> Finding:
        """Return what the rule finds. A measurement of an H200 says of another GPU's figure only "on an H200"."""
        ruling = RULES[self.rule](evidence, **self.given)
        texts = {name: getattr(self, name) for name in ("figure", "condition", "missing")}
        texts |= self.cases.get(ruling.case, {})
        verdict, reason = REFUTED, ""
        if ruling.holds is None:
            verdict, reason = UNTESTED, texts["missing"]
        elif ruling.holds:
            verdict = HOLDS
        elif ruling.holds_then:
            verdict, reason = ONLY_IF, texts["condition"]
        if self.about and self.kind == MEASURED:
            verdict = ELSEWHERE.get(verdict, verdict)
        figure, reason = (fill_in(text, self.given | ruling.values) for text in (texts["figure"], reason))
        return Finding(verdict, figure, reason)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A claim, what its rule found, the records that the rule read, and the margin of its comparisons."""

    claim: Claim
    finding: Finding
    records: tuple[str, ...]
    margin: float | None = None

    def mark_verdict(self) -> str:
        """Return the verdict in words, with its name in bold."""
        return self.finding.describe().replace(self.finding.verdict, f"**{self.finding.verdict}**", 1)

    def link(self, folder: str) -> str:
        """Return a link to the cells that show the figure; `folder` leads from the text's file to the notebooks."""
        notebook, heading = self.claim.shown_in
        where = f"{notebook}, *{heading}*"
        if not self.claim.path.exists():
            return where
        # JupyterLab's anchor of a heading is its text with hyphens for spaces.
        anchor = urllib.parse.quote(heading.replace(" ", "-"), safe="-,:?'")
        return f"[{where}]({folder}{self.claim.path.name}#{anchor})"

    def markdown(self, folder: str) -> str:
        """Return a row of a table; `folder` leads from the table's file to the notebooks."""
        claim, finding = self.claim, self.finding
        said = "; ".join(quote.markdown() for quote in claim.quotes)
        found = "<br>".join(filter(None, (finding.figure, f"*Holds if {claim.test}.*")))
        evidence = f"{claim.kind}: {claim.judged_on}"
        if self.records:
            evidence += f"<br>from {', '.join(f'`{record}`' for record in self.records)}"
        if self.margin is not None:
            evidence += f"<br>margin {100 * self.margin:.1f} %"
        return (
            f"| {said}<br>{claim.text} | {self.mark_verdict()} | {found} | {evidence} | {self.link(folder)} |"
        )


class Note:
    """A field note, and the claims taken from it, in the order in which they are written down.

    `name` is that of its file. The table [note] holds title, summary and `about`, the GPU that the note is about. Every
    other table is a claim.
    """

    def __init__(self, name: str) -> None:
        tables = tomllib.loads((ROOT / "claims" / f"{name}.toml").read_text(encoding="utf-8"))
        note = tables.pop("note")
        self.title: str = note["title"]
        self.summary: str = note["summary"]
        self.claims = [Claim.read(name, note, fields) for name, fields in tables.items()]

    @functools.cached_property
    def judgements(self) -> list[Judgement]:
        """The claims, judged once per process."""
        return [claim.judge() for claim in self.claims]


# ---- tables


def count_outcomes(judgements: Iterable[Judgement]) -> list[int]:
    """Return how many claims hold, hold with a condition, do not hold, and have no verdict yet."""
    counts = collections.Counter(judgement.finding.verdict for judgement in judgements)
    return [
        sum(counts[name] for name in names)
        for names in ((HOLDS, HOLDS_HERE), CONDITIONAL, (REFUTED, NOT_HERE), (UNTESTED, NO_RECORD))
    ]


def count_verdicts(judgements: Iterable[Judgement]) -> str:
    """Return the counts of `count_outcomes` in a sentence."""
    hold, conditional, fail, missing = count_outcomes(judgements)
    total = hold + conditional + fail + missing
    return (
        f"Of {total} claims, {hold} hold{'s' * (hold == 1)}, {conditional} hold{'s' * (conditional == 1)} "
        f"with a condition, {fail} do{'es' * (fail == 1)} not hold, and {missing} "
        f"{'is' if missing == 1 else 'are'} not settled."
    )


def make_table(judgements: Iterable[Judgement], folder: str) -> str:
    """Return a Markdown table. `folder` stands before the name of a notebook in links: "notebooks/", or ""."""
    head = [
        "| the note's words, and what we take them to say | verdict | what we found | evidence | shown in |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(judgement.markdown(folder) for judgement in judgements)])
