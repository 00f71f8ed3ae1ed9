"""Wait for what another thread or process does."""

import pathlib
import time


def wait_for(condition, limit_s: float = 60) -> float:
    """Return the seconds until the condition holds; AssertionError after the limit."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, f"it did not happen within {limit_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def is_alive(process: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
