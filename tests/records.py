"""What the tests of every chapter's records share."""

import json
from pathlib import Path

from tilelab import results

ROOT = Path(__file__).parents[1]


def held(name: str) -> dict:
    """The H200's record, wherever the tests run."""
    return json.loads((ROOT / "results" / results.PREFERRED / f"{name}.json").read_text())
