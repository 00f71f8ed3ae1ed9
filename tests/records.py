"""What the tests of every chapter's records share."""

import json
import re
from pathlib import Path

from tilelab import results

ROOT = Path(__file__).parents[1]


def held(name: str) -> dict:
    """The H200's record: the README's figures are from it, wherever the tests run."""
    return json.loads((ROOT / "results" / results.PREFERRED / f"{name}.json").read_text())


def readme_row(notebook: str) -> str:
    """The line of the README's table about a notebook."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return next(line for line in lines if f"(notebooks/{notebook}.ipynb) |" in line)


def states(notebook: str, pattern: str, values) -> None:
    """The README's line about a notebook holds `pattern`, and each of its groups is a value, to the digits shown."""
    stated = re.search(pattern.replace("NUMBER", r"(\d+(?:\.\d+)?)"), readme_row(notebook)).groups()
    digits = [len(figure.partition(".")[2]) for figure in stated]
    assert stated == tuple(f"{value:.{places}f}" for value, places in zip(values, digits, strict=True))
