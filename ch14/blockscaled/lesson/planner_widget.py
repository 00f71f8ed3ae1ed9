"""Draw what `smem_planner` computes, and let the reader choose a tile and its stages.

planner_widget.draw(smem_planner.plan(Blackwell((256, 256))))
planner_widget.Planner()  # in a notebook
"""

from __future__ import annotations

import dataclasses
import functools
import html

import ipywidgets as widgets
from IPython.display import display

from ch14.blockscaled.lesson import note_attempts, smem_planner
from ch14.blockscaled.lesson.smem_planner import ACCUMULATORS, C_ITEMSIZE, COLUMNS, Blackwell, Plan
from tilelab.pictures import plots
from tilelab.pictures.diagrams import box, canvas, lighten, write
from tilelab.records import results

BLUE, ORANGE, GREEN, PINK, RED, SKY = map(
    plots.colour, "best proposed predicted plain conservative roles".split()
)
TONES = {"A": BLUE, "B": ORANGE, "SFA": PINK, "SFB": PINK}
LEGEND = (("A", BLUE), ("B", ORANGE), ("scales", PINK), ("C", GREEN), ("barriers", plots.GREY))
WIDTH, LEFT, BAR = 7.4, 1.5, 5.0  # inches: the figure, the left end of a bar, the length of a full memory
TILES_N = (64, 128, 192, 256)


def _bar(axes, y: float, height: float, parts, capacity: int, unit: str) -> None:
    """Draw a memory that `parts` (tone, size, label) fill from left to right. A hatched box shows what does not fit."""
    used = 0
    for tone, size, label in parts:
        width = BAR * min(size, capacity - used) / capacity
        if width > 0:
            x = LEFT + BAR * used / capacity
            box(axes, x, y, width, height, lighten(tone, 0.7), "white", linewidth=0.5)
            if label and width > 0.065 * len(label) + 0.04:
                write(axes, x + width / 2, y + height / 2, label)
        used += size
    box(axes, LEFT, y, BAR, height, edge="black", linewidth=1)
    if used > capacity:
        excess = min(BAR * (used - capacity) / capacity, WIDTH - LEFT - BAR - 0.03)
        box(axes, LEFT + BAR, y, excess, height, "white", RED, hatch="/////", linewidth=1)
    look = {"color": RED if used > capacity else "black", "linespacing": 1.1}
    write(axes, LEFT - 0.08, y + height / 2, f"{used:,} of\n{capacity:,} {unit}", "right", **look)


def _smem_bar(axes, y: float, plan: Plan, height: float = 0.3) -> None:
    """Draw shared memory, stage after stage. A stage of A/B is A, B and its scale factors."""
    parts = [(plots.GREY, plan.smem["barriers"], "")]
    for stage in range(plan.ab_stages):
        for name, size in plan.choice.stage_parts().items():
            parts.append((TONES[name], size, f"{name}{stage}" if name in "AB" else ""))
    parts += [(GREEN, plan.choice.c_stage_bytes(), f"C{stage}") for stage in range(plan.c_stages)]
    _bar(axes, y, height, parts, plan.capacity, "B")


def _tmem_bar(axes, y: float, choice: Blackwell, height: float = 0.3) -> None:
    """Draw the columns of TMEM. Columns that two accumulators share are hatched."""
    columns = choice.tmem_parts()
    sums, n = columns.pop("accumulators"), choice.n
    count = 1 if choice.accumulator_scheme == "one" else 2
    shared = count * n - sums
    parts = [(SKY, n - shared, "accumulator 0"), (SKY, shared, "")]
    parts += [(SKY, n - shared, "accumulator 1")] * (count - 1)
    parts += [(PINK, size, name) for name, size in columns.items()]
    _bar(axes, y, height, parts, COLUMNS, "columns")
    if shared:
        x, width = LEFT + BAR * (n - shared) / COLUMNS, BAR * shared / COLUMNS
        box(axes, x, y, width, height, "none", BLUE, hatch="////", linewidth=0.5)


def _legend(axes, y: float) -> None:
    x = LEFT
    for name, tone in LEGEND:
        box(axes, x, y - 0.045, 0.09, 0.09, lighten(tone, 0.7))
        write(axes, x + 0.13, y, name, "left")
        x += 0.35 + 0.065 * len(name)


def title(plan: Plan) -> str:
    """Return the finding of a plan, for a picture."""
    tile = f"{plan.choice.rows * plan.choice.ctas_per_tile} × {plan.choice.n}"
    if plan.ab_stages and plan.smem_bytes <= plan.capacity and plan.problem:
        return f"{tile}: the accumulators do not fit"
    verdict = "fit" if plan.fits else "do not fit together"
    stages = f"{plan.ab_stages} stage{'s' * (plan.ab_stages != 1)} of A/B, {plan.c_stages} of C"
    return f"{tile}: {stages} {verdict}"


def draw(plan: Plan) -> plots.Picture:
    """Draw shared memory and TMEM as bars that the plan fills."""
    height = 2.2
    source = f"a CTA on {plan.choice.target}; K {plan.choice.k} per stage, {plan.stage_bytes:,} B"
    figure, axes = canvas(title(plan), source, WIDTH, height)
    y = height - 0.9
    write(axes, LEFT, y + 0.4, "shared memory", "left", fontweight="bold")
    _smem_bar(axes, y, plan)
    y -= 0.65
    write(axes, LEFT, y + 0.4, "TMEM", "left", fontweight="bold")
    _tmem_bar(axes, y, plan.choice)
    _legend(axes, y - 0.18)
    return figure.describe(f"{title(plan)}, drawn as bars of what each memory holds. {plan.sentence}")


def draw_attempts() -> plots.Picture:
    """Draw the note's two attempts: shared memory of three tests before and with attempt 2, and TMEM with attempt 1."""
    cases, attempt = note_attempts.CASES, note_attempts.attempt_2
    plans = {case: note_attempts.plan_with(case.choice(), attempt) for case in cases}
    unchanged = sum(note_attempts.same_kernel(*pair) for pair in plans.values())
    title = f"Attempt 2 leaves {unchanged} of the {len(plans)} tests as they were; attempt 1 has no room "
    title += "where it changes anything"
    figure, axes = canvas(title, "fp4, E8M0 over 16, C in fp16; greedy: the example's rule", WIDTH, 4.85)
    head = functools.partial(write, axes, LEFT, ha="left", fontweight="bold")
    y = 4.3
    for case, pair in plans.items():
        same = note_attempts.same_kernel(*pair)
        shown = "attempt 2 is the same plan" if same else "greedy, and below it attempt 2"
        head(y, f"{case.name}, {case.tile[0]} × {case.tile[1]}: {shown}")
        for plan in pair[:1] if same else pair:
            _smem_bar(axes, y - 0.37, plan, 0.25)
            y -= 0.36
        y -= 0.28
    widest = next(case for case in cases if case.tile[1] == 256)
    head(y, "TMEM at N = 256: one accumulator, two (attempt 1), two that share columns")
    for accumulators in ("one", "two", "overlapped"):
        _tmem_bar(axes, y - 0.37, widest.choice(accumulators=accumulators), 0.25)
        y -= 0.36
    _legend(axes, y - 0.18)
    return figure


def plan_table(plan: Plan) -> results.Table:
    """Return the plan as a table that a notebook folds: the picture shows the same."""
    stages = {"C": plan.c_stages, "barriers": ""}
    smem = [("shared, B", name, stages.get(name, plan.ab_stages), size) for name, size in plan.smem.items()]
    tmem = [("TMEM, columns", name, "", columns) for name, columns in plan.tmem.items()]
    rows = [dict(zip(("memory", "holds", "stages", "takes"), cells)) for cells in smem + tmem]
    return dataclasses.replace(results.table(rows, plan.sentence), folded=len(rows))


# ---- the widget


def _counts(default: str, numbers) -> list[tuple[str, int]]:
    """Return the options of a menu of numbers. 0 leaves the number to the planner: a menu shows None as nothing."""
    return [(default, 0), *((str(number), number) for number in numbers)]


def _pairs(firsts, seconds) -> list[tuple[str, tuple[int, int]]]:
    return [(f"{m} × {n}", (m, n)) for m in firsts for n in seconds]


def _make_menus() -> dict[str, tuple]:
    """Return (text, options, value) by the field of Blackwell; `scale` stands for two fields."""
    scales = dict.fromkeys(scale for form in smem_planner.FORMATS.values() for scale in form.scales)
    over = [(f"{dtype[6:10]} over {size}", (dtype, size)) for dtype, size in scales]
    return {
        "mma_tiler_mn": ("tile", _pairs((128, 256), TILES_N), (256, 128)),
        "cluster_shape_mn": ("cluster", _pairs((1, 2, 4), (1, 2, 4)), (2, 1)),
        "ab_dtype": ("A, B", list(smem_planner.FORMATS), "Float4E2M1FN"),
        "scale": ("scales", over, ("Float8E8M0FNU", 16)),
        "c_dtype": ("C", list(C_ITEMSIZE), "Float16"),
        "tile_k": ("K per stage", _counts("4 products", (64, 128, 256, 512)), 0),
        "accumulators": ("accumulators", list(ACCUMULATORS), "rule"),
        "ab_stages": ("A/B stages", _counts("all that fit", range(1, 17)), 0),
        "c_stages": ("C stages", _counts("2 and the rest", range(1, 17)), 0),
    }


BUTTONS = {
    "attempt_1": ("attempt 1: two accumulators", note_attempts.attempt_1, note_attempts.describe_attempt_1),
    "attempt_2": ("attempt 2: 5 A/B + 4 C", note_attempts.attempt_2, note_attempts.describe_attempt_2),
    "rule": ("the example's rule", lambda choice: choice, lambda choice: ""),
}


class Planner:
    """Show the planner for sm_100a: `menus`, `buttons` (the note's attempts) and a `message`.

    A cell that ends with a Planner also keeps a picture and a table of `plan` in the notebook. A choice that is
    impossible is explained in one sentence; `plan` then stays as it was and no setting is lost.
    """

    def __init__(self):
        self.plan, self.message = None, widgets.HTML()
        look = {"layout": {"width": "230px"}, "style": {"description_width": "95px"}}
        self.menus = {
            name: widgets.Dropdown(options=options, value=value, description=text, **look)
            for name, (text, options, value) in _make_menus().items()
        }
        self.buttons = {
            name: widgets.Button(description=text, layout={"width": "230px"})
            for name, (text, *_) in BUTTONS.items()
        }
        self._handles, self._setting = [], False
        rows = [[*each.values()] for each in (self.menus, self.buttons)]
        rows = [widgets.HBox(row, layout={"flex_flow": "row wrap"}) for row in rows]
        self.box = widgets.VBox([*rows, self.message])
        for menu in self.menus.values():
            menu.observe(lambda change: self._setting or self._show(), "value")
        for name, button in self.buttons.items():
            button.on_click(lambda _, name=name: self._on_button(name))
        self._show()

    def choice(self) -> Blackwell:
        """Return the choice of the menus. Raise ValueError where they do not go together."""
        values = {name: menu.value for name, menu in self.menus.items()}
        values |= {key: values[key] or None for key in ("ab_stages", "c_stages", "tile_k")}
        sf_dtype, sf_vec_size = values.pop("scale")
        return Blackwell(**values, sf_dtype=sf_dtype, sf_vec_size=sf_vec_size)

    def _set_menus(self, **values) -> None:
        self._setting = True  # several menus change, and the picture is drawn once
        for name, value in values.items():
            self.menus[name].value = value
        self._setting = False

    def _on_button(self, name: str) -> None:
        """Return to the rule's settings and apply an attempt. Attempt 1 makes a difference at N = 256 only."""
        _, apply, describe = BUTTONS[name]
        self._set_menus(ab_stages=0, c_stages=0, accumulators="rule")
        if name == "attempt_1":
            self._set_menus(mma_tiler_mn=(self.menus["mma_tiler_mn"].value[0], 256))
        try:
            choice, note = apply(self.choice()), describe(self.choice())
        except ValueError:  # _show explains it
            note = ""
        else:
            stages = {"ab_stages": choice.ab_stages or 0, "c_stages": choice.c_stages or 0}
            self._set_menus(**stages, accumulators=choice.accumulators)
        self._show(note)

    def _show(self, note: str = "") -> None:
        try:
            self.plan = smem_planner.plan(self.choice())
            sentences = [note] * bool(note) + [self.plan.sentence] * (self.plan.fits or not note)
        except ValueError as error:
            sentence = str(error)
            sentences = [sentence[0].upper() + sentence[1:], "The picture shows the last possible choice."]
        style = "font-size: 16px; line-height: 1.4"
        self.message.value = "".join(f"<p style='{style}'>{html.escape(each)}</p>" for each in sentences)
        for handle, output in zip(self._handles, self.outputs() if self._handles else ()):
            handle.update(output)

    def outputs(self) -> tuple[plots.Picture, results.Table]:
        """Return what stays in the notebook."""
        return draw(self.plan), plan_table(self.plan)

    def _ipython_display_(self) -> None:
        # The widget's own text would name every menu.
        display({**self.box._repr_mimebundle_(), "text/plain": "Planner(sm_100a)"}, raw=True)
        handles = [display(output, display_id=True) for output in self.outputs()]
        self._handles = [handle for handle in handles if handle]  # outside of a notebook there are none
