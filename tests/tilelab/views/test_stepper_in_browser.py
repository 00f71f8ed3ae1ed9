"""The view of steps in Chromium, from a page without a server: buttons, keys, play, and room for every word."""

import pytest
from view_pages import opened, photograph

from tilelab.views import stepper

pytestmark = pytest.mark.browser
# What is wrong at any step: words that overlap, leave their panel or are small, and a view that changes its height.
CROWDED = """() => {
    const view = document.querySelector(".tiles-stepper"), found = [];
    const next = view.querySelector("[aria-label^='Next']"), height = view.offsetHeight;
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
    for (let step = -1; step !== view.dataset.step; next.click()) {
        step = view.dataset.step;
        if (view.offsetHeight !== height) found.push(`step ${step} changes the height`);
        for (const svg of view.querySelectorAll(".plots svg")) {
            const edge = svg.getBoundingClientRect(), small = 13 * edge.width / svg.viewBox.baseVal.width < 12;
            const words = [...svg.querySelectorAll("text")].filter(text => text.textContent);
            const boxes = words.map(text => text.getBoundingClientRect());
            boxes.forEach((a, i) => {
                const other = boxes.findIndex((b, j) => j > i && meet(a, b));
                if (small || a.left < edge.left || a.right > edge.right || a.bottom > edge.bottom + 1 || other > 0)
                    found.push(`step ${step}: ${words[i].textContent} | ${words[other]?.textContent}`);
            });
        }
        if (found.length) break;
    }
    return found;
}"""


def press(page, *keys):
    page.locator(".plots").focus()
    for key in keys:
        page.keyboard.press(key)


def find_step(page):
    return int(page.locator(".tiles-stepper").get_attribute("data-step"))


def test_buttons_and_keys_go_from_step_to_step(browser, tmp_path):
    data = stepper.make_data("ring")
    with opened(browser, tmp_path, stepper.show("ring")) as page:
        sentence = page.locator(".sentence")
        page.get_by_role("button", name="Next step").click()
        assert find_step(page) == 1 and sentence.inner_text() == data["steps"][1]["say"]
        press(page, "ArrowRight", "n", "p")
        assert find_step(page) == 2 and page.locator("text.changed").count()
        press(page, "End")
        assert find_step(page) == len(data["steps"]) - 1
        press(page, "ArrowRight")
        assert find_step(page) == len(data["steps"]) - 1
        press(page, "Home", "ArrowLeft")
        assert find_step(page) == 0
        label = page.locator(".plots svg").first.get_attribute("aria-label")
        assert label.startswith("stage 0: stage 0: empty") and "full[0]; phase 0, parity 0" in label
        assert sentence.get_attribute("aria-live") == "polite"


def test_any_way_to_a_step_shows_the_same(browser, tmp_path):
    with opened(browser, tmp_path, stepper.show("roles")) as page:
        press(page, *["n"] * 9)
        forwards = page.locator(".plots").inner_html()
        press(page, "End", *["p"] * (len(stepper.make_data("roles")["steps"]) - 10))
        assert find_step(page) == 9 and page.locator(".plots").inner_html() == forwards


def test_play_goes_on_and_stops(browser, tmp_path):
    # of a context of its own, whose clock is replaced
    with opened(browser, tmp_path, stepper.show("softmax"), offline=True) as page:
        page.clock.install()
        press(page, " ")
        page.clock.run_for(4000)
        assert find_step(page) == 3
        press(page, " ")
        page.clock.run_for(4000)
        assert find_step(page) == 3
        press(page, " ")
        page.clock.run_for(60000)
        assert find_step(page) == 10
        assert page.get_by_role("button", name="Play or pause").inner_text() == "Play"


def test_one_tab_stop_for_the_buttons_and_keys_stay_in_the_view(browser, tmp_path):
    with opened(browser, tmp_path, stepper.show("ring")) as page:
        page.evaluate("document.body.addEventListener('keydown', () => { window.leaked = true; })")
        stops = []
        for _ in range(2):
            page.keyboard.press("Tab")
            stops.append(
                page.evaluate("document.activeElement.className || document.activeElement.localName")
            )
        page.evaluate("window.leaked = false")
        press(page, "b", "x", "n")
        assert stops == ["button", "plots"] and not page.evaluate("window.leaked")


@pytest.mark.parametrize("name", stepper.MECHANISMS)
def test_every_word_of_every_step_has_room(browser, tmp_path, name):
    with opened(browser, tmp_path, stepper.show(name)) as page:
        for width, scheme in ((390, "dark"), (1280, "light"), (1920, "dark")):
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            press(page, "Home")
            assert not page.evaluate(CROWDED), width
            assert find_step(page) == len(stepper.make_data(name)["steps"]) - 1
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            press(page, "Home", *["n"] * stepper.MECHANISMS[name].still[-1])
            photograph(page, f"stepper_{name}_{width}_{scheme}")
