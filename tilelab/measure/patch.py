"""Patch a copy of a kernel's source, to time-stamp it or to break it on purpose; the kernel itself stays clean."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def patched_source(path: pathlib.Path, *replacements: tuple[str, str, int]) -> Iterator[pathlib.Path]:
    """Yield the path of a temporary copy of `path` with each (old, new, count) replaced.

    Raises AssertionError unless `old` occurs exactly `count` times, so that no patch silently stops to match.
    """
    text = path.read_text()
    for old, new, count in replacements:
        if text.count(old) != count:
            raise AssertionError(f"{path.name} contains {old!r} {text.count(old)} times, not {count} times.")
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, path.name)
        copy.write_text(text)
        yield copy
