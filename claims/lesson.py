"""The ten claims of the notebook `claims`: one for each kind of error, with a verdict that stays folded until asked."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from IPython.display import Markdown

from claims import judge, trial

ANSWERS = "holds", "only if", "fails", "open"
# What each claim teaches: the kind of its error, how to notice it, and a sentence that would have been safe.
LESSONS = {
    "memory": (
        "Its own datasheet contradicts it",
        "A rate above the datasheet's was not measured on that machine. This check takes a minute and needs no GPU, "
        "so it comes first.",
        "The datasheet gives the memory … GB/s. Our copy of … bytes reaches … % of it.",
    ),
    "tested_and_working": (
        "Nobody ran it",
        "A configuration that cannot be launched is easy to overlook where the autotuner passes over it in silence. "
        "Ask for a report with one line per configuration.",
        "… of the six were launched and gave the right result. The others were refused, for these reasons: …",
    ),
    "more_warps": (
        "A right effect with a wrong cause",
        "The note's larger tiles are faster than its cautious ones. But a cause is a claim of its own, and it needs a "
        "pair of kernels that differ in the cause alone.",
        "The larger tile gains …. It takes 8 warps because 4 have too few registers for it.",
    ),
    "small_k": (
        "A threshold from few failures",
        "Somebody lowered a number until the crash went away. The number does not decide. A property of the loop does, "
        "which the tried cases shared.",
        "This loop fails with these settings: …. We have tried no other loop.",
    ),
    "one_stage": (
        "No error",
        "With one stage there is no pipeline, so the pass that fails has nothing to do. A threshold with a reason "
        "behind it tends to hold.",
        "",
    ),
    "accumulators_slower": (
        "A kernel measured against itself",
        "Where a change leaves the kernel as it was, the measured difference is the noise of the measurement. Compare "
        "the compiled kernels before you compare their times.",
        "The change makes another kernel in … of three tests. There it costs … ± … %.",
    ),
    "same_kernel_twice": (
        "More digits than the noise allows",
        "Time a kernel twice before you compare two. The difference is the smallest one that you may report.",
        "The two timings of one kernel differ by … %, so we call less than that no difference.",
    ),
    "fewer_reads": (
        "A count of what the hardware does not count",
        "The note counts lanes that read. The hardware counts wavefronts. Name the counter, and read it in a profiler.",
        "With the search in lane 0 the profiler counts … wavefronts of shared memory, and … before.",
    ),
    "attention": (
        "A gain over a baseline without a name",
        "“Standard attention” may store all scores, or be FlashAttention-2. The factor depends on it.",
        "At this shape, on this GPU, it runs at … × FlashAttention-2, version ….",
    ),
    "figures_of_a_b200": (
        "No machine",
        "Without the machine the figure is neither right nor wrong. A result of another GPU does not refute it.",
        "On one B200 with this driver, the median of … runs is … TFLOP/s, and cuBLAS beside it reaches ….",
    ),
}


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
    kind, how, safe = LESSONS[name]
    lines = [
        "<details><summary>Verdict: unfold it after you have judged</summary>",
        f"{found.mark_verdict()}. {found.finding.figure}",
        f"**{kind}.** {how}",
        *([f"*Safe to say:* “{safe}”"] if safe else []),
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
