"""The sweeps that panels of this process have started, by the cell of the notebook that holds the panel.

A cell that is executed again gets a new panel, and the sweep of its old one would go on unseen: it is cancelled. Its
rows are in the journal, so that Run goes on from there.

JupyterLab runs the callbacks of widgets in a thread of its own (a subshell of the kernel) and ends that thread when its
page closes; Voila runs them in the main thread. The owner therefore needs no event loop, and a lock guards its state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from IPython import get_ipython

from tilelab.sweeps.sweep import Sweep

DRAW_S = 0.2  # from one report to the next while a sweep runs
_running: dict[str, list[Sweep]] = {}  # by cell


def find_cell() -> str:
    """Return the id of the cell that is executed now, as JupyterLab and VS Code send it; "" elsewhere.

    Call it while the cell runs: the callback of a widget belongs to no cell.
    """
    parent = getattr(get_ipython(), "get_parent", dict)()
    return str((parent.get("metadata") or {}).get("cellId", ""))


def cancel_earlier(cell: str) -> None:
    """Cancel the sweeps that earlier panels in `cell` have left; none where `cell` is "", which names no cell."""
    for sweep in _running.pop(cell, []) if cell else []:
        sweep.cancel()


class SweepOwner:
    """Own the sweep of one panel. `on_rows(sweep)` is called while it runs, and `on_end(sweep)` once at its end.

    The thread that follows the sweep holds `lock` while it calls either function.
    """

    def __init__(self, lock: threading.RLock, on_rows: Callable, on_end: Callable):
        self.lock, self.on_rows, self.on_end = lock, on_rows, on_end
        self.cell = find_cell()
        self.sweep: Sweep | None = None  # while one runs
        self._follower = threading.Thread()
        cancel_earlier(self.cell)

    @property
    def running(self) -> bool:
        """Return whether a sweep runs."""
        return self.sweep is not None

    def follow(self, begun: Sweep) -> None:
        """Own a sweep that was started just now, and start the thread that follows it."""
        self.sweep = begun
        _running[self.cell] = [*(each for each in _running.get(self.cell, []) if each.running), begun]
        self._follower = threading.Thread(target=self._follow, args=(begun,), name="panel", daemon=True)
        self._follower.start()

    def cancel(self) -> bool:
        """Stop the sweep now, and return whether one ran. Finished rows are kept."""
        if self.sweep is None:
            return False
        self.sweep.cancel()
        return True

    def wait(self) -> None:
        """Wait until no sweep runs and its end was reported."""
        if self._follower.ident:
            self._follower.join()

    def _follow(self, running: Sweep) -> None:
        while running.running:
            time.sleep(DRAW_S)
            with self.lock:
                self.on_rows(running)
        with self.lock:
            self.sweep = None
            self.on_end(running)
