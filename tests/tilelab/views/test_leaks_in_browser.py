"""No kernel and no sweep outlives its page: the server of `make demo`, in Chromium."""

import contextlib
import pathlib
import time

import pytest
from browsing import opened, served_demo

pytestmark = pytest.mark.browser
RELOADS = 1
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
    parents, commands = {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if state[0] != "Z":
                commands[int(folder.name)] = (
                    (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
                )  # it may end meanwhile
                parents[int(folder.name)] = int(state[1])
    found, new = {}, {parent}
    while new:
        new = {process for process, above in parents.items() if above in new}
        found |= {process: commands[process] for process in new}
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


def wait_until(condition, limit_s: float) -> float:
    """Return the seconds until the condition holds."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, f"it did not happen within {limit_s} s"
        time.sleep(0.1)
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the address of a notebook that sweeps, and the process that serves it as `make demo` serves the panel."""
    with served_demo(tmp_path_factory.mktemp("demo"), cell=CELL) as served:
        yield served


def memory_mib(process: int) -> float:
    text = pathlib.Path(f"/proc/{process}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def test_reloads_leave_one_kernel(browser, demo):
    address, server = demo
    with opened(browser, "leaks") as page:
        early = page.context.new_page()
        early.goto(address, wait_until="commit")
        wait_until(lambda: find_kernels(server), GONE_S)
        early.goto(
            "about:blank"
        )  # while it loads: it has not connected to its kernel, and cannot ask for its end
        page.goto(address)
        for _ in range(RELOADS):
            page.get_by_text("ready").wait_for()
            page.reload(wait_until="commit")
        page.get_by_text("ready").wait_for()
        took_s = wait_until(lambda: len(find_kernels(server)) == 1, GONE_S)
        print(
            f"one kernel {took_s:.1f} s after the last page was there: {memory_mib(find_kernels(server)[0]):.0f} MiB"
        )


def test_a_sweep_ends_with_its_tab(browser, demo):
    address, server = demo
    with opened(browser, "leaks") as first:
        for asks in False, True:  # a tab that crashed does not ask for the end of its kernel
            page = first.context.new_page()
            page.goto(address)
            page.get_by_text("ready").wait_for()
            kernel = max(find_kernels(server))
            wait_until(lambda kernel=kernel: find_workers(kernel), GONE_S)
            print(f"a kernel that sweeps takes {memory_mib(kernel):.0f} MiB")
            if asks:
                page.goto("about:blank")  # the page asks for the end of its kernel when it is left
            page.close()
        started = find_children(server.pid).keys() - {server.pid}
        took_s = wait_until(lambda: not find_kernels(server), GONE_S)
        print(f"the kernel is gone {took_s:.1f} s after its tab")
        wait_until(lambda: not any(pathlib.Path(f"/proc/{process}").exists() for process in started), 5)
