"""Workers that fork, die, hold the interpreter's lock or lose their caller."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from waiting import is_alive, wait_for

from tilelab import ROOT
from tilelab.course import notebook
from tilelab.runtime import worker_pool

pytestmark = pytest.mark.fault

WORKER = """
import os, pathlib, re, time
import edited
from tilelab.runtime import worker_pool

def answer(request):
    what = request["what"]
    if what == "fork" and os.fork() == 0:
        time.sleep(300)
    if what == "fork and answer too":
        os.fork()
    if what == "write much":
        os.write(2, b"x" * 300_000)
    if what == "die":
        os.write(2, b"error: the reason\\n")
        os.abort()
    if what == "exit":
        os._exit(3)
    if what == "close files":
        os.close(1), os.close(2)
    if what == "hold the lock":
        pathlib.Path(request["file"]).write_text(str(os.getpid()))
        re.match(r"(a*)*$", "a" * 60 + "b")  # takes years, and never lets another thread run
    if what == "sleep":
        time.sleep(300)
    return {"pid": os.getpid(), "number": edited.NUMBER}

worker_pool.serve(answer)
"""
CALLER = """
import sys
from tilelab.runtime import worker_pool
with worker_pool.lease_worker("small_worker", "it") as worker:
    worker.ask({"what": "hold the lock", "file": sys.argv[1]}, 300)
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Return a pool whose workers can import the module above; their processes are gone after the test."""
    (tmp_path / "small_worker.py").write_text(WORKER)
    (tmp_path / "edited.py").write_text("NUMBER = 1")
    monkeypatch.syspath_prepend(tmp_path)
    found = worker_pool.WorkerPool()
    yield found
    found.close()


def test_a_death_or_a_hang_is_an_answer(pool):
    with pool.lease("small_worker", "it") as worker:
        first = worker.ask({"what": ""}, 60)["pid"]
        assert worker.ask({"what": "fork and answer too"}, 60) == {"pid": first, "number": 1}
        found = worker.ask({"what": "die"}, 60)
        assert found == {"reason": "it died (SIGABRT): error: the reason", "died": True}
        assert worker.ask({"what": "exit"}, 60)["reason"] == "it died (exit status 3)"
        assert worker.ask({"what": "sleep"}, 0.5)["reason"] == "it gave no answer within 0.5 s"
        assert worker.ask({"what": ""}, 60)["pid"] != first


def test_imports_have_a_limit_of_their_own(pool, monkeypatch):
    with pool.lease("small_worker", "it") as worker:
        found = worker.ask({"what": ""}, 60, {"what": "die"})
        assert found["reason"] == "it died (SIGABRT): error: the reason"
        exchange, asked = worker._exchange, []
        monkeypatch.setattr(worker, "_exchange", lambda *given: asked.append(given) or exchange(*given))
        for _ in range(2):
            assert worker.ask({"what": ""}, 60, {"what": "write much"})["number"] == 1
        warm_up = {"what": "write much"}, worker_pool.START_S
        assert asked == [warm_up, ({"what": ""}, 60), ({"what": ""}, 60)]


def test_what_a_worker_says_after_a_long_log_has_no_hole_before_it(pool):
    with pool.lease("small_worker", "it") as worker:
        worker.ask({"what": "write much"}, 60)
        assert worker.ask({"what": "die"}, 60)["reason"] == "it died (SIGABRT): error: the reason"


def test_a_forked_process_does_not_hide_a_death(pool):
    """The copy of an earlier request holds the connection open, and is gone with the worker."""
    with pool.lease("small_worker", "it") as worker:
        worker.ask({"what": "fork"}, 60)
        children = (
            pathlib.Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
        )
        begun = time.monotonic()
        assert worker.ask({"what": "exit"}, 120)["reason"] == "it died (exit status 3)"
        assert time.monotonic() - begun < 60
        wait_for(lambda: not any(map(is_alive, children)))


def test_a_worker_without_standard_error_is_replaced(pool):
    with pool.lease("small_worker", "it") as worker:
        closed = worker.ask({"what": "close files"}, 60)
        assert "retire" not in closed and not worker.alive
        assert worker.ask({"what": "die"}, 60)["reason"].endswith("error: the reason")


def test_a_worker_never_runs_what_a_file_held_before(pool, tmp_path):
    """Workers outlive a sweep; a kernel that was edited in between must not be measured as it was."""
    with pool.lease("small_worker", "it") as worker:
        assert worker.ask({"what": ""}, 60)["number"] == 1
    # a bytecode cache tells edits apart by second and size
    (tmp_path / "edited.py").write_text("NUMBER = 22")
    with pool.lease("small_worker", "it") as worker:
        assert worker.ask({"what": ""}, 60)["number"] == 22


def test_a_killed_token_ends_its_workers_and_starts_no_other(pool):
    with pool.lease("small_worker", "it", "token") as worker:
        worker.ask({"what": ""}, 60)
        pool.kill("token")
        wait_for(lambda: not worker.alive)
        with pytest.raises(worker_pool.Cancelled):
            worker.ask({"what": ""}, 60)
    with pytest.raises(worker_pool.Cancelled), pool.lease("small_worker", "it", "token"):
        pass


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_with_its_caller_while_code_holds_the_lock(pool, tmp_path, end):
    path = os.pathsep.join([str(ROOT), str(tmp_path), *filter(None, sys.path)])
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, tmp_path / "pid"], env=notebook.child_env(PYTHONPATH=path)
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    worker = int((tmp_path / "pid").read_text())
    assert is_alive(worker)
    os.kill(caller.pid, end)
    caller.wait()
    wait_for(lambda: not is_alive(worker))
