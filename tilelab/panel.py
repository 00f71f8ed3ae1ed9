"""A panel for a lecture hall: choose a kernel, a shape and a target, press Run, and watch its configurations race.

    panel.Panel(gemm_trials.TUNABLE_KERNEL, tile_copy_trials.TUNABLE_KERNEL, preset="grid of 96")

Recorded rows show before anything has run. A sweep is a task in the notebook's event loop, which it never holds; what
it found stays in the notebook as a picture and a text table when the widgets are gone.
"""

from __future__ import annotations

import asyncio
import functools
import html
from collections.abc import Coroutine

import ipywidgets as widgets
from IPython.display import display
from traitlets import TraitError

from tilelab import panel_html, panel_rows, panel_still, sweep
from tilelab.panel_rows import SHOWS, figure, winner, word
from tilelab.tunable import Roofline, TunableKernel

DRAW_S = 0.2
MENUS = {"kernel": "kernel", "shape": "shape", "sizes": "or sizes", "dtype": "type",
         "preset": "configurations", "target": "target", "x": "across", "y": "upwards", "show": "show"}
VIEW = ("x", "y", "show")


def _later(work: Coroutine) -> None:
    """Do it when the event loop is free; at once where there is none."""
    try:
        task = asyncio.get_running_loop().create_task(work)
    except RuntimeError:
        asyncio.run(work)
        return
    _tasks.add(task)  # the loop itself holds tasks weakly
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task] = set()


class Panel:
    """The panel of some Subjects; `choice` presets menus (kernel, shape, dtype, preset, target, x, y, show).

    A cell that ends with it shows the widgets, and beneath them what stays: a picture and a text table; with `box`, the
    widgets alone. `shape` is a name or sizes such as "512,512,512". `menus` and `buttons` hold the widgets, `task` the
    sweep under way. ValueError for a choice that its menu does not have.
    """

    def __init__(self, *subjects: TunableKernel, **choice: str):
        if not subjects:
            raise ValueError("a panel needs at least one subject, such as ch14.gemm.experiments.TUNABLE_KERNEL.")
        if unknown := set(choice) - set(MENUS):
            raise ValueError(f"a panel's menus are {', '.join(MENUS)}; here is {', '.join(sorted(unknown))}.")
        self.subjects = {subject.name: subject for subject in subjects}
        self.task: asyncio.Task | None = None
        self._sweep: sweep.Sweep | None = None
        self._kept: dict[str, dict] = {}  # rows by their key, of every choice so far
        self._choice: panel_rows.Choice | None = None
        self._roofs: dict[tuple, Roofline | str | None] = {}
        self._selected = self._handles = self._arranged = None
        self._problem = self._note = ""
        self._keeping = self._keep_again = self._filling = False
        self._make()
        for name in filter(choice.__contains__, MENUS):  # in this order: the kernel decides what the others offer
            self._set(name, choice[name])
        for name, menu in self.menus.items():
            menu.observe(functools.partial(self._changed, name), "value")
        self._choose()

    # -- widgets

    def _make(self) -> None:
        self.menus = {name: widgets.Text(description=text, continuous_update=False) if name == "sizes" else
                      widgets.Dropdown(description=text) for name, text in MENUS.items()}
        self.buttons = {name: widgets.Button(description=text, tooltip=tip) for name, text, tip in (
            ("run", "Run", "sweep, or go on where a sweep was cancelled"),
            ("cancel", "Cancel", "stop now; what is finished stays"),
            ("again", "Start over", "forget this choice's rows and sweep again"),
            ("theme", "Dark", "light or dark"))}
        self.progress = widgets.IntProgress(min=0)
        self.status, self.title, self.detail, self.top, self.roofline = (widgets.HTML() for _ in range(5))
        self.grid = widgets.GridBox()
        self._cells: list[widgets.Button] = []  # made once, used again by every grid
        self._ticks: list[widgets.HTML] = []
        self._blank = widgets.HTML()
        self._place: dict[widgets.Button, tuple[str, str]] = {}
        self.left = widgets.VBox([self.title, self.grid])
        right = widgets.VBox([self.detail, self.roofline, self.top])
        actions = widgets.HBox(list(self.buttons.values()))
        controls = [widgets.HBox(list(self.menus.values())),
                    widgets.HBox([widgets.VBox([actions, self.progress]), self.status])]
        main = widgets.HBox([self.left, right])
        self.box = widgets.VBox([widgets.HTML(panel_html.CSS), *controls, main])
        named = {"panel": self.box, **self.menus, **self.buttons, "progress": self.progress, "status": self.status,
                 "title": self.title, "detail": self.detail, "top": self.top, "roofline": self.roofline,
                 "map": self.grid, "left": self.left, "right": right, "main": main}
        for name, widget in named.items():
            widget.add_class(f"tiles-{name}")
        actions.add_class("tiles-actions")
        for widget in controls:
            widget.add_class("tiles-controls")
        for widget in self.buttons.values():
            widget.add_class("tiles-button")
        for name, act in (("run", self._run), ("cancel", self.cancel), ("again", self._start_over),
                          ("theme", self._theme)):
            self.buttons[name].on_click(lambda _, act=act: act())
        _offer(self.menus["kernel"], list(self.subjects))
        _offer(self.menus["target"], panel_rows.targets())
        self._fill()

    def _fill(self) -> None:
        """The menus that a kernel determines; what it offers too stays chosen."""
        subject = self.subjects[self.menus["kernel"].value]
        axes = list(subject.axes)
        for name, offered in (("dtype", subject.dtypes), ("preset", subject.presets), ("x", axes), ("y", axes)):
            _offer(self.menus[name], list(offered), first=int(name == "y" and len(axes) > 1))
        _offer(self.menus["show"], [(text.format(subject.peer), key) for key, (text, _) in SHOWS.items()])
        self.menus["shape"].options = list(subject.shapes)
        self._fill_shape(next(iter(subject.shapes)))

    def _fill_shape(self, text: str) -> None:
        """A shape's name into its menu where it has one, its sizes into their field; or there what cannot be read."""
        subject = self.subjects[self.menus["kernel"].value]
        try:
            sizes = panel_rows.shape_of(text, subject)
            text = ",".join(map(str, sizes))
        except ValueError:
            sizes = None
        self.menus["shape"].value = next((name for name, known in subject.shapes.items() if known == sizes), None)
        self.menus["sizes"].value = text

    def _set(self, name: str, value: str) -> None:
        if name in ("shape", "sizes"):
            self._fill_shape(value)
            return
        try:
            self.menus[name].value = value
        except TraitError:
            offered = ", ".join(option if isinstance(option, str) else option[1] or "'' (the GPU here)"
                                for option in self.menus[name].options)
            raise ValueError(f"{name} is one of {offered}; here it is {value!r}.") from None
        if name == "kernel":
            self._fill()

    def _ipython_display_(self) -> None:
        bundle = {**self.box._repr_mimebundle_(), "text/plain": f"Panel({', '.join(self.subjects)})"}
        display(bundle, raw=True)  # its own text would name every widget
        # Drawn at once: a notebook that is executed without a browser drops what comes after its cell has ended.
        self._handles = [display(what, display_id=True) for what in panel_still.outputs(*self._asked())]
        if None in self._handles:  # no notebook
            self._handles = None

    # -- what the choice is, and what is known of it

    @property
    def running(self) -> bool:
        """Whether a sweep is under way."""
        return self.task is not None and not self.task.done()

    def _changed(self, name: str, change) -> None:
        if self._filling:
            return
        self._filling = True
        try:
            if name == "kernel":
                self._fill()
            elif name in ("shape", "sizes"):
                self._fill_shape(change["new"])
        finally:
            self._filling = False
        if name not in VIEW:
            self._choose()
            return
        self._draw()
        self._keep()

    def _choose(self) -> bool:
        """Take what the menus say, and show what is known of it; False, with a sentence, where that is no choice."""
        if self.running:
            return False
        named = {name: self.menus[name].value for name in ("shape", "dtype", "preset", "target")}
        named["shape"] = named["shape"] or self.menus["sizes"].value
        try:
            choice = panel_rows.choose(self.subjects[self.menus["kernel"].value], **named)
            self._kept |= {key: row for key, row in choice.journal.rows().items()
                           if key in choice.configs and key not in self._kept}
        except Exception as error:  # whatever a subject raises is told, and the panel lives on
            self._complain(panel_rows.sentence(error))
            return False
        before, self._choice, self._problem, self._note = self._choice, choice, "", ""
        try:
            self._draw()
        except Exception as error:  # an axis that cannot place a configuration
            self._choice = before
            self._complain(panel_rows.sentence(error))
            return False
        self._keep()
        return True

    def _complain(self, problem: str) -> None:
        self._problem = problem
        self._say()

    def rows(self) -> list[dict]:
        """A row for every configuration of the choice; `status` "waiting" before anything is known."""
        return self._choice.rows(self._kept, self.running) if self._choice else []

    # -- the sweep

    def _run(self) -> None:
        if self.running or not self._choose():
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._complain("a sweep needs an event loop: use the panel in a notebook, and tilelab.sweep in a script.")
            return
        try:
            self._sweep = sweep.Sweep(list(self._choice.configs.values()), self._choice.space,
                                      journal=self._choice.journal)
        except Exception as error:
            self._complain(panel_rows.sentence(error))
            return
        self.task = loop.create_task(self._follow(self._sweep))
        self._draw()

    async def _follow(self, walk: sweep.Sweep) -> None:
        """Take rows as they come, draw a few times a second, and leave the end in the notebook."""
        drawing = asyncio.create_task(self._keep_drawing())
        try:
            async for row in walk:
                self._kept[row["key"]] = row
        except Exception as error:
            self._problem = f"the sweep ended early: {panel_rows.sentence(error)}"
        finally:
            walk.cancel()
            drawing.cancel()
            self._sweep = self.task = None
            self._note = panel_html.ended(walk)
            self._draw()
            self._keep()

    async def _keep_drawing(self) -> None:
        while True:
            await asyncio.sleep(DRAW_S)
            self._draw()

    def cancel(self) -> None:
        """Stop the sweep now. Rows that are finished are kept, here and in the journal."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._note = "cancelling"
            self._say()

    def _start_over(self) -> None:
        if self.running or not self._choose():
            return
        try:
            self._choice.journal.forget(self._choice.configs)
        except OSError as error:
            self._complain(panel_rows.sentence(error))
            return
        for key in self._choice.configs:
            self._kept.pop(key, None)
        self._run()

    def _theme(self) -> None:
        dark = self.buttons["theme"].description == "Dark"
        (self.box.add_class if dark else self.box.remove_class)("tiles-dark")
        self.buttons["theme"].description = "Light" if dark else "Dark"

    # -- drawing

    def _draw(self) -> None:
        """Bring every widget up to date; only what has changed is sent."""
        choice, rows, asked = self._choice, self.rows(), self.menus["show"].value
        show = choice.shown(rows, asked)
        values = [value for row in rows if (value := figure(row, show)) is not None]
        best, cells = winner(rows), choice.cells(rows, self.menus["x"].value, self.menus["y"].value)
        self._arrange(list(cells))
        for button, (place, inside) in zip(self._cells, cells.items()):
            self._draw_cell(button, place, inside, show, values, best)
        text, laid = SHOWS[show][0].format(choice.subject.peer), any(row.get("laid") for row in rows)
        timed = choice.space.can_measure or any(row.get("ms") for row in rows)
        source = (choice.source if laid else "") if timed else f"nothing is timed on {choice.space.target}"
        coloured = values and any(row["status"] == "ok" for row in rows)
        _put(self.title, panel_html.heading(text, source, panel_html.scale(values, show) if coloured else ""))
        top = "top ten" + ", recorded" * laid if best else "predicted fastest of what builds" if any(
            row.get("predicted_ms") for row in rows) else "ten of what builds"
        _put(self.top, panel_html.top(panel_rows.best(rows), choice.subject.peer, top))
        _put(self.detail, panel_html.detail(cells.get(self._selected, []), choice.subject.peer, choice.source))
        self._draw_roofline(rows)
        self._say(rows)

    def _arrange(self, places: list[tuple[str, str]]) -> None:
        """Lay out the grid, unless it is laid out so already."""
        names = self.menus["x"].value, self.menus["y"].value
        if self._arranged == (names, places):
            return
        self._arranged = names, places
        columns = sorted({x for x, _ in places}, key=panel_rows.natural)
        lines = list(dict.fromkeys(y for _, y in places))
        while len(self._cells) < len(places):
            shared = {name: getattr(self._cells[0], name) for name in ("layout", "style")} if self._cells else {}
            button = widgets.Button(**shared)
            button.on_click(self._select)
            self._cells.append(button)
        while len(self._ticks) < len(columns) + len(lines):
            self._ticks.append(widgets.HTML())
        at = dict(zip(places, self._cells))
        self._place = {button: place for place, button in at.items()}
        ticks = iter(self._ticks)
        children = []
        for line in lines:
            children += [_tick(next(ticks), line, "tiles-line")]
            children += [at.get((column, line), self._blank) for column in columns]
        children.append(self._blank)
        children += [_tick(next(ticks), column) for column in columns]
        self.grid.layout.grid_template_columns = f"max-content repeat({len(columns)}, minmax(66px, 1fr))"
        self.left.layout.flex = f"1 1 {145 + 68 * len(columns)}px"  # with many columns the rest goes beneath
        self.grid.children = children

    def _draw_cell(self, button, place, inside, show, values, best) -> None:
        row = inside[0]
        value = figure(row, show)
        text = word(row) if value is None else panel_html.number(value, show)
        classes = ["tiles-cell", f"tiles-{row['status']}"]
        if value is not None and row["status"] == "ok":
            classes.append(panel_html.colour(value, values, show))
        if best is not None and any(one is best for one in inside):
            text = f"★ {text}"  # not by colour alone
            classes.append("tiles-best")
        if place == self._selected:
            classes.append("tiles-selected")
        if len(inside) > 1:
            text += f" +{len(inside) - 1}"
        _update(button, description=text, tooltip=panel_html.summary(row, self._choice.subject.peer),
                _dom_classes=tuple(classes))

    def _select(self, button) -> None:
        self._selected = self._place.get(button)
        self._draw()

    def _draw_roofline(self, rows) -> None:
        choice, dtype = self._choice, self.menus["dtype"].value
        subject = choice.subject
        if not (choice.space.can_measure or choice.like):  # the roofs were measured on another GPU
            _put(self.roofline, f"<p>no roofline: nothing is timed on {choice.space.target}</p>")
            return
        if (subject.name, dtype) not in self._roofs:
            self._roofs[subject.name, dtype] = None
            _later(self._fetch_roof(subject, dtype))
        roof = self._roofs[subject.name, dtype]
        if roof is None or isinstance(roof, str):
            _put(self.roofline, f"<p>{html.escape(roof or '')}</p>")
            return
        try:
            reaches = [roof.reach(config) for config in choice.configs.values()]
        except Exception as error:
            _put(self.roofline, f"<p>no roofline: {html.escape(panel_rows.sentence(error))}</p>")
            return
        points = [(reach, row) for reach, row in zip(reaches, rows) if row["status"] == "ok" and row.get(roof.speed)]
        _put(self.roofline, panel_html.roofline(points, reaches, roof))

    async def _fetch_roof(self, subject, dtype) -> None:
        """In a thread: a subject may measure its roofs."""
        try:
            roof = await asyncio.to_thread(subject.roofline, dtype)
        except Exception as error:
            roof = f"no roofline: {panel_rows.sentence(error)}"
        self._roofs[subject.name, dtype] = roof
        if self._choice.subject is subject:
            self._draw_roofline(self.rows())

    def _say(self, rows=None) -> None:
        """Progress, the status line, and which buttons and menus can be used."""
        rows = self.rows() if rows is None else rows
        walk, choice = self._sweep, self._choice
        begun = walk or choice and any(key in self._kept for key in choice.configs)
        done = sum(row["status"] != "waiting" for row in rows) if begun else 0  # what is only recorded does not count
        note = self._note
        if walk and not walk.cancelled:
            note = f"about {panel_html.seconds(walk.seconds_left)} left" if walk.seconds_left else "starting"
        _put(self.status, panel_html.status(choice, rows, done, note, self._problem))
        _update(self.progress, max=max(len(rows), 1), value=done)
        for name, menu in self.menus.items():
            _update(menu, disabled=self.running and name not in VIEW)
        for name in ("run", "again"):
            _update(self.buttons[name], disabled=self.running)
        _update(self.buttons["cancel"], disabled=not self.running)

    # -- what stays in the notebook

    def _keep(self) -> None:
        if self._handles and self._choice and not self._keeping:
            self._keeping = True
            _later(self._keep_up())
        else:
            self._keep_again = self._keeping

    def _asked(self) -> tuple:
        return self._choice, self.rows(), *(self.menus[name].value for name in VIEW)

    async def _keep_up(self) -> None:
        """Replace the picture and the table beneath the widgets. One at a time, the last one wins."""
        try:
            while True:
                self._keep_again = False
                for handle, what in zip(self._handles, await asyncio.to_thread(panel_still.outputs, *self._asked())):
                    handle.update(what)
                if not self._keep_again:
                    return
        finally:
            self._keeping = False


def _update(widget, **traits) -> None:
    """Set what differs, in one message."""
    changed = {name: value for name, value in traits.items() if getattr(widget, name) != value}
    if changed:
        with widget.hold_sync():
            for name, value in changed.items():
                setattr(widget, name, value)


def _offer(menu: widgets.Dropdown, options: list, first: int = 0) -> None:
    """Replace a menu's options; what was chosen stays so where it is offered still."""
    before = menu.value
    values = [option if isinstance(option, str) else option[1] for option in options]
    menu.options = options
    menu.index = values.index(before) if before in values else first


def _put(widget: widgets.HTML, text: str) -> None:
    _update(widget, value=text)


def _tick(widget: widgets.HTML, text: str, *classes: str) -> widgets.HTML:
    text = html.escape(text) if classes else html.escape(text).replace(", ", ",<br>")  # beneath a column
    _update(widget, value=text, _dom_classes=("tiles-tick", *classes))
    return widget
