"""The command line of `ch10.tile_pipeline`: check and time its variants, compile them, or report a load that fails."""

from __future__ import annotations

import pathlib
import sys

from ch10.tile_pipeline import LARGEST_EXTENT
from ch10.tile_pipeline.configs import DIMENSIONS, configs
from ch10.tile_pipeline.lesson import experiments, map_report
from tilelab import cli
from tilelab.runtime import device, files
from tilelab.runtime.cuda import CompileError


def _parse_arguments(argv):
    parser = cli.make_parser(
        "ch10.tile_pipeline",
        "Check and time tiles moved by tensor maps against torch; with --target only compile them.",
    )
    parser.add_argument("--op", default="copy", choices=DIMENSIONS)
    parser.add_argument(
        "--shape",
        metavar="R,C",
        help="rows and columns, for add_shared and accumulate B,R,C with a "
        "batch before them (default 512 MiB)",
    )
    parser.add_argument(
        "--variant",
        default="all",
        metavar="NAME|best|all",
        help="a variant of the operation, best or all (default)",
    )
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    parser.add_argument(
        "--report",
        metavar="PATH",
        help="write a bug report of a load by tensor map to PATH, with a reproducer; --load says which",
    )
    parser.add_argument(
        "--load",
        metavar="FIELD=VALUE,...",
        help="the load to report: dtype, shape, strides, box, "
        "corner (such as shape=100x64,box=16x32,corner=0x-4, innermost last), swizzle, l2_promotion, "
        "fill, start (bytes past an aligned address), extra (bytes that the barrier expects too many); "
        "default shape=65536,box=1024",
    )
    options = cli.parse_options(parser, argv)
    if options.load is not None and options.report is None:
        parser.error("--load goes with --report.")
    if options.report is not None:
        return _check_report(parser, options)
    form, default = (
        ("R,C", experiments.LARGE) if DIMENSIONS[options.op] == 2 else ("B,R,C", experiments.BATCHED)
    )
    options.shape = (
        default
        if options.shape is None
        else cli.require_sizes(parser, f"--shape of {options.op}", options.shape, form, LARGEST_EXTENT)
    )
    options.configs = cli.choose_variants(parser, options.variant, configs(options.op, options.shape))
    return options


def _check_report(parser, options):
    for name in ("op", "shape", "variant", "json"):
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--report goes with --load and --target only; --{name} was given too.")
    if reason := cli.unwritable_reason(options.report):
        parser.error(f"--report takes a file; {reason}.")
    here = device.current()
    options.target = options.target or (here.target if here.has_tma else "sm_90a")
    try:
        if not device.target_limits(options.target).has_tma:
            raise ValueError(f"--target must have TMA, sm_90a or newer; it is {options.target}")
        map_report.parse_load(options.load or "")
    except ValueError as error:
        parser.error(f"{device.first_line(error)}.")
    return options


def _write_report(options) -> int:
    """Write the report and print its verdict; return 1 if it may be a bug, 2 if it could not be written."""
    try:
        text, verdict, may_be_bug = map_report.write_report(options.load or "", options.target)
        files.write_atomically(pathlib.Path(options.report), text)
    except (OSError, CompileError) as error:
        print(f"python -m ch10.tile_pipeline: {device.first_line(error)}.", file=sys.stderr)
        return 2
    print(
        verdict, f"{options.report} holds the report and the reproducer; nothing was sent anywhere.", sep="\n"
    )
    return int(may_be_bug)


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _parse_arguments(argv)
    if options.report is not None:
        return _write_report(options)
    columns = [
        "name",
        "config",
        "status",
        "ms",
        "gbps",
        "ratio",
        "error",
        "registers",
        "smem",
        "UTMALDG",
        "UTMASTG",
        "UTMAREDG",
        "reason",
    ]
    return cli.run_and_report(
        "ch10.tile_pipeline",
        columns,
        experiments.source(),
        options.json,
        lambda: (
            experiments.compile_variants({options.op: options.configs}, [options.target])
            if options.target is not None
            else _check_and_time(options)
        ),
    )


def _check_and_time(options) -> list[dict]:
    device.require("has_tma", "a copy by tensor map", "compile it with --target sm_90a")
    op, shape = options.op, options.shape
    return cli.check_and_time(
        options.configs,
        lambda config: experiments.verify(op, config, shape),
        lambda right: experiments.compare_with_torch(op, right, shape),
    )


if __name__ == "__main__":
    cli.run_main(main)
