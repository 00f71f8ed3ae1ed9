"""The sweeps that panels of this process have started, by the cell of the notebook that holds the panel.

A cell that is executed again gets a new panel, and the sweep of its old one would go on unseen: the new one claims it,
and the old one stops drawing. A panel owns one sweep at most.

JupyterLab runs the callbacks of widgets in a thread of its own (a subshell of the kernel) and ends that thread when its
page closes; Voila runs them in the main thread. The owner therefore needs no event loop, and a lock guards its state.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable

from IPython import get_ipython

from tilelab.sweeps.sweep import Sweep

DRAW_S = 0.2  # from one report to the next while a sweep runs


@dataclasses.dataclass(frozen=True)
class _Followed:
    """A sweep that a panel in `cell` follows until `release` is called."""

    cell: str
    sweep: Sweep
    release: Callable


_lock = threading.Lock()
_followed: list[_Followed] = []  # the newest last


def find_cell() -> str:
    """Return the id of the cell that is executed now, as JupyterLab and VS Code send it; "" elsewhere.

    Call it while the cell runs: the callback of a widget belongs to no cell.
    """
    parent = getattr(get_ipython(), "get_parent", dict)()
    return str((parent.get("metadata") or {}).get("cellId", ""))


def add(sweep: Sweep, cell: str, release: Callable) -> Sweep:
    """Keep a sweep that a panel in `cell` follows, and return it. After `release()` the panel follows it no more."""
    with _lock:
        _followed[:] = [*(kept for kept in _followed if kept.sweep.running), _Followed(cell, sweep, release)]
    return sweep


def claim(keys: Iterable[str], cell: str) -> Sweep | None:
    """Return the running sweep that an earlier panel in `cell` has left, and cancel that panel's other sweeps.

    `keys` name the new panel's configurations (sweep.config_keys); a sweep of any others is cancelled. Sweeps of other
    cells go on, because their panels are still there, and nothing is claimed where `cell` is "". The earlier panel
    draws no more of the sweep; its new owner calls `add`.
    """
    if not cell:
        return None
    with _lock:
        left = [
            kept
            for kept in _followed
            if kept.cell == cell and kept.sweep.running and not kept.sweep.cancelled
        ]
        found = next((kept for kept in left if kept.sweep.configs.keys() == set(keys)), None)
        if found:
            _followed.remove(found)
    for kept in left:
        if kept is not found:
            kept.sweep.cancel()
    if found:
        found.release()
    return found and found.sweep


class SweepOwner:
    """Own the sweep of one panel. `on_rows(sweep)` is called while it runs, and `on_end(sweep)` once at its end.

    The thread that follows the sweep holds `lock` while it calls either function.
    """

    def __init__(self, lock: threading.RLock, on_rows: Callable, on_end: Callable):
        self.lock, self.on_rows, self.on_end = lock, on_rows, on_end
        self.sweep: Sweep | None = None  # while one runs
        self._follower = threading.Thread()

    @property
    def running(self) -> bool:
        """Return whether a sweep runs."""
        return self.sweep is not None

    def follow(self, begun: Sweep) -> None:
        """Own a sweep that was started just now, or by an earlier panel, and start the thread that follows it."""
        self.sweep = begun
        self._follower = threading.Thread(target=self._follow, args=(begun,), name="panel", daemon=True)
        self._follower.start()

    def cancel(self) -> bool:
        """Stop the sweep now, and return whether one ran. Finished rows are kept."""
        if self.sweep is None:
            return False
        self.sweep.cancel()
        return True

    def release(self) -> bool:
        """Leave the sweep to another owner, and report no further row. Return whether a sweep ran."""
        with self.lock:
            released, self.sweep = self.sweep, None
        return released is not None

    def wait(self) -> None:
        """Wait until no sweep runs and its end was reported."""
        if self._follower.ident:
            self._follower.join()

    def _follow(self, running: Sweep) -> None:
        while running.running:
            time.sleep(DRAW_S)
            with self.lock:
                if self.sweep is not running:  # it was released
                    return
                self.on_rows(running)
        with self.lock:
            if self.sweep is running:
                self.sweep = None
                self.on_end(running)
