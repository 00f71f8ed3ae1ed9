"""The command line of `ch07.bulk_copy`: verify and time its configurations, or compile them for another GPU."""

from ch07 import bulk_copy
from ch07.bulk_copy.lesson import experiments
from tilelab import cli
from tilelab.runtime import device


def _parse_arguments(argv):
    parser = cli.make_parser(
        "ch07.bulk_copy", "Check and time bulk copies against torch; with --target only compile them."
    )
    parser.add_argument("--op", default="copy", choices=bulk_copy.OPS)
    parser.add_argument("--bytes", type=int, default=1 << 29, help="bytes of each array (default 512 MiB)")
    parser.add_argument(
        "--variant",
        default="all",
        metavar="NAME|best|all",
        help=f"{', '.join(bulk_copy.configs())}, best or all (default)",
    )
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    if options.bytes not in range(4, 1 << 40, 4):
        parser.error(f"--bytes is {options.bytes}; it must be a positive multiple of 4, below 2^40.")
    options.chosen = cli.choose_variants(parser, options.variant, bulk_copy.configs(options.op))
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parse_arguments(argv)
    columns = [
        "name",
        "config",
        "status",
        "ms",
        "gbps",
        "ratio",
        "ulps",
        "registers",
        "smem",
        "UBLKCP",
        "reason",
    ]
    return cli.run_and_report(
        "ch07.bulk_copy",
        columns,
        experiments.source(),
        options.json,
        lambda: (
            experiments.compile_for_targets({options.op: options.chosen}, [options.target])
            if options.target
            else _check_and_time(options)
        ),
    )


def _check_and_time(options) -> list[dict]:
    device.require("has_tma", "a bulk copy", "compile it with --target sm_90a")
    dtype = experiments.DTYPE[options.op]
    rows = {
        name: {
            "name": name,
            "config": str(config),
            **experiments.verify(options.op, config, dtype, options.bytes // dtype.itemsize),
        }
        for name, config in options.chosen.items()
    }
    right = {name: options.chosen[name] for name, row in rows.items() if row["status"] == "ok"}
    for timed in experiments.compare_with_torch(options.op, right, options.bytes) if right else []:
        rows[timed["name"]] |= timed
    return list(rows.values())


if __name__ == "__main__":
    cli.run_main(main)
