"""The command line of `ch10.tile_pipeline`: check and time its variants, or compile them for another GPU."""

from __future__ import annotations

from ch10.tile_pipeline import LARGEST_EXTENT, experiments
from ch10.tile_pipeline.configs import DIMENSIONS, configs
from tilelab import cli, device


def _parse_arguments(argv):
    parser = cli.make_parser("ch10.tile_pipeline", "Check and time tiles moved by tensor maps against torch; with "
                             "--target only compile them.")
    parser.add_argument("--op", default="copy", choices=DIMENSIONS)
    parser.add_argument("--shape", metavar="R,C", help="rows and columns, for add_shared and accumulate B,R,C with a "
                        "batch before them (default 512 MiB)")
    parser.add_argument("--variant", default="all", metavar="NAME|best|all",
                        help="a variant of the operation, best or all (default)")
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    options.configs = cli.choose_variants(parser, options.variant, configs(options.op))
    form, default = ("R,C", experiments.LARGE) if DIMENSIONS[options.op] == 2 else ("B,R,C", experiments.BATCHED)
    options.shape = default if options.shape is None else cli.require_sizes(
        parser, f"--shape of {options.op}", options.shape, form, LARGEST_EXTENT)
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _parse_arguments(argv)
    columns = ["name", "config", "status", "ms", "gbps", "ratio", "error", "registers", "smem", "UTMALDG",
               "UTMASTG", "UTMAREDG", "reason"]
    return cli.run_and_report("ch10.tile_pipeline", columns, experiments.source(), options.json, lambda: (
        experiments.compile_variants({options.op: options.configs}, [options.target]) if options.target is not None
        else _check_and_time(options)))


def _check_and_time(options) -> list[dict]:
    device.require("has_tma", "a copy by tensor map", "compile it with --target sm_90a")
    op, shape = options.op, options.shape
    return cli.check_and_time(options.configs, lambda config: experiments.verify(op, config, shape),
                              lambda right: experiments.compare_with_torch(op, right, shape))


if __name__ == "__main__":
    cli.run_main(main)
