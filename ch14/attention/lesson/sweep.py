"""The sweep of `ch14.attention`: its grid of configurations, and how the sweep and the panel see the kernel."""

from __future__ import annotations

import dataclasses
import itertools

from ch14.attention import AttentionConfig, configs, job
from ch14.attention.configs import HEAD_DIMS, rejection
from ch14.attention.lesson.experiments import (
    choose_peer,
    compare_with_cudnn,
    experiment,
    prepare_attention,
    source,
    verify,
)
from tilelab.records import results
from tilelab.sweeps.sweep import Sweep
from tilelab.sweeps.tunable import Roofline, TargetSpace, TunableKernel, load_ceiling


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
class AttentionSpace(TargetSpace):
    """Configurations at one shape of self-attention in bf16."""

    batch: int
    heads: int
    length: int
    d: int
    causal: bool = False
    compile_for: str | None = None

    @property
    def case(self) -> tuple:
        return self.batch, self.heads, self.heads, self.length, self.length, self.d, self.causal

    def label(self, config):
        return {
            "name": "sweep",
            "config": str(config),
            "kernel": str(config),
            "shape": [self.batch, self.heads, self.length, self.d],
            "dtype": "bf16",
        }

    def source(self):
        return source()

    def reject(self, config):
        return rejection(config, self.target)

    def job(self, config):
        return job(config, self.target, self.d, self.causal)

    def warm_up(self):
        choose_peer(self.case)
        return {}

    def measure(self, config):
        found = verify(config, (1, 2, 2, 515, 515, self.d, self.causal))
        if found["status"] != "ok":
            return found
        return found | self.measure_finalists([config], rounds=6, warm_s=0)[0]

    def measure_finalists(self, configs, **timing):
        candidates = {str(config): prepare_attention(config, self.causal) for config in configs}
        return [row | {"name": "sweep"} for row in compare_with_cudnn(candidates, self.case, **timing)[1:]]


@experiment("ch14_attention_sweep")
def measure_sweep():
    """Measure every configuration of `grid` at 4096 tokens, for head dimensions 64 and 128."""
    return [
        row
        for shape in ((4, 32, 4096, 64), (4, 16, 4096, 128))
        for row in Sweep(grid(), AttentionSpace(*shape)).finish()
    ]


def _make_space(shape: tuple[int, ...], dtype: str, target: str | None) -> AttentionSpace:
    if len(shape) != 4 or min(shape) < 1 or shape[3] not in HEAD_DIMS or shape[2] > 2**16:
        raise ValueError(
            "a shape is BATCH,HEADS,LENGTH,D with a length up to 65,536 and D 64 or 128; it is "
            f"{str(shape)[:60]}."
        )
    return AttentionSpace(*shape, compile_for=target)


def _make_roofline(_: str) -> Roofline:
    return Roofline(
        "operations per byte of K and V that TMA fetches, FLOP/B",
        "tflops",
        "TFLOP/s",
        lambda config: config.block_m,
        {"cuBLAS bf16": load_ceiling("cuBLAS bf16", "tflops")[0]},
    )


TUNABLE_KERNEL = TunableKernel(
    name="flash attention",
    shapes={"4 × 16 × 4096 × 128": (4, 16, 4096, 128), "4 × 32 × 4096 × 64": (4, 32, 4096, 64)},
    dtypes=("bf16",),
    presets={"the grid": grid, "the ladder": lambda _: list(configs().values())},
    axes={
        "tile": lambda c: f"{c.block_m}×{c.block_n}, {c.num_warps} warps",
        "stages, kernel": lambda c: str(c).split(",")[3].replace("hopper ", ""),
        "stages": lambda c: f"{c.num_stages} stages",
        "kernel": lambda c: c.kernel,
    },
    space=_make_space,
    load_record=lambda: results.load_record("ch14_attention_sweep", source()),
    roofline=_make_roofline,
    peer="cuDNN",
)
