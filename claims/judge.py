"""Claims, and how they are judged.

A claim is a sentence of a field note in our words, a rule that judges it, and the heading of the cells that show why.
A rule is a function of the evidence: it reads rows of records, or computes, and returns a finding. Its verdict and its
figure come from the same rows, and nothing else about a claim is written down, so nothing can be out of date.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import urllib.parse
from collections.abc import Callable, Iterable

from tilelab import device, results

ROOT = pathlib.Path(__file__).parents[1]
HOLDS, ONLY_IF, REFUTED, UNTESTED = "holds", "holds only if", "refuted", "cannot be tested here"
NO_RECORD = "not recorded yet"
VERDICTS = (HOLDS, ONLY_IF, REFUTED, UNTESTED, NO_RECORD)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A verdict and its figure; `reason` is the condition of ONLY_IF, or says what is missing."""

    verdict: str
    figure: str
    reason: str = ""

    def describe(self) -> str:
        """Return the verdict in words: "holds only if the tile grows too"."""
        separator = " " if self.verdict == ONLY_IF else ": "
        return f"{self.verdict}{separator}{self.reason}" if self.reason else self.verdict


def decide(is_true: bool, figure: str, condition: str = "", is_true_then: bool = True) -> Finding:
    """Return that a claim holds, or holds only if `condition` (where `is_true_then`), or is refuted."""
    if is_true:
        return Finding(HOLDS, figure)
    return Finding(ONLY_IF, figure, condition) if condition and is_true_then else Finding(REFUTED, figure)


class Evidence:
    """The rows of a record: of the H200, or of builds if no GPU took part. `used` lists the records asked for."""

    def __init__(self):
        self.used: list[str] = []

    def __call__(self, experiment: str, **fields) -> list[dict]:
        """Return the rows of a record that have these fields; FileNotFoundError if there is no record."""
        self.used.append(experiment)
        return [row for row in self.load(experiment) if fields.items() <= row.items()]

    @contextlib.contextmanager
    def explain_errors(self, reader: str):
        """Turn what `reader` raises for rows without a field, or with a field of another type, into a ValueError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
            records, why = " and ".join(dict.fromkeys(self.used)), f"{type(error).__name__}: {device.first_line(error)}"
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
class Claim:
    """A claim in our words; `notebook` (its stem) and `heading` name the cells that show the figure."""

    name: str
    text: str
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
                finding = self.rule(evidence)
        except FileNotFoundError:
            finding = Finding(NO_RECORD, "", evidence.used[-1])
        return Judgement(self, finding, tuple(evidence.used))


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A claim, what its rule found, and the records that the rule asked for."""

    claim: Claim
    finding: Finding
    records: tuple[str, ...]

    def markdown(self, folder: str) -> str:
        """Return a row of a table; `folder` leads from the table's file to the notebooks."""
        claim, finding = self.claim, self.finding
        where = f"{claim.notebook}, *{claim.heading}*"
        if claim.path.exists():  # JupyterLab's anchor of a heading is its text with hyphens for spaces
            anchor = urllib.parse.quote(claim.heading.replace(" ", "-"), safe="-,?'")
            where = f"[{where}]({folder}{claim.path.name}#{anchor})"
        verdict = finding.describe().replace(finding.verdict, f"**{finding.verdict}**", 1)
        return f"| {claim.text} | {verdict} | {finding.figure} | {where} |"


class Note:
    """A field note, and the claims taken from it, in the order in which they are written down."""

    def __init__(self, title: str):
        self.title = title
        self.claims: list[Claim] = []

    def claim(self, text: str, notebook: str, heading: str, name: str = ""):
        """Decorate a function, which becomes the rule of a new claim; its name is the claim's, unless one is given."""
        def add(rule):
            self.claims.append(Claim(name or rule.__name__, text, notebook, heading, rule))
            return rule
        return add

    @functools.cached_property
    def judgements(self) -> list[Judgement]:
        """The claims, judged once per process."""
        return [claim.judge() for claim in self.claims]


def count_verdicts(judgements: Iterable[Judgement]) -> str:
    """Return how many claims have each verdict, as in "14 claims (holds: 3, refuted: 11)"."""
    counts = collections.Counter(judgement.finding.verdict for judgement in judgements)
    return f"{counts.total()} claims ({', '.join(f'{name}: {counts[name]}' for name in VERDICTS if counts[name])})"


def make_table(judgements: Iterable[Judgement], folder: str) -> str:
    """Return a Markdown table; `folder` leads to the notebooks: "notebooks/" in the README, "" in a notebook."""
    head = ["| claim | verdict | figure | shown in |", "|---|---|---|---|"]
    return "\n".join([*head, *(judgement.markdown(folder) for judgement in judgements)])


def format_range(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest, as in "2.88 to 3.34"; one figure if both look the same."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in (ordered[0], ordered[-1])))
