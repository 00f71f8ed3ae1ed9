"""Formats to play with: a code bit by bit, and a block of numbers under its scale.

    mx_explorer.explorer()  # in a notebook

Needs no GPU. Every picture is a PNG, every finding a line of text.
"""

from __future__ import annotations

import html
import math

import ipywidgets as widgets
import torch

from ch14.mx_formats import errors, figures, number_formats
from ch14.mx_formats.number_formats import ELEMENTS, FORMATS


def block(data: str, form: number_formats.BlockFormat, seed: int = 0) -> torch.Tensor:
    """A block (1, n) of one of mx_errors.DATA, or of `ramp`: 0 to 7 in equal steps."""
    count = min(form.block[1], 128)
    if data == "ramp":
        return torch.linspace(0, 7, count).bfloat16()[None]
    return errors.make(data, 8, 1024, seed)[:1, :count].contiguous()


class Explorer:
    """The widgets: `menus` by name, `code_picture` and `block_picture` (PNG), `words` and `problem`; `box` holds all.

    A value that is typed chooses the code it rounds to, a code shows its value. What cannot be is told in one sentence;
    every setting stays as it is.
    """

    def __init__(self):
        style, layout = {"description_width": "90px"}, {"width": "260px"}
        one_row = [name for name, form in FORMATS.items() if form.block[0] == 1]
        self.menus = {
            "element": widgets.Dropdown(options=list(ELEMENTS), value="e2m1", description="element", style=style,
                                        layout=layout),
            "code": widgets.IntSlider(value=5, min=0, max=15, description="code", style=style, layout=layout,
                                      continuous_update=False),
            "value": widgets.FloatText(value=3.0, description="value", style=style, layout=layout),
            "format": widgets.Dropdown(options=one_row, value="mxfp4", description="block of", style=style,
                                       layout=layout),
            "rule": widgets.Dropdown(options=list(number_formats.RULES), description="E8M0 rule", style=style, layout=layout),
            "data": widgets.Dropdown(options=[*errors.DATA, "ramp"], description="numbers", style=style,
                                     layout=layout),
            "seed": widgets.BoundedIntText(value=0, min=0, max=9999, description="seed", style=style, layout=layout)}
        self.code_picture, self.block_picture = widgets.Image(format="png"), widgets.Image(format="png")
        for picture in (self.code_picture, self.block_picture):
            picture.layout.width = picture.layout.max_width = "560px"
            picture.layout.object_fit = "contain"
        self.words, self.problem = widgets.HTML(), widgets.HTML()
        menus = list(self.menus.values())
        self.box = widgets.VBox([*(widgets.HBox(line, layout={"flex_flow": "row wrap"})
                                   for line in (menus[:3], menus[3:])), self.words, self.problem,
                                 widgets.HBox([self.code_picture, self.block_picture],
                                              layout={"flex_flow": "row wrap", "align_items": "flex-start"})])
        for name, menu in self.menus.items():
            menu.add_class(f"mx-explorer-{name}")
            menu.observe(getattr(self, f"_{name}_changed", self._block_changed), "value")
        self._code_changed()
        self._block_changed()

    @property
    def element(self) -> number_formats.Element:
        """The one chosen."""
        return ELEMENTS[self.menus["element"].value]

    def _element_changed(self, change=None) -> None:
        code = self.menus["code"]
        with code.hold_trait_notifications():  # or a shorter slider would choose a code of its own
            code.max = 2**self.element.bits - 1
            code.value = self._typed() or 0
        self._show()

    def _typed(self) -> int | None:
        """The code that the value rounds to; None, with the reason told, where there is none."""
        try:
            return int(number_formats.encode(torch.tensor(self.menus["value"].value, dtype=torch.float32), self.element))
        except ValueError as error:
            self._say(str(error))
            return None

    def _value_changed(self, change=None) -> None:
        if (code := self._typed()) is not None:
            self.menus["code"].value = code
            self._show()

    def _code_changed(self, change=None) -> None:
        value = float(number_formats.decode(torch.tensor(self.menus["code"].value), self.element))
        typed = self.menus["value"].value
        if math.isfinite(value) and (math.isnan(typed) or self._typed() != self.menus["code"].value):
            self.menus["value"].value = value  # what was typed stays while it rounds to this code
        self._show()

    def _show(self) -> None:
        self.problem.value = ""
        words = figures.describe(self.element, self.menus["code"].value)
        self.words.value = f"<code>{html.escape(words)}</code>"
        self.code_picture.value = figures.code_picture(self.element, self.menus["code"].value)._repr_png_()

    def _block_changed(self, change=None) -> None:
        form, rule = FORMATS[self.menus["format"].value], self.menus["rule"].value
        try:
            x = block(self.menus["data"].value, form, self.menus["seed"].value)
            self.block_picture.value = figures.values_picture(x, form, rule)._repr_png_()
            self.problem.value = ""
        except ValueError as error:
            self._say(str(error))

    def _say(self, sentence: str) -> None:
        sentence = html.escape(sentence[0].upper() + sentence[1:])
        self.problem.value = f"<p style='font-size: 16px; line-height: 1.4'>{sentence}</p>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.box)


def explorer() -> Explorer:
    """The explorer, to end a notebook's cell with."""
    return Explorer()
