"""Sweep a space of configurations: a model rejects, compilers build in parallel, a GPU checks and times.

Every configuration ends as one row with a reason and a `status`: ok, rejected (it cannot run here), wrong (it ran, but
the result is not right) or failed (it did not build, crashed, hung or ran out of memory). Builds and measurements run
in worker processes that may die. A journal keeps every row on disk, so that a sweep that was cancelled or killed can be
resumed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import logging
import math
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import filelock

from tilelab.runtime import build, device, files, provenance, worker_pool
from tilelab.sweeps.journal import Journal
from tilelab.sweeps.space import Space

_log = logging.getLogger(__name__)
STATUSES = ("ok", "rejected", "wrong", "failed")
FINALISTS = 3
REASON_CHARS = 300  # how much of a reason is kept
BUILDS_AT_ONCE = 64  # builds handed to an executor of the caller's
NOTICE_S = 2  # how long a loop over a sweep waits for a row before it looks whether the sweep waits for a GPU
# What a record of a whole sweep keeps of a row.
RECORDED = (
    "name config kernel shape dtype status reason ms peer_ms ratio tflops gbps registers smem final_ms final_ratio"
).split()


# ---- tasks for an executor, on this machine or another


def build_configuration(space: Space, config: Any, timeout_s: float, cancel_token: object) -> dict:
    """Build a configuration in a process of its own; return status, reason and resources."""
    report = build.build_one(space.job(config), timeout_s, cancel_token=cancel_token)
    fields = "status reason registers spills smem threads programs_per_sm".split()
    counts = {name: count for name, count in report.counts.items() if count}
    return {name: getattr(report, name) for name in fields} | {
        "counts": counts,
        "build_s": round(report.seconds, 3),
    }


def call_in_gpu_worker(
    method: str, space: Space, arguments: tuple, source: str, limit_s: float, gpu: str, cancel_token: object
) -> dict:
    """Call space.method(*arguments) in the worker of `gpu` (a UUID, or "" for the only one).

    Return {"value": ...} or {"reason": ...}, and "lost_worker" where the process died or lost its CUDA context. Sweeps
    on one GPU take turns; `limit_s` does not count the wait.
    """
    visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    lease = worker_pool.lease_worker("tilelab.sweeps.gpu_worker", "the GPU's worker", cancel_token, **visible)
    with _take_turn(gpu, cancel_token), lease as worker:
        warm_up, request = (
            {"method": name, "work": pickle.dumps((space, given)), "source": source}
            for name, given in (("warm_up", ()), (method, arguments))
        )
        if method == "warm_up":
            answer = worker.ask(warm_up, worker_pool.START_S)
        else:
            answer = worker.ask(request, limit_s, warm_up)
        if answer.get("died") or answer.get("lost"):
            worker.stop()
            answer["lost_worker"] = True
        return answer


_waiting_tokens: set = set()  # the cancel tokens of sweeps in this process that wait for a GPU


@contextlib.contextmanager
def _take_turn(gpu: str, cancel_token: object) -> Iterator[None]:
    """Let one sweep at a time measure on a GPU, across processes. Raises Cancelled when the token is killed.

    A waiter holds the `next` lock, so the sweep that measured last cannot take the GPU again before it.
    """

    def is_killed() -> bool:  # called while another sweep has the lock
        _waiting_tokens.add(cancel_token)
        return worker_pool.is_killed(cancel_token)

    following, turn = (
        filelock.FileLock(device.user_lock_path(f"{gpu or device.current_uuid() or 'cpu'}.{which}"))
        for which in ("next", "turn")
    )
    try:
        with following.acquire(poll_interval=0.01, cancel_check=is_killed):
            turn.acquire(poll_interval=0.01, cancel_check=is_killed)
    except filelock.Timeout:
        raise worker_pool.Cancelled from None
    finally:
        _waiting_tokens.discard(cancel_token)
    try:
        yield
    finally:
        turn.release()


class _DaemonThreads(Executor):
    """Run each task in a daemon thread: a script that ends does not wait for a kernel that hangs."""

    def submit(self, task: Callable, *arguments) -> Future:
        future = Future()
        future.set_running_or_notify_cancel()

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
    versions = {
        name: value for name, value in provenance.versions().items() if space.can_measure or name == "triton"
    }
    gpu = device.current().name if space.can_measure else ""
    shared = [repr(space), space.source(), space.target, gpu, versions]
    keys = {hashlib.sha256(repr([*shared, config]).encode()).hexdigest()[:16]: config for config in configs}
    _require_names(keys.values(), space)
    return keys


def _require_names(configs: Iterable, space: Space) -> None:
    """Raise ValueError if two configurations have the same name in their rows."""
    named: dict[str, Any] = {}
    for config in configs:
        name = None
        with contextlib.suppress(Exception):  # its row will say so
            name = space.label(config)["kernel"]
        if name is not None and repr(named.setdefault(name, config)) != repr(config):
            raise ValueError(
                f"two configurations have the name {name[:60]!r}: let str(config) or label(config)['kernel'] tell "
                f"{config!r:.60} and {named[name]!r:.60} apart."
            )


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


def choose_fastest(ranked: Sequence) -> Sequence:
    """Return the fastest three of configurations that are ranked by their first timing."""
    return ranked[:FINALISTS]


def record_rows(configs: Iterable, space: Space) -> list[dict]:
    """Sweep `configs` over `space`, and return the rows with the fields that a record keeps."""
    return [{key: row[key] for key in RECORDED if key in row} for row in Sweep(configs, space).finish()]


def _check_figure(name: str, value: Any) -> float | None:
    """Return `value`. ValueError for what no float can hold, such as 10**400 or NaN."""
    if not (value is None or isinstance(value, (int, float)) and 0 <= value <= sys.float_info.max):
        raise ValueError(f"{name} must be a finite number or None; it is {value!r:.20}.")
    return value


def _read_times(measured: dict) -> dict[str, float | None]:
    return {name: _check_figure(name, measured.get(name)) for name in ("ms", "ratio", "spread")}


class Sweep:
    """A sweep of `configs` over `space`, which starts at once in a thread of its own. Iterate over it for rows.

    `for row in sweep` waits for rows, and logs a warning when another sweep keeps it from the GPU. `async for row in
    sweep` lets a notebook go on. Leaving the loop early cancels.
    A row comes once. The fastest three come again with `final_ms` and `final_ratio`: they are timed once more,
    interleaved, before the `winner` is named. `choose_finalists` takes the ranked configurations and returns others in
    place of the fastest three. `quick` measures as the tuner does, by `Space.measure_quickly`.

    `journal` keeps rows. If the journal holds a row made by the same source, configuration, shape, target, GPU and
    versions, that row is returned with `resumed`: True and nothing is measured. `builders` is a
    concurrent.futures.Executor, `measurers` a list of executors that each measure one configuration at a time. By
    default, builds and measurements run in worker processes on this machine, and all visible GPUs of the current model
    take part.

    `limit_s` is the time limit of each build, each measurement and the last comparison; imports do not count. Raises
    ValueError for a limit that is not positive, an empty list of measurers, and a space that a worker cannot import.
    """

    def __init__(
        self,
        configs: Iterable,
        space: Space,
        *,
        journal: Journal | None = None,
        builders: Executor | None = None,
        measurers: Sequence[Executor] | None = None,
        limit_s: float = 60,
        quick: bool = False,
        choose_finalists: Callable[[Sequence], Sequence] = choose_fastest,
    ):
        if not 0 < limit_s < math.inf:
            raise ValueError(f"limit_s must be a positive number of seconds; it is {limit_s}.")
        if measurers is not None and not measurers:
            raise ValueError("measurers must name at least one executor; the list is empty.")
        self.space, self.journal, self.limit_s = space, journal, limit_s
        self.builders, self.measurers = builders, measurers
        self._quickly, self._choose_finalists = "_quickly" * quick, choose_finalists
        if type(space).__module__ == "__main__" and (space.can_measure or builders is not None):
            raise ValueError(
                f"a worker cannot import {type(space).__name__} from __main__: define it in a module."
            )
        self.configs = config_keys(configs, space)
        self.rows: dict[str, dict] = {}
        self.winner: dict | None = None
        self.restarts = 0  # GPU workers that died or hung
        self.timing_s = 0.0  # from the first measurement to the last
        self.cancelled = False
        self._source = space.source()
        self._row_queue = queue.SimpleQueue()
        self._cancel_token = f"{os.getpid()}-{id(self)}-{time.monotonic()}"
        self._start, self._end, self._new_rows = time.monotonic(), None, 0
        self._loop = self._task = None
        self._first_measurement = math.inf
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
        """Return whether more rows may come."""
        return self._end is None

    @property
    def waits_for_gpu(self) -> bool:
        """Return whether another sweep measures on the GPU, and this one waits for its turn."""
        return self._cancel_token in _waiting_tokens

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start, or from start to end."""
        return (self._end or time.monotonic()) - self._start

    @property
    def left_s(self) -> float | None:
        """Estimate the seconds left from the pace so far; None before there is a pace."""
        missing = self.total - len(self.rows)
        return self.elapsed_s * missing / self._new_rows if self._new_rows and self.running else None

    def cancel(self) -> None:
        """Stop at once. Finished rows are kept; what is being built or measured is killed."""
        if self.running:
            self.cancelled = True
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                if self._task:  # first, so that no killed build becomes a row that failed
                    self._loop.call_soon_threadsafe(self._task.cancel)
            worker_pool.kill_workers(self._cancel_token)

    def __iter__(self) -> Iterator[dict]:
        notice_s = NOTICE_S
        try:
            while True:
                try:
                    row = self._next_row(notice_s)
                except queue.Empty:
                    if self.waits_for_gpu:
                        _log.warning("another sweep measures on this GPU; this one waits for its turn")
                        notice_s = None  # once is enough
                    continue
                if row is None:
                    return
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

    def _next_row(self, timeout_s: float | None = None) -> dict | None:
        item = self._row_queue.get(timeout=timeout_s)
        if isinstance(item, dict):
            return item
        self._row_queue.put(None)  # for the next caller
        if item is not None:
            raise item
        return None

    def _run(self) -> None:
        end = None
        try:
            asyncio.run(self._sweep(self._choose_measurers()))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            end = error
        worker_pool.kill_workers(self._cancel_token)
        self._end = time.monotonic()
        self._row_queue.put(end)

    def _choose_measurers(self) -> list[tuple[Executor, str]]:
        """Return (executor, GPU) for each configuration that may be measured at one time."""
        if not self.space.can_measure:
            return []
        if self.measurers is not None:
            return [(executor, "") for executor in self.measurers]
        gpus = device.same_model_uuids()
        return [(_DaemonThreads(), gpu) for gpu in (gpus if len(gpus) > 1 else [""])]

    async def _sweep(self, measurers: list[tuple[Executor, str]]) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        waiting = await self._triage()
        at_once = BUILDS_AT_ONCE
        if self.builders is None:
            cores = len(os.sched_getaffinity(0))
            self.builders = _DaemonThreads()
            at_once = max(1, cores - 1 if measurers else cores)  # launching needs a core
        build_slots = asyncio.Semaphore(at_once)
        built = asyncio.PriorityQueue() if measurers else None
        measuring = [
            asyncio.create_task(self._measure_built(measurer, built)) for measurer in measurers if waiting
        ]
        await asyncio.gather(
            *(self._process(order, *waiting[order], build_slots, built) for order in sorted(waiting))
        )
        for task in measuring:
            task.cancel()
        if measurers:
            await self._compare_finalists(measurers[0])

    async def _triage(self) -> dict[tuple, tuple[dict, Any]]:
        """Emit the rows that are rejected or resumed; return {(predicted µs, index): (label, configuration)}."""
        recorded = self.journal.rows() if self.journal else {}
        waiting = {}
        for index, (key, config) in enumerate(self.configs.items()):
            if self.cancelled:
                raise asyncio.CancelledError
            label = {"key": key}
            try:
                label = {**self.space.label(config), "key": key}
                predicted_us = _check_figure("predict_us", self.space.predict_us(config))
                reason = self.space.reject(config)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:REASON_CHARS]
                self._emit({**label, "status": "failed", "reason": reason})
                continue
            label["predicted_ms"] = None if predicted_us is None else predicted_us / 1e3
            if reason:
                self._emit({**label, "status": "rejected", "reason": reason}, new=False)
            elif key in recorded:
                self._emit({**recorded[key], **label, "resumed": True}, new=False)
            else:
                waiting[math.inf if predicted_us is None else predicted_us, index] = label, config
        return waiting

    async def _process(
        self,
        order: tuple,
        label: dict,
        config: Any,
        build_slots: asyncio.Semaphore,
        built: asyncio.PriorityQueue | None,
    ) -> None:
        """Bring one configuration to its row: build it, then wait until a measurer has measured it."""
        async with build_slots:
            row = label | await self._call(
                self.builders, build_configuration, self.space, config, self.limit_s, self._cancel_token
            )
        if built is not None and row["status"] == "ok":
            measured = self._loop.create_future()
            built.put_nowait((order, config, measured))
            row = {**row, **self._judge(await measured), **label}
        self._emit(row)

    async def _measure_built(self, measurer: tuple[Executor, str], built: asyncio.PriorityQueue) -> None:
        """Measure what is built, one configuration at a time, those first that are expected to be fastest."""
        await self._ask_gpu(measurer, "warm_up")
        while True:
            _, config, measured = await built.get()
            self._first_measurement = min(time.monotonic(), self._first_measurement)
            measured.set_result(await self._ask_gpu(measurer, f"measure{self._quickly}", config))
            self.timing_s = time.monotonic() - self._first_measurement

    async def _compare_finalists(self, measurer: tuple[Executor, str]) -> None:
        """Time the fastest again, interleaved, and name the winner."""
        ranked = {row["key"]: self.configs[row["key"]] for row in sort_by_speed(self.rows.values())}
        if not ranked:
            return
        chosen = self._choose_finalists([*ranked.values()])
        keys = [key for key, config in ranked.items() if any(config is one for one in chosen)]
        key = hashlib.sha256(" ".join(sorted(keys)).encode()).hexdigest()[:16]
        comparison = (self.journal.rows() if self.journal else {}).get(key)
        if comparison is None:
            configs = [self.configs[key] for key in keys]
            answer = await self._ask_gpu(measurer, f"measure_finalists{self._quickly}", configs)
            comparison = {"key": key, "finals": [], "of": keys}
            with contextlib.suppress(Exception):  # without finals the first ranking stands
                comparison["finals"] = [_read_times(final) for final in answer.get("value") or []]
            if self.journal and comparison["finals"]:
                self.journal.append(comparison)
        for key, final in zip(comparison["of"], comparison["finals"]):
            if final["ms"]:
                times = {f"final_{name}": value for name, value in final.items() if value}
                self._emit(self.rows[key] | times, new=False)
        self.winner = sort_by_speed(self.rows.values())[0]

    async def _ask_gpu(self, measurer: tuple[Executor, str], method: str, *arguments) -> dict:
        executor, gpu = measurer
        answer = await self._call(
            executor,
            call_in_gpu_worker,
            method,
            self.space,
            arguments,
            self._source,
            self.limit_s,
            gpu,
            self._cancel_token,
        )
        self.restarts += answer.get("lost_worker", False)
        return answer

    async def _call(self, executor: Executor, function: Callable, *arguments) -> dict:
        try:
            return await self._loop.run_in_executor(executor, function, *arguments)
        except Exception as error:
            return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}

    def _judge(self, answer: dict) -> dict:
        """Return the fields of a row that measuring gives."""
        value, provenance = answer.get("value"), answer.get("where", {})
        if "value" not in answer:
            return {"status": "failed", "reason": f"{answer['reason'].rstrip('.')}.", **provenance}
        try:
            files.json_line(value, "what it measured")
            if value["status"] not in STATUSES:
                raise ValueError(
                    f"status must be one of {', '.join(STATUSES)}; it is {value['status']!r:.20}."
                )
            _read_times(value)
            return {**value, "reason": str(value.get("reason", ""))[:REASON_CHARS], **provenance}
        except Exception as error:  # NaN, no status, not a dict
            return {
                "status": "failed",
                "reason": f"{type(error).__name__}: {error}"[:REASON_CHARS],
                **provenance,
            }

    def _emit(self, row: dict, new: bool = True) -> None:
        if new:
            # a build or a measurement that was killed did not fail
            if worker_pool.is_killed(self._cancel_token):
                raise asyncio.CancelledError
            row = {**row, "recorded": provenance.utc_now()}
            self._new_rows += 1
            if self.journal:
                self.journal.append(row)
        self.rows[row["key"]] = row
        self._row_queue.put(row)
