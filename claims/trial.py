"""All field notes with their claims, and the README's table of verdicts."""

from __future__ import annotations

from claims import (
    blockscaled_gemm_optimization_attempts,
    tma_config_fix_proposal,
    tma_setup_guide_gb10,
    trajectory_resample_tma_status,
    triton_issue_descriptor_compile_failure,
)
from claims.judge import ROOT, Judgement, count_verdicts, make_table

NOTES = [module.NOTE for module in (tma_config_fix_proposal, tma_setup_guide_gb10, trajectory_resample_tma_status,
                                    triton_issue_descriptor_compile_failure, blockscaled_gemm_optimization_attempts)]
README, NOTEBOOK = ROOT / "README.md", ROOT / "notebooks" / "01_claims.ipynb"
BEGIN, END = "<!-- claims: written by python -m claims --write -->", "<!-- end of claims -->"


def judge_all() -> list[Judgement]:
    """Return the judgements of all notes, each judged once per process."""
    return [judgement for note in NOTES for judgement in note.judgements]


def make_readme_part() -> str:
    """Return the text between the marks: the counts, and a folded table for each note."""
    folded = (f"<details>\n<summary>{note.title}: {count_verdicts(note.judgements)}</summary>\n\n"
              f"{make_table(note.judgements, 'notebooks/')}\n\n</details>" for note in NOTES)
    return "\n\n".join([f"{BEGIN}\n{count_verdicts(judge_all())}.", *folded, END])


def rewrite_table(readme: str) -> str:
    """Return the README's text with today's table; ValueError unless each mark is there once, in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"README.md must hold the lines {BEGIN} and {END} once each, in this order.")
    return before + make_readme_part() + after
