"""List the figures of prose that nothing holds any more: `python -m tilelab.course.figures [--since REV] [FILE...]`.

FILE is a notebook or a page of docs; without one, all are read. A figure is a number with a unit of a measurement, or a
number with two or three decimals. It has to stand, rounded as in the prose, in one of these places:

- an output near its cell, or in a section that its paragraph names (*Step 2*);
- a record of results/, a notebook or CLAIMS.md, if its paragraph names it, or a record that a cell near it loads;
- an expression in its cell, such as 4,200 GB/s × 0.75 µs / 132, or a constant of the code near it;
- a comment in the file, which no reader sees: <!-- figures: 512 cycles, the full rate of the tensor core -->.

What one cell holds, others may repeat. Prose writes out a quotient: 7.89 / 5.53 = 1.43 times. Quotations, generated
tables, and sentences with what a note promises or a datasheet says are not read. Of five wrong figures of a notebook,
four are found, and one equals another value by chance. Of a page, which is searched as one cell, half are found.

With --since, which names the commit before a recording, a figure must also stand where it stood in REV.

Exit status: 0 if everything is held, 1 if something is not.
"""

from __future__ import annotations

import functools
import html
import itertools
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilelab import ROOT, cli
from tilelab.records import results

UNITS = {
    "×": ("ratio", 1), "times": ("ratio", 1), "%": ("ratio", 0.01), "per cent": ("ratio", 0.01),
    "ns": ("time", 1e-9), "µs": ("time", 1e-6), "us": ("time", 1e-6), "ms": ("time", 1e-3), "s": ("time", 1),
    "seconds": ("time", 1), "cycles": ("cycles", 1), "clocks": ("cycles", 1), "TFLOP/s": ("operations", 1e12),
    "GB/s": ("bytes", 1e9), "TB/s": ("bytes", 1e12), "GHz": ("clock", 1), "W": ("power", 1),
}  # fmt: skip
RATIOS = ("", "×", "times", "%", "per cent")
KEYS = {"tflops": "TFLOP/s", "gbps": "GB/s", "percent": "%", "ghz": "GHz"}  # of records
UNIT = "(?:" + "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True)) + r")(?![\w/])"
# Neither an exponent, nor the spread behind ±, nor a whole factor or result of an expression.
NUMBER = (
    r"(?<![\w.,^])(?<!\^-)(?<!± )(?:(?<![=×^] )|(?=\d+\.\d))"
    r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w^³]|[.,]\d)"
)
CONSTANT = r"(?<![\w.])(?:\d{2,}(?:\.\d+)?|\d\.\d+)(?:e\d+)?"  # of two digits or more
FACTOR = r"\(*\d[\d,]*(?:\.\d+)?(?: ?[A-Za-zµ]+(?:/s)?){0,2}\)*"  # of an expression
FIGURE = re.compile(
    rf"(?P<about>\b(?:about|nearly|almost|roughly|around|some) |~)?"
    rf"(?P<all>{NUMBER}(?:(?:, | and | or | to | of |–|-){NUMBER})*)"
    rf"(?:\s?(?P<unit>{UNIT})(?!\s?\d)|(?= [a-z]{{1,4}}\b|[^\w ]| ?$| [^A-Za-z]))"
)
IGNORED = re.compile(  # versions and dates
    r"(?:torch|Triton|CUDA|Python|PTX|ptxas|driver|version|sm|SM)[ -][\d.]+\d(?: (?:or|to|and) [\d.]+\d)?"
    r"|\d+\.\d+\.\d[\w.]*|\d+-\d\d-\d\d"
)
CLAIM = re.compile(r"(?i)promises|(?:the|a|another) note (?:says|goes|measured|reports)|datasheet|holds if")
RECORD = r"ch\d\d_\w+|ceilings|start_\w+|sweep_\w+"
GENERATED = ("stacks.md", "reliability.md", "field-notes.md")  # the last one tells only what the notes say


class Value(NamedTuple):
    """A value that may hold a figure, and where it stands."""

    where: str
    number: float
    unit: str


class Figure(NamedTuple):
    """A number of prose, the size of its last digit, and the units that it may have."""

    text: str
    number: float
    step: float
    units: tuple[str, ...]
    sentence: str

    def fits(self, value: Value) -> bool:
        """Return whether a value is the number when it is rounded."""
        return any(abs(scaled - self.number) <= 0.5001 * self.step for scaled in self.scale(value))

    def scale(self, value: Value) -> list[float]:
        """Return a value in each of the figure's units that measures the same; a value without a unit fits all."""
        if not value.unit:
            exponents = (-6, -3, 0, 3, 6, *([2] if "%" in self.units else []))
            return [value.number * 10.0**exponent for exponent in exponents]
        kind, scale = UNITS[value.unit]
        return [value.number * scale / UNITS[unit][1] for unit in self.units if UNITS[unit][0] == kind]


def read(path: str, rev: str = "") -> str:
    """Return a file of this repository, as it is or as it was in a revision; empty if there is none."""
    if not rev:
        return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
    return subprocess.run(["git", "show", f"{rev}:{path}"], cwd=ROOT, capture_output=True, text=True).stdout


def read_figures(text: str, heading: str | None = None) -> Iterator[Figure]:
    """Yield the figures of a sentence, or of an output. The numbers of an output take the unit of their heading."""
    headed = re.findall(rf"(?<!\w)({UNIT})", re.sub(rf"{NUMBER}\s?{UNIT}", "", heading or ""))
    last = headed[-1] if headed else ""
    text = IGNORED.sub("", text)
    for match in FIGURE.finditer(text):
        unit = match["unit"] or ""
        for number in re.findall(NUMBER, match["all"]):
            whole, _, decimals = number.replace(",", "").partition(".")
            if unit == "×" and not decimals and re.match(r"\s?(?:[(`@]|\w\b|[A-Z]{3})", text[match.end() :]):
                continue  # a tile of 128 × `n`, or 8 × LDGSTS
            is_bare = len(decimals) in (2, 3) if heading is None else decimals or last not in RATIOS
            if not (unit or headed or is_bare):
                continue
            step = 10.0 ** -len(decimals.split("e")[0])
            if match["about"] and not decimals:
                step = 10.0 ** (len(whole) - len(whole.rstrip("0")))
            units = (unit,) if unit else (last,) if headed else tuple({last or "×": 0, "×": 0})
            yield Figure(f"{number} {unit}".strip(), float(number.replace(",", "")), step, units, text)
        last = unit or last


def read_values(where: str, text: str, heading: str | None = None) -> Iterator[Value]:
    """Yield the figures of a text as values."""
    return (Value(where, each.number, each.units[0]) for each in read_figures(text, heading))


def read_sentences(source: str) -> Iterator[tuple[str, str]]:
    """Yield each sentence of Markdown that is no claim of others, and its paragraph."""
    generated = r"<!-- (\w+): written.*end of \1 -->"
    source = re.sub(rf"(?s)```.*?```|{generated}|<!--.*?-->|(?<=\])\([^)]*\)", "", source)
    for block in re.split(r"\n\s*\n|\n(?=[|>#-]|\d+\.)", source):
        paragraph = " ".join(block.split()).replace("**", "")
        prose = re.sub(r"\*?[\"“][^\"”]*[\"”]\*?|<[^>]*>", " ", paragraph)
        prose = re.sub(r"`[^`]*`", lambda code: re.sub(r"\d\.\d+", "", code[0]), prose)
        for sentence in re.split(r"(?<=[.!?])\s+(?=\S)", prose):
            if not CLAIM.search(sentence):
                yield sentence, paragraph


def read_outputs(cell: dict, index: int) -> Iterator[Value]:
    """Yield the values of a cell's outputs, of tables by row and column."""
    for output in cell.get("outputs", ()):
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items() if kind[:4] == "text"}
        page = data.get("text/html", "")
        for table in re.findall(r"(?s)<table.*?</table>", page):
            rows = [re.findall(r"(?s)<t[hd].*?</t[hd]>", row) for row in table.split("<tr")[1:]]
            head, *rows = [[html.unescape(re.sub("<[^>]*>", "", text)) for text in row] for row in rows]
            for row in rows:
                for title, text in zip(head, row, strict=False):
                    yield from read_values(f"[{index}] {row[0]}, {title}", text, title)
        rest = html.unescape(re.sub(r"(?s)<table.*?</table>|<[^>]*>", "", page)) or data.get("text/plain", "")
        texts = (rest, data.get("text/markdown", ""), "".join(output.get("text", "")))
        for line in "\n".join(texts).splitlines():
            yield from read_values(f"[{index}] " + re.sub(r"\d+", "#", line), line, line)


@functools.cache
def read_record(name: str, rev: str = "") -> list[Value]:
    """Return the values of a record of the H200, with the mean of each column, also of rows with equal flags."""
    columns: dict[tuple[str, str], list[float]] = {}

    def walk(item, key: str, flags: str = "") -> None:
        if isinstance(item, dict):
            flags = " ".join(f"{each} {value}" for each, value in item.items() if isinstance(value, bool))
            for each, value in item.items():
                walk(value, each, flags)
        elif isinstance(item, list):
            for value in item:
                walk(value, key, flags)
        elif isinstance(item, float) and item > 0:
            for group in {"", flags}:
                columns.setdefault((key, group), []).append(item)

    walk(json.loads(read(f"results/nvidia-h200/{name}.json", rev) or "{}").get("rows", []), "")
    values = []
    for (key, flags), column in columns.items():
        end = key.split("_")[-1]
        unit = KEYS.get(end, end if end in UNITS else "×")
        numbers = {"mean": results.geometric_mean(column)} | ({} if flags else dict(enumerate(column)))
        values += [Value(f"{name}, {key} {flags} {row}", number, unit) for row, number in numbers.items()]
    return values


def compute(source: str) -> Iterator[Value]:
    """Yield the values of expressions such as "4,200 GB/s × 0.75 µs / 132"."""
    for found in re.findall(rf"{FACTOR}(?: [×/+−·-] {FACTOR})+", source):
        expression = re.sub(r"[A-Za-zµ]+(?:/s)?|,", "", found).translate(str.maketrans("×·−", "**-"))
        try:
            yield Value(found, float(eval(expression, {"__builtins__": {}})), "")
        except (SyntaxError, ZeroDivisionError, TypeError, OverflowError):
            continue  # it only looks like an expression


class Text:
    """A notebook, or a page of Markdown as one cell, with the values that may hold its figures."""

    def __init__(self, path: str, rev: str = ""):
        source, self.rev, self.titles, title = read(path, rev), rev, [], ""
        page = [{"cell_type": "markdown", "source": source}]
        self.cells = json.loads(source or '{"cells": []}')["cells"] if path.endswith(".ipynb") else page
        self.sources = ["".join(cell["source"]) for cell in self.cells]
        self.outputs = [[*read_outputs(cell, index)] for index, cell in enumerate(self.cells)]
        marks = " ".join(re.findall(r"(?s)<!-- figures: (.*?)-->", "".join(self.sources)))
        self.marked = [*read_values("a comment", marks)]
        self.is_prose = [cell["cell_type"] == "markdown" for cell in self.cells]
        for source, is_prose in zip(self.sources, self.is_prose, strict=True):
            title = (re.findall(r"(?m)^#+ (.*)", source) or [title])[-1] if is_prose else title
            self.titles.append(title)

    def read_prose(self) -> Iterator[tuple[int, str, str]]:
        """Yield each sentence with its cell and paragraph."""
        for index, source in enumerate(self.sources):
            if self.is_prose[index]:
                yield from ((index, *each) for each in read_sentences(source))

    def find_near(self, index: int, paragraph: str) -> list[int]:
        """Return the cells near one, and those of sections that its paragraph names, such as *Steps 2 and 4*."""
        names = [name for name in re.findall(r"\*([^*]+)\*", paragraph) if len(name) > 3]
        steps = [number for name in names if name.startswith("Step") for number in re.findall(r"\d+", name)]
        names += [f"Step {number}" for number in steps]
        cells = enumerate(self.titles)
        return [i for i, title in cells if abs(i - index) < 4 or any(name in title for name in names)]

    def find_values(self, index: int, paragraph: str) -> Iterator[list[Value]]:
        """Yield values that may hold a figure of a cell, the strongest evidence first."""
        near = self.find_near(index, paragraph)
        yield [value for i in near for value in self.outputs[i]]
        code = " ".join(self.sources[i] for i in near if not self.is_prose[i])
        page = self.sources[0] if len(self.cells) == 1 else ""  # a page may name its sources anywhere
        for names in (paragraph + code, page):
            yield [value for name in set(re.findall(RECORD, names)) for value in read_record(name, self.rev)]
            for name in set(re.findall(r"`((?:\d\d_|claims)\w*)`", names)):
                yield [*itertools.chain(*read_text(f"notebooks/{name}.ipynb", self.rev).outputs)]
            if "CLAIMS.md" in names:  # it is written from the records
                yield [*read_values("CLAIMS.md", read("CLAIMS.md", self.rev))]
        yield [*compute(self.sources[index])]
        yield self.marked
        yield [Value("the code", float(number), "") for number in set(re.findall(CONSTANT, code))]

    def find_holders(self, index: int, paragraph: str, figure: Figure) -> list[Value]:
        """Return the values of the strongest evidence that hold a figure."""
        found = (list(filter(figure.fits, values)) for values in self.find_values(index, paragraph))
        return next(filter(None, found), [])


@functools.cache
def read_text(path: str, rev: str = "") -> Text:
    """Return a file, read once."""
    return Text(path, rev)


def check(path: str, since: str = "") -> Iterator[tuple[int, str, Figure, list[Value]]]:
    """Yield the cell, the paragraph and each figure of a file that nothing holds, and the values to which it moved.

    Figures that repeat hold each other.
    """
    text, old = read_text(path), read_text(path, since) if since else None
    was = {sentence: (index, paragraph) for index, sentence, paragraph in old.read_prose()} if old else {}
    held, unheld = set(), []
    for index, sentence, paragraph in text.read_prose():
        for figure in read_figures(sentence):
            now = []
            if old and sentence in was:
                before = {value.where for value in old.find_holders(*was[sentence], figure)}
                values = itertools.chain(*text.find_values(index, paragraph))
                now = [value for value in values if value.where in before]
            moved = [] if any(map(figure.fits, now)) else now
            if moved or not text.find_holders(index, paragraph, figure):
                unheld.append((index, paragraph, figure, moved))
            else:
                held |= {(figure.number, unit) for unit in figure.units}
    for index, paragraph, figure, moved in unheld:
        if moved or not held & {(figure.number, unit) for unit in figure.units}:
            yield index, paragraph, figure, moved


def describe_unheld(path: str, since: str = "") -> Iterator[str]:
    """Yield a line for each figure that nothing holds, with the value to which it moved or the three nearest."""
    for index, paragraph, figure, moved in check(path, since):
        values = moved or itertools.chain(*read_text(path).find_values(index, paragraph))
        scaled = {(each, value.where) for value in values if value.unit for each in figure.scale(value)}
        nearest = sorted(scaled, key=lambda pair: abs(pair[0] - figure.number))[:3]
        listed = "; ".join(f"{number:.4g} at {where}" for number, where in nearest) or "none"
        word = "now" if moved else "nearest"
        yield f'{path} [{index}] "{figure.sentence.strip()}" → {figure.text}; {word}: {listed}'


def list_files() -> list[str]:
    """Return the notebooks and the pages whose figures are checked."""
    patterns = ("notebooks/*.ipynb", "docs/*.md", "docs/deeper/*.md")
    found = (path for pattern in patterns for path in ROOT.glob(pattern) if path.name not in GENERATED)
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in found)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures that nothing holds."""
    parser = cli.make_plain_parser(
        "tilelab.course.figures", "List the figures of prose that nothing holds any more."
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="notebook or page, from the root of the repository"
    )
    parser.add_argument("--since", default="", metavar="REV", help="the commit before a recording")
    options = parser.parse_args(argv)
    if options.since and not read("README.md", options.since):
        parser.error(f"--since must name a commit of this repository; it is {options.since!r}.")
    if missing := [path for path in options.files if not read(path)]:
        parser.error(f"FILE must be a path from the root of the repository; there is no {missing[0]}.")
    lines = [line for path in options.files or list_files() for line in describe_unheld(path, options.since)]
    print(*lines, f"{len(lines)} figures that nothing holds", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    cli.run_main(main)
