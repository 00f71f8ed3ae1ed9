"""List the figures of prose that nothing holds any more: `python -m tilelab.course.figures [--since REV] [FILE...]`.

FILE is a notebook or a page of docs; without one, all are read. A figure is a number with a unit of a measurement, or a
number with two or three decimals. It has to stand, rounded as in the prose, in one of these places:

- an output near its cell, or in a section that its paragraph names (*Step 2*), where it may also compare two rows or
  columns whose words stand in its sentence;
- a record of results/, a notebook or CLAIMS.md, if its paragraph names it, or a record that a cell near it loads;
- an expression in its cell, such as 4,200 GB/s × 0.75 µs / 132, or a constant of the code near it;
- a comment in the file, which no reader sees: <!-- figures: 512 cycles, the full rate of the tensor core -->.

What one cell holds, others may repeat. Quotations, generated tables, and sentences with what a note promises or a
datasheet says are not read.

With --since, which names the commit before a recording, a figure must also stand where it stood in REV. This finds nine
of ten figures that a recording made false. Without it, one of three wrong figures equals another value by chance.

Exit status: 0 if everything is held, 1 if something is not.
"""

from __future__ import annotations

import argparse
import collections
import functools
import html
import itertools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilelab import ROOT

UNITS = {
    "×": ("ratio", 1), "times": ("ratio", 1), "%": ("ratio", 0.01), "per cent": ("ratio", 0.01),
    "ns": ("time", 1e-9), "µs": ("time", 1e-6), "us": ("time", 1e-6), "ms": ("time", 1e-3), "s": ("time", 1),
    "seconds": ("time", 1), "cycles": ("cycles", 1), "clocks": ("cycles", 1), "TFLOP/s": ("operations", 1e12),
    "GB/s": ("bytes", 1e9), "TB/s": ("bytes", 1e12), "GHz": ("clock", 1), "W": ("power", 1),
}  # fmt: skip
KEYS = {"us": "µs", "tflops": "TFLOP/s", "gbps": "GB/s", "percent": "%", "ghz": "GHz"}  # of records
UNIT = "(?:" + "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True)) + r")(?![\w/])"
# Neither an exponent, nor the spread behind ±, nor a whole factor or result of an expression.
NUMBER = (
    r"(?<![\w.,^])(?<!\^-)(?<!± )(?:(?<![=×^] )|(?=\d+\.\d))"
    r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w^³]|[.,]\d)"
)
CONSTANT = r"(?<![\w.])(?:\d{2,}(?:\.\d+)?|\d\.\d+)(?:e\d+)?"  # of two digits or more
ABOUT = r"about|nearly|almost|roughly|around|some|~"
BELOW = r"up to|at most|under|below|less than|within|fewer than"
ABOVE = r"over|above|at least|more than"
FIGURE = re.compile(
    rf"(?:\b(?P<bound>{ABOUT}|{BELOW}|{ABOVE}) )?(?P<all>{NUMBER}(?:(?:, | and | or | to | of |–|-){NUMBER})*)"
    rf"(?:\s?(?P<unit>{UNIT})(?!\s?\d)|(?= [a-z]{{1,4}}\b|[^\w ]| ?$| [^A-Za-z]))"
)
IGNORED = re.compile(  # versions and dates
    r"(?:torch|Triton|CUDA|Python|PTX|ptxas|driver|version|sm|SM)[ -][\d.]+\d(?: (?:or|to|and) [\d.]+\d)?"
    r"|\d+\.\d+\.\d[\w.]*|\d+-\d\d-\d\d"
)
CLAIM = re.compile(r"(?i)promises|(?:the|a|another) note (?:says|goes|measured|reports)|datasheet|holds if")
COMPARES = re.compile(
    r"\b(?:as (?:fast|long|much|many)|times the|of the|speed|time|faster|slower|more|less|gain|cost|lose|save|longer"
    r"|shorter|within|behind|ahead|fall|bring|differ|runs at)"
)
RECORD = r"ch\d\d_\w+|ceilings|start_\w+|sweep_\w+"
GENERATED = ("stacks.md", "reliability.md", "field-notes.md")  # the last one tells only what the notes say


@dataclass(frozen=True)
class Figure:
    """A number of prose, the range of values that it may stand for, and the units that it may have."""

    text: str
    number: float
    low: float
    high: float
    units: tuple[str, ...]
    sentence: str

    def fits(self, value: Value) -> bool:
        """Return whether the number may stand for a value."""
        return any(self.low <= scaled <= self.high for scaled in self.scale(value))

    def scale(self, value: Value) -> list[float]:
        """Return a value in each of the figure's units that measures the same; a value without a unit fits all."""
        if not value.unit:
            exponents = (-6, -3, 0, 3, 6, *([2] if "%" in self.units else []))
            return [value.number * 10.0**exponent for exponent in exponents]
        kind, scale = UNITS[value.unit]
        return [value.number * scale / UNITS[unit][1] for unit in self.units if UNITS[unit][0] == kind]


@dataclass(frozen=True)
class Value:
    """A value that may hold a figure, with the words of its row, and its row and column."""

    where: str
    number: float
    unit: str
    words: frozenset = field(default=frozenset(), compare=False)
    lines: tuple = ()


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
        unit, bound = match["unit"] or "", match["bound"] or ""
        for number in re.findall(NUMBER, match["all"]):
            whole, _, decimals = number.replace(",", "").partition(".")
            if unit == "×" and not decimals and re.match(r"\s?(?:[(`@]|\w\b|[A-Z]{3})", text[match.end() :]):
                continue  # a tile of 128 × `n`, or 8 × LDGSTS
            bare = (
                len(decimals) in (2, 3)
                if heading is None
                else decimals or (last and UNITS[last][0] != "ratio")
            )
            if not (unit or headed or bare):
                continue
            value, step = float(number.replace(",", "")), 10.0 ** -len(decimals.split("e")[0])
            if re.fullmatch(ABOUT, bound):
                step = max(step if decimals else 10.0 ** (len(whole) - len(whole.rstrip("0"))), 0.05 * value)
            low = 0.9 * value if re.fullmatch(BELOW, bound) else value - 0.5001 * step
            high = 1.1 * value if re.fullmatch(ABOVE, bound) else value + 0.5001 * step
            units = (unit,) if unit else (last,) if headed else tuple(dict.fromkeys([last or "×", "×"]))
            yield Figure(f"{bound} {number} {unit}".strip(), value, low, high, units, text)
        last = unit or last


def read_values(where: str, text: str) -> list[Value]:
    """Return the figures of a text as values."""
    return [Value(where, each.number, each.units[0]) for each in read_figures(text)]


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


def find_words(text: str) -> frozenset:
    """Return the beginnings of words, by which sentences and rows of tables are compared."""
    words = re.findall(r"[a-z]{3,}|\d+", text.lower().replace("_", " "))
    return frozenset(word[:5] for word in words) - {"the", "and", "for", "with", "than", "from"}


def read_tables(cell: dict) -> Iterator[list[list[str]]]:
    """Yield the tables of a cell's outputs. Each line of other text is a table of one row below itself."""
    for output in cell.get("outputs", ()):
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items() if kind[:4] == "text"}
        page, texts = (
            data.get("text/html", ""),
            [data.get("text/markdown", ""), "".join(output.get("text", ""))],
        )
        for table in re.findall(r"(?s)<table.*?</table>", page):
            rows = [re.findall(r"(?s)<t[hd].*?</t[hd]>", row) for row in table.split("<tr")[1:]]
            yield [[html.unescape(re.sub("<[^>]*>", "", text)).strip() for text in row] for row in rows]
        rest = html.unescape(re.sub(r"(?s)<table.*?</table>|<[^>]*>", "", page))
        for line in "\n".join([rest or data.get("text/plain", ""), *texts]).splitlines():
            yield [[line], [line]]


def read_outputs(cell: dict, index: int) -> list[Value]:
    """Return the values of a cell's outputs."""
    values = []
    for number, (head, *rows) in enumerate(read_tables(cell)):
        names: collections.Counter[str] = collections.Counter()
        table = len(head) > 1
        for title in head if table else ():
            values += read_values(f"[{index}] {title}", title)
        for r, row in enumerate(rows):
            names[row[0]] += 1
            name = f"{row[0]} ({names[row[0]]})" if table else re.sub(r"\d+", "#", row[0])
            words = find_words(" ".join(text for text in row if not table or not re.search(r"\d\.\d", text)))
            for title, text in zip(head, row, strict=False):
                for n, each in enumerate(read_figures(text, title) if not title.endswith("±") else ()):
                    where = f"[{index}] {name}, {title if table else n}"
                    lines = ((index, number, r), (index, title))
                    values.append(Value(where, each.number, each.units[0], words, lines))
    return values


@functools.cache
def read_record(name: str, rev: str = "") -> list[Value]:
    """Return the values of a record of the H200, with two means of each column, also of rows with equal flags."""
    columns: dict[tuple[str, str], list[float]] = {}

    def walk(item, key: str, flags: str = "") -> None:
        if isinstance(item, dict):
            flags = " ".join(f"{each} {value}" for each, value in item.items() if isinstance(value, bool))
        if isinstance(item, (dict, list)):
            for each, value in item.items() if isinstance(item, dict) else ((key, value) for value in item):
                walk(value, each, flags)
        elif isinstance(item, float) and item > 0:
            for group in {"", flags}:
                columns.setdefault((key, group), []).append(item)

    walk(json.loads(read(f"results/nvidia-h200/{name}.json", rev) or "{}").get("rows", []), "")
    values = []
    for (key, flags), column in columns.items():
        end = key.split("_")[-1]
        unit = KEYS.get(end, end if end in UNITS else "×")
        lines = ((name, key),) if key in ("ratio", "speed") else ()
        means = {"geometric mean": statistics.geometric_mean(column), "median": statistics.median(column)}
        for row, value in [*enumerate(column if not flags else ()), *means.items()]:
            values.append(Value(f"{name}, {key} {flags} {row}", value, unit, frozenset({"record"}), lines))
    return values


def compute(source: str) -> list[Value]:
    """Return the values of expressions such as "4,200 GB/s × 0.75 µs / 132"."""
    number, words = r"\(*\d[\d,]*(?:\.\d+)?", r"(?: ?[A-Za-zµ]+(?:/s)?){0,2}\)*"
    values = []
    for text in (source, *re.findall(r"\(([^()]*)\)", source)):
        for found in re.finditer(rf"{number}{words}(?: [×/+−·-] {number}{words})+", text):
            expression = re.sub(r"[A-Za-zµ]+(?:/s)?|,", "", found[0]).translate(str.maketrans("×·−", "**-"))
            try:
                values.append(Value(found[0], float(eval(expression, {"__builtins__": {}})), ""))
            except (SyntaxError, ZeroDivisionError, TypeError, OverflowError):
                continue  # it only looks like an expression
    return values


def compare(values: list[Value], figure: Figure, words: frozenset) -> Iterator[Value]:
    """Yield the quotients, or for per cent the differences, of two values of a row or column that the words name."""
    values = [value for value in values if value.number and value.lines and value.words & words]
    same = itertools.permutations(values, 2)
    pairs = [(a, b) for a, b in same if a.unit == b.unit and set(a.lines) & set(b.lines)]
    if in_percent := figure.units[0] == "%":
        ratios = [value for value in values if UNITS[value.unit][0] == "ratio"]
        ones = [Value("1", 1 / UNITS[value.unit][1], value.unit) for value in ratios]
        pairs += [*zip(ratios, ones, strict=True), *zip(ones, ratios, strict=True)]
    for a, b in pairs:
        if a.where != b.where:
            quotient = a.number / b.number
            yield Value(f"{a.where} / {b.where}", abs(quotient - 1) if in_percent else quotient, "×")


def is_named(title: str, name: str) -> bool:
    """Return whether a paragraph names a section, as *Step 2*, *Steps 1 to 3* or by words of its title."""
    if steps := re.fullmatch(r"Steps? (\d+)(?: (?:to|and) (\d+))?", name):
        wanted = range(int(steps[1]), int(steps[2] or steps[1]) + 1)
        return any(re.search(rf"Step {number}\b", title) for number in wanted)
    return len(name) > 3 and name in title


class Text:
    """A notebook, or a page of Markdown as one cell, with the values that may hold its figures."""

    def __init__(self, path: str, rev: str = ""):
        source = read(path, rev)
        page = [{"cell_type": "markdown", "source": source}]
        self.cells = json.loads(source or '{"cells": []}')["cells"] if path.endswith(".ipynb") else page
        self.sources = ["".join(cell["source"]) for cell in self.cells]
        self.outputs = [read_outputs(cell, index) for index, cell in enumerate(self.cells)]
        marks = " ".join(re.findall(r"(?s)<!-- figures: (.*?)-->", "".join(self.sources)))
        self.marked = read_values("a comment", marks)
        self.rev, self.titles, title = rev, [], ""
        for cell, source in zip(self.cells, self.sources, strict=True):
            if cell["cell_type"] == "markdown":
                title = (re.findall(r"(?m)^#+ (.*)", source) or [title])[-1]
            self.titles.append(title)

    def read_prose(self) -> Iterator[tuple[int, str, str]]:
        """Yield each sentence with its cell and paragraph."""
        for index, source in enumerate(self.sources):
            if self.cells[index]["cell_type"] == "markdown":
                yield from ((index, *each) for each in read_sentences(source))

    def find_values(self, index: int, paragraph: str, figure: Figure) -> Iterator[list[Value]]:
        """Yield values that may hold a figure of a cell, the strongest evidence first."""
        named = re.findall(r"\*([^*]+)\*", paragraph)
        here = range(index - 3, index + 4)
        titles = {title for title in self.titles if any(is_named(title, name) for name in named)}
        near = [i for i, title in enumerate(self.titles) if i in here or title in titles]
        yield [value for i in near for value in self.outputs[i]]
        code = " ".join(self.sources[i] for i in near if self.cells[i]["cell_type"] == "code")
        page = self.sources[0] if len(self.cells) == 1 else ""  # a page may name its sources anywhere
        for names in (paragraph + code, page):
            yield [value for name in set(re.findall(RECORD, names)) for value in read_record(name, self.rev)]
            for name in set(re.findall(r"`((?:\d\d_|claims)\w*)`", names)):
                yield list(itertools.chain(*read_text(f"notebooks/{name}.ipynb", self.rev).outputs))
            if "CLAIMS.md" in names:  # it is written from the records
                yield read_values("CLAIMS.md", read("CLAIMS.md", self.rev))
        yield compute(self.sources[index])
        yield self.marked
        yield [Value("the code", float(number), "") for number in set(re.findall(CONSTANT, code))]
        if figure.units[0] in ("times", "×", "%") and COMPARES.search(figure.sentence):
            words = find_words(figure.sentence)
            yield [each for i in near for each in compare(self.outputs[i], figure, words)]
            for name in set(re.findall(RECORD, paragraph)):
                yield list(compare(read_record(name, self.rev), figure, frozenset({"record"})))

    def find_holders(self, index: int, paragraph: str, figure: Figure) -> list[Value]:
        """Return the values of the strongest evidence that hold a figure, those with most words of its sentence."""
        for values in self.find_values(index, paragraph, figure):
            if held := [value for value in values if figure.fits(value)]:
                common = [len(value.words & find_words(figure.sentence)) for value in held]
                return [value for value, count in zip(held, common, strict=True) if count == max(common)]
        return []


@functools.cache
def read_text(path: str, rev: str = "") -> Text:
    """Return a file, read once."""
    return Text(path, rev)


Checked = tuple[int, str, Figure, list[Value], list[Value]]


def check(path: str, since: str = "") -> Iterator[Checked]:
    """Yield the cell, the paragraph and each figure of a file with its holders, and the values to which they moved.

    Figures that repeat hold each other.
    """
    text, old = read_text(path), read_text(path, since) if since else None
    was = {sentence: (index, paragraph) for index, sentence, paragraph in old.read_prose()} if old else {}
    found = []
    for index, sentence, paragraph in text.read_prose():
        for figure in read_figures(sentence):
            holders, now = text.find_holders(index, paragraph, figure), []
            if old and sentence in was:
                before = {value.where for value in old.find_holders(*was[sentence], figure)}
                values = itertools.chain(*text.find_values(index, paragraph, figure))
                now = [value for value in values if value.where in before]
            moved = [] if any(map(figure.fits, now)) else now
            found.append((index, paragraph, figure, [] if moved else holders, moved))
    held = {(f.number, unit): holders for _, _, f, holders, _ in found if holders for unit in f.units}
    for index, paragraph, figure, holders, moved in found:
        keys = [] if moved else [(figure.number, unit) for unit in figure.units]
        yield index, paragraph, figure, holders or next((held[key] for key in keys if key in held), []), moved


def find_unheld(paths: Iterable[str], since: str = "") -> Iterator[str]:
    """Yield a line for each figure that nothing holds, with the value to which it moved or the three nearest."""
    for path in paths:
        for index, paragraph, figure, holders, moved in check(path, since):
            if not holders:
                values = moved or itertools.chain(*read_text(path).find_values(index, paragraph, figure))
                scaled = {
                    (number, value.where) for value in values if value.unit for number in figure.scale(value)
                }
                nearest = sorted(scaled, key=lambda pair: abs(pair[0] - figure.number))[:3]
                listed = "; ".join(f"{number:.4g} at {where}" for number, where in nearest) or "none"
                word = "now" if moved else "nearest"
                yield f'{path} [{index}] "{figure.sentence.strip()}" → {figure.text}; {word}: {listed}'


def list_files() -> list[str]:
    """Return the notebooks and the pages whose figures are checked."""
    found = [
        path
        for pattern in ("notebooks/*.ipynb", "docs/*.md", "docs/deeper/*.md")
        for path in ROOT.glob(pattern)
    ]
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in found if path.name not in GENERATED)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures that nothing holds."""
    parser = argparse.ArgumentParser(
        "python -m tilelab.course.figures", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="notebook or page, from the root of the repository"
    )
    parser.add_argument("--since", default="", metavar="REV", help="the commit before a recording")
    options = parser.parse_args(argv)
    lines = list(find_unheld(options.files or list_files(), options.since))
    print(*lines, f"{len(lines)} figures that nothing holds", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
