"""The measurements behind the notebook `ch10_wgmma_gemm`: inputs, check and timing of a configuration, experiments.

Each experiment is a function that returns a tilelab.results.Record: measured here and now on a GPU with WGMMA, else the
recorded one, labelled as such.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import threading
import time

import torch

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import BREAKS, STEPS, WgmmaConfig, candidates, choose, predicted_us, rejection
from tilelab import bench, build, check, device, results, tensor_map

SQUARES = (2048, 4096, 8192)
LLM = tuple((m, n, k) for m in (64, 512, 4096, 8192) for n, k in
            ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)))
# Ragged, thin and odd: no tile divides them.
RAGGED = ((1, 8, 8), (1, 4096, 4096), (17, 1032, 520), (33, 264, 8), (65, 4104, 1000), (129, 520, 72), (333, 520, 136),
          (1000, 1000, 1000), (4097, 4104, 4112), (8192, 8, 4096), (300, 6152, 14344))
TIMED_RAGGED = ((1, 4096, 4096), (16, 4096, 14336), (100, 5000, 5000), (1000, 1000, 1000), (4097, 4104, 4112),
                (16384, 256, 1024))
QUICK = {"rounds": 6, "warm_s": 0, "burst_ms": 2}
BURST = 40


def source(*more) -> str:
    """Hash of what is measured."""
    configurations = wgmma_gemm.SOURCE.with_name("configs.py")
    return results.source_hash(wgmma_gemm, configurations, tensor_map, wgmma_gemm.SOURCE, *more)


def has_wgmma() -> bool:
    return device.current().has_wgmma


experiment = functools.partial(results.experiment, source=source, can_run=has_wgmma)


def inputs(m: int, n: int, k: int) -> tuple:
    """Random normal (a, b, out) on the GPU: bf16, (m, k), (n, k) and (m, n)."""
    a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    return a, b, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)


def cublas(a, b, out):
    """A function that lets cuBLAS compute the same product, through torch."""
    return lambda: torch.mm(a, b.T, out=out)


def ours(config):
    """A candidate of tilelab.bench."""
    return lambda a, b, out: wgmma_gemm.prepare(a, b, out, config=config)


def verify(config, m: int, n: int, k: int) -> dict:
    """A row of tilelab.check: error against float64, and cuBLAS's own, of which ours may be 1.5 times."""
    a, b, _ = inputs(m, n, k)
    return check.compare(lambda a, b, out: wgmma_gemm.gemm(a, b, out, config), wgmma_gemm.spec, [(str(config), (a, b))],
                         out=lambda a, b: ((m, n), torch.bfloat16), peer=lambda a, b: torch.mm(a, b.T))[0]


def against_cublas(chosen: dict[str, WgmmaConfig], m: int, n: int, k: int, **timing) -> list[dict]:
    """Rows of bench.Timing, one a configuration, all of them and cuBLAS interleaved."""
    found = bench.compare({"cuBLAS": cublas, **{name: ours(config) for name, config in chosen.items()}},
                          lambda: inputs(m, n, k), "cuBLAS", flops=2 * m * n * k, **timing)
    return [{"config": str(config), "shape": [m, n, k], **found[name].row()} for name, config in chosen.items()]


def best(m: int, n: int, k: int, **timing) -> dict:
    """The row of the configuration that a shape gets: checked, timed, with its predicted time."""
    sms = device.current().sms
    config = choose(m, n, k, sms)
    checked = verify(config, m, n, k)
    row = {"name": "best", "config": str(config), "shape": [m, n, k], "status": checked["status"],
           "reason": checked["reason"], "error": checked["error"], "peer_error": checked["peer_error"]}
    if checked["status"] == "ok":
        row |= against_cublas({"best": config}, m, n, k, **timing)[0]
    return row | {"predicted_ms": predicted_us(config, m, n, k, sms) / 1e3}


# ---- right

_compiling = threading.Lock()


def _compile(configs) -> None:
    """Compile them all at once, for others too who ask meanwhile: alone, each launch would wait for its own."""
    with _compiling:
        build.compile_ahead(map(wgmma_gemm.job, configs))


def _compile_every() -> None:
    _compile({*STEPS.values(), *candidates(), *broken_configs()})


@experiment("ch10_gemm_check")
def checked():
    """Every step and every configuration that a shape may get, at sizes that no tile divides."""
    every = {**STEPS, **{str(config): config for config in candidates()}}
    _compile_every()
    rows = []
    for name, config in every.items():
        for shape in RAGGED:
            if config.kernel == "split" and config.cluster > config.steps(shape[2]):
                continue
            rows.append({**verify(config, *shape), "name": name, "shape": list(shape)})
    return rows


def sanitizer_cases(share: int = 0, shares: int = 1) -> None:
    """Every kernel of the module on small and ragged cases, or every so-manyth, for a sanitizer to watch;
    AssertionError when wrong."""
    wrong = []
    for config in (*STEPS.values(), *candidates())[share::shares]:
        for shape in ((130, 264, 392), (300, 136, 1032)):
            row = verify(config, *shape)
            wrong += [f"{config} {shape}: {row['reason']}"] if row["status"] != "ok" else []
    if wrong:
        raise AssertionError("; ".join(wrong))


@results.experiment("ch10_gemm_sanitizer", source, can_run=lambda: has_wgmma() and check.can_sanitize())
def sanitized():
    """What compute-sanitizer finds in `sanitizer_cases`, tool by tool."""
    _compile_every()  # each tool would compile them one after the other
    return check.sanitize("ch10.wgmma_gemm.experiments", shares=6)


# ---- fast


@experiment("ch10_gemm_ladder")
def ladder():
    """The steps at 4096 and 8192 cubed, all of them and cuBLAS interleaved, with what the model predicts for each."""
    rows = []
    _compile(STEPS.values())
    for side in SQUARES[1:]:
        shape, sms = (side,) * 3, device.current().sms
        every = {**STEPS, "best": choose(*shape, sms)}
        rows += [{**row, "predicted_ms": predicted_us(every[row["name"]], *shape, sms) / 1e3}
                 for row in against_cublas(every, *shape)]
    return rows


@experiment("ch10_gemm_squares")
def squares():
    """The best at 2048, 4096 and 8192 cubed, against cuBLAS alone: interleaved medians, then bursts of 40 launches."""
    rows = []
    for side in SQUARES:
        shape = (side,) * 3
        rows.append(best(*shape) | {"how": "interleaved"})
        rows.append({"name": "best", "shape": list(shape), "how": f"bursts of {BURST}", **burst(*shape)})
    return rows


def burst(m: int, n: int, k: int, rounds: int = 12, rest_s: float = 0.05) -> dict:
    """Median of `rounds` bursts of 40 launches, ours and cuBLAS's by turns, each after a rest that cools the chip."""
    sets = [inputs(m, n, k) for _ in range(4)]
    launches = {"peer_ms": [cublas(*each) for each in sets], "ms": [ours("best")(*each) for each in sets]}
    times = {name: [] for name in launches}
    for turn in range(rounds + 1):
        for name in list(launches)[::1 if turn % 2 else -1]:
            torch.cuda.synchronize()
            time.sleep(rest_s)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for call in range(BURST):
                launches[name][call % len(sets)]()
            end.record()
            end.synchronize()
            if turn:  # the first one warms up
                times[name].append(begin.elapsed_time(end) / BURST)
    found = {name: statistics.median(values) for name, values in times.items()}
    return {**found, "peer": "cuBLAS", "ratio": found["peer_ms"] / found["ms"],
            "tflops": 2 * m * n * k / found["ms"] / 1e9, "status": "ok", "reason": "",
            "config": str(choose(m, n, k, device.current().sms))}


@experiment("ch10_gemm_llm")
def llm():
    """Products of a transformer with 4,096 features, at 64 to 8,192 tokens."""
    return [best(*shape) for shape in LLM]


@experiment("ch10_gemm_ragged")
def ragged():
    """Thin and odd shapes, timed."""
    return [best(*shape, **QUICK) for shape in TIMED_RAGGED]


RASTERS = (1, 2, 4, 8, 16, 32, 64)


@experiment("ch10_gemm_raster")
def raster():
    """The 128 x 256 tile at 8192 cubed, with and without a cluster, in groups of 1 to 64 rows of tiles."""
    tile = dataclasses.replace(STEPS["raster"], group=1)
    chosen = {f"{cluster} {group}": dataclasses.replace(tile, cluster=cluster, group=group)
              for cluster in (1, 2) for group in RASTERS}
    _compile(chosen.values())
    rows = against_cublas(chosen, 8192, 8192, 8192, rounds=12)
    return [{**row, "cluster": chosen[row["name"]].cluster, "group": chosen[row["name"]].group} for row in rows]


def _widest(columns: int) -> WgmmaConfig:
    """The persistent tile of 128 x `columns` with as many stages as fit, four at least: C is staged in parts if need
    be."""
    def tile(stages, parts):
        return WgmmaConfig("specialised", 128, columns, stages, consumers=2, parts=parts, persistent=True, early=True,
                           group=16)

    return next(tile(stages, parts) for stages, parts in ((6, 1), (5, 1), (4, 1), (4, 4), (4, 7))
                if columns % (16 * parts) == 0 and not rejection(tile(stages, parts)))


@experiment("ch10_gemm_width")
def width():
    """Tiles of 128 x 128 to 128 x 256 at the three sizes: how evenly they fill the SMs, and what comes of it."""
    rows = []
    for side in SQUARES:
        chosen = {str(columns): _widest(columns) for columns in (128, 160, 192, 208, 224, 256)}
        for row in against_cublas(chosen, side, side, side, rounds=10):
            tiles = chosen[row["name"]].tiles(side, side)
            waves = -(-tiles // device.current().sms)
            rows.append({**row, "columns": int(row["name"]), "tiles": tiles, "waves": waves,
                         "useful": side * side / (waves * device.current().sms * 128 * int(row["name"]))})
    return rows


# ---- seen in time

TIMELINE = (4096, 4096, 1024)
SEEN = {"tile": STEPS["tile"], "ring": STEPS["ring"], "persistent": STEPS["raster"]}
EVENTS = ("waited", "loaded", "arrived", "multiplied", "stored")


def intervals(stamps: list[list[tuple[int, int, int]]], one_group: bool) -> list[dict]:
    """Rows {role, event, step, tile, begin, end} from (cycles, event, step) of each role; cycles from the first stamp.

    Event "wait" is a wait for a barrier, "load" the issue of loads, "product" from the issue of products to their end,
    "store" the epilogue.
    """
    roles = ["loads and multiplies"] if one_group else ["producer", "consumer 0", "consumer 1"]
    zero = min(stamp[0] for role in stamps for stamp in role)
    kinds = {"waited": "wait", "arrived": "wait", "loaded": "load", "multiplied": "product", "stored": "store"}
    rows = []
    for role, seen in zip(roles, stamps):
        before, issued, tile = 0, {}, 0
        for stamp, event, step in seen:
            now, event = stamp - zero, EVENTS[event]
            tile += event == "waited" and step == 0 and bool(before)  # the producer begins the next one
            begin = issued.pop(step) if event == "multiplied" else before
            rows.append({"role": role, "event": kinds[event], "step": step, "tile": tile, "begin": begin, "end": now})
            if event == "arrived":
                issued[step] = now
            before, tile = now, tile + (event == "stored")
    return rows


@experiment("ch10_gemm_timeline")
def timeline():
    """What each warp group of the first CTA did and when, in a build that writes time stamps: 4096 x 4096 x 1024."""
    rows = []
    for name, config in SEEN.items():
        a, b, out = inputs(*TIMELINE)
        trace = torch.zeros(wgmma_gemm.ROLES, wgmma_gemm.TIMELINE_EVENTS, 2, dtype=torch.int64, device="cuda")
        launch = wgmma_gemm.prepare(a, b, out, config=config, trace=trace)
        for _ in range(3):  # a cold first launch would show the compiler's work
            trace.zero_()
            launch()
        torch.cuda.synchronize()
        kept = [[(cycles, code >> 32, code & 0xFFFFFFFF) for cycles, code in role if cycles]
                for role in trace.cpu().tolist()]
        rows += [{"name": name, "config": str(config), "status": "ok", **row}
                 for row in intervals([role for role in kept if role], config.kernel == "one_group")]
    return rows


# ---- what breaks

RUNS = 10


def broken_configs() -> list[WgmmaConfig]:
    """A persistent kernel with two consumers as it is, and with one thing left out at a time."""
    whole = WgmmaConfig("specialised", 128, 128, 4, consumers=2, persistent=True)
    return [dataclasses.replace(whole, leaves_out=what) for what in BREAKS]


def try_broken(what: str) -> dict:
    """{status, reason} of RUNS checks of the kernel that lacks `what`, in this process, which may fault or hang."""
    config = next(config for config in broken_configs() if config.leaves_out == what)
    verify(STEPS["tile"], 256, 256, 256)  # opens the GPU, which takes longer at some times than at others
    print("begun", flush=True)
    wrong = [row["reason"] for row in (verify(config, 1024, 1024, 2048) for _ in range(RUNS)) if row["status"] != "ok"]
    if wrong:
        return {"status": "wrong", "reason": f"wrong in {len(wrong)} of {RUNS} runs: {wrong[-1]}"}
    return {"status": "ok", "reason": f"right in all {RUNS} runs"}


def outcome(what: str, limit_s: float = 10) -> dict:
    """What `try_broken` says in a process of its own, or what became of that."""
    status, said, errors = check.run_snippet("import json; from ch10 import wgmma_trials; "
                                         f"print(json.dumps(wgmma_trials.try_broken({what!r})))", limit_s)
    if status is None:
        return {"status": "failed", "reason": f"no answer within {limit_s:g} s"}
    if status == 0:
        return json.loads(said)
    lines = errors.splitlines() or [f"exit status {status}"]
    return {"status": "failed", "reason": next((line for line in lines if "CUDA error" in line), lines[-1])[:300]}


@experiment("ch10_gemm_broken")
def broken():
    """What comes of a kernel that lacks a line: all at once, for some hang."""
    configs = broken_configs()
    _compile_every()
    found = check.run_side_by_side(*(functools.partial(outcome, config.leaves_out) for config in configs))
    return [{"name": config.leaves_out, "kernel": str(config), **row} for config, row in zip(configs, found)]


# ---- how long until the first result


def first_launch() -> dict:
    """In this process, with nothing compiled before: seconds from source to a result, by part."""
    marks = [time.perf_counter()]
    a, b, out = inputs(256, 512, 256)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    wgmma_gemm.gemm(a, b, out, STEPS["raster"])
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    right = check.relative_error(out, wgmma_gemm.spec(a, b)) < check.TOLERANCE[torch.bfloat16]
    return {"gpu_starts_s": marks[1] - marks[0], "compile_load_launch_s": marks[2] - marks[1],
            "status": "ok" if right else "wrong"}


@experiment("ch10_gemm_first")
def first():
    """`first_launch` in fresh processes, by tilelab.bench.measure_first_launches."""
    return bench.measure_first_launches("ch10.wgmma_gemm.experiments")


# ---- compiled


def built(chosen: dict[str, WgmmaConfig] | None = None, target: str = "sm_90a") -> list[dict]:
    """The steps (or `chosen`) compiled here for `target`, with the instructions that their SASS holds; needs no GPU."""
    chosen = chosen or STEPS
    jobs = {name: wgmma_gemm.job(config, target) for name, config in chosen.items()}
    reports = {report.job.name: report for report in build.build(jobs.values())}
    return [{**reports[job.name].row(), "name": name} for name, job in jobs.items()]


if __name__ == "__main__":
    print(json.dumps(first_launch()))
