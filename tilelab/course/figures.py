"""List the measured figures of prose that nothing holds any more: `python -m tilelab.course.figures [--since REV] [FILE…]`.

FILE is a notebook or a page of docs; without one, all are read. A figure is a number with a unit of a measurement, or a
number with two or three decimals. It has to stand, rounded as in the prose, in one of these places:

- an output near its cell, or in a section that its paragraph names (*Step 2*); there it may also compare two rows or
  columns whose words stand in the paragraph, as a quotient or as a difference in per cent;
- a record of results/ or a notebook that the paragraph names, or a record that a cell near it loads;
- an expression in its paragraph, such as 4,200 GB/s × 0.75 µs / 132;
- a comment in the file, which no reader sees: <!-- figures: 512 cycles, the full rate of the tensor core -->.

A figure that is held in one cell may be repeated in others. Quotations, and sentences that tell what a note promises or
a datasheet says, are not read. Each line names the cell, the sentence, the figure and the nearest values.

With --since, which is meant for the commit before a recording, a figure also has to stand where it stood in REV. This
finds nearly all that a recording made false. Without it, a wrong figure may equal another value by chance.

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
from dataclasses import dataclass

from tilelab import ROOT

UNITS = {
    "×": ("ratio", 1), "times": ("ratio", 1), "%": ("ratio", 0.01), "per cent": ("ratio", 0.01),
    "ns": ("time", 1e-9), "µs": ("time", 1e-6), "us": ("time", 1e-6), "ms": ("time", 1e-3), "s": ("time", 1),
    "seconds": ("time", 1), "cycles": ("cycles", 1), "clocks": ("cycles", 1), "TFLOP/s": ("operations", 1e12),
    "GB/s": ("bytes", 1e9), "TB/s": ("bytes", 1e12), "GHz": ("clock", 1), "W": ("power", 1),
}  # fmt: skip
UNIT = "(?:" + "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True)) + r")(?![\w/])"
NUMBER = r"(?<![\w.,^])(?<!\^-)(?<!± )(?:(?<![=×^] )|(?=\d+\.\d))\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w^³]|[.,]\d)"
ABOUT = r"about|nearly|almost|roughly|around|some|~"
BELOW = r"up to|at most|under|below|less than|within|fewer than"
ABOVE = r"over|above|at least|more than"
FIGURE = re.compile(
    rf"(?:\b(?P<bound>{ABOUT}|{BELOW}|{ABOVE}) )?(?P<numbers>{NUMBER}(?:(?:, | and | or | to | of |–|-){NUMBER})*)"
    rf"(?:\s?(?P<unit>{UNIT})(?!\s?\d)|(?= [a-z]{{1,4}}\b|[^\w ]| ?$| [^A-Za-z]))"
)
VERSION = re.compile(
    r"(?:torch|Triton|CUDA|Python|PTX|ptxas|driver|version|sm|SM)[ -][\d.]+\d(?: (?:or|to|and) [\d.]+\d)?|\d+\.\d+\.\d[\w.]*|\d+-\d\d-\d\d"
)
COMPARES = re.compile(
    r"\b(?:as (?:fast|long|much|many)|times the|of the|speed|time|faster|slower|more|less|gain|cost|lose|save|longer|shorter|within|behind|"
    r"ahead|fall|bring|differ)"
)
CLAIM = re.compile(
    r"promises|(?:the|a|another) note (?:says|goes|measured|reports)|datasheet|holds if", re.IGNORECASE
)
CONSTANT = r"(?<![\w.])\d{2,}(?:\.\d+)?(?:e\d+)?|(?<![\w.])\d\.\d+(?:e\d+)?"  # with two digits at least
GENERATED = ("stacks.md", "reliability.md", "field-notes.md")
RECORD = r"ch\d\d_\w+|ceilings|start_\w+|sweep_\w+"
COLUMNS = (
    (r"(^|_)ms$", "ms"), (r"(^|_)us$", "µs"), (r"(^|_)ns$", "ns"), (r"_s$|seconds", "s"), (r"tflops", "TFLOP/s"),
    (r"gbps", "GB/s"), (r"cycles", "cycles"), (r"percent", "%"), (r"ghz", "GHz"), (r"watts", "W"),
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number in prose, with `half` of the step to which it is rounded, and the units that it may have."""

    text: str
    number: float
    half: float
    units: tuple[str, ...]
    bound: str = ""
    sentence: str = ""

    def fits(self, value: float, unit: str) -> bool:
        """Return whether the number may stand for a value with a unit ("" fits all)."""
        low, high = self.number - self.half, self.number + self.half
        if re.fullmatch(BELOW, self.bound):
            low = min(low, 0.9 * self.number)
        if re.fullmatch(ABOVE, self.bound):
            high = max(high, 1.1 * self.number)
        return any(low * 0.9999 <= scaled <= high * 1.0001 for scaled in self.scale(value, unit))

    def scale(self, value: float, unit: str) -> list[float]:
        """Return a value in each of the figure's units that measures the same quantity."""
        if not unit:
            return [
                value * 10.0**exponent for exponent in (-6, -3, 0, 3, 6, *([2] if "%" in self.units else []))
            ]
        kind, scale = UNITS[unit]
        return [value * scale / UNITS[own][1] for own in self.units if UNITS[own][0] == kind]


@dataclass(frozen=True)
class Value:
    """A value that may hold a figure. `words` are those of its row and column, `lines` tell which these are."""

    where: str
    number: float
    unit: str
    words: frozenset = frozenset()
    lines: tuple = ()


def read_figures(text: str, heading: str | None = None) -> Iterator[Figure]:
    """Yield the figures of a sentence, or of an output. The numbers of an output take the unit of their heading."""
    in_heading = re.findall(rf"(?<!\w)({UNIT})", re.sub(rf"{NUMBER}\s?{UNIT}", "", heading or ""))
    last = in_heading[-1] if in_heading else ""
    for match in FIGURE.finditer(VERSION.sub("", text)):
        unit, bound = match["unit"] or "", match["bound"] or ""
        for number in re.findall(NUMBER, match["numbers"]):
            whole, _, decimals = number.replace(",", "").partition(".")
            if unit == "×" and not decimals and re.match(r"\s?(?:[(`@]|\w\b|[A-Z]{3})", text[match.end() :]):
                continue  # a tile of 128 × `n`, or 8 × LDGSTS
            bare = (
                decimals or (last and UNITS[last][0] != "ratio")
                if heading is not None
                else len(decimals) in (2, 3)
            )
            if not (unit or in_heading or bare):
                continue
            value, step = float(number.replace(",", "")), 10.0 ** -len(decimals.split("e")[0])
            if re.fullmatch(ABOUT, bound):
                step = max(step if decimals else 10.0 ** (len(whole) - len(whole.rstrip("0"))), 0.05 * value)
            units = (unit,) if unit else (last,) if in_heading else tuple(dict.fromkeys([last or "×", "×"]))
            yield Figure(f"{bound} {number} {unit}".strip(), value, step / 2, units, bound, text)
        last = unit or last


def read_sentences(source: str) -> Iterator[tuple[str, str]]:
    """Yield each sentence of Markdown with its paragraph, without code blocks, comments, links and quotations."""
    source = re.sub(
        r"(?s)```.*?```|<!-- (\w+): written.*end of \1 -->|<!--.*?-->|(?<=\])\([^)]*\)", "", source
    )
    for block in re.split(r"\n\s*\n|\n(?=[|>#-]|\d+\.)", source):
        paragraph = " ".join(block.split()).replace("**", "")
        prose = re.sub(r"\*?[\"“][^\"”]*[\"”]\*?|<[^>]*>", " ", paragraph)
        prose = re.sub(r"`[^`]*`", lambda code: re.sub(r"\d\.\d+", "", code[0]), prose)
        for sentence in re.split(r"(?<=[.!?])\s+(?=\S)", prose):
            yield sentence, paragraph


def find_words(*texts: str) -> frozenset:
    """Return the beginnings of words, by which prose and rows of tables are compared."""
    words = re.findall(r"[a-z]{3,}|\d+", " ".join(texts).lower().replace("_", " "))
    return frozenset(word[:5] for word in words) - {"the", "and", "for", "with", "than", "from"}


def read_tables(cell: dict) -> Iterator[list[list[str]]]:
    """Yield the tables of a cell's outputs. Each line of other text is a table of one row."""
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        page = "".join(data.get("text/html", ""))
        for table in re.findall(r"(?s)<table.*?</table>", page):
            rows = [
                re.findall(r"(?s)<t[hd].*?</t[hd]>", row) for row in re.findall(r"(?s)<tr.*?</tr>", table)
            ]
            yield [[html.unescape(re.sub("<[^>]*>", "", text)).strip() for text in row] for row in rows]
        rest = re.sub(r"(?s)<table.*?</table>|<[^>]*>", "", page) or "".join(data.get("text/plain", ""))
        text = [html.unescape(rest), "".join(data.get("text/markdown", "")), "".join(output.get("text", ""))]
        for line in "\n".join(text).splitlines():
            yield [[line], [line]]


def read_outputs(cell: dict, index: int) -> list[Value]:
    """Return the values of a cell's outputs."""
    values = []
    for number, (head, *rows) in enumerate(read_tables(cell)):
        for title in head if len(head) > 1 else ():
            values += [
                Value(f"[{index}] {title}", each.number, each.units[0]) for each in read_figures(title)
            ]
        seen = collections.Counter()
        for r, row in enumerate(rows):
            seen[row[0]] += 1
            label = (
                " ".join(text for text in row if not re.search(r"\d\.\d", text)) if len(row) > 1 else row[0]
            )
            name = (
                f"{row[0]} {seen[row[0]] if seen[row[0]] > 1 else ''}"
                if len(row) > 1
                else re.sub(r"\d+", "#", row[0])
            )
            for title, text in zip(head, row, strict=False):
                for n, figure in enumerate(read_figures(text, title) if not title.endswith("±") else ()):
                    where = f"[{index}] {name.strip()}, {title if len(row) > 1 else n}"
                    lines = ((index, number, r), (index, title))
                    words = find_words(label)
                    values.append(Value(where, figure.number, figure.units[0], words, lines))
    return values


def compare(values: list[Value], figure: Figure, words: frozenset) -> Iterator[Value]:
    """Yield the quotients, or for per cent the differences, of two values of a row or column that the words name."""
    values = [value for value in values if value.number and value.lines and value.words & words]
    changes = figure.units[0] == "%"
    for value in values:
        if changes and UNITS[value.unit][0] == "ratio":
            share = value.number * UNITS[value.unit][1]
            yield Value(f"change of {value.where}", abs(1 - share), "×")
            yield Value(f"inverse change of {value.where}", abs(1 - 1 / share), "×")
    for a, b in itertools.permutations(values, 2):
        if a.unit == b.unit and set(a.lines) & set(b.lines) and a.where != b.where:
            quotient = a.number / b.number
            yield Value(f"{a.where} / {b.where}", abs(quotient - 1) if changes else quotient, "×")


@functools.cache
def read_record(name: str, rev: str = "") -> list[Value]:
    """Return the values of a record of the H200, with two means of each column, also of rows with equal flags."""
    columns: dict[str, list[float]] = {}

    def walk(item, key: str, group: str = "") -> None:
        if isinstance(item, dict):
            flags = " ".join(f"{name} {value}" for name, value in item.items() if isinstance(value, bool))
            for name, value in item.items():
                walk(value, name, flags)
        elif isinstance(item, list):
            for value in item:
                walk(value, key, group)
        elif isinstance(item, float) and item > 0:
            for column in {key, f"{key} {group}".strip()}:
                columns.setdefault(column, []).append(item)

    walk(json.loads(read(f"results/nvidia-h200/{name}.json", rev) or "{}").get("rows", []), "")
    values = []
    for key, column in columns.items():
        unit = next((unit for pattern, unit in COLUMNS if re.search(pattern, key.split()[0])), "×")
        means = {"geometric mean": statistics.geometric_mean(column), "median": statistics.median(column)}
        for row, value in [*enumerate(column if " " not in key else ()), *means.items()]:
            lines = ((name, key),) if re.fullmatch("ratio|speed", key) else ()
            values.append(Value(f"{name}, {key} {row}", value, unit, frozenset({"record"}), lines))
    return values


def compute(paragraph: str) -> list[Value]:
    """Return the values of expressions such as "4,200 GB/s × 0.75 µs / 132"."""
    number, words = r"\(*\d[\d,]*(?:\.\d+)?", r"(?: ?[A-Za-zµ]+(?:/s)?){0,2}\)*"
    values = []
    for found in re.finditer(rf"{number}{words}(?: [×/+−·-] {number}{words})+", paragraph):
        expression = re.sub(r"[A-Za-zµ]+(?:/s)?|,", "", found[0])
        try:
            value = float(eval(expression.translate(str.maketrans("×·−", "**-")), {"__builtins__": {}}))
        except (SyntaxError, ZeroDivisionError, TypeError, OverflowError):
            continue  # a part of a sentence that only looks like one
        values.append(Value(found[0], value, ""))
    return values


def read(path: str, rev: str = "") -> str:
    """Return a file of this repository, as it is or as it was in a revision; empty if there is none."""
    if not rev:
        return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
    return subprocess.run(["git", "show", f"{rev}:{path}"], cwd=ROOT, capture_output=True, text=True).stdout


class Text:
    """A notebook, or a page of Markdown as one cell, with the values that may hold its figures."""

    def __init__(self, path: str, rev: str = ""):
        source = read(path, rev)
        self.cells = (
            json.loads(source)["cells"]
            if path.endswith(".ipynb")
            else [{"cell_type": "markdown", "source": source}]
        )
        self.sources = ["".join(cell["source"]) for cell in self.cells]
        self.outputs = [read_outputs(cell, index) for index, cell in enumerate(self.cells)]
        comments = " ".join(re.findall(r"(?s)<!-- figures: (.*?)-->", "".join(self.sources)))
        self.marked = [
            Value("a comment", figure.number, unit)
            for figure in read_figures(comments)
            for unit in figure.units
        ]
        self.rev, self.titles, title = rev, [], ""
        for cell, source in zip(self.cells, self.sources, strict=True):
            if cell["cell_type"] == "markdown":
                title = (re.findall(r"(?m)^#+ (.*)", source) or [title])[-1]
            self.titles.append(title)

    def read_prose(self) -> Iterator[tuple[int, str, str]]:
        """Yield the cell, sentence and paragraph of each sentence that is no claim of others."""
        for index, source in enumerate(self.sources):
            if self.cells[index]["cell_type"] == "markdown":
                yield from ((index, *each) for each in read_sentences(source) if not CLAIM.search(each[0]))

    def find_values(self, index: int, paragraph: str, figure: Figure) -> Iterator[list[Value]]:
        """Yield values that may hold a figure of a cell, the strongest evidence first."""
        named = re.findall(r"\*([^*]+)\*", paragraph)
        near = [
            i
            for i, title in enumerate(self.titles)
            if abs(i - index) <= 3 or any(is_named(title, n) for n in named)
        ]
        yield [value for i in near for value in self.outputs[i]]
        code = " ".join(self.sources[i] for i in near if self.cells[i]["cell_type"] == "code")
        page = "" if self.outputs[1:] else self.sources[0]  # a page names its records anywhere
        for names in (paragraph + code, page):
            yield [value for name in set(re.findall(RECORD, names)) for value in read_record(name, self.rev)]
            for name in set(re.findall(r"`((?:\d\d_|claims)\w*)`", names)):
                yield [
                    value
                    for values in read_text(f"notebooks/{name}.ipynb", self.rev).outputs
                    for value in values
                ]
            if "CLAIMS.md" in names:  # written from the records
                yield [
                    Value("CLAIMS.md", f.number, f.units[0])
                    for f in read_figures(read("CLAIMS.md", self.rev))
                ]
        yield compute(self.sources[index])
        yield self.marked
        yield [Value("the code", float(number), "") for number in set(re.findall(CONSTANT, code))]
        if figure.units[0] in ("times", "×", "%") and COMPARES.search(figure.sentence):
            words = find_words(figure.sentence)
            yield [each for i in near for each in compare(self.outputs[i], figure, words)]
            records = [
                value for name in set(re.findall(RECORD, paragraph)) for value in read_record(name, self.rev)
            ]
            yield list(compare(records[:400], figure, frozenset({"record"})))

    def find_holders(self, index: int, paragraph: str, figure: Figure) -> list[Value]:
        """Return the values of the strongest evidence that holds a figure."""
        for values in self.find_values(index, paragraph, figure):
            if held := [value for value in values if figure.fits(value.number, value.unit)]:
                common = [len(value.words & find_words(figure.sentence)) for value in held]
                return [value for value, words in zip(held, common, strict=True) if words == max(common)]
        return []


def is_named(title: str, name: str) -> bool:
    """Return whether a paragraph names a section, as *Step 2*, *Steps 1 to 3* or by its title."""
    if steps := re.fullmatch(r"Steps? (\d+)(?: (?:to|and) (\d+))?", name):
        return any(
            re.search(rf"Step {n}\b", title) for n in range(int(steps[1]), int(steps[2] or steps[1]) + 1)
        )
    return len(name) > 3 and name in title


@functools.cache
def read_text(path: str, rev: str = "") -> Text:
    """Return a file, read once."""
    return Text(path, rev)


def check(path: str, since: str = "") -> Iterator[tuple[int, str, Figure, list[Value]]]:
    """Yield the cell, paragraph, figure and holders of each figure of a file; figures that repeat hold each other."""
    text, old = read_text(path), read_text(path, since) if since else None
    was = {sentence: (index, paragraph) for index, sentence, paragraph in old.read_prose()} if old else {}
    found = []
    for index, sentence, paragraph in text.read_prose():
        for figure in read_figures(sentence):
            holders, moved = text.find_holders(index, paragraph, figure), False
            if old and sentence in was:
                before = {value.where for value in old.find_holders(*was[sentence], figure)}
                now = [
                    v
                    for values in text.find_values(index, paragraph, figure)
                    for v in values
                    if v.where in before
                ]
                moved = bool(now) and not any(figure.fits(value.number, value.unit) for value in now)
            found.append((index, paragraph, figure, [] if moved else holders, moved))
    held = {(f.number, f.half, unit): holders for _, _, f, holders, _ in found if holders for unit in f.units}
    for index, paragraph, figure, holders, moved in found:
        keys = [] if moved else [(figure.number, figure.half, unit) for unit in figure.units]
        yield index, paragraph, figure, holders or next((held[key] for key in keys if key in held), [])


def find_unheld(paths: Iterable[str], since: str = "") -> Iterator[str]:
    """Yield a line for each figure that nothing holds, with the three nearest values of its cell."""
    for path in paths:
        for index, paragraph, figure, holders in check(path, since):
            if not holders:
                values = {
                    (abs(scaled - figure.number), f"{scaled:.4g} ({value.where})")
                    for values in read_text(path).find_values(index, paragraph, figure) for value in values if value.unit
                    for scaled in figure.scale(value.number, value.unit)
                }  # fmt: skip
                nearest = "; ".join(text for _, text in sorted(values)[:3])
                yield f'{path} [{index}] "{figure.sentence.strip()}" → {figure.text}; nearest: {nearest or "none"}'


def list_files() -> list[str]:
    """Return the notebooks and the pages whose figures are checked."""
    pages = [
        "README.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
    ]
    files = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "docs/deeper").glob("*.md")]
    return sorted([*pages, *(str(path.relative_to(ROOT)) for path in files)])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures that nothing holds."""
    parser = argparse.ArgumentParser(
        "python -m tilelab.course.figures", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="notebook or page, from the root of the repository"
    )
    parser.add_argument(
        "--since", default="", metavar="REV", help="a commit, in which these figures stood elsewhere"
    )
    options = parser.parse_args(argv)
    lines = list(find_unheld(options.files or list_files(), options.since))
    print(*lines, f"{len(lines)} figures that nothing holds", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
