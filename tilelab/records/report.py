"""Write a report that is ready to file: a verdict, the facts behind it, and a script that shows what is reported.

Nothing is ever sent anywhere. A finder of faults says what it found in a few sections, and `write` does the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Script:
    """A program that shows what is reported and needs nothing of the course: its file, its text, how it is run."""

    file: str
    language: str
    text: str
    commands: str
    remark: str = ""


def make_table(head: Sequence[str], rows: Iterable[Sequence]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in lines)


def fence(text: str, language: str = "") -> str:
    """Return a text as a block of code."""
    return f"```{language}\n{text.rstrip()}\n```"


def write(
    title: str,
    verdict: str,
    environment: Iterable[tuple[str, str]],
    sections: Mapping[str, Sequence[str]],
    script: Script,
    search: str,
) -> str:
    """Return the report as Markdown. `sections` are paragraphs by heading; empty paragraphs are left out.

    `search` says what to search for before the report is filed.
    """
    shown = [f"`{script.file}`{script.remark}:", fence(script.text, script.language), fence(script.commands)]
    everything = {
        "Environment": [make_table(["what", "which"], environment)],
        **sections,
        "Reproducer": shown,
    }
    parts = [f"# {title}", verdict]
    for heading, paragraphs in everything.items():
        parts += [f"## {heading}", *filter(None, paragraphs)]
    return "\n\n".join([*parts, f"Before filing: search {search}."]) + "\n"
