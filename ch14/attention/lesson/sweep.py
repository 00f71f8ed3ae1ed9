"""The sweep of `ch14.attention`: its grid of configurations, and how the sweep and the panel see the kernel."""

from __future__ import annotations

import dataclasses
import itertools

from ch14.attention import AttentionConfig, configs, job
from ch14.attention.configs import HEAD_DIMS, rejection
from ch14.attention.lesson import experiments
from ch14.attention.lesson.experiments import compare_with_cudnn, prepare_attention, verify
from tilelab.sweeps.space import Roofline, Space, load_ceiling
from tilelab.sweeps.sweep import Sweep


def grid(_: str = "bf16") -> list[AttentionConfig]:
    """Return plain tiles, good and bad, and the hopper kernel in every form."""
    plain = [
        AttentionConfig(m, n, warps, stages)
        for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3))
        if (m, warps) != (64, 8)
    ]
    hopper = [
        AttentionConfig(
            num_stages=stages, kernel="hopper", overlap=overlap, ping_pong=ping_pong, persistent=persistent
        )
        for stages, overlap, ping_pong, persistent in itertools.product((2, 3), *[(False, True)] * 3)
    ]
    return plain + hopper


@dataclasses.dataclass(frozen=True)
class AttentionSpace(Space):
    """Self-attention in bf16 of the shape (batch, heads, length, d)."""

    title = "flash attention"
    shapes = {"4 × 16 × 4096 × 128": (4, 16, 4096, 128), "4 × 32 × 4096 × 64": (4, 32, 4096, 64)}
    presets = {"the grid": grid, "the ladder": lambda _: list(configs().values())}
    axes = {
        "tile": lambda c: f"{c.block_m}×{c.block_n}, {c.num_warps} warps",
        "stages, kernel": lambda c: str(c).split(" · ", 2)[2].replace("hopper · ", ""),
        "stages": lambda c: f"{c.num_stages} stages",
        "kernel": lambda c: c.kernel,
    }
    words = {r"\d+×\d+": "rows of Q that a program takes, and of K and V in each step"}
    record = "ch14_attention_sweep"
    peer = "cuDNN"

    causal: bool = False

    def check_shape(self):
        shape = self.shape
        if len(shape) != 4 or min(shape) < 1 or shape[3] not in HEAD_DIMS or shape[2] > 2**16:
            form = "BATCH,HEADS,LENGTH,D with a length up to 65,536 and D 64 or 128"
            raise ValueError(f"a shape is {form}; it is {str(shape)[:60]}.")

    @property
    def case(self) -> tuple:
        """Return the case as the experiments take it: batch, heads, length and D of Q and of K, and causal."""
        batch, heads, length, d = self.shape
        return batch, heads, heads, length, length, d, self.causal

    @classmethod
    def source(cls):
        return experiments.source()

    def reject(self, config):
        return rejection(config, self.target)

    def job(self, config):
        return job(config, self.target, self.shape[3], self.causal)

    def warm_up(self):
        experiments.choose_peer(self.case)
        return {}

    def measure(self, config):
        found = verify(config, (1, 2, 2, 515, 515, self.shape[3], self.causal))
        if found["status"] != "ok":
            return found
        return found | self.measure_finalists([config], rounds=6, warm_s=0)[0]

    def measure_finalists(self, configs, **timing):
        candidates = {str(config): prepare_attention(config, self.causal) for config in configs}
        return [row | {"name": "sweep"} for row in compare_with_cudnn(candidates, self.case, **timing)[1:]]

    @classmethod
    def roofline(cls, dtype):
        return Roofline(
            intensity_label="operations per byte of K and V that TMA fetches, FLOP/B",
            speed_field="tflops",
            unit="TFLOP/s",
            intensity=lambda config: config.block_m,
            flat_roofs={"cuBLAS bf16": load_ceiling("cuBLAS bf16", "tflops")[0]},
        )


@experiments.experiment("ch14_attention_sweep")
def measure_sweep():
    """Measure every configuration of `grid` at 4096 tokens, for head dimensions 64 and 128."""
    spaces = (AttentionSpace(shape) for shape in ((4, 32, 4096, 64), (4, 16, 4096, 128)))
    return [row for space in spaces for row in Sweep(grid(), space).finish()]
