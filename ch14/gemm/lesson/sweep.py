"""The sweep of `ch14.gemm` over a grid of 96 configurations, and its entry in the sweep panel."""

from __future__ import annotations

import itertools
import os

from ch14.gemm.configs import ITEMSIZE, GemmConfig, Rates, configs
from ch14.gemm.lesson import experiments, tuning
from ch14.gemm.lesson.experiments import SQUARES, GemmSpace
from tilelab.records import results
from tilelab.sweeps.sweep import Sweep
from tilelab.sweeps.tunable import Roofline, TunableKernel, load_ceiling

GRID_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256), (256, 128))


def grid(dtype: str = "bf16") -> list[GemmConfig]:
    """Return 96 configurations, good and bad: persistent tiles from 64 x 64 to 256 x 128, their rows 128 bytes."""
    return [
        GemmConfig(block_m, block_n, 128 // ITEMSIZE[dtype], warps, stages, "persistent", epilogue_subtile=2)
        for (block_m, block_n), warps, stages in itertools.product(GRID_TILES, (4, 8), range(2, 8))
    ]


def search_space(dtype: str = "bf16") -> list[GemmConfig]:
    """Return `grid`, the course's set, and 12 variants of its tiles with two programs per SM."""
    pairs = [
        GemmConfig(
            block_m, 128, 128 // ITEMSIZE[dtype], 4, stages, "persistent", parts, programs_per_sm=2, pdl=True
        )
        for block_m, stages, parts in itertools.product((64, 128), (2, 3, 4), (2, 4))
    ]
    return list(
        {
            config.name: config for config in (*grid(dtype), *configs("course", dtype).values(), *pairs)
        }.values()
    )


@results.experiment("ch14_gemm_sweep", experiments.source)
def measure_sweep():
    """Measure every configuration of `search_space` at 2048, 4096 and 8192 cubed, or in a test at 4096 only."""
    sizes = SQUARES[1:2] if os.environ.get("TILES_QUICK") else SQUARES
    return [row for s in sizes for row in Sweep(search_space(), GemmSpace(s, s, s)).finish()]


def make_space(shape: tuple[int, ...], dtype: str, target: str | None) -> GemmSpace:
    """Return the Space of a shape M,N,K; ValueError for another shape."""
    if len(shape) != 3 or not 1 <= min(shape) <= max(shape) < 2**31:
        raise ValueError(
            f"a shape is M,N,K, each at least 1 and below 2,147,483,648; it is {str(shape)[:60]}."
        )
    return GemmSpace(*shape, dtype, compile_for=target)


def _load_record() -> results.Record:
    """Return the record of the sweep, with the field note's sets from the record of its claim added."""
    source = experiments.source()
    swept = results.load_record("ch14_gemm_sweep", source)
    try:
        claim = results.load_record("ch14_gemm_claim", source)
    except FileNotFoundError:
        return swept
    if claim.device["name"] != swept.device["name"]:
        return swept
    note = "B is stored row by row, as in the field note"
    sets = [{**row, "note": note} for row in claim.rows if row.get("name") in ("conservative", "proposed")]
    known = {(row.get("kernel"), str(row.get("shape"))) for row in swept.rows}
    added = [row for row in sets if (row.get("kernel"), str(row.get("shape"))) not in known]
    return results.Record(
        {**swept.data, "rows": swept.rows + added}, live=False, stale=swept.stale or claim.stale
    )


def _roofline(dtype: str) -> Roofline:
    tflops, gpu = load_ceiling("cuBLAS bf16", "tflops")
    from_l2 = Rates().l2_bytes_per_us * gpu["sms"] / 1e6  # TB/s, the model's for all SMs
    flat = {f"cuBLAS bf16, {gpu['name']}": tflops} if dtype != "fp8" else {}
    return Roofline(
        "operations per byte that TMA fetches, FLOP/B",
        "tflops",
        "TFLOP/s",
        lambda config: (
            2 * config.block_m * config.block_n / (config.block_m + config.block_n) / ITEMSIZE[dtype]
        ),
        flat,
        {f"from L2, {from_l2:.0f} TB/s (model)": from_l2},
    )  # DRAM's is no roof: tiles meet in L2


TUNABLE_KERNEL = TunableKernel(
    name="GEMM: C = A B",
    shapes={
        **{f"{s}³": (s, s, s) for s in SQUARES},
        **{
            f"{m} × {n} × {k}": (m, n, k)
            for m, n, k in ((64, 6144, 4096), (512, 6144, 4096), (4096, 28672, 4096))
        },
    },
    dtypes=tuple(ITEMSIZE),
    presets={
        "the field note's conservative 3": lambda dtype: [*configs("conservative", dtype).values()],
        "the field note's proposed 6": lambda dtype: [*configs("proposed", dtype).values()],
        "the course's 8": lambda dtype: [*configs("course", dtype).values()],
        "grid of 96": grid,
        "the grid, the course's and two programs per SM": search_space,
    },
    axes={
        "tile": lambda c: f"{c.block_m}×{c.block_n}",
        "warps, stages": lambda c: f"{c.num_warps} warps, {c.num_stages} stage{'s' * (c.num_stages > 1)}",
        "stages": lambda c: f"{c.num_stages} stage{'s' * (c.num_stages > 1)}",
        "warps": lambda c: f"{c.num_warps} warps",
        "tile, warps": lambda c: f"{c.block_m}×{c.block_n}, {c.num_warps} warps",
        "K step": lambda c: f"BLOCK_K {c.block_k}",
        "kernel": lambda c: c.kernel,
    },
    space=make_space,
    load_record=_load_record,
    roofline=_roofline,
    tuner=tuning.TUNABLE,
)
