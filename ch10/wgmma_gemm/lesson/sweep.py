"""The sweep of `ch10.wgmma_gemm`: the configurations that are swept and tuned, and what the panel shows of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from ch10 import wgmma_gemm
from ch10.wgmma_gemm.configs import STEPS, WgmmaConfig, candidates, predict_us, rejection
from ch10.wgmma_gemm.lesson import experiments
from tilelab.runtime import device
from tilelab.sweeps.space import Roofline, Space, load_ceiling
from tilelab.sweeps.sweep import record_rows

MOST_STAGES = 10


def grid() -> list[WgmmaConfig]:
    """Return the configurations that are swept: tiles, stages, clusters and rasters of the persistent kernel."""
    tiles = (128, 128), (128, 160), (128, 192), (128, 208), (128, 224), (128, 256), (256, 128)
    found, usual = [], {"consumers": 2, "persistent": True, "pdl": True}
    for tile, stages, cluster, group in itertools.product(tiles, (2, 3, 4, 6), (1, 2), (1, 4, 16)):
        fields = {
            "cluster": cluster,
            "group_m": group,
            "epilogue_subtile": 4 if math.prod(tile) == 1 << 15 else 1,
        }
        found.append(WgmmaConfig("specialised", *tile, stages, **usual, **fields))
    return found


def _with_most_stages(**fields) -> WgmmaConfig | None:
    """Return the configuration with as many stages as fit into shared memory, or None if two do not fit."""
    for stages in range(MOST_STAGES, 1, -1):
        config = WgmmaConfig(num_stages=stages, pdl=True, **fields)
        if not rejection(config):
            return config
    return None


def _with_fitting_parts(**fields) -> WgmmaConfig | None:
    """Return the configuration with at least four stages, or else with the most, and with the widest boxes of C."""
    found = [
        _with_most_stages(epilogue_subtile=parts, **fields)
        for parts in range(1, 13)
        if fields["block_n"] % (16 * parts) == 0
    ]
    return max(
        filter(None, found),
        key=lambda each: (min(each.num_stages, 4), each.box, -each.epilogue_subtile),
        default=None,
    )


@functools.cache
def tuned_configs() -> tuple[WgmmaConfig, ...]:
    """Return all configurations that the tuner knows, for any shape."""
    found: list[WgmmaConfig | None] = list(candidates())
    persistent = functools.partial(_with_most_stages, kernel="specialised", persistent=True)
    subtiles = {256: 4, 224: 7}
    widths = {128: (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256), 256: (64, 96, 112, 128)}
    for block_m, block_n in ((rows, columns) for rows in widths for columns in widths[rows]):
        rasters = (4, 16) if block_m * block_n >= 128 * 192 else (8,)
        parts = 4 if block_m == 256 and block_n == 128 else subtiles.get(block_n, 1)
        tile = {"block_m": block_m, "block_n": block_n, "consumers": 2, "epilogue_subtile": parts}
        found += [persistent(cluster=each, group_m=group, **tile) for each in (1, 2) for group in rasters]
    # Tiles of three consumers, and of 256 rows and up to 192 columns: large ones that cover some shapes in one wave.
    large = functools.partial(_with_fitting_parts, kernel="specialised", persistent=True)
    for cluster, group in ((1, 8), (2, 4), (2, 16)):
        found += [
            large(block_m=192, block_n=columns, consumers=3, cluster=cluster, group_m=group)
            for columns in range(96, 208, 16)
        ]
        found += [
            large(block_m=256, block_n=columns, consumers=2, cluster=cluster, group_m=group)
            for columns in (144, 160, 176, 192)
        ]
    # Clusters of small tiles: with few rows of C, most of the traffic from L2 is B.
    found += [
        large(block_m=64, block_n=columns, cluster=cluster, group_m=8)
        for cluster in (2, 4)
        for columns in (64, 96, 128, 160, 192)
    ]
    found += [
        large(block_m=128, block_n=columns, consumers=2, cluster=4, group_m=8)
        for columns in (64, 96, 128, 160, 192)
    ]
    found += [
        persistent(block_m=64, block_n=columns, boxes_per_stage=boxes, group_m=8)
        for columns in (80, 112, 144, 160)
        for boxes in (1, 2)
    ]
    for block_n in (16, 32, 64, 96, 128, 192, 256):
        found += [persistent(block_m=64, block_n=block_n, boxes_per_stage=each, group_m=8) for each in (1, 2)]
    # A C of few rows is computed transposed: wgmma takes 64 rows, but as few as 16 columns.
    found += [
        persistent(block_m=64, block_n=columns, boxes_per_stage=2, swap=True, group_m=8)
        for columns in (16, 32, 64, 128)
    ]
    found += [
        persistent(block_m=128, block_n=columns, consumers=2, boxes_per_stage=boxes, swap=True, group_m=8)
        for columns in (16, 32, 64, 128, 192)
        for boxes in (1, 2)
    ]
    found += [persistent(block_m=64, block_n=columns, swap=True, group_m=8) for columns in (192, 256)]
    # In a swapped product the CTAs of a cluster share rows of A.
    found += [
        persistent(block_m=64, block_n=columns, cluster=cluster, boxes_per_stage=2, swap=True, group_m=8)
        for cluster in (2, 4)
        for columns in (16, 32, 64, 128)
        if columns % (8 * cluster) == 0
    ]
    found += [
        persistent(block_m=128, block_n=columns, consumers=2, cluster=cluster, swap=True, group_m=8)
        for cluster in (2, 4)
        for columns in (32, 64, 128, 192)
    ]
    split = functools.partial(_with_most_stages, kernel="split", group_m=8)
    for cluster in (2, 3, 4, 5, 6, 8):
        found += [
            split(block_m=64, block_n=columns, cluster=cluster, boxes_per_stage=1 + (columns <= 64))
            for columns in (64, 128, 192, 256)
        ]
        found += [
            split(block_m=128, block_n=columns, consumers=2, cluster=cluster)
            for columns in (96, 128, 160, 192, 224, 256)
        ]
        found += [
            split(block_m=64, block_n=columns, cluster=cluster, swap=True, boxes_per_stage=2)
            for columns in (16, 32, 64, 128)
        ]
        found += [
            split(block_m=128, block_n=columns, consumers=2, cluster=cluster, swap=True)
            for columns in (64, 128, 256)
        ]
    return tuple(dict.fromkeys(filter(None, found)))


def suits(config: WgmmaConfig, m: int, n: int, k: int, sms: int) -> bool:
    """Return whether a configuration is worth trying: a shape with many tiles needs no split, and so on."""
    tiles = config.tiles(m, n)
    if config.kernel == "specialised" and config.block_m * (config.cluster - 1) >= (n if config.swap else m):
        return False  # a whole CTA of each cluster would have nothing to do
    if config.kernel == "split":
        return (
            tiles <= 1.5 * sms and tiles * config.cluster <= 3 * sms and config.steps(k) >= 3 * config.cluster
        )
    if config.cluster == 4 and tiles > config.grid(m, n, sms):
        return False  # a second wave
    if config.swap:
        return m <= 256 or config.block_n >= 192 and m <= 2048
    if config.block_m == 64:
        return m <= 64 or tiles <= 8 * sms
    return m > 64 and config.block_m < 2 * m and config.block_n <= 2 * n


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
    presets = {
        "the ladder": lambda _: list(STEPS.values()),
        "the course's": lambda _: candidates(),
        "the grid": lambda _: grid(),
    }
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
        sms = device.current().sms or 132
        return [config for config in tuned_configs() if suits(config, *self.shape, sms)]

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
    """Sweep the grid at 4096 cubed."""
    return record_rows(grid(), WgmmaSpace((4096, 4096, 4096)))
