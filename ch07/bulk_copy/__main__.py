"""The command line of `ch07.bulk_copy`: check and time its variants, or compile them for another GPU."""

from __future__ import annotations

import sys

import torch

from ch07 import bulk_copy
from ch07.bulk_copy import experiments
from tilelab import build, cli, device


def _arguments(argv):
    parser = cli.make_parser("ch07.bulk_copy", "Check and time bulk copies against torch; with --target only compile them.")
    parser.add_argument("--op", default="copy", choices=experiments.OPS)
    parser.add_argument("--bytes", type=int, default=1 << 29, help="of each array (default 512 MiB)")
    parser.add_argument("--variant", default="all", metavar="NAME|best|all",
                        help=f"{', '.join(bulk_copy.configs('copy'))}, best or all (default)")
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    if options.bytes < 4 or options.bytes % 4:
        parser.error(f"--bytes must be a multiple of 4; here it is {options.bytes}.")
    options.chosen = cli.choose_variants(parser, options.variant, bulk_copy.configs(options.op))
    return options


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["name", "config", "status", "ms", "gbps", "ratio", "ulps", "registers", "smem", "UBLKCP", "reason"]
    return cli.run_and_report("ch07.bulk_copy", columns, experiments.source(), options.json,
                      lambda: _compiled(options) if options.target else _measured(options))


def _compiled(options) -> list[dict]:
    element = "u8" if options.op == "copy" else "float"
    jobs = {name: bulk_copy.job(config, options.target, element) for name, config in options.chosen.items()}
    reports = {report.job.name: report for report in build.build(jobs.values())}
    return [{**reports[job.name].row(), "name": name, "config": job.name} for name, job in jobs.items()]


def _measured(options) -> list[dict]:
    device.require("has_tma", "a bulk copy", "compile it with --target sm_90a")
    dtype = torch.uint8 if options.op == "copy" else torch.float32
    checked = {name: experiments.verify(options.op, config, dtype, options.bytes // dtype.itemsize)
               for name, config in options.chosen.items()}
    right = {name: options.chosen[name] for name, row in checked.items() if row["status"] == "ok"}
    timed = experiments.against_torch(options.op, right, options.bytes) if right else []
    timed = {row["name"]: row for row in timed}
    return [{"name": name, "config": str(options.chosen[name]), **row, **timed.get(name, {})}
            for name, row in checked.items()]


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
