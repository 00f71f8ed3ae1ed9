"""Show recordings of warp roles (`tilelab.records.timeline`) in the view `timeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelab import views
from tilelab.records.timeline import make_table


def show(
    recordings: Sequence[dict], shown: Sequence[str] = (), *, picture: Any = None, others: Sequence[dict] = ()
) -> views.View:
    """Return the view of recordings: the two named in `shown` under each other on one clock, by default the first two.

    `picture` and a table stay in the saved notebook. Rows of `others` get a column of the table for each kind.
    ValueError for a name that no recording has.
    """
    names = [recording["name"] for recording in recordings]
    for name in shown:
        if name not in names:
            raise ValueError(f"unknown recording {name!r}; choose one of {', '.join(names)}.")
    data = {"recordings": list(recordings), "shown": list(shown or names[:2])}
    return views.View("timeline", data, picture=picture, table=make_table(recordings, others))
