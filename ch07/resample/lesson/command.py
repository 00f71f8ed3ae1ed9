"""The command of `ch07.resample`: correctness, performance, the profiler's counters, or a single launch."""

import os

import torch

from ch07 import resample
from ch07.resample import BEST, ELEMENTS, LADDER
from ch07.resample.lesson import experiments
from tilelab import cli
from tilelab.measure import bench
from tilelab.records import results
from tilelab.runtime import device


def _choose_kernels(text: str, options: cli.Options) -> list[str]:
    named = {"best": [BEST], "all": list(LADDER)}.get(text, text.split(","))
    if any(name not in LADDER for name in named):
        raise ValueError(f"must be best, all or of {', '.join(LADDER)}; it is {text}.")
    chosen = [name for name in named if experiments.can_run(name, options.shape, options.dtype)]
    if len(chosen) < len(named) and text != "all":
        size = options.shape[3] * options.dtype.itemsize
        raise ValueError(f"bulk_rows needs rows of a multiple of 16 bytes; here a row takes {size}.")
    options.configs = {name: name for name in chosen}
    return chosen


def _complete(options: cli.Options) -> None:
    if options.target and options.mode != "correctness":
        raise ValueError(f"--target only compiles; leave out --mode {options.mode}.")
    if options.report:
        if options.mode != "ncu":
            raise ValueError("--report keeps the profiler's report; add --mode ncu.")
        options.report = os.path.abspath(f"{options.report.removesuffix('.ncu-rep')}.ncu-rep")


def _verify(options: cli.Options) -> list[dict]:
    shape, dtype = options.shape, options.dtype
    return [
        {"kernel": kernel, **experiments.verify(kernel, shape, dtype, odd=shape[1] > 2)}
        for kernel in options.kernel
    ]


def _time(options: cli.Options) -> list[dict]:
    rows = experiments.compare_with_copy(
        options.shape, options.kernel, options.dtype, rounds=options.iterations
    )
    return [{"kernel": row["name"], "us": row["ms"] * 1e3 if row.get("ms") else None, **row} for row in rows]


def _launch(options: cli.Options) -> list[dict]:
    given = experiments.make_inputs(*options.shape, options.dtype)
    for kernel in options.kernel:
        resample.resample(*given, config=kernel, validate=False)
    torch.cuda.synchronize()
    return [{"kernel": kernel, "status": "ok"} for kernel in options.kernel]


def _profile(options: cli.Options) -> list[dict]:
    return experiments.profile_kernels(options.kernel, options.shape, options.dtype, options.report)


MODES = {"correctness": _verify, "performance": _time, "ncu": _profile, "single_run": _launch}


def _show_recorded(options: cli.Options) -> results.Record | list[dict]:
    """Return the recorded rows of the kernels; a single launch is compiled instead."""
    if options.mode == "single_run":
        options.say(f"Nothing runs here ({device.current().describe()}). It is compiled for sm_90a.")
        options.target = "sm_90a"
        return COMMAND.build_configs(options)
    record, dtype = RECORDED[options.mode].load(), str(options.dtype)[6:]
    rows = [
        {"kernel": row.get("name"), "us": 1e3 * row["ms"] if "ms" in row else None} | row
        for row in record.rows
    ]
    chosen = (
        row for row in rows if row["kernel"] in options.kernel and row.get("dtype", "bfloat16") == dtype
    )
    return cli.show_recorded(options, record, chosen, "compile it with --target sm_90a")


RECORDED = {
    "correctness": experiments.check_correctness,
    "performance": experiments.measure_ladder,
    "ncu": experiments.measure_counters,
}


def _measure(options: cli.Options) -> results.Record | list[dict]:
    return MODES[options.mode](options) if device.current().has_tma else _show_recorded(options)


COMMAND = cli.Command(
    module="ch07.resample",
    description="Linear interpolation of feature rows between irregular source times.",
    options={
        "mode": cli.choice(MODES, "correctness"),
        "shape": cli.sizes("B,S,T,D", experiments.PROFILED, "batch, source times, target times, features"),
        "dtype": cli.named({str(dtype)[6:]: dtype for dtype in ELEMENTS}, "bfloat16"),
        "kernel": cli.Option(
            f"one or more of {', '.join(LADDER)}; best (default) or all",
            _choose_kernels,
            default="best",
            metavar="NAME[,NAME…]|best|all",
        ),
        "iterations": cli.number(
            bench.ROUNDS,
            range(2, 10_001),
            "a whole number from 2 to 10,000",
            "rounds of --mode performance, 2 to 10,000; a round times each kernel beside the copy",
            "N",
        ),
        "report": cli.file("keep the report of --mode ncu in FILE.ncu-rep", "FILE"),
        "target": cli.target(),
    },
    complete=_complete,
    columns="kernel shape dtype status ulps us gbps ratio "
    f"{' '.join(experiments.METRICS)} registers smem UBLKCP reason",
    source=experiments.source,
    measure=_measure,
    job=lambda options, kernel: resample.job(kernel, options.target, options.dtype, options.shape),
    label=lambda options, kernel, _: {"kernel": kernel},
)
