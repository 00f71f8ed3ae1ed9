"""Measure the seven languages: each runs in its own worker process, and they take turns on the GPU."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ch14.languages import TITLES, configs
from ch14.languages.lesson import mistakes, worker
from tilelab import ROOT
from tilelab.measure import bench
from tilelab.records import results
from tilelab.runtime import provenance

LIBRARIES = {"deep_gemm": "DeepGEMM (library)", "quack": "quack (library)"}
SQUARES = [(size, size, size) for size in (2048, 4096, 8192)]
LAYERS = [(6144, 4096), (28672, 4096), (4096, 14336)]  # (N, K) of Llama 3 8B: q, k, v; gate, up; down
SHAPES = [*SQUARES, *((tokens, n, k) for tokens in (16, 4096) for n, k in LAYERS)]
SQUARE = (4096, 4096, 4096)
ROUNDS = 10
KERNELS = [worker.FOLDER / name for name in ("cuda_host.py", "gluon_host.py", "cute_host.py")]
KERNELS += [worker.find_source(name) for name in TITLES]
SPILLING = configs.CONFIGS["cutile"][0]  # 128 x 256 with four warps: more sums than registers
SLOW_TO_BUILD = {"tilelang", "helion"}
DIED = {"status": "failed", "reason": "the process ended without an answer"}


class Language:
    """A worker process of one language, which is killed when an answer comes too late."""

    def __init__(self, name: str, path: str | None = None):
        self.name = name
        log = tempfile.NamedTemporaryFile(prefix=f"tiles-{name}-", suffix=".log", delete=False)  # noqa: SIM115
        self.log, self.rest = log.name, b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ch14.languages.lesson.worker", name, *([path] if path else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )

    def ask(self, do: str, limit_s: float = 60, **arguments) -> dict:
        """Return the worker's answer; its status is "ok", "wrong" or "failed", the latter two with a reason."""
        try:
            self.process.stdin.write((json.dumps({"do": do, **arguments}) + "\n").encode())
            self.process.stdin.flush()
        except (OSError, ValueError):
            return DIED
        end = time.monotonic() + limit_s
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            if not ready:
                self.close()
                return {"status": "failed", "reason": f"no answer within {limit_s:.0f} s"}
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                return DIED | {"log": pathlib.Path(self.log).read_text(errors="replace")[-800:]}
            self.rest += piece
        line, self.rest = self.rest.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def start_text(name: str, text: str) -> Iterator[Language]:
    """Start a worker of a kernel that is given as text, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, worker.find_source(name).name)
        path.write_text(text)
        language = Language(name, str(path))
        try:
            yield language
        finally:
            language.close()


@contextlib.contextmanager
def start(names: Sequence[str]) -> Iterator[dict[str, Language]]:
    """Start a worker for each name, and end them all."""
    workers = {name: Language(name) for name in names}
    try:
        yield workers
    finally:
        for each in workers.values():
            each.close()


def ask_all(workers: dict[str, Language], question: Callable[[Language], dict]) -> dict[str, dict]:
    """Ask all workers at the same time; return {name: answer}."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return dict(zip(workers, pool.map(question, workers.values())))


def time_rounds(
    workers: dict[str, Language], shape, chosen: dict[str, dict], rounds: int = ROUNDS
) -> dict[str, dict]:
    """Let the workers take turns at a shape; in a turn cuBLAS runs before and after the kernel, in one process."""
    able = [
        name
        for name in chosen
        if workers[name].ask("hold", shape=shape, config=chosen[name])["status"] == "ok"
    ]
    turns: dict[str, list[dict]] = {name: [] for name in able}
    for turn in range(rounds + 1):
        for name in able if turn % 2 else able[::-1]:
            answer = workers[name].ask("time_round")
            if turn and answer["status"] == "ok":  # the first turn warms up
                turns[name].append(answer)
    rows = {}
    for name, answers in turns.items():
        if len(answers) > 1:
            ratios = [each["peer_ms"] / each["ms"] for each in answers]
            ms, peer_ms = (statistics.median(each[key] for each in answers) for key in ("ms", "peer_ms"))
            row = {"ms": ms, "peer": "cuBLAS", "peer_ms": peer_ms, "ratio": peer_ms / ms}
            m, n, k = shape
            rows[name] = row | {"spread": bench.find_spread(ratios), "tflops": 2 * m * n * k / ms / 1e9}
    return rows


def source() -> str:
    """Return the hash of the kernels, their configurations and the worker."""
    return provenance.source_hash(*KERNELS, configs, worker.Worker, time_rounds)


def _describe(kind: str, name: str, answer: dict, **more) -> dict:
    """Return a row; `kind` says what it is a row of."""
    title = {**TITLES, **LIBRARIES}[name]
    return {"kind": kind, "name": title, "language": name, "reason": "", **more, **answer}


@results.experiment("ch14_languages_speed", source)
def measure_speed(
    names: Sequence[str] = (*TITLES, *LIBRARIES), shapes: Sequence[tuple] = tuple(SHAPES)
) -> list[dict]:
    """Check and tune every language at every shape, then time the tuned kernels in turns.

    A row's `kind` is "language" (versions and seconds), "tuning" (a configuration at a shape), "code" (registers,
    memory and instructions of the tuned kernel at 4096 cubed) or "speed".
    """
    rows = []
    with start(names) as workers:
        about = ask_all(workers, lambda each: each.ask("describe", 120))
        budget = {name: configs.CONFIGS.get(name, [{}]) for name in names}
        checks = ask_all(workers, lambda each: each.ask("check", 120, config=budget[each.name][0]))
        able = [name for name in names if checks[name]["status"] == "ok"]
        pool = ThreadPoolExecutor(len(names))
        building = {}
        for name in able:
            # Helion compiles a kernel per shape: it uses TMA only where it knows the sizes.
            sizes = (
                [SQUARE, *(each for each in shapes if each != SQUARE)]
                if name == "helion"
                else [(256, 256, 256)]
            )
            ask = functools.partial(workers[name].ask, "build", 250, configs=budget[name], shapes=sizes)
            building[name] = pool.submit(ask)
        built = {}
        chosen: dict[tuple, dict[str, dict]] = {shape: {} for shape in shapes}
        tune_s = dict.fromkeys(names, 0.0)
        # These two compile longest, so the others are tuned meanwhile.
        for name in sorted(able, key=lambda name: name in SLOW_TO_BUILD):
            wanted = SLOW_TO_BUILD if name in SLOW_TO_BUILD else set(able) - SLOW_TO_BUILD
            built |= {each: building[each].result() for each in wanted & set(able)}
            for shape in shapes if name in TITLES else [each for each in shapes if each in SQUARES]:
                answer = workers[name].ask("tune", 100, shape=shape, configs=budget[name])
                if answer["status"] != "ok" or answer["best"] is None:
                    reason = answer.get("reason", "no configuration ran")
                    rows.append(_describe("speed", name, {"status": "failed"}, reason=reason, shape=shape))
                    continue
                tune_s[name] += answer["tune_s"]
                chosen[shape][name] = answer["rows"][answer["best"]]["config"]
                if shape == SQUARE and name in TITLES:
                    kept = ("config", "ms", "peer_ms", "ratio", "spread", "status", "reason")
                    rows += [
                        _describe("tuning", name, {key: each.get(key) for key in kept}, shape=shape)
                        for each in answer["rows"]
                    ]
        pool.shutdown()
        for shape in shapes:
            for name, row in time_rounds(workers, shape, chosen[shape]).items():
                rows.append(
                    _describe("speed", name, row, status="ok", shape=shape, config=chosen[shape][name])
                )
        for name in names:
            answer = (
                about[name]
                | checks[name]
                | {"reason": about[name].get("reason") or checks[name].get("reason", "")}
            )
            answer |= {key: built.get(name, {}).get(key) for key in ("build_s", "reasons")}
            rows.append(_describe("language", name, answer, tune_s=tune_s[name]))
    looked_at = [
        (name, chosen[SQUARE][name]) for name in able if name in TITLES and name in chosen.get(SQUARE, {})
    ]
    with ThreadPoolExecutor(4) as pool:
        rows += pool.map(lambda case: inspect(*case), looked_at + [("cutile", SPILLING)] * ("cutile" in able))
    return rows


def inspect(name: str, config: dict) -> dict:
    """Return the row of a kernel's code at 4096 cubed, from a process that compiles no other configuration."""
    with start([name]) as workers:
        return _describe(
            "code", name, workers[name].ask("inspect", 120, shape=SQUARE, config=config), config=config
        )


def find_row(record: results.Record, kind: str, name: str, shape=None) -> dict:
    """Return the first row of a kind and a language, and of a shape if one is given; {} if the record has none."""
    rows = (row for row in record.rows if row["kind"] == kind and row["language"] == name)
    return next((row for row in rows if shape is None or tuple(row["shape"]) == tuple(shape)), {})


def try_mistake(mistake: str, name: str) -> dict:
    """Plant a mistake in a language's kernel and run it on ragged sizes, in a process of its own; return a row."""
    text, config = mistakes.plant(mistake, name, worker.find_source(name).read_text())
    with start_text(name, text) as language:
        answer = language.ask("check", 90, config=config, shapes=[(1000, 1496, 1000)])
    return {"name": TITLES[name], "language": name, "mistake": mistake, "reason": "", **answer}


@results.experiment("ch14_languages_mistakes", lambda: provenance.source_hash(*KERNELS, mistakes))
def measure_mistakes(names: Sequence[str] = tuple(TITLES)) -> list[dict]:
    """Plant the same mistakes in every language, and record what its toolchain says."""
    with ThreadPoolExecutor(7) as pool:
        return list(
            pool.map(
                lambda case: try_mistake(*case),
                [(each, name) for each in mistakes.MISTAKES for name in names],
            )
        )
