"""The command of `ch14.compiled`: compile a workload in its modes, check them, time them, and say what ran."""

import logging
import sys

from ch14.compiled.lesson import experiments, workloads
from tilelab import cli
from tilelab.records import results
from tilelab.runtime import device


def _complete(options: cli.Options) -> None:
    usual = next(shape for family, shape, _ in experiments.CASES if family == options.workload)
    try:
        options.shape = tuple(map(int, options.shape.split(","))) if options.shape else usual
    except ValueError:
        sizes = ",".join(map(str, usual))
        raise ValueError(f"--shape takes sizes such as {sizes}; it is {options.shape[:60]!r}.") from None
    work = workloads.make_workload(options.workload, options.shape, where="meta")
    if options.mode != "all":
        workloads.check_mode(work, options.mode)
    wanted = work.modes if options.mode == "all" else (options.mode,)
    options.modes = tuple(dict.fromkeys((work.peer, *wanted)))  # every time stands beside the peer's


def _measure(options: cli.Options) -> results.Record | list[dict]:
    if not device.current().has_tma:
        record = experiments.read_cells()
        rows = [
            row for row in record.rows if row["workload"] == options.workload and row["name"] in options.modes
        ]
        counters = experiments.profile_kernels.load().rows
        rows = experiments.make_table(experiments.drop_details(rows), counters)
        return cli.show_recorded(options, record, rows, f"{options.workload} is recorded in other modes")
    if options.json != "-":
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    rows = experiments.measure_cases([(options.workload, options.shape, options.modes)])
    return experiments.make_table(experiments.drop_details(rows), [])


MODES = f"{', '.join(workloads.GEMM_MODES)}; for attention {', '.join(workloads.Attention.modes)}"
COMMAND = cli.Command(
    module="ch14.compiled",
    description="Compile a workload with torch.compile in its modes, cold, check them against float64 and time them; "
    "count the instructions of the kernel that won if its code is there.",
    options={
        "workload": cli.choice(tuple(workloads.FAMILIES), "matmul"),
        "shape": cli.Option("M,N,K of a product; T,HIDDEN,INNER of the MLP; B,H,HK,S,D of attention"),
        "mode": cli.Option(f"{MODES}; or all (default)", default="all", metavar="NAME|all"),
    },
    complete=_complete,
    columns="name status compile_s caches ms tflops ratio error winner main UTMALDG UTMASTG proof reason",
    source=experiments.source,
    measure=_measure,
)
