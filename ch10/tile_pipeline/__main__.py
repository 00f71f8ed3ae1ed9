"""The command line of `ch10.tile_pipeline`: check and time its variants, or compile them for another GPU."""

from __future__ import annotations

import sys

from ch10 import tile_pipeline
from ch10.tile_pipeline import experiments
from ch10.tile_pipeline.checks import LARGEST
from ch10.tile_pipeline.configs import configs
from tilelab import build, cli, device


def _arguments(argv):
    parser = cli.make_parser("ch10.tile_pipeline", "Check and time tiles moved by tensor maps against torch; with --target "
                        "only compile them.")
    parser.add_argument("--op", default="copy", choices=experiments.OPS)
    parser.add_argument("--shape", metavar="R,C", help="rows and columns, for add_shared and accumulate B,R,C with a "
                        "batch before them (default 512 MiB)")
    parser.add_argument("--variant", default="all", metavar="NAME|best|all",
                        help="a variant of the operation, best or all (default)")
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    options.shape = _shape(parser, options)
    options.chosen = cli.choose_variants(parser, options.variant, configs(options.op))
    return options


def _shape(parser, options) -> tuple[int, ...]:
    wanted = experiments.dimensions(options.op)
    if options.shape is None:
        return experiments.LARGE if wanted == 2 else experiments.BATCHED
    parts = options.shape.split(",")
    if len(parts) != wanted or not all(part.isascii() and part.isdigit() and len(part) < 12
                                       and 0 < int(part) <= LARGEST for part in parts):
        parser.error(f"--shape of {options.op} is {'R,C' if wanted == 2 else 'B,R,C'}, whole numbers from 1 to "
                     f"{LARGEST:,}; here it is {options.shape[:60]}.")
    return tuple(map(int, parts))


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["name", "config", "status", "ms", "gbps", "ratio", "error", "registers", "smem", "UTMALDG",
               "UTMASTG", "UTMAREDG", "reason"]
    return cli.run_and_report("ch10.tile_pipeline", columns, experiments.source(), options.json,
                      lambda: _compiled(options) if options.target else _measured(options))


def _compiled(options) -> list[dict]:
    jobs = {name: tile_pipeline.job(config, options.target) for name, config in options.chosen.items()}
    reports = {report.job.name: report for report in build.build(jobs.values())}
    return [{**reports[job.name].row(), "name": name, "config": job.name} for name, job in jobs.items()]


def _measured(options) -> list[dict]:
    device.require("has_tma", "a copy by tensor map", "compile it with --target sm_90a")
    checked = {name: experiments.verify(options.op, config, options.shape) for name, config in options.chosen.items()}
    right = {name: options.chosen[name] for name, row in checked.items() if row["status"] == "ok"}
    timed = experiments.against_torch(options.op, right, options.shape) if right else []
    timed = {row["name"]: row for row in timed}
    return [{"name": name, "config": str(options.chosen[name]), **row, **timed.get(name, {})}
            for name, row in checked.items()]


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
