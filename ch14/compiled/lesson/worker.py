"""The process for torch.compile: compile a workload in its modes, read what came out, then time them.

Dynamo and Inductor keep state for the life of a process, and a candidate that faults kills its process, so neither runs
in the notebook's process. `measure_modes` is the caller's side.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch

from ch14 import attention
from ch14.compiled.lesson import process, reading
from ch14.compiled.lesson.workloads import COMPILED, TUNED, make_workload, prepare
from tilelab.measure import bench, check
from tilelab.runtime import worker_pool

MODULE, WHAT = "ch14.compiled.lesson.worker", "the compiler's process"
LIMIT_S = 300  # for one step
LOG = logging.getLogger(__name__)
# Modes whose autotuning times every candidate of this mode: with their cache it does not time them again.
TIMED_BY = {TUNED: ("max-autotune", "persistent-tma"), "max-autotune": ("persistent-tma", TUNED)}


def ask(worker: worker_pool.Worker, step: str, timeout_s: float, **request) -> dict:
    """Return the worker's answer to a step, and log the time that it took."""
    begun = time.perf_counter()
    answer = worker.ask({"do": step, **request}, timeout_s)
    subject = " ".join(str(request[key]) for key in ("family", "shape", "mode") if key in request)
    LOG.info("%6.1f s  %s %s %s", time.perf_counter() - begun, step, subject, answer.get("reason", ""))
    return answer


def measure_modes(
    worker: worker_pool.Worker,
    family: str,
    shape: Sequence[int],
    modes: Sequence[str],
    where: str = "cuda",
    timed: bool = True,
) -> list[dict]:
    """Return a row for each of `modes`: the fields of `_compile` and, if `timed`, the times and the kernels that ran.

    A mode that fails, or kills its process, has status "failed" or "unsupported" and its reason. `ratio` is to the
    workload's peer, or to the first mode if the peer is not among `modes`. A mode begins with empty caches, unless one
    before it timed its candidates (TIMED_BY): `caches` names the mode whose caches it used, and a mode that used
    another's has no `compile_s`.
    """
    case = {"family": family, "shape": list(shape), "where": where}
    rows, caches = [], {}
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
        for mode in modes:
            timed_by = next((other for other in TIMED_BY.get(mode, ()) if other in caches), None)
            caches[mode] = caches.get(timed_by, mode)
            found = ask(worker, "compile", LIMIT_S, mode=mode, folder=f"{folder}/{caches[mode]}", **case)
            if timed_by:
                found.pop("compile_s", None)
            found.pop("died", None)
            row = {
                "name": mode,
                "workload": family,
                "shape": list(shape),
                "dtype": "bf16",
                "status": "failed",
            }
            rows.append(row | ({"caches": caches[mode]} if mode in COMPILED else {}) | found)
        ran = [row["name"] for row in rows if row["status"] == "ok"]
        if timed and ran:
            answer = ask(worker, "time", LIMIT_S, modes=ran, folder=folder, **case)
            failed = {"status": "failed", "reason": answer.get("reason", "")}
            for row in rows:
                if row["name"] in ran:
                    row |= answer["rows"][row["name"]] if "rows" in answer else failed
    return rows


# ---- in the process


@functools.lru_cache(maxsize=1)
def _make_workload(family: str, shape: tuple[int, ...], where: str):
    """Return a workload, after freeing the tensors and the compiled code of the last one."""
    _make_reference.cache_clear()
    _prepare.cache_clear()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return make_workload(family, shape, where=where)


@functools.cache
def _make_reference(work) -> tuple:
    """Return inputs, the float64 result, and eager's own error."""
    inputs = work.inputs()
    reference = work.spec(*inputs)
    return inputs, reference, check.relative_error(prepare(work, "eager")(*inputs), reference)


_prepare = functools.cache(prepare)


def _synchronize(work) -> None:
    if work.where == "cuda":
        torch.cuda.synchronize()


def _start(where: str) -> dict:
    """Pay the costs of the first compilation: CUDA's context, the imports of Inductor, its pool of processes."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder, process.use_caches(folder):
        torch.compile(lambda x: x + 1)(torch.ones(64, device=where))
    return {}


def _compile(work, mode: str, folder: str) -> dict:
    """Run `mode` with its caches in `folder`, and check its result.

    Return {status, reason, error, eager_error, tolerance} and, for a compiled mode, {compile_s, decided, winner, calls,
    descriptors, fusions_timed, triton, code}. `compile_s` is the time of the first two calls: a mode with CUDA graphs
    compiles in the first and records in the second. `fusions_timed` counts the templates that Inductor also built with
    the operations that follow the GEMM. The result of the third call is checked.
    """
    inputs, reference, eager_error = _make_reference(work)
    found = {}
    with process.use_caches(folder), reading.record_decisions() as decisions:
        function = _prepare(work, mode)
        _synchronize(work)
        begun = time.perf_counter()
        for _ in range(2):
            function(*inputs)
            _synchronize(work)
        seconds = time.perf_counter() - begun
        if mode in COMPILED:
            graphs, timed = reading.find_modules()
            code = reading.read_code(graphs)
            found = {
                "compile_s": seconds,
                "decided": decisions,
                "winner": reading.find_winners(decisions),
                "calls": reading.list_calls(code),
                "descriptors": len(reading.DESCRIPTOR.findall(code)),
                "fusions_timed": sum(reading.TEMPLATE in reading.read_code([module]) for module in timed),
                "triton": {},
                "code": code,
            }
            for module in graphs if work.where == "cuda" else ():
                found["triton"] |= reading.read_kernels(module, pathlib.Path(folder))
    return {**found, **_judge(function(*inputs).clone(), reference, eager_error, mode)}


def _judge(result, reference, eager_error: float, mode: str) -> dict:
    error = check.relative_error(result, reference)
    tolerance = max(1.5 * eager_error, check.TOLERANCE[result.dtype])
    if mode == "unfused":  # its weights are exp(score), and a score below 8 is rounded to bf16 twice
        tolerance += 8 * 2**-8
    reason = "" if error <= tolerance else f"the error {error:.1e} is above {tolerance:.1e}"
    return {
        "status": "wrong" if reason else "ok",
        "reason": reason,
        "error": error if error < float("inf") else None,
        "eager_error": eager_error,
        "tolerance": tolerance,
    }


def _time(work, modes: list[str], folder: str) -> dict:
    """Return {"rows": {mode: the fields of bench.Timing.row, and the `kernels` that ran}}.

    Each mode is interleaved with the peer alone, because the clock depends on what ran just before: after a slow mode,
    which leaves the tensor core idle, its neighbour would run faster.
    """
    _make_reference.cache_clear()  # the reference takes memory
    candidates = {mode: functools.partial(functools.partial, _prepare(work, mode)) for mode in modes}
    if "course" in modes:  # it builds its descriptors once for given inputs, so that only the launch is timed
        candidates["course"] = functools.partial(attention.prepare, is_causal=work.causal)
    peer = work.peer if work.peer in modes else modes[0]
    rows = {}
    with process.use_caches(
        os.path.join(folder, "again")
    ):  # a new process, after a crash, compiles again here
        for mode in [mode for mode in modes if mode != peer] or [peer]:
            timings = bench.compare(
                {name: candidates[name] for name in (peer, mode)},
                work.inputs,
                peer,
                flops=work.flops,
                warm_s=0.1,
            )
            rows = {peer: timings[peer].row(), **rows, mode: timings[mode].row()}
        kernels = _profile_kernels(work, [mode for mode in modes if rows[mode]["ms"]])
    return {"rows": {mode: {"kernels": kernels.get(mode, []), **rows[mode]} for mode in modes}}


def _profile_kernels(work, modes: list[str], repeats: int = 5) -> dict[str, list[dict]]:
    """Return the kernels and copies {kernel, us} of a call in each mode, by torch's profiler; `us` is a median.

    The repeats are interleaved over the modes. The result is empty if the profiler does not see the launches.
    """
    inputs = work.inputs()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            for mode in modes:
                torch.cuda._sleep(1)
                _prepare(work, mode)(*inputs)
                _synchronize(work)
    events = sorted(
        (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA),
        key=lambda event: event.time_range.start,
    )
    calls = reading.split_at_marks(
        [
            {"kernel": reading.shorten_name(event.name), "us": event.time_range.elapsed_us()}
            for event in events
        ]
    )
    if len(calls) != repeats * len(modes):
        return {}
    return {
        mode: [
            {"kernel": launches[0]["kernel"], "us": statistics.median(launch["us"] for launch in launches)}
            for launches in zip(*calls[index :: len(modes)])
        ]
        for index, mode in enumerate(modes)
    }


def _do(do: str, where: str, family: str = "", shape=(), **request) -> dict:
    if do == "start":
        return _start(where)
    work = _make_workload(family, tuple(shape), where)
    return _compile(work, **request) if do == "compile" else _time(work, **request)


if __name__ == "__main__":
    # Nobody times a CPU: Inductor need not build a program per vector extension.
    if not torch.cuda.is_available():
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    worker_pool.serve(process.answer_with(_do))
