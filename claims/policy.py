"""State in words how claims are judged. CLAIMS.md and the notebook `claims` print it."""

from __future__ import annotations

from claims.judge import (
    ABOUT,
    ARGUMENT,
    ARITHMETIC,
    BUILT,
    DATASHEET,
    HOLDS,
    HOLDS_HERE,
    MARGIN,
    MEASURED,
    NO_RECORD,
    NOT_HERE,
    ONLY_IF,
    QUICK_MARGIN,
    REFUTED,
    UNTESTED,
)

VERDICTS = f"""\
| verdict | when |
|---|---|
| **{HOLDS}** | The test passes as the claim stands. |
| **{ONLY_IF}** … | The test passes with a condition that the note leaves out, and fails without it. |
| **{REFUTED}** | The test fails, on the GPU or for the target that the note names, or where no GPU takes part. |
| **{HOLDS_HERE}**, **{HOLDS_HERE} only if** …, **{NOT_HERE}** | The note gives its figure for another GPU, and an \
H200 was measured. This says what an H200 does. It cannot refute the note's figure. |
| **{UNTESTED}** | The GPU, the program or the measurement that would decide is missing. The row says which. |
| **{NO_RECORD}** | The test exists, and its measurement has not been recorded. |"""

KINDS = f"""\
| kind of evidence | what it is |
|---|---|
| {MEASURED} | Times or counters of an H200, from `results/`, each with date, versions and a hash of the \
measured code. The row names the records. |
| {BUILT} | What a compiler made for the named target, or why it refused. No GPU takes part. |
| {ARITHMETIC} | A calculation from the note's own figures, from rules of the hardware, or from datasheet rates. |
| {DATASHEET} | A figure of the manufacturer. |
| {ARGUMENT} | Documentation, or the files of a package. The row names them. |"""

MARGINS = f"""\
**Margins.** Two timings that alternate in one run count as different if they differ by more than {MARGIN:.0%}; quick \
timings of a sweep, by more than {QUICK_MARGIN:.0%}. A claimed gain is taken as "at least": a larger gain passes. A \
claimed range or band has two ends, each widened by {MARGIN:.0%}; the four bands of the last note are compared to the \
whole percent. "About" allows {ABOUT:.0%} more or less.

**Counting.** A claim that several notes make is one row, with a quotation from each. A row states its test, so that \
you can see what would have given another verdict."""

POLICY = "\n\n".join([VERDICTS, KINDS, MARGINS]).replace("%", " %")
