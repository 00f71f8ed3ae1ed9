"""Run the tests in the order that suits this machine: `python -m tilelab.course.suite [TIER...]`.

Tests that measure times on a GPU run alone, after all others. Without a GPU the others run in one process per CPU. With
a GPU there are three processes for four CPUs, but no more than its free memory holds. TIER is unit, compile, fault,
browser, notebook, gpu, timing, trouble or mutants; without one everything runs but the last two, which take many
minutes.

Exit status: 0 if every test passed, 1 if one failed, 2 for bad usage.
"""

from __future__ import annotations

import collections
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

from tilelab import ROOT, cli

TIERS = ("compile", "fault", "browser", "notebook", "gpu", "timing")
ON_REQUEST = ("trouble", "mutants")
ALL_TIERS = (*TIERS, *ON_REQUEST)
# The largest notebooks use about 16; seven processes on an H100 held at most 64 together.
GIB_PER_PROCESS = 11


def select_tiers(tiers: list[str]) -> str:
    """Return pytest's marker expression for the tiers; without any, all but those on request."""
    if unknown := set(tiers) - {"unit", *ALL_TIERS}:
        raise ValueError(f"unknown tier {min(unknown)!r}; choose one of unit, {', '.join(ALL_TIERS)}")
    named = [
        f"not ({' or '.join(ALL_TIERS)})" if tier == "unit" else tier
        for tier in tiers or [f"not ({' or '.join(ON_REQUEST)})"]
    ]
    return " or ".join(named)


def count_processes(gpus_gib: dict[str, float]) -> int:
    """Return how many test processes run side by side: one per CPU, or with GPUs three for four CPUs.

    With GPUs there are at most as many as their free memory (GiB per GPU) allows.
    """
    cpus = len(os.sched_getaffinity(0))
    return max(1, min(cpus * 3 // 4, int(sum(gpus_gib.values()) / GIB_PER_PROCESS))) if gpus_gib else cpus


def find_gpus() -> dict[str, float]:
    """Return the GiB of free memory of each GPU that this process may use, by its name for CUDA_VISIBLE_DEVICES."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        found = [(index, uuid, int(free) / 1024) for index, uuid, free in (row.split(", ") for row in lines)]
    except (OSError, ValueError, subprocess.CalledProcessError):  # no driver, or memory that the CPU shares
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {index: free for index, _, free in found}
    # A name is a number, or the beginning of a UUID.
    return {
        name: free
        for name in map(str.strip, visible.split(","))
        for index, uuid, free in found
        if name == index or name.startswith("GPU-") and uuid.startswith(name)
    }


def run(tiers: list[str] = (), arguments: list[str] = (), env: dict | None = None) -> dict:
    """Run the tests and return their summary: counts, names of `failures`, `skips` by reason, `slowest`, `seconds`.

    `arguments` are pytest's. RuntimeError if pytest ends without a report.
    """
    gpus = find_gpus()
    side_by_side = ["-p", "xdist.plugin", f"--numprocesses={count_processes(gpus)}", "--dist=worksteal"]
    # Without a GPU the tests that time are skipped, so one run does everything.
    phases = [("not timing", side_by_side), ("timing", [])] if gpus else [("", side_by_side)]
    # The test processes share these GPUs.
    env = {**(os.environ if env is None else env), "TILES_TEST_GPUS": ",".join(gpus)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # each process would import Jupyter for plugins that no test uses
    )
    cases, begin, failed, failures = [], time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as folder:
        if env.pop("PYTHONDONTWRITEBYTECODE", ""):
            # Every one of a hundred Python processes would compile torch's source files anew.
            env["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        for phase, options in phases:
            chosen = " and ".join(f"({part})" for part in (select_tiers(tiers), phase) if part)
            report = pathlib.Path(folder, f"{phase}.xml")
            command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options, *arguments]
            command += ["-m", chosen] if chosen else []
            status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
            if not report.exists():
                raise RuntimeError(f"pytest ended with status {status} and no report")
            found = list(xml.parse(report).iter("testcase"))
            faults = [(case.find("failure"), case.find("error")) for case in found]
            broken = [_name(case) for case, fault in zip(found, faults) if fault != (None, None)]
            failures += broken
            failed += len(broken) or int(status not in (0, 5))  # 5: no test belongs to this phase
            cases += found
    skips = collections.Counter(skip.get("message") for case in cases for skip in case.iter("skipped"))
    skipped = sum(skips.values())
    counts = {
        "passed": len(cases) - failed - skipped,
        "failed": failed,
        "failures": failures,
        "skipped": skipped,
    }
    slowest = sorted(cases, key=lambda case: float(case.get("time")), reverse=True)[:10]
    times = [(_name(case), round(float(case.get("time")), 1)) for case in slowest]
    seconds = round(time.monotonic() - begin, 1)
    return {**counts, "skips": sorted(skips.items()), "seconds": seconds, "slowest": times}


def _name(case: xml.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def main(argv: list[str] | None = None) -> int:
    what = "Run the tests in the order that suits this machine."
    parser = cli.make_plain_parser("tilelab.course.suite", what)
    known = f"unit, {', '.join(ALL_TIERS)}; default: all but {' and '.join(ON_REQUEST)}"
    parser.add_argument("tiers", nargs="*", metavar="TIER", help=known)
    tiers = parser.parse_args(argv).tiers
    try:
        select_tiers(tiers)
    except ValueError as error:
        parser.error(f"{error}.")
    summary = run(tiers)
    print(
        "The slowest tests:", *(f"{seconds:6.1f} s  {name}" for name, seconds in summary["slowest"]), sep="\n"
    )
    if summary["failures"]:
        print("These tests failed:", *summary["failures"], sep="\n")
    line = "{passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s"
    print(line.format(**summary), flush=True)
    return int(summary["failed"] > 0)


if __name__ == "__main__":
    cli.run_main(main)
