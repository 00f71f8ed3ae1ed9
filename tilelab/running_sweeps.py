"""The sweeps that panels of this process have started, by the cell of the notebook that holds the panel.

A cell that is executed again gets a new panel, and the sweep of its old one would go on unseen: the new one claims it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from IPython import get_ipython

from tilelab.sweep import Sweep

_lock = threading.Lock()
_sweeps: list[tuple[str, Sweep]] = []  # (cell, sweep), the newest last


def find_cell() -> str:
    """Return the id of the cell that is executed now, as JupyterLab and VS Code send it; "" elsewhere.

    Call it while the cell runs: the callback of a widget belongs to no cell.
    """
    parent = getattr(get_ipython(), "get_parent", dict)()
    return str((parent.get("metadata") or {}).get("cellId", ""))


def add(sweep: Sweep, cell: str) -> Sweep:
    """Keep a sweep that a panel in `cell` has started, and return it."""
    with _lock:
        _sweeps[:] = [*((where, other) for where, other in _sweeps if other.running), (cell, sweep)]
    return sweep


def claim(keys: Iterable[str], cell: str) -> Sweep | None:
    """Return the running sweep that an earlier panel in `cell` has left, and cancel that panel's other sweeps.

    `keys` name the new panel's configurations (sweep.config_keys); a sweep of any others is cancelled. Sweeps of other
    cells go on, because their panels are still there, and nothing is claimed where `cell` is "".
    """
    if not cell:
        return None
    with _lock:
        left = [sweep for where, sweep in _sweeps if where == cell and sweep.running and not sweep.cancelled]
    found = next((sweep for sweep in left if sweep.configs.keys() == set(keys)), None)
    for sweep in left:
        if sweep is not found:
            sweep.cancel()
    return found
