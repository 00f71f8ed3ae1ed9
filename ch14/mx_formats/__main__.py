"""The command line of `ch14.mx_formats`: check and time quantising to a format, or compile it for another GPU."""

from __future__ import annotations

import sys

from ch14 import mx_formats
from ch14.mx_formats import experiments, number_formats
from tilelab import build, cli, device

LARGEST = 1 << 20


def _arguments(argv):
    parser = cli.make_parser("ch14.mx_formats", "Check bf16 to a block-scaled format against its spec, bit for bit, and "
                        "time it against torch's copy; with --target only compile it.")
    parser.add_argument("--format", default="mxfp8_e4m3", choices=mx_formats.FUSED)
    parser.add_argument("--shape", default="8192,16384", metavar="R,C", help="rows and columns (default 8192,16384)")
    parser.add_argument("--variant", default="best", metavar="NAME|best|all", help="a variant, best (default) or all")
    parser.add_argument("--rule", default="floor", choices=number_formats.RULES, help="how an E8M0 scale is chosen")
    parser.add_argument("--tiled", action="store_true", help="scales in tiles of 128 x 4, as Blackwell reads them")
    parser.add_argument("--target", choices=device.TARGETS[1:], help="compile only, for this target; needs no GPU")
    options = cli.parse_options(parser, argv)
    parts = options.shape.split(",")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and 0 < int(part) <= LARGEST for part in parts):
        parser.error(f"--shape is R,C, whole numbers from 1 to {LARGEST:,}; here it is {options.shape[:60]}.")
    options.shape = tuple(map(int, parts))
    form = number_formats.lookup(options.format)
    options.chosen = cli.choose_variants(parser, options.variant, mx_formats.configs(options.format))
    if options.tiled and form.scale == "fp32":
        parser.error(f"--tiled is for scales of one byte; those of {form.name} are float32.")
    if options.rule == "ceil" and form.scale != "e8m0":
        parser.error(f"--rule ceil is for E8M0 scales; those of {form.name} are {form.scale}.")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["name", "variant", "status", "ms", "gbps", "ratio", "registers", "smem", "issued", "load_bits",
               "store_bits", "reason"]
    return cli.run_and_report("ch14.mx_formats", columns, experiments.source(), options.json,
                      lambda: _compiled(options) if options.target else _measured(options))


def _compiled(options) -> list[dict]:
    rows = []
    for variant, config in options.chosen.items():
        report = build.build_one(mx_formats.job(options.format, config, options.target, options.rule,
                                                tiled=options.tiled))
        about = {"name": options.format, "variant": variant, "config": str(config)}
        rows.append(report.row() | experiments.instructions(report) | about)
    return rows


def _measured(options) -> list[dict]:
    if device.current().capability is None:
        raise device.Unsupported(f"timing needs a GPU; here is {device.current().describe()}: compile it with "
                                 "--target sm_90a.")
    rows = {name: experiments.verify(options.format, options.shape, options.rule, options.tiled, config)
            for name, config in options.chosen.items()}
    right = {name: experiments.quantiser(options.format, options.chosen[name], options.tiled, rule=options.rule)
             for name, row in rows.items() if row["status"] == "ok"}
    nbytes = dict.fromkeys(right, experiments.moved(options.format, options.shape))
    timed = {row["name"]: row for row in experiments.against_copy(right, options.shape, nbytes)} if right else {}
    about = {"name": options.format, "shape": list(options.shape), "rule": options.rule}
    return [row | timed.get(name, {}) | about | {"variant": name, "config": str(options.chosen[name])}
            for name, row in rows.items()]


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
