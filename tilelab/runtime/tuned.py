"""Keep the fastest configuration of a kernel for each shape that was tuned, and find it again.

The file <gpu>/<kernel>.json holds a row per shape: the configuration, its time and its ratio to the library, and where
the row comes from. A table is used on the GPU that it names and on no other. It belongs to the user; what the models of
the kernels' times learnt from belongs to the course (tilelab.runtime.choice).
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
from typing import Any

import filelock

from tilelab.runtime import device, files, plans, provenance

LARGEST_EXTENT = 2**31 - 1


def folder() -> pathlib.Path:
    """Return the folder of what the models learnt from: the one that TILES_TUNED names, else the repository's tuned/.

    It is reached by a link beside this file, so that an installed package has the tables as its own data.
    """
    return pathlib.Path(os.environ.get("TILES_TUNED") or pathlib.Path(__file__).with_name("tuned_tables"))


def user_folder() -> pathlib.Path:
    """Return the folder of the tables of tuned shapes: the one that TILES_TUNED names, else one in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(os.environ.get("TILES_TUNED") or pathlib.Path(cache, "tiles-in-flight/tuned"))


def table_path(kernel: str, gpu: str) -> pathlib.Path:
    """Return the file of `kernel` for a GPU, by the name that its driver gives it."""
    return user_folder() / device.Device(gpu).slug / f"{kernel}.json"


def load(kernel: str, gpu: str) -> list[dict]:
    """Return the rows of a table; none if there is no file. ValueError, in one sentence, for a damaged file."""
    path = table_path(kernel, gpu)
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
    """Raise an error unless a row has what `find_exact` and `keep` read."""
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


def keep(kernel: str, rows: Iterable[dict], gpu: str, replace: bool = False) -> list[str]:
    """Merge rows of `tilelab.sweeps.tune` into the table of `kernel`, and return a sentence for each row.

    A row has m, n, k, dtype, a `config` (a dataclass), us, peer, peer_us, ratio, spread, tried and `source`. A shape
    that is in the table keeps its configuration unless the new one is faster by more than the spread, the kernel's
    source has changed, or `replace` is true. The next call of an operator in this process is planned anew, with the new
    table. Raises ValueError for a damaged file, which is left as it is, and OSError when the file cannot be written.
    """
    path = table_path(kernel, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    said = []
    with filelock.FileLock(f"{path}.lock", timeout=60):
        table = {_key(row): row for row in load(kernel, gpu)}
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
    """Return (configuration, "tuned") if the table of the GPU here has a row of this very shape.

    A row whose configuration this version does not know or cannot run is passed over. A row that was measured with
    other code than `source()`, a hash, is still used, and the answer says so. A damaged table counts as none: `load`
    says what is wrong with it.
    """
    rows: list[dict] = []
    with contextlib.suppress(ValueError):
        rows = load(kernel, device.current().name or "")
    for row in rows:
        if (row["dtype"], row["m"], row["n"], row["k"]) == (dtype, m, n, k):
            with contextlib.suppress(TypeError, ValueError):
                if can_run(config := kind(**row["config"])):
                    return config, "tuned" + _describe_age(row, source)
    return None


def _describe_age(row: dict, source: Callable[[], str] | None) -> str:
    return "" if source is None or row.get("source") == source() else ", for another version of the kernel"
