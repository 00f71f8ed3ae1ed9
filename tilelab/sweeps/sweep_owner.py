"""The one sweep that a panel may own, and the thread that follows it.

JupyterLab runs the callbacks of widgets in a thread of its own (a subshell of the kernel) and ends that thread when its
page closes; Voila runs them in the main thread. The owner therefore needs no event loop, and a lock guards its state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tilelab.sweeps.sweep import Sweep

DRAW_S = 0.2  # from one report to the next while a sweep runs


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
