"""DRAM bytes of the field note's tiles, counted by the profiler, for claims about the share of bandwidth.

`python -m claims.audits.gemm_dram` is what the profiler watches.
"""

from __future__ import annotations

import sys

from ch14 import gemm
from ch14.gemm.configs import GemmConfig, configs, rank_configs
from ch14.gemm.lesson import experiments
from tilelab.measure import profiler
from tilelab.runtime import device

LAYOUT = "n"  # B is stored row by row, as in the note
METRICS = {
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "read_bytes": "dram__bytes_read.sum",
    "written_bytes": "dram__bytes_write.sum",
    "ns": "gpu__time_duration.sum",
}


def find_cases(target: str, sms: int) -> list[tuple[str, GemmConfig, int]]:
    """Return (set, configuration, size) of the note's tiles that `target` can launch, and of the course's best."""
    note = [
        (which, config)
        for which in ("conservative", "proposed")
        for config in configs(which, target=target).values()
    ]
    return [
        (which, config, n)
        for n in experiments.SQUARES
        for which, config in (*note, ("best", rank_configs("course", n, n, n, "bf16", target, sms)[0]))
    ]


@profiler.experiment("ch14_gemm_dram", experiments.source)
def count_bytes():
    """Count the bytes of DRAM of one product per case, which starts with an empty L2 cache.

    `least_bytes` are moved if every element of A, B and C moves once. `gbps` is the rate of what was counted.
    """
    here = device.current()
    cases = find_cases(here.target, here.sms)
    compile_cases(cases)
    rows = profiler.profile_launches(
        [sys.executable, "-m", "claims.audits.gemm_dram"], [which for which, *_ in cases], METRICS
    )
    found = []
    for row, (which, config, n) in zip(rows, cases):
        more = {"launched": row["kernel"], "status": "ok", "least_bytes": 6 * n**2}
        more["gbps"] = (row["read_bytes"] + row["written_bytes"]) / row["ns"]
        found.append({**row, **experiments.label(config, n, n, n, "bf16", LAYOUT, which), **more})
    return found


def compile_cases(cases: list[tuple[str, GemmConfig, int]]) -> None:
    """Compile all cases in parallel, so that the profiled process finds them in Triton's cache."""
    experiments.compile_ahead([(config, n, n, n, "bf16", LAYOUT) for _, config, n in cases])


def launch_all() -> None:
    """Launch every case once for the profiler to watch."""
    here = device.current()
    for _, config, n in find_cases(here.target, here.sms):
        a, b, out, *_ = experiments.make_inputs(n, n, n, "bf16", LAYOUT)
        profiler.launch_watched(gemm.prepare(a, b, out=out, config=config))


if __name__ == "__main__":
    launch_all()
