"""The measurements behind the notebook `01_sweep`: the engine of `tilelab.sweep` against triton.autotune, faults, GPUs.

Each experiment is a function that returns a tilelab.results.Record, live or recorded. `python -m ch14.gemm.sweep_experiments
autotune` and `... sweep` run one contender in a fresh process and print one JSON object.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from ch14.gemm import experiments
from tilelab import check, device, faults, gpu_worker, results, sweep, worker_pool
from tilelab.journal import Journal
from tilelab.sweep import Sweep

SIDE = 4096
KERNELS = pathlib.Path(faults.__file__).with_name("faults_kernels.py")


def source(*things) -> str:
    """Hash of the engine, and of what an experiment runs beside it."""
    return results.source_hash(sweep.Sweep, sweep.build_configuration, sweep.measure_configuration, sweep.sort_by_speed, worker_pool, gpu_worker, *things)


def _experiment(name: str, *things, can_run=lambda: device.current().has_tma):
    return lambda rows: results.experiment(name, lambda: source(rows, *things), can_run)(rows)


# ---- the contenders


def autotuned() -> dict:
    """Let triton.autotune choose from the grid at 4096 cubed: {kernel, tuning_s}. Descriptors are given each
    configuration's block shapes by a hook, as in Triton's persistent matmul tutorial."""
    import torch
    import triton

    from ch14 import gemm

    sms = device.current().sms
    a, b, out, *_ = experiments.inputs(SIDE, SIDE, SIDE)
    of = {}

    def shapes(nargs):
        config = of[nargs["BLOCK_M"], nargs["BLOCK_N"], nargs["N_REST"]]
        for name, block in zip(("a_desc", "b_desc", "b_rest_desc", "c_desc"), config.blocks(True)):
            if block:
                nargs[name].block_shape = block

    choices = []
    for config in experiments.grid():
        constants = config.constants(sms, True)
        of[constants["BLOCK_M"], constants["BLOCK_N"], constants["N_REST"]] = config
        choices.append(triton.Config(constants, config.num_warps, config.num_stages, pre_hook=shapes))
    kernel = triton.autotune(choices, key=["M", "N", "K"])(gemm.gemm_persistent_kernel)
    tiles = [gemm._describe(matrix, block) for matrix, block in
             ((a, [64, 64]), (b.T, [64, 64]), (b.T, [64, 64]), (out, [64, 32]))]
    kernel[(sms,)](*tiles, None, None, SIDE, SIDE, SIDE)
    torch.cuda.synchronize()
    best = kernel.best_config
    found = next(config for config, choice in zip(experiments.grid(), choices) if choice is best)
    return {"kernel": found.name, "tuning_s": kernel.bench_time}


def swept() -> dict:
    """The same grid through the engine: {kernel, restarts, timing_s, gpus, measured}."""
    return _walked(careful=False)


def swept_warm() -> dict:
    """The same with as many rounds as a figure that is kept deserves, everything built and every worker started."""
    _walked(careful=False)
    return _walked(careful=True)


def _walked(careful: bool) -> dict:
    walk = Sweep(experiments.grid(), experiments.GemmSpace(SIDE, SIDE, SIDE, careful=careful))
    rows = walk.finish()
    gpus = {row["gpu"] for row in rows if "gpu" in row}
    return {"kernel": walk.winner["kernel"], "timing_s": walk.timing_s, "restarts": walk.restarts, "gpus": len(gpus),
            "measured": sum(row["status"] == "ok" for row in rows)}


def _timed_alone(name: str, cache: str, **env: str) -> dict:
    """Run a contender in a fresh process: what it prints, and `seconds` from start to end."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "ch14.gemm.sweep_experiments", name], capture_output=True, text=True,
                          env={**os.environ, "TRITON_CACHE_DIR": cache, **env}, cwd=worker_pool.ROOT, check=False)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise RuntimeError(f"{name} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return {"name": name, **json.loads(done.stdout.splitlines()[-1]), "seconds": seconds}


# ---- the experiments


@_experiment("sweep_race", autotuned, experiments.GemmSpace, experiments.grid)
def race():
    """96 configurations at 4096 cubed, bf16, cold caches, fresh processes: the engine and triton.autotune, then both
    winners against each other."""
    rows = []
    for name in ("sweep", "autotune"):
        with tempfile.TemporaryDirectory() as empty:
            rows.append(_timed_alone(name, empty))
    return _compared(rows)


def _compared(rows: list[dict]) -> list[dict]:
    """The rows with their winners' times, interleaved with each other and cuBLAS."""
    by_name = {config.name: config for config in experiments.grid()}
    winners = list(dict.fromkeys(row["kernel"] for row in rows))
    finals = dict(zip(winners, experiments.GemmSpace(SIDE, SIDE, SIDE).measure_finalists([by_name[name] for name in winners])))
    return [row | {key: finals[row["kernel"]][key] for key in ("ms", "peer", "peer_ms", "ratio", "tflops")}
            | {"status": "ok", "configurations": len(by_name), "cores": os.cpu_count()} for row in rows]


@_experiment("sweep_faults", faults, KERNELS, can_run=lambda: True)
def faulty():
    """A sweep with every fault injected; the last row counts restarts."""
    with tempfile.TemporaryDirectory() as folder:
        walk = Sweep(faults.configs(), faults.FaultSpace(folder), limit_s=5)
        rows = [{"kernel": row["kernel"], "status": row["status"], "reason": row["reason"].replace(folder, ""),
                 "ms": row.get("ms")} for row in walk.finish()]
    return rows + [{"kernel": "(the sweep)", "status": "ok", "reason": "", "restarts": walk.restarts,
                    "seconds": walk.elapsed_s}]


TUNED_FAULTS = ("wrong result", "failing compiler pass", "illegal memory access", "hang")
PATIENCE_S = 20


def autotuned_fault(fault: str) -> dict:
    """triton.autotune over one configuration that is right and one that has `fault`: {kernel}, if it comes to that."""
    import torch
    import triton

    from tilelab import faults_kernels

    choices = [triton.Config({"BLOCK": 16, "FAULT": ""}), triton.Config({"BLOCK": 1024, "FAULT": fault})]
    kernel = triton.autotune(choices, key=["n"])(faults_kernels.double_kernel)
    size = 1 << 22  # enough for 1,024 elements a program to be faster
    x = torch.randn(size, device="cuda")
    kernel[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, torch.empty_like(x), size)
    torch.cuda.synchronize()
    return {"kernel": kernel.best_config.kwargs["FAULT"] or "the right one"}


def _outcome(fault: str) -> str:
    """What `autotuned_fault` says or dies of, in a process of its own."""
    try:
        done = subprocess.run([sys.executable, "-m", "ch14.gemm.sweep_experiments", fault], capture_output=True, text=True,
                              cwd=worker_pool.ROOT, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE_S} s, then killed"
    if done.returncode == 0:
        return f"chooses: {json.loads(done.stdout)['kernel']}"
    errors = re.findall(r"^[\w.]*Error: .+", done.stderr, re.MULTILINE) or [f"status {done.returncode}"]
    return f"raises: {errors[-1][:90]}"


@_experiment("sweep_autotune_faults", autotuned_fault, _outcome, KERNELS)
def autotune_faults():
    """What triton.autotune makes of a fault among its configurations."""
    found = check.run_side_by_side(*(functools.partial(_outcome, fault) for fault in TUNED_FAULTS))
    return [{"fault": fault, "autotune": outcome, "status": "ok"} for fault, outcome in zip(TUNED_FAULTS, found)]


@_experiment("sweep_cancel", faults)
def cancelled():
    """Cancel a sweep, four times while configurations are timed and once while one hangs: milliseconds from the call to
    the end of the iteration; rows that had come, and of those how many the journal has not."""
    return [_cancelled(experiments.grid(), experiments.GemmSpace(SIDE, SIDE, SIDE), "timing", after) for after in
            (5, 7, 9, 11)] + [_cancelled(faults.configs(("hang",)), faults.FaultSpace(""), "a hang", 2)]


def _cancelled(configs, space, during: str, after: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        if not getattr(space, "folder", True):
            space = faults.FaultSpace(folder)
        journal = Journal(pathlib.Path(folder, "journal.jsonl"))
        walk = Sweep(configs, space, journal=journal)
        while walk.counts.get("ok", 0) < after:
            time.sleep(0.003)
        time.sleep(1 if during == "a hang" else 0)
        begun = time.monotonic()
        walk.cancel()
        walk.finish()
        answered_ms = (time.monotonic() - begun) * 1e3
        came = {key for key, row in walk.rows.items() if "recorded" in row}
        return {"during": during, "answered_ms": answered_ms, "rows": len(came), "status": "ok",
                "lost": len(came - set(journal.rows()))}


@_experiment("sweep_memory")
def memory():
    """Resident memory of this process before and after 500 configurations, in MiB."""
    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    grid = experiments.grid()
    Sweep(grid[:4], experiments.GemmSpace(1024, 1024, 1024)).finish()
    before, rows = resident(), []
    for side in (1024, 1280, 1536, 1792, 2048, 2304):
        some = grid[:500 - len(rows)]
        rows += [row["status"] for row in Sweep(some, experiments.GemmSpace(side, side, side)).finish()]
    return [{"configurations": len(rows), "measured": rows.count("ok"), "before_mib": before, "after_mib": resident(),
             "status": "ok"}]


@_experiment("sweep_gpus", experiments.GemmSpace, experiments.grid,
             can_run=lambda: device.current().has_tma and len(device.same_model_uuids()) > 1)
def gpus():
    """The timing phase of a warm, careful sweep of the grid: on one GPU, and on every visible one of its model; then
    both winners against each other."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for visible in (device.same_model_uuids()[:1], device.same_model_uuids()):
            rows.append(_timed_alone("warm sweep", cache, CUDA_VISIBLE_DEVICES=",".join(visible)))
    return _compared(rows)


if __name__ == "__main__":
    contenders = {"autotune": autotuned, "sweep": swept, "warm sweep": swept_warm}
    print(json.dumps(contenders[sys.argv[1]]() if sys.argv[1] in contenders else autotuned_fault(sys.argv[1])))
