"""Processes that do what may crash: one JSON line a request, one a reply; a death or a hang is a reply with the reason.

A caller borrows a child, asks, and puts it back, so that each imports its compiler or opens its GPU once.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import queue
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
STOP_S = 10
REAP_S = 1  # what the end of this process waits for all of them
SAID = 1 << 16  # how much of what it wrote is read, from either end


class Killed(RuntimeError):
    """Nobody waits for the answer any more."""


def _path() -> list[str]:
    """Where a child finds what this process can import; in a notebook, "" is the folder it lies in."""
    return [str(ROOT), *(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))]


class Child:
    """`python -m module` in its own process, started when first asked and again after it died.

    `env` are variables it sees beside the caller's; `what` names it in a reason ("the compiler").
    """

    def __init__(self, module: str, what: str, **env: str):
        self.module, self.what, self.env = module, what, env
        self.ticket = self.process = self.said = None
        self.killed = False
        self.unread = b""
        self.numbers = itertools.count()
        self.starting = threading.Lock()

    def _start(self) -> None:
        self.said, self.unread = tempfile.TemporaryFile("a+b"), b""
        path = os.pathsep.join(_path())
        with self.starting:
            if self.killed or _lent.ended:
                self.said.close()
                raise Killed("it was cancelled")
            env = {**os.environ, "PYTHONPATH": path, "TILELAB_PARENT": str(os.getpid()), **self.env}
            # By a thread that lives as long as this process: with that thread the kernel would end the child.
            self.process = _lent.starter.submit(
                subprocess.Popen, [sys.executable, "-m", self.module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.said, env=env, start_new_session=True).result()  # an interrupt is the notebook's alone

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def ask(self, request: dict, timeout_s: float) -> dict:
        """Its answer, or {"reason": why there is none, "died": True}. Raises Killed when it was."""
        if not self.alive:
            self.stop()
            self._start()
        request = {**request, "path": _path()}
        answer = self._answer(request, timeout_s)
        if answer.get("edited"):  # it would run what a module was before somebody changed its file
            self.stop()
            self._start()
            answer = self._answer(request, timeout_s)
        if answer.pop("leaving", False):
            self.stop()
        return answer

    def _answer(self, request: dict, timeout_s: float) -> dict:
        deadline, number = time.monotonic() + timeout_s, next(self.numbers)
        with contextlib.suppress(BrokenPipeError):  # it died between requests; reading says how
            self.process.stdin.write(json.dumps({**request, "number": number}).encode() + b"\n")
            self.process.stdin.flush()
        while line := self._line(deadline):
            answer = json.loads(line)
            if answer.pop("number", None) == number:  # else it is of a process that a request forked
                return answer
        if line is None:
            self.stop()
            return {"reason": f"{self.what} gave no answer within {timeout_s:g} s", "died": True}
        return {"reason": self._death(), "died": True}

    def _line(self, deadline: float) -> bytes | None:
        """One line of its output, empty when it died, None when it took too long."""
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                left = deadline - time.monotonic()
                if left <= 0 or not ready.select(left):
                    return None
                chunk = os.read(self.process.stdout.fileno(), 1 << 20)
                if not chunk:
                    return b""
                self.unread += chunk
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def _death(self) -> str:
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # it closed its output and lives on
            self.stop()
            return f"{self.what} closed its output without an answer"
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        lines = [line for line in self._wrote().splitlines() if line.strip()]
        told = [line for line in lines if re.search(r"LLVM ERROR|Assertion|error:|Error|Running pass", line)]
        told = told or lines[-1:]
        self.stop()
        return f"{self.what} died ({how})" + (f": {told[0].strip()[:300]}" if told else "")

    def _wrote(self) -> str:
        size = os.fstat(self.said.fileno()).st_size
        text = os.pread(self.said.fileno(), SAID, 0)
        if size > SAID:
            text += b"\n" + os.pread(self.said.fileno(), SAID, max(SAID, size - SAID))
        return text.decode(errors="replace")

    def kill(self) -> None:
        """End its process, from any thread, and let it start no other while it is lent: who waits is told of the
        death."""
        with self.starting:
            self.killed = True
            _end_group(self.process)

    def stop(self, within_s: float = STOP_S) -> None:
        """End its process and close its pipes."""
        with self.starting:
            process, self.process = self.process, None
            _end_group(process)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep what is dead for a while
                process.wait(within_s)
            for pipe in (process.stdin, process.stdout, self.said):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _end_group(process: subprocess.Popen | None) -> None:
    """The process and what it has started, even where itself is dead."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class _Lent:
    """The children of this process. A forked process begins with none: two must not ask one child."""

    def __init__(self):
        self.children: list[Child] = []
        self.idle: dict[tuple, list[Child]] = {}
        self.busy: set[Child] = set()
        self.killed: set = set()
        self.lock = threading.Lock()
        self.starter = concurrent.futures.ThreadPoolExecutor(1, "starter")
        self.ended = False


_lent = _Lent()


def _forked() -> None:
    global _lent
    _lent = _Lent()


def _end() -> None:
    """All at once, and without waiting for a GPU to let its worker go. Their pipes stay open: threads wait on them."""
    _lent.ended = True
    for each in _lent.children:
        each.kill()


os.register_at_fork(after_in_child=_forked)
# Earlier than atexit: before that, Python waits for the threads that wait for children.
threading._register_atexit(_end)


@atexit.register
def _reap() -> None:
    """Nobody waits on their pipes any more. All are dead by now, though a GPU may not let its worker go at once."""
    deadline = time.monotonic() + REAP_S
    for each in _lent.children:
        each.stop(max(0, deadline - time.monotonic()))


@contextlib.contextmanager
def lease_worker(module: str, what: str, ticket: object = None, **env: str) -> Iterator[Child]:
    """A child that nobody else is asking, kept for the next one afterwards. `kill(ticket)` ends those lent for it, and
    none is lent for it after that: Killed."""
    key = (module, *sorted(env.items()))
    lent = _lent
    with lent.lock:
        if ticket in lent.killed:
            raise Killed("it was cancelled")
        idle = lent.idle.setdefault(key, [])
        found = idle.pop() if idle else Child(module, what, **env)
        if found not in lent.children:
            lent.children.append(found)
        found.ticket, found.killed = ticket, False
        lent.busy.add(found)
    try:
        yield found
    except BaseException:
        found.stop()  # its answer, if one comes, belongs to nobody
        raise
    finally:
        with lent.lock:
            lent.busy.discard(found)
            found.ticket = None
            idle.append(found)


def kill(ticket: object) -> None:
    """End the processes of the children that are busy for `ticket`, for good."""
    with _lent.lock:
        _lent.killed.add(ticket)
        for each in _lent.busy:
            if each.ticket == ticket:
                each.kill()


# ---- in the child


def serve(answer: Callable[[dict], dict]) -> None:
    """Reply to each request. Standard error is a file that the caller reads when the child dies."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints is no answer
    requests = queue.SimpleQueue()
    files: dict[str, int] = {}

    def read():
        for line in sys.stdin:
            requests.put(line)
        os.killpg(0, signal.SIGKILL)  # the caller is gone: so is all interest in what still runs, or hangs

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = json.loads(requests.get())
        number, sys.path[:] = request.pop("number"), request.pop("path")
        os.ftruncate(2, 0)
        reply = {"edited": True} if _edited(files) else answer(request)
        try:
            os.fstat(1), os.fstat(2)
        except OSError:  # the request closed them; the next one would suffer for it
            reply["leaving"] = True
        text = json.dumps({**reply, "number": number}, default=lambda scalar: scalar.item())
        answers.write(text + "\n")
        answers.flush()
        _edited(files)


def _die_with_parent() -> None:
    """Even while the interpreter is held by code that never ends. Linux only; elsewhere the end of stdin must do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ.get("TILELAB_PARENT", os.getppid())):
        os._exit(0)


def _edited(files: dict[str, int]) -> bool:
    """Whether a file of one of the course's modules, or of the reader's, has changed since it was first seen here."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.endswith(".py") and "site-packages" not in path and not path.startswith(sys.base_prefix):
            with contextlib.suppress(OSError):
                changed = os.stat(path).st_mtime_ns
                if files.setdefault(path, changed) != changed:
                    return True
    return False
