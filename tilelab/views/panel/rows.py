"""The rows behind the sweep panel: one per configuration, from this session, from the journal or from a record.

A row is one of a Sweep. Its `status` is "waiting" before the sweep has come to it. `from_record` says that its figures
are those of a record, which stay until the configuration is measured on this machine. `here` says that a sweep on this
machine has built or measured it; where the figures are recorded, `built` holds what was built here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tilelab.pictures import scales
from tilelab.runtime import device, provenance, spoken
from tilelab.sweeps import sweep
from tilelab.sweeps.journal import Journal, journal_for
from tilelab.sweeps.space import Space
from tilelab.views.panel import words

TOP = 10
# The fields that cells can show, with a label (for the peer's name) and whether less is better.
SHOWN_FIELDS = {
    "ratio": ("speed, × {}", False),
    "ms": ("time, ms", True),
    "predicted_ms": ("predicted time, ms", True),
    "registers": ("registers per thread", False),
    "smem": ("shared memory, KiB", False),
    "programs_per_sm": ("programs per SM", False),
}
COMPILERS = {"triton": "Triton", "cuda": "CUDA"}  # their fields in a record's versions
TIMES, RATES = ("ratio", "ms"), ("tflops", "gbps")
NUMBERS = {*SHOWN_FIELDS, *RATES, *"peer_ms final_ms final_ratio error peer_error spills threads".split()}
# what a build finds
BUILT_FIELDS = "status reason registers spills smem threads programs_per_sm counts".split()
# The fields of a row that the view in the browser gets as they are; get_value gives it the others.
SENT_FIELDS = (
    "kernel status reason note registers spills smem threads programs_per_sm from_record here".split()
)


def is_drawable(field: str, value: Any) -> bool:
    """Return whether a value is of the kind that its field needs: records and journals may hold anything."""
    if field in NUMBERS:
        return value is None or isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max
    return isinstance(value, {"reason": str, "note": str, "counts": dict}.get(field, object))


def get_value(row: dict, field: str) -> float | None:
    """Return a field's number as the panel shows it, or None. The interleaved timing goes before the first."""
    if row["status"] != "ok" and (row["status"], field) != ("waiting", "predicted_ms"):
        return None
    value = row.get(f"final_{field}") or row.get(field, row.get("built", {}).get(field))
    if value and field in RATES and row.get("ms") and row.get("final_ms"):
        value *= row["ms"] / row["final_ms"]
    return value / 1024 if value and field == "smem" else value


def short_status(row: dict) -> str:
    """Return the words for a row without a value: the resource that it exceeds, or its status."""
    if row["status"] != "rejected":
        return {"waiting": "not built"}.get(row["status"], row["status"])
    causes = {
        "register": "too many registers",
        "shared memory": "over shared memory",
        "tensor memory": "over tensor memory",
    }
    return next((words for cause, words in causes.items() if cause in row.get("reason", "")), "cannot run")


def rank_rows(rows: Sequence[dict]) -> list[dict]:
    """Return the best first: timed rows as a Sweep ranks them, then built, waiting and other rows by prediction."""
    order = {"ok": 0, "waiting": 1}
    untimed = [row for row in rows if row["status"] != "ok" or not row.get("ms")]
    untimed.sort(key=lambda row: (order.get(row["status"], 2), row.get("predicted_ms") or math.inf))
    return sort_by_speed(rows) + untimed


def sort_by_speed(rows: Iterable[dict]) -> list[dict]:
    """Return the timed rows as a Sweep ranks them: those measured on this machine first, then those of the record."""
    ranked = sweep.sort_by_speed(rows)
    return sorted(ranked, key=lambda row: "from_record" in row)


def find_winner(rows: Iterable[dict]) -> dict | None:
    """Return the fastest row as a Sweep names it; None where nothing is timed."""
    return next(iter(sort_by_speed(rows)), None)


def top_rows(rows: Sequence[dict]) -> list[dict]:
    """Return the ten fastest rows; where nothing is timed, the ten built ones that the model ranks first."""
    return (sort_by_speed(rows) or [row for row in rank_rows(rows) if row["status"] == "ok"])[:TOP]


def shade(value: float, values: Sequence[float], field: str) -> float:
    """Return where a value of a field stands on the colour scale, as the view in the browser shades it."""
    if field == "ratio":
        return scales.place_around_one(value, values)
    return scales.place_on_scale(value, values, less_is_better=SHOWN_FIELDS[field][1])


def describe_row(row: dict) -> dict:
    """Return a row as the view in the browser gets it: numbers of six digits, without what is not known."""
    built = describe_row(row["built"]) if "built" in row else None
    found = {name: row.get(name) for name in SENT_FIELDS} | {"word": short_status(row)}
    found |= {name: get_value(row, name) for name in ("predicted_ms", *TIMES, *RATES)}
    found |= {name: row.get(name) for name in ("error", "peer_error")}
    found["counts"] = {
        str(name): count for name, count in row.get("counts", {}).items() if isinstance(count, int)
    }
    found |= {"again": bool(row.get("final_ms")), "built": built}
    rounded = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in found.items()
    }
    # The text of an error may hold half a surrogate pair, which no message can carry.
    return {
        name: value.encode(errors="replace").decode() if isinstance(value, str) else value
        for name, value in rounded.items()
        if not (value is None or value is False or value in ("", {}))
    }


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice in the menus, with its configurations and the rows that are known without a sweep.

    `configs` and `initial_rows` are the configurations and their first rows by key, `recorded_rows` the rows of the
    record by the configuration's name, and `source` says where those were measured. `compilers` names the compilers of
    the record and of this machine, and `recorded` names the shapes and dtypes that the record has of this target.
    """

    space: Space
    journal: Journal
    name: str
    configs: dict[str, Any]
    initial_rows: dict[str, dict]
    recorded_rows: dict[str, dict]
    source: str
    compilers: dict[str, str]
    recorded: set[str]

    def rows(self, session_rows: dict[str, dict]) -> list[dict]:
        """Return a row for every configuration: of the record, or from `session_rows` (by key) where it says more."""
        return [self._combine(row, session_rows.get(key, {})) for key, row in self.initial_rows.items()]

    def _combine(self, row: dict, found: dict) -> dict:
        """Return the first row of a configuration with what the record or a sweep here has found."""

        def keep_drawable(row: dict) -> dict:
            return {field: value for field, value in row.items() if is_drawable(field, value)}

        swept = found and row["status"] == "waiting"  # a rejected one is never built
        recorded = self.recorded_rows.get(row["kernel"])
        if not recorded or row["status"] != "waiting" or swept and self.space.can_measure:
            return keep_drawable({**row, **found, **({"here": True} if swept else {})})
        shown = {**row, **recorded, "kernel": row["kernel"], "predicted_ms": row["predicted_ms"]}
        if swept:
            shown |= {
                "here": True,
                "built": keep_drawable({name: found[name] for name in BUILT_FIELDS if name in found}),
            }
        return keep_drawable({**shown, "from_record": True, "key": row["key"]})

    def count_done(self, session_rows: dict[str, dict]) -> collections.Counter:
        """Return how many configurations a sweep here has finished, by status."""
        rows = ({**row, **session_rows.get(key, {})} for key, row in self.initial_rows.items())
        return collections.Counter(row["status"] for row in rows if row["status"] != "waiting")

    def choose_field(self, rows: Sequence[dict], wanted: str) -> str:
        """Return the field that cells show: the wanted one, or the first that is known where no row has it."""
        known = [name for name in SHOWN_FIELDS if any(get_value(row, name) for row in rows)]
        if wanted in known or not known:
            return wanted if known or self.space.can_measure else "registers"
        return known[0]

    @functools.cached_property
    def axes(self) -> dict[str, dict]:
        """Return {name of an axis: its labels in order, and "of", the index of the label of each configuration}."""
        found = {}
        for name, label in self.space.axes.items():
            labels = [str(label(config)) for config in self.configs.values()]
            labels = [spoken.count(int(text), name) if text.isdigit() else text for text in labels]
            order = sorted(set(labels), key=scales.natural_key)
            found[name] = {"labels": order, "of": [order.index(text) for text in labels]}
        return found

    def describe(self, dtype: str) -> dict:
        """Return what the view in the browser draws and no sweep changes: names, axes, roofline, Python code."""
        configs = list(self.configs.values())
        classes = sorted({(type(config).__module__, type(config).__name__) for config in configs})
        return {
            "name": self.name,
            "peer": self.space.peer,
            "target": self.space.target,
            "source": self.source,
            "compilers": self.compilers,
            "measures": self.space.can_measure,
            "keys": list(self.configs),
            "axes": self.axes,
            "words": words.explain_words(
                (row["kernel"] for row in self.initial_rows.values()), self.space.peer, self.space.words
            ),
            "roofline": self._describe_roofline(dtype),
            "unrecorded": self._list_unrecorded(),
            "reprs": [repr(config) for config in configs],
            "imports": "\n".join(f"from {module} import {name}" for module, name in classes),
        }

    def _list_unrecorded(self) -> dict[str, list[str]]:
        """Return the options of menus to which the record does not have all rows; none where there is no record."""
        space, known = self.space, self.recorded
        if not known:
            return {}
        presets = [
            preset
            for preset, make in space.presets.items()
            for config in make(space.dtype)
            if space.label(config)["kernel"] not in self.recorded_rows and not space.reject(config)
        ]
        return {
            "shape": [
                name for name, sizes in space.shapes.items() if _name_case(sizes, space.dtype) not in known
            ],
            "dtype": [dtype for dtype in space.dtypes if _name_case(space.shape, dtype) not in known],
            "preset": list(dict.fromkeys(presets)),
        }

    def _describe_roofline(self, dtype: str) -> dict:
        if not (self.space.can_measure or self.recorded):  # the roofs are of another GPU
            return {"problem": f"no roofline: nothing is timed on {self.space.target}"}
        try:
            roof = self.space.roofline(dtype)
            return {
                "label": roof.intensity_label,
                "field": roof.speed_field,
                "unit": roof.unit,
                "flat": roof.flat_roofs,
                "slopes": roof.bandwidth_roofs,
                "intensity": [float(roof.intensity(config)) for config in self.configs.values()],
            }
        except Exception as error:  # no record of the roofs
            return {"problem": f"no roofline: {describe_error(error)}"}


def describe_error(error: BaseException) -> str:
    """Return the sentence of an error that is meant for the reader; any other with the name of its class."""
    expected = isinstance(error, (ValueError, OSError, device.Unsupported))
    return str(error) if expected and str(error) else f"{type(error).__name__}: {error}"


def make_choice(kernel: type[Space], shape: str, dtype: str, preset: str, target: str) -> Choice:
    """Return the Choice of the menus' values. ValueError says what the kernel cannot take."""
    space = kernel(kernel.parse_shape(shape), dtype, target or None)
    configs = sweep.config_keys(kernel.presets[preset](dtype), space)
    if not configs:
        raise ValueError(f"{preset} holds no configuration of {dtype}.")
    initial_rows = {}
    for key, config in configs.items():
        reason = space.reject(config)
        initial_rows[key] = {
            **space.label(config),
            "key": key,
            "predicted_ms": None if (us := space.predict_us(config)) is None else us / 1e3,
            "reason": reason,
            "status": "rejected" if reason else "waiting",
        }
    journal = journal_for(re.sub(r"\W+", "-", kernel.title.lower()).strip("-"))
    name = f"{kernel.title}, {shape}, {dtype}, {space.target}"
    return Choice(space, journal, name, configs, initial_rows, *_load_recorded(space))


def _name_compilers(versions: dict) -> str:
    return ", ".join(f"{name} {versions[key]}" for key, name in COMPILERS.items() if versions.get(key))


def _name_case(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def _load_recorded(space: Space) -> tuple[dict[str, dict], str, dict[str, str], set]:
    compilers = {"here": _name_compilers(provenance.versions())}
    try:
        record = space.load_record()
    except FileNotFoundError:
        record = None
    if record is None or record.device["target"] != space.target:
        return {}, "", compilers, set()
    compilers["record"] = _name_compilers(record.data.get("versions") or {})
    by_case = collections.defaultdict(dict)
    for row in record.rows:
        if row.get("status") in sweep.STATUSES:
            by_case[f"{row.get('dtype')} {row.get('shape')}"][row.get("kernel") or row.get("config")] = row
    rows = by_case.get(_name_case(space.shape, space.dtype), {})
    source = record.label().partition(" (")[0] if rows else ""  # the label's brackets hold hashes
    return rows, source, compilers, set(by_case)


def sort_by_record(kernel: type[Space], dtype: str, target: str) -> list[str]:
    """Return the presets of a kernel at its first shape, first those of which the record holds the largest part."""

    def order(preset: str) -> tuple:
        configs = kernel.presets[preset](dtype)
        known = sum(space.label(config)["kernel"] in recorded for config in configs)
        return -known / max(len(configs), 1), -known

    try:
        space = kernel(next(iter(kernel.shapes.values())), dtype, target or None)
        recorded = _load_recorded(space)[0]
        return sorted(kernel.presets, key=order)
    except Exception:  # make_choice will say what is wrong
        return list(kernel.presets)
