"""Keep the rows of a sweep on disk, one JSON line each, so that a sweep can be resumed after a crash."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable

import filelock

from tilelab import results


class Journal:
    """Rows on disk. A row is on stable storage before `append` returns, and several sweeps may share a file."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def _lock(self) -> filelock.FileLock:
        return filelock.FileLock(f"{self.path}.lock", timeout=10)  # its Timeout is an OSError

    def append(self, row: dict) -> None:
        """Add a row. Raises OSError when the disk refuses it."""
        line = _format_line(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock(), open(self.path, "a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # the last writer was killed in the middle of a line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the rows of `keys`, and the comparisons that they took part in. Raises OSError."""
        keys = set(keys)
        if not self.path.exists():
            return
        with self._lock():
            kept = [row for key, row in self.rows().items()
                    if key not in keys and not keys.intersection(row.get("of", []))]
            results.write_atomically(self.path, b"".join(map(_format_line, kept)).decode())

    def rows(self) -> dict[str, dict]:
        """Return the last row of each key. A line that is torn, or no row, is passed over."""
        found = {}
        if not self.path.exists():
            return found
        for line in self.path.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("key"), str):
                found[row["key"]] = row
        return found


def _format_line(row: dict) -> bytes:
    # The text of an error may hold half a surrogate pair, which UTF-8 cannot: escape it as JSON does.
    return results.json_line(row, "a row").encode(errors="backslashreplace") + b"\n"


def journal_for(name: str) -> Journal:
    """Return the journal sweeps/<name>.jsonl in the repository, or in the folder that TILES_SWEEPS names."""
    folder = os.environ.get("TILES_SWEEPS") or pathlib.Path(__file__).parents[1] / "sweeps"
    return Journal(pathlib.Path(folder) / f"{name}.jsonl")
