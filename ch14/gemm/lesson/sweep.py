"""The sweep of `ch14.gemm`: the configurations that are swept and tuned, and what the panel shows of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os

from ch14 import gemm
from ch14.gemm import choice
from ch14.gemm.configs import ITEMSIZE, GemmConfig, Rates, configs, job, predict_us, rejection
from ch14.gemm.lesson import experiments
from ch14.gemm.lesson.experiments import SQUARES
from tilelab.records import results
from tilelab.runtime import device
from tilelab.sweeps.space import Roofline, Space, load_ceiling
from tilelab.sweeps.sweep import Sweep

GRID_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 192), (128, 256), (256, 128))
MOST_STAGES = 8


def grid(dtype: str = "bf16") -> list[GemmConfig]:
    """Return 96 configurations, good and bad: persistent tiles from 64 x 64 to 256 x 128, their rows 128 bytes."""
    return [
        GemmConfig(block_m, block_n, 128 // ITEMSIZE[dtype], warps, stages, "persistent", epilogue_subtile=2)
        for (block_m, block_n), warps, stages in itertools.product(GRID_TILES, (4, 8), range(2, 8))
    ]


def swept_configs(dtype: str = "bf16") -> list[GemmConfig]:
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


def list_families() -> tuple[dict[str, tuple], ...]:
    """Return families of tiles that the tuner tries: every combination of the values of a line.

    Where a line says nothing else, a step along K has 64 columns, and a program 4 warps.
    """
    splits = (2, 3, 4, 5, 6, 8)
    return (
        dict(block_m=(16, 32), block_n=(32, 64, 128), block_k=(128, 256)),
        dict(block_m=(64,), block_n=(16, 32, 64, 128), block_k=(64, 128), programs_per_sm=(1, 2)),
        dict(block_m=(64,), block_n=(96, 192), block_k=(64, 128), epilogue_subtile=(2,)),
        dict(block_m=(64,), block_n=(80, 160, 320), block_k=(64, 128), epilogue_subtile=(4,)),
        dict(block_m=(64,), block_n=(256,), epilogue_subtile=(2,)),
        dict(block_m=(128,), block_n=(32, 64), num_warps=(4, 8), programs_per_sm=(1, 2), group_m=(4, 16)),
        dict(block_m=(128,), block_n=(128,), num_warps=(4, 8), epilogue_subtile=(2,), group_m=(4, 16)),
        dict(
            block_m=(128,),
            block_n=(128,),
            num_warps=(4, 8),
            programs_per_sm=(2,),
            epilogue_subtile=(4,),
            group_m=(4, 16),
        ),
        dict(block_m=(128,), block_n=(96,), num_warps=(4, 8), epilogue_subtile=(2,)),
        dict(block_m=(128,), block_n=(80, 160), num_warps=(4, 8), epilogue_subtile=(4,)),
        dict(block_m=(128,), block_n=(192, 256), num_warps=(4, 8), epilogue_subtile=(2,), group_m=(4, 8, 16)),
        dict(block_m=(128,), block_n=(320,), num_warps=(8,), epilogue_subtile=(4,), group_m=(4, 16)),
        dict(
            block_m=(256,), block_n=(64, 96, 128, 192), num_warps=(8,), epilogue_subtile=(2,), group_m=(4, 16)
        ),
        dict(block_m=(256,), block_n=(80, 160), num_warps=(8,), epilogue_subtile=(4,), group_m=(4, 16)),
        dict(block_m=(16,), block_n=(64,), block_k=(256,), splits=splits),
        dict(block_m=(32, 64), block_n=(64,), block_k=(128,), splits=splits),
        dict(block_m=(64,), block_n=(128,), block_k=(64, 128), splits=splits),
        dict(block_m=(64,), block_n=(256,), splits=splits),
        dict(block_m=(128,), block_n=(128, 256), num_warps=(8,), splits=splits),
    )


def _with_most_stages(fields: dict) -> GemmConfig | None:
    """Return the configuration with as many stages as fit into Hopper's shared memory, or None if two do not fit."""
    kernel = "split" if "splits" in fields else "persistent"
    for stages in range(MOST_STAGES, 1, -1):
        config = GemmConfig(
            **{"block_k": 64, "num_warps": 4} | fields, num_stages=stages, kernel=kernel, pdl=True
        )
        if not rejection(config, "sm_90a", "bf16"):
            return config
    return None


@functools.cache
def tuned_configs() -> tuple[GemmConfig, ...]:
    """Return the configurations that the tuner tries beside the families of `choice`, for any shape."""
    found = list(configs("course").values())
    for family in list_families():
        found += [
            _with_most_stages(dict(zip(family, values))) for values in itertools.product(*family.values())
        ]
    return tuple(dict.fromkeys(filter(None, found)))


def suits(config: GemmConfig, m: int, n: int, k: int, sms: int) -> bool:
    """Return whether a configuration is worth trying for C (m, n) with inner extent k."""
    if config.kernel == "split":
        tiles = config.tiles(m, n)
        if tiles > 1.5 * sms or tiles * config.splits > 4 * sms or k < 3 * config.splits * config.block_k:
            return False
    if config.block_m < 64:
        return m <= 4 * config.block_m
    if config.block_m == 64:
        return m <= 64 or config.tiles(m, n) <= 8 * sms
    return m > 64 and config.block_m < 2 * m


@dataclasses.dataclass(frozen=True)
class GemmSpace(Space):
    """C = A B of the shape (M, N, K), with B stored by columns (`layout` "k") or by rows ("n").

    `careful` times each configuration with bench.compare's default rounds; otherwise experiments.QUICK is used.
    """

    title = "GEMM: C = A B"
    shapes = {
        **{f"{s}³": (s, s, s) for s in SQUARES},
        **{
            f"{m} × {n} × {k}": (m, n, k)
            for m, n, k in ((64, 6144, 4096), (512, 6144, 4096), (4096, 28672, 4096))
        },
    }
    dtypes = tuple(ITEMSIZE)
    presets = {
        "the field note's conservative 3": lambda dtype: [*configs("conservative", dtype).values()],
        "the field note's proposed 6": lambda dtype: [*configs("proposed", dtype).values()],
        "the course's 8": lambda dtype: [*configs("course", dtype).values()],
        "grid of 96": grid,
        "the grid, the course's and two programs per SM": swept_configs,
    }
    axes = {
        "tile": lambda c: f"{c.block_m}×{c.block_n}",
        "warps, stages": lambda c: f"{c.num_warps} warps, {c.num_stages} stage{'s' * (c.num_stages > 1)}",
        "stages": lambda c: f"{c.num_stages} stage{'s' * (c.num_stages > 1)}",
        "warps": lambda c: f"{c.num_warps} warps",
        "tile, warps": lambda c: f"{c.block_m}×{c.block_n}, {c.num_warps} warps",
        "K step": lambda c: f"BLOCK_K {c.block_k}",
        "kernel": lambda c: c.kernel,
    }
    record = "ch14_gemm_sweep"
    table = "gemm"

    layout: str = "k"
    which: str = ""
    careful: bool = False

    def check_shape(self):
        if len(self.shape) != 3 or not 1 <= min(self.shape) <= max(self.shape) < 2**31:
            raise ValueError(
                f"a shape is M,N,K, each at least 1 and below 2,147,483,648; it is {str(self.shape)[:60]}."
            )

    @property
    def sms(self) -> int:
        """Return the SMs of the GPU here when it is the target, else of the first known GPU of the target."""
        gpus = (device.current(), *device.KNOWN.values())
        return next((gpu.sms for gpu in gpus if gpu.target == self.target and gpu.sms), 132)

    @property
    def case(self) -> tuple:
        """Return M, N, K, dtype and layout, as the experiments take them."""
        return *self.shape, self.dtype, self.layout

    def label(self, config):
        return experiments.label(config, *self.case, self.which)

    @classmethod
    def source(cls):
        return experiments.source()

    def reject(self, config):
        return rejection(config, self.target, self.dtype)

    def job(self, config):
        is_fp8 = self.dtype == "fp8"
        return job(config, self.target, self.dtype, self.layout == "k", self.sms, self.shape, is_fp8)

    def predict_us(self, config):
        if not device.target_limits(self.target).has_wgmma:  # the model's rates are of Hopper's instruction
            return None
        return predict_us(config, *self.shape, self.dtype, self.sms)

    def warm_up(self):
        experiments.prepare_cublas(*experiments.make_inputs(*self.case))()
        return {}

    def measure(self, config):
        return experiments.measure(config, *self.case, **({} if self.careful else experiments.QUICK))

    def measure_finalists(self, chosen):
        return experiments.time_against_cublas(chosen, *self.case)

    @classmethod
    def load_record(cls):
        """Return the record of the sweep, with the field note's sets from the record of its claim added."""
        swept = super().load_record()
        try:
            claim = results.load_record("ch14_gemm_claim", cls.source())
        except FileNotFoundError:
            return swept
        if claim.device["name"] != swept.device["name"]:
            return swept
        note = "B is stored row by row, as in the field note"
        sets = [
            {**row, "note": note} for row in claim.rows if row.get("name") in ("conservative", "proposed")
        ]
        known = {(row.get("kernel"), str(row.get("shape"))) for row in swept.rows}
        added = [row for row in sets if (row.get("kernel"), str(row.get("shape"))) not in known]
        return results.Record(
            {**swept.data, "rows": swept.rows + added}, live=False, stale=swept.stale or claim.stale
        )

    @classmethod
    def roofline(cls, dtype):
        tflops, gpu = load_ceiling("cuBLAS bf16", "tflops")
        from_l2 = Rates().l2_bytes_per_us * gpu["sms"] / 1e6  # TB/s, the model's for all SMs
        return Roofline(
            intensity_label="operations per byte that TMA fetches, FLOP/B",
            speed_field="tflops",
            unit="TFLOP/s",
            intensity=lambda c: 2 * c.block_m * c.block_n / (c.block_m + c.block_n) / ITEMSIZE[dtype],
            flat_roofs={f"cuBLAS bf16, {gpu['name']}": tflops} if dtype != "fp8" else {},
            # DRAM's is no roof: tiles meet in L2.
            bandwidth_roofs={f"from L2, {from_l2:.0f} TB/s (model)": from_l2},
        )

    def candidates(self):
        others = (config for config in tuned_configs() if suits(config, *self.shape, self.sms))
        return list(dict.fromkeys([*choice.candidates(*self.shape, self.sms).values(), *others]))

    @classmethod
    def tuned_source(cls):
        return gemm.tuned_source()

    def make_inputs(self):
        return experiments.make_inputs(*self.shape)[:3]

    def prepare(self, config, a, b, out):
        return gemm.prepare(a, b, out=out, config=config)

    def prepare_peer(self, *tensors):
        return experiments.prepare_cublas(*tensors)


@results.experiment("ch14_gemm_sweep", experiments.source)
def measure_sweep():
    """Measure every configuration of `swept_configs` at 2048, 4096 and 8192 cubed, or in a test at 4096 only."""
    sizes = SQUARES[1:2] if os.environ.get("TILES_QUICK") else SQUARES
    return [row for s in sizes for row in Sweep(swept_configs(), GemmSpace((s, s, s))).finish()]


@experiments.experiment("ch14_gemm_claim")
def measure_claim():
    """Measure the field note's two sets, and the course's best, at its three sizes and three smaller ones.

    B is stored row by row, as in the note. `factor` divides the time of the fastest conservative configuration at the
    same size by the row's time.
    """
    sets = [(which, config) for which in ("conservative", "proposed") for config in configs(which).values()]
    rows = []
    squares = (*SQUARES, *experiments.SMALL_SQUARES)
    for s, course in zip(squares, experiments.measure_best((s, s, s, "bf16", "n") for s in squares)):
        sweep = Sweep([config for _, config in sets], GemmSpace((s, s, s), layout="n", careful=True))
        of_size = [*(row | {"name": which} for (which, _), row in zip(sets, sweep.finish())), course]
        slow = min(row["ms"] for row in of_size if row["name"] == "conservative" and row["status"] == "ok")
        rows += [row | ({"factor": slow / row["ms"]} if row.get("ms") else {}) for row in of_size]
    return rows
