"""Does a lesson take the time that it states? Its words, lines of code, visible table rows and cells are counted.

Readers with a clock took a minute for 200 words, and six seconds for a line of code.
"""

import json
import math
import re

import pytest

from tilelab import ROOT

MOST = {"words": 3800, "code lines": 350, "table rows": 45, "cells": 40}
RUN_MINUTES = 1  # on a GPU no notebook runs longer, and without one it shows records
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def count(path):
    """Count what a reader meets: prose with answers and exercises, code, and the rows of tables that are not folded.

    Code blocks, addresses of links and the texts of pictures are no prose. The heading of a table is a row.
    """
    found = dict.fromkeys(MOST, 0)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        found["cells"] += 1
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            found["code lines"] += sum(bool(line.strip()) for line in source.splitlines())
            shown = ["".join(output.get("data", {}).get("text/html", "")) for output in cell["outputs"]]
            found["table rows"] += sum(
                re.sub(r"(?s)<details>.*?</details>", "", text).count("<tr") for text in shown
            )
            continue
        text = re.sub(r"(?s)```.*?```|!\[.*?\]\([^)]*\)|(?<=\])\([^)]*\)|<[^>]*>", "", source)
        found["words"] += sum(bool(re.search(r"\w", word)) for word in text.split())
        found["table rows"] += len(re.findall(r"(?m)^\|(?!-)", text))
    return found


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_is_short_and_takes_the_time_that_it_states(path):
    found = count(path)
    assert not {what: (found[what], most) for what, most in MOST.items() if found[what] > most}
    minutes = found["words"] / 200 + found["code lines"] / 10 + RUN_MINUTES
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    assert int(re.search(r"\*\*Time:\*\* (\d+) minutes", first)[1]) == 5 * math.ceil(minutes / 5), minutes


def test_every_table_states_the_same_minutes():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        stated = re.search(r"\*\*Time:\*\* (\d+) minutes", first)[1]
        start = (ROOT / "notebooks" / "00_start.ipynb").read_text(encoding="utf-8")
        for text in ((ROOT / "README.md").read_text(encoding="utf-8"), start):
            rows = re.findall(rf"\[`{path.stem}`\]\([^)]*\) \| (\d+) \|", text)
            assert rows in ([stated], [] if path.stem == "00_start" else [stated]), path.stem
