"""All field notes with their claims, and what is written about them: CLAIMS.md and the README's verdicts."""

from __future__ import annotations

import collections

from ch10.wgmma_gemm.lesson import timeline
from claims import judge, rules
from claims.judge import NO_RECORD, ROOT, VERDICTS, Judgement, Note, count_verdicts, make_table
from tilelab.records import environment, margins, results

assert rules  # the notes name them
NOTES = [
    Note("tma_config_fix_proposal"),
    Note("tma_setup_guide_gb10"),
    Note("trajectory_resample_tma_status"),
    Note("triton_issue_descriptor_compile_failure"),
    Note("blockscaled_gemm_optimization_attempts"),
]
README, LEDGER, NOTEBOOK = ROOT / "README.md", ROOT / "CLAIMS.md", ROOT / "notebooks" / "claims.ipynb"
PICTURE = ROOT / "docs" / "timeline.png"  # the README's
BEGIN, END = "<!-- claims: written by python -m claims --write -->", "<!-- end of claims -->"
# The claims that the README shows, by name: for a reader who sees no other.
TELLING = ("tested_and_working", "speedup", "its_example", "memory", "tma_required", "attention")
HEAD = """\
# Claims on trial

Five field notes, written by others, make confident claims about TMA, Triton and block scaling. The notes are not part \
of this repository. This page quotes a few words of each claim, says how the claim was tested, and gives the verdict. \
`python -m claims --write` computes the page from the records in `results/`, and from the documents, rules and packages\
 that a row names.

[The five field notes](docs/field-notes.md) says who wrote the notes and when. The summaries below are ours."""


def draw_picture() -> None:
    """Draw the README's picture by the H200's record, and write the hash of its rows into the file."""
    record = results.load("ch10_gemm_timeline", results.PREFERRED)
    picture = timeline.draw_next_tile(results.Record(record, live=False))
    picture.savefig(PICTURE, metadata={"Source": environment.digest(record["rows"])})


def judge_all() -> list[Judgement]:
    """Return the judgements of all notes, each judged once per process."""
    return [judgement for note in NOTES for judgement in note.judgements]


def make_overview() -> str:
    """Return a table that counts the verdicts on each note. Where every test is recorded, no column says otherwise."""
    missing = any(judgement.finding.verdict == NO_RECORD for judgement in judge_all())
    verdicts = [name for name in VERDICTS if missing or name != NO_RECORD]
    head = ["note", "claims", *verdicts]
    rows = [head, ["---"] * len(head)]
    for title, judgements in [*((note.title, note.judgements) for note in NOTES), ("all", judge_all())]:
        counts = collections.Counter(judgement.finding.verdict for judgement in judgements)
        rows.append([title, str(counts.total()), *(str(counts[name] or "") for name in verdicts)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def make_policy() -> str:
    """Return how a claim is judged, with today's margins."""
    found = margins.describe_margins(margins.find_margins(results.PREFERRED))
    text = (ROOT / "claims" / "policy.md").read_text(encoding="utf-8").strip()
    return text.format_map(vars(judge) | {"MARGINS": "#"}).replace("%", " %").replace("#", found)


def make_ledger() -> str:
    """Return the text of CLAIMS.md: the counts, the policy, and a table for each note."""
    tables = [
        f"## {note.title}\n\n{note.summary}\n\n{make_table(note.judgements, 'notebooks/')}" for note in NOTES
    ]
    return "\n\n".join([HEAD, make_overview(), "## How a claim is judged", make_policy(), *tables]) + "\n"


def make_readme_part() -> str:
    """Return the text between the README's marks: the counts, and a table of the claims in TELLING."""
    chosen = {judgement.claim.name: judgement for judgement in judge_all()}
    rows = [
        "| claim | verdict | what we found |",
        "|---|---|---|",
        *(
            f"| {each.claim.text} | {each.mark_verdict()} | {each.finding.figure} |"
            for each in (chosen[name] for name in TELLING)
        ),
    ]
    return "\n\n".join([f"{BEGIN}\n{count_verdicts(chosen.values())}", "\n".join(rows), END])


def rewrite_table(readme: str) -> str:
    """Return the README's text with today's table; ValueError unless each mark is there once, in order."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"README.md must hold the lines {BEGIN} and {END} once each, in this order.")
    return before + make_readme_part() + after
