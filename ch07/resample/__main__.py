"""The command line of `ch07.resample`: correctness, performance, the profiler's counters, or a single launch."""

import argparse
import os

import torch

from ch07 import resample
from ch07.resample import BEST, ELEMENTS, LADDER
from ch07.resample.lesson import experiments
from tilelab import cli
from tilelab.measure import bench
from tilelab.runtime import build, device

MODES = ("correctness", "performance", "ncu", "single_run")
DTYPES = {str(dtype)[6:]: dtype for dtype in ELEMENTS}


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = cli._parse_numbers(text)
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is no shape; give B,S,T,D, four positive whole numbers."
        )
    return shape


def _parse_iterations(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text[:9]) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a whole number from 2 to 10,000.")
    return int(text)


def _parse_arguments(argv):
    parser = cli.make_parser(
        "ch07.resample", "Linear interpolation of feature rows between irregular source times."
    )
    parser.add_argument("--mode", default="correctness", choices=MODES)
    parser.add_argument(
        "--kernel",
        default="best",
        metavar="NAME[,NAME…]|best|all",
        help=f"one or more of {', '.join(LADDER)}; best (default) or all",
    )
    parser.add_argument(
        "--shape",
        type=_parse_shape,
        default=experiments.PROFILED,
        metavar="B,S,T,D",
        help="batch, source times, target times, features (default "
        f"{','.join(map(str, experiments.PROFILED))})",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument(
        "--iterations",
        type=_parse_iterations,
        default=bench.ROUNDS,
        metavar="N",
        help="rounds of --mode performance, 2 to 10,000; a round times each kernel beside the copy",
    )
    parser.add_argument("--report", metavar="FILE", help="keep the report of --mode ncu in FILE.ncu-rep")
    parser.add_argument("--target", help="compile only, for this target (sm_100a); needs no GPU")
    options = cli.parse_options(parser, argv)
    options.dtype = DTYPES[options.dtype]
    named = {"best": [BEST], "all": list(LADDER)}.get(options.kernel, options.kernel.split(","))
    if any(name not in LADDER for name in named):
        parser.error(f"unknown --kernel {options.kernel}; choose best, all or of {', '.join(LADDER)}.")
    if options.target and options.mode != "correctness":
        parser.error(f"--target only compiles; leave out --mode {options.mode}.")
    if options.report and options.mode != "ncu":
        parser.error("--report keeps the profiler's report; add --mode ncu.")
    if options.report:
        options.report = f"{options.report.removesuffix('.ncu-rep')}.ncu-rep"
        if reason := cli.unwritable_reason(options.report):
            parser.error(f"--report takes a file; {reason}.")
        options.report = os.path.abspath(options.report)
    options.kernels = [name for name in named if experiments.can_run(name, options.shape, options.dtype)]
    if len(options.kernels) < len(named) and options.kernel != "all":
        parser.error(
            "bulk_rows needs rows of a multiple of 16 bytes; a row takes "
            f"{options.shape[3] * options.dtype.itemsize}: choose another kernel."
        )
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parse_arguments(argv)
    columns = [
        "kernel",
        "status",
        "ulps",
        "us",
        "gbps",
        "ratio",
        *experiments.METRICS,
        "registers",
        "smem",
        "UBLKCP",
        "reason",
    ]
    return cli.run_and_report(
        "ch07.resample", columns, experiments.source(), options.json, lambda: _run(options)
    )


def _run(options) -> list[dict]:
    kernels, shape, dtype = options.kernels, options.shape, options.dtype
    if options.target:
        jobs = [resample.job(kernel, options.target, dtype, shape) for kernel in kernels]
        return [{"kernel": report.job.name, **report.row()} for report in build.disassemble(jobs)]
    device.require("has_tma", "resample", "compile it with --target sm_90a")
    if options.mode == "ncu":
        return experiments.profile_kernels(kernels, shape, dtype, options.report)
    if options.mode == "correctness":
        return [
            {"kernel": kernel, **experiments.verify(kernel, shape, dtype, odd=shape[1] > 2)}
            for kernel in kernels
        ]
    if options.mode == "performance":
        return [
            {"kernel": row["name"], "us": row["ms"] * 1e3 if row.get("ms") else None, **row}
            for row in experiments.compare_with_copy(shape, kernels, dtype, rounds=options.iterations)
        ]
    given = experiments.make_inputs(*shape, dtype)
    for kernel in kernels:
        resample.resample(*given, config=kernel, validate=False)
    torch.cuda.synchronize()
    return [{"kernel": kernel, "status": "ok"} for kernel in kernels]


if __name__ == "__main__":
    cli.run_main(main)
