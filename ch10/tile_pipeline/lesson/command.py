"""The command of `ch10.tile_pipeline`: check and time its variants, compile them, or report a load that fails."""

import pathlib

from ch10 import tile_pipeline
from ch10.tile_pipeline import LARGEST_EXTENT
from ch10.tile_pipeline.configs import DIMENSIONS, configs
from ch10.tile_pipeline.lesson import experiments, map_report
from tilelab import cli
from tilelab.runtime import device, files


def _choose_shape(options: cli.Options) -> tuple[int, ...]:
    return options.shape or (experiments.LARGE if DIMENSIONS[options.op] == 2 else experiments.BATCHED)


def _parse_shape(text: str, options: cli.Options) -> tuple[int, ...]:
    return cli.parse_sizes(text, "R,C" if DIMENSIONS[options.op] == 2 else "B,R,C", LARGEST_EXTENT)


def _find_configs(options: cli.Options) -> dict:
    return configs(options.op, _choose_shape(options))


def _complete(options: cli.Options) -> None:
    options.shape = _choose_shape(options)
    if options.load is not None and options.report is None:
        raise ValueError("--load goes with --report.")
    if options.report is not None:
        here = device.current()
        options.target = options.target or (here.target if here.has_tma else "sm_90a")
        if not device.target_limits(options.target).has_tma:
            raise ValueError(f"--target must have TMA, sm_90a or newer; it is {options.target}.")
        map_report.parse_load(options.load or "")


def _write_report(options: cli.Options) -> int:
    """Write the report and print its verdict; return 1 if it may be a bug."""
    text, verdict, may_be_bug = map_report.write_report(options.load or "", options.target)
    files.write_atomically(pathlib.Path(options.report), text)
    options.say(verdict, f"{options.report} holds the report and the reproducer; nothing was sent anywhere.")
    return int(may_be_bug)


COMMAND = cli.Command(
    module="ch10.tile_pipeline",
    description="Check and time tiles moved by tensor maps against torch; with --target only compile them.",
    options={
        "op": cli.choice(DIMENSIONS, "copy"),
        "shape": cli.Option(
            "rows and columns, for add_shared and accumulate B,R,C with a batch before them (default 512 MiB)",
            _parse_shape,
            metavar="R,C",
        ),
        "variant": cli.configs(_find_configs, "all", "a variant of the operation, best or all"),
        "target": cli.target(),
        "report": cli.file("write a bug report of the load in --load to PATH, with a reproducer"),
        "load": cli.Option(
            "the load to report: dtype, shape, strides, box, corner (such as shape=100x64,box=16x32,corner=0x-4, "
            "innermost last), swizzle, l2_promotion, fill, start (bytes past an aligned address), extra (bytes that "
            "the barrier expects too many); default shape=65536,box=1024",
            metavar="FIELD=VALUE,...",
        ),
    },
    complete=_complete,
    alone={"report": ("load", "target")},
    actions={"report": _write_report},
    columns="name config status ms gbps ratio error registers smem UTMALDG UTMASTG UTMAREDG reason",
    source=experiments.source,
    needs=("has_tma", "a copy by tensor map", "compile it with --target sm_90a"),
    verify=lambda options, config: experiments.verify(options.op, config, options.shape),
    compare=lambda options, right: experiments.compare_with_torch(options.op, right, options.shape),
    job=lambda options, config: tile_pipeline.job(config, options.target),
)
