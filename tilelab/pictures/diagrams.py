"""Draw mechanisms rather than measurements, in the style of `pictures.plots`: what moves where, and who does what."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tilelab.pictures import plots


def canvas(title: str, source: str, width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of width x height inches and its axes, whose coordinates are inches."""
    figure, axes = plots.new_figure([title], title, source, height, layout="none")  # any other draws twice
    figure.set_size_inches(width, height)
    axes.set(position=(0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    face: str = "none",
    edge: str = "none",
    text: str = "",
    **rest: Any,
) -> None:
    """Draw a rectangle whose lower left corner is (x, y), with a text in its middle; `rest` goes to matplotlib."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, **rest))
    if text:
        ink = "white" if face == plots.colour("best") else "black"
        write(axes, x + width / 2, y + height / 2, text, color=ink)


def write(
    axes: Axes, x: float, y: float, text: str, ha: str = "center", size: float = 7, **rest: Any
) -> None:
    """Draw text at (x, y), which is the middle of its height."""
    axes.text(x, y, text, fontsize=size, ha=ha, va="center_baseline", **rest)


def lighten(tone: str, share: float = 0.4) -> tuple:
    """Return the colour mixed with white."""
    return tuple(1 - share * (1 - part) for part in to_rgb(tone))
