"""Keep the rows of a sweep on disk, one JSON line each, so that a sweep can be resumed after a crash."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
import zlib
from collections.abc import Iterable

import filelock

from tilelab import ROOT
from tilelab.runtime import files

CHECKSUM = b', "crc32": '  # the last field of a line: a line that is torn or edited does not match it


class Journal:
    """Rows on disk. A row is on stable storage before `append` returns, and several sweeps may share a file.

    Raises ValueError for a path that is no regular file, and OSError for one that the system refuses.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(os.path.realpath(path))  # a link and its target must lock the same name
        self._lock_path = f"{self.path}.lock"
        for file in (self.path, self._lock_path):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(os.stat(file).st_mode):
                    raise ValueError(
                        f"a journal is a regular file, or a path where nothing is yet; {file} is neither."
                    )

    def _lock(self) -> filelock.FileLock:
        return filelock.FileLock(self._lock_path, timeout=10)  # its Timeout is an OSError

    def append(self, row: dict) -> None:
        """Add a row, which has a `key`. Raises OSError when the disk refuses it."""
        line = _format_line(row)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(), open(self.path, "a+b") as file:
                if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    line = b"\n" + line  # the last writer was killed in the middle of a line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except filelock.Timeout:
            raise
        except OSError as error:
            raise files.make_write_error(self.path, error) from error

    def forget(self, keys: Iterable[str]) -> None:
        """Drop the rows of `keys`, and the comparisons that they took part in. Raises OSError."""
        keys = set(keys)
        if not self.path.exists():
            return
        with self._lock():
            kept = [
                row
                for key, row in self.rows().items()
                if key not in keys and not keys.intersection(row.get("of", []))
            ]
            files.write_atomically(self.path, b"".join(map(_format_line, kept)).decode())

    def rows(self) -> dict[str, dict]:
        """Return the last row of each key. A line that `append` did not write, or not to its end, is passed over."""
        found = {}
        if self.path.exists():
            for line in self.path.read_bytes().splitlines():
                text, _, checksum = line.rpartition(CHECKSUM)
                if checksum == b"%d}" % zlib.crc32(text):
                    row = json.loads(text + b"}")
                    found[row["key"]] = row
        return found


def _format_line(row: dict) -> bytes:
    # The text of an error may hold half a surrogate pair, which UTF-8 cannot: escape it as JSON does.
    text = files.json_line(row, "a row").encode(errors="backslashreplace").removesuffix(b"}")
    return b"%b%b%d}\n" % (text, CHECKSUM, zlib.crc32(text))


def journal_for(name: str) -> Journal:
    """Return the journal sweeps/<name>.jsonl in the repository, or in the folder that TILES_SWEEPS names."""
    folder = os.environ.get("TILES_SWEEPS") or ROOT / "sweeps"
    return Journal(pathlib.Path(folder) / f"{name}.jsonl")
