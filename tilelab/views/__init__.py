"""Interactive views in plain JavaScript, which run in JupyterLab, in Voila and on a static page without a server.

A view is a file NAME.js in this folder, with an optional NAME.css. It defines `render({ model, el })` and ends with
`export default { render };`. The files shared.js and shared.css stand before those of each view, so that there is
neither an import nor a build step. `model.get("data")` holds what the view draws. `model.get("live")` says whether
Python answers: on a static page it is false, and the view then offers only what the recorded data can show.

    views.View("timeline", data, picture=figure, table=rows)  # at the end of a notebook cell

In a saved notebook the widget is gone. What stays is `picture` and `table`, and the data, from which `tilelab.site`
makes the view again.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import anywidget
import traitlets
from IPython.display import display

FOLDER = pathlib.Path(__file__).parent
MIME = "application/vnd.tiles.view+json"  # a view's name and data in a saved notebook
EXPORT = "export default { render };"


def _read(name: str, suffix: str) -> str:
    paths = [FOLDER / f"{stem}{suffix}" for stem in ("shared", name)]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


@functools.cache
def read_module(name: str) -> str:
    """Return the JavaScript module of a view: shared.js, then NAME.js. ValueError for a view that does not exist."""
    if not (FOLDER / f"{name}.js").exists():
        known = sorted(path.stem for path in FOLDER.glob("*.js") if path.stem != "shared")
        raise ValueError(f"unknown view {name!r}; choose one of {', '.join(known)}.")
    return _read(name, ".js")


@functools.cache
def read_style(name: str) -> str:
    """Return the style sheet of a view: shared.css, then NAME.css."""
    return _read(name, ".css")


def make_page_part(name: str, data: Any) -> str:
    """Return HTML that shows a view of recorded data on a page without a server or a network."""
    body = read_module(name).replace(EXPORT, "")
    # Within a script element, "</" could end it; JSON allows "<\/" for it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return (f"<div class='tiles-page-view'><style>{read_style(name)}</style><div></div><script>(() => {{\n"
            f"const el = document.currentScript.previousElementSibling;\n{body}\n"
            f"const values = {{ live: false, data: {text} }};\n"
            "const model = { get: name => values[name], set: (name, value) => { values[name] = value; }, "
            "on: () => {}, off: () => {}, save_changes: () => {}, send: () => {} };\n"
            "render({ model, el });\n})();</script></div>")


class View(anywidget.AnyWidget):
    """The view `name` of `data`, which JSON can hold. A cell that ends with it shows it.

    `picture` (anything with a PNG or SVG form) and `table` (anything with a text form) stay in the saved notebook.
    `store=False` keeps the data out of the saved notebook, where the site then shows the picture alone.
    """

    _css = traitlets.Unicode().tag(sync=True)
    data = traitlets.Any().tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)

    def __init__(self, name: str, data: Any, *, picture=None, table=None, store: bool = True, **traits):
        self.name, self.picture, self.table, self.store = name, picture, table, store
        # Views that share an id would also share one style sheet: the last one's.
        super().__init__(_anywidget_id=f"tilelab.views.{name}", _esm=read_module(name), _css=read_style(name),
                         data=data, **traits)

    def stored_data(self) -> Any:
        """Return the data that a saved notebook keeps, from which the site makes the view again."""
        return self.data

    def _ipython_display_(self) -> None:
        bundle, metadata = self._repr_mimebundle_()
        bundle = {**bundle, "text/plain": f"View({self.name})"}  # the widget's own text would name every trait
        if self.store:
            bundle[MIME] = {"view": self.name, "data": self.stored_data()}
        display(bundle, metadata=metadata, raw=True)
        for output in filter(None, (self.picture, self.table)):
            display(output)
