"""The sweep panel's widgets, and the thread that follows the sweep behind them.

JupyterLab runs widget callbacks in a thread of its own (a subshell of the kernel) and ends that thread when its page
closes; Voila runs them in the main thread. The panel therefore needs no event loop, and a lock guards its state.
"""

from __future__ import annotations

import functools
import html
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from tilelab import sweep, tune
from tilelab.panel import rows as panel_rows
from tilelab.panel import running as running_sweeps
from tilelab.panel import snapshot, views
from tilelab.panel.rows import SHOWN_FIELDS, describe_error, get_value
from tilelab.tunable import TunableKernel

DRAW_S = 0.2  # from one drawing to the next while a sweep runs
SNAPSHOT_S = 0.4  # from a change in the menus to a new snapshot
MENUS = {"kernel": "kernel", "shape": "shape", "sizes": "or sizes", "dtype": "type",
         "preset": "configurations", "target": "target", "x": "across", "y": "upwards", "show": "show"}
VIEW_MENUS = ("x", "y", "show")  # these change the picture only
TOP_COLUMNS = ("kernel", "ms", "ratio", "predicted_ms", "registers")
BUTTONS = {"run": ("Run", "sweep, or go on where a sweep was cancelled"),
           "cancel": ("Cancel", "stop now; what is finished stays"),
           "again": ("Start over", "forget this choice's rows and sweep again"),
           "keep": ("Keep", "let config=\"best\" take the fastest at this shape; for a GEMM timed on this GPU"),
           "theme": ("Dark", "light or dark")}


class Panel:
    """The sweep panel of some kernels. `choice` presets menus (kernel, shape, dtype, preset, target, x, y, show).

    A cell that ends with it shows the widgets and, beneath them, a picture and a text table that stay in the notebook;
    `box` is the widgets alone. `shape` is a name, or sizes such as "512,512,512". `menus` and `buttons` hold the
    widgets. Raises ValueError for a choice that its menu does not offer.
    """

    def __init__(self, *kernels: TunableKernel, **choice: str):
        if not kernels:
            raise ValueError("a panel needs at least one kernel, such as ch14.gemm.sweep.TUNABLE_KERNEL.")
        if unknown := set(choice) - set(MENUS):
            raise ValueError(f"unknown menu {', '.join(sorted(unknown))}; a panel's menus are {', '.join(MENUS)}.")
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self._lock, self._snapshot_lock = threading.RLock(), threading.Lock()
        self._sweep: sweep.Sweep | None = None  # while one runs
        self._follower = threading.Thread()
        self._snapshot_timer = threading.Timer(0, self._update_snapshot)
        self._session_rows: dict[str, dict] = {}  # by key, for every choice so far
        self._choice: panel_rows.Choice | None = None
        self._selected = self._layout = self._snapshot_handles = None
        self._problem = self._note = ""
        self._filling = False
        self._make_widgets()
        for name in filter(choice.__contains__, MENUS):  # in this order: the kernel decides what the others offer
            self._set_menu(name, choice[name])
        for name, menu in self.menus.items():
            menu.observe(functools.partial(self._act, self._on_menu, name), "value")
        self._choose()
        self._cell = running_sweeps.find_cell()
        if self._choice and (left := running_sweeps.claim(self._choice.configs, self._cell)):
            self._show_sweep(left)

    # -- widgets and menus

    def _make_widgets(self) -> None:
        self.menus = {name: widgets.Text(description=text, continuous_update=False) if name == "sizes" else
                      widgets.Dropdown(description=text) for name, text in MENUS.items()}
        self.buttons = {name: widgets.Button(description=text, tooltip=tip) for name, (text, tip) in BUTTONS.items()}
        self.progress = widgets.IntProgress(min=0)
        self.status, self.title, self.detail, self.top, self.roofline = (widgets.HTML() for _ in range(5))
        self.grid = widgets.GridBox()
        self._cell_layout, self._cell_style = widgets.Layout(), widgets.ButtonStyle()
        self._cells: list[widgets.Button] = []  # every grid uses the same buttons and ticks again
        self._ticks: list[widgets.HTML] = []
        self._blank = widgets.HTML()
        self._place_of_cell: dict[widgets.Button, tuple[str, str]] = {}
        self.left = widgets.VBox([self.title, self.grid])
        right = widgets.VBox([self.detail, self.roofline, self.top])
        button_box = widgets.HBox(list(self.buttons.values()))
        controls = [widgets.HBox(list(self.menus.values())),
                    widgets.HBox([widgets.VBox([button_box, self.progress]), self.status])]
        main = widgets.HBox([self.left, right])
        self.box = widgets.VBox([widgets.HTML(views.CSS), *controls, main])
        named = {"panel": self.box, **self.menus, **self.buttons, "progress": self.progress, "status": self.status,
                 "title": self.title, "detail": self.detail, "top": self.top, "roofline": self.roofline,
                 "map": self.grid, "left": self.left, "right": right, "main": main, "actions": button_box}
        for name, widget in named.items():
            widget.add_class(f"tiles-{name}")
        for widget in controls:
            widget.add_class("tiles-controls")
        actions = {"run": self._run, "cancel": self.cancel, "again": self._start_over, "keep": self._keep,
                   "theme": self._switch_theme}
        for name, action in actions.items():
            self.buttons[name].add_class("tiles-button")
            self.buttons[name].on_click(lambda _, action=action: self._act(action))
        _set_options(self.menus["kernel"], list(self.kernels))
        _set_options(self.menus["target"], panel_rows.target_options())
        self._fill_menus()

    def _fill_menus(self) -> None:
        """Fill the menus that depend on the kernel; a value that the new kernel offers too stays chosen."""
        kernel = self.kernels[self.menus["kernel"].value]
        axes = list(kernel.axes)
        for name, options in (("dtype", kernel.dtypes), ("preset", kernel.presets), ("x", axes), ("y", axes)):
            _set_options(self.menus[name], list(options), default=int(name == "y" and len(axes) > 1))
        _set_options(self.menus["show"], [(text.format(kernel.peer), field)
                                          for field, (text, _) in SHOWN_FIELDS.items()])
        self.menus["shape"].options = list(kernel.shapes)
        self._fill_shape(next(iter(kernel.shapes)))

    def _fill_shape(self, text: str) -> None:
        """Show a shape's name in its menu and its sizes in their field; text that is no shape goes to the field."""
        kernel = self.kernels[self.menus["kernel"].value]
        try:
            sizes = panel_rows.parse_shape(text, kernel)
            text = ",".join(map(str, sizes))
        except ValueError:
            sizes = None
        self.menus["shape"].value = next((name for name, known in kernel.shapes.items() if known == sizes), None)
        self.menus["sizes"].value = text

    def _set_menu(self, name: str, value: str) -> None:
        if name in ("shape", "sizes"):
            self._fill_shape(value)
            return
        options = _option_values(self.menus[name].options)
        if value not in options:
            raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(filter(None, options))}.")
        self.menus[name].value = value
        if name == "kernel":
            self._fill_menus()

    def _ipython_display_(self) -> None:
        bundle = {**self.box._repr_mimebundle_(), "text/plain": f"Panel({', '.join(self.kernels)})"}
        display(bundle, raw=True)  # the box's own text would name every widget
        # Draw at once, because a notebook that is executed without a browser drops later updates.
        handles = [display(output, display_id=True) for output in self._make_snapshot()]
        self._snapshot_handles = None if None in handles else handles  # None: not in a notebook

    def _act(self, action: Callable, *arguments) -> None:
        """Call what a widget asks for while no other thread uses the panel."""
        with self._lock:
            action(*arguments)

    def _on_menu(self, name: str, change) -> None:
        if self._filling:
            return
        self._filling = True  # which changes other menus
        if name == "kernel":
            self._fill_menus()
        elif name in ("shape", "sizes"):
            self._fill_shape(change["new"])
        self._filling = False
        if name in VIEW_MENUS:
            self._draw()
            self._save_snapshot()
        else:
            self._choose()

    # -- the choice and its rows

    @property
    def running(self) -> bool:
        """Whether a sweep runs."""
        return self._sweep is not None

    def wait(self) -> None:
        """Wait until no sweep runs and its end is drawn."""
        if self._follower.ident:
            self._follower.join()

    def _choose(self) -> bool:
        """Read the menus and show the rows that are known; for an invalid choice show why, and return False."""
        if self.running:
            return False
        values = {name: self.menus[name].value for name in ("shape", "dtype", "preset", "target")}
        values["shape"] = values["shape"] or self.menus["sizes"].value
        try:
            choice = panel_rows.make_choice(self.kernels[self.menus["kernel"].value], **values)
            known = {key: row for key, row in choice.journal.rows().items() if key in choice.configs}
        except Exception as error:  # the panel lives on, whatever a kernel raises
            self._complain(describe_error(error))
            return False
        self._session_rows = known | self._session_rows
        self._choice, self._problem, self._note = choice, "", ""
        self._draw()
        self._save_snapshot()
        return True

    def _complain(self, problem: str) -> None:
        self._problem = problem
        self._draw_status(self.rows())

    def rows(self) -> list[dict]:
        """Return a row for every configuration of the choice; `status` is "waiting" before anything is known."""
        return self._choice.rows(self._session_rows, self.running) if self._choice else []

    # -- the sweep

    def _run(self) -> None:
        if self.running or not self._choose():
            return
        begun = sweep.Sweep(self._choice.configs.values(), self._choice.space, journal=self._choice.journal)
        self._show_sweep(running_sweeps.add(begun, self._cell))

    def _show_sweep(self, begun: sweep.Sweep) -> None:
        self._sweep = begun
        self._follower = threading.Thread(target=self._follow, args=(begun,), name="panel", daemon=True)
        self._follower.start()
        self._draw()

    def _follow(self, running: sweep.Sweep) -> None:
        """Draw a few times per second while a sweep runs, then its end."""
        while running.running:
            time.sleep(DRAW_S)
            with self._lock:
                self._session_rows |= running.rows
                self._draw()
        with self._lock:
            self._sweep, self._note = None, views.describe_end(running)
            self._session_rows |= running.rows
            try:
                running.finish()
            except Exception as error:
                self._problem = f"the sweep ended early: {describe_error(error)}"
            self._draw()
            self._save_snapshot()

    def cancel(self) -> None:
        """Stop the sweep now. Finished rows are kept, here and in the journal."""
        with self._lock:
            if self._sweep is not None:
                self._sweep.cancel()
                self._note = "cancelling"
                self._draw_status(self.rows())

    def _start_over(self) -> None:
        if self.running or not self._choose():
            return
        try:
            self._choice.journal.forget(self._choice.configs)
        except OSError as error:
            self._complain(describe_error(error))
            return
        for key in self._choice.configs:
            self._session_rows.pop(key, None)
        self._run()

    def _find_kept(self) -> tuple[Any, dict] | None:
        """Return (configuration, row) of the fastest, for Keep; None unless it was timed on the GPU here."""
        choice = self._choice
        if self.running or choice is None or choice.kernel.tuner is None or not choice.space.can_measure:
            return None
        best = panel_rows.find_winner(self.rows())
        return None if best is None or "overlay" in best else (choice.configs[best["key"]], best)

    def _keep(self) -> None:
        """Put the fastest configuration into the table of tuned shapes, and say so."""
        found, choice = self._find_kept(), self._choice
        if found is None:
            return
        (config, row), tried = found, sum(bool(row.get("ms")) for row in self.rows())
        try:
            sentence = tune.keep_winner(choice.kernel.tuner, row["shape"], row["dtype"], config, row, tried)
        except Exception as error:
            self._complain(describe_error(error))
            return
        self._note, self._problem = f"in the table of tuned shapes, {sentence.rstrip('.')}", ""
        self._draw_status(self.rows())

    def _switch_theme(self) -> None:
        to_dark = self.buttons["theme"].description == "Dark"
        (self.box.add_class if to_dark else self.box.remove_class)("tiles-dark")
        self.buttons["theme"].description = "Light" if to_dark else "Dark"

    # -- drawing

    def _draw(self) -> None:
        """Bring every widget up to date; only what has changed is sent to the browser."""
        if self._choice is None:
            return
        choice, rows = self._choice, self.rows()
        peer = choice.kernel.peer
        field = choice.choose_field(rows, self.menus["show"].value)
        values = [value for row in rows if (value := get_value(row, field)) is not None]
        best = panel_rows.find_winner(rows)
        cells = choice.group_cells(rows, self.menus["x"].value, self.menus["y"].value)
        self._arrange_grid(list(cells))
        for button, (place, cell_rows) in zip(self._cells, cells.items()):
            self._draw_cell(button, place, cell_rows, field, values, best)
        overlaid = any("overlay" in row for row in rows)
        timed = choice.space.can_measure or any(row.get("ms") for row in rows)
        source = choice.source * overlaid if timed else f"nothing is timed on {choice.space.target}"
        has_colors = values and any(row["status"] == "ok" for row in rows)
        legend = views.color_scale(values, field) if has_colors else ""
        _update(self.title, value=views.heading(SHOWN_FIELDS[field][0].format(peer), source, legend))
        has_top = any(row["status"] == "ok" for row in rows)
        _update(self.top, value=snapshot.make_table(choice, rows, TOP_COLUMNS)._repr_html_() if has_top else "")
        _update(self.detail, value=views.details(cells.get(self._selected, []), peer, choice.source))
        self._draw_roofline(rows)
        self._draw_status(rows)

    def _arrange_grid(self, places: list[tuple[str, str]]) -> None:
        """Lay out cells and ticks, unless they lie so already."""
        layout = self.menus["x"].value, self.menus["y"].value, places
        if self._layout == layout:
            return
        self._layout = layout
        columns = sorted({x for x, _ in places}, key=panel_rows.natural_key)
        lines = list(dict.fromkeys(y for _, y in places))
        while len(self._cells) < len(places):
            self._cells.append(widgets.Button(layout=self._cell_layout, style=self._cell_style))
            self._cells[-1].on_click(self._select)
        texts = [(html.escape(line), ("tiles-tick", "tiles-line")) for line in lines]
        texts += [(html.escape(column).replace(", ", ",<br>"), ("tiles-tick",)) for column in columns]
        self._ticks += [widgets.HTML() for _ in texts[len(self._ticks):]]
        for tick, (text, classes) in zip(self._ticks, texts):
            _update(tick, value=text, _dom_classes=classes)
        cells = dict(zip(places, self._cells))
        self._place_of_cell = {button: place for place, button in cells.items()}
        children = []
        for tick, line in zip(self._ticks, lines):
            children += [tick, *(cells.get((column, line), self._blank) for column in columns)]
        children += [self._blank, *self._ticks[len(lines):len(texts)]]
        self.grid.layout.grid_template_columns = f"max-content repeat({len(columns)}, minmax(66px, 1fr))"
        self.left.layout.flex = f"1 1 {145 + 68 * len(columns)}px"  # many columns push the right half beneath
        self.grid.children = children

    def _draw_cell(self, button, place, cell_rows, field, values, best) -> None:
        row = cell_rows[0]
        value = get_value(row, field)
        text = panel_rows.short_status(row) if value is None else views.format_number(value, field)
        classes = ["tiles-cell", f"tiles-{row['status']}"]
        if value is not None and row["status"] == "ok":
            classes.append(views.shade_class(value, values, field))
        if best is not None and any(one is best for one in cell_rows):
            text = f"★ {text}"  # not by colour alone
            classes.append("tiles-best")
        if place == self._selected:
            classes.append("tiles-selected")
        if len(cell_rows) > 1:
            text += f" +{len(cell_rows) - 1}"
        tooltip = f"{row['kernel']}: {row.get('reason') or row['status']}"
        _update(button, description=text, tooltip=tooltip, _dom_classes=tuple(classes))

    def _select(self, button) -> None:
        self._selected = self._place_of_cell.get(button)
        self._draw()

    def _draw_roofline(self, rows: list[dict]) -> None:
        choice = self._choice
        if choice.space.can_measure or choice.same_target:
            try:
                roof = choice.kernel.roofline(self.menus["dtype"].value)
                text = views.roofline(choice.configs.values(), rows, roof)
            except Exception as error:  # no record of the roofs
                text = f"<p>no roofline: {html.escape(describe_error(error))}</p>"
        else:  # the roofs are of another GPU
            text = f"<p>no roofline: nothing is timed on {choice.space.target}</p>"
        _update(self.roofline, value=text)

    def _draw_status(self, rows: list[dict]) -> None:
        """Show progress and the status line, and enable the buttons and menus that can be used."""
        running, choice = self._sweep, self._choice
        swept = running or choice and any(key in self._session_rows for key in choice.configs)
        done = sum(row["status"] != "waiting" for row in rows) if swept else 0  # recorded rows do not count
        note = self._note
        if running and not running.cancelled:
            left = running.left_s
            note = f"about {views.format_seconds(left)} left" if left else "starting"
            note += "; another sweep has the GPU" * running.waits_for_gpu
        _update(self.status, value=views.status(choice, rows, done, note, self._problem))
        _update(self.progress, max=max(len(rows), 1), value=done)
        for name, menu in self.menus.items():
            _update(menu, disabled=self.running and name not in VIEW_MENUS)
        for name in ("run", "again"):
            _update(self.buttons[name], disabled=self.running)
        _update(self.buttons["cancel"], disabled=not self.running)
        _update(self.buttons["keep"], disabled=self._find_kept() is None)

    # -- what stays in the notebook

    def _make_snapshot(self) -> tuple:
        with self._lock:
            arguments = self._choice, self.rows(), *(self.menus[name].value for name in VIEW_MENUS)
        return snapshot.make_outputs(*arguments)

    def _save_snapshot(self) -> None:
        """Replace the picture and the table beneath the widgets, once the menus have rested for a moment."""
        if self._snapshot_handles:
            self._snapshot_timer.cancel()
            self._snapshot_timer = threading.Timer(SNAPSHOT_S, self._update_snapshot)
            self._snapshot_timer.daemon = True
            self._snapshot_timer.start()

    def _update_snapshot(self) -> None:
        with self._snapshot_lock:  # the last one to enter shows the newest rows
            for handle, output in zip(self._snapshot_handles, self._make_snapshot()):
                handle.update(output)


def _update(widget, **traits) -> None:
    """Set the traits that differ, in one message."""
    changed = {name: value for name, value in traits.items() if getattr(widget, name) != value}
    if changed:
        with widget.hold_sync():
            for name, value in changed.items():
                setattr(widget, name, value)


def _option_values(options) -> list[str]:
    return [option if isinstance(option, str) else option[1] for option in options]


def _set_options(menu: widgets.Dropdown, options: list, default: int = 0) -> None:
    """Replace a menu's options; the chosen value stays where it is still offered."""
    before, values = menu.value, _option_values(options)
    menu.options = options
    menu.index = values.index(before) if before in values else default
