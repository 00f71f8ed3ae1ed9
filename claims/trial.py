"""All notes and their claims, judged; and the table of them in the README."""

from __future__ import annotations

import functools

from claims import (
    blockscaled_gemm_optimization_attempts,
    tma_config_fix_proposal,
    tma_setup_guide_gb10,
    trajectory_resample_tma_status,
    triton_issue_descriptor_compile_failure,
)
from claims.judge import ROOT, Judged, Note, counted, table

NOTES = [module.NOTE for module in (tma_config_fix_proposal, tma_setup_guide_gb10, trajectory_resample_tma_status,
                                    triton_issue_descriptor_compile_failure, blockscaled_gemm_optimization_attempts)]
README, NOTEBOOK = ROOT / "README.md", ROOT / "notebooks" / "01_claims.ipynb"
BEGIN, END = "<!-- claims: written by python -m claims --write -->", "<!-- end of claims -->"


@functools.cache
def judged(note: Note) -> list[Judged]:
    """The claims of one of NOTES, judged once a process."""
    return note.judged()


def every() -> list[Judged]:
    return [each for note in NOTES for each in judged(note)]


def readme_part() -> str:
    """What stands between the marks: counts in sight, tables folded."""
    folded = (f"<details>\n<summary>{note.title}: {counted(judged(note))}</summary>\n\n"
              f"{table(judged(note), 'notebooks/')}\n\n</details>" for note in NOTES)
    return "\n\n".join([f"{BEGIN}\n{counted(every())}.", *folded, END])


def rewritten(text: str) -> str:
    """The README with today's table. ValueError where the marks do not stand there once each, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"README.md must hold the lines {BEGIN} and {END} once each, in this order.")
    return before + readme_part() + after
