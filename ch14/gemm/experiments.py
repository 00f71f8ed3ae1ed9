"""The measurements behind the notebook `ch14_gemm`: inputs, check and timing of a configuration, and the experiments.

Each experiment is a function that returns a tilelab.results.Record: measured here and now on a GPU with TMA, else the
recorded one, labelled as such.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import torch

from ch14 import gemm
from ch14.gemm.configs import ITEMSIZE, GemmConfig, Rates, _course, configs, ranked, rejection
from ch14.gemm.configs import job as gemm_job
from ch14.gemm.configs import predicted_ms as gemm_predicted_ms
from tilelab import bench, build, check, device, results
from tilelab.sweep import Sweep
from tilelab.tunable import Roofline, TargetSpace, TunableKernel

SQUARES = (2048, 4096, 8192)
LLM_M = (64, 512, 4096, 8192)
LLM_NK = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
RAGGED = ((1000, 1000, 1000), (333, 520, 136), (1, 4096, 4096), (4097, 4104, 4112))
RAGGED_FP8 = ((1000, 1008, 1008), (333, 528, 144), (1, 4096, 4096), (4097, 4112, 4112))  # rows of 16 bytes
QUICK = {"rounds": 6, "warm_s": 0, "burst_ms": 2}  # enough to tell which are the fastest few; those are timed again


def inputs(m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k") -> tuple:
    """Random normal (a, b, out, scale_a, scale_b): b is a weight.T (`layout` "k") or stored row by row ("n").

    The scales are None, or for fp8 one float32 value each.
    """
    here = "cuda" if device.current().capability else "cpu"
    kind = gemm.TORCH[dtype]
    a, weight = (torch.randn(rows, k, device=here).to(kind) for rows in (m, n))
    out = torch.empty(m, n, device=here, dtype=torch.bfloat16 if dtype == "fp8" else kind)
    scales = [torch.rand((), device=here) + 0.5 if dtype == "fp8" else None for _ in range(2)]
    return a, weight.T if layout == "k" else weight.T.contiguous(), out, *scales


def library(a, b, out, scale_a=None, scale_b=None):
    """A function that lets cuBLAS compute the same product: torch.mm, or for fp8 _scaled_mm with fast accumulation."""
    if scale_a is None:
        return lambda: torch.mm(a, b, out=out)
    return lambda: torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=out.dtype, use_fast_accum=True)


def verify(config, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k") -> dict:
    """A row of tilelab.check: error against float64, and cuBLAS's own, of which ours may be 1.5 times."""
    a, b, out, *scales = inputs(m, n, k, dtype, layout)
    named = dict(zip(("scale_a", "scale_b"), scales))
    peer = library(a, b, out, *scales) if a.is_cuda else None
    return check.compare(lambda a, b, out: gemm.gemm(a, b, out=out, config=config, **named),
                         lambda a, b: gemm.spec(a, b, **named), [(str(config), (a, b))],
                         out=lambda a, b: ((m, n), out.dtype), peer=peer and (lambda a, b: peer()))[0]


def measure(config, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k", **timing) -> dict:
    """Check `config`, then time it against cuBLAS alone, so that no third kernel heats the chip between the two.

    `timing` are options of bench.compare. Returns {status, reason, error, peer_error, ms, peer_ms, ratio, tflops}; when
    not ok the first four only.
    """
    checked = verify(config, m, n, k, dtype, layout)
    row = {"status": checked["status"], "reason": checked["reason"], "error": checked["error"],
           "peer_error": checked.get("peer_error")}
    if checked["status"] != "ok":
        return row
    return row | _against_cublas([config], m, n, k, dtype, layout, **timing)[0]


def _against_cublas(chosen: list, m: int, n: int, k: int, dtype: str, layout: str, **timing) -> list[dict]:
    """Fields of bench.Timing.row, one a configuration; all of them and cuBLAS interleaved."""
    def launcher(config):
        return lambda a, b, out, scale_a, scale_b: gemm.prepare(a, b, out=out, scale_a=scale_a, scale_b=scale_b,
                                                                config=config)

    candidates = {"cuBLAS": library, **{config.name: launcher(config) for config in chosen}}
    found = bench.compare(candidates, lambda: inputs(m, n, k, dtype, layout), "cuBLAS", flops=2 * m * n * k, **timing)
    return [{key: value for key, value in found[config.name].row().items() if key != "name"} for config in chosen]


def label(config: GemmConfig, m: int, n: int, k: int, dtype: str = "bf16", layout: str = "k", which: str = "") -> dict:
    """The fields that say what a row is about."""
    return {"name": which or "course", "config": str(config), "kernel": config.name, "shape": [m, n, k], "dtype": dtype,
            "layout": layout}


@dataclasses.dataclass(frozen=True)
class GemmSpace(TargetSpace):
    """Configurations at one shape. `careful` takes as many rounds for each as a figure that is kept deserves."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "k"
    compile_for: str | None = None
    which: str = ""
    careful: bool = False

    @property
    def sms(self) -> int:
        """SMs of the GPU here when it is the target, else of the first known one."""
        here = device.current()
        return here.sms if here.target == self.target else next(
            (gpu.sms for gpu in device.KNOWN.values() if gpu.target == self.target and gpu.sms), 132)

    @property
    def case(self) -> tuple:
        """Shape, dtype and layout, as this module's functions take them."""
        return self.m, self.n, self.k, self.dtype, self.layout

    def label(self, config):
        return label(config, *self.case, self.which)

    def source(self):
        return source()

    def reject(self, config):
        return rejection(config, self.target, self.dtype)

    def job(self, config):
        return gemm_job(config, self.target, self.dtype, self.layout == "k", self.sms, self.case[:3],
                                self.dtype == "fp8")

    def predicted_ms(self, config):
        if not device.target_limits(self.target).has_wgmma:  # the model's rates are of Hopper's instruction
            return None
        return gemm_predicted_ms(config, *self.case[:4], self.sms)

    def warm_up(self):
        library(*inputs(*self.case))()
        return {}

    def measure(self, config):
        return measure(config, *self.case, **({} if self.careful else QUICK))

    def measure_finalists(self, chosen):
        return _against_cublas(chosen, *self.case)


def compile_ahead(cases: Iterable[tuple]) -> None:
    """Compile what (configuration, m, n, k, dtype, layout) launch, all at once; sizes that divide alike are one."""
    build.compile_ahead({repr(job): job for config, *case in cases for job in (GemmSpace(*case).job(config),)}.values())


def best(cases: Iterable[tuple]) -> list[dict]:
    """A row of what `config="best"` takes for each (m, n, k, dtype, layout); all are compiled before one is timed."""
    here, cases = device.current(), list(cases)
    chosen = [ranked("course", *case[:4], here.target, here.sms)[0] for case in cases]
    compile_ahead((config, *case) for config, case in zip(chosen, cases))
    return [label(config, *case, "best") | measure(config, *case) | {"predicted_ms": gemm_predicted_ms(
        config, *case[:4], here.sms)} for config, case in zip(chosen, cases)]


def source() -> str:
    """Hash of what the GEMM experiments measure: the kernels, and the configurations with their choice."""
    return results.source_hash(gemm.gemm_plain_kernel, gemm.gemm_persistent_kernel, gemm.tile_at, gemm.scaled,
                               gemm.halves, gemm.store_tile, gemm.load_b, GemmConfig,
                               configs, _course, rejection,
                               ranked, gemm_predicted_ms, Rates)


_experiment = functools.partial(results.experiment, source=source)


def checked() -> list[dict]:
    """Kernels on ragged shapes against float64, here and now: bf16, fp16, fp8 on a GPU; fp16 in the interpreter, on
    small ones, for it takes seconds where a GPU takes microseconds."""
    if device.current().has_tma:
        cases = [(config, *shape, dtype, layout) for dtype, layouts in (("bf16", "kn"), ("fp16", "kn"), ("fp8", "k"))
                 for layout in layouts for shape in (RAGGED_FP8 if dtype == "fp8" else RAGGED)
                 for config in (configs("conservative")[0], *configs("course", dtype, device.current().target)[:2])]
        compile_ahead(cases)
    else:
        small = [GemmConfig(32, 64, 16, 4, 2), GemmConfig(32, 64, 16, 4, 2, "persistent", 2),
                 GemmConfig(64, 192, 32, 4, 3, "persistent", 2)]
        cases = [(config, *shape, "fp16", layout) for layout in "kn" for shape in ((100, 104, 72), (1, 200, 64))
                 for config in small]
    return [verify(*case) | label(*case) for case in cases]


@_experiment("ch14_gemm_square")
def squares():
    """bf16 at 2048, 4096 and 8192 cubed, B stored either way: best configuration against cuBLAS."""
    return best((s, s, s, "bf16", layout) for layout in "kn" for s in SQUARES)


@_experiment("ch14_gemm_llm")
def llm():
    """bf16 at the shapes of a 7 to 8 billion parameter decoder: tokens M, weight (N, K), B = weight.T."""
    return best((m, n, k, "bf16", "k") for m in LLM_M for n, k in LLM_NK)


@_experiment("ch14_gemm_ragged")
def ragged():
    """bf16 at sizes that no tile divides."""
    return best((*shape, "bf16", layout) for layout in "kn" for shape in RAGGED)


@_experiment("ch14_gemm_fp8")
def fp8():
    """e4m3 with one scale a tensor, against cuBLASLt with fast accumulation."""
    return best((s, s, s, "fp8", "k") for s in SQUARES)


@_experiment("ch14_gemm_claim")
def claim():
    """The field note's two sets, and the course's best, at its three sizes; B row by row, as in its kernel.

    `factor` is a row's speed over that of the fastest conservative configuration at the same size.
    """
    sets = [(which, config) for which in ("conservative", "proposed") for config in configs(which)]
    rows = []
    for s, course in zip(SQUARES, best((s, s, s, "bf16", "n") for s in SQUARES)):
        walk = Sweep([config for _, config in sets], GemmSpace(s, s, s, layout="n", careful=True))
        of_size = [*(row | {"name": which} for (which, _), row in zip(sets, walk.finish())), course]
        slow = min(row["ms"] for row in of_size if row["name"] == "conservative" and row["status"] == "ok")
        rows += [row | ({"factor": slow / row["ms"]} if row.get("ms") else {}) for row in of_size]
    return rows


@_experiment("ch14_gemm_latency")
def latency():
    """What one call costs end to end, launch and completion, at 512 cubed: microseconds in `us`."""
    a, b, out, *_ = inputs(512, 512, 512)
    plain, host = configs("conservative")[1], ranked("course", 512, 512, 512, "bf16",
                                                                   device.current().target, device.current().sms)[0]
    calls = {"torch.mm": library(a, b, out),
             "prepared, host descriptors": gemm.prepare(a, b, out=out, config=host),
             "prepared, device descriptors": gemm.prepare(a, b, out=out, config=plain),
             "gemm(), everything each time": lambda: gemm.gemm(a, b, out=out, config=host)}
    return [{"name": name, "us": bench.measure_call_us(call), "status": "ok"} for name, call in calls.items()]


GRID_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256), (256, 128))
GRID_STAGES = (2, 3, 4, 5, 6, 7)


def grid(dtype: str = "bf16") -> list[GemmConfig]:
    """96 configurations, good and bad: persistent tiles from 64 x 64 to 256 x 128, their rows 128 bytes."""
    return [GemmConfig(bm, bn, 128 // ITEMSIZE[dtype], warps, stages, kernel="persistent",
                       epilogue_parts=2)
            for (bm, bn), warps, stages in itertools.product(GRID_TILES, (4, 8), GRID_STAGES)]


@_experiment("ch14_gemm_sweep")
def swept():
    """Every configuration of `grid` at 2048, 4096 and 8192 cubed."""
    return [row for s in SQUARES for row in Sweep(grid(), GemmSpace(s, s, s)).finish()]


def built(targets=device.TARGETS[1:], sets=("conservative", "proposed"), dtype: str = "bf16") -> list[dict]:
    """The configurations of `sets`, compiled for every target: runs anywhere, no GPU needed."""
    order = [(which, config, target) for which in sets for config in configs(which, dtype) for target in targets]
    jobs = [gemm_job(config, target, dtype, b_k_major=dtype == "fp8") for _, config, target in order]
    reports = {id(report.job): report for report in build.build(jobs)}
    return [{"set": which, **reports[id(job)].row(), "name": str(config), "unit": config.tensor_core(target)}
            for job, (which, config, target) in zip(jobs, order)]


roofs = bench.measured_roofs


def _chosen_space(shape: tuple[int, ...], dtype: str, target: str | None) -> GemmSpace:
    if len(shape) != 3 or not 1 <= min(shape) <= max(shape) < 2**31:
        raise ValueError(f"a shape is M,N,K, each at least 1 and below 2,147,483,648; here it is "
                         f"{str(shape)[:60]}.")
    return GemmSpace(*shape, dtype, compile_for=target)


def _roofline(dtype: str) -> Roofline:
    record = results.load("ceilings")
    rows, gpu = {row["name"]: row for row in record["rows"]}, record["device"]["name"]
    from_l2 = Rates().bytes_in * record["device"]["sms"] / 1e6  # TB/s, the model's for all SMs
    flat = {f"cuBLAS bf16, {gpu}": rows["cuBLAS bf16"]["tflops"]} if dtype != "fp8" else {}
    return Roofline("operations a byte that TMA fetches, FLOP/B", "tflops", "TFLOP/s",
                    lambda config: 2 * config.block_m * config.block_n / (config.block_m + config.block_n)
                    / ITEMSIZE[dtype],
                    flat, {f"from L2, {from_l2:.0f} TB/s (model)": from_l2})  # DRAM's is no roof: tiles meet in L2


TUNABLE_KERNEL = TunableKernel(
    name="GEMM: C = A B",
    shapes={**{f"{s}³": (s, s, s) for s in SQUARES}, **{f"{m} × {n} × {k}": (m, n, k) for m, n, k in (
        (64, 6144, 4096), (512, 6144, 4096), (4096, 28672, 4096))}},
    dtypes=tuple(ITEMSIZE),
    presets={"the field note's conservative 3": functools.partial(configs, "conservative"),
             "the field note's proposed 6": functools.partial(configs, "proposed"),
             "the course's 8": functools.partial(configs, "course"), "grid of 96": grid},
    axes={"tile": lambda c: f"{c.block_m}×{c.block_n}",
          "warps, stages": lambda c: f"{c.num_warps} warps, {c.num_stages} stage{'s' * (c.num_stages > 1)}",
          "stages": lambda c: f"{c.num_stages} stage{'s' * (c.num_stages > 1)}",
          "warps": lambda c: f"{c.num_warps} warps",
          "tile, warps": lambda c: f"{c.block_m}×{c.block_n}, {c.num_warps} warps",
          "K step": lambda c: f"BLOCK_K {c.block_k}", "kernel": lambda c: c.kernel},
    space=_chosen_space, load_record=lambda: results.load_record("ch14_gemm_sweep", source()), roofline=_roofline)
