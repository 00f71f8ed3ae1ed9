"""Walk a space of configurations: rejected by a model, built in parallel, checked, then timed; a row as each finishes.

Every configuration ends as one row with a `status`: ok, rejected (it cannot run here), wrong (it ran, the result is not
right) or failed (it could not be build_configuration, or it crashed, hung or ran out of memory), with the reason. Building and timing
happen in processes that may die; a journal keeps every row on disk, so that a sweep can be cancelled, or killed, and
resumed.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import dataclasses
import functools
import hashlib
import heapq
import math
import os
import pathlib
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from typing import Any

import filelock

from tilelab import build, worker_pool, device, results, wire
from tilelab.journal import Journal
from tilelab.tunable import Space

STATUSES = ("ok", "rejected", "wrong", "failed")
FINALISTS = 3
REASON = 300  # letters of a reason that are kept
AT_ONCE = 64  # builds handed to an executor that is not ours
START_S = 180  # a worker imports torch and opens the GPU


# ---- what runs in an executor, here or on another machine


def build_configuration(space: Space, config: Any, timeout_s: float, ticket: object) -> dict:
    """What building said: status, reason, resources. A task for an Executor; the compiler has a process of its own."""
    report = build.build_one(space.job(config), timeout_s, ticket=ticket)
    counts = {name: count for name, count in report.counts.items() if count}
    return {"status": report.status, "reason": report.reason, "registers": report.registers, "spills": report.spills,
            "smem": report.smem, "threads": report.threads, "programs_per_sm": report.programs_per_sm,
            "counts": counts, "build_s": round(report.seconds, 3)}


def measure_configuration(method: str, space: Space, arguments: tuple, source: str, limit_s: float, gpu: str, ticket: object) -> dict:
    """{"value": space.method(*arguments)} or {"reason"}, from the long-lived worker of `gpu` (UUID; "": the only one).

    A task for an Executor. Sweeps on one GPU take turns; waiting for a turn does not count to `limit_s`.
    """
    request = {"method": method, "work": wire.pack((space, arguments)), "source": source, "limit_s": limit_s}
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    with _Turn(gpu), worker_pool.lease_worker("tilelab.gpu_worker", "the GPU's worker", ticket, **visible) as worker:
        answer = _asked(worker, request)
        if answer.get("died") and "SIGBUS" in answer["reason"]:  # somebody cut a library in the compiler's cache short
            worker.env["TRITON_CACHE_DIR"] = _fresh_cache()
            answer = _asked(worker, request) | {"deaths": 1}
        if answer.pop("died", False) or answer.get("lost"):  # nothing more can be measured in that process
            answer["deaths"] = answer.get("deaths", 0) + 1
            worker.stop()
        return answer


def _asked(worker: worker_pool.Worker, request: dict) -> dict:
    if not worker.alive or request["method"] == "warm":  # what takes seconds once counts to no configuration
        work = {"tuple": [request["work"]["tuple"][0], wire.pack(())]}  # a configuration may take long to be made
        answer = worker.ask({**request, "method": "warm", "work": work}, START_S)
        if request["method"] == "warm" or answer.get("died"):
            return answer
    return worker.ask(request, request["limit_s"])


@functools.cache
def _fresh_cache() -> str:
    folder = tempfile.mkdtemp(prefix="tiles-in-flight-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class _Turn:
    """One sweep measures at a time on a GPU, whichever process it is of, and they take turns: who waits holds `next`,
    so that who has just measured cannot be first again."""

    def __init__(self, gpu: str):
        name = f"tiles-in-flight-{os.getuid()}-{gpu or device.current_uuid() or 'cpu'}"
        paths = [pathlib.Path(tempfile.gettempdir(), f"{name}.{which}.lock") for which in ("next", "turn")]
        self.next, self.turn = (filelock.FileLock(path, thread_local=False) for path in paths)

    def __enter__(self):
        with self.next:
            self.turn.acquire(poll_interval=0.01)

    def __exit__(self, *_):
        self.turn.release()


# ---- the sweep


def config_keys(configs: Iterable, space: Space) -> dict[str, Any]:
    """{key: configuration}. A key is what a row is of: 16 hex digits that change with source, configuration, shape and
    target, with the versions and, where it is timed, the GPU. Equal configurations are one."""
    versions = {name: value for name, value in results.versions().items() if space.can_measure or name == "triton"}
    about = [repr(space), space.source(), space.target, device.current().name if space.can_measure else "", versions]
    return {hashlib.sha256(repr([*about, config]).encode(errors="backslashreplace")).hexdigest()[:16]: config
            for config in map(_told, configs)}


def _told(config: Any) -> Any:
    """The configuration; or an Untold, where its text fails: too deep, too long a number, an error of its own."""
    try:
        str(config), repr([config])
        return config
    except Exception as error:
        return Untold(type(config).__qualname__, f"{type(error).__name__}: {device.first_line(error)}"[:REASON])


@dataclasses.dataclass(frozen=True)
class Untold:
    """Stands for a configuration that cannot be told from others: whoever asks for more of it is told why."""

    name: str
    reason: str

    def __getattr__(self, what: str):
        if what.startswith("__"):  # copying and pickling ask, and take no for an answer
            raise AttributeError(what)
        raise ValueError(f"this {self.name} cannot be written as text ({self.reason})")


def sort_by_speed(rows: Iterable[dict]) -> list[dict]:
    """The timed rows, fastest first; those that were timed against each other go before the rest.

    By their speed against the peer that ran beside them, where there is one: the chip's clock changes during a sweep.
    """
    def standing(row: dict) -> tuple:
        again = "final_ms" in row
        ratio, ms = (row.get(f"final_{name}" if again else name) for name in ("ratio", "ms"))
        return not again, 1 / ratio if ratio else ms

    return sorted((row for row in rows if row["status"] == "ok" and row.get("ms")), key=standing)


class Sweep:
    """A sweep of `configs` over `space`, begun at once in a thread of its own; iterate over it for rows.

    `for row in sweep` waits for them, `async for row in sweep` lets a notebook go on; leaving the loop early cancels.
    A row comes once, and once more, with `final_ms` and `final_ratio`, when it was among the fastest three, which are
    timed again interleaved before a `winner` is named.

    `journal` keeps rows and gives those it has of the same source, configuration, shape, device and versions
    (`resumed`: True); with `again` those that failed or were wrong are tried once more. `builders` and `timers` are
    concurrent.futures Executors, ours by default: processes on this machine, a timing worker a visible GPU of one
    model. `timers` is a list, one entry a configuration at a time. `limit_s` is the time that building one
    configuration may take, then measuring it, and the last comparison. ValueError for a time or executors that make no
    sense, and for a space of the notebook's own that would have to be sent to another process.
    """

    def __init__(self, configs: Iterable, space: Space, *, journal: Journal | None = None, again: bool = False,
                 builders: Executor | None = None, timers: Sequence[Executor] | None = None, limit_s: float = 60):
        if not (isinstance(limit_s, (int, float)) and 0 < limit_s < math.inf):
            raise ValueError(f"limit_s must be a positive number of seconds; here it is {limit_s!r}.")
        if timers is not None and not timers:
            raise ValueError("timers must name at least one executor; here the list is empty.")
        self.space, self.journal, self.again, self.limit_s = space, journal, again, limit_s
        self.builders, self.timers = builders, timers
        if type(space).__module__ == "__main__" and (space.can_measure or builders is not None):
            raise ValueError(f"a worker cannot import {type(space).__name__} from __main__: define it in a module.")
        self._source = space.source()
        self.configs = config_keys(configs, space)
        self.rows: dict[str, dict] = {}
        self.winner: dict | None = None
        self.restarts = 0
        self.timing_s = 0.0
        self.cancelled = False
        self._news, self._out = queue.SimpleQueue(), queue.SimpleQueue()
        self._ticket = f"{os.getpid()}-{id(self)}-{time.monotonic()}"
        self._begun, self._ended, self._fresh = time.monotonic(), None, 0
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
        self._thread.start()

    # -- what a caller asks

    @property
    def total(self) -> int:
        """How many distinct configurations there are."""
        return len(self.configs)

    @property
    def counts(self) -> dict[str, int]:
        """Rows so far by status."""
        return dict(collections.Counter(row["status"] for row in list(self.rows.values())))

    @property
    def running(self) -> bool:
        """Whether more rows may come."""
        return self._ended is None

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began, or from there to its end."""
        return (self._ended or time.monotonic()) - self._begun

    @property
    def seconds_left(self) -> float | None:
        """What is left at the pace so far; None before there is a pace."""
        left = self.total - len(self.rows)
        return self.elapsed_s * left / self._fresh if self._fresh and self.running else None

    def cancel(self) -> None:
        """Stop at once: rows that are finished are kept, what is being built or timed is killed."""
        if self.running:
            self.cancelled = True
            self._news.put(None)
            worker_pool.kill(self._ticket)

    def __iter__(self) -> Iterator[dict]:
        try:
            while (row := self._next()) is not None:
                yield row
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[dict]:
        try:
            while (row := await asyncio.to_thread(self._next)) is not None:
                yield row
        finally:
            self.cancel()

    def finish(self) -> list[dict]:
        """Wait for the end; every row, in the order of the configurations. Raises what ended the sweep early."""
        for _ in self:
            pass
        return [self.rows[key] for key in self.configs if key in self.rows]

    # -- the thread

    def _next(self) -> dict | None:
        item = self._out.get()
        if isinstance(item, dict):
            return item
        self._out.put(None)  # whoever asks again
        if item is not None:
            raise item
        return None

    def _run(self) -> None:
        own = []
        try:
            builders, timers, own = self._executors()
            self._walk(builders, timers)
            if not self.cancelled:
                self._final(timers)
            end = None
        except _Cancelled:
            end = None
        except BaseException as error:
            end = error
        for executor in own:
            executor.shutdown(wait=False, cancel_futures=True)
        worker_pool.kill(self._ticket)
        self._ended = time.monotonic()
        self._out.put(end)

    def _executors(self):
        """(executor and how many at a time) for builds, [(executor, gpu)] for timing, and those that are ours."""
        own, builders, count = [], self.builders, AT_ONCE
        if builders is None:
            cores = len(os.sched_getaffinity(0))
            count = max(1, cores - 1 if self.space.can_measure else cores)  # launching wants a core
            builders = ThreadPoolExecutor(count, "build")
            own.append(builders)
        if not self.space.can_measure:
            timers = []
        elif self.timers is not None:
            timers = [(executor, "") for executor in self.timers]
        else:
            gpus = device.same_model_uuids()
            timers = [(ThreadPoolExecutor(1, "time"), gpu) for gpu in (gpus if len(gpus) > 1 else [""])]
            own += [executor for executor, _ in timers]
        return (builders, count), timers, own

    def _walk(self, builders, timers) -> None:
        """Every configuration to its row."""
        known = self.journal.rows() if self.journal else {}
        waiting = []
        for order, (key, config) in enumerate(self.configs.items()):
            if self.cancelled:
                raise _Cancelled
            label = {"kernel": str(config), "key": key}
            try:
                expected = _finite(self.space.predicted_ms(config))
                label = {**self.space.label(config), "key": key, "predicted_ms": expected}
                reason = self.space.reject(config)
            except Exception as error:
                self._emit({**label, "status": "failed", "reason": f"{type(error).__name__}: {error}"}, new=False)
                continue
            if reason:
                self._emit({**label, "status": "rejected", "reason": reason}, new=False)
            elif _usable(known.get(key), STATUSES[:2] if self.again else STATUSES):
                self._emit({**known[key], "resumed": True}, new=False)
            else:
                heapq.heappush(waiting, (math.inf if expected is None else expected, order, label, config))
        builder, at_once = builders
        free, ready = [], []
        building = timing = 0
        for place in timers if waiting else ():
            self._submit(place[0], ("warm", None, place), measure_configuration, "warm", self.space, (), self._source,
                         self.limit_s, place[1], self._ticket)
        begun = None
        while waiting or building or ready or timing:
            while waiting and building < at_once:
                order = heapq.heappop(waiting)
                self._submit(builder, ("built", order, None), build_configuration, self.space, order[-1], self.limit_s, self._ticket)
                building += 1
            while ready and free:
                order, row = heapq.heappop(ready)
                place = free.pop()
                begun = begun or time.monotonic()
                self._submit(place[0], ("timed", (order, row), place), measure_configuration, "measure", self.space, order[-1:],
                             self._source, self.limit_s, place[1], self._ticket)
                timing += 1
            (what, item, place), answer = self._news_of_one()
            if what == "warm":
                free.append(place)
            elif what == "built":
                building -= 1
                row = {**item[2], **answer}
                if row["status"] == "ok" and self.space.can_measure:
                    heapq.heappush(ready, (item, row))
                else:
                    self._emit(row)
            else:
                timing -= 1
                free.append(place)
                self.timing_s = time.monotonic() - begun
                label = {name: item[1][name] for name in item[0][2]}  # of which measuring has no say
                self._emit({**item[1], **self._judged(answer), **label})

    def _final(self, timers) -> None:
        """Time the fastest again, interleaved, and name the winner."""
        fast = sort_by_speed(self.rows.values())[:FINALISTS]
        if not fast or not timers:
            return
        key = hashlib.sha256(" ".join(sorted(row["key"] for row in fast)).encode()).hexdigest()[:16]
        kept = (self.journal.rows() if self.journal else {}).get(key)
        if not _finals(kept):
            executor, gpu = timers[0]
            self._submit(executor, ("finals", None, None), measure_configuration, "finals", self.space,
                         ([self.configs[row["key"]] for row in fast],), self._source, self.limit_s, gpu, self._ticket)
            what = ""
            while what != "finals":  # not a worker that has only now started
                (what, _, _), answer = self._news_of_one()
            kept = {"key": key, "finals": answer.get("value"), "of": [row["key"] for row in fast]}
            self.restarts += answer.get("deaths", 0)
            if _finals(kept) and self.journal:
                self.journal.append(kept)
        for of, final in zip(kept["of"], kept["finals"]) if _finals(kept) else ():
            if final.get("ms") and of in self.rows:
                row = self.rows[of] | {f"final_{name}": final[name] for name in ("ms", "ratio") if final.get(name)}
                self._emit(row, new=False)
        self.winner = sort_by_speed(self.rows.values())[0]

    def _submit(self, executor: Executor, about: tuple, task: Callable, *arguments) -> None:
        def done(future):
            try:
                answer = future.result()
            except CancelledError:
                answer = {"status": "failed", "reason": "its executor cancelled it."}
            except BaseException as error:
                answer = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            self._news.put((about, answer))

        executor.submit(task, *arguments).add_done_callback(done)

    def _news_of_one(self) -> tuple:
        news = self._news.get()
        if news is None or self.cancelled:
            raise _Cancelled
        return news

    def _judged(self, answer: dict) -> dict:
        """The row's part that measuring gives, whatever it gave."""
        self.restarts += answer.get("deaths", 0)
        value, where = answer.get("value"), answer.get("where", {})
        if "value" not in answer:
            return {"status": "failed", "reason": f"{answer['reason'].rstrip('.')}.", **where}
        try:
            results.json_line(value, "what it measured")
            if not _usable(value, STATUSES):
                raise ValueError("what it measured is no row: a dict with a status, and times that are numbers.")
        except (TypeError, ValueError, AttributeError) as error:
            return {"status": "failed", "reason": str(error)[:REASON], **where}
        return {**value, "reason": str(value.get("reason", ""))[:REASON], **where}

    def _emit(self, row: dict, new: bool = True) -> None:
        try:
            results.json_line(row, "its row")
        except Exception as error:  # a label may hold anything
            reason = f"{type(error).__name__}: {error}"[:REASON]
            row = {"key": row["key"], "kernel": str(row.get("kernel")), "status": "failed", "reason": reason}
        if new:
            row = {**row, "recorded": results.utc_now()}
            self._fresh += 1
            if self.journal:
                self.journal.append(row)
        self.rows[row["key"]] = row
        self._out.put(row)


def _finite(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if number else None


def _usable(row: Any, statuses: Sequence[str]) -> bool:
    """Whether it is a row with one of the statuses, and times that are numbers or missing."""
    return isinstance(row, dict) and row.get("status") in statuses and all(
        row.get(name) is None or (_finite(row[name]) or 0) > 0 for name in ("ms", "ratio", "final_ms", "final_ratio"))


def _finals(kept: Any) -> bool:
    """Whether it holds a comparison of the last few: as many timings as configurations."""
    finals, of = (kept.get("finals"), kept.get("of")) if isinstance(kept, dict) else (None, None)
    return isinstance(finals, list) and isinstance(of, list) and len(finals) == len(of) and all(
        isinstance(final, dict) and _usable({**final, "status": "ok"}, STATUSES) for final in finals)


class _Cancelled(Exception):
    pass
