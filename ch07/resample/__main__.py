"""The command line of `ch07.resample`: correctness, performance, the profiler's counters, or a single launch."""

from __future__ import annotations

import argparse
import sys

import torch

from ch07 import resample
from ch07.resample import LADDER, experiments
from tilelab import build, cli, device

MODES = ("correctness", "performance", "ncu", "single_run")
DTYPES = {str(dtype)[6:]: dtype for dtype in resample.ELEMENTS}


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"B,S,T,D, four whole numbers from 1; here it is {text!r}.")
    return shape


def _arguments(argv):
    parser = cli.make_parser("ch07.resample", "Linear interpolation of feature rows between irregular source times.")
    parser.add_argument("--mode", default="correctness", choices=MODES)
    parser.add_argument("--kernel", default="best", metavar="NAME[,NAME…]|best|all", help=f"of {', '.join(LADDER)}")
    parser.add_argument("--shape", type=_shape, default=experiments.PROFILED, metavar="B,S,T,D")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    named = {"best": [resample.BEST], "all": list(LADDER)}.get(options.kernel, options.kernel.split(","))
    if any(name not in LADDER for name in named):
        parser.error(f"--kernel is best, all or of {', '.join(LADDER)}; here it is {options.kernel}.")
    if options.target and options.mode != parser.get_default("mode"):
        parser.error(f"--target only compiles: leave out --mode {options.mode}.")
    if "bulk_rows" in named and options.shape[3] * DTYPES[options.dtype].itemsize % 16:
        if options.kernel != "all":
            parser.error("bulk_rows copies rows of a multiple of 16 bytes; a row is "
                         f"{options.shape[3] * DTYPES[options.dtype].itemsize}: use another kernel.")
        named.remove("bulk_rows")
    options.kernels = named
    return options


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when all is fine, 1 for a wrong result, 2 when something could not run."""
    options = _arguments(argv)
    columns = ["kernel", "status", "ulps", "us", "gbps", "ratio", *experiments.METRICS, "registers",
               "smem", "UBLKCP", "reason"]
    return cli.run_and_report("ch07.resample", columns, experiments.source(), options.json,
                      lambda: _compiled(options) if options.target else _ran(options))


def _compiled(options) -> list[dict]:
    jobs = [resample.job(kernel, options.target, DTYPES[options.dtype], options.shape) for kernel in options.kernels]
    reports = {report.job.name: report for report in build.build(jobs)}
    return [{"kernel": name, **reports[name].row()} for name in options.kernels]


def _ran(options) -> list[dict]:
    device.require("has_tma", "resample", "compile it with --target sm_90a")
    dtype = DTYPES[options.dtype]
    if options.mode == "ncu":
        return experiments.profile(options.kernels, options.shape, dtype)
    if options.mode == "correctness":
        return [{"kernel": kernel, **experiments.verify(kernel, options.shape, dtype, odd=options.shape[1] > 2)}
                for kernel in options.kernels]
    if options.mode == "performance":
        rows = experiments.against_copy(options.shape, options.kernels, dtype)
        return [{"kernel": row["name"], "us": row["ms"] * 1e3 if row.get("ms") else None, **row} for row in rows]
    given = experiments.inputs(*options.shape, dtype)
    for kernel in options.kernels:
        resample.resample(*given, kernel=kernel, validate=False)
        torch.cuda.synchronize()
    return [{"kernel": kernel, "status": "ok"} for kernel in options.kernels]


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
