"""The timeline view in Chromium, from a page without a server: zoom, pan, steps, the ring, two recordings, the export.

TILES_SCREENSHOTS=1 keeps screenshots in build/screenshots.
"""

import contextlib
import json
import re

import pytest
from cases import cases
from view_pages import opened, photograph

from ch10.wgmma_gemm.lesson import timeline as recorder
from tilelab import views
from tilelab.records import timeline

pytestmark = pytest.mark.browser
PERSISTENT = "128 × 256, persistent"
# The view draws what has changed in the next frame.
NEXT_FRAME = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"


@pytest.fixture(scope="module")
def recordings():
    return recorder.load_recordings()[0]


@pytest.fixture
def open_page(browser, recordings, tmp_path):
    """Return a function that opens the view of some recordings."""
    with contextlib.ExitStack() as stack:

        def open_page(*shown):
            view = views.View(
                "timeline", {"recordings": recordings, "shown": shown or ["1 stage", "4 stages"]}
            )
            page = stack.enter_context(opened(browser, tmp_path, view))
            page.wait_for_selector(".tiles-timeline .event")
            return page

        yield open_page


def find_state(page):
    """The range that is shown, the cursor, and the row and event that are selected."""
    page.evaluate(NEXT_FRAME)
    found = page.evaluate("({...document.querySelector('.tiles-timeline').dataset})")
    return {"lane": found["lane"], **{key: int(found[key]) for key in ("begin", "end", "cursor", "event")}}


def find_ring(page, at=0):
    return json.loads(page.locator(".ring").nth(at).get_attribute("data-slots"))


def press(page, *keys):
    page.locator(".plots").focus()
    for key in keys:
        page.keyboard.press(key)


def test_labels_of_the_time_never_touch(open_page):
    page = open_page()
    for width in (1280, 700, 390):
        page.set_viewport_size({"width": width, "height": 800})
        for keys in (["0"], ["+"], ["+"], *[["ArrowRight"]] * 6):
            press(page, *keys)
            page.evaluate(NEXT_FRAME)
            boxes = page.locator("text.tick").evaluate_all("""texts => texts.map(text => text.getBoundingClientRect())
                .map(box => [box.left, box.right]).sort((a, b) => a[0] - b[0])""")
            assert boxes
            assert all(left[1] < right[0] for left, right in zip(boxes, boxes[1:])), (
                f"{boxes} in {width} pixels"
            )


def test_keys_zoom_and_pan(open_page):
    page = open_page()
    first = find_state(page)
    press(page, "+")
    closer = find_state(page)
    assert closer["end"] - closer["begin"] == pytest.approx((first["end"] - first["begin"]) / 2, abs=2)
    assert closer["begin"] <= closer["cursor"] <= closer["end"]
    press(page, "ArrowRight")
    moved = find_state(page)
    assert moved["begin"] > closer["begin"]
    assert moved["end"] - moved["begin"] == pytest.approx(closer["end"] - closer["begin"], abs=2)
    press(page, "ArrowLeft", "-")
    wide = find_state(page)
    assert wide["end"] - wide["begin"] == pytest.approx(first["end"] - first["begin"], abs=2)
    press(page, "0")
    assert find_state(page)["begin"] == 0 and find_state(page)["end"] >= 29_672  # the longest recording


def test_the_wheel_zooms_after_a_click_and_a_drag_pans(open_page):
    page = open_page()
    press(page, "+", "+")
    page.evaluate("document.activeElement.blur()")
    box = page.locator(".plot").first.bounding_box()
    x, y = box["x"] + 500, box["y"] + 20
    page.mouse.move(x, y)
    before = find_state(page)
    page.mouse.wheel(0, -100)
    assert find_state(page)["end"] == before["end"], "without the focus the wheel scrolls the page"
    page.mouse.click(x, y)
    page.mouse.wheel(0, -100)
    closer = find_state(page)
    assert closer["end"] - closer["begin"] < before["end"] - before["begin"]
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 120, y, steps=4)
    page.mouse.up()
    moved = find_state(page)
    assert moved["begin"] > closer["begin"]
    assert moved["end"] - moved["begin"] == pytest.approx(closer["end"] - closer["begin"], abs=2)


def test_steps_go_from_event_to_event_and_say_what_it_is(open_page, recordings):
    page = open_page(PERSISTENT, "1 stage")
    press(page, "Home")
    press(page, "n")
    state = find_state(page)
    assert (state["lane"], state["event"]) == ("producer", 0)
    sentence = page.locator(".sentence")
    found = "waits until stage 0 may be filled again, for phase 1 of its empty barrier"
    assert found in sentence.inner_text()
    press(page, "n")
    loads = r"issues the loads of step 0 of tile 0 into stage 0 by TMA: [1-9][\d,]* cycles"
    assert re.search(loads, sentence.inner_text())
    press(page, "p", "ArrowDown", "n", "n")
    assert find_state(page)["lane"] == "consumer 0" and "issued by consumer 0" in sentence.inner_text()
    press(page, *["n"] * 60)  # far beyond the range that is shown, which follows
    state = find_state(page)
    assert state["begin"] <= state["cursor"] <= state["end"] and state["event"] > 50
    assert "consumer 0" in sentence.inner_text().lower()
    press(page, "ArrowDown", "ArrowDown", "ArrowDown")
    assert find_state(page)["lane"] == "one warp group" or find_state(page)["lane"] == "loads and multiplies"


def test_pointing_selects_an_event(open_page, recordings):
    events = next(each["events"] for each in recordings if each["name"] == "4 stages")
    store = next(event for event in events if event[timeline.KIND] == "store")
    page = open_page("4 stages")
    press(page, "0")
    bar = page.locator(".plot .event.store").first.bounding_box()
    page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
    assert store[timeline.BEGIN] <= find_state(page)["cursor"] <= store[timeline.END]
    assert "rounds and stores tile 0 in its epilogue" in page.locator(".sentence").inner_text()


@pytest.mark.parametrize("name", ["4 stages", PERSISTENT])
def test_the_ring_shows_the_stages_and_phases_at_the_cursor(open_page, recordings, name):
    page = open_page(name)
    recording = next(each for each in recordings if each["name"] == name)
    press(page, "ArrowDown") if name == PERSISTENT else None
    seen = set()
    for _ in range(12):
        press(page, "n")
        cursor, slots = find_state(page)["cursor"], find_ring(page)
        assert len(slots) == recording["stages"]
        for slot in slots:
            mine = [fill for fill in recording["fills"] if fill[0] == slot["stage"]]
            assert slot["full"] == sum(fill[5] <= cursor for fill in mine) % 2
            assert slot["empty"] == sum(fill[7] <= cursor for fill in mine) % 2
            current = [fill for fill in mine if fill[4] <= cursor][-1:]
            busy = bool(current) and current[0][7] > cursor
            assert (slot["state"] != "empty") == busy and (not busy or slot["step"] == current[0][2])
            seen.add(slot["state"])
    assert "in use" in seen and len(seen) >= 2
    label = page.locator(".ring").get_attribute("aria-label")
    assert "full barrier in phase" in label and ("empty barrier" in label) == (name == PERSISTENT)


def test_two_recordings_have_one_clock(open_page, recordings):
    page = open_page()
    lines = page.locator(".plot .cursor")
    assert lines.count() == 2 and lines.nth(0).get_attribute("x1") == lines.nth(1).get_attribute("x1")
    boxes = [page.locator(".plot").nth(at).bounding_box() for at in range(2)]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["width"] == boxes[1]["width"]
    press(page, "End")
    assert find_state(page)["cursor"] == max(recording["length"] for recording in recordings[:2])
    assert "has ended" in page.locator(".ring").nth(1).inner_text()
    page.get_by_label("lower recording").select_option(label="nothing")
    assert page.locator(".plot").count() == 1
    page.get_by_label("upper recording").select_option(label=PERSISTENT)
    assert (
        page.locator(".plot")
        .first.get_attribute("aria-label")
        .startswith(f"{PERSISTENT}: producer, consumer 0")
    )


def test_play_moves_the_cursor_and_stops(open_page):
    page = open_page()
    press(page, "Home", " ")
    page.wait_for_timeout(600)
    press(page, " ")
    stopped = find_state(page)["cursor"]
    page.wait_for_timeout(200)
    assert stopped > 0 and find_state(page)["cursor"] == stopped
    assert page.get_by_role("button", name="Move the cursor").inner_text() == "Play"


def test_one_tab_stop_for_each_part_and_keys_stay_in_the_view(open_page):
    page = open_page()
    page.evaluate("document.body.addEventListener('keydown', () => { window.leaked = true; })")
    stops = []
    page.evaluate("document.body.focus()")
    for _ in range(5):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.className || document.activeElement.localName"))
    assert stops[:4] == ["select", "select", "button", "plots"]
    page.evaluate("window.leaked = false")
    press(page, "b", "x", "n")
    assert not page.evaluate("window.leaked")


@cases("shown", ("1 stage", "4 stages"), ("producer, 4 stages", PERSISTENT), ids=["ring", "roles"])
def test_it_fits_the_page(open_page, shown):
    page = open_page(*shown)
    press(page, "n")
    for width, scheme in ((1920, "dark"), (1280, "light"), (390, "dark")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate(NEXT_FRAME)
        photograph(page, f"timeline_{shown[0].replace(' ', '_')}_{width}_{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        smallest = page.evaluate("""Math.min(...[...document.querySelectorAll('.tiles-timeline *')]
            .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.checkVisibility())
            .map(e => parseFloat(getComputedStyle(e).fontSize)))""")
        assert smallest >= 12
