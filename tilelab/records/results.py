"""Read and write results/<gpu>/<experiment>.json, and give a notebook live rows or recorded ones.

A record is one JSON object with the keys and types in KEYS. Its `recorded` is a time in UTC. Its `source` is the
`source_hash` of the measured code, so that a record that is older than its kernel can be recognised. Its `environment`
says the same of what else its figures depend on (`tilelab.records.environment`); records made before lack it.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import geometric_mean as geometric_mean  # callers take it from here
from typing import Any

from tilelab import ROOT
from tilelab.records import environment
from tilelab.runtime import device, files, provenance

KEYS = {"experiment": str, "device": dict, "versions": dict, "recorded": str, "source": str, "rows": list}
NAME = re.compile(r"[a-z0-9_]+")
NO_GPU = device.Device()  # builds need no GPU; their records are in results/no-gpu
PREFERRED = "nvidia-h200"  # shown where this machine's GPU has no record
EXPERIMENTS: dict[str, Callable] = {}  # {name: function that returns the Record}, filled by `register`


def results_folder() -> pathlib.Path:
    """Return the folder in the environment variable TILES_RESULTS, the repository's results/, or those of the wheel."""
    installed = pathlib.Path(sys.prefix, "share/tiles-in-flight/results")
    folder = installed if installed.exists() and not (ROOT / "results").exists() else ROOT / "results"
    return pathlib.Path(os.environ.get("TILES_RESULTS") or folder)


# ---- records on disk


def _check_name(experiment: Any) -> None:
    """Raise ValueError for a name that could lead out of results/ or match several files."""
    if not (isinstance(experiment, str) and NAME.fullmatch(experiment)):
        raise ValueError(f"the name of an experiment holds a to z, 0 to 9 and _; it is {experiment!r:.60}.")


def make_record(experiment: str, rows: Sequence[dict], source: str, on: device.Device | None = None) -> dict:
    """Return a record of `rows`, measured now on this machine, of code with the `source_hash` `source`.

    `on` replaces the current GPU: NO_GPU for builds, which need none. ValueError for a name that is not made of a to z,
    0 to 9 and _.
    """
    _check_name(experiment)
    where, versions = dataclasses.asdict(on or device.current()), provenance.versions()
    return dict(zip(KEYS, (experiment, where, versions, provenance.utc_now(), source, list(rows))))


def to_json(record: dict) -> str:
    """Return the text of a record, with one row per line for readable diffs. ValueError for NaN or infinity."""
    of = f"of {record['experiment']}"
    keys = [*list(KEYS)[:-1], *(key for key in ("environment",) if key in record)]
    head = [f" {json.dumps(key)}: {files.json_line(record[key], f'{key} {of}')},\n" for key in keys]
    lines = [files.json_line(row, f"row {index} {of}") for index, row in enumerate(record["rows"])]
    rows = ",\n".join(f"  {line}" for line in lines)
    return "{\n" + "".join(head) + ' "rows": [' + (f"\n{rows}\n " if rows else "") + "]\n}\n"


def gpu_folder(record: dict) -> str:
    """Return the name of the folder in results/ for the GPU of a record."""
    return device.Device(record["device"]["name"]).slug


def file_name(experiment: str) -> str:
    """Return the name of the file that holds the record of an experiment, in the folder of its GPU."""
    return f"{experiment}.json"


def save(record: dict, to: pathlib.Path | None = None) -> pathlib.Path:
    """Write a record under `to` (default: results/) and return its path. ValueError as `make_record` and `to_json`."""
    _check_name(record["experiment"])
    path = (to or results_folder()) / gpu_folder(record) / file_name(record["experiment"])
    files.write_atomically(path, to_json(with_environment(record)))
    return path


def with_environment(record: dict) -> dict:
    """Return a record with its `environment`, if its experiment is one of the course's. It never raises."""
    if record["experiment"] not in EXPERIMENTS and os.environ.get("TILES_RECORD") != "1":
        return record
    try:
        found = environment.describe(record["experiment"], record["device"]["name"], record["rows"])
    except Exception as error:  # figures that took minutes are kept also where this fails
        print(f"The environment of {record['experiment']} is not recorded: {device.first_line(error)}.")
        return record
    return record | ({"environment": found} if found else {})


def _refuse_constant(name: str):
    raise ValueError(f"it holds {name}")


def load(experiment: str, gpu: str | None = None) -> dict:
    """Return the record of an experiment on `gpu`, a folder of results/.

    The default is the record of this machine's GPU, else the H200's, else the first one found. FileNotFoundError lists
    the records there are. ValueError as `read`.
    """
    _check_name(experiment)
    paths = {path.parent.name: path for path in sorted(results_folder().glob(f"*/{file_name(experiment)}"))}
    wanted = [gpu] if gpu else [device.current().slug, PREFERRED, *paths]
    path = next((paths[name] for name in wanted if name in paths), None)
    if path is None:
        others = sorted(path.parent.name + "/" + path.stem for path in results_folder().glob("*/*.json"))
        raise FileNotFoundError(
            f"no record of {experiment}{f' on {gpu}' if gpu else ''} in {results_folder().name}/: "
            f"there is {', '.join(others) or 'nothing yet'}."
        )
    return read(path)


def read(path: pathlib.Path) -> dict:
    """Return the record in a file. ValueError names a file that is not a record."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    check_record(record, path)
    return record


def check_record(record: Any, path: str | os.PathLike) -> None:
    """Raise ValueError, in one sentence that names the file `path`, if its content is not a record."""
    found = record if isinstance(record, dict) else {}
    wrong = [key for key, kind in KEYS.items() if not isinstance(found.get(key), kind)]
    if not wrong and not {"name", "capability", "target"} <= record["device"].keys():
        wrong = ["device"]
    if not wrong and not all(isinstance(row, dict) for row in record["rows"]):
        wrong = ["rows"]
    if not wrong and "environment" in record:
        depends = record["environment"]
        wrong = [] if isinstance(depends, dict) and depends.keys() == {"code", "tables"} else ["environment"]
    if wrong:
        raise ValueError(f"{path} is not a record: it has no valid {', '.join(wrong)}.")


def stale_reason(record: dict, source: str) -> str:
    """Return "" or a clause that says that the code has changed since the record was made."""
    if record["source"] == source:
        return ""
    return (
        f"recorded {record['recorded'][:10]}, older than its kernel "
        f"(source {record['source'][:4]}… then, {source[:4]}… now)"
    )


# ---- rows for a reader


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts with a caption that states their origin. Only a notebook needs pandas to show them.

    A notebook shows the first `folded` rows only when the reader opens them; they may be all rows.
    """

    columns: list[str]
    rows: list[list[str]]
    caption: str
    folded: int = 0

    @property
    def frame(self) -> Any:
        """The table as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.rows, columns=self.columns, dtype=object)

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join([self.caption, *(" ".join(map(str.rjust, line, widths)) for line in lines)])

    def _repr_html_(self) -> str:
        first, rest = (
            part.to_html(index=False, border=0)
            for part in (self.frame[: self.folded], self.frame[self.folded :])
        )
        if self.folded == len(self.rows) > 0:
            return f"<p>{html.escape(self.caption)}</p>\n<details><summary>the table</summary>\n{first}\n</details>"
        summary = f"{self.folded} earlier row{'s' if self.folded > 1 else ''}"
        earlier = f"<details><summary>{summary}</summary>\n{first}\n</details>\n"
        return f"<p>{html.escape(self.caption)}</p>\n{earlier if self.folded else ''}{rest}"


def format_cell(value: Any, column: str = "") -> str:
    """Return a value as text: four digits, or what the column's measurement justifies: a ratio 3, a spread 2."""
    digits = 2 if "±" in column else 3 if "×" in column else 4
    if isinstance(value, (list, tuple)):
        return " x ".join(map(str, value))
    if isinstance(value, float):
        if math.isnan(value):
            return ""
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.{digits}g}"
    return "" if value is None else str(value)


def table(rows: Sequence[dict], caption: str, columns: Sequence[str] | None = None) -> Table:
    """Return a Table of `rows` with these `columns`, by default all. KeyError for a column that no row has."""
    rows = list(rows)
    known = dict.fromkeys(name for row in rows for name in row)
    columns = list(columns or known)
    if unknown := [name for name in columns if name not in known]:
        raise KeyError(f"no row has {', '.join(unknown)}")
    cells = [[format_cell(row.get(name), str(name)) for name in columns] for row in rows]
    return Table([str(name) for name in columns], cells, caption)


@dataclasses.dataclass(frozen=True, repr=False)
class Record:
    """The rows of an experiment with their origin. `live` says whether they were measured just now."""

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
        """Return the origin of the rows, such as "recorded on NVIDIA H200, 2026-11-21"; a stale record says so."""
        has_gpu, when = self.device["capability"], self.data["recorded"][:10]
        if self.live:
            return f"measured on {self.device['name']}, {when}" if has_gpu else "computed here, without a GPU"
        return (
            f"recorded {'on ' + self.device['name'] if has_gpu else 'without a GPU'}, "
            f"{self.stale.removeprefix('recorded ').partition(' (')[0] or when}"
        )

    def show(self, columns: Sequence[str] | None = None) -> Table:
        """Return a Table of the rows, as `table` does, with the label as its caption."""
        return table(self.rows, f"{self.experiment}: {self.label()}", columns)

    def __repr__(self) -> str:
        return repr(self.show())

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()


# ---- experiments


def live_or_recorded(
    experiment: str, measure: Callable[[], Sequence[dict]], source: str, can_run: bool | None = None
) -> Record:
    """Return live rows from `measure()` where this machine can measure them, else the recorded ones.

    `can_run` says whether it can; the default is whether the GPU has TMA. `source` is the `source_hash` of the measured
    code. With TILES_RECORD=1 in the environment, live rows are also saved in results/. Raises as `measure`, `save` and
    `load` do, and Unsupported where the GPU has too little memory.
    """
    _check_name(experiment)  # before minutes of measuring
    if not (device.current().has_tma if can_run is None else can_run):
        return load_record(experiment, source)
    with device.explain_missing_memory(experiment):
        rows = measure()
    record = make_record(experiment, rows, source)
    if os.environ.get("TILES_RECORD") == "1":
        save(record)
    return Record(record, live=True)


def experiment(
    name: str, source: Callable[[], str], can_run: Callable[[], bool] | None = None, reuse_for_s: float = 0
):
    """Decorate a function that measures rows so that it returns a Record, through `live_or_recorded`.

    `source()` is the `source_hash` of the measured code; the decorated function has it as `.source`, and EXPERIMENTS
    lists the function. Its `.load()` returns the record without measuring. A record of this machine that is younger
    than `reuse_for_s` seconds is returned as it is.
    """

    def decorate(measure: Callable[..., Sequence[dict]]) -> Callable[..., Record]:
        @functools.wraps(measure)
        def run(*args, **kwargs) -> Record:
            recent = load_recent_record(name, source(), reuse_for_s) if reuse_for_s else None
            return recent or live_or_recorded(
                name, functools.partial(measure, *args, **kwargs), source(), can_run and can_run()
            )

        return register(name, run, source)

    return decorate


def register(name: str, run: Callable[..., Record], source: Callable[[], str]) -> Callable[..., Record]:
    """Add a function that returns the Record of an experiment to EXPERIMENTS, with `source` as its `.source`.

    Its `.load()` returns the Record in results/ and measures nothing.
    """
    run.source, run.load = source, lambda: load_record(name, source())
    EXPERIMENTS[name] = run
    return run


def load_record(experiment: str, source: str) -> Record:
    """Return the Record of an experiment in results/, stale if `source` differs from its own. Raises as `load` does."""
    record = load(experiment)
    return Record(record, live=False, stale=stale_reason(record, source))


def load_recent_record(experiment: str, source: str, within_s: float = 3600) -> Record | None:
    """Return the record that this GPU, this software and this `source` made in the last `within_s` seconds, or None."""
    try:
        record = load_record(experiment, source)
        age = datetime.now(UTC) - datetime.fromisoformat(record.data["recorded"])
    except (FileNotFoundError, TypeError, ValueError):  # a date without a zone is a TypeError
        return None
    here = json.loads(json.dumps([dataclasses.asdict(device.current()), provenance.versions()]))
    same = [record.device, record.data["versions"]] == here
    return record if same and not record.stale and 0 <= age.total_seconds() < within_s else None
