"""No kernel and no sweep outlives its page: the server of `make demo`, in Chromium."""

import contextlib
import pathlib

import pytest
from browsing import opened, served_demo
from waiting import is_alive, wait_for

pytestmark = pytest.mark.browser
GONE_S = 60  # within which the kernel of a closed tab must be gone
# A sweep whose builds never end and need no CPU.
CELL = """import dataclasses, pathlib
import ipywidgets
from tilelab.sweeps import faults
from tilelab.sweeps.sweep import Sweep

pathlib.Path("endless.py").write_text("import time; time.sleep(600)")

class EndlessSpace(faults.FaultSpace):
    def job(self, config):
        return dataclasses.replace(super().job(config), kernel="endless.py:kernel")

running = Sweep(faults.configs(()), EndlessSpace(folder=".", compile_for="sm_90a"), limit_s=600)
ipywidgets.IntSlider(description="ready")
"""


def find_children(parent: int) -> dict[int, str]:
    """Return {process: command line} of all that a process has started, directly or not."""
    parents, found, new = {}, {}, {parent}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if state[0] != "Z":
                parents[int(folder.name)] = int(state[1])
    while new := {process for process, above in parents.items() if above in new}:
        for process in new:
            with contextlib.suppress(OSError):  # it may end meanwhile
                command = pathlib.Path(f"/proc/{process}/cmdline").read_text(errors="replace")
                found[process] = command.replace("\0", " ")
    return found


def find_kernels(server) -> list[int]:
    return [
        process for process, command in find_children(server.pid).items() if "ipykernel_launcher" in command
    ]


def find_workers(kernel: int) -> list[int]:
    return [
        process
        for process, command in find_children(kernel).items()
        if "tilelab.runtime.build_worker" in command
    ]


def test_no_kernel_and_no_sweep_outlives_its_page(browser, tmp_path):
    with served_demo(tmp_path, CELL) as (address, server), opened(browser, "leaks") as first:
        page = first.context.new_page()
        page.goto(address, wait_until="commit")
        wait_for(lambda: find_kernels(server), GONE_S)
        # While it loads: it is not connected, and cannot ask for the end of its kernel.
        page.goto("about:blank")
        page.goto(address)
        page.get_by_text("ready").wait_for()
        asked = max(find_kernels(server))
        wait_for(lambda: find_workers(asked), GONE_S)
        started = find_children(asked)
        page.reload(wait_until="commit")  # asks for the end of its kernel
        page.get_by_text("ready").wait_for()
        took_s = wait_for(lambda: not any(map(is_alive, started)), GONE_S)
        print(f"the kernel and its sweep are gone {took_s:.1f} s after the page was there again")
        kernel = max(find_kernels(server))
        wait_for(lambda: find_workers(kernel), GONE_S)
        started = find_children(server.pid).keys() - {server.pid}
        page.close()  # like a tab that crashed, it does not ask
        took_s = wait_for(lambda: not find_kernels(server), GONE_S)
        print(f"all kernels are gone {took_s:.1f} s after the last tab")
        wait_for(lambda: not any(map(is_alive, started)), 5)
