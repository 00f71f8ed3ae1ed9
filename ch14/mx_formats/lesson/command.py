"""The command of `ch14.mx_formats`: check and time quantising to a format, or compile it for another GPU."""

import functools

from ch14 import mx_formats
from ch14.mx_formats import number_formats
from ch14.mx_formats.lesson import experiments
from tilelab import cli
from tilelab.runtime import build


def _find_configs(options: cli.Options) -> dict:
    return mx_formats.configs(options.format)


def _complete(options: cli.Options) -> None:
    mx_formats.empty(options.shape, options.format, "meta", options.tiled)
    number_formats.check_rule(options.rule, number_formats.lookup(options.format))


def _verify(options: cli.Options, config: mx_formats.MxConfig) -> dict:
    return experiments.verify(options.format, options.shape, options.rule, options.tiled, config)


def _compare(options: cli.Options, right: dict) -> list[dict]:
    how = {"tiled": options.tiled, "rule": options.rule}
    prepare = functools.partial(experiments.quantise_candidate, options.format, **how)
    candidates = {name: prepare(config) for name, config in right.items()}
    moved = experiments.bytes_moved(options.format, options.shape)
    return experiments.compare_with_copy(candidates, options.shape, dict.fromkeys(candidates, moved))


def _make_job(options: cli.Options, config: mx_formats.MxConfig) -> build.Job:
    how = {"tiled": options.tiled, "rule": options.rule}
    return mx_formats.job(config, options.target, options.format, **how)


def _label(options: cli.Options, name: str, config: mx_formats.MxConfig) -> dict:
    names = {"name": options.format, "variant": name, "config": str(config)}
    return names | {"shape": list(options.shape), "rule": options.rule}


COMMAND = cli.Command(
    module="ch14.mx_formats",
    description="Check the quantising of bf16 to a block-scaled format against its spec, bit for bit, and time it "
    "beside torch's copy; with --target only compile it.",
    options={
        "format": cli.choice(mx_formats.FUSED, "mxfp8_e4m3"),
        "shape": cli.sizes("R,C", (8192, 16384), "rows and columns", largest=1 << 20),
        "variant": cli.configs(_find_configs, "best", "a configuration, best or all"),
        "rule": cli.choice(number_formats.RULES, "floor", "how an E8M0 scale is chosen"),
        "tiled": cli.flag("scales in tiles of 128 x 4, as Blackwell reads them"),
        "target": cli.target(),
    },
    complete=_complete,
    columns="name variant status ms gbps ratio registers smem issued load_bits store_bits reason",
    source=experiments.source,
    needs=("capability", "timing", "compile with --target"),
    verify=_verify,
    compare=_compare,
    job=_make_job,
    describe=experiments.count_instructions,
    label=_label,
)
