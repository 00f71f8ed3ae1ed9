"""The command line of `ch14.mx_formats`: check and time quantising to a format, or compile it for another GPU."""

from __future__ import annotations

from ch14 import mx_formats
from ch14.mx_formats import number_formats
from ch14.mx_formats.lesson import experiments
from tilelab import cli
from tilelab.runtime import build, device

MAX_SIDE = 1 << 20
COLUMNS = [
    "name",
    "variant",
    "status",
    "ms",
    "gbps",
    "ratio",
    "registers",
    "smem",
    "issued",
    "load_bits",
    "store_bits",
    "reason",
]


def _parse_options(argv):
    parser = cli.make_parser(
        "ch14.mx_formats",
        "Check the quantising of bf16 to a block-scaled format against its "
        "spec, bit for bit, and time it beside torch's copy; with --target only compile it.",
    )
    parser.add_argument("--format", default="mxfp8_e4m3", choices=mx_formats.FUSED)
    parser.add_argument(
        "--shape", default="8192,16384", metavar="R,C", help="rows and columns (default 8192,16384)"
    )
    parser.add_argument(
        "--variant", default="best", metavar="NAME|best|all", help="a configuration, best (default) or all"
    )
    parser.add_argument(
        "--rule", default="floor", choices=number_formats.RULES, help="how an E8M0 scale is chosen"
    )
    parser.add_argument(
        "--tiled", action="store_true", help="scales in tiles of 128 x 4, as Blackwell reads them"
    )
    parser.add_argument(
        "--target", choices=device.TARGETS[1:], help="compile only, for this target; needs no GPU"
    )
    options = cli.parse_options(parser, argv)
    try:
        rows, columns = cli._parse_numbers(options.shape)
    except ValueError:
        rows = columns = 0
    if not 1 <= min(rows, columns) <= max(rows, columns) <= MAX_SIDE:
        parser.error(
            f"--shape must be R,C, whole numbers from 1 to {MAX_SIDE:,}; it is {options.shape[:60]}."
        )
    options.shape = rows, columns
    options.configs = cli.choose_variants(parser, options.variant, mx_formats.configs(options.format))
    try:
        mx_formats.empty(options.shape, options.format, "meta", options.tiled)
        number_formats.check_rule(options.rule, number_formats.lookup(options.format))
    except ValueError as error:
        parser.error(str(error))
    return options


def _compile(options) -> list[dict]:
    rows = []
    for variant, config in options.configs.items():
        report = build.build_one(
            mx_formats.job(config, options.target, options.format, rule=options.rule, tiled=options.tiled)
        )
        about = {"name": options.format, "variant": variant, "config": str(config)}
        rows.append(report.row() | experiments.count_instructions(report) | about)
    return rows


def _measure(options) -> list[dict]:
    if device.current().capability is None:
        raise device.Unsupported(
            f"timing needs a GPU; here is {device.current().describe()}: compile with --target."
        )
    rows = {
        name: experiments.verify(options.format, options.shape, options.rule, options.tiled, config)
        for name, config in options.configs.items()
    }
    candidates = {
        name: experiments.quantise_candidate(
            options.format, options.configs[name], tiled=options.tiled, rule=options.rule
        )
        for name, row in rows.items()
        if row["status"] == "ok"
    }
    nbytes = dict.fromkeys(candidates, experiments.bytes_moved(options.format, options.shape))
    timed = experiments.compare_with_copy(candidates, options.shape, nbytes) if candidates else []
    timed = {row["name"]: row for row in timed}
    about = {"name": options.format, "shape": list(options.shape), "rule": options.rule}
    return [
        row | timed.get(name, {}) | about | {"variant": name, "config": str(options.configs[name])}
        for name, row in rows.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 if all is fine, 1 for a wrong result, 2 if something could not run."""
    options = _parse_options(argv)
    return cli.run_and_report(
        "ch14.mx_formats",
        COLUMNS,
        experiments.source(),
        options.json,
        lambda: _compile(options) if options.target else _measure(options),
    )


if __name__ == "__main__":
    cli.run_main(main)
