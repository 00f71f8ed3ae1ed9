"""A process of its own for torch.compile: compile a workload in its modes, read what came out, then time them.

Dynamo and Inductor keep state for the life of a process, and a candidate that faults takes its process along: neither
may touch the notebook's. `measure` is the caller's side.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

from ch14 import compiled
from ch14.compiled import TUNED, reading
from tilelab import bench, check, device, worker_pool

LIMIT_S = 300  # for a step
# Modes whose autotuning has timed every candidate of this one: from the same cache, it need not time them again.
TIMED_BY = {TUNED: ("max-autotune", "persistent-tma"), "max-autotune": ("persistent-tma", TUNED)}


def quiet(text: str) -> None:
    """Says nothing."""


def ask(worker: worker_pool.Worker, step: str, timeout_s: float, say: Callable[[str], None] = quiet, **more) -> dict:
    """The worker's answer to a step; `say` is told what it took."""
    begun = time.perf_counter()
    answer = worker.ask({"do": step, **more}, timeout_s)
    told = " ".join(str(more[key]) for key in ("family", "shape", "mode") if key in more)
    say(f"{time.perf_counter() - begun:6.1f} s  {step} {told} {answer.get('reason', '')}".rstrip())
    return answer


def measure(worker: worker_pool.Worker, family: str, shape: Sequence[int], modes: Sequence[str], where: str = "cuda",
            timed: bool = True, say: Callable[[str], None] = quiet) -> list[dict]:
    """A row for each of `modes`: what `_compile` found, and with `timed` also the times and the kernels that ran.

    A mode that fails, or kills its process, has status "failed" or "unsupported" and its reason. `ratio` is to the
    workload's peer, or to the first mode where the peer is not among `modes`. A mode begins with empty caches of its
    own, unless one before it has timed its candidates (TIMED_BY): `caches` says whose it used, and a mode that used
    another's has no `compile_s`.
    """
    case = {"family": family, "shape": list(shape), "where": where, "say": say}
    rows, caches = [], {}
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
        for mode in modes:
            timed_by = next((other for other in TIMED_BY.get(mode, ()) if other in caches), None)
            caches[mode] = caches.get(timed_by, mode)
            found = ask(worker, "compile", LIMIT_S, mode=mode, folder=f"{folder}/{caches[mode]}", **case)
            if timed_by:
                found.pop("compile_s", None)
            rows.append({"name": mode, "workload": family, "shape": list(shape), "dtype": "bf16", "status": "failed",
                         **({"caches": caches[mode]} if mode in compiled.COMPILED else {}), **found})
            rows[-1].pop("died", None)
        ran = [row["name"] for row in rows if row["status"] == "ok"]
        if timed and ran:
            answer = ask(worker, "time", LIMIT_S, modes=ran, folder=folder, **case)  # compiles again what a death lost
            for row in rows:
                if row["name"] in ran:
                    row |= answer["rows"][row["name"]] if "rows" in answer else {"status": "failed",
                                                                                 "reason": answer["reason"]}
    return rows


# ---- in the process


@functools.lru_cache(maxsize=1)
def _workload(family: str, shape: tuple[int, ...], where: str):
    """The one before is forgotten, with its tensors and all that was compiled for it."""
    _checked.cache_clear()
    _prepared.cache_clear()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return compiled.workload(family, shape, where=where)


@functools.cache
def _checked(work) -> tuple:
    """Inputs, the float64 reference, and eager's own error."""
    inputs = work.inputs()
    reference = work.spec(*inputs)
    return inputs, reference, check.relative_error(compiled.prepare(work, "eager")(*inputs), reference)


@functools.cache
def _prepared(work, mode: str):
    return compiled.prepare(work, mode)


def _finish(work) -> None:
    if work.where == "cuda":
        torch.cuda.synchronize()


def _start(where: str) -> dict:
    """Pay for what comes once: CUDA's context, the imports of Inductor, its pool of compiler processes."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder, _caches(folder):
        torch.compile(lambda x: x + 1)(torch.ones(64, device=where))
    return {}


@contextlib.contextmanager
def _caches(folder: str):
    """Inductor's and Triton's caches in `folder`, and nothing of them in memory."""
    from torch._inductor.utils import clear_caches

    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    before = {name: os.environ.get(name) for name in names}
    os.makedirs(folder, exist_ok=True)
    clear_caches()
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _compile(work, mode: str, folder: str) -> dict:
    """Run `mode` with its caches in `folder`, empty when they are to be cold, and check its result.

    {status, reason, error, eager_error, tolerance}, and for a compiled mode {compile_s, decided, winner, calls,
    descriptors, fusions_timed, triton, code}. `compile_s` is the time of the first two calls: a mode with CUDA graphs
    compiles in the first and records in the second. The third call's result is the one checked. `fusions_timed` counts
    the templates that were also built with what follows the product in them.
    """
    inputs, reference, eager_error = _checked(work)
    found = {}
    with _caches(folder), reading.listening() as decided:
        function = _prepared(work, mode)
        _finish(work)
        begun = time.perf_counter()
        for _ in range(2):
            function(*inputs)
            _finish(work)
        seconds = time.perf_counter() - begun
        if mode in compiled.COMPILED:
            made, timed = reading.modules()
            code = "\n".join(map(_code, made))
            found = {"compile_s": seconds, "decided": decided, "winner": reading.winners(decided),
                     "calls": reading.calls(code), "descriptors": reading.descriptors(code),
                     "fusions_timed": sum(reading.is_product(_code(module)) for module in timed),
                     "triton": {}, "code": code}
            for module in made if work.where == "cuda" else ():
                found["triton"] |= reading.kernels(module, pathlib.Path(folder))
    return {**found, **_verdict(function(*inputs).clone(), reference, eager_error, mode)}


def _code(module) -> str:
    return pathlib.Path(module.__file__).read_text()


def _verdict(result, reference, eager_error: float, mode: str) -> dict:
    error = check.relative_error(result, reference)
    tolerance = max(1.5 * eager_error, check.TOLERANCE[result.dtype])
    if mode == "unfused":  # a weight is exp(score), the score twice rounded to bf16 and, of random inputs, below 8
        tolerance += 8 * 2**-8
    reason = "" if error <= tolerance else f"the error {error:.1e} is above {tolerance:.1e}"
    return {"status": "wrong" if reason else "ok", "reason": reason, "error": error if error < float("inf") else None,
            "eager_error": eager_error, "tolerance": tolerance}


def _time(work, modes: list[str], folder: str) -> dict:
    """{"rows": {mode: fields of bench.Timing.row, and `kernels`, what ran}}.

    Each mode is interleaved with the peer alone: the chip's clock follows what ran just before, and a slow mode that
    leaves the tensor core idle would be a present to its neighbour. They follow one another, so the chip stays warm.
    """
    _checked.cache_clear()  # the reference's room
    candidates = {mode: compiled.launcher(work, mode, _prepared(work, mode)) for mode in modes}
    peer = work.peer if work.peer in modes else modes[0]
    rows = {}
    with _caches(os.path.join(folder, "again")):
        for mode in [mode for mode in modes if mode != peer] or [peer]:
            timings = bench.compare({name: candidates[name] for name in (peer, mode)}, work.inputs, peer,
                                    flops=work.flops, warm_s=0.1)
            rows = {peer: timings[peer].row(), **rows, mode: timings[mode].row()}
        ran = _ran(work, [mode for mode in modes if rows[mode]["ms"]])
    return {"rows": {mode: {"kernels": ran.get(mode, []), **rows[mode]} for mode in modes}}


def _ran(work, modes: list[str], repeats: int = 5) -> dict[str, list[dict]]:
    """The kernels and copies of a call in each mode, {kernel, us}, by torch's profiler; `us` is the median of repeats,
    the modes in turns. Empty where the profiler does not see them."""
    inputs = work.inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            for mode in modes:
                torch.cuda._sleep(1)
                _prepared(work, mode)(*inputs)
                _finish(work)
    events = sorted((event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA),
                    key=lambda event: event.time_range.start)
    calls = reading.between_marks([{"kernel": reading.short(event.name),
                                             "us": event.time_range.elapsed_us()} for event in events])
    if len(calls) != repeats * len(modes):
        return {}
    return {mode: [{"kernel": each[0]["kernel"], "us": statistics.median(one["us"] for one in each)}
                   for each in zip(*calls[index::len(modes)])] for index, mode in enumerate(modes)}


def _answer(request: dict) -> dict:
    step = request.pop("do")
    try:
        if step == "start":
            return _start(**request)
        work = _workload(request.pop("family"), tuple(request.pop("shape")), request.pop("where"))
        return _compile(work, **request) if step == "compile" else _time(work, **request)
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):
            raise  # the CUDA context is lost, and this process with it
        said = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        missing = isinstance(error, device.Unsupported) or "InvalidCxxCompiler" in str(error)
        return {"status": "unsupported" if missing else "failed",
                "reason": f"{type(error).__name__}: {' '.join(said[:1])}"[:300]}


if __name__ == "__main__":
    worker_pool.serve(_answer)
