"""What a claim is: a sentence of a field note in our words, a rule that judges it, and the cell that shows why.

A rule is a function of the evidence. It reads rows of records (or computes), and returns a finding: the verdict and the
figure, both from the same rows. Nothing else of a claim is written down, so nothing else can be out of date.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import urllib.parse
from collections.abc import Callable, Iterable

from tilelab import results

ROOT = pathlib.Path(__file__).parents[1]
HOLDS, ONLY_IF, REFUTED, UNTESTED = "holds", "holds only if", "refuted", "cannot be tested here"
NO_RECORD = "not recorded yet"
VERDICTS = (HOLDS, ONLY_IF, REFUTED, UNTESTED, NO_RECORD)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A verdict and the figure behind it; `why` is the condition of ONLY_IF, or what is missing."""

    verdict: str
    figure: str
    why: str = ""

    def told(self) -> str:
        """The verdict in words: "holds only if the tile grows too"."""
        return f"{self.verdict}{' ' if self.verdict == ONLY_IF else ': '}{self.why}" if self.why else self.verdict


def holds(figure: str) -> Finding:
    return Finding(HOLDS, figure)


def refuted(figure: str) -> Finding:
    return Finding(REFUTED, figure)


def decide(so: bool, figure: str) -> Finding:
    """Holds or refuted."""
    return holds(figure) if so else refuted(figure)


def only_if(condition: str, figure: str) -> Finding:
    return Finding(ONLY_IF, figure, condition)


def untested(why: str, figure: str) -> Finding:
    return Finding(UNTESTED, figure, why)


class Evidence:
    """The rows of a record, of the H200 or, where no GPU has a part, of builds; `used` says which were asked for."""

    def __init__(self):
        self.used: list[str] = []

    def __call__(self, experiment: str) -> list[dict]:
        """FileNotFoundError where there is no such record."""
        self.used.append(experiment)
        try:
            return results.load(experiment, results.PREFERRED)["rows"]
        except FileNotFoundError:
            return results.load(experiment, results.NO_GPU.slug)["rows"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """`text` is the claim in our words; `notebook` (its stem) and `heading` name the cells that show the figure."""

    text: str
    notebook: str
    heading: str
    rule: Callable[[Evidence], Finding]

    @property
    def name(self) -> str:
        return self.rule.__name__

    @property
    def path(self) -> pathlib.Path:
        return ROOT / "notebooks" / f"{self.notebook}.ipynb"

    def judged(self) -> Judged:
        evidence = Evidence()
        try:
            finding = self.rule(evidence)
        except FileNotFoundError:
            finding = Finding(NO_RECORD, "", evidence.used[-1])
        return Judged(self, finding, tuple(evidence.used))


@dataclasses.dataclass(frozen=True)
class Judged:
    """A claim, what its rule found, and the records that it asked for."""

    claim: Claim
    finding: Finding
    records: tuple[str, ...]

    def markdown(self, folder: str) -> str:
        """A row of a table; `folder` leads from where the table stands to the notebooks."""
        claim, finding = self.claim, self.finding
        where = f"{claim.notebook}, *{claim.heading}*"
        if claim.path.exists():  # JupyterLab's anchor of a heading is its text, with a hyphen for each space
            anchor = urllib.parse.quote(claim.heading.replace(" ", "-"), safe="-,?'")
            where = f"[{where}]({folder}{claim.path.name}#{anchor})"
        verdict = finding.told().replace(finding.verdict, f"**{finding.verdict}**", 1)
        return f"| {claim.text} | {verdict} | {finding.figure} | {where} |"


class Note:
    """A field note, by its title, and the claims taken from it, in the order in which they are written down."""

    def __init__(self, title: str):
        self.title = title
        self.claims: list[Claim] = []

    def claim(self, text: str, notebook: str, heading: str):
        """Decorator: the function becomes the rule of a claim."""
        def take(rule):
            self.claims.append(Claim(text, notebook, heading, rule))
            return rule
        return take

    def judged(self) -> list[Judged]:
        return [claim.judged() for claim in self.claims]


def counted(judged: Iterable[Judged]) -> str:
    """How many have each verdict: "14 claims (holds: 3, refuted: 11)", say."""
    found = collections.Counter(each.finding.verdict for each in judged)
    return f"{found.total()} claims ({', '.join(f'{name}: {found[name]}' for name in VERDICTS if found[name])})"


def table(judged: Iterable[Judged], folder: str) -> str:
    """Markdown; `folder` leads to the notebooks: "notebooks/" for the README, nothing for a notebook."""
    head = ["| claim | verdict | figure | shown in |", "|---|---|---|---|"]
    return "\n".join([*head, *(each.markdown(folder) for each in judged)])


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The least and the largest: "2.88 to 3.34"; one figure where both are written alike."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{end:{form}}" for end in (ordered[0], ordered[-1])))
