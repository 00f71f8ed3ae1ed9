"""Decides, before anything imports triton, whether kernels run on a GPU or in Triton's interpreter."""

import contextlib
import os

from tilelab import device

os.environ.setdefault("MPLBACKEND", "Agg")
device.interpret_without_gpu()
if beside := os.environ.get("PYTEST_XDIST_WORKER"):
    # A share of the CPUs each, for what a test starts too: twice as many compilers and threads as CPUs cost time.
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus[int(beside[2:])::int(os.environ["PYTEST_XDIST_WORKER_COUNT"])] or cpus)

import pytest  # noqa: E402

WANT = "needs a GPU"


@pytest.fixture
def outputs(monkeypatch):
    """What a notebook's cell would hold, in the order it was sent."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    monkeypatch.setattr(shell, "display_pub", CapturingDisplayPublisher())
    yield shell.display_pub.outputs
    InteractiveShell.clear_instance()


def pytest_collection_modifyitems(items):
    here = device.current()
    if here.capability is None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"{WANT}: {here.describe()}"))


def pytest_terminal_summary(terminalreporter):
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if WANT in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped for want of a GPU: "
                                    f"here is {device.current().describe()}.")
