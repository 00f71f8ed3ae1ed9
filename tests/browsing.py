"""What browser tests share: a page that must raise no error, and a Jupyter server of a test's own."""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from view_pages import SCREENSHOTS, WAIT_MS

from tilelab import ROOT
from tilelab.course import notebook

DEMO = ROOT / "notebooks" / "demo" / "panel.ipynb"
SIZES = {"720p": {"width": 1280, "height": 720}, "1080p": {"width": 1920, "height": 1080}}  # of a projector


@contextlib.contextmanager
def opened(browser, where, **options):
    """Yield an empty page; an error in its console, or one that nothing caught, fails the test."""
    with contextlib.closing(browser.new_context(viewport=SIZES["720p"], **options)) as context:
        # Voila's template takes an icon font from the network, which may be out of reach; nothing else may be missing.
        context.route(
            "https://cdn.jsdelivr.net/npm/@fortawesome/**",
            lambda route: route.fulfill(content_type="text/css", body=""),
        )
        page = context.new_page()
        context.set_default_timeout(WAIT_MS)  # also of the pages that the test itself opens
        errors = []
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        try:
            yield page
            assert not errors
        except BaseException:
            page.screenshot(path=SCREENSHOTS / f"{where}-end.png")
            raise
        finally:
            print(*errors, sep="\n")


@contextlib.contextmanager
def served(folder: pathlib.Path, *command: str, cell: str = ""):
    """Run `python -m *command` beside a copy of the demo on a free port, with nothing of the user's.

    With `cell` a notebook one_cell.ipynb that holds this source lies beside it.
    Yields (port, token, server process).
    `{port}` and `{token}` in the command are replaced by what is yielded.
    """
    course = folder / "course"
    course.mkdir()
    shutil.copy(DEMO, course)
    if cell:
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        made.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
        nbformat.write(made, course / "one_cell.ipynb")
    # this interpreter, whatever else is installed
    write_kernel_spec(folder / "jupyter" / "kernels" / "python3")
    news = folder / "jupyterlab_settings_dir" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)  # JupyterLab's question whether to fetch news covers part of the page
    (news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    names = [f"JUPYTER_{name}_DIR" for name in ("CONFIG", "DATA", "RUNTIME")]
    names += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR"]
    names += ["TILES_SWEEPS", "TRITON_CACHE_DIR"]
    own = {name: str(folder / name.lower()) for name in names}
    env = notebook.child_env(**own, JUPYTER_PATH=str(folder / "jupyter"))
    # conftest sets it here; a notebook finds its way to the interpreter by itself
    env.pop("TRITON_INTERPRET", None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    log = folder / "server.log"
    cores = os.sched_getaffinity(0)
    # inherited: a sweep then lasts long enough to be cancelled anywhere
    os.sched_setaffinity(0, sorted(cores)[:2])
    arguments = [part.format(port=port, token=token) for part in command]
    try:
        with open(log, "w") as said:
            options = {"cwd": course, "env": env, "stdout": said, "stderr": said, "start_new_session": True}
            server = subprocess.Popen([sys.executable, "-m", *arguments], **options)
    finally:
        os.sched_setaffinity(0, cores)
    try:
        _wait_for(server, port, log)
        yield port, token, server
    finally:
        server.terminate()  # it ends its kernels, which have sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextlib.contextmanager
def served_demo(folder: pathlib.Path, cell: str = ""):
    """Serve the demo, or a notebook that holds this cell, as `make demo` does; yields the address and the process."""
    name = "one_cell.ipynb" if cell else DEMO.name
    options = ("--port={port}", "--Voila.port_retries=0", "--no-browser", "--token={token}")
    demo = served(folder, "tilelab.course.demo", name, *options, cell=cell)
    with demo as (port, token, server):
        yield f"http://127.0.0.1:{port}/?token={token}", server


def _wait_for(server, port, log, limit_s=120):
    deadline = time.monotonic() + limit_s
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}", pytrace=False)
