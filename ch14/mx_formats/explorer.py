"""Widgets to explore formats: one code bit by bit, and a block of numbers under its scale. They need no GPU.

    explorer.Explorer()  # at the end of a notebook cell
"""

from __future__ import annotations

import html
import math

import ipywidgets as widgets
import torch
from IPython.display import display

from ch14.mx_formats import errors, figures, number_formats
from ch14.mx_formats.number_formats import ELEMENTS, FORMATS, BlockFormat, Element


def make_block(data: str, format: BlockFormat, seed: int = 0) -> torch.Tensor:
    """Return a block (1, n), bfloat16, of a kind in errors.DATA, or of "ramp": from 0 to 7 in equal steps."""
    count = min(format.block[1], 128)
    if data == "ramp":
        return torch.linspace(0, 7, count).bfloat16()[None]
    return errors.make_data(data, 8, 1024, seed)[:1, :count].contiguous()


class Explorer:
    """Menus by name in `menus`; the pictures `code_picture` and `block_picture` (PNG); the texts `words` and `problem`.

    Typing a value selects the code that it rounds to; selecting a code shows its value. A setting that is impossible
    shows a sentence in `problem` and changes no other setting.
    """

    def __init__(self):
        one_row = [name for name, format in FORMATS.items() if format.block[0] == 1]
        self.menus = {
            "element": widgets.Dropdown(options=list(ELEMENTS), value="e2m1", description="element"),
            "code": widgets.IntSlider(value=5, min=0, max=15, description="code", continuous_update=False),
            "value": widgets.FloatText(value=3.0, description="value"),
            "format": widgets.Dropdown(options=one_row, value="mxfp4", description="block of"),
            "rule": widgets.Dropdown(options=list(number_formats.RULES), description="E8M0 rule"),
            "data": widgets.Dropdown(options=[*errors.DATA, "ramp"], description="numbers"),
            "seed": widgets.BoundedIntText(value=0, min=0, max=9999, description="seed")}
        self.code_picture, self.block_picture = (widgets.Image(format="png", layout={
            "width": "560px", "max_width": "560px", "object_fit": "contain"}) for _ in range(2))
        self.words, self.problem = widgets.HTML(), widgets.HTML()
        menus, wrap = list(self.menus.values()), {"flex_flow": "row wrap", "align_items": "flex-start"}
        self.box = widgets.VBox([widgets.HBox(menus[:3], layout=wrap), widgets.HBox(menus[3:], layout=wrap), self.words,
                                 self.problem, widgets.HBox([self.code_picture, self.block_picture], layout=wrap)])
        handlers = {"element": self._select_element, "code": self._select_code, "value": self._select_value}
        for name, menu in self.menus.items():
            menu.layout.width = "260px"
            menu.style.description_width = "90px"
            menu.add_class(f"mx-explorer-{name}")
            menu.observe(handlers.get(name, self._draw_block), "value")
        self._select_code()
        self._draw_block()

    @property
    def element(self) -> Element:
        """The selected element format."""
        return ELEMENTS[self.menus["element"].value]

    def _select_element(self, change=None) -> None:
        code = self.menus["code"]
        with code.hold_trait_notifications():  # a slider that becomes shorter would select a code by itself
            code.max = 2**self.element.bits - 1
            code.value = self._round_value() or 0
        self._draw_code()

    def _round_value(self) -> int | None:
        """Return the code that the typed value rounds to, or None after showing why there is none."""
        try:
            value = torch.tensor(self.menus["value"].value, dtype=torch.float32)
            return int(number_formats.encode(value, self.element))
        except ValueError as error:
            self._show_problem(error)
            return None

    def _select_value(self, change=None) -> None:
        if (code := self._round_value()) is not None:
            self.menus["code"].value = code
            self._draw_code()

    def _select_code(self, change=None) -> None:
        code, typed = self.menus["code"].value, self.menus["value"].value
        value = float(number_formats.decode(torch.tensor(code), self.element))
        if math.isfinite(value) and (math.isnan(typed) or self._round_value() != code):
            self.menus["value"].value = value  # a typed value stays while it rounds to this code
        self._draw_code()

    def _draw_code(self) -> None:
        self.problem.value = ""
        code = self.menus["code"].value
        self.words.value = f"<code>{html.escape(figures.describe(self.element, code))}</code>"
        self.code_picture.value = figures.code_picture(self.element, code)._repr_png_()

    def _draw_block(self, change=None) -> None:
        format, rule = FORMATS[self.menus["format"].value], self.menus["rule"].value
        try:
            x = make_block(self.menus["data"].value, format, self.menus["seed"].value)
            self.block_picture.value = figures.values_picture(x, format, rule)._repr_png_()
            self.problem.value = ""
        except ValueError as error:
            self._show_problem(error)

    def _show_problem(self, error: ValueError) -> None:
        self.problem.value = f"<p style='font-size: 16px; line-height: 1.4'>{html.escape(str(error))}</p>"

    def _ipython_display_(self) -> None:
        display(self.box)
