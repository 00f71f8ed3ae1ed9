"""The checks in the notebook `claims`: the solutions pass, and each planted wrong answer fails."""

import json

import pytest

from claims import judge
from tilelab import ROOT
from tilelab.cells import lesson

NOTEBOOKS = ROOT / "notebooks"
SOLUTIONS = lesson.notebook_texts(NOTEBOOKS / "solutions" / "claims.ipynb")


def run(name, *change):
    """Run the check of the cell that defines a function of the solutions, in which one piece of text is changed."""
    cell = next(text for text in SOLUTIONS if f"def {name}(" in text)
    answer, _, test = cell.partition("\n\n\ndef test")
    assert not change or change[0] in answer
    names = {"judge": judge}
    exec(
        (answer.replace(*change) if change else answer) + "\n\n\ndef test" + test.partition("check.check")[0],
        names,
    )
    names["test"]()


@pytest.mark.parametrize("name", ["kept_descriptor", "settled"])
def test_the_solutions_pass_and_the_notebook_has_the_same_check(name):
    run(name)
    cells = json.loads((NOTEBOOKS / "claims.ipynb").read_text())["cells"]
    given = next(
        text for cell in cells if f"def {name}(" in (text := "".join(cell["source"])) and "raise Not" in text
    )
    solved = next(text for text in SOLUTIONS if f"def {name}(" in text)
    assert given[given.index("def test") :] == solved[solved.index("def test") :]


@pytest.mark.parametrize(
    "name, change",
    [
        ("kept_descriptor", ('us["host, kept"] - us["pointers"]', "[*us.values()][2] - [*us.values()][0]")),
        ("kept_descriptor", ("more <= limit_us", "more <= 2")),
        ("kept_descriptor", ("more <= limit_us", "True")),
        ("kept_descriptor", ("more_us=more", "more_us=abs(more)")),
        ("settled", ("said * (1 + spread)", "said")),
        ("settled", ("said * (1 - spread)", "said")),
        ("settled", ("said * (1 + spread)", "said + spread")),
        ("settled", ("min(ratios)", "max(ratios)")),
        ("settled", ("min(ratios)", "sum(ratios) / len(ratios)")),
        ("settled", ("min(ratios)", "ratios[0]")),
        ("settled", ("max(ratios) <=", "ratios[-1] <=")),
    ],
)
def test_a_wrong_answer_fails(name, change):
    with pytest.raises(AssertionError):
        run(name, *change)
