"""The sweeps that panels of this process have started, by the cell of the notebook that holds the panel.

A cell that is executed again gets a new panel, and the sweep of its old one would go on unseen: the new one claims it,
and the old one stops drawing.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable

from IPython import get_ipython

from tilelab.sweeps.sweep import Sweep


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
