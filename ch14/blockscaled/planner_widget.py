"""The stage planner to play with: choose a tile and its stages, see what fills shared memory and TMEM, and why not.

    stages_widget.draw(stages.plan(stages.Blackwell((256, 256))))
    stages_widget.planner()  # in a notebook; stages_widget.planner("sm_90a") for Hopper

Pictures of what `ch14.blockscaled.smem_planner` computes; needs no GPU.
"""

from __future__ import annotations

import html

import ipywidgets as widgets
from IPython.display import Image, display

from ch14.blockscaled import note_attempts, smem_planner, smem_planner_hopper
from ch14.blockscaled.smem_planner import Blackwell, Plan
from ch14.blockscaled.smem_planner_hopper import Hopper
from tilelab import plots, results
from tilelab.diagrams import box, canvas, lighten, write

BLUE, ORANGE, GREEN, PINK, RED, SKY = map(plots.colour, ("best", "proposed", "predicted", "plain", "conservative",
                                                         "roles"))
TONES = {"A": BLUE, "B": ORANGE, "SFA": PINK, "SFB": PINK}
KEY = (("A", BLUE), ("B", ORANGE), ("scale factors", PINK), ("C", GREEN), ("barriers", plots.GREY))
WIDTH, LEFT, BAR = 7.4, 1.5, 5.0  # inches: the figure, where bars begin, what a full memory is long


def _end(axes, y: float, high: float, used: int, capacity: int, unit: str) -> None:
    """The memory's outline, what sticks out of it, and the figures beside it."""
    box(axes, LEFT, y, BAR, high, edge="black", linewidth=1)
    if used > capacity:
        over = min(BAR * (used - capacity) / capacity, WIDTH - LEFT - BAR - 0.03)
        box(axes, LEFT + BAR, y, over, high, "white", RED, hatch="/////", linewidth=1)
    tone = RED if used > capacity else "black"
    write(axes, LEFT - 0.08, y + high / 2, f"{used:,} of\n{capacity:,} {unit}", "right", color=tone, linespacing=1.1)


def _segments(axes, y: float, high: float, parts, capacity: int) -> None:
    """Parts (tone, size, label), one after the other, cut off where the memory ends."""
    at = 0
    for tone, size, label in parts:
        wide = BAR * min(size, capacity - at) / capacity
        if wide <= 0:
            return
        box(axes, LEFT + BAR * at / capacity, y, wide, high, lighten(tone, 0.7), "white", linewidth=0.5)
        if label and wide > 0.065 * len(label) + 0.04:
            write(axes, LEFT + BAR * at / capacity + wide / 2, y + high / 2, label)
        at += size


def _smem_bar(axes, y: float, plan: Plan, high: float = 0.3) -> None:
    """Shared memory, stage after stage; a stage of A/B is A, B and its scale factors."""
    parts = [(plots.GREY, plan.choice.barriers(plan.ab_stages), "")]
    for stage in range(plan.ab_stages):
        names = plan.choice.stage()
        parts += [(TONES[name], size, f"{name}{stage}" if name in "AB" else "") for name, size in names.items()]
    parts += [(GREEN, plan.choice.c_stage(), f"C{stage}") for stage in range(plan.c_stages)]
    _segments(axes, y, high, parts, plan.capacity)
    _end(axes, y, high, plan.smem_bytes, plan.capacity, "B")


def _tmem_bar(axes, y: float, choice: Blackwell, high: float = 0.3) -> None:
    """TMEM, 512 columns of 128 lanes; columns that two accumulators share are hatched."""
    columns = choice.tmem()
    sums, n = columns.pop("accumulators"), choice.n
    count = 1 if choice.accumulating == "one" else 2
    shared = count * n - sums
    parts = [(SKY, n - shared, "accumulator 0"), *([(SKY, shared, "")] if shared else [])]
    parts += [(SKY, n - shared, "accumulator 1")] * (count - 1)
    _segments(axes, y, high, [*parts, *((PINK, size, name) for name, size in columns.items())], smem_planner.COLUMNS)
    if shared:
        box(axes, LEFT + BAR * (n - shared) / smem_planner.COLUMNS, y, BAR * shared / smem_planner.COLUMNS, high, "none", BLUE,
            hatch="////", linewidth=0.5)
    _end(axes, y, high, sums + sum(columns.values()), smem_planner.COLUMNS, "columns")


def _legend(axes, y: float, hopper: bool = False) -> None:
    x = LEFT
    for name, tone in KEY:
        name = "scales" if hopper and name == "scale factors" else name
        box(axes, x, y - 0.045, 0.09, 0.09, lighten(tone, 0.7))
        write(axes, x + 0.13, y, name, "left")
        x += 0.35 + 0.065 * len(name)


def title(plan: Plan) -> str:
    """The finding of a plan, for a picture."""
    tile = f"{plan.choice.rows * plan.choice.ctas} × {plan.choice.n}"
    if plan.ab_stages and plan.smem_bytes <= plan.capacity and plan.problem:
        return f"{tile}: {plan.choice.sums} do not fit"
    counts = f"{plan.ab_stages} stage{'s' * (plan.ab_stages != 1)} of A/B, {plan.c_stages} of C"
    return f"{tile}: {counts} {'fit' if plan.fits else 'do not fit together'}"


def draw(plan: Plan) -> plots.Picture:
    """Shared memory and, on sm_100a, TMEM as bars that the plan fills; what does not fit sticks out, hatched."""
    tensor_memory = bool(plan.tmem)
    height = 2.2 if tensor_memory else 1.55
    source = f"a CTA on {plan.choice.target}; K {plan.choice.k} a stage, {plan.stage_bytes:,} B"
    figure, axes = canvas(title(plan), source, WIDTH, height)
    y = height - 0.9
    write(axes, LEFT, y + 0.4, "shared memory", "left", fontweight="bold")
    _smem_bar(axes, y, plan)
    if tensor_memory:
        y -= 0.65
        write(axes, LEFT, y + 0.4, "TMEM", "left", fontweight="bold")
        _tmem_bar(axes, y, plan.choice)
    _legend(axes, y - 0.18, not tensor_memory)
    return figure


def draw_attempts() -> plots.Picture:
    """The note's two attempts: shared memory of its three tests before and with attempt 2, TMEM with attempt 1."""
    plans = [(case, [smem_planner.plan(case.choice()), smem_planner.plan(note_attempts.attempt_2(case.choice()))])
             for case in note_attempts.CASES]
    same = sum(note_attempts.same(*pair) for _, pair in plans)
    figure, axes = canvas(f"Attempt 2 leaves {same} of the {len(plans)} tests as they were; attempt 1 has no room "
                          "where it changes anything", "fp4, E8M0 over 16, C in fp16; greedy: the example's rule",
                          WIDTH, 4.85)
    y = 4.3
    for case, pair in plans:
        write(axes, LEFT, y, f"{case.name}, {case.tile[0]} × {case.tile[1]}: "
              + ("attempt 2 is the same plan" if note_attempts.same(*pair) else "greedy, and below it attempt 2"),
              "left", fontweight="bold")
        for plan in pair[:1] if note_attempts.same(*pair) else pair:
            _smem_bar(axes, y - 0.37, plan, 0.25)
            y -= 0.36
        y -= 0.28
    wide = next(case for case in note_attempts.CASES if case.tile[1] == 256)
    write(axes, LEFT, y, "TMEM at N = 256: one accumulator, two (attempt 1), two that share columns", "left",
          fontweight="bold")
    for accumulators in ("one", "two", "overlapped"):
        _tmem_bar(axes, y - 0.37, wide.choice(accumulators=accumulators), 0.25)
        y -= 0.36
    _legend(axes, y - 0.18)
    return figure


def told(plan: Plan) -> results.Table:
    """The plan as text."""
    rows = [{"memory": "shared, B", "holds": name, "stages": {"C": plan.c_stages, "barriers": ""}.get(
        name, plan.ab_stages), "takes": size} for name, size in plan.smem]
    rows += [{"memory": "TMEM, columns", "holds": name, "stages": "", "takes": columns} for name, columns in plan.tmem]
    return results.table(rows, plan.sentence)


# ---- the widget

def _menu(text: str, options, value) -> widgets.Dropdown:
    return widgets.Dropdown(options=options, value=value, description=text, layout={"width": "230px"},
                            style={"description_width": "95px"})


def _counts(rest: str, counts) -> list:
    """Options of a menu whose 0 leaves it to the planner: a menu shows None as nothing."""
    return [(rest, 0), *((str(count), count) for count in counts)]


def _pair(pair: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    return "{} × {}".format(*pair), pair


def _blackwell_menus() -> dict[str, widgets.Dropdown]:
    tiles = [(m, n) for m in (128, 256) for n in (64, 128, 192, 256)]
    scales = dict.fromkeys(scale for one in smem_planner.FORMATS.values() for scale in one.scales)
    return {"mma_tiler_mn": _menu("tile", [*map(_pair, tiles)], (256, 128)),
            "cluster_shape_mn": _menu("cluster", [_pair((m, n)) for m in (1, 2, 4) for n in (1, 2, 4)], (2, 1)),
            "ab_dtype": _menu("A, B", list(smem_planner.FORMATS), "Float4E2M1FN"),
            "scale": _menu("scales", [(f"{dtype[6:10]} over {size}", (dtype, size)) for dtype, size in scales],
                           ("Float8E8M0FNU", 16)),
            "c_dtype": _menu("C", list(smem_planner.C_ITEMSIZE), "Float16"),
            "tile_k": _menu("K a stage", _counts("4 products", (64, 128, 256, 512)), 0),
            "ab_stages": _menu("A/B stages", _counts("all that fit", range(1, 17)), 0),
            "c_stages": _menu("C stages", _counts("2 and the rest", range(1, 17)), 0),
            "accumulators": _menu("accumulators", [("by the rule", "rule"), *zip(smem_planner.ACCUMULATORS[1:],
                                                                               smem_planner.ACCUMULATORS[1:])], "rule")}


def _hopper_menus() -> dict[str, widgets.Dropdown]:
    return {"block_m": _menu("tile rows", [64, 128, 192, 256], 128),
            "block_n": _menu("tile columns", [64, 128, 192, 256], 256),
            "ab_dtype": _menu("A, B", list(smem_planner_hopper.FORMATS), "BFloat16"),
            "c_dtype": _menu("C", list(smem_planner.C_ITEMSIZE), "BFloat16"),
            "scaled": _menu("scales", [("none", False), ("1 × 128", True)], False),
            "consumers": _menu("consumers", [1, 2, 3], 2), "parts": _menu("parts of C", [1, 2, 4, 8], 4),
            "ab_stages": _menu("A/B stages", _counts("all that fit", range(1, 17)), 0),
            "c_stages": _menu("C stages", _counts("2 and the rest", range(1, 9)), 0)}


class Planner:
    """The planner's widgets for sm_100a or sm_90a: `menus` by name, `buttons` (sm_100a: the note's attempts on the tile
    chosen, and the example's own rule), `said`; `box` holds all.

    A cell that ends with it shows them and, beneath, what stays in the notebook: a picture and a table of `plan`. What
    cannot be chosen is told in one sentence, `plan` stays as it was, and no setting is lost. ValueError for another
    target.
    """

    def __init__(self, target: str = "sm_100a"):
        smem_planner.among("the planner's target", target, ("sm_100a", "sm_90a"))
        self.menus = _blackwell_menus() if target == "sm_100a" else _hopper_menus()
        self.buttons = {name: widgets.Button(description=text, tooltip=tip, layout={"width": "230px"})
                        for name, text, tip in ((
                            ("attempt_1", "attempt 1: two accumulators", "always two, at N = 256 too"),
                            ("attempt_2", "attempt 2: 5 A/B + 4 C", "and what is left over to C"),
                            ("rule", "the example's rule", "as many A/B stages as fit, the rest to C"))
                            if target == "sm_100a" else ())}
        self.target, self.said, self.plan = target, widgets.HTML(), None
        self._handles, self._note, self._setting = None, "", False
        flow = {"flex_flow": "row wrap"}
        self.box = widgets.VBox([widgets.HBox(list(self.menus.values()), layout=flow),
                                 widgets.HBox(list(self.buttons.values()), layout=flow), self.said])
        for name, widget in {**self.menus, **self.buttons, "said": self.said}.items():
            widget.add_class(f"planner-{name.replace('_', '-')}")
        for menu in self.menus.values():
            menu.observe(self._changed, "value")
        for name, button in self.buttons.items():
            button.on_click(lambda _, name=name: self._attempt(name))
        self._changed()

    def choice(self) -> Blackwell | Hopper:
        """What the menus say. ValueError where they cannot be had together."""
        chosen = {name: menu.value for name, menu in self.menus.items()}
        chosen |= {name: chosen[name] or None for name in ("ab_stages", "c_stages", "tile_k") if name in chosen}
        if self.target == "sm_90a":
            return Hopper(**chosen)
        sf_dtype, sf_vec_size = chosen.pop("scale")
        return Blackwell(**chosen, sf_dtype=sf_dtype, sf_vec_size=sf_vec_size)

    def _set(self, **values) -> None:
        self._setting = True  # the menus change together, the picture once
        try:
            for name, value in values.items():
                self.menus[name].value = value
        finally:
            self._setting = False

    def _attempt(self, name: str) -> None:
        """A click: the rule's settings, changed as the attempt does; attempt 1 goes where it makes a difference."""
        m, _ = self.menus["mma_tiler_mn"].value
        self._set(ab_stages=0, c_stages=0, accumulators="rule",
                  **{"mma_tiler_mn": (m, 256)} if name == "attempt_1" else {})
        try:
            choice, note = self.choice(), ""
            if name == "attempt_1":
                choice, note = note_attempts.attempt_1(choice), note_attempts.sentence_1(choice)
            elif name == "attempt_2":
                choice, note = note_attempts.attempt_2(choice), note_attempts.sentence_2(choice)
            self._set(ab_stages=choice.ab_stages or 0, c_stages=choice.c_stages or 0, accumulators=choice.accumulators)
        except ValueError:
            note = ""  # _changed says what is wrong
        self._note = note
        self._show()

    def _changed(self, change=None) -> None:
        if not self._setting:
            self._note = ""
            self._show()

    def _show(self) -> None:
        try:
            plan = smem_planner.plan(self.choice())
        except ValueError as error:
            sentence = str(error)
            self._say([sentence[0].upper() + sentence[1:], "Beneath is still the last choice that can be had."])
            return
        self.plan = plan
        self._say([self._note] * bool(self._note) + [plan.sentence] * (plan.fits or not self._note))
        if self._handles:
            for handle, what in zip(self._handles, self.outputs()):
                handle.update(what)

    def _say(self, sentences) -> None:
        self.said.value = "".join(f"<p style='font-size: 16px; line-height: 1.4'>{html.escape(sentence)}</p>"
                                  for sentence in sentences)

    def outputs(self) -> tuple[Image, results.Table]:
        """What stays in the notebook."""
        return Image(data=draw(self.plan)._repr_png_()), told(self.plan)

    def _ipython_display_(self) -> None:
        bundle = {**self.box._repr_mimebundle_(), "text/plain": f"Planner({self.target})"}
        display(bundle, raw=True)  # its own text would name every widget
        self._handles = [display(what, display_id=True) for what in self.outputs()]
        if None in self._handles:  # no notebook
            self._handles = None


def planner(target: str = "sm_100a") -> Planner:
    """The planner, to end a notebook's cell with."""
    return Planner(target)
