"""The view of PTX and SASS side by side, on a page without a server."""

import contextlib

import pytest
from view_pages import longest_answer_ms, opened, photograph

from ch14.gemm.lesson.sweep import GemmSpace
from tilelab import views
from tilelab.views.listing import load_code

pytestmark = pytest.mark.browser
LINES, LIMIT_MS = 5000, 200

# A diff that is known: the right listing leaves one line out, changes one and adds two.
LEFT = [["", "a"], ["tma", "UTMALDG.2D [UR8], [UR4]"], ["", "b R1"], ["barrier", "SYNCS R2"], ["", "gone"]]
LEFT += [["", "c"], ["mma", "HGMMA R8"]]
RIGHT = [["", "a"], ["tma", "UTMALDG.2D [UR10], [UR6]"], ["", "b R7"], ["barrier", "SYNCS R2"], ["", "c"]]
RIGHT += [["store", "STS R1"], ["", "new"], ["mma", "HGMMA R8"]]
TEXTS = """side => {
    const rows = document.querySelectorAll('.tiles-code-lines')[side].querySelectorAll('.tiles-code-row');
    return [...rows].map(row => [...row.children].map(part => part.textContent.trim()).join('|'));
}"""
FIRST_ROWS = """[...document.querySelectorAll('.tiles-code-lines')].map(
    each => Number(each.querySelector('[data-row]').dataset.row))"""
TIME = """([a, b]) => { const begun = performance.now(); const rows = alignLines(a, b);
    return [performance.now() - begun, rows.filter(row => row.same).length]; }"""


def listing(sass, ptx=(), reason=""):
    return {"name": "k", "target": "sm_90a", "ptx": list(ptx), "sass": sass, "notes": {}, "reason": reason}


@pytest.fixture
def show(browser, tmp_path):
    """Return a function that opens the view of two listings."""
    with contextlib.ExitStack() as stack:
        yield lambda left, right: stack.enter_context(
            opened(browser, tmp_path, views.View("code", {"left": left, "right": right}))
        )


def test_differences_are_marked(show):
    page = show(listing(LEFT), listing(RIGHT))
    expected = ["1|||a", "2|T||UTMALDG.2D [UR8], [UR4]", "3|||b R1", "4|B||SYNCS R2", "5||+|gone", "6|||c"]
    expected += ["|||", "|||", "7|M||HGMMA R8"]
    assert page.evaluate(TEXTS, 0) == expected
    assert page.evaluate(TEXTS, 1)[4:8] == ["|||", "5|||c", "6|S|+|STS R1", "7||+|new"]
    assert page.get_by_text("3 lines differ.").count() == 1
    page.get_by_role("button", name="register numbers").click()
    assert page.get_by_text("5 lines differ.").count() == 1
    counts = page.locator(".tiles-code-counts").nth(1).inner_text()
    assert counts == "8 lines: 1 TMA (T), 1 barrier (B), 1 MMA (M), 0 load (L), 1 store (S)"


def test_a_listing_opens_at_the_signature_of_the_kernel(show):
    ptx = [
        ["", ".version 9.3"],
        *[["", f".global .b8 bytes_{i};"] for i in range(50)],
        ["", ".visible .entry k("],
        *[["", f"mov.b32 %r{i}, 0;"] for i in range(100)],
    ]
    page = show(listing(LEFT, ptx), listing(RIGHT, ptx[20:]))
    top = page.locator(".tiles-code-lines").first
    first = """lines => [...lines.querySelectorAll(".tiles-code-row")].find(row =>
        row.getBoundingClientRect().bottom > lines.getBoundingClientRect().top + 3).querySelector("code").textContent"""
    assert top.evaluate(first) == ".visible .entry k("
    page.locator("[data-language=sass]").click()
    assert top.evaluate(first) == "a"
    page.locator("[data-language=ptx]").click()
    assert top.evaluate(first) == ".visible .entry k("


def test_keys_go_from_mark_to_mark(show):
    page = show(listing(LEFT), listing(RIGHT))
    body = page.locator(".tiles-code-body")
    current = page.locator(".tiles-code-current code")
    page.keyboard.press("Tab")  # the toolbar is one stop, the listings are the next
    page.keyboard.press("Tab")
    assert body.evaluate("each => each === document.activeElement")
    marked = ("UTMALDG.2D [UR8], [UR4]", "SYNCS R2", "HGMMA R8", "HGMMA R8", "SYNCS R2")
    for key, line in zip("nnnnp", marked):
        page.keyboard.press(key)
        assert current.first.inner_text() == line
    page.locator("[data-kind=difference]").click()
    page.get_by_title("next marked line").click()
    assert current.first.inner_text() == "gone"
    page.get_by_title("next marked line").click()
    assert page.inner_text(".tiles-code-status") == "nothing left, right line 6 (store): they differ"


def test_one_listing_and_a_failure(show):
    page = show(listing(LEFT), None)
    assert page.locator(".tiles-code-side").count() == 1 and page.locator(".tiles-code-differs").count() == 0
    assert page.locator("[data-kind=difference]").count() == 0
    page = show(listing(LEFT), listing([], reason="it does not compile."))
    assert page.get_by_text("it does not compile.").is_visible()
    assert page.get_by_text("There is no SASS of it.").count()


def test_long_listings_are_quick_and_scroll_together(show):
    left = [["mma" if index % 100 == 99 else "", f"LINE{index % 700} R{index}"] for index in range(LINES)]
    right = [
        ["mma" if index % 100 == 99 else "", f"LINE{index * 7 % 900} R{index}"] for index in range(LINES)
    ]
    page = show(listing(left), listing(right))
    assert page.locator(".tiles-code-row").count() < 200
    page.locator(".tiles-code-lines").nth(1).evaluate(
        "each => { each.scrollTop = 40000; each.scrollLeft = 30; }"
    )
    page.wait_for_function("document.querySelectorAll('.tiles-code-lines')[0].scrollTop === 40000")
    page.wait_for_function(f"{FIRST_ROWS}.every(row => row > 1000)")
    module = views.read_module("code").replace(views.EXPORT, "")
    page.add_script_tag(content=module)
    took_ms, same = page.evaluate(TIME, [[text for _, text in side] for side in (left, right)])
    print(f"two listings of {LINES:,} lines are compared in {took_ms:.0f} ms; {same} lines are the same")
    assert took_ms < longest_answer_ms(LIMIT_MS)


def test_two_configurations(show):
    space = GemmSpace((4096, 4096, 4096), compile_for="sm_90a")
    configs = GemmSpace.presets["grid of 96"]("bf16")
    sides = [load_code(space.job(configs[index])) for index in (0, 40)]
    assert not any(side["reason"] for side in sides)
    page = show(*sides)
    page.locator(".tiles-code-body").focus()
    for language, scheme in (("ptx", "light"), ("sass", "dark")):
        page.emulate_media(color_scheme=scheme)
        page.locator(f"[data-language={language}]").click()
        for _ in range(20):
            page.keyboard.press("n")
        photograph(page, f"code-{language}-{scheme}", full_page=False)
        assert page.locator(".tiles-code-current").count() == 2
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
