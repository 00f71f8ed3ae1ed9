"""Every control of every view that the notebooks store is reached by Tab and the arrow keys alone."""

import itertools
import json
from types import SimpleNamespace

import pytest
from view_pages import opened

from tilelab import ROOT, views

pytestmark = pytest.mark.browser

CONTROLS = (
    "button, select, input, summary, a[href], [role=gridcell][tabindex], [role=slider], tbody tr[tabindex]"
)
# Number the controls that can be used, and return [number, its text] of each.
NUMBER = """controls => [...document.querySelectorAll(`.tiles-view :is(${controls})`)].filter(element =>
    !element.disabled && element.checkVisibility({ visibilityProperty: true })).map((element, number) => {
        element.dataset.number = number;
        return [number, element.outerHTML.slice(0, 100)];
    })"""
FOCUSED = """() => { const element = document.activeElement; return [element.dataset.number ?? null,
    element === document.body, element.matches("select, input, [role=slider], [role=application]")]; }"""


def stored_views():
    """Return {name: data} of the first view of each kind in the notebooks."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            for output in cell.get("outputs", ()):
                if stored := output.get("data", {}).get(views.MIME):
                    name, data = views.read_stored(stored)
                    found.setdefault(name, data)
    return found


def walk_with_arrows(page, before):
    """Go to and fro through a grid, a list or a bar of buttons, and return the numbers of its controls."""
    reached, keys = set(), itertools.cycle(("ArrowRight", "ArrowLeft"))

    def press(key):
        page.keyboard.press(key)
        number = page.evaluate(FOCUSED)[0]
        is_new = number not in reached | before
        reached.add(number)
        return is_new

    while True:
        key = next(keys)
        while press(key):
            pass
        if not press("ArrowDown"):
            return reached


def walk(page):
    """Press Tab until the focus leaves the page, and the arrows at each stop; return the numbers of the controls."""
    reached = set()
    for _ in range(300):
        page.keyboard.press("Tab")
        number, left, has_own_arrows = page.evaluate(FOCUSED)
        if left:
            return reached
        reached.add(number)
        if not has_own_arrows:
            reached |= walk_with_arrows(page, reached)
    raise AssertionError("the Tab key does not leave the page")


@pytest.mark.parametrize("name", stored_views())
def test_every_control_is_reached(browser, tmp_path, name):
    view = SimpleNamespace(name=name, stored_data=lambda: stored_views()[name])
    with opened(browser, tmp_path, view) as page:
        controls = dict(page.evaluate(NUMBER, CONTROLS))
        reached = {int(number) for number in walk(page) if number is not None}
        assert len(controls) > 3
        assert not {text for number, text in controls.items() if number not in reached}
