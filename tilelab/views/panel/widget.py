"""The sweep panel: its choices, the rows of the choice, and the messages between Python and the view in the browser.

The view, `tilelab/views/panel.js`, draws everything. It sends what a reader asks for ("choose", "run", "cancel", ...).
Python answers with "data" for a new choice. The answer "rows" holds changed rows and the state of the sweep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from IPython.display import display

from tilelab import views
from tilelab.runtime import device
from tilelab.sweeps import running_sweeps, sweep
from tilelab.sweeps.space import Space
from tilelab.views import listing
from tilelab.views.panel import rows as panel_rows
from tilelab.views.panel import sentences
from tilelab.views.panel.rows import SHOWN_FIELDS, describe_error

SNAPSHOT_S = 0.4  # from a change in the menus to a new snapshot
MENUS = ("kernel", "shape", "dtype", "preset", "target", "x", "y", "show")
VIEW_MENUS = ("x", "y", "show")  # these change the picture only


class Panel:
    """The sweep panel of some kernels. `choice` presets menus (kernel, shape, dtype, preset, target, x, y, show).

    A cell that ends with it shows the view and, beneath it, a picture and a text table that stay in the notebook. `box`
    is the view alone, which fills the page in Voila. `shape` is a name, or sizes such as "512,512,512". `values` holds
    the value of each menu. Raises ValueError for a choice that its menu does not offer.
    """

    def __init__(self, *kernels: type[Space], **choice: str):
        if not kernels:
            raise ValueError("a panel needs at least one kernel, such as ch14.gemm.lesson.sweep.GemmSpace.")
        self.kernels = {kernel.title: kernel for kernel in kernels}
        here = device.current()
        self.targets = {"": f"this GPU ({here.name})"} if here.has_tma else {}
        known = [target for target in device.TARGETS if device.target_limits(target).has_tma]
        self.targets |= {target: device.describe_target(target) for target in known}
        self._lock, self._snapshot_lock = threading.RLock(), threading.Lock()
        self._owner = running_sweeps.SweepOwner(self._lock, self._on_rows, self._on_end)
        self._snapshot_timer = threading.Timer(0, self._update_snapshot)
        self._session_rows: dict[str, dict] = {}  # by key, for every choice so far
        # `_described` is the choice for the browser
        self._choice = self._described = self._snapshot_handles = None
        self._problem = self._note = ""
        self._sent: list[dict] = []  # the rows that the browser has
        self.values: dict[str, str] = {}
        self._values_of: dict[str, dict] = {}  # by kernel, so that going back to a kernel restores its menus
        self.box = views.View("panel", None, store=False)
        self._set_kernel(kernels[0].title)
        self._set_values(choice)
        self._choose()
        self.box.data = self._make_data(alone=True)
        self._outdated = False  # whether the data with which the view was made are old
        self.box.on_msg(self._receive)

    # -- the menus

    def _options(self, kernel: type[Space]) -> dict[str, list[str]]:
        axes = list(kernel.axes)
        offers = {
            "kernel": self.kernels,
            "dtype": kernel.dtypes,
            "preset": kernel.presets,
            "target": self.targets,
        }
        offers |= {"x": axes, "y": axes[1:2] + axes, "show": SHOWN_FIELDS}
        return {menu: list(options) for menu, options in offers.items()}

    def _set_kernel(self, name: str) -> None:
        """Restore the menus of a kernel; at its first visit, take over what both kernels offer."""
        before, kernel = self.values, self.kernels[name]
        self._values_of[before.get("kernel", "")] = before
        if known := self._values_of.get(name):
            self.values = known
            return
        offers = self._options(kernel)
        offers["preset"] = panel_rows.sort_by_record(kernel, offers["dtype"][0], offers["target"][0])
        self.values = {
            "shape": next(iter(kernel.shapes)),
            **{
                menu: before[menu] if before.get(menu) in options else options[0]
                for menu, options in offers.items()
            },
            "kernel": name,
        }

    def _set_values(self, values: dict[str, str]) -> None:
        """Set menus; a shape that is none is kept as text. ValueError for what a menu does not offer."""
        if unknown := set(values) - set(MENUS):
            raise ValueError(f"unknown menu {', '.join(sorted(unknown))}; choose one of {', '.join(MENUS)}.")
        # The order is that of MENUS: the kernel decides what the others offer.
        for name in filter(values.__contains__, MENUS):
            value, kernel = values[name], self.kernels[self.values["kernel"]]
            if name == "shape":
                try:
                    sizes = kernel.parse_shape(value)
                    value = next(
                        (known for known in kernel.shapes if kernel.shapes[known] == sizes),
                        ",".join(map(str, sizes)),
                    )
                except ValueError:
                    pass  # _choose says what is wrong with it
            elif value not in (options := self._options(kernel)[name]):
                choices = "; ".join(dict.fromkeys(filter(None, options)))  # some names hold a comma
                raise ValueError(f"unknown {name} {value!r}; choose one of {choices}.")
            if name == "kernel":
                self._set_kernel(value)
            self.values[name] = value

    def choose(self, **values: str) -> None:
        """Change menus and show the rows that are known. ValueError for what a menu does not offer."""
        with self._lock:
            if self.running:  # the rows on the screen belong to the sweep
                values = {name: value for name, value in values.items() if name in VIEW_MENUS}
            before = {**self.values}
            self._set_values(values)
            decisive = [name for name in MENUS if name not in VIEW_MENUS]
            if self._problem or any(self.values[name] != before[name] for name in decisive):
                self._choose()
            elif not values.keys() <= set(VIEW_MENUS):
                self._send_rows()  # the view waits for an answer
            self._save_snapshot()

    # -- the choice and its rows

    @property
    def running(self) -> bool:
        """Return whether a sweep runs."""
        return self._owner.running

    def wait(self) -> None:
        """Wait until no sweep runs and its end is drawn."""
        self._owner.wait()

    def _choose(self) -> bool:
        """Read the menus and show the rows that are known; for an invalid choice show why, and return False."""
        if self.running:
            return False
        values = {name: self.values[name] for name in ("shape", "dtype", "preset", "target")}
        try:
            choice = panel_rows.make_choice(self.kernels[self.values["kernel"]], **values)
            known = {key: row for key, row in choice.journal.rows().items() if key in choice.configs}
            described = choice.describe(values["dtype"])
        except Exception as error:  # the panel lives on, whatever a kernel raises
            self._complain(describe_error(error))
            return False
        self._session_rows = known | self._session_rows
        self._choice, self._described, self._problem, self._note = choice, described, "", ""
        self._send_data()
        return True

    def _complain(self, problem: str) -> None:
        self._problem = problem
        self._send_rows()

    def rows(self) -> list[dict]:
        """Return a row for every configuration of the choice; `status` is "waiting" before anything is known."""
        return self._choice.rows(self._session_rows) if self._choice else []

    # -- the sweep

    def run(self) -> None:
        """Start a sweep of the choice, or go on where one was cancelled."""
        with self._lock:
            if not self.running and self._choose():
                choice = self._choice
                begun = sweep.Sweep(choice.configs.values(), choice.space, journal=choice.journal)
                self._owner.follow(begun)
                self._send_rows()

    def _on_rows(self, running: sweep.Sweep) -> None:
        self._session_rows |= running.rows
        self._send_rows()

    def _on_end(self, finished: sweep.Sweep) -> None:
        self._note = sentences.describe_end(finished)
        self._session_rows |= finished.rows
        try:
            finished.finish()
        except Exception as error:
            self._problem = f"the sweep ended early: {describe_error(error)}"
        self._send_rows()
        self._save_snapshot()

    def cancel(self) -> None:
        """Stop the sweep now. Finished rows are kept, here and in the journal."""
        with self._lock:
            if self._owner.cancel():
                self._send_rows()

    def start_over(self) -> None:
        """Forget the rows of the choice and sweep again."""
        with self._lock:
            if self.running or not self._choose():
                return
            try:
                self._choice.journal.forget(self._choice.configs)
            except OSError as error:
                self._complain(describe_error(error))
                return
            for key in self._choice.configs:
                self._session_rows.pop(key, None)
            self.run()

    # -- the view in the browser

    def state(self) -> dict:
        """Return what the view shows beside the rows: menus, progress, the winner's sentences, what went wrong."""
        rows, choice, running = self.rows(), self._choice, self._owner.sweep
        swept = running or choice and any(key in self._session_rows for key in choice.configs)
        done = choice.count_done(self._session_rows) if swept else {}  # recorded rows do not count
        note = sentences.describe_progress(running) if running else self._note
        place = {id(row): index for index, row in enumerate(rows)}
        best = panel_rows.find_winner(rows)
        return {
            "values": dict(self.values),
            "running": self.running,
            "done": sum(done.values()),
            "total": len(rows),
            "status": sentences.describe_status(choice, rows, done, note) if choice else "",
            "winner": sentences.describe_winner(rows, choice.space.peer) if choice else [],
            "cause": sentences.describe_cause(choice, rows, self._described["roofline"]) if choice else "",
            "problem": self._problem,
            "order": [place[id(row)] for row in panel_rows.rank_rows(rows)],
            "best": None if best is None else place[id(best)],
        }

    def _make_data(self, **more) -> dict:
        """Return everything that the view draws. It keeps its menus, and gets the rows of this choice only."""
        menus = {}
        for name, kernel in self.kernels.items():
            shapes = {text: ",".join(map(str, sizes)) for text, sizes in kernel.shapes.items()}
            lists = {"dtype": kernel.dtypes, "preset": kernel.presets, "axes": kernel.axes}
            menus[name] = {"shapes": shapes} | {menu: list(offers) for menu, offers in lists.items()}
        self._sent = [panel_rows.describe_row(row) for row in self.rows()]
        data = {"kernels": menus, "targets": self.targets, "fields": SHOWN_FIELDS}
        return data | {"choice": self._described, "rows": self._sent, "state": self.state(), **more}

    def stored_data(self) -> dict:
        """Return what the saved notebook and the site keep."""
        with self._lock:
            return self._make_data()

    def _send_data(self) -> None:
        self._outdated = True
        self.box.send({"type": "data", "data": self._make_data()})

    def _send_rows(self) -> None:
        """Send the state, and those rows that the browser has not."""
        rows = [panel_rows.describe_row(row) for row in self.rows()]
        changed = {index: row for index, (row, sent) in enumerate(zip(rows, self._sent)) if row != sent}
        self._sent, self._outdated = rows, True
        self.box.send({"type": "rows", "rows": changed, "state": self.state()})

    def _receive(self, _: Any, message: dict, buffers: Any) -> None:
        actions: dict[str, Callable] = {
            "open": lambda: self._outdated and self._send_data(),
            "run": self.run,
            "cancel": self.cancel,
            "again": self.start_over,
            "choose": lambda: self.choose(**message["values"]),
            "code": lambda: self._start_code(message["keys"]),
        }
        with self._lock:
            try:
                actions[message["type"]]()
            except Exception as error:  # the address of the page may ask for anything
                self._complain(describe_error(error))

    def _start_code(self, keys: list[str]) -> None:
        threading.Thread(target=self._send_code, args=(keys,), daemon=True).start()

    def _send_code(self, keys: list[str]) -> None:
        """Send the code of configurations. It is compiled where it must be, so this runs in a thread of its own."""
        answer: dict[str, Any] = {"type": "code", "keys": keys}
        try:
            choice = self._choice
            codes = [listing.load_code(choice.space.job(choice.configs[key])) for key in keys]
            names = [{"name": choice.initial_rows[key]["kernel"]} for key in keys]
            answer["sides"] = [code | name for code, name in zip(codes, names)]
        except Exception as error:
            answer["problem"] = describe_error(error)
        self.box.send(answer)

    # -- what stays in the notebook

    def _ipython_display_(self) -> None:
        self.box.data = self._make_data(alone=False)
        bundle, metadata = self.box._repr_mimebundle_()
        bundle = {
            **bundle,
            "text/plain": f"Panel({', '.join(self.kernels)})",  # its own text would name every trait
            **views.make_stored("panel", self.stored_data()),
        }
        display(bundle, metadata=metadata, raw=True)
        # Draw at once, because a notebook that is executed without a browser drops later updates.
        handles = [display(output, display_id=True) for output in self._make_snapshot()]
        self._snapshot_handles = None if None in handles else handles  # None: not in a notebook

    def _make_snapshot(self) -> tuple:
        with self._lock:
            from tilelab.views.panel import snapshot  # with matplotlib, which the view alone does not need

            arguments = self._choice, self.rows(), *(self.values[name] for name in VIEW_MENUS)
        return snapshot.make_outputs(*arguments)

    def _save_snapshot(self) -> None:
        """Replace the picture and the table beneath the view, once the menus have rested for a moment."""
        if self._snapshot_handles:
            self._snapshot_timer.cancel()
            self._snapshot_timer = threading.Timer(SNAPSHOT_S, self._update_snapshot)
            self._snapshot_timer.daemon = True
            self._snapshot_timer.start()

    def _update_snapshot(self) -> None:
        with self._snapshot_lock:  # the last one to enter shows the newest rows
            for handle, output in zip(self._snapshot_handles, self._make_snapshot()):
                handle.update(output)
