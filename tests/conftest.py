"""Decide where kernels run before anything imports triton, and sort the tests into the tiers of pyproject.toml."""

import contextlib
import faulthandler
import os
import sys

from tilelab import device

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["TILES_QUICK"] = "1"  # experiments measure a few rounds only
if beside := os.environ.get("PYTEST_XDIST_WORKER"):
    # Each worker gets a share of the CPUs, also for the compilers and threads that its tests start. torch reads both
    # variables once, when it is imported and when it first looks for a GPU, so nothing may do that before: with more
    # threads than CPUs, an operation of a microsecond takes milliseconds.
    cpus = sorted(os.sched_getaffinity(0))
    cpus = cpus[int(beside[2:])::int(os.environ["PYTEST_XDIST_WORKER_COUNT"])] or cpus
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    if gpus := os.environ.get("TILES_TEST_GPUS"):  # each worker uses one GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[int(beside[2:]) % len(gpus.split(","))]
device.interpret_without_gpu()  # with a GPU this imports torch

import pytest  # noqa: E402

from tilelab import plans  # noqa: E402

NO_GPU = "needs a GPU"
BROWSER_LIMIT_S = 900


@pytest.fixture(autouse=True)
def full_length_timing(request, monkeypatch):
    """Let a test that is marked `timing` measure at full length: nothing else runs beside it."""
    if request.node.get_closest_marker("timing"):
        monkeypatch.delenv("TILES_QUICK", raising=False)


@pytest.fixture(autouse=True)
def new_plans():
    """Let each test plan its operators anew: it may pretend another GPU, or replace what a plan is made of."""
    plans.forget_plans()


@pytest.fixture
def outputs(monkeypatch):
    """Return the outputs that a notebook's cell would hold, in the order in which they were sent."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    monkeypatch.setattr(shell, "display_pub", CapturingDisplayPublisher())
    yield shell.display_pub.outputs
    InteractiveShell.clear_instance()


def pytest_collection_modifyitems(items):
    here = device.current()
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.gpu)
        if here.capability is None and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"{NO_GPU}: {here.describe()}"))
        if here.capability and item.get_closest_marker("planted"):
            item.add_marker(pytest.mark.skip(reason="on a GPU a planted fault can end the CUDA context of later tests"))
    if beside:
        # A process begins with a share of neighbours in this order, so the longest tests are spread over it. Those that
        # share a browser, a server or the site's pages stay together: a module's fixture ends at the next module.
        long = [item for item in items if item.get_closest_marker("notebook") or item.get_closest_marker("browser")]
        others = [item for item in items if item not in long]
        shared = {item.path for item in long if item.get_closest_marker("browser")}
        blocks: dict = {}
        for item in long:
            blocks.setdefault(item.path if item.path in shared else item.nodeid, []).append(item)
        share = len(others) // max(len(blocks), 1)
        items[:] = [item for number, block in enumerate(blocks.values())
                    for item in (*block, *others[number * share:(number + 1) * share])] + others[len(blocks) * share:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process where a browser never answers: a test that waits for ever would stop the whole run."""
    if item.get_closest_marker("browser"):
        faulthandler.dump_traceback_later(BROWSER_LIMIT_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_terminal_summary(terminalreporter):
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped because they need a GPU: "
                                    f"here is {device.current().describe()}.")
