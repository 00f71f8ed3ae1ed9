"""Rows of a sweep on disk: a JSON line each, safe from a crash, to resume from."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable

import filelock

from tilelab import results


class Journal:
    """Rows on disk, one JSON line each, on stable storage before `append` returns. Several sweeps may share one."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def _lock(self) -> filelock.FileLock:
        return filelock.FileLock(f"{self.path}.lock", timeout=10)  # its Timeout is an OSError

    def append(self, row: dict) -> None:
        """Add a row; OSError when the disk refuses it."""
        line = _line(row).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(), open(self.path, "a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # the last writer was killed in the middle of a line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the rows of `keys`, and what was made of them; OSError."""
        keys = set(keys)
        if not self.path.exists():
            return
        with self._lock():
            kept = [row for key, row in self.rows().items()
                    if key not in keys and not any(str(part) in keys for part in _parts(row))]
            results.write_atomically(self.path, "".join(map(_line, kept)))

    def rows(self) -> dict[str, dict]:
        """The last row of each key. A line that is torn or no row counts for nothing."""
        found = {}
        try:
            with open(self.path, "rb") as file:
                for line in file:
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(row, dict) and isinstance(row.get("key"), str):
                        found[row["key"]] = row
        except FileNotFoundError:
            pass
        return found


def _line(row: dict) -> str:
    """JSON that UTF-8 can hold: half a surrogate, which an error's text may bring, is escaped as JSON does."""
    return results.json_line(row, "a row").encode(errors="backslashreplace").decode() + "\n"


def _parts(row: dict) -> list:
    """Keys of the rows that a comparison is of."""
    return row["of"] if isinstance(row.get("of"), list) else []


def journal_for(name: str) -> Journal:
    """The journal of an experiment: sweeps/<name>.jsonl in the repository, or in the folder that TILES_SWEEPS names."""
    folder = os.environ.get("TILES_SWEEPS") or pathlib.Path(__file__).parents[1] / "sweeps"
    return Journal(pathlib.Path(folder) / f"{name}.jsonl")
