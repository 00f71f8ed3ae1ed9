"""The sweep panel in a real browser: in JupyterLab, and as the page that `make demo` serves through Voila.

Each test starts its own server on a copy of the demo notebook, and leaves screenshots in build/screenshots.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from ipykernel.kernelspec import write_kernel_spec

from tilelab import record

ROOT = pathlib.Path(__file__).parents[1]
DEMO = ROOT / "notebooks" / "demo" / "panel.ipynb"
SCREENSHOTS = ROOT / "build" / "screenshots"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1280, "height": 800}
TARGET, OTHER_TARGET = "sm_100a", "sm_120a"  # compiled for on any machine
CANCEL_MS = 500

# Timed in the page, from the click to the status that says so: what a person at the projector sees.
CANCEL = """panel => new Promise(done => {
    const begun = performance.now();
    const watch = new MutationObserver(() => {
        if (!/cancelled/i.test(panel.querySelector(".tiles-status").innerText)) return;
        watch.disconnect();
        done(performance.now() - begun);
    });
    watch.observe(panel, {subtree: true, childList: true, characterData: true});
    panel.querySelector(".tiles-cancel").click();
})"""


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
        page.set_default_timeout(30_000)
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
    env = record.child_env(**own, JUPYTER_PATH=str(folder / "jupyter"))
    env.pop("TRITON_INTERPRET", None)  # conftest sets it here; a notebook finds its way to the interpreter by itself
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    log = folder / "server.log"
    with open(log, "w") as said:
        server = subprocess.Popen([sys.executable, "-m", *(part.format(port=port, token=token) for part in command)],
                                  cwd=course, env=env, stdout=said, stderr=said, start_new_session=True)
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


def _wait_for(server, port, log, limit_s=30):
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
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()  # the kernel is there
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        explore(page, tmp_path, "lab")


def test_through_voila(browser, tmp_path):
    with served(tmp_path, "voila", DEMO.name, "--Voila.ip=127.0.0.1", "--port={port}", "--Voila.port_retries=0",
                "--no-browser", "--token={token}") as (port, token), opened(browser, "voila") as page:
        page.goto(f"http://127.0.0.1:{port}/?token={token}")
        explore(page, tmp_path, "voila")
        assert not page.get_by_text("gemm_trials").count(), "the page shows its source"


def explore(page, folder, where):
    """Run, cancel, resume, read why a configuration is rejected, take another target, change the theme."""
    panel = page.locator(".tiles-panel")
    status, ok = panel.locator(".tiles-status"), panel.locator(".tiles-cell.tiles-ok")
    taken = []

    def keep(what):
        taken.append(what)
        panel.scroll_into_view_if_needed()
        page.screenshot(path=SCREENSHOTS / f"{where}-{len(taken)}-{what}.png")

    panel.wait_for(timeout=40_000)
    choose(panel, TARGET)
    assert ok.count() == 0
    keep("ready")

    before = status.inner_text()
    panel.locator(".tiles-run").click()
    ok.nth(4).wait_for()
    assert status.inner_text() != before
    cancelled_ms = panel.evaluate(CANCEL)
    assert cancelled_ms < CANCEL_MS, f"Cancel took {cancelled_ms:.0f} ms to say so"
    page.wait_for_timeout(500)
    keep("cancelled")
    finished = ok.count()
    page.wait_for_timeout(1000)
    assert 5 <= ok.count() == finished, "cells went on filling in after Cancel"
    assert panel.locator(".tiles-cell.tiles-waiting").count(), "nothing was left to cancel"

    panel.locator(".tiles-run").click()
    keep("running")
    whole(panel).wait_for()
    keep("finished")
    keys = journal_keys(folder)
    assert ok.count() > finished
    assert keys == dict.fromkeys(keys, 1), "a configuration that was finished was built again"
    assert len(keys) == ok.count()

    panel.locator(".tiles-cell.tiles-rejected").first.click()
    panel.locator(".tiles-detail", has_text="shared memory").wait_for()
    keep("rejected")

    choose(panel, OTHER_TARGET)
    ok.first.wait_for(state="detached")
    keep("other-target")

    choose(panel, TARGET)
    drawn = look(panel)
    panel.locator(".tiles-theme").click()
    page.wait_for_timeout(500)
    assert look(panel) != drawn
    keep("theme")


def choose(panel, target):
    menu = panel.locator(".tiles-target select")
    menu.select_option(label=next(label for label in menu.locator("option").all_inner_texts() if target in label))


def whole(panel):
    return panel.locator(".tiles-status", has_text=re.compile(r"\b96 of 96\b"))


def look(panel):
    return panel.evaluate("panel => [getComputedStyle(panel).backgroundColor, getComputedStyle(panel).color]")


def journal_keys(folder) -> dict[str, int]:
    """How often each configuration was written down."""
    rows = [line for path in (folder / "tiles_sweeps").rglob("*.jsonl") for line in path.read_text().splitlines()]
    return dict(collections.Counter(json.loads(row)["key"] for row in rows))
