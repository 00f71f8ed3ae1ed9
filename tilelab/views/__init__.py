"""Interactive views in plain JavaScript, which run in JupyterLab, in Voila and on a static page without a server.

A view is a file NAME.js in this folder, with an optional NAME.css. It defines `render({ model, el })` and ends with
`export default { render };`. The files shared.js and shared.css stand before those of each view, so that there is
neither an import nor a build step. A view may use functions of another one, which its first lines name:
`// uses: renderCode from code`. `model.get("data")` holds what the view draws. `model.get("live")` says whether
Python answers: on a static page it is false, and the view then offers only what the recorded data can show.

    views.View("timeline", data, picture=figure, table=rows)  # at the end of a notebook cell

In a saved notebook the widget is gone. What stays is `picture` and `table`, and the data, from which
`tilelab.course.site` makes the view again.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from typing import Any

import anywidget
import traitlets
from IPython.display import display

FOLDER = pathlib.Path(__file__).parent
MIME = "application/vnd.tiles.view+json"  # a view's name and data in a saved notebook
EXPORT = "export default { render };"


USES = re.compile(r"^// uses: (\w+(?:, \w+)*) from (\w+)$", re.MULTILINE)


def _read(name: str, suffix: str) -> str:
    path = FOLDER / f"{name}{suffix}"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _find_uses(name: str) -> list[tuple[str, str]]:
    """Return (names of functions, view) for each view that this one uses."""
    return USES.findall(_read(name, ".js"))


@functools.cache
def read_module(name: str) -> str:
    """Return the JavaScript module of a view: shared.js, what it uses, then NAME.js. ValueError for an unknown view."""
    if not (FOLDER / f"{name}.js").exists():
        known = sorted(path.stem for path in FOLDER.glob("*.js") if path.stem != "shared")
        raise ValueError(f"unknown view {name!r}; choose one of {', '.join(known)}.")
    parts = [_read("shared", ".js")]
    for functions, other in _find_uses(name):
        body = _read(other, ".js").replace(EXPORT, "")  # in a function, so that no two views share a name
        parts.append(f"const {{ {functions} }} = (() => {{\n{body}\nreturn {{ {functions} }};\n}})();")
    return "\n".join([*parts, _read(name, ".js")])


@functools.cache
def read_style(name: str) -> str:
    """Return the style sheet of a view: shared.css, the sheets of the views that it uses, then NAME.css."""
    return "\n".join(
        _read(each, ".css") for each in ("shared", *(other for _, other in _find_uses(name)), name)
    )


def make_page_part(name: str, data: Any, *, still: str = "", with_code: bool = True) -> str:
    """Return HTML that shows a view of recorded data on a page without a server or a network.

    `still` is HTML for readers without scripts; the view takes its place, and it comes back if the view fails. Of
    several parts with one view on a page only the first needs the code of the view. The `end` of the view's element
    undoes what the view has changed outside of it.
    """
    body = read_module(name).replace(EXPORT, "return render;")
    code = (
        (
            f"<style>{read_style(name)}</style><script>\n(window.tilesViews ??= {{}})[{json.dumps(name)}] = (() => {{\n"
            f"{body}\n}})();\n</script>"
        )
        if with_code
        else ""
    )
    # Within a script element, "</" or "<!--" could change where it ends; JSON allows "\\u003c" for "<".
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f"<div class='tiles-page-view'>{code}<div>{still}</div><script>(() => {{\n"
        "const el = document.currentScript.previousElementSibling, still = [...el.childNodes];\n"
        f"const values = {{ live: false, data: {text} }};\n"
        "const model = { get: name => values[name], set: (name, value) => { values[name] = value; }, "
        "on: () => {}, off: () => {}, save_changes: () => {}, send: () => {} };\n"
        "el.replaceChildren();\n"
        f"try {{ el.end = window.tilesViews[{json.dumps(name)}]({{ model, el }}); }}\n"
        "catch (error) { el.replaceChildren(...still); console.error(error); }\n})();</script></div>"
    )


def make_stored(name: str, data: Any) -> dict:
    """Return the MIME bundle {MIME: ...} that keeps a view in a saved notebook.

    The data are a text of JSON, because a notebook's file gives each number of a nested list a line of its own.
    """
    return {MIME: {"view": name, "json": json.dumps(data, separators=(",", ":"), allow_nan=False)}}


def read_stored(stored: dict) -> tuple[str, Any]:
    """Return the name and the data of a view from the value that `make_stored` has under MIME.

    Raises ValueError for any other value.
    """
    try:
        return stored["view"], json.loads(stored["json"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("a stored view is damaged; run its cell again.") from error


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
        super().__init__(
            _anywidget_id=f"tilelab.views.{name}",
            _esm=read_module(name),
            _css=read_style(name),
            data=data,
            **traits,
        )

    def stored_data(self) -> Any:
        """Return the data that a saved notebook keeps, from which the site makes the view again."""
        return self.data

    def _ipython_display_(self) -> None:
        bundle, metadata = self._repr_mimebundle_()
        # the widget's own text would name every trait
        bundle = {**bundle, "text/plain": "Run this cell for the interactive view; its picture follows."}
        if self.store:
            bundle |= make_stored(self.name, self.stored_data())
        display(bundle, metadata=metadata, raw=True)
        for output in filter(None, (self.picture, self.table)):
            display(output)
