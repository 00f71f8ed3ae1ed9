"""Decide where kernels run before anything imports triton, and sort the tests into the tiers of pyproject.toml."""

import contextlib
import faulthandler
import gc
import os
import pathlib
import signal
import sys

from tilelab.runtime import device

gc.disable()  # until all tests are imported, which leaves hardly any garbage

# A shell's job in the background ignores Ctrl-C, and so does all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["TILES_QUICK"] = "1"  # experiments measure a few rounds only
if beside := os.environ.get("PYTEST_XDIST_WORKER"):
    # Each worker gets a share of the CPUs, also for the compilers and threads that its tests start. torch reads both
    # variables once, when it is imported and when it first looks for a GPU, so nothing may do that before: with more
    # threads than CPUs, an operation of a microsecond takes milliseconds.
    cpus = sorted(os.sched_getaffinity(0))
    cpus = cpus[int(beside[2:]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])] or cpus
    os.environ["OMP_NUM_THREADS"] = str(len(cpus))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)
    if gpus := os.environ.get("TILES_TEST_GPUS"):  # each worker uses one GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[int(beside[2:]) % len(gpus.split(","))]
device.interpret_without_gpu()  # with a GPU this imports torch

import pytest  # noqa: E402

from tilelab.runtime import plans, tuned  # noqa: E402

NO_GPU = "needs a GPU"
BROWSER_LIMIT_S = 900


@pytest.fixture(autouse=True)
def full_length_timing(request, monkeypatch):
    """Let a test that is marked `timing` measure at full length: nothing else runs beside it."""
    if request.node.get_closest_marker("timing"):
        monkeypatch.delenv("TILES_QUICK", raising=False)


@pytest.fixture(autouse=True, scope="session")
def nothing_kept_for_the_user(tmp_path_factory):
    """Hide what config="tune" and the sweeps of panels have kept for the user of this machine."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "user_folder", lambda: pathlib.Path(os.environ.get("TILES_TUNED") or folder))
        patch.setenv("TILES_SWEEPS", str(tmp_path_factory.mktemp("sweeps")))
        yield


@pytest.fixture(autouse=True)
def new_plans():
    """Let each test plan its operators anew: it may pretend another GPU, or replace what a plan is made of."""
    plans.forget_plans()


@pytest.fixture(autouse=True)
def emulate_at_once(request, monkeypatch):
    """Emulate the kernels of chapters, and faults planted in them, without asking the GPU's compiler about each.

    Other tests compile the kernels for GPUs, and the runs of notebooks ask about those in cells.
    """
    cells = sys.modules.get("tilelab.cells.cuda_magic")
    if cells and request.path.relative_to(pathlib.Path(__file__).parent).parts[0].startswith("ch"):
        monkeypatch.setattr(cells.CudaKernel, "check", lambda kernel: None)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "current", lambda: device.Device(note="torch is a CPU build"))


@pytest.fixture(scope="module")
def browser(request):
    """Return a Chromium that the tests of a module share; a page of a server has a renderer of its own."""
    import view_pages  # here, because Playwright's event loop is none of the other tests' business

    with view_pages.chromium(
        () if hasattr(request.module, "served_demo") else view_pages.ONE_PROCESS
    ) as found:
        yield found


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
            item.add_marker(
                pytest.mark.skip(reason="on a GPU a planted fault can end the CUDA context of later tests")
            )
    if beside:
        items[:] = spread(items, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.collect()
    gc.freeze()  # modules and tests stay to the end: looking for garbage among them takes part of a second each time
    gc.enable()


def spread(items, processes):
    """Return the tests in an order of which each process gets an equal part, and takes another's last ones when done.

    So each part begins with long tests and ends with short ones. The long tests of a module stay together, because they
    share a browser, a server or compiled kernels; notebooks share nothing.
    """

    def has(item, *tiers):
        return any(map(item.get_closest_marker, tiers))

    shared = {item.path for item in items if has(item, "browser")}
    blocks, short = {}, []
    for item in items:
        if has(item, "browser", "notebook", "compile", "fault"):
            alone = has(item, "notebook") and item.path not in shared
            blocks.setdefault(item.nodeid if alone else item.path, []).append(item)
        else:
            short.append(item)
    longest_first = sorted(blocks.values(), key=lambda block: not has(block[0], "browser", "notebook"))
    order = []
    for process in range(processes):
        order += [item for block in longest_first[process::processes] for item in block]
        end = max(0, (process + 1) * len(items) // processes - len(order))
        order += short[:end]
        del short[:end]
    return order + short


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
    skipped = [
        report for report in terminalreporter.stats.get("skipped", ()) if NO_GPU in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} tests skipped because they need a GPU: here is {device.current().describe()}."
        )
