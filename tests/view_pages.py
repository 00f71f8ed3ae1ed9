"""Open a view on a page of its own in Chromium, as the static site does: no server, no network."""

import contextlib
import os
import pathlib
import shutil

import pytest

from tilelab import ROOT, views

SCREENSHOTS = ROOT / "build" / "screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# The pages of tests share a renderer: a process of its own would cost each of them half a second.
ONE_PROCESS = ("--process-per-site", "--renderer-process-limit=1")
WAIT_MS = 180_000  # for another process, on a busy machine
SIZES = {"wide": {"width": 1280, "height": 900}, "narrow": {"width": 390, "height": 844}}
SIZES |= {"720p": {"width": 1280, "height": 720}}


@contextlib.contextmanager
def chromium(arguments=()):
    """Yield Chromium; skip the test where it or Playwright is missing."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install -r requirements.txt"
    )
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with api.sync_playwright() as playwright:
        with contextlib.closing(
            playwright.chromium.launch(executable_path=found, args=list(arguments))
        ) as browser:
            yield browser


@contextlib.contextmanager
def opened(browser, folder: pathlib.Path, view: views.View, size="wide", scheme="light", **options):
    """Yield a page that shows the view's recorded data with the network off; an error of the page fails the test.

    Pages share a context. A page with options has one of its own.
    """
    path, errors = folder / f"{view.name}.html", []
    path.write_text(
        "<!doctype html><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>view</title><body>{views.make_page_part(view.name, view.stored_data())}",
        encoding="utf-8",
    )
    if options or not browser.contexts:
        context = browser.new_context(**{"offline": True} | options)
        context.set_default_timeout(WAIT_MS)
        empty = folder / "empty.html"
        empty.write_text("")
        context.new_page().goto(empty.as_uri())  # its renderer stays for the pages that follow
    else:
        context = browser.contexts[0]
    page = context.new_page()
    with contextlib.closing(context if options else page):
        page.set_viewport_size(SIZES[size])
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(path.as_uri())
        yield page
    assert not errors


def photograph(page, name: str, full_page: bool = True) -> None:
    """Keep a picture of the page in build/screenshots where TILES_SCREENSHOTS asks for it: all take half a minute."""
    if os.environ.get("TILES_SCREENSHOTS"):
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full_page)


def longest_answer_ms(limit_ms: float) -> float:
    """Return how long a change may take: the limit, or more by the load per CPU, where others share the machine."""
    return limit_ms * max(1, os.getloadavg()[0] / os.cpu_count())


def evaluate(page, view: str, expression: str, argument):
    """Return the value of a JavaScript expression of `given`, in which the functions of a view's file are known."""
    body = views.read_module(view).replace(views.EXPORT, "")
    return page.evaluate(f"given => {{ {body}\nreturn {expression}; }}", argument)


# Milliseconds from a change until the page has been laid out anew: [the median of several, the longest]. `change` is a
# function of the view's root and of the number of the change.
TIME_CHANGES = """([root, change, times]) => {
    const element = document.querySelector(root), act = eval(change), taken = [];
    for (let i = 0; i < times; ++i) {
        const begun = performance.now();
        act(element, i);
        element.getBoundingClientRect();
        taken.push(performance.now() - begun);
    }
    taken.sort((a, b) => a - b);
    return [taken[Math.floor(times / 2)], taken[times - 1]];
}"""

# For functions that look for pale text: `luminance` of a colour, and the colour `behind` an element.
COLOURS = """
    const rgba = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const papers = new Map();
    const behind = element => {  // once for each element: many texts lie on the same paper
        if (!element) return [255, 255, 255];
        if (!papers.has(element)) {
            const colour = rgba(getComputedStyle(element).backgroundColor);
            papers.set(element, colour[3] > 0.5 ? colour : behind(element.parentElement));
        }
        return papers.get(element);
    };
"""

# Texts that are cut off or that lie on one another, and, on a dark page, blocks that stay white: one line for each.
# What a box that scrolls does not show is not cut. Pictures are left out: their files hold their texts.
CROWDED = (
    "() => {"
    + COLOURS
    + """
    const found = [], boxes = [], range = document.createRange(), everywhere = { left: -1e9, right: 1e9 };
    const name = (what, element, text) => found.push(`${what}: ${element.outerHTML.slice(0, 60)}: ${text.trim()}`);
    const areas = new Map([[document.documentElement, { shown: everywhere, kept: everywhere }]]);
    const both = (a, b) => ({ left: Math.max(a.left, b.left), right: Math.min(a.right, b.right) });
    const areaOf = element => {  // where a part of an element is `shown`, and where it is `kept` for the reader
        if (areas.has(element)) return areas.get(element);
        let area = areaOf(element.parentElement);
        const flow = getComputedStyle(element).overflowX, own = element.getBoundingClientRect();
        if (flow === "hidden" || flow === "clip") area = { shown: both(area.shown, own), kept: both(area.kept, own) };
        else if (flow !== "visible") area = { shown: both(area.shown, own), kept: everywhere };
        areas.set(element, area);
        return area;
    };
    const leftOut = "script, style, option, title, pre, .skip, .heads-box, details:not([open]) > :not(summary)";
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT,
        node => node.matches?.(leftOut) ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
    for (let node; node = walk.nextNode();) {
        const element = node.parentElement;
        if (node.nodeType !== 3 || !node.data.trim() || element.matches("details:not([open])")) continue;
        if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
        const { shown, kept } = areaOf(element), aside = element.closest(".tools, .toc, [popover], dialog");
        range.selectNodeContents(node);
        for (const box of range.getClientRects()) {
            const part = { ...both(box, shown), top: box.top, bottom: box.bottom };
            if (part.right - part.left > 1 && box.height > 1) boxes.push({ ...part, node, element, aside });
            if (box.right > kept.right + 1.5 || box.left < kept.left - 1.5) name("cut", element, node.data);
        }
    }
    boxes.sort((a, b) => a.top - b.top);
    boxes.forEach((a, i) => {
        for (const b of boxes.slice(i + 1, i + 400)) {
            if (b.top > a.bottom - 2) break;
            const { left, right } = both(a, b), high = Math.min(a.bottom, b.bottom) - b.top;
            const least = Math.min(a.bottom - a.top, b.bottom - b.top);
            if (a.node !== b.node && a.aside === b.aside && right - left > 2 && high > 0.3 * least)
                name("over another", a.element, `${a.node.data.trim().slice(0, 30)} | ${b.node.data}`);
        }
    });
    const dark = luminance(behind(document.body)) < 0.2;
    for (const element of dark ? document.querySelectorAll("body :not(pre *, span)") : []) {
        const { width, height } = element.getBoundingClientRect(), style = getComputedStyle(element);
        const paint = element.localName === "rect" ? style.fill : style.backgroundColor;
        if (width * height > 4000 && /^rgb/.test(paint) && !element.closest(".picture")) {
            const colour = rgba(paint);
            if (colour[3] > 0.5 && luminance(colour) > 0.7) name("white", element, "");
        }
    }
    for (const cell of document.querySelectorAll(".tiles-cell"))
        if (cell.scrollWidth > cell.clientWidth) name("cut", cell, cell.textContent);
    return [...new Set(found)];
}"""
)
