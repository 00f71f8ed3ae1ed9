"""What the sweep panel knows of a choice: a row for every configuration, from this session, the journal or a record.

A row is that of a Sweep, with `status` "waiting" before it has come and `laid` where a record's are laid over it: the
whole "row", or the "times" of what was built here.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tilelab import device, sweep
from tilelab.journal import Journal, journal_for
from tilelab.tunable import Space, TunableKernel

TOP = 10
# What cells can show: a key, its words (with the name of the peer), and whether less is better (None: neither).
SHOWS = {"ratio": ("speed × {}", False), "ms": ("ms", True), "predicted_ms": ("predicted ms", True),
         "registers": ("registers", None), "smem": ("shared memory, KiB", None),
         "programs_per_sm": ("programs per SM", None)}
TIMED, RATES = ("ratio", "ms"), ("tflops", "gbps")
# What a record says of a configuration that was built here.
MEASURED = ("status", "reason", "ms", "peer_ms", "ratio", "final_ms", "final_ratio", "tflops", "gbps", "error",
            "peer_error")


def figure(row: dict, show: str) -> float | None:
    """The number of a row that `show` asks for, None where it has none; the interleaved timing goes first."""
    if row["status"] not in ("ok", "waiting") or row["status"] == "waiting" and show != "predicted_ms":
        return None
    found = row.get(f"final_{show}") or row.get(show)
    if found and show in RATES and row.get("final_ms"):
        found *= row["ms"] / row["final_ms"]
    return found / 1024 if found and show == "smem" else found


def word(row: dict) -> str:
    """One word for a row without a figure: what it has too little of, or its status."""
    if row["status"] in ("ok", "wrong", "waiting"):
        return {"waiting": "·"}.get(row["status"], row["status"])
    causes = {"register": "registers", "shared memory": "smem", "tensor memory": "tmem", "": row["status"]}
    return next(short for cause, short in causes.items() if cause in row["reason"])


def ranked(rows: Sequence[dict]) -> list[dict]:
    """Best first: timed, as a Sweep ranks them; then by prediction what was built, what waits, the rest."""
    rest = [row for row in rows if row["status"] != "ok" or not row.get("ms")]
    rest.sort(key=lambda row: ({"ok": 0, "waiting": 1}.get(row["status"], 2), row.get("predicted_ms") or math.inf))
    return sweep.sort_by_speed(rows) + rest


def winner(rows: Iterable[dict]) -> dict | None:
    """The fastest, as a Sweep names it; None where nothing is timed."""
    return next(iter(sweep.sort_by_speed(rows)), None)


def best(rows: Sequence[dict]) -> list[dict]:
    """The ten fastest; where nothing is timed, those that the model takes for the fastest of what was built."""
    return (sweep.sort_by_speed(rows) or [row for row in ranked(rows) if row["status"] == "ok"])[:TOP]


def natural(text: str) -> tuple:
    """Sorts "64×256" before "128×64"."""
    return [int(part) for part in re.findall(r"\d+", text)], text


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the menus say, and what is known of it without running.

    `configs` and `base` are the configurations and their first rows by key, `past` the record's rows by configuration,
    `source` where they are from; `like` says whether the record is of this target.
    """

    subject: TunableKernel
    space: Space
    journal: Journal
    name: str
    configs: dict[str, Any]
    base: dict[str, dict]
    past: dict[str, dict]
    source: str
    like: bool

    def rows(self, kept: dict[str, dict], running: bool = False) -> list[dict]:
        """A row for every configuration: what came of it here (`kept`, by key), with or else from the record."""
        fresh = running or any(key in kept for key in self.base)
        return [self._row({**base, **kept.get(key, {})}, fresh) for key, base in self.base.items()]

    def _row(self, row: dict, fresh: bool) -> dict:
        past = self.past.get(row["kernel"], {})
        if not fresh and past and row["status"] == "waiting":
            return {**row, **past, "kernel": row["kernel"], "predicted_ms": row["predicted_ms"], "laid": "row"}
        if fresh and not self.space.can_measure and row["status"] == "ok" and past.get("status") in ("ok", "wrong", "failed"):
            return {**row, **{name: past[name] for name in MEASURED if name in past}, "laid": "times"}
        return row

    def shown(self, rows: Iterable[dict], show: str) -> str:
        """What cells can show: as asked, or where nothing is timed what the compiler said, before that the model."""
        timed, built, predicted = (any(row.get(name) for row in rows) for name in ("ms", "registers", "predicted_ms"))
        if show not in TIMED or timed:
            return show
        return "registers" if built and not self.space.can_measure else "predicted_ms" if predicted else show

    def cells(self, rows: Iterable[dict], x: str, y: str) -> dict[tuple[str, str], list[dict]]:
        """{(x, y): rows of the cell, best first} over two axes, as a picture is read: from the top left."""
        across, up = self.subject.axes[x], self.subject.axes[y]
        cells = collections.defaultdict(list)
        for config, row in zip(self.configs.values(), rows):
            cells[across(config), up(config)].append(row)
        order = sorted(cells, key=lambda place: natural(place[0]))
        order.sort(key=lambda place: natural(place[1]), reverse=True)
        return {place: ranked(cells[place]) for place in order}


def sentence(error: BaseException) -> str:
    """What went wrong, for people."""
    expected = isinstance(error, (ValueError, OSError, device.Unsupported))
    return str(error) if expected and str(error) else f"{type(error).__name__}: {error}"


def targets() -> list[tuple[str, str]]:
    """The target menu: the GPU here, as "", then every target that has TMA."""
    here = device.current()
    known = [(target, target) for target in device.TARGETS if device.target_limits(target).has_tma]
    return [(f"this GPU ({here.name})", "")] * here.has_tma + known


def choose(subject: TunableKernel, shape: str, dtype: str, preset: str, target: str) -> Choice:
    """The Choice of menu values (target "": the GPU here); ValueError, and what else the subject raises."""
    sizes = shape_of(shape, subject)
    space = subject.space(sizes, dtype, target or None)
    configs = sweep.config_keys(subject.presets[preset](dtype), space)
    if not configs:
        raise ValueError(f"{preset} holds no configuration of {dtype}.")
    base = {}
    for key, config in configs.items():
        reason = space.reject(config)
        base[key] = {**space.label(config), "key": key, "predicted_ms": space.predicted_ms(config), "reason": reason,
                     "status": "rejected" if reason else "waiting"}
    journal = journal_for(re.sub(r"\W+", "-", subject.name.lower()).strip("-"))
    name = f"{subject.name}, {shape}, {dtype}, {space.target}"
    return Choice(subject, space, journal, name, configs, base, *_recorded(subject, space, sizes, dtype))


def _recorded(subject, space, shape, dtype) -> tuple[dict[str, dict], str, bool]:
    try:
        record = subject.recorded()
    except FileNotFoundError:
        return {}, "", False
    if record.device["target"] != space.target:
        return {}, "", False
    rows = {row.get("kernel") or row["config"]: row for row in record.rows
            if row["shape"] == list(shape) and row["dtype"] == dtype}
    return rows, record.label().partition(" (")[0] if rows else "", True  # the label's brackets hold hashes


def shape_of(text: str, subject: TunableKernel) -> tuple[int, ...]:
    """A subject's shape by its name, or from "4096,4096,4096"; ValueError for anything else."""
    if text in subject.shapes:
        return subject.shapes[text]
    sizes = re.split(r"\s*[,;x×]\s*|\s+", text.strip())
    if not all(re.fullmatch(r"\d{1,18}", size, re.ASCII) for size in sizes):
        raise ValueError(f"a shape is a name of the menu or whole numbers such as "
                         f"{','.join(map(str, next(iter(subject.shapes.values()))))}; here it is {text[:60]!r}.")
    return tuple(map(int, sizes))
