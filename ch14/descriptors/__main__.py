"""The command line of `ch14.descriptors`: check and time its variants, or compile them for another GPU."""

from __future__ import annotations

from ch14 import descriptors
from ch14.descriptors.configs import OPS, configs
from ch14.descriptors.lesson import experiments
from tilelab import cli
from tilelab.runtime import build, device


def _parse_options(argv):
    parser = cli.make_parser(
        "ch14.descriptors",
        "Check and time copy, add and gather by descriptors and by pointers "
        "against torch, in bf16; with --target only compile them.",
    )
    parser.add_argument("--op", default="copy", choices=OPS)
    parser.add_argument(
        "--shape",
        default="16384,16384",
        metavar="R,C",
        help="rows and columns, a multiple of 8 (default 16384,16384)",
    )
    parser.add_argument(
        "--variant",
        default="all",
        metavar="NAME|best|all",
        help="; ".join(f"{op}: {', '.join(configs(op))}" for op in OPS) + "; best or all (default)",
    )
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    try:
        options.rows, options.columns = cli._parse_numbers(options.shape)
    except ValueError:
        parser.error(f"--shape takes two sizes such as 16384,16384; it is {options.shape[:60]!r}.")
    if (
        options.rows < 1
        or options.columns < 8
        or options.columns % 8
        or options.rows * options.columns > 1 << 33
    ):
        parser.error(
            "--shape takes rows from 1 and columns in multiples of 8, which are 16 bytes of bf16, and up to "
            f"2^33 elements; it is {options.shape[:60]}."
        )
    options.chosen = cli.choose_variants(parser, options.variant, configs(options.op))
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _parse_options(argv)
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
        "tma_load",
        "tma_store",
        "reason",
    ]
    return cli.run_and_report(
        "ch14.descriptors",
        columns,
        experiments.source(),
        options.json,
        lambda: _measure(options) if options.target is None else _compile(options),
    )


def _compile(options) -> list[dict]:
    reasons = {name: config.rejection(options.target) for name, config in options.chosen.items()}
    jobs = {
        name: descriptors.job(config, options.target, options.op)
        for name, config in options.chosen.items()
        if not reasons[name]
    }
    reports = {report.job.name: report for report in build.build(jobs.values())}
    return [
        {**reports[jobs[name].name].row(), "name": name, "config": str(config)}
        if name in jobs
        else {
            "name": name,
            "config": str(config),
            "target": options.target,
            "status": "unsupported",
            "reason": reasons[name],
        }
        for name, config in options.chosen.items()
    ]


def _measure(options) -> list[dict]:
    device.require("has_tma", "timing descriptors", "compile them with --target sm_90a")
    op, shape = options.op, (options.rows, options.columns)
    reasons = {name: config.rejection(device.current().target) for name, config in options.chosen.items()}
    verdicts = {
        name: {"status": "unsupported", "reason": reason} if reason else experiments.verify(op, name, *shape)
        for name, reason in reasons.items()
    }
    correct = {name: options.chosen[name] for name, row in verdicts.items() if row["status"] == "ok"}
    timed = (
        {row["name"]: row for row in experiments.time_against_torch(op, correct, *shape)} if correct else {}
    )
    return [
        {"name": name, "config": str(options.chosen[name]), **row, **timed.get(name, {})}
        for name, row in verdicts.items()
    ]


if __name__ == "__main__":
    cli.run_main(main)
