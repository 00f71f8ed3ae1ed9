"""Measure for the notebook `09_ch14_sweep` the engine of `tilelab.sweeps.sweep`, and triton.autotune beside it.

Each experiment returns a results.Record, live or recorded. `python -m ch14.sweep.lesson.experiments NAME`
runs one contender (a key of CONTENDERS, or a fault) in a fresh process and prints one JSON object.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ch14.gemm.configs import GemmConfig
from ch14.gemm.kernels import gemm_persistent_kernel
from ch14.gemm.lesson import sweep as gemm_sweep
from ch14.gemm.lesson.experiments import make_inputs
from ch14.gemm.lesson.sweep import GemmSpace
from tilelab.measure import check, layer_shapes
from tilelab.records import results
from tilelab.runtime import device, provenance, worker_pool
from tilelab.sweeps import faults, faults_kernels, gpu_worker, quick, sweep, tune
from tilelab.sweeps.journal import Journal

SIDE = 4096
TUNED_FAULTS = ("wrong result", "failing compiler pass", "illegal memory access", "hang")
PATIENCE_S = 20


class Sweep(sweep.Sweep):
    """The engine. In a test on a GPU, which others use at the same time, its time limit is four times as long."""

    def __init__(self, *arguments, limit_s: float = 60, **options):
        is_shared = os.environ.get("TILES_QUICK") and device.current().capability is not None
        super().__init__(*arguments, limit_s=limit_s * (4 if is_shared else 1), **options)


def _experiment(name: str, *things, can_run=lambda: device.current().has_tma):
    """Register an experiment whose source is the engine, the function itself, and what it runs beside the engine."""
    engine = (sweep.Sweep, sweep.build_configuration, sweep.call_in_gpu_worker, sweep.sort_by_speed)

    def register(rows):
        source = functools.partial(provenance.source_hash, *engine, worker_pool, gpu_worker, rows, *things)
        return results.experiment(name, source, can_run)(rows)

    return register


# ---- the contenders


def grid() -> list[GemmConfig]:
    """Return the configurations that the contenders search: all 96 of `ch14.gemm`, or in a test every third of them."""
    return gemm_sweep.grid()[:: 3 if os.environ.get("TILES_QUICK") else 1]


def run_autotune() -> dict:
    """Let triton.autotune choose from the grid at 4096 cubed, and return {kernel, tuning_s}.

    A hook gives the descriptors the block shapes of each configuration, as in Triton's persistent matmul tutorial.
    """
    sms = device.current().sms
    a, b, out, *_ = make_inputs(SIDE, SIDE, SIDE)
    matrices = {"a": a, "b": b.T, "c": out}

    def set_block_shapes(config, arguments):
        for name, block in config.blocks(True).items():
            if block:
                arguments[name].block_shape = block

    choices = [
        triton.Config(
            config.constants(sms, True),
            config.num_warps,
            config.num_stages,
            pre_hook=functools.partial(set_block_shapes, config),
        )
        for config in grid()
    ]
    kernel = triton.autotune(choices, key=["M", "N", "K"])(gemm_persistent_kernel)
    # A tile in two or three parts needs more descriptors than others, which get them too and do not use them.
    blocks = {name: block for config in grid() for name, block in config.blocks(True).items() if block}
    descriptors = dict.fromkeys(grid()[0].blocks(True)) | {
        name: TensorDescriptor(matrices[name[0]], [SIDE, SIDE], [SIDE, 1], block)
        for name, block in blocks.items()
    }
    kernel[(sms,)](**descriptors, scale_a_ptr=None, scale_b_ptr=None, M=SIDE, N=SIDE, K=SIDE)
    torch.cuda.synchronize()
    best = next(config for config, choice in zip(grid(), choices) if choice is kernel.best_config)
    return {"kernel": best.name, "tuning_s": kernel.bench_time}


def run_sweep(careful: bool = False) -> dict:
    """Run the same grid through the engine, and return {kernel, timing_s, restarts, gpus, measured}."""
    engine = Sweep(grid(), GemmSpace((SIDE, SIDE, SIDE), careful=careful))
    rows = engine.finish()
    return {
        "kernel": engine.winner["kernel"],
        "timing_s": engine.timing_s,
        "restarts": engine.restarts,
        "gpus": len({row["gpu"] for row in rows if "gpu" in row}),
        "measured": sum(row["status"] == "ok" for row in rows),
    }


def run_warm_sweep() -> dict:
    """Run it again with everything built and every worker started, in as many rounds as a kept figure deserves."""
    run_sweep()
    return run_sweep(careful=True)


CONTENDERS = {"autotune": run_autotune, "sweep": run_sweep, "warm sweep": run_warm_sweep}


def _run_in_process(name: str, timeout_s: float | None = None, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ch14.sweep.lesson.experiments", name]
    options = {"capture_output": True, "text": True, "timeout": timeout_s, "check": False}
    return subprocess.run(command, env={**os.environ, **env}, cwd=worker_pool.ROOT, **options)


def _time_in_process(name: str, cache: str, **env: str) -> dict:
    """Run a contender in a fresh process; return what it prints, and the `seconds` from start to end."""
    begun = time.monotonic()
    done = _run_in_process(name, TRITON_CACHE_DIR=cache, **env)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise RuntimeError(f"{name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return {"name": name, **json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


def _compare_winners(rows: list[dict]) -> list[dict]:
    """Add to the rows the times of their winners, interleaved with each other and with cuBLAS."""
    by_name = {config.name: config for config in grid()}
    winners = list(dict.fromkeys(row["kernel"] for row in rows))
    times = GemmSpace((SIDE, SIDE, SIDE)).measure_finalists([by_name[name] for name in winners])
    keys = ("ms", "peer", "peer_ms", "ratio", "tflops")
    of_winner = {name: {key: row[key] for key in keys} for name, row in zip(winners, times)}
    facts = {"status": "ok", "configurations": len(by_name), "cores": os.cpu_count()}
    return [row | of_winner[row["kernel"]] | facts for row in rows]


# ---- the experiments


@_experiment("sweep_race", run_autotune, GemmSpace, gemm_sweep.grid)
def measure_race():
    """Race the engine and triton.autotune on one GPU: 96 configurations at 4096 cubed, bf16, cold caches.

    Then both winners are timed against each other.
    """
    rows, gpu = [], device.same_model_uuids()[0]
    for name in ("sweep", "autotune"):
        with tempfile.TemporaryDirectory() as empty:
            rows.append(_time_in_process(name, empty, CUDA_VISIBLE_DEVICES=gpu))
    return _compare_winners(rows)


@_experiment("sweep_faults", faults, faults_kernels, can_run=lambda: True)
def run_faults():
    """Run a sweep with every fault injected; the last row counts restarts."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Sweep(faults.configs(), faults.FaultSpace(folder=folder), limit_s=5)
        rows = [
            {key: row.get(key) for key in ("kernel", "status", "ms")}
            | {"reason": row["reason"].replace(folder, "")}
            for row in engine.finish()
        ]
    whole = {"kernel": "(the sweep)", "status": "ok", "reason": ""}
    return [*rows, whole | {"restarts": engine.restarts, "seconds": engine.elapsed_s}]


def autotune_one_fault(fault: str) -> dict:
    """Run triton.autotune over a correct configuration and one that has `fault`; return {kernel} if it survives."""
    choices = [triton.Config({"BLOCK": 16, "FAULT": ""}), triton.Config({"BLOCK": 1024, "FAULT": fault})]
    kernel = triton.autotune(choices, key=["n"])(faults_kernels.double_kernel)
    size = 1 << 22  # so large that 1,024 elements per program are faster than 16
    x = torch.randn(size, device="cuda")
    kernel[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, torch.empty_like(x), size)
    torch.cuda.synchronize()
    return {"kernel": kernel.best_config.kwargs["FAULT"] or "the right one"}


def _describe_outcome(fault: str) -> str:
    """Run `autotune_one_fault` in a process of its own, and return its choice or the error that ends it."""
    try:
        done = _run_in_process(fault, PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE_S} s, then killed"
    if done.returncode == 0:
        return f"chooses: {json.loads(done.stdout)['kernel']}"
    errors = re.findall(r"^[\w.]*Error: .+", done.stderr, re.MULTILINE) or [f"status {done.returncode}"]
    return f"raises: {errors[-1][:90]}"


@_experiment("sweep_autotune_faults", autotune_one_fault, _describe_outcome, faults_kernels)
def autotune_faults():
    """Run triton.autotune with one fault at a time among its configurations."""
    outcomes = check.run_side_by_side(
        *(functools.partial(_describe_outcome, fault) for fault in TUNED_FAULTS)
    )
    return [
        {"fault": fault, "autotune": outcome, "status": "ok"}
        for fault, outcome in zip(TUNED_FAULTS, outcomes)
    ]


@_experiment("sweep_cancel", faults)
def measure_cancel():
    """Cancel a sweep, four times while configurations are timed and once while one hangs.

    `answered_ms` is the time from the call to the end of the iteration. `rows` counts the rows that had come, and
    `lost` those that are not in the journal.
    """
    space = GemmSpace((SIDE, SIDE, SIDE))
    with tempfile.TemporaryDirectory() as folder:
        return [
            *(_cancel_sweep(grid(), space, "timing", after) for after in (5, 7, 9, 11)),
            _cancel_sweep(faults.configs(("hang",)), faults.FaultSpace(folder=folder), "a hang", 2),
        ]


def _cancel_sweep(configs, space, during: str, after: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(pathlib.Path(folder, "journal.jsonl"))
        engine = Sweep(configs, space, journal=journal)
        while engine.counts.get("ok", 0) < after and engine.running:
            time.sleep(0.003)
        time.sleep(1 if during == "a hang" else 0)
        begun = time.monotonic()
        engine.cancel()
        engine.finish()
        answered_ms = (time.monotonic() - begun) * 1e3
        came = {key for key, row in engine.rows.items() if "recorded" in row}
        counts = {"rows": len(came), "lost": len(came - set(journal.rows()))}
        return {"during": during, "answered_ms": answered_ms, "status": "ok", **counts}


def _resident_mib() -> float:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@_experiment("sweep_memory")
def measure_memory():
    """Measure the resident memory of this process, in MiB, before and after 500 configurations."""
    Sweep(grid()[:4], GemmSpace((1024, 1024, 1024))).finish()
    before, rows = _resident_mib(), []
    for side in (1024, 1280, 1536, 1792, 2048, 2304):
        some = grid()[: 500 - len(rows)]
        rows += [row["status"] for row in Sweep(some, GemmSpace((side, side, side))).finish()]
    memory = {"before_mib": before, "after_mib": _resident_mib()}
    return [{"configurations": len(rows), "measured": rows.count("ok"), **memory, "status": "ok"}]


@_experiment(
    "sweep_gpus",
    GemmSpace,
    gemm_sweep.grid,
    can_run=lambda: device.current().has_tma and len(device.same_model_uuids()) > 1,
)
def measure_gpus():
    """Measure the timing phase of a warm, careful sweep on one GPU and on all visible ones of its model.

    Then both winners are timed against each other.
    """
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for visible in (device.same_model_uuids()[:1], device.same_model_uuids()):
            rows.append(_time_in_process("warm sweep", cache, CUDA_VISIBLE_DEVICES=",".join(visible)))
    return _compare_winners(rows)


@results.experiment(
    "sweep_regret",
    lambda: provenance.source_hash(
        tune.tune_shape,
        tune.choose_candidates,
        quick,
        gemm_sweep.tuned_configs.__wrapped__,
        gemm_sweep.list_families,
        gemm_sweep.suits,
        measure_regret.__wrapped__,
    ),
)
def measure_regret():
    """Time each configuration of `ch14.gemm` at 20 layers of language models, and see what GemmSpace.share finds.

    `regret` is the time of the fastest of those that the model ranks first over the time of the fastest of all, less 1.
    """
    shapes = [shape for _, shape in layer_shapes.list_products()][2::5][
        : 2 if os.environ.get("TILES_QUICK") else 20
    ]
    rows = []
    for tuned in tune.tune_shapes(GemmSpace, shapes):
        trials = sorted(tuned["trials"], key=lambda trial: trial[1])
        tried = trials[: max(4, math.ceil(GemmSpace.share * len(trials)))]
        fastest, found = (min(us for *_, us in some) for some in (trials, tried))
        rows.append(
            {
                "name": "regret",
                "shape": [tuned[extent] for extent in "mnk"],
                "configurations": len(trials),
                "tried": len(tried),
                "us": found,
                "regret": found / fastest - 1,
                "kernel": min(tried, key=lambda trial: trial[2])[0],
                "status": "ok",
            }
        )
    return rows


if __name__ == "__main__":
    contender = CONTENDERS.get(sys.argv[1], functools.partial(autotune_one_fault, sys.argv[1]))
    print(json.dumps(contender()))
