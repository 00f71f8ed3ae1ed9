"""The bug hunt as a decision tree: the reader chooses which axis to bisect next, and real builds answer.

    decision_tree.Tree("loop", "3.5.0", "sm_100a", LOOP="carry both guarded", LOADS="device", num_warps=8)

Builds are live if that Triton is available, else they come from the record. The path stays in the notebook as a picture
and as text when the widgets are gone.
"""

from __future__ import annotations

import html
from collections.abc import Callable

import ipywidgets as widgets
from IPython.display import HTML, Pretty, display

from ch14.bug_hunt import HUNTS, Builds, Step, bisect, describe, environments, find, symptom
from ch14.bug_hunt.lesson import experiments, figures

WRAP = {"flex_flow": "row wrap"}


def _dropdown(description: str, width: str = "190px", **options) -> widgets.Dropdown:
    style = {"description_width": "90px"}
    return widgets.Dropdown(description=description, layout={"width": width}, style=style, **options)


class Tree:
    """A path through the axes of a hunt. `config` is the end of the path, `row` its build, `steps` the bisected axes.

    `choice` sets axes; the others begin with the hunt's suspicion. The widgets are `menus`, `axes`, `buttons` and
    `status`, all in `box`. If something cannot be built, `problem` says so in one sentence, and the path stays.
    """

    def __init__(self, hunt: str = "loop", triton: str = "", target: str = "", **choice: str | int) -> None:
        if hunt not in HUNTS:
            raise ValueError(f"unknown hunt {hunt!r}; choose one of {', '.join(HUNTS)}.")
        self.hunt = HUNTS[hunt]
        self.config = self.hunt.start | choice
        self.hunt.check_config(self.config)
        self.problem, self._handles, self._known, self._drawing = "", [], {}, False
        self._make_widgets(triton or environments.installed_version(), target or self.hunt.target)
        self._run(self._start_over)

    @property
    def builds(self) -> Builds:
        """The builds of the selected hunt, Triton and target."""
        key = self.hunt.name, self.menus["triton"].value, self.menus["target"].value
        if key not in self._known:
            self._known[key] = experiments.open_builds(*key)
        return self._known[key]

    @property
    def open_axes(self) -> list[str]:
        """The axes that may still get simpler."""
        return [
            axis
            for axis, values in self.hunt.axes.items()
            if axis not in self._settled and self.config[axis] != values[0]
        ]

    # ---- what the buttons do

    def _start_over(self) -> None:
        self.steps: list[Step] = []
        self.sentence, self.row, self._settled = (
            "",
            None,
            set(),
        )  # _settled: axes bisected since the last change
        self.row = self.builds.ask([self.config])[0]

    def bisect(self, axis: str) -> Step | None:
        """Simplify one axis and return the step; None, with a sentence in `problem`, if nothing can be simplified."""
        if axis not in self.hunt.axes:
            raise ValueError(f"unknown axis {axis!r}; choose one of {', '.join(self.hunt.axes)}.")
        self._run(lambda: self._bisect(axis))
        return None if self.problem else self.steps[-1]

    def _bisect(self, axis: str) -> None:
        if self.row is None or self.row["outcome"] == self.hunt.good:
            raise ValueError("there is nothing to bisect: choose a configuration that shows the bug.")
        if self.config[axis] == self.hunt.axes[axis][0]:
            raise ValueError(f"{axis} is {self.config[axis]}, its simplest value, already.")
        step = bisect(self.builds, self.config, axis, symptom(self.row))
        self._settled = {axis} | (self._settled if step.config == self.config else set())
        self.steps.append(step)
        self.config = dict(step.config)
        self.row = self.builds.ask([self.config])[0]

    def _search(self) -> None:
        finding = find(self.builds, self.config)
        if finding is None:
            raise ValueError("nothing within two changes of this configuration shows a bug.")
        self.steps, self.sentence, self._settled = finding.steps, finding.sentence, set(self.hunt.axes)
        self.config, self.row = dict(finding.config), finding.row

    # ---- widgets

    def _make_widgets(self, triton: str, target: str) -> None:
        versions = list(dict.fromkeys([*experiments.VERSIONS, environments.installed_version(), triton]))
        hunts = [(f"{hunt.name}: {hunt.title}", name) for name, hunt in HUNTS.items()]
        self.menus = {
            "hunt": _dropdown("hunt", "330px", options=hunts, value=self.hunt.name),
            "triton": _dropdown("Triton", options=versions, value=triton),
            "target": _dropdown("target", options=experiments.TARGETS, value=target),
            "axis": _dropdown("next axis"),
        }
        self.buttons = {
            name: widgets.Button(description=text, tooltip=tip)
            for name, text, tip in (
                ("bisect", "Bisect", "find the simplest value of this axis that still shows the bug"),
                (
                    "search",
                    "Search the rest",
                    "let the search choose the axes, and build the neighbours of its end",
                ),
                ("again", "Start over", "build this configuration, and forget the path"),
            )
        }
        self.status, self._settings = widgets.HTML(), widgets.HBox(layout=WRAP)
        selectors = [self.menus[name] for name in ("hunt", "triton", "target")]
        self.box = widgets.VBox(
            [
                widgets.HBox(selectors, layout=WRAP),
                self._settings,
                widgets.HBox([self.menus["axis"], *self.buttons.values()], layout=WRAP),
                self.status,
            ]
        )
        for name, widget in {**self.menus, **self.buttons, "status": self.status}.items():
            widget.add_class(f"tree-{name}")
        self._make_axes()
        for menu in selectors:
            menu.observe(self._select, "value")
        self.buttons["bisect"].on_click(lambda _: self._run(lambda: self._bisect(self.menus["axis"].value)))
        self.buttons["search"].on_click(lambda _: self._run(self._search))
        self.buttons["again"].on_click(lambda _: self._run(self._start_over))

    def _make_axes(self) -> None:
        self.axes = {
            axis: _dropdown(
                axis, "230px", options=[(str(value), value) for value in values], value=self.config[axis]
            )
            for axis, values in self.hunt.axes.items()
        }
        for axis, menu in self.axes.items():
            menu.add_class(f"tree-{axis.lower().replace('_', '-')}")
            menu.observe(self._select, "value")
        self._settings.children = list(self.axes.values())

    def _select(self, change) -> None:
        if self._drawing:
            return
        if change["owner"] is self.menus["hunt"]:
            self.hunt = HUNTS[change["new"]]
            self.config = dict(self.hunt.start)
            self._drawing = True
            self.menus["target"].value = self.hunt.target
            self._drawing = False
            self._make_axes()
        self.config = {axis: menu.value for axis, menu in self.axes.items()}
        self._run(self._start_over)

    def _run(self, work: Callable[[], None]) -> None:
        """Do the work while nothing can be pressed, and draw the result."""
        self.problem = ""
        self._enable(False)
        self.status.value = "<p>building…</p>"
        try:
            work()
        except Exception as error:  # a build that is impossible must not end the tree
            self.problem = str(error)
        self._draw()

    def _enable(self, enabled: bool) -> None:
        for widget in (*self.menus.values(), *self.axes.values(), *self.buttons.values()):
            widget.disabled = not enabled

    # ---- drawing

    @property
    def text(self) -> str:
        """The path, one line per step, and its end."""
        return "\n".join(
            [*(f"{number}. {step}" for number, step in enumerate(self.steps, 1)), *self._describe_end()]
        )

    def _describe_end(self) -> list[str]:
        lines = [self.problem]
        if self.row:
            where = f" in {self.row['stage']} ({self.row['message']})" if "stage" in self.row else ""
            lines.append(f"{describe(self.config)}: {self.row['outcome']}{where}")
            if self.row["outcome"] != self.hunt.good and self.steps:
                lines.append(
                    self.sentence
                    or (
                        f"may still get simpler: {', '.join(self.open_axes)}"
                        if self.open_axes
                        else "no axis gets simpler: this is a smallest trigger"
                    )
                )
        return [*filter(None, lines), self._describe_builds()]

    def _describe_builds(self) -> str:
        builds = self._known.get((self.hunt.name, self.menus["triton"].value, self.menus["target"].value))
        if builds is None:
            return "no builds at hand"
        count = len(builds.rows)
        return f"{count} build{'s' * (count != 1)}, " + (
            "live" if builds.live else "as recorded without a GPU"
        )

    def _draw(self) -> None:
        self._drawing = True
        for axis, menu in self.axes.items():
            menu.value = self.config[axis]
        self.menus["axis"].options = self.open_axes or list(self.hunt.axes)
        self._drawing = False
        self._enable(True)
        lines = "<br>".join(map(html.escape, self._describe_end()))
        self.status.value = f"<p style='line-height: 1.4'>{lines}</p>"
        for handle, view in zip(self._handles, self.static_views() if self._handles else ()):
            handle.update(view)

    def static_views(self) -> tuple:
        """Return what stays in the notebook: the picture of the path, if there is one, and the text."""
        picture = HTML("")
        if self.steps:
            title = f"Triton {self.menus['triton'].value}, {self.menus['target'].value}, {self.hunt.title}: "
            outcome = self.row["outcome"] if self.row else ""
            picture = figures.path_picture(self.hunt, self.steps, title + outcome, self._describe_builds())
        return picture, Pretty(self.text)

    def _ipython_display_(self) -> None:
        display({**self.box._repr_mimebundle_(), "text/plain": f"Tree({self.hunt.name})"}, raw=True)
        handles = [display(view, display_id=True) for view in self.static_views()]
        self._handles = [] if None in handles else handles  # None outside of a notebook

    def __repr__(self) -> str:
        return self.text
