"""Does the list of figures name what nothing holds, and nothing else?"""

import collections
import json
import re

import pytest

from tilelab.course import figures


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Return a function that checks a paragraph behind a table of two versions, and returns the figures that fail."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results" / "nvidia-h200").mkdir(parents=True)
    rows = [{"name": name, "ratio": ratio} for name, ratio in (("ring", 0.8375), ("plain", 0.61))]
    (tmp_path / "results/nvidia-h200/ch07_copy.json").write_text(json.dumps({"rows": rows}))

    def check(paragraph, ring="0.837", code="", since=""):
        rows = "version|µs|× torch|±", "plain|150.2|0.701|0.02", f"ring|123.4|{ring}|0.02"
        page = "".join("<tr><td>" + row.replace("|", "</td><td>") + "</td></tr>" for row in rows)
        outputs = (
            {"data": {"text/html": f"<table>{page}</table>"}},
            {"text": "median cycles: load 852, step 532"},
        )
        cells = (
            {"cell_type": "code", "source": code, "outputs": outputs},
            {"cell_type": "markdown", "source": paragraph},
        )
        (tmp_path / "notebooks/lesson.ipynb").write_text(json.dumps({"cells": cells}))
        figures.read_text.cache_clear()
        figures.read_record.cache_clear()
        return [figure.text for _, _, figure, _ in figures.check("notebooks/lesson.ipynb", since)]

    return check


@pytest.mark.parametrize(
    "held",
    [
        "The ring runs at 0.84 × torch, the plain copy at 0.70.",
        "The ring takes 123 µs, or 0.123 ms; about 850 cycles are a load's.",
        "The ring takes 123.4 / 150.2 = 0.82 times the time of the plain copy.",
        "In the record `ch07_copy` the plain copy has 0.61 × torch.",
        "That is 4,200 GB/s × 0.75 µs / 132 = 23.9. <!-- figures: 4,200 GB/s, 0.75 µs -->",
        "The exponentials take 64 × 128 / 16, or 512 cycles.",
        "A GPU's datasheet says 4,800 GB/s, and the note promises 1.5 times the speed.",
        '> *"1.2-1.5x improvement"* is not so. A tile of 128 × `n` takes 20 steps with torch 2.11, in `0.25 (a + b)`.',
    ],
)
def test_what_a_cell_a_record_or_an_expression_holds_is_not_listed(checked, held):
    assert not checked(held)


@pytest.mark.parametrize(
    "prose, listed",
    [
        ("The ring runs at 0.87 × torch, the plain copy at 0.70.", ["0.87 ×"]),
        ("The ring takes 133 µs, and 0.62 to 0.84 of the time.", ["133 µs", "0.62"]),
        ("A load takes about 950 cycles.", ["950 cycles"]),
        ("The ring is 31 % faster, and 123.4 / 160.2 = 0.87 times as fast.", ["31 %", "0.87 times"]),
        ("It reaches over 0.9 × torch.", ["0.9 ×"]),
    ],
)
def test_what_nothing_holds_is_listed(checked, prose, listed):
    assert checked(prose) == listed


def test_a_figure_must_stand_where_it_stood_before_the_recording(checked, monkeypatch):
    prose = "The ring runs at 0.84 × torch."
    assert not checked(prose, ring="0.837")
    old = figures.read("notebooks/lesson.ipynb")
    monkeypatch.setattr(figures, "read", lambda path, rev="", now=figures.read: old if rev else now(path))
    assert not checked(prose, ring="0.841", since="HEAD")
    assert checked(prose, ring="0.79", code="LIMIT = 0.84", since="HEAD") == ["0.84 ×"]
    (line,) = figures.describe_unheld("notebooks/lesson.ipynb", "HEAD")
    assert line.endswith('"The ring runs at 0.84 × torch." → 0.84 ×; now: 0.79 at [0] ring, × torch')
    assert not checked(prose, ring="0.79", code="LIMIT = 0.84")


@pytest.mark.parametrize("path", figures.list_files())
def test_every_figure_of_the_course_stands_somewhere(path):
    others = set(re.findall(r"(?:measured|recorded) on (NVIDIA [\w ]+)", figures.read(path))) - {
        "NVIDIA H200"
    }
    if path.endswith(".ipynb") and others:
        pytest.skip("the prose tells of an H200")
    assert not list(figures.describe_unheld(path))


def test_most_figures_are_noticed_when_they_change_by_seven_per_cent():
    seen = collections.Counter()
    for text in (figures.read_text(path) for path in figures.list_files() if path.endswith(".ipynb")):
        for index, sentence, paragraph in text.read_prose():
            for figure in figures.read_figures(sentence):
                decimals = len(re.search(r"\d(?:\.(\d+))?(?: |$)", figure.text)[1] or "")
                for number in {round(figure.number * change, decimals) for change in (0.93, 1.07)}:
                    if number != figure.number:
                        held = text.find_holders(index, paragraph, figure._replace(number=number))
                        seen[bool(held)] += 1
    assert seen[False] > 0.7 * sum(seen.values()), seen


@pytest.mark.parametrize("arguments", [["--since", "no-such-commit"], ["notebooks/none.ipynb"]])
def test_a_commit_or_a_file_that_does_not_exist_is_one_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        figures.main(arguments)
    assert stopped.value.code == 2 and capsys.readouterr().err.count("\n") == 1
