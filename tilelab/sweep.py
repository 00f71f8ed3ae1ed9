"""Sweep a space of configurations: reject by a model, build in parallel, check, then time; one row per configuration.

Every configuration ends as one row with a `status`: ok, rejected (it cannot run here), wrong (it ran, but the result is
not right) or failed (it could not be built, crashed, hung or ran out of memory), with the reason. Builds and
measurements run in worker processes that may die. A journal keeps every row on disk, so that a sweep that was cancelled
or killed can be resumed.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import hashlib
import heapq
import math
import os
import pathlib
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any

import filelock

from tilelab import build, device, results, worker_pool
from tilelab.journal import Journal
from tilelab.tunable import Space

STATUSES = ("ok", "rejected", "wrong", "failed")
FINALISTS = 3
REASON_CHARS = 300  # how much of a reason is kept
BUILDS_AT_ONCE = 64  # builds handed to an executor of the caller's
START_S = 180  # how long a worker may take to import torch and to open the GPU


# ---- tasks for an executor, on this machine or another


def build_configuration(space: Space, config: Any, timeout_s: float, cancel_token: object) -> dict:
    """Build a configuration in a process of its own; return status, reason and resources."""
    report = build.build_one(space.job(config), timeout_s, cancel_token=cancel_token)
    counts = {name: count for name, count in report.counts.items() if count}
    return {"status": report.status, "reason": report.reason, "registers": report.registers, "spills": report.spills,
            "smem": report.smem, "threads": report.threads, "programs_per_sm": report.programs_per_sm,
            "counts": counts, "build_s": round(report.seconds, 3)}


def measure_configuration(method: str, space: Space, arguments: tuple, source: str, limit_s: float, gpu: str,
                          cancel_token: object) -> dict:
    """Call space.method(*arguments) in the worker of `gpu` (a UUID, or "" for the only one).

    Return {"value": ...} or {"reason": ...}, and "lost_worker" where the process died or lost its CUDA context. Sweeps
    on one GPU take turns; `limit_s` does not count the wait.
    """
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    with _GpuTurn(gpu), worker_pool.lease_worker("tilelab.gpu_worker", "the GPU's worker", cancel_token,
                                                 **visible) as worker:
        def ask(method, arguments, timeout_s):
            work = base64.b64encode(pickle.dumps((space, arguments))).decode()
            return worker.ask({"method": method, "work": work, "source": source}, timeout_s)

        answer = {}
        if method == "warm_up" or not worker.alive:  # imports count to no configuration's limit
            answer = ask("warm_up", (), START_S)
        if method != "warm_up" and not answer.get("died"):
            answer = ask(method, arguments, limit_s)
        if answer.get("died") or answer.get("lost"):
            worker.stop()
            answer["lost_worker"] = True
        return answer


class _GpuTurn:
    """Let one sweep at a time measure on a GPU, in whatever process it runs.

    A waiter holds the `next` lock, so the sweep that measured last cannot take the GPU again before it.
    """

    def __init__(self, gpu: str):
        name = f"tiles-in-flight-{os.getuid()}-{gpu or device.current_uuid() or 'cpu'}"
        paths = [pathlib.Path(tempfile.gettempdir(), f"{name}.{which}.lock") for which in ("next", "turn")]
        self.next, self.turn = (filelock.FileLock(path, thread_local=False) for path in paths)

    def __enter__(self):
        with self.next:
            self.turn.acquire(poll_interval=0.01)

    def __exit__(self, *_):
        self.turn.release()


class _DaemonThreads(Executor):
    """Run each task in a daemon thread: a script that ends does not wait for a kernel that hangs."""

    def submit(self, task: Callable, *arguments) -> Future:
        future = Future()

        def run():
            try:
                future.set_result(task(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


# ---- the sweep


def config_keys(configs: Iterable, space: Space) -> dict[str, Any]:
    """Return {key: configuration}, equal configurations once.

    A key identifies a row: 16 hex digits that change with source, configuration, shape, target and versions, and with
    the GPU where one measures.
    """
    versions = {name: value for name, value in results.versions().items() if space.can_measure or name == "triton"}
    gpu = device.current().name if space.can_measure else ""
    shared = [repr(space), space.source(), space.target, gpu, versions]
    return {hashlib.sha256(repr([*shared, config]).encode()).hexdigest()[:16]: config for config in configs}


def sort_by_speed(rows: Iterable[dict]) -> list[dict]:
    """Return the timed rows, fastest first; the finalists, which were timed against each other, go before the others.

    Rows with a `ratio` are ordered by their speed against the peer that ran beside them, because the chip's clock
    changes during a sweep.
    """
    def order(row: dict) -> tuple:
        is_finalist = "final_ms" in row
        ratio, ms = (row.get(f"final_{name}" if is_finalist else name) for name in ("ratio", "ms"))
        return not is_finalist, 1 / ratio if ratio else ms

    return sorted((row for row in rows if row["status"] == "ok" and row.get("ms")), key=order)


class Sweep:
    """A sweep of `configs` over `space`, which starts at once in a thread of its own. Iterate over it for rows.

    `for row in sweep` waits for rows, `async for row in sweep` lets a notebook go on. Leaving the loop early cancels.
    A row comes once. The fastest three come again with `final_ms` and `final_ratio`: they are timed once more,
    interleaved, before the `winner` is named.

    `journal` keeps rows, and gives back those of the same source, configuration, shape, GPU and versions (`resumed`:
    True); `again` measures failed and wrong ones once more. `builders` is a concurrent.futures.Executor, `timers` a
    list of them with one entry per configuration measured at a time. By default the workers are processes on this
    machine, with one that measures per visible GPU of one model. `limit_s` is the time limit of each build, of each
    measurement and of the last comparison. Raises ValueError for a limit or executors that make no sense, and for a
    space that a worker cannot import.
    """

    def __init__(self, configs: Iterable, space: Space, *, journal: Journal | None = None, again: bool = False,
                 builders: Executor | None = None, timers: Sequence[Executor] | None = None, limit_s: float = 60):
        if not 0 < limit_s < math.inf:
            raise ValueError(f"limit_s must be a positive number of seconds; it is {limit_s}.")
        if timers is not None and not timers:
            raise ValueError("timers must name at least one executor; the list is empty.")
        self.space, self.journal, self.again, self.limit_s = space, journal, again, limit_s
        self.builders, self.timers = builders, timers
        if type(space).__module__ == "__main__" and (space.can_measure or builders is not None):
            raise ValueError(f"a worker cannot import {type(space).__name__} from __main__: define it in a module.")
        self.configs = config_keys(configs, space)
        self.rows: dict[str, dict] = {}
        self.winner: dict | None = None
        self.restarts = 0  # GPU workers that died or hung
        self.timing_s = 0.0  # from the first measurement to the last
        self.cancelled = False
        self._source = space.source()
        self._answers, self._row_queue = queue.SimpleQueue(), queue.SimpleQueue()
        self._cancel_token = f"{os.getpid()}-{id(self)}-{time.monotonic()}"
        self._start, self._end, self._new_rows = time.monotonic(), None, 0
        threading.Thread(target=self._run, name="sweep", daemon=True).start()

    # -- for the caller

    @property
    def total(self) -> int:
        """Return the number of distinct configurations."""
        return len(self.configs)

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of rows so far by status."""
        return dict(collections.Counter(row["status"] for row in list(self.rows.values())))

    @property
    def running(self) -> bool:
        """Whether more rows may come."""
        return self._end is None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start, or from start to end."""
        return (self._end or time.monotonic()) - self._start

    @property
    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the pace so far; None before there is a pace."""
        missing = self.total - len(self.rows)
        return self.elapsed_s * missing / self._new_rows if self._new_rows and self.running else None

    def cancel(self) -> None:
        """Stop at once. Finished rows are kept; what is being built or measured is killed."""
        if self.running:
            self.cancelled = True
            self._answers.put(None)
            worker_pool.kill_workers(self._cancel_token)

    def __iter__(self) -> Iterator[dict]:
        try:
            while (row := self._next_row()) is not None:
                yield row
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[dict]:
        try:
            while (row := await asyncio.to_thread(self._next_row)) is not None:
                yield row
        finally:
            self.cancel()

    def finish(self) -> list[dict]:
        """Wait for the end and return all rows, in the order of the configurations. Raises what ended the sweep."""
        for _ in self:
            pass
        return [self.rows[key] for key in self.configs if key in self.rows]

    # -- the thread of the sweep

    def _next_row(self) -> dict | None:
        item = self._row_queue.get()
        if isinstance(item, dict):
            return item
        self._row_queue.put(None)  # for the next caller
        if item is not None:
            raise item
        return None

    def _run(self) -> None:
        end = None
        try:
            timers = self._choose_timers()
            self._measure_all(timers)
            if timers:
                self._compare_finalists(*timers[0])
        except _Cancelled:
            pass
        except BaseException as error:
            end = error
        worker_pool.kill_workers(self._cancel_token)
        self._end = time.monotonic()
        self._row_queue.put(end)

    def _choose_timers(self) -> list[tuple[Executor, str]]:
        """Return (executor, GPU) for each configuration that may be measured at one time."""
        if not self.space.can_measure:
            return []
        if self.timers is not None:
            return [(executor, "") for executor in self.timers]
        gpus = device.same_model_uuids()
        return [(_DaemonThreads(), gpu) for gpu in (gpus if len(gpus) > 1 else [""])]

    def _triage(self) -> list[tuple]:
        """Emit the rows that are rejected or resumed; return a heap of (predicted ms, index, label, configuration)."""
        recorded = self.journal.rows() if self.journal else {}
        accepted = STATUSES[:2] if self.again else STATUSES
        waiting = []
        for index, (key, config) in enumerate(self.configs.items()):
            if self.cancelled:
                raise _Cancelled
            predicted_ms = self.space.predicted_ms(config)
            label = {**self.space.label(config), "key": key, "predicted_ms": predicted_ms}
            if reason := self.space.reject(config):
                self._emit({**label, "status": "rejected", "reason": reason}, new=False)
            elif recorded.get(key, {}).get("status") in accepted:
                self._emit({**recorded[key], "resumed": True}, new=False)
            else:
                heapq.heappush(waiting, (math.inf if predicted_ms is None else predicted_ms, index, label, config))
        return waiting

    def _measure_all(self, timers: list[tuple[Executor, str]]) -> None:
        """Bring every configuration to its row: builds run in parallel, and what is built waits for a free timer."""
        waiting = self._triage()
        builder, at_once = self.builders, BUILDS_AT_ONCE
        if builder is None:
            cores = len(os.sched_getaffinity(0))
            builder, at_once = _DaemonThreads(), max(1, cores - 1 if timers else cores)  # launching needs a core
        for timer in timers if waiting else ():
            self._ask_gpu(timer, ("warm_up", None), "warm_up", ())
        built, free_timers = [], []
        building = measuring = 0
        first_measurement = None
        while waiting or building or built or measuring:
            while waiting and building < at_once:
                item = heapq.heappop(waiting)
                self._submit(builder, ("build", item, None), build_configuration, self.space, item[-1], self.limit_s,
                             self._cancel_token)
                building += 1
            while built and free_timers:
                item, row = heapq.heappop(built)
                first_measurement = first_measurement or time.monotonic()
                self._ask_gpu(free_timers.pop(), ("measure", row), "measure", item[-1:])
                measuring += 1
            (task, subject, timer), answer = self._next_answer()
            if timer is not None:
                free_timers.append(timer)
            if task == "build":
                building -= 1
                row = {**subject[2], **answer}
                if row["status"] == "ok" and timers:
                    heapq.heappush(built, (subject, row))
                else:
                    self._emit(row)
            elif task == "measure":
                measuring -= 1
                self.timing_s = time.monotonic() - first_measurement
                self._emit({**subject, **self._judge(answer)})

    def _compare_finalists(self, executor: Executor, gpu: str) -> None:
        """Time the fastest again, interleaved, and name the winner."""
        fastest = sort_by_speed(self.rows.values())[:FINALISTS]
        if not fastest:
            return
        keys = [row["key"] for row in fastest]
        key = hashlib.sha256(" ".join(sorted(keys)).encode()).hexdigest()[:16]
        comparison = (self.journal.rows() if self.journal else {}).get(key)
        if comparison is None:
            finalists = [self.configs[key] for key in keys]
            self._ask_gpu((executor, gpu), ("finals", None), "measure_finalists", (finalists,))
            task = None
            while task != "finals":  # a worker may start only now and answer first
                (task, _, _), answer = self._next_answer()
            self.restarts += answer.get("lost_worker", False)
            comparison = {"key": key, "finals": answer.get("value") or [], "of": keys}
            if self.journal and comparison["finals"]:
                self.journal.append(comparison)
        for key, final in zip(comparison["of"], comparison["finals"]):
            if final.get("ms"):
                times = {f"final_{name}": final[name] for name in ("ms", "ratio") if final.get(name)}
                self._emit(self.rows[key] | times, new=False)
        self.winner = sort_by_speed(self.rows.values())[0]

    def _ask_gpu(self, timer: tuple[Executor, str], task: tuple, method: str, arguments: tuple) -> None:
        executor, gpu = timer
        self._submit(executor, (*task, timer), measure_configuration, method, self.space, arguments, self._source,
                     self.limit_s, gpu, self._cancel_token)

    def _submit(self, executor: Executor, task: tuple, function: Callable, *arguments) -> None:
        """Run function(*arguments) in the executor; its answer, or why there is none, comes through _next_answer."""
        def done(future):
            try:
                answer = future.result()
            except CancelledError:
                answer = {"status": "failed", "reason": "its executor cancelled it."}
            except BaseException as error:
                answer = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            self._answers.put((task, answer))

        executor.submit(function, *arguments).add_done_callback(done)

    def _next_answer(self) -> tuple:
        answer = self._answers.get()
        if answer is None or self.cancelled:
            raise _Cancelled
        return answer

    def _judge(self, answer: dict) -> dict:
        """Return the fields that a measurement adds to a row."""
        self.restarts += answer.get("lost_worker", False)
        value, where = answer.get("value"), answer.get("where", {})
        if "value" not in answer:
            return {"status": "failed", "reason": f"{answer['reason'].rstrip('.')}.", **where}
        try:
            results.json_line(value, "what it measured")
            if value["status"] not in STATUSES:
                raise ValueError(f"its status is {value['status']!r}; allowed are {', '.join(STATUSES)}.")
        except (TypeError, ValueError, KeyError) as error:
            return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:REASON_CHARS], **where}
        return {**value, "reason": str(value.get("reason", ""))[:REASON_CHARS], **where}

    def _emit(self, row: dict, new: bool = True) -> None:
        if new:
            row = {**row, "recorded": results.utc_now()}
            self._new_rows += 1
            if self.journal:
                self.journal.append(row)
        self.rows[row["key"]] = row
        self._row_queue.put(row)


class _Cancelled(Exception):
    pass
