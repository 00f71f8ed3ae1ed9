"""The command line of `ch14.compiled`: compile a workload in its modes, check them, time them, and say what ran."""

from __future__ import annotations

import functools
import sys

from ch14 import compiled
from ch14.compiled import experiments, worker
from tilelab import cli, device

COLUMNS = ["name", "status", "compile_s", "caches", "ms", "tflops", "ratio", "error", "winner", "main", "UTMALDG",
           "UTMASTG", "proof", "reason"]


def _arguments(argv):
    parser = cli.make_parser("ch14.compiled", "Compile a workload with torch.compile in its modes, cold, check them against "
                        "float64 and time them; with the instructions of the kernel that won, where they can be had.")
    parser.add_argument("--workload", default="matmul", choices=tuple(compiled.FAMILIES))
    parser.add_argument("--shape", help="M,N,K of a product; T,HIDDEN,INNER of the MLP; B,H,HK,S,D of attention")
    parser.add_argument("--mode", default="all", metavar="NAME|all",
                        help=f"{', '.join(compiled.GEMM_MODES)}; for attention {', '.join(compiled.Attention.modes)}; "
                        "or all (default)")
    options = cli.parse_options(parser, argv)
    usual = next(shape for family, shape, _ in experiments.CASES if family == options.workload)
    try:
        options.shape = usual if options.shape is None else tuple(map(int, options.shape.split(",")))
    except ValueError:
        parser.error(f"--shape takes sizes such as {','.join(map(str, usual))}; here it is {options.shape[:60]!r}.")
    try:
        work = compiled.workload(options.workload, options.shape, where="meta")
        if options.mode != "all":
            compiled.check_mode(work, options.mode)
    except ValueError as error:
        parser.error(str(error))
    wanted = compiled.configs(options.workload) if options.mode == "all" else (options.mode,)
    options.modes = tuple(dict.fromkeys((work.peer, *wanted)))  # every time is beside the peer's
    return options


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)

    def measure():
        device.require("has_tma", "timing what torch.compile makes", "read results/")
        say = worker.quiet if options.json == "-" else functools.partial(print, flush=True)
        rows = experiments.measured(((options.workload, options.shape, options.modes),), say)
        rows = [{key: value for key, value in row.items() if key not in ("code", "decided")} for row in rows]
        return experiments.table(rows, [])
    return cli.run_and_report("ch14.compiled", COLUMNS, experiments.source(), options.json, measure)


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
