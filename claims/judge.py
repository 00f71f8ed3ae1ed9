"""Claims, and how they are judged.

A claim is a sentence in our words, with a short quotation from a field note. It has a test in words, a rule that
carries out this test, and the heading of the cells that show why. A rule is a function of the evidence: it reads rows
of records, or builds, or computes, and returns a finding. The verdict and the figure come from the same rows, so
neither can be out of date. `claims.policy` states in words how claims are judged.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import urllib.parse
from collections.abc import Callable, Iterable

from tilelab import ROOT
from tilelab.records import results
from tilelab.runtime import device

HOLDS, ONLY_IF, REFUTED, UNTESTED = "holds", "holds only if", "refuted", "not settled"
# The verdicts on a figure that a note gives for another GPU, where this one was measured.
HOLDS_HERE, ONLY_IF_HERE, NOT_HERE = "holds on an H200", "holds on an H200 only if", "not on an H200"
ELSEWHERE = {HOLDS: HOLDS_HERE, ONLY_IF: ONLY_IF_HERE, REFUTED: NOT_HERE}
NO_RECORD = "not recorded yet"
VERDICTS = (HOLDS, ONLY_IF, REFUTED, HOLDS_HERE, ONLY_IF_HERE, NOT_HERE, UNTESTED, NO_RECORD)
CONDITIONAL = (ONLY_IF, ONLY_IF_HERE)
MEASURED, BUILT, ARITHMETIC, DATASHEET, ARGUMENT = "measured", "built", "arithmetic", "datasheet", "argument"
KINDS = (MEASURED, BUILT, ARITHMETIC, DATASHEET, ARGUMENT)

MARGIN = 0.02  # of two timings that alternate in one run
QUICK_MARGIN = 0.05  # of the quick timings of a sweep
ABOUT = 0.2  # "about 2" means 1.6 to 2.4


def is_at_least(value: float, claimed: float) -> bool:
    """Return whether a measured value is at least the claimed one, less a tolerance of MARGIN."""
    return value >= claimed * (1 - MARGIN)


def is_within(value: float, low: float, high: float) -> bool:
    """Return whether a measured value lies between two claimed ones, each widened by MARGIN."""
    return low * (1 - MARGIN) <= value <= high * (1 + MARGIN)


def is_better(value: float, other: float, margin: float = MARGIN) -> bool:
    """Return whether one measured value exceeds another by more than the margin."""
    return value > other * (1 + margin)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A verdict and its figure; `reason` is the condition of ONLY_IF, or says what is missing.

    `evidence` replaces the claim's own kind of evidence, where the measurement of the claim has not been recorded.
    """

    verdict: str
    figure: str
    reason: str = ""
    evidence: str = ""

    def describe(self) -> str:
        """Return the verdict in words: "holds only if the tile grows too"."""
        separator = " " if self.verdict in CONDITIONAL else ": "
        return f"{self.verdict}{separator}{self.reason}" if self.reason else self.verdict


def decide(is_true: bool, figure: str, condition: str = "", is_true_then: bool = True) -> Finding:
    """Return that a claim holds, or holds only if `condition` (where `is_true_then`), or is refuted."""
    if is_true:
        return Finding(HOLDS, figure)
    return Finding(ONLY_IF, figure, condition) if condition and is_true_then else Finding(REFUTED, figure)


class Evidence:
    """The rows of a record: of the H200, or of builds if no GPU took part.

    `used` lists the records that a rule needs, and `found` lists the other records that it read.
    """

    def __init__(self):
        self.used: list[str] = []
        self.found: list[str] = []

    def __call__(self, experiment: str, **fields) -> list[dict]:
        """Return the rows of a record that have these fields; FileNotFoundError if there is no record."""
        self.used.append(experiment)
        return [row for row in self.load(experiment) if fields.items() <= row.items()]

    def find(self, experiment: str, **fields) -> list[dict]:
        """Return the same, or no rows if there is no record: for a rule that then judges by other evidence."""
        try:
            rows = self.load(experiment)
        except FileNotFoundError:
            return []
        self.found.append(experiment)
        return [row for row in rows if fields.items() <= row.items()]

    @contextlib.contextmanager
    def explain_errors(self, reader: str):
        """Turn what `reader` raises for rows without a field, or with a field of another type, into a ValueError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            records = " and ".join(dict.fromkeys(self.used + self.found))
            why = f"{type(error).__name__}: {device.first_line(error)}"
            raise ValueError(f"{reader} cannot be judged by {records} ({why}).") from error

    def load(self, experiment: str) -> list[dict]:
        try:
            record = results.load(experiment, results.PREFERRED)
        except FileNotFoundError:
            record = results.load(experiment, results.NO_GPU.slug)
        if not record["rows"]:
            raise ValueError("the record has no rows")  # a rule about all rows would hold
        return record["rows"]


@dataclasses.dataclass(frozen=True)
class Quote:
    """A few words of a field note, verbatim, and the heading of the section that they stand in."""

    words: str
    section: str
    note: str = ""  # the note's title, where it is not the claim's own

    def markdown(self) -> str:
        words = (
            self.words.replace("|", "\\|")
            .replace("`", "")
            .replace("**", "")
            .replace("*", "\\*")
            .replace("<", "&lt;")
        )
        return f"“{words}” ({', '.join(filter(None, (self.note, self.section)))})"


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim in our words, with its quotations; the first is of the note that the claim belongs to.

    `test` says in words what the rule asks ("holds if …"), `kind` is one of KINDS, and `judged_on` names what was
    measured, built for or read. `about` is the GPU that the note gives its figure for, where that is not an H200.
    `notebook` (its stem) and `heading` name the cells that show the figure.
    """

    name: str
    text: str
    quotes: tuple[Quote, ...]
    test: str
    kind: str
    judged_on: str
    about: str
    notebook: str
    heading: str
    rule: Callable[[Evidence], Finding]

    @property
    def path(self) -> pathlib.Path:
        return ROOT / "notebooks" / f"{self.notebook}.ipynb"

    def judge(self) -> Judgement:
        """Return the judgement by today's records; ValueError if a record that the rule reads is damaged."""
        evidence = Evidence()
        try:
            with evidence.explain_errors(f"the claim {self.name!r}"):
                finding = self.apply(evidence)
        except FileNotFoundError:
            finding = Finding(NO_RECORD, "", evidence.used[-1])
        return Judgement(self, finding, tuple(evidence.used), tuple(evidence.found))

    def apply(self, evidence) -> Finding:
        """Return what the rule finds. A measurement of an H200 says of another GPU's figure only "on an H200"."""
        finding = self.rule(evidence)
        if self.about and self.kind == MEASURED:
            return dataclasses.replace(finding, verdict=ELSEWHERE.get(finding.verdict, finding.verdict))
        return finding


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A claim, what its rule found, the records that the rule needs, and others that it also read."""

    claim: Claim
    finding: Finding
    records: tuple[str, ...]
    others: tuple[str, ...] = ()

    def mark_verdict(self) -> str:
        """Return the verdict in words, with its name in bold."""
        return self.finding.describe().replace(self.finding.verdict, f"**{self.finding.verdict}**", 1)

    def markdown(self, folder: str) -> str:
        """Return a row of a table; `folder` leads from the table's file to the notebooks."""
        claim, finding = self.claim, self.finding
        where = f"{claim.notebook}, *{claim.heading}*"
        if claim.path.exists():  # JupyterLab's anchor of a heading is its text with hyphens for spaces
            anchor = urllib.parse.quote(claim.heading.replace(" ", "-"), safe="-,:?'")
            where = f"[{where}]({folder}{claim.path.name}#{anchor})"
        said = "; ".join(quote.markdown() for quote in claim.quotes)
        found = "<br>".join(filter(None, (finding.figure, f"*Holds if {claim.test}.*")))
        evidence = finding.evidence or f"{claim.kind}: {claim.judged_on}"
        if records := dict.fromkeys((*self.records, *self.others)):
            evidence += f"<br>from {', '.join(f'`{record}`' for record in records)}"
        return f"| {claim.text}<br>{said} | {self.mark_verdict()} | {found} | {evidence} | {where} |"


class Note:
    """A field note, and the claims taken from it, in the order in which they are written down."""

    def __init__(self, title: str, about: str, summary: str):
        self.title, self.about, self.summary = title, about, summary
        self.claims: list[Claim] = []

    def claim(
        self,
        text: str,
        quotes: Quote | tuple[Quote, ...],
        cell: tuple[str, str],
        test: str,
        kind: str = MEASURED,
        judged_on: str = "NVIDIA H200",
        about: str | None = None,
        name: str = "",
    ):
        """Decorate a function, which becomes the rule of a new claim; its name is the claim's, unless one is given.

        `cell` is a notebook and a heading in it. `about` is the note's GPU unless another is given; "" means that the
        claim names none.
        """

        def add(rule):
            said = quotes if isinstance(quotes, tuple) else (quotes,)
            self.claims.append(
                Claim(
                    name or rule.__name__,
                    text,
                    said,
                    test,
                    kind,
                    judged_on,
                    self.about if about is None else about,
                    *cell,
                    rule,
                )
            )
            return rule

        return add

    @functools.cached_property
    def judgements(self) -> list[Judgement]:
        """The claims, judged once per process."""
        return [claim.judge() for claim in self.claims]


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
        "| claim, and the note's words | verdict | what we found | evidence | shown in |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(judgement.markdown(folder) for judgement in judgements)])


def format_range(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest, as in "2.88 to 3.34"; one figure if both look the same."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in (ordered[0], ordered[-1])))
