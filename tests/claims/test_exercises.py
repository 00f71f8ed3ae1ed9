"""The checks in the notebook `claims`: the solutions pass, and each planted wrong answer fails."""

import json

import pytest
from cases import cases

from claims import judge
from claims import lesson as ten_claims
from tilelab import ROOT
from tilelab.cells import lesson

NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "claims.ipynb")
FLOOR = 'max(figure["bytes"] / (sheet["gbps"] * 1e3), figure["flops"] / (sheet["tflops"] * 1e6))'


def run(name, *change):
    """Run the check of the cell that defines a function of the solutions, in which one piece of text is changed."""
    cell = next(text for text in SOLUTIONS if f"def {name}(" in text)
    answer, _, test = cell.partition("check.check")[0].partition("\n\n\ndef test")
    assert not change or change[0] in answer
    names = {"judge": judge}
    exec((answer.replace(*change) if change else answer) + (test and "\n\n\ndef test" + test), names)
    names["test"]() if test else ten_claims.check_gains(names[name])


@pytest.mark.parametrize("name", ["impossible", "kept_descriptor", "settled", "gain_grows"])
def test_the_solutions_pass_and_the_notebook_has_the_same_check(name):
    run(name)
    cells = json.loads((NOTEBOOKS / "claims.ipynb").read_text())["cells"]
    given = next(
        text for cell in cells if f"def {name}(" in (text := "".join(cell["source"])) and "raise Not" in text
    )
    solved = next(text for text in SOLUTIONS if f"def {name}(" in text)
    mark = "def test" if "def test" in solved else "check.check"
    assert given[given.index(mark) :] == solved[solved.index(mark) :]


@cases(
    "name, change",
    ("impossible", (FLOOR, "sum" + FLOOR.removeprefix("max").replace("(figure", "((figure", 1) + ")")),
    ("impossible", ("max(figure", "min(figure")),
    ("impossible", ("1e3", "1e6")),
    ("impossible", ('sheets[figure["gpu"]]', 'sheets["A"]')),
    ("impossible", ("< floor_us", "<= floor_us")),
    ("gain_grows", (', status="ok"', "")),
    ("gain_grows", ("max(row", "min(row")),
    ("gain_grows", ("map(judge.is_better, gains[1:], gains)", "a > b for a, b in zip(gains[1:], gains)")),
    ("kept_descriptor", ('us["host, kept"] - us["pointers"]', "[*us.values()][2] - [*us.values()][0]")),
    ("kept_descriptor", ("more <= limit_us", "more <= 2")),
    ("kept_descriptor", ("more_us=more", "more_us=abs(more)")),
    ("settled", ("said * (1 + spread)", "said")),
    ("settled", ("said * (1 - spread)", "said")),
    ("settled", ("said * (1 + spread)", "said + spread")),
    ("settled", ("min(ratios)", "max(ratios)")),
    ("settled", ("min(ratios)", "ratios[0]")),
)
def test_a_wrong_answer_fails(name, change):
    with pytest.raises((AssertionError, KeyError)):
        run(name, *change)
