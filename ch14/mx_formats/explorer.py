"""Widgets to explore formats: one code bit by bit, and a block of numbers under its scale. They need no GPU.

    explorer.explore()  # at the end of a notebook cell
"""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets
import torch
from IPython.display import display

from ch14.mx_formats import errors, figures, number_formats
from ch14.mx_formats.number_formats import ELEMENTS, FORMATS, BlockFormat
from tilelab import plots


def make_block(data: str, format: BlockFormat, seed: int = 0) -> torch.Tensor:
    """Return a block (1, n), bfloat16, of a kind in errors.DATA, or of "ramp": from 0 to 7 in equal steps."""
    count = min(format.block[1], 128)
    if data == "ramp":
        return torch.linspace(0, 7, count).bfloat16()[None]
    return errors.make_data(data, 8, 1024, seed)[:1, :count].contiguous()


def draw_code(element: str, code: int) -> plots.Picture:
    """Draw a code, and print it in words."""
    print(figures.describe(ELEMENTS[element], code))
    return figures.code_picture(ELEMENTS[element], code)


def draw_value(element: str, value: float) -> plots.Picture:
    """Draw the code that a value rounds to."""
    return draw_code(element, int(number_formats.encode(torch.tensor(value), ELEMENTS[element])))


def draw_block(format: str, rule: str, data: str, seed: int) -> plots.Picture:
    """Draw a block of numbers, and what the format makes of it."""
    return figures.values_picture(make_block(data, FORMATS[format], seed), FORMATS[format], rule)


def _interact(draw: Callable[..., plots.Picture], **menus) -> widgets.interactive:
    """Return menus with the picture of their values beneath, or with a sentence if the values do not fit together."""
    def draw_or_explain(**values):
        try:
            display(draw(**values))
        except ValueError as error:
            print(error)

    return widgets.interactive(draw_or_explain, **menus)


def explore() -> widgets.VBox:
    """Return three explorers: of the code that a value rounds to, of a code, and of a block of numbers."""
    one_row = [name for name, format in FORMATS.items() if format.block[0] == 1]
    elements = {"options": list(ELEMENTS), "value": "e2m1"}
    return widgets.VBox([
        _interact(draw_value, element=widgets.Dropdown(**elements), value=widgets.FloatText(3.0)),
        _interact(draw_code, element=widgets.Dropdown(**elements), code=widgets.IntSlider(5, 0, 255)),
        _interact(draw_block, format=widgets.Dropdown(options=one_row, value="mxfp4"),
                  rule=list(number_formats.RULES), data=[*errors.DATA, "ramp"],
                  seed=widgets.BoundedIntText(0, 0, 9999))])
