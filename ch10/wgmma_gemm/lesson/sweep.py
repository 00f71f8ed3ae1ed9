"""The sweep of `ch10.wgmma_gemm`: the configurations that are swept and tuned, and what the panel shows of them."""

from __future__ import annotations

import dataclasses
import itertools
import math

from ch10 import wgmma_gemm
from ch10.wgmma_gemm import choice
from ch10.wgmma_gemm.choice import predict_us
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, rejection
from ch10.wgmma_gemm.lesson import experiments
from tilelab.runtime import device
from tilelab.sweeps.space import Roofline, Space, load_ceiling
from tilelab.sweeps.sweep import record_rows


def grid() -> list[WgmmaConfig]:
    """Return the configurations that are swept: tiles, stages, clusters and rasters of the persistent kernel."""
    tiles = (128, 128), (128, 160), (128, 192), (128, 224), (128, 256), (256, 128)
    found, usual = [], {"consumers": 2, "persistent": True, "pdl": True}
    for tile, stages, cluster, group in itertools.product(tiles, (2, 3, 4, 6), (1, 2), (1, 4, 16)):
        fields = {
            "cluster": cluster,
            "group_m": group,
            "epilogue_subtile": 4 if math.prod(tile) == 1 << 15 else 1,
        }
        found.append(WgmmaConfig("specialised", *tile, stages, **usual, **fields))
    return found


@dataclasses.dataclass(frozen=True)
class WgmmaSpace(Space):
    """C = A B of the shape (M, N, K) in bfloat16."""

    title = "WGMMA GEMM: C = A B"
    shapes = {
        **{f"{side}³": (side,) * 3 for side in (4096, 2048, 8192)},  # the sweep is recorded at the first
        "64 × 6144 × 4096": (64, 6144, 4096),
        "512 × 6144 × 4096": (512, 6144, 4096),
        "4096 × 28672 × 4096": (4096, 28672, 4096),
    }
    presets = {"the ladder": lambda _: list(STEPS.values()), "the grid": lambda _: grid()}
    axes = {
        "tile": lambda c: f"{c.block_m}×{c.block_n}",
        "stages": lambda c: f"{c.num_stages} stage{'s' * (c.num_stages > 1)}",
        "cluster, raster": lambda c: f"cluster {c.cluster}, group {c.group_m}",
        "tile, cluster": lambda c: f"{c.block_m}×{c.block_n}, cluster {c.cluster}",
        "raster": lambda c: f"group {c.group_m}",
        "kernel": lambda c: c.kernel,
    }
    record = "ch10_gemm_sweep"
    needs = "has_wgmma"
    table = "wgmma_gemm"

    def check_shape(self):
        m, n, k = sizes = self.shape if len(self.shape) == 3 else (0, 0, 0)
        if not 1 <= min(sizes) <= max(sizes) < 2**31 or n % 8 or k % 8:
            raise ValueError(
                f"bad shape {str(self.shape)[:60]}; give M,N,K below 2^31, N and K multiples of 8."
            )

    def label(self, config):
        return super().label(config) | {"name": config.kernel}

    @classmethod
    def source(cls):
        return experiments.source()

    def reject(self, config):
        if not device.target_limits(self.target).has_wgmma:
            return f"{self.target} has no wgmma; only sm_90a has it."
        if config.kernel == "split" and config.cluster > (steps := config.steps(self.shape[2])):
            return f"a cluster of {config.cluster} has too few K steps to share: {steps}."
        return rejection(config)

    def job(self, config):
        return wgmma_gemm.job(config, self.target)

    def predict_us(self, config):
        return predict_us(config, *self.shape, device.current().sms or 132)

    def warm_up(self):
        experiments.prepare_cublas(*self.make_inputs())()
        return {}

    def measure(self, config):
        checked = experiments.verify(config, *self.shape)
        row = {key: checked[key] for key in ("status", "reason", "error", "peer_error")}
        if row["status"] == "ok":
            row |= self._compare({config.kernel: config}, **experiments.QUICK)[0]
        return row

    def measure_finalists(self, configs):
        return self._compare({str(config): config for config in configs})

    def _compare(self, named, **timing):
        return experiments.compare_with_cublas(named, *self.shape, **timing)

    @classmethod
    def roofline(cls, dtype):
        tflops, gpu = load_ceiling("cuBLAS bf16", "tflops")
        return Roofline(
            intensity_label="operations per byte that TMA fetches, FLOP/B",
            speed_field="tflops",
            unit="TFLOP/s",
            intensity=lambda c: c.block_m * c.block_n / (c.block_m + c.block_n / c.cluster),
            flat_roofs={f"cuBLAS bf16, {gpu['name']}": tflops},
        )

    def candidates(self):
        return list(choice.candidates(*self.shape).values())

    @classmethod
    def tuned_source(cls):
        return wgmma_gemm.tuned_source()

    def make_inputs(self):
        return experiments.make_inputs(*self.shape)

    def prepare(self, config, a, b, out):
        return wgmma_gemm.prepare(a, b, out=out, config=config)

    def prepare_peer(self, *tensors):
        return experiments.prepare_cublas(*tensors)


@experiments.experiment("ch10_gemm_sweep")
def measure_sweep():
    """Sweep the grid and the ladder at 4096 cubed."""
    return record_rows([*grid(), *STEPS.values()], WgmmaSpace((4096, 4096, 4096)))
