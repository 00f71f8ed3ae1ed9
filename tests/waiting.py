"""Wait for what another thread or process does."""

import pathlib
import time


def wait_for(condition, limit_s: float = 240) -> float:
    """Return the seconds until the condition holds; AssertionError after the limit."""
    begun = time.monotonic()
    while not condition():
        passed = time.monotonic() - begun
        assert passed < limit_s, f"it did not happen within {limit_s} s"
        time.sleep(min(0.02 + passed / 20, 0.3))  # looking takes time from what it waits for
    return time.monotonic() - begun


def is_alive(process: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
