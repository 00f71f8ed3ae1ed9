"""A panel for a lecture hall: choose a kernel, a shape and a target, press Run, and watch its configurations race.

    panel.Panel(gemm_trials.SUBJECT, descriptors_trials.SUBJECT, preset="grid of 96")

Recorded rows show before anything has run. A sweep is a task in the notebook's event loop, which it never holds; what
it found stays in the notebook as a picture and a text table when the widgets are gone.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import html
import io
import re
from collections.abc import Coroutine
from typing import Any

import filelock
import ipywidgets as widgets
from IPython.display import HTML, Image, display
from traitlets import TraitError

from tilelab import device, panel_html, plots, results, sweep
from tilelab.panel_html import SHOWS, TIMED, figure, number, standing, winner, word

DRAW_S = 0.2
TOP = 10
MENUS = {"kernel": "kernel", "shape": "shape", "dtype": "type", "preset": "configurations", "target": "target",
         "x": "across", "y": "upwards", "show": "show"}
# What a record says of a configuration that was built here.
MEASURED = ("status", "reason", "ms", "peer_ms", "ratio", "tflops", "gbps", "error", "peer_error")


@functools.total_ordering
@dataclasses.dataclass(frozen=True)
class _Tick:
    """A label on an axis, sorted by its numbers."""

    text: str

    def __lt__(self, other):
        return panel_html.natural(self.text) < panel_html.natural(other.text)

    def __str__(self):
        return self.text


def shape_of(text: str, subject: sweep.Subject) -> tuple[int, ...]:
    """A subject's shape by its name, or from "4096,4096,4096"; ValueError for anything else."""
    if text in subject.shapes:
        return subject.shapes[text]
    sizes = re.split(r"\s*[,;x×]\s*|\s+", text.strip())
    if not all(re.fullmatch(r"\d{1,18}", size, re.ASCII) for size in sizes):
        raise ValueError(f"a shape is a name of the menu or whole numbers such as "
                         f"{','.join(map(str, next(iter(subject.shapes.values()))))}; here it is {text[:60]!r}.")
    return tuple(map(int, sizes))


def targets() -> list[tuple[str, str]]:
    """The target menu: the GPU here, as "", then every target that has TMA."""
    here = device.current()
    known = [(target, target) for target in device.TARGETS if device.limits(target).has_tma]
    return [(f"this GPU ({here.name})", "")] * here.has_tma + known


def _sentence(error: BaseException) -> str:
    expected = isinstance(error, (ValueError, OSError, device.Unsupported))
    return str(error) if expected and str(error) else f"{type(error).__name__}: {error}"


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
    """The panel of some sweep.Subjects; `choice` presets menus (kernel, shape, dtype, preset, target, x, y, show).

    A cell that ends with it shows the widgets, and beneath them what stays: a picture and a text table. `menus` and
    `buttons` hold the widgets, `task` the sweep under way. ValueError for a choice that its menu does not have.
    """

    def __init__(self, *subjects: sweep.Subject, **choice: str):
        if not subjects:
            raise ValueError("a panel needs at least one subject, such as ch14.gemm_trials.SUBJECT.")
        if unknown := set(choice) - set(MENUS):
            raise ValueError(f"a panel's menus are {', '.join(MENUS)}; here is {', '.join(sorted(unknown))}.")
        self.subjects = {subject.name: subject for subject in subjects}
        self.task: asyncio.Task | None = None
        self._sweep: sweep.Sweep | None = None
        self._kept: dict[str, dict] = {}  # rows by their key, of every choice so far
        self._base: dict[str, dict] = {}  # of the choice: what is known without running
        self._configs: dict[str, Any] = {}
        self._past: dict[str, dict] = {}  # the record's rows by configuration
        self._roofs: dict[tuple, sweep.Roofline | str | None] = {}
        self._subject = self._space = self._selected = self._handles = self._drawn_for = None
        self._source = self._problem = self._note = ""
        self._keeping = self._keep_again = self._filling = False
        self._make()
        for name in filter(choice.__contains__, MENUS):  # in this order: the kernel decides what the others offer
            self._set(name, choice[name])
        for name, menu in self.menus.items():
            menu.observe(functools.partial(self._changed, name), "value")
        self._choose()

    # -- widgets

    def _make(self) -> None:
        self.menus = {name: widgets.Combobox(description=text, ensure_option=False, continuous_update=False)
                      if name == "shape" else widgets.Dropdown(description=text) for name, text in MENUS.items()}
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
        self.left = left = widgets.VBox([self.title, self.grid, self.detail])
        right = widgets.VBox([self.roofline, self.top])
        actions = widgets.HBox(list(self.buttons.values()))
        controls = [widgets.HBox(list(self.menus.values())),
                    widgets.HBox([widgets.VBox([actions, self.progress]), self.status])]
        main = widgets.HBox([left, right])
        self.box = widgets.VBox([widgets.HTML(panel_html.CSS), *controls, main])
        named = {"panel": self.box, **self.menus, **self.buttons, "progress": self.progress, "status": self.status,
                 "title": self.title, "detail": self.detail, "top": self.top, "roofline": self.roofline,
                 "map": self.grid, "left": left, "right": right, "main": main}
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
        _offer(self.menus["target"], targets())
        self._fill()

    def _fill(self) -> None:
        """The menus that a kernel determines; what it offers too stays chosen."""
        subject = self.subjects[self.menus["kernel"].value]
        axes = list(subject.axes)
        self._filling = True
        try:
            for name, offered in (("dtype", subject.dtypes), ("preset", subject.presets), ("x", axes), ("y", axes)):
                _offer(self.menus[name], list(offered), first=int(name == "y" and len(axes) > 1))
            _offer(self.menus["show"], [(text.format(subject.peer), key) for key, (text, _) in SHOWS.items()])
            self.menus["shape"].options = list(subject.shapes)
            self.menus["shape"].value = next(iter(subject.shapes))
        finally:
            self._filling = False

    def _set(self, name: str, value: str) -> None:
        try:
            self.menus[name].value = value
        except TraitError:
            offered = ", ".join(option if isinstance(option, str) else option[1] or "'' (the GPU here)"
                                for option in self.menus[name].options)
            raise ValueError(f"{name} is one of {offered}; here it is {value!r}.") from None
        if name == "kernel":
            self._fill()

    def _ipython_display_(self) -> None:
        display(self.box)
        empty = HTML("")
        self._handles = [display(empty, display_id=True), display(empty, display_id=True)]
        if None in self._handles:  # no notebook
            self._handles = None
        self._keep()

    # -- what the choice is, and what is known of it

    @property
    def running(self) -> bool:
        """Whether a sweep is under way."""
        return self.task is not None and not self.task.done()

    def _changed(self, name: str, _) -> None:
        if self._filling:
            return
        if name == "kernel":
            self._fill()
        if name not in ("x", "y", "show"):
            self._choose()
            return
        self._draw()
        self._keep()

    def _choose(self) -> bool:
        """Take what the menus say, and show what is known of it; False, with a sentence, where that is no choice."""
        if self.running:
            return False
        values = {name: menu.value for name, menu in self.menus.items()}
        subject = self.subjects[values["kernel"]]
        try:
            shape = shape_of(values["shape"], subject)
            space = subject.space(shape, values["dtype"], values["target"] or None)
            configs = sweep.keys(subject.presets[values["preset"]](values["dtype"]), space)
            if not configs:
                raise ValueError(f"{values['preset']} holds no configuration of {values['dtype']}.")
            base = {key: self._known(space, key, config) for key, config in configs.items()}
            self._kept |= {key: row for key, row in self._journal(subject).rows().items()
                           if key in configs and key not in self._kept}
            past, source, like = self._recorded(subject, space, shape, values["dtype"])
        except Exception as error:  # whatever a subject raises is told, and the panel lives on
            self._problem = _sentence(error)
            self._say()
            return False
        self._subject, self._space, self._configs, self._base = subject, space, configs, base
        self._past, self._source, self._like, self._problem, self._note = past, source, like, "", ""
        self._draw()
        self._keep()
        return True

    @staticmethod
    def _known(space: sweep.Space, key: str, config: Any) -> dict:
        reason = space.reject(config)
        return {**space.label(config), "key": key, "predicted_ms": space.predicted_ms(config), "reason": reason,
                "status": "rejected" if reason else "waiting"}

    @staticmethod
    def _journal(subject: sweep.Subject) -> sweep.Journal:
        return sweep.journal_for(re.sub(r"\W+", "-", subject.name.lower()).strip("-"))

    @staticmethod
    def _recorded(subject, space, shape, dtype) -> tuple[dict[str, dict], str, bool]:
        """Recorded rows of this shape, by configuration; where they are from; whether the record's target is ours."""
        try:
            record = subject.recorded()
        except FileNotFoundError:
            return {}, "", False
        if record.device["target"] != space.target:
            return {}, "", False
        rows = {row.get("kernel") or row["config"]: row for row in record.rows
                if row["shape"] == list(shape) and row["dtype"] == dtype}
        return rows, record.label().partition(" (")[0] if rows else "", True

    def rows(self) -> list[dict]:
        """A row for every configuration of the choice: what came of it here, with or else from the record."""
        fresh = self.running or any(key in self._kept for key in self._base)
        return [self._row(key, base, fresh) for key, base in self._base.items()]

    def _row(self, key: str, base: dict, fresh: bool) -> dict:
        row = {**base, **self._kept.get(key, {})}
        past = self._past.get(row["kernel"], {})
        if not fresh and past and row["status"] == "waiting":
            return {**row, **past, "kernel": row["kernel"], "predicted_ms": row["predicted_ms"], "laid": True}
        if fresh and not self._space.live and row["status"] == "ok" and past.get("status") in ("ok", "wrong", "failed"):
            return {**row, **{name: past[name] for name in MEASURED if name in past}, "laid": True}
        return row

    # -- the sweep

    def _run(self) -> None:
        if self.running or not self._choose():
            return
        try:
            self._sweep = sweep.Sweep(list(self._configs.values()), self._space, journal=self._journal(self._subject))
            self.task = asyncio.get_running_loop().create_task(self._follow(self._sweep))
        except Exception as error:
            self._problem = _sentence(error)
        self._draw()

    async def _follow(self, walk: sweep.Sweep) -> None:
        """Take rows as they come, draw a few times a second, and leave the end in the notebook."""
        drawing = asyncio.create_task(self._keep_drawing())
        try:
            async for row in walk:
                self._kept[row["key"]] = row
        except Exception as error:
            self._problem = f"the sweep ended early: {_sentence(error)}"
        finally:
            walk.cancel()
            drawing.cancel()
            self._sweep = self.task = None
        took = panel_html.seconds(walk.elapsed_s)
        self._note = f"cancelled after {took}: Run goes on from here" if walk.cancelled else f"done in {took}"
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
            self._forget()
        except OSError as error:
            self._problem = _sentence(error)
            self._say()
            return
        self._run()

    def _forget(self) -> None:
        """Drop the choice's rows from memory and from the journal, which keeps those of other choices."""
        for key in self._configs:
            self._kept.pop(key, None)
        journal = self._journal(self._subject)
        if not journal.path.exists():
            return
        with filelock.FileLock(f"{journal.path}.lock"):
            stay = [row for key, row in journal.rows().items()
                    if key not in self._configs and not set(row.get("of", ())) & set(self._configs)]
            results.write_atomically(journal.path, "".join(f"{results.json_line(row, 'a row')}\n" for row in stay))

    def _theme(self) -> None:
        dark = self.buttons["theme"].description == "Dark"
        (self.box.add_class if dark else self.box.remove_class)("tiles-dark")
        self.buttons["theme"].description = "Light" if dark else "Dark"

    # -- drawing

    def _draw(self) -> None:
        """Bring every widget up to date; only what has changed is sent."""
        rows = self.rows()
        best, show = winner(rows), self._shown(rows)
        values = [value for row in rows if (value := figure(row, show)) is not None]
        cells = self._arranged(rows)
        self._arrange(list(cells))
        for button, (place, inside) in zip(self._cells, cells.items()):
            self._draw_cell(button, place, inside, show, values, best)
        text = SHOWS[show][0].format(self._subject.peer)
        source = self._source if any(row.get("laid") for row in rows) else ""
        if show != self.menus["show"].value:
            text, source = "ok, and its registers a thread", f"nothing is timed on {self._space.target}"
        timed = any(row.get("ms") for row in rows)
        _put(self.title, panel_html.heading(text, source,
                                            panel_html.scale(values, show) if values else ""))
        _put(self.top, panel_html.top(self._best(rows), self._subject.peer,
                                      "top ten" + ", recorded" * any(row.get("laid") for row in rows) if timed else
                                      "predicted fastest of what builds"))
        self._draw_roofline(rows)
        self._draw_detail(cells)
        self._say(rows)

    def _shown(self, rows) -> str:
        """What cells show: the menu's choice, or where nothing is timed what the compiler said."""
        show = self.menus["show"].value
        timed = any(row.get("ms") for row in rows)
        built = any(row.get("registers") for row in rows)
        return "registers" if show in TIMED and built and not timed and not self._space.live else show

    def _arranged(self, rows) -> dict[tuple[str, str], list[dict]]:
        """{(x, y): rows of the cell, best first}, as a picture is read: from the top left."""
        across, up = (self._subject.axes[self.menus[name].value] for name in "xy")
        cells = collections.defaultdict(list)
        for config, row in zip(self._configs.values(), rows):
            cells[across(config), up(config)].append(row)
        order = sorted(cells, key=lambda place: panel_html.natural(place[0]))
        order.sort(key=lambda place: panel_html.natural(place[1]), reverse=True)
        return {place: sorted(cells[place], key=standing) for place in order}

    def _arrange(self, places: list[tuple[str, str]]) -> None:
        """Lay out the grid, unless it is laid out so already."""
        names = self.menus["x"].value, self.menus["y"].value
        if self._drawn_for == (names, places):
            return
        self._drawn_for = names, places
        columns = sorted({x for x, _ in places}, key=panel_html.natural)
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
        self.grid.layout.grid_template_columns = f"max-content repeat({len(columns)}, minmax(78px, 1fr))"
        self.left.layout.flex = f"2 1 {110 + 80 * len(columns)}px"  # with many columns the rest goes beneath
        self.grid.children = children

    def _draw_cell(self, button, place, inside, show, values, best) -> None:
        row = inside[0]
        value = figure(row, show)
        text = word(row) if value is None else number(value, show)
        if value is not None and show != self.menus["show"].value:
            text = f"ok {text}"
        classes = ["tiles-cell", f"tiles-{row['status']}"]
        if value is not None and row["status"] == "ok":
            classes.append(f"tiles-q{panel_html.shade(value, values, show)}")
        if best is not None and any(one is best for one in inside):
            text = f"★ {text}"  # not by colour alone
            classes.append("tiles-best")
        if place == self._selected:
            classes.append("tiles-selected")
        if len(inside) > 1:
            text += f" +{len(inside) - 1}"
        _update(button, description=text, tooltip=panel_html.summary(row, self._subject.peer),
                _dom_classes=tuple(classes))

    def _select(self, button) -> None:
        self._selected = self._place.get(button)
        self._draw()

    def _draw_detail(self, cells) -> None:
        inside = cells.get(self._selected, [])
        text = panel_html.detail(inside, self._subject.peer, self._source) if inside else (
            "<p>Select a cell for its figures, or for why it has none.</p>")
        _put(self.detail, text)

    def _draw_roofline(self, rows) -> None:
        subject, dtype = self._subject, self.menus["dtype"].value
        if not (self._space.live or self._like):  # the roofs were measured on another GPU
            _put(self.roofline, f"<p>no roofline: nothing is timed on {self._space.target}</p>")
            return
        if (subject.name, dtype) not in self._roofs:
            self._roofs[subject.name, dtype] = None
            _later(self._fetch_roof(subject, dtype))
        roof = self._roofs[subject.name, dtype]
        if roof is None or isinstance(roof, str):
            _put(self.roofline, f"<p>{html.escape(roof or '')}</p>")
            return
        reaches = [roof.reach(config) for config in self._configs.values()]
        points = [(reach, row) for reach, row in zip(reaches, rows) if row["status"] == "ok" and row.get(roof.speed)]
        _put(self.roofline, panel_html.roofline(points, reaches, roof))

    async def _fetch_roof(self, subject, dtype) -> None:
        """In a thread: a subject may measure its roofs."""
        try:
            roof = await asyncio.to_thread(subject.roofline, dtype)
        except Exception as error:
            roof = f"no roofline: {_sentence(error)}"
        self._roofs[subject.name, dtype] = roof
        if self._subject is subject:
            self._draw_roofline(self.rows())

    def _best(self, rows) -> list[dict]:
        """The ten fastest; where nothing is timed, those that the model takes for the fastest of what was built."""
        ranked = sorted((row for row in rows if row["status"] == "ok"), key=standing)
        timed = [row for row in ranked if row.get("ms")]
        return (timed or ranked)[:TOP]

    def _caption(self, rows) -> str:
        if not any(row.get("ms") for row in rows):
            return f"built for {self._space.target}, predicted fastest first"
        return f"top ten, {self._source}" if any(row.get("laid") for row in rows) else "top ten"

    def _say(self, rows=None) -> None:
        """Progress, the status line, and which buttons and menus can be used."""
        if rows is None:
            rows = self.rows()
        walk, total = self._sweep, len(self._base)
        counts = walk.counts if walk else collections.Counter(row["status"] for row in rows)
        counts = {status: counts[status] for status in ("ok", "rejected", "wrong", "failed") if counts.get(status)}
        done = sum(counts.values())
        note = self._note
        if walk and not walk.cancelled:
            left = walk.seconds_left
            note = f"about {panel_html.seconds(left)} left" if left else "starting"
        elif not walk and not note:
            doing = "time" if self._space and self._space.live else "build"
            note = f"{self._source or 'swept before'}" if done == total else f"press Run to {doing} them"
        found = ", ".join(f"{count} {status}" for status, count in counts.items())
        line = " · ".join(filter(None, (f"{done} of {total}", found, note)))
        said = [f"<p class='tiles-problem'>{html.escape(self._problem)}</p>"] if self._problem else []
        if self._base:
            said.append(f"<p class='tiles-count'>{html.escape(line)}</p>")
            said += [f"<p>{html.escape(text)}</p>" for text in
                     panel_html.verdict(rows, self._subject.peer)]
        _put(self.status, f"<div role='status'>{''.join(said)}</div>")
        if self.progress.max != max(total, 1):
            self.progress.max = max(total, 1)
        _update(self.progress, value=done)
        for name, menu in self.menus.items():
            _update(menu, disabled=self.running and name not in ("x", "y", "show"))
        for name in ("run", "again"):
            _update(self.buttons[name], disabled=self.running)
        _update(self.buttons["cancel"], disabled=not self.running)

    # -- what stays in the notebook

    def _keep(self) -> None:
        if self._handles and self._base and not self._keeping:
            self._keeping = True
            _later(self._keep_up())
        else:
            self._keep_again = self._keeping

    async def _keep_up(self) -> None:
        """Replace the picture and the table beneath the widgets. One at a time, the last one wins."""
        try:
            while True:
                self._keep_again = False
                rows = self.rows()
                kept = [row for row in rows if row["status"] != "waiting"]
                picture, table = HTML(""), HTML("")
                if kept:
                    picture = Image(data=await asyncio.to_thread(self._picture, rows, self._arranged(rows)))
                    table = self._table(rows)
                for handle, what in zip(self._handles, (picture, table)):
                    handle.update(what)
                if not self._keep_again:
                    return
        finally:
            self._keeping = False

    def _heading(self, rows) -> str:
        space, values = self._space, {name: self.menus[name].value for name in ("kernel", "shape", "dtype")}
        return f"{values['kernel']}, {values['shape']}, {values['dtype']}, {space.target}"

    def _provenance(self, rows) -> str:
        here = device.current().name if self._space.live else f"built for {self._space.target}"
        if not any(row.get("laid") for row in rows):
            return here
        return self._source if not any(row["key"] in self._kept for row in rows) else f"{here}; times {self._source}"

    def _picture(self, rows, cells) -> bytes:
        """The heat map as PNG."""
        show = self._shown(rows)
        drawn = [{**inside[0], "x": _Tick(x), "y": _Tick(y), show: figure(inside[0], show)}
                 for (x, y), inside in cells.items()]
        said = panel_html.verdict(rows, self._subject.peer)[:1]
        picture = plots.heat_map(
            drawn, "x", "y", show, mark=word, fmt="{:.2f}" if show == "ratio" else "{:.3g}",
            title=f"{self._heading(rows)}: {said[0] if said else SHOWS[show][0]}",
            source=f"{SHOWS[show][0].format(self._subject.peer)}; {self._provenance(rows)}",
            x_label=self.menus["x"].value, y_label=self.menus["y"].value)
        columns = len({x for x, _ in cells})
        if columns > 9:
            picture.axes[0].tick_params(axis="x", rotation=60)
        buffer = io.BytesIO()
        picture.savefig(buffer, format="png")
        return buffer.getvalue()

    def _table(self, rows) -> results.Table:
        """The top ten as text, or why there is none."""
        best = self._best(rows)
        if not best:
            return results.table([row for row in rows if row["reason"]][:TOP], f"{self._heading(rows)}: none is ok",
                                 ["kernel", "status", "reason"])
        columns = [name for name in ("kernel", "ms", "ratio", "tflops", "gbps", "predicted_ms", "registers", "smem",
                                     "programs_per_sm") if any(row.get(name) is not None for row in best)]
        told = [{name: figure(row, name) if name in TIMED else row.get(name) for name in columns} for row in best]
        counts = collections.Counter(row["status"] for row in rows)
        caption = f"{self._heading(rows)}: {self._caption(rows)} ({', '.join(f'{n} {s}' for s, n in counts.items())})"
        return results.table(told, caption, columns or None)


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
    _update(widget, value=html.escape(text), _dom_classes=("tiles-tick", *classes))
    return widget
