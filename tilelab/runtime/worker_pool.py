"""Run code that may crash or hang in worker processes; a death or a hang becomes an answer with a reason.

A worker is `python -m module`, whose module calls `serve`. It receives dicts and answers each with a dict. A caller
leases a worker, asks it, and gives it back, so that a compiler is imported and a GPU opened once.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from tilelab import ROOT

START_S = 180  # how long a worker may take to import torch and to open the GPU
STOP_S = 10  # how long a killed process may take to disappear
EXIT_S = 1  # the same for all workers together when this process ends
WATCH_S = 0.1  # how often the process of a silent worker is looked at
LOG_BYTES = 1 << 20  # read from each end of what a dead worker wrote


class Cancelled(RuntimeError):
    """The caller's cancel token was killed, so no worker starts for it any more."""

    def __init__(self):
        super().__init__("it was cancelled")


def _import_path() -> list[str]:
    """Return where a worker finds what this process can import ("" in a notebook stands for its folder)."""
    return [str(ROOT), *map(os.path.abspath, sys.path)]


class Worker:
    """`python -m module` in its own process, started by the first request and again after it died.

    `what` names it in a reason ("the compiler"); `env` adds to the environment variables of this process.
    """

    def __init__(self, module: str, what: str, **env: str):
        self.module, self.what, self.env = module, what, env
        self.cancel_token = self.process = self.log_file = self._connection = self._lifeline = None
        self.cancelled = False
        self._lock = threading.Lock()  # a kill must not come between the check of `cancelled` and the start

    def _start(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(_import_path()), **self.env}
        with self._lock:
            if self.cancelled or _pool.closed:
                raise Cancelled
            self._connection, workers_end = Pipe()
            lifeline, self._lifeline = Pipe(duplex=False)
            passed = [workers_end.fileno(), lifeline.fileno()]
            self.log_file = tempfile.TemporaryFile()
            # A session of its own: Ctrl+C in the notebook must not reach the worker.
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *map(str, passed)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self.log_file,
                stderr=self.log_file,
                pass_fds=passed,
                start_new_session=True,
            )
            workers_end.close()
            lifeline.close()

    @property
    def alive(self) -> bool:
        """Return whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def ask(self, request: dict, timeout_s: float, warm_up: dict | None = None) -> dict:
        """Return the answer, or {"reason", "died": True} where none came in time. Raises Cancelled.

        A process that starts is asked `warm_up` first, so that its imports do not count to `timeout_s`: they take long
        on a busy machine.
        """
        answer = self._ask_once(request, timeout_s, warm_up)
        if answer.get("outdated"):  # a source file was edited after the worker had imported it
            self.stop()
            answer = self._ask_once(request, timeout_s, warm_up)
        if answer.pop("retire", False):
            self.stop()
        return answer

    def _ask_once(self, request: dict, timeout_s: float, warm_up: dict | None) -> dict:
        if not self.alive:
            self.stop()
            self._start()
            if warm_up and (answer := self._exchange(warm_up, START_S)).get("died"):
                return answer
        return self._exchange(request, timeout_s)

    def _exchange(self, request: dict, timeout_s: float) -> dict:
        try:
            self._connection.send({**request, "path": _import_path()})
            if self._wait_for_answer(time.monotonic() + timeout_s):
                return self._connection.recv()
            reason = f"gave no answer within {timeout_s:g} s"
        except (EOFError, OSError):
            reason = self._describe_death()
        self.stop()
        return {"reason": f"{self.what} {reason}", "died": True}

    def _wait_for_answer(self, deadline: float) -> bool:
        """Return whether there is an answer or the connection has ended. EOFError where the process has.

        A process that an earlier request forked holds the connection open, so the end of the worker must be looked for.
        """
        while not self._connection.poll(max(0, min(WATCH_S, deadline - time.monotonic()))):
            if not self.alive and not self._connection.poll():
                raise EOFError
            if time.monotonic() > deadline:
                return False
        return True

    def _describe_death(self) -> str:
        try:
            status = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return "closed its connection without an answer"
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        size = os.fstat(self.log_file.fileno()).st_size
        ends = [
            os.pread(self.log_file.fileno(), LOG_BYTES, at) for at in sorted({0, max(0, size - LOG_BYTES)})
        ]
        log = b"\n".join(ends).decode(errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        errors = [
            line for line in lines if re.search(r"LLVM ERROR|Assertion|error:|Error|Running pass", line)
        ]
        return f"died ({how})" + "".join(f": {line[:300]}" for line in (errors or lines[-1:])[:1])

    def kill(self) -> None:
        """End its process, from any thread, and start no other during this lease."""
        with self._lock:
            self.cancelled = True
            _kill_group(self.process)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End its process and close its files. The next request starts another process."""
        with self._lock:
            process, self.process = self.process, None
            _kill_group(process)
        if process is not None:
            # A GPU driver may hold a dead process for a while.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            for file in (self._connection, self._lifeline, self.log_file):
                file.close()


def _kill_group(process: subprocess.Popen | None) -> None:
    """Kill a process and all that it has started, also where it is dead itself."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


class WorkerPool:
    """The workers of this process: idle ones by module and environment, and those that somebody leases."""

    def __init__(self):
        self.idle: dict[tuple, list[Worker]] = collections.defaultdict(list)
        self.busy: set[Worker] = set()
        self.killed_tokens: set = set()
        self.closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lease(self, module: str, what: str, cancel_token: object = None, **env: str) -> Iterator[Worker]:
        """Lease a Worker that nobody else is asking: `with lease_worker("module", "its name in reasons") as worker:`.

        It runs with `env` added to this process's environment variables, and stays for the next lease.
        `kill_workers(cancel_token)` ends the workers that are leased with that token; from then on a lease with it
        raises Cancelled.
        """
        idle = self.idle[module, *sorted(env.items())]
        with self._lock:
            if cancel_token in self.killed_tokens:
                raise Cancelled
            worker = idle.pop() if idle else Worker(module, what, **env)
            worker.cancel_token, worker.cancelled = cancel_token, False
            self.busy.add(worker)
        try:
            yield worker
        except BaseException:
            worker.stop()  # an answer that still comes must not reach the next caller
            raise
        finally:
            with self._lock:
                self.busy.discard(worker)
                worker.cancel_token = None
                idle.append(worker)

    def kill(self, cancel_token: object) -> None:
        """End the processes of all workers that are leased with `cancel_token`, and lease none for it any more."""
        with self._lock:
            self.killed_tokens.add(cancel_token)
            for worker in self.busy:
                if worker.cancel_token == cancel_token:
                    worker.kill()

    def is_killed(self, cancel_token: object) -> bool:
        """Return whether `kill` was called with `cancel_token`, or this process ends, which kills every worker."""
        return self.closed or cancel_token in self.killed_tokens

    def close(self) -> None:
        """Kill all workers, then wait a moment for them to disappear."""
        self.closed = True
        workers = [*self.busy, *(worker for idle in self.idle.values() for worker in idle)]
        for worker in workers:
            worker.kill()
        deadline = time.monotonic() + EXIT_S
        for worker in workers:
            worker.stop(max(0, deadline - time.monotonic()))


_pool = WorkerPool()
os.register_at_fork(after_in_child=_pool.__init__)  # empty there: two processes must not ask the same worker
atexit.register(_pool.close)
lease_worker, kill_workers, is_killed = _pool.lease, _pool.kill, _pool.is_killed


# ---- inside a worker


def serve(answer: Callable[[dict], dict]) -> None:
    """Answer requests until the caller is gone. An answer with "retire": True asks the caller for a fresh process."""
    connection, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    with contextlib.suppress(OSError):  # a sandbox's kernel may not know it
        # The kernel kills this process group when the caller is gone, also while compiled code holds the GIL.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    requests = queue.SimpleQueue()
    edit_times: dict[str, int] = {}
    own_pid = os.getpid()

    def receive():
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        os.killpg(0, signal.SIGKILL)  # the caller is gone, so nobody wants what still runs or hangs

    threading.Thread(target=receive, daemon=True).start()
    while True:
        request = requests.get()
        sys.path[:] = request.pop("path")
        with contextlib.suppress(OSError):  # an earlier request closed its standard error
            os.ftruncate(2, 0)
            os.lseek(2, 0, os.SEEK_SET)  # otherwise the log would begin with a hole as long as the last one
        reply = {"outdated": True} if _is_edited(edit_times) else answer(request)
        if os.getpid() != own_pid:  # the request forked, and this is the copy: its answer belongs to nobody
            os._exit(0)
        try:
            os.fstat(2)
        except OSError:
            reply["retire"] = True  # the next request could not say what it died of
        connection.send(reply)
        _is_edited(edit_times)


def _is_edited(edit_times: dict[str, int]) -> bool:
    """Return whether a file of the course's or the reader's modules has changed since this process first saw it."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if path.endswith(".py") and "site-packages" not in path and not path.startswith(sys.base_prefix):
            with contextlib.suppress(OSError):
                changed = os.stat(path).st_mtime_ns
                if edit_times.setdefault(path, changed) != changed:
                    return True
    return False
