"""Processes that do what may crash: one JSON line a request, one a reply; a death or a hang is a reply with the reason.

A caller borrows a child, asks, and puts it back, so that each imports its compiler or opens its GPU once.
"""

from __future__ import annotations

import atexit
import contextlib
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


class Child:
    """`python -m module` in its own process, started when first asked and again after it died.

    `env` are variables it sees beside the caller's; `what` names it in a reason ("the compiler").
    """

    def __init__(self, module: str, what: str, **env: str):
        self.module, self.what, self.env = module, what, env
        self.ticket = self.process = self.said = None
        self.unread = b""
        self.closing = threading.Lock()
        _children.append(self)

    def _start(self) -> None:
        self.said, self.unread = tempfile.TemporaryFile("a+b"), b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **self.env},
            start_new_session=True)  # an interrupt of the notebook is not the child's, and what it started dies with it

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def ask(self, request: dict, timeout_s: float) -> dict:
        """Its answer, or {"reason": why there is none, "died": True}."""
        if not self.alive:
            self.stop()
            self._start()
        request = {**request, "path": [str(ROOT), *filter(None, sys.path)]}
        answer = self._answer(request, timeout_s)
        if answer.get("edited"):  # it would run what a module was before somebody changed its file
            self.stop()
            self._start()
            answer = self._answer(request, timeout_s)
        return answer

    def _answer(self, request: dict, timeout_s: float) -> dict:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError):  # it died between requests; reading says how
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        line = self._line(deadline)
        if line is None:
            self.stop()
            return {"reason": f"{self.what} gave no answer within {timeout_s:g} s", "died": True}
        return json.loads(line) if line else {"reason": self._death(), "died": True}

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
        self.said.seek(0)
        lines = [line for line in self.said.read().decode(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if re.search(r"LLVM ERROR|Assertion|error:|Error|Running pass", line)]
        told = told or lines[-1:]
        self.stop()
        return f"{self.what} died ({how})" + (f": {told[0].strip()[:300]}" if told else "")

    def kill(self) -> None:
        """End its process from any thread; who waits for its answer is told of the death."""
        process = self.process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def stop(self, patience_s: float = STOP_S) -> None:
        """End its process and close its pipes."""
        with self.closing:
            self.kill()
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep what is dead for a while
                    self.process.wait(patience_s)
                for pipe in (self.process.stdin, self.process.stdout, self.said):
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
                self.process = None


class Killed(RuntimeError):
    """Nobody waits for the answer any more."""


@atexit.register
def _end() -> None:
    """All at once, and without waiting for a GPU to let its worker go."""
    for each in _children:
        each.kill()
    for each in _children:
        each.stop(patience_s=0.1)


_children: list[Child] = []
_idle: dict[tuple, list[Child]] = {}
_busy: set[Child] = set()
_killed: set = set()
_lock = threading.Lock()


@contextlib.contextmanager
def borrowed(module: str, what: str, ticket: object = None, **env: str) -> Iterator[Child]:
    """A child that nobody else is asking, kept for the next one afterwards. `kill(ticket)` ends those lent for it, and
    none is lent for it after that: Killed."""
    key = (module, *sorted(env.items()))
    with _lock:
        if ticket in _killed:
            raise Killed("it was cancelled")
        idle = _idle.setdefault(key, [])
        found = idle.pop() if idle else Child(module, what, **env)
        found.ticket = ticket
        _busy.add(found)
    try:
        yield found
    except BaseException:
        found.stop()  # its answer, if one comes, belongs to nobody
        raise
    finally:
        with _lock:
            _busy.discard(found)
            found.ticket = None
            idle.append(found)


def kill(ticket: object) -> None:
    """End the processes of the children that are busy for `ticket`, for good."""
    with _lock:
        _killed.add(ticket)
        for child in _busy:
            if child.ticket == ticket:
                child.kill()


def serve(answer: Callable[[dict], dict]) -> None:
    """In the child: reply to each request. Standard error is a file that the caller reads when the child dies."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints is no answer
    requests = queue.SimpleQueue()
    files: dict[str, int] = {}

    def read():
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # the caller is gone: so is all interest in what still runs, or hangs

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = json.loads(requests.get())
        os.ftruncate(2, 0)
        sys.path[:] = request.pop("path")
        reply = {"edited": True} if _edited(files) else answer(request)
        answers.write(json.dumps(reply, default=lambda scalar: scalar.item()) + "\n")
        answers.flush()
        _edited(files)


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
