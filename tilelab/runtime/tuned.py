"""Keep the fastest configuration of a kernel for each shape that was tuned, and find one for any other shape.

The file tuned/<gpu>/<kernel>.json holds a row per shape: the configuration, its time and its ratio to the library, and
where the row comes from. A table is used on the GPU that it names and on no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from statistics import geometric_mean
from typing import Any

import filelock

from tilelab.runtime import device, files, plans, provenance

NEIGHBOURS = 6  # tuned shapes whose configurations are compared for a shape that was not tuned
LARGEST_EXTENT = 2**31 - 1
FARTHEST = 4.0  # in octaves: the extents differ by at most a factor of 16 in all


def folder() -> pathlib.Path:
    """Return the folder of the tables: the one that TILES_TUNED names, else the repository's tuned/.

    It is reached by a link beside this file, so that an installed package has the tables as its own data.
    """
    return pathlib.Path(os.environ.get("TILES_TUNED") or pathlib.Path(__file__).with_name("tuned_tables"))


def user_folder() -> pathlib.Path:
    """Return the folder of the tables that config="tune" makes: TILES_TUNED, else one in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(os.environ.get("TILES_TUNED") or pathlib.Path(cache, "tiles-in-flight/tuned"))


def table_path(kernel: str, gpu: str) -> pathlib.Path:
    """Return the file of `kernel` for a GPU, by the name that its driver gives it."""
    return folder() / device.Device(gpu).slug / f"{kernel}.json"


def load(kernel: str, gpu: str, path: pathlib.Path | None = None) -> list[dict]:
    """Return the rows of a table; none if there is no file. ValueError, in one sentence, for a damaged file."""
    path = path or table_path(kernel, gpu)
    try:
        state = path.stat()
    except OSError:
        return []
    return _read(path, gpu, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=16)
def _read(path: pathlib.Path, gpu: str, *_) -> list[dict]:
    try:
        table = json.loads(path.read_text())
        if table["gpu"] != gpu:
            raise ValueError(f"it was measured on {table['gpu']}")
        for row in table["rows"]:
            _check_row(row)
        return table["rows"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no table of tuned configurations for {gpu} "
            f"({type(error).__name__}: {device.first_line(error)[:100]}): mend it or delete it."
        ) from None


def _check_row(row: dict) -> None:
    """Raise an error unless a row has what `find` and `keep` read."""
    for extent in "mnk":
        if type(row[extent]) is not int or not 0 < row[extent] <= LARGEST_EXTENT:
            raise ValueError(f"{extent} of a row must be a whole number from 1 to {LARGEST_EXTENT:,}")
    for name in ("us", "ratio", "spread"):
        if type(row[name]) not in (int, float) or not 0 <= row[name] < math.inf or row["us"] == 0:
            raise ValueError(f"{name} of a row must be a finite number, and us above 0")
    if not all(isinstance(row[name], str) for name in ("dtype", "name")):
        raise ValueError("dtype and name of a row must be texts")
    for name, value in row["config"].items():
        if isinstance(value, int | float) and not abs(value) <= LARGEST_EXTENT:
            raise ValueError(f"{name} of a configuration is too large")


def keep_for_user(kernel: str, row: dict, gpu: str) -> None:
    """Keep a row in the user's own table. A folder that cannot be written, or a damaged file, is no error."""
    with contextlib.suppress(OSError, ValueError, filelock.Timeout):
        keep(
            kernel, [row], gpu, replace=True, path=user_folder() / device.Device(gpu).slug / f"{kernel}.json"
        )


def keep(
    kernel: str, rows: Iterable[dict], gpu: str, replace: bool = False, path: pathlib.Path | None = None
) -> list[str]:
    """Merge rows of `tilelab.sweeps.tune` into the table of `kernel`, and return a sentence for each row.

    A row has m, n, k, dtype, a `config` (a dataclass), us, peer, peer_us, ratio, spread, tried and `source`. A shape
    that is in the table keeps its configuration unless the new one is faster by more than the spread, the kernel's
    source has changed, or `replace` is true. The next call of an operator in this process is planned anew, with the new
    table. Raises ValueError for a damaged file, which is left as it is, and OSError when the file cannot be written.
    """
    path = path or table_path(kernel, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    said = []
    with filelock.FileLock(f"{path}.lock", timeout=60):
        table = {_key(row): row for row in load(kernel, gpu, path)}
        for row in rows:
            new, old = _format(row), table.get(_key(row))
            shape = "{m} × {n} × {k}".format_map(row)
            if old and not (
                replace
                or old["config"] == new["config"]
                or old.get("source") != new["source"]
                or new["ratio"] > old["ratio"] + max(old["spread"], new["spread"])
            ):
                said.append(
                    f"{shape} keeps {old['name']}: {new['name']} is not faster by more than the spread."
                )
                continue
            table[_key(row)] = new
            said.append(
                f"{shape}: {new['name']}, {new['us']:.1f} µs, {new['ratio']:.2f} × {new['peer']}"
                + (f", in place of {old['name']}" if old and old["config"] != new["config"] else "")
                + "."
            )
        lines = ",\n".join(files.json_line(table[key], "a tuned row") for key in sorted(table))
        head = f'{{"kernel": {json.dumps(kernel)}, "gpu": {json.dumps(gpu)}, "rows": [\n'
        files.write_atomically(path, f"{head}{lines}\n]}}\n")
    plans.forget_plans()
    return said


def _key(row: dict) -> tuple:
    return row["dtype"], row["n"], row["k"], row["m"]


def _format(row: dict) -> dict:
    """Return a row as the file keeps it: of the configuration only what differs from its defaults."""
    config = row["config"]
    fields = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }
    versions = {name: row.get(name) or provenance.versions().get(name) for name in ("torch", "triton")}
    return {
        **{name: row[name] for name in ("m", "n", "k", "dtype")},
        "name": getattr(config, "name", str(config)),
        "config": fields,
        **{name: float(f"{row[name]:.4g}") for name in ("us", "peer_us", "ratio", "spread")},
        "peer": row["peer"],
        "tried": row["tried"],
        "source": row["source"],
        **versions,
        "recorded": row.get("recorded") or provenance.utc_now(),
    }


def _rows(kernel: str, dtype: str) -> list[dict]:
    """Return the rows of the tables for the GPU here, those of the user first; none of a table that is damaged."""
    gpu, found = device.current().name or "", []
    for path in dict.fromkeys(
        (user_folder() / device.Device(gpu).slug / f"{kernel}.json", table_path(kernel, gpu))
    ):
        with contextlib.suppress(ValueError):
            found += [row for row in load(kernel, gpu, path) if row["dtype"] == dtype]
    return found


def find_exact(
    kernel: str,
    kind: Callable[..., Any],
    m: int,
    n: int,
    k: int,
    dtype: str,
    can_run: Callable[[Any], bool],
    source: Callable[[], str] | None = None,
) -> tuple[Any, str] | None:
    """Return (configuration, "tuned") if the table of the GPU here has a row of this very shape, as `find` does."""
    for row in _rows(kernel, dtype):
        if (row["m"], row["n"], row["k"]) == (m, n, k):
            with contextlib.suppress(TypeError, ValueError):
                if can_run(config := kind(**row["config"])):
                    return config, "tuned" + _describe_age(row, source)
    return None


def find(
    kernel: str,
    kind: Callable[..., Any],
    m: int,
    n: int,
    k: int,
    dtype: str,
    predict_us: Callable[[Any, int, int, int], float],
    can_run: Callable[[Any], bool],
    source: Callable[[], str] | None = None,
    untuned: Any = None,
) -> tuple[Any, str] | None:
    """Return (configuration, how it was chosen) for a shape on the GPU here, or None without a table that helps.

    The row of the shape itself is taken, if there is one. Otherwise the configurations of the six nearest shapes are
    compared with each other and with `untuned`, the choice without a table; None stands for it where it wins. The time
    of a neighbour's configuration is `predict_us(config, m, n, k)`, times the factor by which the model erred at the
    neighbour's own shape. The time of `untuned` is multiplied by the geometric mean of these factors.

    Rows whose configuration this version does not know or cannot run are passed over. A row that was measured with
    other code than `source()`, a hash, is still used, and the answer says so. A damaged table counts as none: `load`
    says what is wrong with it.
    """
    if not m or not n or not k:  # nothing to multiply
        return None
    if exact := find_exact(kernel, kind, m, n, k, dtype, can_run, source):
        return exact
    rows = _rows(kernel, dtype)
    near = []  # type: ignore[var-annotated]
    for row in sorted(rows, key=lambda row: _distance(row, m, n, k)):
        distance = _distance(row, m, n, k)
        if distance > FARTHEST or len(near) == NEIGHBOURS:
            break
        try:
            config = kind(**row["config"])
        except (TypeError, ValueError):
            continue
        if not can_run(config):
            continue
        near.append((config, row, row["us"] / predict_us(config, row["m"], row["n"], row["k"])))
    if not near:
        return None
    config, row, factor = min(near, key=lambda each: each[2] * predict_us(each[0], m, n, k))
    if untuned is not None:
        usual = geometric_mean([factor for *_, factor in near])
        if usual * predict_us(untuned, m, n, k) <= factor * predict_us(config, m, n, k):
            return None
    return config, "tuned at {m} × {n} × {k}".format_map(row) + _describe_age(row, source)


def _describe_age(row: dict, source: Callable[[], str] | None) -> str:
    return "" if source is None or row.get("source") == source() else ", for another version of the kernel"


def _distance(row: dict, m: int, n: int, k: int) -> float:
    """Return how far a row's shape is, in octaves; K counts half, because it changes neither tiles nor waves."""
    return abs(math.log2(row["m"] / m)) + abs(math.log2(row["n"] / n)) + abs(math.log2(row["k"] / k)) / 2
