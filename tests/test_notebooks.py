"""Every notebook, solution and demo: its form, then a run from top to bottom in the environment that a reader gets."""

import html.parser
import importlib.util
import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tilelab import ROOT, views
from tilelab.cells import lesson
from tilelab.course import notebook, record
from tilelab.runtime import device

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOLUTIONS = sorted((ROOT / "notebooks" / "solutions").glob("*.ipynb"))
DEMOS = sorted((ROOT / "notebooks" / "demo").glob("*.ipynb"))
PICTURES = ROOT / "notebooks" / "pictures"
IMAGE = re.compile(r"!\[(.*?)\]\(([^)]*)\)")
ABSOLUTE_HOME = re.compile(r"(/home/|/Users/|/root/|[A-Z]:\\+Users\\)\w")


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT / "notebooks")))


def read(path):
    """The notebook, and those of its code cells that are not empty."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept, [cell for cell in kept["cells"] if cell["cell_type"] == "code" and lines(cell)]


def lines(cell):
    return "".join(cell["source"]).strip().splitlines()


def find_images(path):
    """The alternative text and the file of each picture in a notebook's prose."""
    texts = ["".join(cell["source"]) for cell in read(path)[0]["cells"] if cell["cell_type"] == "markdown"]
    assert not any("<img" in text for text in texts), "show a picture as ![alternative text](file)"
    return [(words, path.parent / target) for text in texts for words, target in IMAGE.findall(text)]


@each(NOTEBOOKS + SOLUTIONS + DEMOS)
def test_form(path):
    kept, code = read(path)
    first = kept["cells"][0]
    assert first["cell_type"] == "markdown", "the first cell is the title"
    assert lines(first)[0].startswith("# "), "the first cell is the title"
    assert "widgets" not in kept["metadata"], "widget state is saved: run `make record`"
    for number, cell in enumerate(kept["cells"]):
        marks = ("%%cuda", "%%language", "@triton.jit", "@gluon.jit")
        is_kernel = any(mark in "".join(cell["source"]) for mark in marks)
        limit = 60 if is_kernel else 25 if cell["cell_type"] == "code" else 40
        counted = [
            line
            for line in lines(cell)
            if not line.startswith(("import ", "from ")) or cell["cell_type"] != "code"
        ]
        assert len(counted) <= limit, f"cell {number} is longer than {limit} lines: {lines(cell)[0]}"
    for cell in code:
        assert all(output["output_type"] != "error" for output in cell["outputs"]), (
            f"an error is saved: {lines(cell)}"
        )
        found = ABSOLUTE_HOME.search(json.dumps(cell["outputs"]))
        assert not found, f"an output names somebody's home folder ({found.group()}): {lines(cell)}"
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                assert output["metadata"]["image/png"]["alt"], f"no alternative text: {lines(cell)}"
    for words, picture in find_images(path):
        assert len(words) > 60, f"{picture.name} needs an alternative text that says what it shows"
        assert picture.is_file() and picture.parent == PICTURES / path.stem
    if path in SOLUTIONS:
        saved = json.dumps([cell["outputs"] for cell in code])
        assert not find_mistakes(path, saved), "the saved outputs are of other exercises: run `make record`"
    else:
        check_that_no_trust_is_needed(code)
    package, _, module = re.sub(r"^\d+_", "", path.stem).partition("_")  # without its place in the order
    if path in NOTEBOOKS and package != "start":
        assert importlib.util.find_spec(".".join(filter(None, (package, module)))), (
            f"{path.stem} has no package"
        )
    if path not in DEMOS:
        seen = [cell["execution_count"] for cell in code]
        assert seen == list(range(1, len(code) + 1)), "run `make record`"


def test_every_picture_is_shown_and_needs_nothing_else():
    files = set(PICTURES.rglob("*.*"))
    assert files == {picture for path in NOTEBOOKS for _, picture in find_images(path)}
    for file in files:
        text = file.read_text(encoding="utf-8")
        size = ElementTree.fromstring(text).attrib.keys() & {"width", "height", "viewBox"}
        assert file.suffix == ".svg" and len(size) == 3 and len(text) < 40_000, file
        assert not re.search(r"<(script|metadata|image|style|foreignObject)|href=\"(?!#)", text), file


class _Markup(html.parser.HTMLParser):
    """What a saved output is made of that a sanitiser could take away: tags and attributes, not how they look."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attributes):
        self.found |= {
            tag,
            *(f"{tag} {name}" for name, _ in attributes if name not in ("class", "style", "border")),
        }


def check_that_no_trust_is_needed(code):
    """JupyterLab shows an untrusted notebook, as every clone is, through a sanitiser and without scripts."""
    for output in (output for cell in code for output in cell["outputs"] if "data" in output):
        data = output["data"]
        shown = "text/plain text/html text/markdown text/latex image/png".split()
        assert data.keys() <= {*shown, views.MIME}
        assert "text/plain" in data, "nothing is left where a picture or a table cannot be shown"
        markup = _Markup()
        markup.feed("".join(data.get("text/html", "")))
        kept = "p pre div span style table thead tbody tr th td details summary"
        assert markup.found <= set(kept.split())
        markup.feed("".join(data.get("text/markdown", "")))
        assert not markup.found & {"script", "iframe", "object", "svg", "input", "button", "form"}


def run_cells(path, tmp_path):
    """Let nbval run the notebook in a kernel of its own, in an environment like a reader's; return its outputs."""
    # Without TRITON_INTERPRET, which conftest sets: a notebook must find its way to the interpreter by itself.
    env = {
        name: value
        for name, value in notebook.child_env(
            PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TILES_OUTPUTS=os.fspath(tmp_path / "outputs")
        ).items()
        if name != "TRITON_INTERPRET"
    }  # and without plugins, whose imports take two seconds
    options = (
        "-q -p nbval.plugin -p keep_outputs -p no:cacheprovider --nbval-lax --nbval-current-env "
        "--nbval-cell-timeout=600"
    )
    arguments = [*options.split(), os.fspath(path)]
    log = tmp_path / "log"
    if device.current().capability:
        # The longest cells compile; a test process's share of the CPUs would be too small.
        command = ["taskset", "--cpu-list", f"0-{os.cpu_count() - 1}", sys.executable, "-m", "pytest"]
        command += [*arguments]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (os.path.dirname(__file__), env.get("PYTHONPATH"))))
        with log.open("w") as file:
            status = subprocess.run(
                command, cwd=ROOT, env=env, stdout=file, stderr=file, timeout=1800, check=False
            ).returncode
    else:
        import preloaded  # here, because a test process that runs no notebook needs none of its imports

        status = preloaded.run_nbval(arguments, env, ROOT, log, 1800)
    if status != 0:
        said = record.COLOUR.sub("", log.read_text(errors="replace"))
        pytest.fail("\n".join([*said.splitlines()[-60:], f"exit status {status}"]), pytrace=False)
    return (tmp_path / "outputs").read_text()


@pytest.mark.notebook
@each(NOTEBOOKS + SOLUTIONS + DEMOS)
def test_runs(path, tmp_path):
    outputs = run_cells(path, tmp_path)
    reasons = sorted(set(re.findall(r"Exercise \d+: not .{,200}|wrong: (?!\[\]).{,200}", outputs)))
    assert not find_mistakes(path, outputs), "\n".join(reasons)
    if path in NOTEBOOKS and device.current().capability is None:
        hidden = find_hidden_figures(outputs)
        assert not hidden, "a cell, or a header that it includes, is no longer the one that was recorded"


def find_mistakes(path, outputs):
    """Return what a notebook of solutions says otherwise than that it solves the exercises of its lesson.

    Of a lesson, return what the check of a version found, and the exercises that are solved, or whose saved state is
    another one.
    """

    def find_states(text):
        return set(re.findall(r"(Exercise \d+): (solved|not solved yet|not yet right)", text))

    code, said = read(path)[1], find_states(outputs)
    kept = find_states(json.dumps([cell["outputs"] for cell in code]))
    if path in SOLUTIONS:
        code += read(path.parent.parent / path.name)[1]
    asked = set(re.findall(r"Exercise \d+", "\n".join("".join(cell["source"]) for cell in code)))
    solved = {(exercise, "solved") for exercise in asked}
    if path in SOLUTIONS:
        return solved ^ said
    return {*re.findall(r"wrong: (?!\[\]).{,80}", outputs), *(said & solved), *(said ^ kept)}


def find_hidden_figures(outputs):
    """Return what a lesson says in place of recorded figures that it does not find."""
    found = re.finditer(f"is not recorded|{lesson.NOT_TIMED}", outputs)
    return [outputs[max(each.start() - 60, 0) : each.end()] for each in found]


@pytest.mark.notebook
def test_a_notebook_that_raises_fails_and_what_a_lesson_must_not_say_is_found(tmp_path):
    path = tmp_path / "raises.ipynb"
    source = "print('k is not recorded; wrong: 3 elements', 'Exercise 1: solved.', sep='\\n')\n1 / 0"
    cell = {"cell_type": "code", "source": source, "outputs": [], "execution_count": None, "metadata": {}}
    cell |= {"id": "a"}
    made = {"cells": [cell], "metadata": notebook.METADATA, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(made))
    with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError"):
        run_cells(path, tmp_path)
    if device.current().capability is None:
        outputs = (tmp_path / "outputs").read_text()
        assert "k is not recorded" in find_hidden_figures(outputs)[0]
        mistakes = find_mistakes(path, outputs)
        assert ("Exercise 1", "solved") in mistakes and "wrong: 3 elements" in str(mistakes)
