"""Serve a notebook's panel as a page for a projector: `python -m tilelab.course.demo notebooks/demo/panel.ipynb`.

`make demo` runs it. It is Voila with settings under which no kernel outlives its page. A page that closes asks the
server to end its kernel, and the server refuses a request without the value of its cookie `_xsrf`. Voila sets this
cookie on its login form only, which nobody sees who comes with a token in the URL, so each reload would leave a kernel
behind. Here each page sets it. A page that cannot ask any more (its browser crashed, or it was closed while it loaded)
loses its kernel soon after its connection. A kernel that ends takes its sweep along: see tilelab.runtime.worker_pool.

A kernel needs some ten seconds for its imports on two cores. Until its panel is there, the page shows the recorded
panel of a lesson, which needs no kernel.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from traitlets.config import Config
from voila.app import Voila

from tilelab import ROOT, views

LEFT_S = 20  # how long a kernel waits for its page to connect again, or to connect at first once its cells have run
FIRST_VIEW = ROOT / "notebooks/09_ch14_sweep.ipynb"
ARGUMENTS = ("--Voila.ip=127.0.0.1", "--token", "--strip_sources=True")


class PageKernelManager(AsyncMappingKernelManager):
    """A kernel manager that ends a kernel whose page is gone, also while a sweep in it is busy."""

    def notify_disconnect(self, kernel_id: str) -> None:
        """End the kernel unless its page, which may have lost its connection only, comes back."""
        super().notify_disconnect(kernel_id)
        asyncio.get_running_loop().call_later(LEFT_S, self._end_if_left, kernel_id)

    def _end_if_left(self, kernel_id: str) -> None:
        if kernel_id in self and not self._kernel_connections.get(kernel_id):
            self.log.info("The page of kernel %s is gone: ending the kernel.", kernel_id)
            self._ending = asyncio.ensure_future(self.shutdown_kernel(kernel_id))


def _set_cookie(request_handler, **_) -> None:
    """Set the cookie `_xsrf`, which a page must send back to end its kernel."""
    _ = request_handler.xsrf_token  # reading it sets the cookie


def make_first_view(path: pathlib.Path = FIRST_VIEW) -> str:
    """Return the HTML of the first panel that a notebook stores, for a page of its own. ValueError without a panel."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            if stored := output.get("data", {}).get(views.MIME):
                name, data = views.read_stored(stored)
                if name == "panel":
                    return views.make_page_part(name, {**data, "alone": True})
    raise ValueError(f"{path} stores no panel; run its cells again.")


class PanelServer(Voila):
    """Voila with a page that shows a recorded panel first."""

    def setup_template_dirs(self) -> None:
        super().setup_template_dirs()
        self.template_paths.insert(0, str(pathlib.Path(__file__).parent / "demo_template"))


def make_config() -> Config:
    """Return the settings of Voila that no command line can express."""
    config = Config()
    config.VoilaConfiguration.prelaunch_hook = _set_cookie
    config.VoilaConfiguration.resources = {"first_view": make_first_view()}
    config.VoilaConfiguration.multi_kernel_manager_class = PageKernelManager
    # For a kernel to which no page has ever connected. A kernel that runs cells, or has a page, is never idle.
    config.MappingKernelManager.cull_idle_timeout = LEFT_S
    config.MappingKernelManager.cull_interval = LEFT_S // 2
    return config


def main(argv: list[str]) -> None:
    PanelServer.launch_instance([*ARGUMENTS, *argv], config=make_config())


if __name__ == "__main__":
    main(sys.argv[1:])
