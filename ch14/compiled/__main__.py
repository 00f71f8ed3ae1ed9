"""The command line of `ch14.compiled`: compile a workload in its modes, check them, time them, and say what ran."""

from __future__ import annotations

import logging
import sys

from ch14.compiled.lesson import experiments, workloads
from tilelab import cli
from tilelab.runtime import device

COLUMNS = [
    "name",
    "status",
    "compile_s",
    "caches",
    "ms",
    "tflops",
    "ratio",
    "error",
    "winner",
    "main",
    "UTMALDG",
    "UTMASTG",
    "proof",
    "reason",
]


def _parse_options(argv):
    parser = cli.make_parser(
        "ch14.compiled",
        "Compile a workload with torch.compile in its modes, cold, check them "
        "against float64 and time them; count the instructions of the kernel that won if its code "
        "is there.",
    )
    parser.add_argument("--workload", default="matmul", choices=tuple(workloads.FAMILIES))
    parser.add_argument(
        "--shape", help="M,N,K of a product; T,HIDDEN,INNER of the MLP; B,H,HK,S,D of attention"
    )
    parser.add_argument(
        "--mode",
        default="all",
        metavar="NAME|all",
        help=f"{', '.join(workloads.GEMM_MODES)}; for attention {', '.join(workloads.Attention.modes)}; "
        "or all (default)",
    )
    options = cli.parse_options(parser, argv)
    usual = next(shape for family, shape, _ in experiments.CASES if family == options.workload)
    try:
        options.shape = usual if options.shape is None else cli._parse_numbers(options.shape)
    except ValueError:
        parser.error(
            f"--shape takes sizes such as {','.join(map(str, usual))}; it is {options.shape[:60]!r}."
        )
    try:
        work = workloads.make_workload(options.workload, options.shape, where="meta")
        if options.mode != "all":
            workloads.check_mode(work, options.mode)
    except ValueError as error:
        parser.error(str(error))
    wanted = work.modes if options.mode == "all" else (options.mode,)
    options.modes = tuple(dict.fromkeys((work.peer, *wanted)))  # every time stands beside the peer's
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status of `cli.run_and_report`."""
    options = _parse_options(argv)

    def measure():
        device.require("has_tma", "timing torch.compile", "read results/")
        if options.json != "-":
            logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        rows = experiments.measure_cases([(options.workload, options.shape, options.modes)])
        return experiments.make_table(experiments.drop_details(rows), [])

    return cli.run_and_report("ch14.compiled", COLUMNS, experiments.source(), options.json, measure)


if __name__ == "__main__":
    cli.run_main(main)
