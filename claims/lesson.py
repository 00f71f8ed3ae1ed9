"""The ten claims of the notebook `claims`: one for each kind of error, with a verdict that stays folded until asked."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping

from IPython.display import Markdown

from claims import judge, trial
from tilelab.records import margins, results

ANSWERS = "holds", "only if", "fails", "open"
LESSONS = tomllib.loads((judge.ROOT / "claims" / "lesson.toml").read_text(encoding="utf-8"))


def show_differences() -> results.Table:
    """Return the table of how far kernels differ that were timed against themselves, as shares."""
    found = results.Record(results.load(margins.EXPERIMENT, results.PREFERRED), live=False)
    rows = [row for row in found.rows if row["way"] in margins.WAYS]
    caption = f"kernels against themselves, differences as shares; {found.label()}"
    return results.table(rows, caption, ["kind", "way", "pairs", "median", "largest", "spread"])


@functools.cache
def find(name: str) -> judge.Judgement:
    """Return today's judgement of a claim, without those of all others."""
    return next(claim for note in trial.NOTES for claim in note.claims if claim.name == name).judge()


def answer(name: str) -> str:
    """Return the one of ANSWERS that a claim's verdict amounts to, on whatever GPU."""
    return ANSWERS[judge.count_outcomes([find(name)]).index(1)]


def fold_verdict(name: str) -> Markdown:
    """Return the verdict of a claim, its figure, and the kind of its error, under a line to unfold."""
    found = find(name)
    lesson = LESSONS[name]
    lines = [
        "<details><summary>Verdict: unfold it after you have judged</summary>",
        f"{found.mark_verdict()}. {found.finding.figure}",
        f"**{lesson['kind']}.** {lesson['how']}",
        *([f"*Safe to say:* “{lesson['safe']}”"] if "safe" in lesson else []),
        f"Shown in {found.link('')}.",
        "</details>",
    ]
    return Markdown("\n\n".join(lines))


def compare(mine: Mapping[str, str]) -> str:
    """Return how many of the reader's answers agree with the verdicts, and a line for each that does not."""
    given = {name: said.strip().lower() for name, said in mine.items() if said.strip()}
    wrong = {name: said for name, said in given.items() if said != answer(name)}
    head = f"{len(given)} of {len(LESSONS)} claims judged, {len(given) - len(wrong)} as the rules judge them"
    lines = [
        f"  {find(name).claim.text} You said {said!r}, the rule {answer(name)!r}."
        for name, said in wrong.items()
    ]
    return "\n".join([head, *lines])


def check_gains(gain_grows: judge.Rule) -> None:
    """Raise AssertionError unless `gain_grows(evidence)` judges "larger matrices benefit more" by the rows."""

    def plant(*gains, more=()):
        speeds = [("conservative", n, 0.2) for n in (8192, 4096, 2048)] + [("conservative", 4096, 0.1), *more]
        speeds += [("proposed", n, 0.2 * gain) for n, gain in zip((2048, 4096, 8192), gains)]
        rows = [{"name": name, "shape": [n] * 3, "status": "ok", "ratio": ratio} for name, n, ratio in speeds]
        rows.append(
            {"name": "proposed", "shape": [8192] * 3, "status": "rejected", "reason": "it needs too much"}
        )
        return gain_grows(lambda _, **fields: [row for row in rows if fields.items() <= row.items()])

    grown = plant(1.5, 1.8, 1.9)
    assert grown.holds, "the note's own gains grow"
    assert [round(gain, 2) for gain in grown.values["gains"]] == [1.5, 1.8, 1.9], "in the order of the sizes"
    assert not plant(1.5, 1.51, 1.9).holds, "1.50 and 1.51 are no difference"
    assert not plant(1.5, 1.9, 1.8).holds, "it must grow from each size to the next"
    others = [("best", 8192, 0.9), ("proposed", 1024, 0.9), ("proposed", 2048, 0.1)]
    only = "only the fastest proposed tile counts, at the note's sizes"
    assert not plant(1.5, 1.9, 1.8, more=others).holds and plant(1.5, 1.8, 1.9, more=others).holds, only
    found, ruled = (rule(judge.Evidence()).holds for rule in (gain_grows, judge.RULES["gain_grows"]))
    assert found == ruled, "the rule judges the real record otherwise"
