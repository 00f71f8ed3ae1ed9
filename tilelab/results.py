"""Read and write results/<gpu>/<experiment>.json; give a notebook live rows where they can be had, else recorded ones.

A record is one object: {"experiment", "device", "versions", "recorded", "source", "rows": [{...}, ...]}. `recorded` is
UTC, `source` the `source_hash` of what was measured, so that a record older than its kernel is told apart.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import hashlib
import html
import inspect
import json
import math
import os
import pathlib
import platform
import re
import textwrap
import threading
import types
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from tilelab import device

KEYS = ("experiment", "device", "versions", "recorded", "source", "rows")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PARSING = threading.Lock()  # Python 3.11 counts depth for all threads together, and refuses what two parse at once
NAME = re.compile(r"[a-z0-9_]+")
_CUDA_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/|#include[^\n]*|#pragma once", re.DOTALL)
COURSE = re.compile(r"(ch\d\d|tilelab|claims)\b")
NO_GPU = device.Device()  # of records that no GPU has a part in; their folder is results/no-gpu
PREFERRED = "nvidia-h200"  # the course's figures come from it; shown where this machine has no record of its own


def results_folder() -> pathlib.Path:
    """results/ of the repository, or the folder that the environment variable TILES_RESULTS names."""
    return pathlib.Path(os.environ.get("TILES_RESULTS") or pathlib.Path(__file__).parents[1] / "results")


class _Normalise(ast.NodeTransformer):
    """Rewrite code so that only what can change a measurement is left of it (see `source_hash`)."""

    def __init__(self, modules: set[str]):
        self.modules = modules  # names under which the file imports modules of the course
        self.locals: dict[str, str] = {}  # a function's local variables -> neutral names

    def _statements(self, node):
        """Drop docstrings, imports and the `if __name__ == "__main__"` block of a body."""
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body.pop(0)
        node.body = [statement for statement in node.body if not _is_administrative(statement)]
        return self.generic_visit(node)

    visit_Module = visit_ClassDef = _statements

    def visit_FunctionDef(self, node):
        if not getattr(node, "type_params", True):  # a field that Python 3.11 does not have
            del node.type_params
        outer, self.locals = self.locals, self.locals or _local_names(node)
        node = self._statements(node)
        self.locals = outer
        return node

    def visit_Name(self, node):
        node.id = self.locals.get(node.id, node.id)
        return node

    def visit_Attribute(self, node):  # after a move, `configs.ITEMSIZE` may read `ITEMSIZE`
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Raise(self, node):
        for part in ast.walk(node):
            for name, value in ast.iter_fields(part):
                if _is_text(value):
                    setattr(part, name, ast.Constant("text of an error"))
                elif isinstance(value, list):
                    setattr(part, name, [ast.Constant("text of an error") if _is_text(v) else v for v in value])
        return self.generic_visit(node)

    def visit_JoinedStr(self, node):  # Python 3.12 adds empty pieces to an f-string's format
        node.values = [v for v in node.values if not (isinstance(v, ast.Constant) and v.value == "")]
        return self.generic_visit(node)


def _is_administrative(statement: ast.stmt) -> bool:
    """Whether a statement only imports, lists `__all__`, or runs the module as a command."""
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in ("__name__ == '__main__'", "TYPE_CHECKING")
    return isinstance(statement, (ast.Import, ast.ImportFrom)) or (
        isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__")


def _is_text(value: Any) -> bool:
    return isinstance(value, ast.JoinedStr) or isinstance(value, ast.Constant) and isinstance(value.value, str)


def _local_names(function: ast.AST) -> dict[str, str]:
    """Neutral names for the variables that a function assigns; its parameters keep theirs, which callers use."""
    kept = set(dir(builtins))
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            kept.add(node.arg)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            kept.update(node.names)
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    assigned = dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Store) and node.id not in kept)
    return {name: f"local {number}" for number, name in enumerate(assigned)}


def _course_modules(tree: ast.AST) -> set[str]:
    """Names that a file binds to modules of the course by `from ch14 import gemm` or `import tilelab.device as d`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound = {alias.asname or alias.name.split(".")[-1] for node in imports for alias in node.names
             if COURSE.match(getattr(node, "module", None) or alias.name)}
    return {name for name in bound if not name[:1].isupper()}  # a class keeps its attributes


def _definitions(thing: Any) -> list[str]:
    """The normalised text of each definition in `thing`."""
    if isinstance(thing, pathlib.Path) and thing.suffix != ".py":  # CUDA C++
        from tilelab import cuda

        headers, _ = cuda.included_headers(thing.read_text(), str(thing), [f"-I{cuda.INCLUDE_FOLDER}"])
        return [" ".join(_CUDA_COMMENTS.sub(" ", text).split()) for text in (thing.read_text(), *headers.values())]
    while not isinstance(thing, (type, types.ModuleType)) and hasattr(thing, "fn"):  # triton.jit, autotune
        thing = thing.fn
    whole = ast.parse(thing.read_text() if isinstance(thing, pathlib.Path) else "".join(inspect.findsource(thing)[0]))
    part = not isinstance(thing, (pathlib.Path, types.ModuleType))
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing))) if part else whole
    body = _Normalise(_course_modules(whole)).visit(tree).body
    return [ast.dump(statement) for statement in body]  # not ast.unparse: its quotes differ between 3.11 and 3.12


def source_hash(*things: Any) -> str:
    """Return 16 hex digits that change when the code of `things` does.

    `things` are functions, Triton kernels, classes, modules, or the Path of a Python file or of a CUDA C++ file, which
    counts with the headers that it includes in quotes. What they call counts only when it is given too. Not counted,
    because it cannot change a measurement: comments, docstrings, layout, imports, texts of errors, names of local
    variables, `if __name__ == "__main__"` blocks, names of files, the order of definitions and the file that each of
    them stands in.
    """
    with _PARSING:
        definitions = {text for thing in things for text in _definitions(thing)}
        return hashlib.sha256("\n".join(sorted(definitions)).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """The software that a figure depends on; None stands for what is not there."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton"),
            "cuda": torch.version.cuda, "driver": device.current().driver, "cublas": _version("nvidia-cublas")}


def utc_now() -> str:
    """The time as records hold it: "2026-11-21T04:50:17Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_name(experiment: Any) -> None:
    """ValueError for what would be another folder's file, or a pattern, when it is made a path."""
    if not (isinstance(experiment, str) and NAME.fullmatch(experiment)):
        raise ValueError(f"an experiment's name is made of a to z, 0 to 9 and _; here it is {experiment!r:.60}.")


def make_record(experiment: str, rows: Sequence[dict], source: str, on: device.Device | None = None) -> dict:
    """A record of `rows`, measured now on this machine, of code whose `source_hash` is `source`. ValueError for a name
    that is not of a to z, 0 to 9 and _.

    `on` is what the rows are of where that is not the GPU here: NO_GPU for builds, which need none.
    """
    _check_name(experiment)
    return {"experiment": experiment, "device": dataclasses.asdict(on or device.current()), "versions": versions(),
            "recorded": utc_now(), "source": source, "rows": list(rows)}


def json_line(value: Any, what: str) -> str:
    """One line of JSON; numpy and torch scalars become numbers."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=lambda scalar: scalar.item())
    except ValueError as error:
        raise ValueError(f"{what} holds NaN or infinity, which JSON cannot say: record None and a reason.") from error


def to_json(record: dict) -> str:
    """The text of a record, one row a line so that a diff reads well; ValueError for NaN or infinity."""
    name = record["experiment"]
    head = [f" {json.dumps(key)}: {json_line(record[key], f'{key} of {name}')}" for key in KEYS if key != "rows"]
    rows = ",\n".join(f"  {json_line(row, f'row {index} of {name}')}" for index, row in enumerate(record["rows"]))
    return "{\n" + ",\n".join(head) + ',\n "rows": [' + (f"\n{rows}\n " if rows else "") + "]\n}\n"


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Write `text` to `path`, which never holds half of it and keeps what it held where the text cannot be written
    (OSError); a device such as /dev/stdout stays one."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")  # no process id: containers share those
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # some file systems find a disk full only now
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def gpu_folder(record: dict) -> str:
    """Folder name of the GPU that a record comes from."""
    return device.Device(record["device"]["name"]).slug


def save(record: dict, to: pathlib.Path | None = None) -> pathlib.Path:
    """Write a record under `to` (default: results/) and return its path. ValueError for a name that is none, and for
    NaN or infinity in it."""
    _check_name(record["experiment"])
    path = (to or results_folder()) / gpu_folder(record) / f"{record['experiment']}.json"
    write_atomically(path, to_json(record))
    return path


def load(experiment: str, gpu: str | None = None) -> dict:
    """The record of an experiment on `gpu` (a folder of results/).

    By default the record of this machine's GPU, else of the H200, else of the first GPU that has one.
    FileNotFoundError says what there is instead; ValueError is for a name that is none, and names a file that is no
    record.
    """
    _check_name(experiment)
    found = {path.parent.name: path for path in sorted(results_folder().glob(f"*/{experiment}.json"))}
    wanted = [gpu] if gpu else [device.current().slug, PREFERRED, *found]
    path = next((found[name] for name in wanted if name in found), None)
    if path is None:
        others = sorted(path.parent.name + "/" + path.stem for path in results_folder().glob("*/*.json"))
        raise FileNotFoundError(f"no record of {experiment}{f' on {gpu}' if gpu else ''} in {results_folder().name}/: "
                                f"there is {', '.join(others) or 'nothing yet'}.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    missing = [key for key in KEYS if key not in record] if isinstance(record, dict) else list(KEYS)
    if missing:
        raise ValueError(f"{path} is no record: it lacks {', '.join(missing)}.")
    if not isinstance(record["rows"], list) or not all(isinstance(row, dict) for row in record["rows"]):
        raise ValueError(f"{path} is no record: its rows are not a list of objects.")
    return record


def stale_reason(record: dict, source: str) -> str:
    """Empty, or a clause saying that the code has changed since the record was made."""
    if record["source"] == source:
        return ""
    return (f"recorded {record['recorded'][:10]}, older than its kernel "
            f"(source {record['source'][:4]}… then, {source[:4]}… now)")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows with the caption that says where they come from, in a notebook and on a terminal."""

    frame: Any
    caption: str

    def __repr__(self) -> str:
        return f"{self.caption}\n{self.frame.to_string(index=False)}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.caption)}</p>\n{self.frame.to_html(index=False, border=0)}"


def _cell(value: Any) -> str:
    """A value for a reader: four digits, no more than a measurement is good for; nothing for a missing one."""
    if isinstance(value, (list, tuple)):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        if math.isnan(value):  # what pandas makes of None among numbers
            return ""
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return "" if value is None else str(value)


def table(rows: Sequence[dict], caption: str, columns: Sequence[str] | None = None, sort: str | None = None) -> Table:
    """A Table of rows: `columns` chosen and ordered, sorted by column `sort` ("-tflops": largest first)."""
    import pandas

    frame = pandas.DataFrame(list(rows))
    if sort:
        frame = frame.sort_values(sort.removeprefix("-"), ascending=not sort.startswith("-"), kind="stable")
    if columns:
        frame = frame[list(columns)]
    return Table(frame.astype(object).map(_cell), caption)


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """Rows, where they come from, and whether they were measured just now (`live`)."""

    data: dict
    live: bool
    stale: str = ""

    @property
    def experiment(self) -> str:
        return self.data["experiment"]

    @property
    def device(self) -> dict:
        return self.data["device"]

    @property
    def rows(self) -> list[dict]:
        return self.data["rows"]

    def label(self) -> str:
        """Where the rows come from: "recorded on NVIDIA H200, 2026-11-21", say, and whether the kernel has changed."""
        if self.live:
            day = self.data["recorded"][:10]
            return f"live on {self.device['name']}, {day}" if self.device["capability"] else "live, without a GPU"
        when = self.stale.removeprefix("recorded ") or self.data["recorded"][:10]
        where = f"on {self.device['name']}" if self.device["capability"] else "without a GPU"
        return f"recorded {where}, {when}"

    def frame(self):
        """The rows as a pandas DataFrame, unrounded."""
        import pandas

        return pandas.DataFrame(self.rows)

    def show(self, columns: Sequence[str] | None = None, sort: str | None = None) -> Table:
        """A table to read: `columns` chosen and ordered, rows sorted by column `sort` ("-tflops": largest first)."""
        return table(self.rows, f"{self.experiment}: {self.label()}", columns, sort)

    def __repr__(self) -> str:
        return repr(self.show())

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


def live_or_recorded(experiment: str, run: Callable[[], Sequence[dict]], source: str,
                     can_run: bool | None = None) -> Record:
    """Rows of `run()` where this machine can run it, else the recorded ones; a notebook never branches on hardware.

    `can_run` says whether it can (default: the GPU has TMA). With TILES_RECORD=1 live rows are saved in results/ too.
    `source` is the `source_hash` of what `run` measures; errors are those of `run`, `save` and `load`, and
    tilelab.device.Unsupported where the GPU's memory does not suffice.
    """
    _check_name(experiment)  # before minutes of measuring
    if device.current().has_tma if can_run is None else can_run:
        try:
            rows = run()
        except Exception as error:
            if reason := device.out_of_memory_reason(error):
                raise device.Unsupported(f"{experiment}: {reason}") from error
            raise
        record = make_record(experiment, rows, source)
        if os.environ.get("TILES_RECORD") == "1":
            save(record)
        return Record(record, live=True)
    return load_record(experiment, source)


def experiment(name: str, source: Callable[[], str], can_run: Callable[[], bool] | None = None):
    """Decorator: a function that returns rows becomes one that returns a Record, through `live_or_recorded`.

    `source()` is the hash of what it measures; the new function has it as `.source`.
    """
    def wrap(rows: Callable[[], Sequence[dict]]) -> Callable[[], Record]:
        @functools.wraps(rows)
        def run() -> Record:
            return live_or_recorded(name, rows, source(), can_run and can_run())
        run.source = source
        return run
    return wrap


def load_record(experiment: str, source: str) -> Record:
    """The record of an experiment as it lies in results/, saying whether code of this `source` is newer; errors of
    `load`."""
    record = load(experiment)
    return Record(record, live=False, stale=stale_reason(record, source))


def load_recent_record(experiment: str, source: str, within_s: float = 3600) -> Record | None:
    """The record of an experiment, where it is of this machine's GPU and software, of code of this `source`, and not
    older than `within_s` seconds; else None."""
    try:
        record = load_record(experiment, source)
        age = datetime.now(UTC) - datetime.fromisoformat(record.data["recorded"])
    except (FileNotFoundError, ValueError):
        return None
    here = json.loads(json.dumps([dataclasses.asdict(device.current()), versions()]))
    same = [record.device, record.data["versions"]] == here
    return record if same and not record.stale and 0 <= age.total_seconds() < within_s else None


def geometric_mean(values: Sequence[float]) -> float:
    """The mean that ratios want: a half and a two make one."""
    return math.exp(sum(map(math.log, values)) / len(values))
