"""The bug hunt as a decision tree: the reader chooses which axis to bisect next, real builds answer.

    bug_hunt_tree.Tree("loop", "3.5.1", "sm_100a", LOOP="carry both guarded", LOADS="device", num_warps=8)

Builds are live where that Triton is at hand, else those of the record. The path so far stays in the notebook, as a
picture and as text, when the widgets are gone.
"""

from __future__ import annotations

import asyncio
import html
from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import HTML, Image, display

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Step, environments, experiments, figures

_tasks: set[asyncio.Task] = set()  # the loop itself holds tasks weakly


class _Text(str):
    """Lines, in a notebook and where it is read as text."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


class Tree:
    """A path through the axes of a hunt. `config` is where it stands, `row` its build, `steps` the axes bisected.

    `choice` sets axes, the rest begin as the hunt's suspicion; ValueError for what its menu does not have. `menus`,
    `axes`, `buttons` and `status` are the widgets, `box` holds all; the path's picture and text stand beneath it. What
    cannot be built is told in one sentence, `problem`, and the path stays.
    """

    def __init__(self, hunt: str = "loop", triton: str = "", target: str = "", **choice):
        triton = triton or environments.installed()
        if hunt not in HUNTS:
            raise ValueError(f"the hunts are {', '.join(HUNTS)}; here it is {hunt!r}.")
        self.hunt = HUNTS[hunt]
        self.config = self.hunt.start | choice
        self.hunt.check(self.config)
        self.steps: list[Step] = []
        self.row: dict | None = None
        self.sentence = self.problem = ""
        self._handles: list | None = None
        self._known: dict[tuple, bug_hunt.Builds] = {}
        self._filling = False
        self._make(hunt, triton, target or self.hunt.target)
        self._do(self._begin)

    # -- what the reader does

    @property
    def builds(self) -> bug_hunt.Builds:
        """What answers for the chosen hunt, Triton and target."""
        key = self.hunt.name, self.menus["triton"].value, self.menus["target"].value
        if key not in self._known:
            self._known[key] = experiments.builds(*key)
        return self._known[key]

    @property
    def open(self) -> list[str]:
        """The axes that may still get simpler: neither the simplest already, nor bisected since the last change."""
        settled, before = set(), self._origin
        for step in self.steps:
            settled = {step.axis} | (settled if step.config == before else set())
            before = step.config
        return [axis for axis, values in self.hunt.axes.items()
                if axis not in settled and self.config[axis] != values[0]]

    def _begin(self) -> None:
        self.steps, self.sentence, self._origin = [], "", dict(self.config)
        self.row = None
        self.row = self.builds.ask([self.config])[0]

    def bisect(self, axis: str) -> Step | None:
        """Simplify one axis; None, and a sentence in `problem`, where the configuration is as one hopes."""
        if axis not in self.hunt.axes:
            raise ValueError(f"the axes are {', '.join(self.hunt.axes)}; here it is {axis!r}.")
        self._do(lambda: self._bisect(axis))
        return self.steps[-1] if self.steps and not self.problem else None

    def _bisect(self, axis: str) -> None:
        if self.row is None or self.row["outcome"] == self.hunt.good:
            raise ValueError("there is nothing to bisect: choose a configuration that is not as one hopes.")
        if self.config[axis] == self.hunt.axes[axis][0]:
            raise ValueError(f"{axis} is {self.config[axis]}, the simplest already.")
        step = bug_hunt.bisect(self.builds, self.config, axis, bug_hunt.symptom(self.row))
        self.steps.append(step)
        self.config = dict(step.config)
        self.row = self.builds.ask([self.config])[0]

    def _search(self) -> None:
        found = bug_hunt.find(self.builds, self.config)
        if found is None:
            raise ValueError("nothing within two changes of this configuration is wrong.")
        self._origin, self.steps, self.sentence = dict(self.config), found.steps, found.sentence
        self.config, self.row = dict(found.config), found.row

    # -- widgets

    def _make(self, hunt: str, triton: str, target: str) -> None:
        wide, narrow = {"width": "330px"}, {"width": "190px"}
        style = {"description_width": "90px"}
        versions = list(dict.fromkeys([*experiments.VERSIONS, environments.installed(), triton]))
        self.menus = {
            "hunt": widgets.Dropdown(options=[(f"{each.name}: {each.title}", name) for name, each in HUNTS.items()],
                                     value=hunt, description="hunt", layout=wide, style=style),
            "triton": widgets.Dropdown(options=versions, value=triton, description="Triton", layout=narrow,
                                       style=style),
            "target": widgets.Dropdown(options=experiments.TARGETS, value=target, description="target",
                                       layout=narrow, style=style),
            "axis": widgets.Dropdown(description="next axis", layout=narrow, style=style)}
        self.axes: dict[str, widgets.Dropdown] = {}
        self.buttons = {name: widgets.Button(description=text, tooltip=tip) for name, text, tip in (
            ("bisect", "Bisect", "find the simplest value of this axis that still shows it"),
            ("search", "Search the rest", "let the engine choose the axes, and look around the end"),
            ("again", "Start over", "build this configuration, and forget the path"))}
        self.status = widgets.HTML()
        self._settings = widgets.HBox(layout={"flex_flow": "row wrap"})
        flow = {"flex_flow": "row wrap"}
        self.box = widgets.VBox([
            widgets.HBox([self.menus[name] for name in ("hunt", "triton", "target")], layout=flow), self._settings,
            widgets.HBox([self.menus["axis"], *self.buttons.values()], layout=flow), self.status])
        for name, widget in {**self.menus, **self.buttons, "status": self.status}.items():
            widget.add_class(f"tree-{name}")
        self._fill()
        for name in ("hunt", "triton", "target"):
            self.menus[name].observe(self._changed, "value")
        self.buttons["bisect"].on_click(lambda _: self._later(lambda: self._bisect(self.menus["axis"].value)))
        self.buttons["search"].on_click(lambda _: self._later(self._search))
        self.buttons["again"].on_click(lambda _: self._later(self._begin))

    def _fill(self) -> None:
        """A menu an axis, for the hunt that is chosen."""
        self.axes = {axis: widgets.Dropdown(options=[(str(value), value) for value in values], value=self.config[axis],
                                            description=axis, layout={"width": "230px"},
                                            style={"description_width": "90px"})
                     for axis, values in self.hunt.axes.items()}
        for axis, menu in self.axes.items():
            menu.add_class(f"tree-{axis.lower().replace('_', '-')}")
            menu.observe(self._changed, "value")
        self._settings.children = list(self.axes.values())

    def _changed(self, change) -> None:
        if self._filling:
            return
        if change["owner"] is self.menus["hunt"]:
            self.hunt = HUNTS[change["new"]]
            self.config = dict(self.hunt.start)
            self._filling = True
            self.menus["target"].value = self.hunt.target
            self._filling = False
            self._fill()
        self.config = {axis: menu.value for axis, menu in self.axes.items()}
        self._later(self._begin)

    def _later(self, work: Callable[[], None]) -> None:
        """Do it beside the notebook's event loop, with nothing to press meanwhile; at once where there is none."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._do(work)
            return
        self._enable(False)
        self.status.value = "<p>building…</p>"

        async def done():
            try:
                await asyncio.to_thread(self._try, work)
            finally:
                self._draw()

        task = loop.create_task(done())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    def _do(self, work: Callable[[], None]) -> None:
        self._try(work)
        self._draw()

    def _try(self, work: Callable[[], None]) -> None:
        self.problem = ""
        try:
            work()
        except Exception as error:  # what cannot be built is told, and the tree lives on
            self.problem = str(error)

    def _enable(self, yes: bool) -> None:
        for widget in (*self.menus.values(), *self.axes.values(), *self.buttons.values()):
            widget.disabled = not yes

    # -- drawing

    @property
    def text(self) -> str:
        """The path so far, a line a step, and where it stands."""
        return "\n".join([*(f"{index + 1}. {step}" for index, step in enumerate(self.steps)), *self._stands()])

    def _stands(self) -> list[str]:
        lines = [self.problem]
        if self.row:
            where = f" in {self.row['stage']} ({self.row['message']})" if "stage" in self.row else ""
            lines.append(f"{bug_hunt.describe(self.config)}: {self.row['outcome']}{where}")
            if self.row["outcome"] != self.hunt.good and self.steps:
                lines.append(self.sentence or (f"may still get simpler: {', '.join(self.open)}" if self.open else
                                               "no axis gets simpler: this is a smallest trigger"))
        return [*filter(None, lines), self._source()]

    def _source(self) -> str:
        builds = self._known.get((self.hunt.name, self.menus["triton"].value, self.menus["target"].value))
        if builds is None:
            return "no builds at hand"
        count = len(builds.rows)
        return f"{count} build{'s' * (count != 1)}, " + ("live" if builds.live else "as recorded without a GPU")

    def _png(self) -> bytes:
        if not self.steps:
            return b""
        title = f"Triton {self.menus['triton'].value}, {self.menus['target'].value}, {self.hunt.title}: " + (
            f"{self.row['outcome']}" if self.row else "")
        return figures.path_picture(self.hunt, self.steps, title, self._source())._repr_png_()

    def _draw(self) -> None:
        self._filling = True
        try:
            for axis, menu in self.axes.items():
                menu.value = self.config[axis]
            self.menus["axis"].options = self.open or list(self.hunt.axes)
        finally:
            self._filling = False
        self._enable(True)
        self.status.value = f"<p style='line-height: 1.4'>{'<br>'.join(map(html.escape, self._stands()))}</p>"
        if self._handles:
            for handle, what in zip(self._handles, self._still()):
                handle.update(what)

    def _still(self) -> tuple:
        """What stays in the notebook: the picture, or nothing to see, and the text."""
        png = self._png()
        return (Image(data=png) if png else HTML("")), _Text(self.text)

    def _ipython_display_(self) -> None:
        display({**self.box._repr_mimebundle_(), "text/plain": f"Tree({self.hunt.name})"}, raw=True)
        self._handles = [display(what, display_id=True) for what in self._still()]
        if None in self._handles:  # no notebook
            self._handles = None

    def __repr__(self) -> str:
        return self.text
