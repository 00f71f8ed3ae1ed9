"""The sweep of `ch10.wgmma_gemm`: a grid of configurations, their Space, and what the panel shows of them."""

from __future__ import annotations

import dataclasses
import itertools

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, candidates, predict_us, rejection
from ch10.wgmma_gemm.lesson import experiments, tuning
from tilelab.records import results
from tilelab.runtime import device
from tilelab.sweeps.sweep import Sweep
from tilelab.sweeps.tunable import Roofline, TargetSpace, TunableKernel, load_ceiling

RECORDED = (
    "name",
    "config",
    "kernel",
    "shape",
    "dtype",
    "status",
    "reason",
    "ms",
    "peer_ms",
    "ratio",
    "tflops",
    "registers",
    "smem",
    "final_ms",
    "final_ratio",
)


@dataclasses.dataclass(frozen=True)
class WgmmaSpace(TargetSpace):
    """Configurations at one shape."""

    m: int
    n: int
    k: int
    compile_for: str | None = None

    @property
    def can_measure(self) -> bool:
        return self.compile_for is None and experiments.has_wgmma()

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def label(self, config):
        return {
            "name": config.kernel,
            "config": str(config),
            "kernel": str(config),
            "shape": list(self.shape),
            "dtype": "bf16",
        }

    def source(self):
        return experiments.source()

    def reject(self, config):
        if not device.target_limits(self.target).has_wgmma:
            return f"{self.target} has no wgmma; only sm_90a has it."
        if config.kernel == "split" and config.cluster > config.steps(self.k):
            return f"a cluster of {config.cluster} has too few K steps to share: {config.steps(self.k)}."
        return rejection(config)

    def job(self, config):
        return wgmma_gemm.job(config, self.target)

    def predicted_ms(self, config):
        return predict_us(config, *self.shape, device.current().sms or 132) / 1e3

    def warm_up(self):
        experiments.prepare_cublas(*experiments.make_inputs(*self.shape))()
        return {}

    def measure(self, config):
        checked = experiments.verify(config, *self.shape)
        row = {key: checked[key] for key in ("status", "reason", "error", "peer_error")}
        if row["status"] == "ok":
            row |= experiments.compare_with_cublas({config.kernel: config}, *self.shape, **experiments.QUICK)[
                0
            ]
        return row

    def measure_finalists(self, configs):
        return experiments.compare_with_cublas({str(config): config for config in configs}, *self.shape)


def grid() -> list[WgmmaConfig]:
    """Return the configurations that are swept: tiles, stages, clusters and rasters of the persistent kernel."""
    tiles = (128, 128), (128, 160), (128, 192), (128, 208), (128, 224), (128, 256), (256, 128)
    return [
        WgmmaConfig(
            "specialised",
            rows,
            columns,
            stages,
            consumers=2,
            cluster=cluster,
            persistent=True,
            pdl=True,
            epilogue_subtile=4 if rows * columns == 1 << 15 else 1,
            group_m=group,
        )
        for (rows, columns), stages, cluster, group in itertools.product(
            tiles, (2, 3, 4, 6), (1, 2), (1, 4, 16)
        )
    ]


@experiments.experiment("ch10_gemm_sweep")
def measure_sweep():
    """Sweep the grid at 4096 cubed."""
    return [
        {key: row[key] for key in RECORDED if key in row}
        for row in Sweep(grid(), WgmmaSpace(4096, 4096, 4096)).finish()
    ]


def _make_space(shape: tuple[int, ...], dtype: str, target: str | None) -> WgmmaSpace:
    if len(shape) != 3 or not 1 <= min(shape) <= max(shape) < 2**31 or shape[1] % 8 or shape[2] % 8:
        raise ValueError(f"bad shape {str(shape)[:60]}; give M,N,K below 2^31, N and K multiples of 8.")
    return WgmmaSpace(*shape, compile_for=target)


def _roofline(_: str) -> Roofline:
    tflops, gpu = load_ceiling("cuBLAS bf16", "tflops")
    return Roofline(
        "operations per byte that TMA fetches, FLOP/B",
        "tflops",
        "TFLOP/s",
        lambda config: config.block_m * config.block_n / (config.block_m + config.block_n / config.cluster),
        {f"cuBLAS bf16, {gpu['name']}": tflops},
    )


TUNABLE_KERNEL = TunableKernel(
    name="WGMMA GEMM: C = A B",
    shapes={
        **{f"{side}³": (side,) * 3 for side in (4096, 2048, 8192)},  # the sweep is recorded at the first
        "64 × 6144 × 4096": (64, 6144, 4096),
        "512 × 6144 × 4096": (512, 6144, 4096),
        "4096 × 28672 × 4096": (4096, 28672, 4096),
    },
    dtypes=("bf16",),
    presets={
        "the ladder": lambda dtype: list(STEPS.values()),
        "the course's": lambda dtype: candidates(),
        "the grid": lambda dtype: grid(),
    },
    axes={
        "tile": lambda c: f"{c.block_m}×{c.block_n}",
        "stages": lambda c: f"{c.num_stages} stage{'s' * (c.num_stages > 1)}",
        "cluster, raster": lambda c: f"cluster {c.cluster}, group {c.group_m}",
        "tile, cluster": lambda c: f"{c.block_m}×{c.block_n}, cluster {c.cluster}",
        "raster": lambda c: f"group {c.group_m}",
        "kernel": lambda c: c.kernel,
    },
    space=_make_space,
    load_record=lambda: results.load_record("ch10_gemm_sweep", experiments.source()),
    roofline=_roofline,
    tuner=tuning.TUNABLE,
)
