"""Write files that a reader never sees half written, and values as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import uuid
from typing import Any

from tilelab.runtime import device


def json_line(value: Any, what: str) -> str:
    """Return `value` as one line of JSON; numpy and torch scalars become numbers. `what` names it in the ValueError."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, default=lambda scalar: scalar.item())
    except ValueError as error:
        raise ValueError(
            f"{what} holds NaN or infinity, which JSON has not: record None and a reason."
        ) from error


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Write `text` to `path` so that a reader never sees an incomplete file; after an OSError the old file remains.

    A device such as /dev/stdout is written directly.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    # The name holds no process id: containers share those.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # some file systems notice only here that the disk is full
        temporary.replace(path)
    except OSError as error:
        raise make_write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def make_write_error(path: pathlib.Path, error: OSError) -> OSError:
    """Return an error of the same kind as `error`, whose sentence names the file and the reason."""
    reason = error.strerror or device.first_line(error)
    return OSError(error.errno, f"{path} cannot be written ({reason}); nothing that it held is lost")
