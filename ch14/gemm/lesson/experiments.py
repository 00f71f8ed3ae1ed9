"""The measurements behind `08_ch14_gemm`: inputs, check and timing of a configuration, and the experiments.

Each experiment returns a results.Record: measured now on a GPU with TMA, else the recorded one, which says so.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import torch

from ch14 import gemm
from ch14.gemm import kernels
from ch14.gemm.configs import (
    ITEMSIZE,
    GemmConfig,
    Rates,
    _course,
    configs,
    job,
    parse,
    predict_us,
    rank_configs,
    rejection,
)
from tilelab.measure import bench, check, layer_shapes
from tilelab.records import results
from tilelab.runtime import build, device, provenance

SQUARES = (2048, 4096, 8192)
SMALL_SQUARES = (256, 512, 1024)
LLM_M = (64, 512, 4096, 8192)
LLM_NK = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
RAGGED = ((1000, 1000, 1000), (333, 520, 136), (1, 4096, 4096), (4097, 4104, 4112))
# For fp8, whose rows are whole 16 bytes as well.
RAGGED_FP8 = ((1000, 1008, 1008), (333, 528, 144), (1, 4096, 4096), (4097, 4112, 4112))
LAYER_TIMING = {"rounds": 8, "warm_s": 0.02, "burst_ms": 1.5}
MEASURED = (kernels, gemm.choice, GemmConfig, configs, _course, rejection, rank_configs, predict_us, Rates)
QUICK = {"rounds": 6, "warm_s": 0, "burst_ms": 2}  # to find the fastest few, which are then timed again


def make_inputs(m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k") -> tuple:
    """Return random normal (a, b, out, scale_a, scale_b), with b a weight.T (`layout` "k") or stored by rows ("n").

    The scales are None, or for fp8 one float32 value each.
    """
    where = "cuda" if device.current().capability else "cpu"
    kind = gemm.TORCH[dtype]
    a, weight = (torch.randn(rows, k, device=where).to(kind) for rows in (m, n))
    out = torch.empty(m, n, device=where, dtype=torch.bfloat16 if dtype == "fp8" else kind)
    scales = [torch.rand((), device=where) + 0.5 if dtype == "fp8" else None for _ in range(2)]
    return a, weight.T if layout == "k" else weight.T.contiguous(), out, *scales


def prepare_cublas(a, b, out, scale_a=None, scale_b=None):
    """Return a function that computes the same by cuBLAS: torch.mm, or for fp8 _scaled_mm with fast accumulation."""
    if scale_a is None:
        return lambda: torch.mm(a, b, out=out)
    return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=True)


def verify(config, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k") -> dict:
    """Return a row of tilelab.measure.check with the error against float64; it may be 1.5 times the error of cuBLAS."""
    a, b, out, *scales = make_inputs(m, n, k, dtype, layout)
    named = dict(zip(("scale_a", "scale_b"), scales))
    peer = prepare_cublas(a, b, out, *scales) if a.is_cuda else None
    return check.compare(
        lambda a, b, out: gemm.gemm(a, b, out=out, config=config, **named),
        lambda a, b: gemm.spec(a, b, **named),
        [(str(config), (a, b))],
        out=lambda a, b: ((m, n), out.dtype),
        peer=peer and (lambda a, b: peer()),
    )[0]


def measure(config, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k", **timing) -> dict:
    """Check `config`, then time it against cuBLAS alone, so that no third kernel heats the chip between the two.

    `timing` are options of bench.compare. Return {status, reason, error, peer_error}, and when the status is ok also
    {ms, peer_ms, ratio, spread, tflops} and `peak_mib`, the memory that a call needs at most, its matrices included.
    """
    verdict = verify(config, m, n, k, dtype, layout)
    row = {key: verdict.get(key) for key in ("status", "reason", "error", "peer_error")}
    if row["status"] != "ok":
        return row
    timed = time_against_cublas([config], m, n, k, dtype, layout, **timing)[0]
    return row | timed | {"peak_mib": _measure_peak_mib(config, m, n, k, dtype, layout)}


def _measure_peak_mib(config, m: int, n: int, k: int, dtype: str, layout: str) -> float:
    before = torch.cuda.memory_allocated()
    a, b, out, *scales = make_inputs(m, n, k, dtype, layout)
    torch.cuda.reset_peak_memory_stats()  # random numbers are made in float32, which does not count
    gemm.prepare(a, b, out=out, **dict(zip(("scale_a", "scale_b"), scales)), config=config)()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_against_cublas(chosen: list, m: int, n: int, k: int, dtype: str, layout: str, **how) -> list[dict]:
    """Time configurations and cuBLAS interleaved; return the fields of bench.Timing.row for each configuration."""

    def prepare(config):
        return lambda a, b, out, scale_a, scale_b: gemm.prepare(
            a, b, out=out, scale_a=scale_a, scale_b=scale_b, config=config
        )

    candidates = {"cuBLAS": prepare_cublas, **{config.name: prepare(config) for config in chosen}}
    fresh = functools.partial(make_inputs, m, n, k, dtype, layout)
    timings = bench.compare(candidates, fresh, "cuBLAS", flops=2 * m * n * k, **how)
    rows = [timings[config.name].row() for config in chosen]
    return [{key: value for key, value in row.items() if key != "name"} for row in rows]


def label(
    config: GemmConfig, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k", which: str = ""
) -> dict:
    """Return the fields of a row that name its configuration and its case."""
    names = {"name": which or "course", "config": config.name, "kernel": config.name}
    return names | {"shape": [m, n, k], "dtype": dtype, "layout": layout}


def add_bandwidth(row: dict, gpu: str) -> dict:
    """Return a measured row with `gbps`, the bytes of A, B and C moved once over the row's time.

    `floor_percent` is the time of these bytes at the bandwidth in the datasheet of `gpu` over the row's time. It is
    left out where the datasheet is not known.
    """
    if not row.get("ms"):
        return row
    (m, n, k), size = row["shape"], ITEMSIZE[row["dtype"]]
    gbps = ((m + n) * k * size + m * n * 2) / row["ms"] / 1e6  # C has 2 bytes per element in every dtype
    known = device.known_gpu(gpu)
    floor = {"floor_percent": 100 * gbps / known.peak_gbps} if known and known.peak_gbps else {}
    return row | {"gbps": gbps} | floor


def source() -> str:
    """Return the hash of what the experiments measure: the kernels, and the configurations with their choice."""
    return provenance.source_hash(*MEASURED)


def compile_ahead(cases: Iterable[tuple]) -> None:
    """Compile the kernels of all cases (configuration, m, n, k, dtype, layout) in parallel.

    Cases whose sizes Triton specialises alike share one job.
    """
    here = device.current()
    jobs = [
        job(config, here.target, dtype, layout == "k", here.sms, (m, n, k), dtype == "fp8")
        for config, m, n, k, dtype, layout in cases
    ]
    build.compile_ahead({repr(job): job for job in jobs}.values())


def measure_best(cases: Iterable[tuple]) -> list[dict]:
    """Measure what `config="best"` chooses for each (m, n, k, dtype, layout). All are compiled before one is timed."""
    here, cases = device.current(), list(cases)
    found = [gemm.find_best(*case[:4], case[4] == "k", here.target, here.sms) for case in cases]
    compile_ahead((config, *case) for (config, _), case in zip(found, cases))
    return [
        label(config, *case, "best")
        | measure(config, *case)
        | {"chosen": chosen, "predicted_ms": predict_us(config, *case[:4], here.sms) / 1e3}
        for (config, chosen), case in zip(found, cases)
    ]


experiment = functools.partial(results.experiment, source=source)


@experiment("ch14_gemm_square")
def measure_squares():
    """Measure the best configuration in bf16 at 2048, 4096 and 8192 cubed, with B stored either way."""
    return measure_best((s, s, s, "bf16", layout) for layout in "kn" for s in SQUARES)


@experiment("ch14_gemm_llm")
def measure_llm():
    """Measure bf16 at the shapes of a decoder of 7 to 8 billion parameters: M tokens, weight (N, K), B = weight.T."""
    return measure_best((m, n, k, "bf16", "k") for m in LLM_M for n, k in LLM_NK)


def _measure_products(products, **timing) -> list[dict]:
    """Time "best" beside cuBLAS, interleaved, for (name, shape) of matrix products; `model_ratio` is of the first
    configuration of the course's set, as the model without measurements ranks it."""

    def prepare(config):
        return lambda a, b, out, *_: gemm.prepare(a, b, out=out, config=config)

    here, rows, found = device.current(), [], []
    for name, shape in products:
        best, chosen = gemm.find_best(*shape, "bf16", True, here.target, here.sms)
        by_model = rank_configs("course", *shape, "bf16", here.target, here.sms)[0]
        found.append((name, shape, best, chosen, by_model))
    compile_ahead(
        (config, *shape, "bf16", "k") for _, shape, best, _, other in found for config in (best, other)
    )
    for name, (m, n, k), best, chosen, by_model in found:
        timed = bench.compare(
            {"cuBLAS": prepare_cublas, "best": prepare(best), "model": prepare(by_model)},
            lambda: make_inputs(m, n, k),  # noqa: B023, it is called before the next shape
            "cuBLAS",
            flops=2 * m * n * k,
            **timing,
        )
        more = {"name": name, "chosen": chosen, "model_ratio": timed["model"].ratio}
        rows.append(label(best, m, n, k) | timed["best"].row() | more)
    return rows


@results.experiment("ch14_gemm_layers", lambda: provenance.source_hash(*MEASURED, layer_shapes))
def measure_layers():
    """Time the layers of six models, whose times the choice knows."""
    return _measure_products(layer_shapes.list_products(), **LAYER_TIMING)


@results.experiment("ch14_gemm_held_out", lambda: provenance.source_hash(*MEASURED, layer_shapes))
def measure_held_out():
    """Time layers of models that no table holds, at numbers of tokens that no table holds."""
    return _measure_products(layer_shapes.list_held_out(), warm_s=0.05, burst_ms=2)


@experiment("ch14_gemm_ragged")
def measure_ragged():
    """Measure bf16 at sizes that no tile divides."""
    return measure_best((*shape, "bf16", layout) for layout in "kn" for shape in RAGGED)


TMA_TILES = (
    "128×128×64 · 4 warps · 3 stages · plain",
    "128×128×64 · 4 warps · 3 stages · persistent · C in 4 parts · 2 per SM · early",
    "128×256×64 · 8 warps · 4 stages · persistent · C in 2 parts",
)
TMA_SHAPES = (*((n, n, n) for n in SQUARES), (512, 6144, 4096))


@experiment("ch14_gemm_tma")
def measure_without_tma():
    """Measure tiles moved by TMA and by pointers, at TMA_SHAPES; `without_tma` is the ratio of their speeds."""
    pairs = [(config, replace(config, pointers=True)) for config in map(parse, TMA_TILES)]
    compile_ahead((config, *shape, "bf16", "k") for pair in pairs for config in pair for shape in TMA_SHAPES)
    rows = []
    for shape in TMA_SHAPES:
        for pair in pairs:
            by_tma, by_pointers = time_against_cublas(pair, *shape, "bf16", "k", rounds=8, warm_s=0.05)
            by_pointers["without_tma"] = by_pointers["ratio"] / by_tma["ratio"]
            for config, which, timed in zip(pair, ("TMA", "pointers"), (by_tma, by_pointers)):
                verdict = verify(config, *shape)
                row = {key: verdict.get(key) for key in ("status", "reason", "error", "peer_error")}
                rows.append(label(config, *shape, which=which) | timed | row)
    return rows


@experiment("ch14_gemm_fp8")
def measure_fp8():
    """Measure e4m3 with one scale per tensor, against cuBLASLt with fast accumulation."""
    return measure_best((s, s, s, "fp8", "k") for s in SQUARES)


@experiment("ch14_gemm_latency")
def measure_latency():
    """Measure one call from end to end, launch and completion, at 512 cubed: microseconds in `us`."""
    a, b, out, *_ = make_inputs(512, 512, 512)
    here = device.current()
    plain = parse("64×128×32 · 4 warps · 1 stage · plain")
    persistent = rank_configs("course", 512, 512, 512, "bf16", here.target, here.sms)[0]
    calls = {
        "torch.mm": prepare_cublas(a, b, out),
        "prepared, host descriptors": gemm.prepare(a, b, out=out, config=persistent),
        "prepared, device descriptors": gemm.prepare(a, b, out=out, config=plain),
        "gemm(), a repeated call": lambda: gemm.gemm(a, b, out=out, config=persistent),
        "prepare() anew each time": lambda: gemm.prepare(a, b, out=out, config=persistent)(),
    }
    return [{"name": name, "us": bench.measure_call_us(call), "status": "ok"} for name, call in calls.items()]
