"""The sweep panel in a real browser: in JupyterLab, and as the page that `make demo` serves through Voila.

Each test starts its own server on a copy of the demo notebook, and leaves screenshots in build/screenshots.
"""

import collections
import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from ipykernel.kernelspec import write_kernel_spec

from tilelab import notebook

pytestmark = pytest.mark.browser
ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "notebooks" / "demo" / "panel.ipynb"
SCREENSHOTS = ROOT / "build" / "screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1280, "height": 800}
TARGET, OTHER_TARGET = "sm_100a", "sm_120a"  # compiled for on any machine
MENUS = {"sizes": "input"} | dict.fromkeys(("kernel", "shape", "dtype", "preset", "x", "y", "target", "show"), "select")
CANCEL_MS = 500  # and more by the load per CPU, where other processes share the machine

# Timed in the page, from the click to the status that says so: what a person at the projector sees.
CANCEL = """panel => new Promise(done => {
    const begun = performance.now();
    const look = () => {
        const passed = performance.now() - begun;
        const said = panel.querySelector(".tiles-status").innerText;
        if (/cancelled after/i.test(said) || passed > 60000) done(passed); else setTimeout(look, 2);
    };
    panel.querySelector(".tiles-cancel").click();
    look();
})"""

# Text that its background swallows: WCAG 2.2 (1.4.3) asks for 3 : 1 where text is large, and nothing where disabled.
PALE = """panel => {
    const rgba = colour => { const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = element => {
        for (; element; element = element.parentElement) {
            const colour = rgba(getComputedStyle(element).backgroundColor);
            if (colour[3] > 0.5) return colour;
        }
        return [255, 255, 255];
    };
    return [...panel.querySelectorAll("*")].flatMap(element => {
        const text = element.value || [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join("");
        if (!text.trim() || element.disabled || !element.checkVisibility() || element.localName === "style") return [];
        const style = getComputedStyle(element);
        const [ink, paper] = [rgba(element.ownerSVGElement ? style.fill : style.color), behind(element)].map(luminance);
        const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        return ratio < 3 ? [`${text.trim().slice(0, 60)} (${element.localName}, ${ratio.toFixed(1)} : 1)`] : [];
    });
}"""


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -r requirements.txt")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        with contextlib.closing(playwright.chromium.launch(executable_path=found)) as chromium:
            yield chromium


@contextlib.contextmanager
def opened(browser, where):
    """A page of a projector's size; an error in its console, or one that nothing caught, fails the test."""
    with contextlib.closing(browser.new_context(viewport=SIZE)) as context:
        # Voila's template takes an icon font from the network, which may be out of reach; nothing else may be missing.
        context.route("https://cdn.jsdelivr.net/npm/@fortawesome/**",
                      lambda route: route.fulfill(content_type="text/css", body=""))
        page = context.new_page()
        page.set_default_timeout(90_000)
        errors = []
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        try:
            yield page
        finally:
            page.screenshot(path=SCREENSHOTS / f"{where}-end.png")
            print(*errors, sep="\n")
        assert not errors


@contextlib.contextmanager
def served(folder: pathlib.Path, *command: str):
    """Run `python -m *command` beside a copy of the demo on a free port, with nothing of the user's; yields both.

    `{port}` and `{token}` in the command are replaced by what is yielded.
    """
    course = folder / "course"
    course.mkdir()
    shutil.copy(DEMO, course)
    write_kernel_spec(folder / "jupyter" / "kernels" / "python3")  # this interpreter, whatever else is installed
    news = folder / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)  # JupyterLab's question whether to fetch news covers part of the page
    (news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    own = {name: str(folder / name.lower()) for name in (
        "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "TILES_SWEEPS", "TRITON_CACHE_DIR")}
    env = notebook.child_env(**own, JUPYTER_PATH=str(folder / "jupyter"))
    env.pop("TRITON_INTERPRET", None)  # conftest sets it here; a notebook finds its way to the interpreter by itself
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    log = folder / "server.log"
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:2])  # inherited: a sweep then lasts long enough to be cancelled anywhere
    arguments = [part.format(port=port, token=token) for part in command]
    try:
        with open(log, "w") as said:
            server = subprocess.Popen([sys.executable, "-m", *arguments], cwd=course, env=env, stdout=said, stderr=said,
                                      start_new_session=True)
    finally:
        os.sched_setaffinity(0, cores)
    try:
        _wait_for(server, port, log)
        yield port, token
    finally:
        server.terminate()  # it ends its kernels, which have sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_for(server, port, log, limit_s=120):
    deadline = time.monotonic() + limit_s
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}", pytrace=False)


def test_in_jupyterlab(browser, tmp_path):
    with served(tmp_path, "jupyterlab", "--ip=127.0.0.1", "--port={port}", "--ServerApp.port_retries=0",
                "--no-browser", "--allow-root", "--IdentityProvider.token={token}",
                ) as (port, token), opened(browser, "lab") as page:
        page.goto(f"http://127.0.0.1:{port}/lab/tree/{DEMO.name}?token={token}")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()  # what is run before the kernel is there is lost
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        panel = show(page)
        sweep_and_cancel(panel, tmp_path, "lab")
        read_cells_and_change_theme(panel, "lab")


def test_through_voila(browser, tmp_path):
    """What differs from JupyterLab: the page shows no source, and its callbacks run in the kernel's main thread."""
    with served(tmp_path, "voila", DEMO.name, "--Voila.ip=127.0.0.1", "--port={port}", "--Voila.port_retries=0",
                "--no-browser", "--token={token}") as (port, token), opened(browser, "voila") as page:
        page.goto(f"http://127.0.0.1:{port}/?token={token}")
        panel = show(page)
        panel.locator(".tiles-run").click()
        panel.locator(".tiles-cell.tiles-ok").first.wait_for()
        cancel(panel)
        keep(panel, "voila", "cancelled")
        assert not page.get_by_text("gemm_trials").count(), "the page shows its source"


def show(page):
    """Return the panel once it shows TARGET, before anything is built."""
    panel = page.locator(".tiles-panel")
    panel.wait_for(timeout=120_000)
    choose(panel, TARGET)
    panel.locator(".tiles-cell.tiles-ok").first.wait_for(state="detached")
    tall = {name: panel.locator(f".tiles-{name} {tag}").bounding_box()["height"] for name, tag in MENUS.items()}
    assert max(tall.values()) < 60, f"a menu is one line high: {tall}"
    return panel


def keep(panel, where, what, near=None):
    (near or panel).scroll_into_view_if_needed()
    panel.page.screenshot(path=SCREENSHOTS / f"{where}-{what}.png")


def cancel(panel):
    cancelled_ms = panel.evaluate(CANCEL)
    print(f"cancelled in {cancelled_ms:.0f} ms")
    limit_ms = CANCEL_MS * max(1, os.getloadavg()[0] / os.cpu_count())
    assert cancelled_ms < limit_ms, f"Cancel took {cancelled_ms:.0f} ms to say so"


def sweep_and_cancel(panel, folder, where):
    """Run, cancel, resume and cancel again: finished configurations stay, and none is built twice."""
    status, ok = panel.locator(".tiles-status"), panel.locator(".tiles-cell.tiles-ok")
    before = status.inner_text()
    panel.locator(".tiles-run").click()
    ok.nth(1).wait_for()
    assert status.inner_text() != before
    cancel(panel)
    finished = ok.count()  # the status that says cancelled is drawn last
    keep(panel, where, "cancelled")
    assert finished >= 2 and panel.locator(".tiles-cell.tiles-waiting").count(), "nothing was left to cancel"

    panel.locator(".tiles-run").click()
    ok.nth(finished + 1).wait_for()
    cancel(panel)
    keep(panel, where, "resumed")
    keys = journal_keys(folder)
    assert keys == dict.fromkeys(keys, 1), "a configuration that was finished was built again"
    assert len(keys) == ok.count() > finished, "cells went on filling in after Cancel"


def read_cells_and_change_theme(panel, where):
    """Read why a configuration is rejected, take another target and the first one again, change the theme."""
    panel.locator(".tiles-cell.tiles-rejected").first.click()
    detail = panel.locator(".tiles-detail", has_text="shared memory")
    detail.wait_for()
    keep(panel, where, "rejected", detail)

    ok = panel.locator(".tiles-cell.tiles-ok")
    choose(panel, OTHER_TARGET)
    ok.first.wait_for(state="detached")
    choose(panel, TARGET)
    ok.first.wait_for()
    drawn, pale = look(panel), panel.evaluate(PALE)
    panel.locator(".tiles-theme").click()
    panel.page.wait_for_function("([panel, before]) => getComputedStyle(panel).backgroundColor !== before",
                                 arg=[panel.element_handle(), drawn])
    keep(panel, where, "theme", panel.locator(".tiles-top"))
    assert not pale + panel.evaluate(PALE), "text that cannot be read"


def choose(panel, target):
    menu = panel.locator(".tiles-target select")
    menu.select_option(label=next(label for label in menu.locator("option").all_inner_texts() if target in label))
    panel.get_by_text(f"nothing is timed on {target}").first.wait_for()


def look(panel):
    return panel.evaluate("panel => getComputedStyle(panel).backgroundColor")


def journal_keys(folder) -> dict[str, int]:
    """How often each configuration was written down."""
    rows = [line for path in (folder / "tiles_sweeps").rglob("*.jsonl") for line in path.read_text().splitlines()]
    return dict(collections.Counter(json.loads(row)["key"] for row in rows))
