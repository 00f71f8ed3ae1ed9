"""Decides, before anything imports triton, whether kernels run on a GPU or in Triton's interpreter."""

import os

from tilelab import device

os.environ.setdefault("MPLBACKEND", "Agg")
device.interpret_without_gpu()

import pytest  # noqa: E402

WANT = "needs a GPU"


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
