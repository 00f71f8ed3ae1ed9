"""The command of `ch14.descriptors`: check and time its variants, or compile them for another GPU."""

from ch14 import descriptors
from ch14.descriptors.configs import OPS, configs
from ch14.descriptors.lesson import experiments
from tilelab import cli


def _require(rows: int, columns: int) -> str:
    if columns % 8 or rows * columns > 1 << 33:
        return "columns in multiples of 8, which are 16 bytes of bf16, and up to 2^33 elements"
    return ""


COMMAND = cli.Command(
    module="ch14.descriptors",
    description="Check and time copy, add and gather by descriptors and by pointers against torch, in bf16; with "
    "--target only compile them.",
    options={
        "op": cli.choice(OPS, "copy"),
        "shape": cli.sizes("R,C", (16384, 16384), "rows and columns, a multiple of 8", rule=_require),
        "variant": cli.configs(
            lambda options: configs(options.op),
            "all",
            "; ".join(f"{op}: {', '.join(configs(op))}" for op in OPS) + "; best or all",
        ),
        "target": cli.target(),
    },
    columns="name config status ms gbps ratio ulps registers smem tma_load tma_store reason",
    source=experiments.source,
    needs=("has_tma", "timing descriptors", "compile them with --target sm_90a"),
    reject=lambda options, config, target: config.rejection(target),
    verify=lambda options, config: experiments.verify(options.op, config, *options.shape),
    compare=lambda options, right: experiments.time_against_torch(options.op, right, *options.shape),
    job=lambda options, config: descriptors.job(config, options.target, options.op),
)
