"""The command of `ch07.bulk_copy`: verify and time its configurations, or compile them for another GPU."""

from ch07 import bulk_copy
from ch07.bulk_copy.lesson import experiments
from tilelab import cli


def _verify(options: cli.Options, config: bulk_copy.BulkConfig) -> dict:
    dtype = experiments.DTYPE[options.op]
    return experiments.verify(options.op, config, dtype, options.bytes // dtype.itemsize)


ALLOWED = "a positive multiple of 4, below 2^40"
VARIANTS = f"{', '.join(bulk_copy.configs())}, best or all"
COMMAND = cli.Command(
    module="ch07.bulk_copy",
    description="Check and time bulk copies against torch; with --target only compile them.",
    options={
        "op": cli.choice(bulk_copy.OPS, "copy"),
        "bytes": cli.number(1 << 29, range(4, 1 << 40, 4), ALLOWED, "bytes of each array (default 512 MiB)"),
        "variant": cli.configs(lambda options: bulk_copy.configs(options.op), "all", VARIANTS),
        "target": cli.target(),
    },
    columns="name config status ms gbps ratio ulps registers smem UBLKCP reason",
    source=experiments.source,
    needs=("has_tma", "a bulk copy", "compile it with --target sm_90a"),
    verify=_verify,
    compare=lambda options, right: experiments.compare_with_torch(options.op, right, options.bytes),
    job=lambda options, config: bulk_copy.job(config, options.target, experiments.ELEMENT[options.op]),
)
