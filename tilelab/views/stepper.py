"""Show a mechanism (`tilelab.views.mechanisms`) step by step in the view `stepper`, which needs no kernel.

    stepper.show("ring")  # at the end of a notebook cell; a saved notebook keeps a picture of some of them

A drawing is a list of panels. A panel has the same shapes in every step; only their attributes change.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.patches import Rectangle

from tilelab import views
from tilelab.pictures import plots
from tilelab.views import mechanisms
from tilelab.views.mechanisms import format_number

Shape = dict[str, Any]  # a tag and attributes of SVG, and a text; colours are names of shared.css
STATUS = {"blocks": "warn", "returns at once": "accent", "goes on": "accent", "writes": "load"}
MAY = {"producer": ("store", "may load"), "copy engine": ("load", "writes")}  # and the consumers multiply


def _text(
    x: float, y: float, words: object, fill: str = "ink", anchor: str = "start", bold: bool = False
) -> Shape:
    look = {"fill": fill, "text-anchor": anchor, "font-weight": "bold" if bold else "normal"}
    return {"tag": "text", "x": x, "y": y, **look, "text": str(words)}


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "quiet") -> Shape:
    return {"tag": "rect", "x": x, "y": y, "width": width, "height": height, "fill": fill, "stroke": stroke}


def _panel(name: str, height: int, shapes: list[Shape]) -> dict:
    return {"name": name, "width": 340, "height": height, "shapes": shapes}


def _draw_doing(doing: dict[str, tuple[str, str]]) -> list[Shape]:
    shapes = []
    for y, (role, (status, detail)) in zip(itertools.count(4, 48), doing.items()):
        shapes += [_box(4, y, 12, 40, STATUS.get(status, "panel")), _text(24, y + 35, detail)]
        shapes.append(_text(24, y + 15, f"{role}: {status}", bold=True))
    return shapes


def _describe_stage(state: dict, stage: int) -> tuple[str, str]:
    """Return what a stage holds, and the colour of it."""
    tile, landed = state["tile"][stage], state["landed"][stage]
    if tile is None:
        return "empty, never used", "panel"
    if landed < state["nbytes"]:
        return f"tile {tile}, {landed:,} bytes have landed", "load"
    if any("consumer" in role for role in state["holders"][stage]):
        return f"tile {tile} is being read", "product"
    is_read = state["empty"][stage].phase == state["full"][stage].phase
    return (f"tile {tile} was read", "wait") if is_read else (f"tile {tile} may be read", "load")


def draw_ring(state: dict) -> list[dict]:
    """Draw two stages with both barriers each, and what each role does."""
    panels = []
    for stage, landed in enumerate(state["landed"]):
        holds, colour = _describe_stage(state, stage)
        shapes = [_text(4, 16, f"stage {stage}: {holds}", bold=True), _box(4, 26, 332, 28, "panel")]
        shapes.append(_box(4, 26, 332 * landed / state["nbytes"], 28, colour, "none"))
        for x, name in ((4, "full"), (174, "empty")):
            barrier = state[name][stage]
            shapes += [_box(x, 64, 162, 88, "paper"), _text(x + 8, 82, f"{name}[{stage}]", bold=True)]
            shapes.append(_text(x + 8, 102, f"phase {barrier.phase}, parity {barrier.phase % 2}"))
            shapes.append(_text(x + 8, 122, f"arrivals pending: {barrier.arrivals}"))
            shapes.append(_text(x + 8, 142, f"bytes pending: {barrier.nbytes:,}"))
        panels.append(_panel(f"stage {stage}", 158, shapes))
    return [*panels, _panel("roles", 158, _draw_doing(state["doing"]))]


def draw_roles(state: dict) -> list[dict]:
    """Draw which role may touch which stage, and what each role does."""
    shapes = [_text(4, 16, "who may touch which stage", bold=True)]
    for y, role in zip(itertools.count(48, 34), state["doing"]):
        shapes.append(_text(4, y + 20, role))
        for x, holders in zip(itertools.count(106, 78), state["holders"]):
            colour, word = MAY.get(role, ("product", "multiplies")) if role in holders else ("panel", "")
            shapes += [_box(x, y, 74, 30, colour), _text(x + 37, y + 20, word, "inside", "middle")]
    for x, stage, tile in zip(itertools.count(143, 78), itertools.count(), state["tile"]):
        shapes.append(
            _text(x, 38, f"{stage}: " + ("empty" if tile is None else f"step {tile}"), anchor="middle")
        )
        shapes.append(_text(x, 204, f"phase {state['full'][stage].phase}", anchor="middle"))
        shapes.append(_text(x, 224, f"phase {state['empty'][stage].phase}", anchor="middle"))
    shapes += [_text(4, 38, "stage"), _text(4, 204, "full"), _text(4, 224, "empty")]
    return [_panel("stages", 234, shapes), _panel("roles", 234, _draw_doing(state["doing"]))]


def _boxes(boxes: Iterable[tuple[float, float, float, float]], fill: str) -> Shape:
    """Return one shape for any number of boxes (x, y, width, height)."""
    return {
        "tag": "path",
        "fill": fill,
        "d": "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h{-w:g}z" for x, y, w, h in boxes),
    }


def _draw_runs(tiles: list[tuple[int, int]], fill: str, size: float, x: float, y: float) -> Shape:
    """Draw (row, column) tiles of a map, with one box for each run within a row."""
    runs: list[list[int]] = []
    for row, column in sorted(tiles):
        if runs and runs[-1][:2] == [row, column - runs[-1][2]]:
            runs[-1][2] += 1
        else:
            runs.append([row, column, 1])
    return _boxes(((x + column * size, y + row * size, n * size, size) for row, column, n in runs), fill)


def _draw_strips(held: dict[tuple[str, int], float], size: float, x: float, y: float) -> Shape:
    """Draw the strips of A on the left and those of B above, as deep as the share that L2 holds."""
    boxes = []
    strips = ((matrix, share, place, at) for at, ((matrix, place), share) in enumerate(held.items()))
    for (matrix, share, _), run in itertools.groupby(strips, lambda one: (*one[:2], one[2] - one[3])):
        places = [place for _, _, place, _ in run]
        begin, length, deep = places[0] * size, len(places) * size, 24 * share
        on_left, above = (x - 4 - deep, y + begin, deep, length), (x + begin, y - 4 - deep, length, deep)
        boxes.append(on_left if matrix == "A" else above)
    return _boxes(boxes, "store")


def draw_raster(state: dict) -> list[dict]:
    """Draw the tiles of C and the strips in L2 for both orders."""
    panels = []
    for name, key in (("row by row", "rows"), (f"groups of {mechanisms.GROUP_M} rows", "groups")):
        *before, wave = state[key]
        where = size, x, y = 4.75, 32, 52
        side, gib = mechanisms.TILES * size, wave["loaded"] / 1024
        done = _draw_runs([tile for each in before for tile in each["tiles"]], "wait", *where)
        running = _draw_runs(wave["tiles"], "product", *where)
        shapes = [_text(4, 16, name, bold=True), _box(x, y, side, side, "panel"), done, running]
        shapes += [_draw_strips(wave["held"], *where), _text(4, 44, "A"), _text(18, 32, "B")]
        shapes.append(_text(4, 378, f"this wave needs {wave['A']} strips of A and {wave['B']} of B"))
        shapes.append(_text(4, 398, f"loaded from memory in this wave: {wave['wave']:,.0f} MiB"))
        shapes.append(
            _text(4, 418, f"so far: {gib:.2f} GiB of {wave['asked'] / 1024:.2f} GiB asked for", bold=True)
        )
        panels.append(_panel(name, 426, shapes))
    return panels


def draw_softmax(state: dict) -> list[dict]:
    """Draw the weights of the keys so far, and the running values."""
    bars = [_text(4, 16, "weights of the keys", bold=True), _box(4, 172, 332, 1, "quiet", "none")]
    scores = list(itertools.chain(*mechanisms.SCORES))
    for key, weight in enumerate(state["weights"] + [0] * (len(scores) - len(state["weights"]))):
        x, height = 10 + 55 * key, 125 * weight
        is_new = state["new"] and key >= len(state["weights"]) - 2
        bars.append(_box(x, 172 - height, 44, height, "load" if is_new else "product", "none"))
        bars.append(_text(x + 22, 167 - height, format_number(weight) if weight else "", anchor="middle"))
        came = f"score {scores[key]}" if key < 2 * state["blocks"] else ""
        bars += [_text(x + 22, 190, f"key {key}", anchor="middle"), _text(x + 22, 210, came, anchor="middle")]
    shapes = [_text(4, 16, "running values", bold=True)]
    for y, (name, value) in zip(itertools.count(28, 48), state["values"].items()):
        shapes += [_box(4, y, 332, 40, "panel"), _text(14, y + 25, name)]
        shapes.append(_text(326, y + 25, ", ".join(map(format_number, value)), anchor="end", bold=True))
    return [_panel("weights", 220, bars), _panel("running values", 220, shapes)]


def draw_experts(state: dict) -> list[dict]:
    """Draw the tiles in C, whose rows are sorted by expert, and what each program does."""
    scale, width, x = 1.15, 84, 132
    ends = [0, *itertools.accumulate(mechanisms.EXPERT_ROWS)]
    shapes = [_text(4, 16, "C, by rows of experts", bold=True)]
    columns = range(mechanisms.TILE_COLUMNS)
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        if end > begin:
            shapes += [
                _box(x + width * at, 28 + begin * scale, width, (end - begin) * scale, "panel")
                for at in columns
            ]
        y = 28 + scale * (begin + end) / 2 + {1: 16, 3: 12}.get(expert, 4)
        rows = (
            f"row {begin}" if end == begin + 1 else f"rows {begin} to {end - 1}" if end > begin else "no rows"
        )
        shapes.append(_text(4, y, f"{expert}: {rows}"))

    def cover(tiles, rows_of, fill):
        boxes = [(x + width * each["column"], 28 + first * scale, width, (last - first) * scale)
                 for each in tiles for first, last in [rows_of(each)] if last > first]  # fmt: skip
        return _boxes(boxes, fill)

    def stored(tile):
        return tile["row"], min(tile["row"] + mechanisms.TILE_ROWS, tile["end"])

    def unstored(tile):
        return stored(tile)[1], tile["row"] + mechanisms.TILE_ROWS

    running = [tile for tile in state["now"] if tile]
    latest = [] if state["latest"] is None else [state["now"][state["latest"]]]
    shapes.append(cover(state["done"], stored, "wait"))
    shapes.append(cover(running, stored, "product"))
    shapes.append(cover(filter(None, latest), unstored, "warn"))
    lines = [_text(4, 16, "what every program knows", bold=True)]
    for y, name, values in ((40, "tiles", state["tiles"]), (62, "running sums", state["sums"])):
        lines.append(_text(4, y, name))
        lines += [
            _text(150 + 50 * at, y, values[at] if values else "", anchor="end")
            for at in range(len(mechanisms.EXPERT_ROWS))
        ]
    for program, tile in enumerate(state["now"]):
        y = 92 + 84 * program
        is_latest = program == state["latest"]
        lines += [_box(4, y, 332, 74, "paper", "accent" if is_latest else "quiet")]
        lines.append(_text(14, y + 20, f"program {program}", bold=True))
        said = ("has no tile", "") if state["sums"] else ("reads the offsets", "")
        if tile:
            first, last = stored(tile)
            rows = f"loads rows {first} to {tile['row'] + mechanisms.TILE_ROWS - 1}, stores {last - first}"
            said = f"tile_id {tile['tile_id']}: expert {tile['expert']}, column {tile['column']}", rows
        lines += [_text(14, y + 41, said[0]), _text(14, y + 62, said[1])]
    return [_panel("C", 410, shapes), _panel("programs", 410, lines)]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """A mechanism: its title, what its colours mean, its states, what draws one, and the steps of its still."""

    title: str
    legend: dict[str, str]
    run: Callable[[], list[dict]]
    draw: Callable[[dict], list[dict]]
    still: tuple[int, ...]


MECHANISMS = {
    "ring": Mechanism(
        "A ring of two stages with both barriers",
        dict(load="has landed", product="is being read", wait="was read", warn="blocks", accent="goes on"),
        mechanisms.run_ring,
        draw_ring,
        still=(1, 12),
    ),
    "roles": Mechanism(
        "The warp roles, and who may touch which stage",
        dict(
            store="may load",
            load="writes",
            product="multiplies",
            warn="blocks",
            accent="goes on",
            panel="none of these",
        ),
        mechanisms.run_roles,
        draw_roles,
        still=(14, 18),
    ),
    "raster": Mechanism(
        "Two orders of the 64 × 64 tiles of 8192³, and the strips that L2 holds",
        {"wait": "tiles that are done", "product": "tiles of this wave", "store": "what L2 holds of a strip"},
        mechanisms.run_raster,
        draw_raster,
        still=(1, 8),
    ),
    "softmax": Mechanism(
        "Softmax in pieces, for one query and six keys",
        {"load": "weights of the new block", "product": "older weights"},
        mechanisms.run_softmax,
        draw_softmax,
        still=(3, 5),
    ),
    "experts": Mechanism(
        "Three programs share the tiles of four experts",
        {"product": "stores now", "warn": "in the box, not stored", "wait": "stored before"},
        mechanisms.run_experts,
        draw_experts,
        still=(2, 7),
    ),
}


def find_mechanism(name: str) -> Mechanism:
    """Return a mechanism. ValueError for an unknown one."""
    if name not in MECHANISMS:
        raise ValueError(f"unknown mechanism {name!r}; choose one of {', '.join(MECHANISMS)}.")
    return MECHANISMS[name]


def make_data(name: str) -> dict:
    """Return what the view draws: the panels of the first step, and for each step a sentence and its changes.

    A change is [panel, shape, {attribute: value}]. ValueError for an unknown mechanism.
    """
    mechanism = find_mechanism(name)
    states = mechanism.run()
    drawn = [mechanism.draw(state) for state in states]
    steps = []
    for state, before, now in zip(states, [drawn[0], *drawn], drawn):
        changes = [
            [p, s, {key: value for key, value in new.items() if old[key] != value}]
            for p, (one, other) in enumerate(zip(before, now))
            for s, (old, new) in enumerate(zip(one["shapes"], other["shapes"], strict=True))
            if old != new
        ]
        steps.append({"say": state["say"], "changes": changes})
    legend = list(mechanism.legend.items())
    return {"title": mechanism.title, "legend": legend, "panels": drawn[0], "steps": steps}


def draw_still(name: str) -> plots.Picture:
    """Return a picture of some steps of a mechanism under each other, for a page without scripts."""
    mechanism, y = find_mechanism(name), 0
    states = mechanism.run()
    placed: list[tuple[float, float, Shape]] = []
    for step in mechanism.still:
        panels = mechanism.draw(states[step])
        width = sum(panel["width"] + 20 for panel in panels)
        for line in textwrap.wrap(f"Step {step}. {states[step]['say']}", width // 8):
            y += 20
            placed.append((4, y, _text(0, 0, line)))
        for at, panel in enumerate(panels):
            placed += [(at * (panel["width"] + 20), y + 12, shape) for shape in panel["shapes"]]
        y += 24 + panels[0]["height"]
    x = 4
    for colour, words in mechanism.legend.items():
        placed += [(x, y, _box(0, 0, 22, 14, colour)), (x, y, _text(28, 12, words))]
        x += 48 + 8 * len(words)
    found = re.findall(r"--(\w+): (#\w+)", views.read_style("stepper"))
    colours = {"none": "none", **dict(reversed(found))}  # of the light theme, which stands first
    figure = plots.Picture(figsize=(width / 100, (y + 24) / 100), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(y + 24, 0))
    axes.axis("off")
    for dx, dy, shape in placed:
        fill, edge = colours[shape["fill"]], colours[shape.get("stroke", "none")]
        if shape["tag"] == "text":
            align = {"start": "left", "middle": "center", "end": "right"}[shape["text-anchor"]]
            # 13 pixels
            style = {"ha": align, "fontsize": 9.36, "fontweight": shape["font-weight"], "color": fill}
            axes.text(dx + shape["x"], dy + shape["y"], shape["text"], **style)
            continue
        if shape["tag"] == "path":
            boxes = [
                list(map(float, box)) for box in re.findall(r"M(\S+) ([^h]+)h([^v]+)v([^h]+)h", shape["d"])
            ]
        else:
            boxes = [[shape[key] for key in ("x", "y", "width", "height")]]
        for left, top, wide, high in boxes:
            axes.add_patch(
                Rectangle((dx + left, dy + top), wide, high, facecolor=fill, edgecolor=edge, linewidth=0.8)
            )
    said = (states[step]["say"] for step in mechanism.still)
    return figure.describe(" ".join([f"{mechanism.title}, in some of its steps.", *said]))


def show(name: str) -> views.View:
    """Return the view of a mechanism, one of MECHANISMS. ValueError for any other name."""
    return views.View("stepper", make_data(name), picture=draw_still(name))
