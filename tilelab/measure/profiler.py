"""Run a command under Nsight Compute (ncu) and read the counters of its kernels."""

from __future__ import annotations

import csv
import functools
import io
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence

from tilelab import ROOT
from tilelab.records import results
from tilelab.runtime import device


class ProfilerUnavailable(RuntimeError):
    """Nsight Compute gave no counters; the message is one sentence with the reason and what to do."""


def can_profile() -> bool:
    """Return whether this machine has a GPU with TMA, and Nsight Compute."""
    return device.current().has_tma and shutil.which("ncu") is not None


def run_ncu(options: Sequence[str], command: Sequence[str], report: str | None = None) -> str:
    """Run `command` under ncu and return the output of both, with ncu's table as CSV. Raises ProfilerUnavailable.

    With `report`, the path of a file that ends in .ncu-rep, ncu collects its full set of sections and keeps them there.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ProfilerUnavailable("ncu is not on the PATH: install Nsight Compute, or read results/.")
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=ROOT, check=False)
    table = ["--csv", "--page", "raw", "--print-units", "base"]
    profile = [ncu, "--clock-control", "none", *options]
    if report:
        done = run([*profile, "--set", "full", "--force-overwrite", "--export", report, *command])
        if not done.returncode:  # ncu prints no table while it writes a report
            done = run([ncu, *table, "--import", report])
    else:
        done = run([*profile, *table, *command])
    output = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in output:
        raise ProfilerUnavailable(
            "this user may not read the GPU's counters: run as root, or have the administrator "
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0."
        )
    if done.returncode:
        last = next(
            (line.strip() for line in output.splitlines()[::-1] if line.strip()), "it printed nothing"
        )
        raise ProfilerUnavailable(f"ncu gave no counters ({last[:200]}).")
    return done.stdout


def profile_kernels(
    command: Sequence[str], kernels: Sequence[str], metrics: Mapping[str, str], report: str | None = None
) -> list[dict]:
    """Return {"kernel", and each key of `metrics`} of every launch of `kernels` that `command` makes.

    `metrics` maps a key of the rows to the name of the metric in ncu; `report` is run_ncu's. Raises
    ProfilerUnavailable.
    """
    output = run_ncu(
        ["--kernel-name", f"regex:^({'|'.join(kernels)})$", "--metrics", ",".join(metrics.values())],
        command,
        report,
    )
    rows = _read_table(output, metrics)
    if not rows:
        raise ProfilerUnavailable(f"ncu saw no launch of {', '.join(kernels)}.")
    return rows


def profile_launches(command: Sequence[str], names: Sequence[str], metrics: Mapping[str, str]) -> list[dict]:
    """Return {"name", "kernel", and each key of `metrics`} of the launches that `command` passes to `launch_watched`.

    `names` says what they are, in their order. Raises ProfilerUnavailable, also for more or fewer launches.
    """
    output = run_ncu(["--profile-from-start", "off", "--metrics", ",".join(metrics.values())], command)
    rows = _read_table(output, metrics)
    if len(rows) != len(names):
        raise ProfilerUnavailable(f"ncu saw {len(rows)} launches of {len(names)}.")
    return [{"name": name, **row} for name, row in zip(names, rows)]


def launch_watched(launch: Callable[[], object]) -> None:
    """Launch once for `profile_launches` to watch, after a launch that it does not watch, which may compile."""
    import torch

    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _read_table(output: str, metrics: Mapping[str, str]) -> list[dict]:
    """Return {"kernel", and each key of `metrics`} of every launch in ncu's CSV."""
    table = [line for line in output.splitlines() if line.startswith('"')]
    if len(table) < 3:  # names, units, then a line per launch
        return []
    names, _, *lines = csv.reader(io.StringIO("\n".join(table)))
    launches = [dict(zip(names, line)) for line in lines]
    try:
        return [
            {
                "kernel": launch["Kernel Name"].split("(")[0],
                **{key: float(launch[metric].replace(",", "")) for key, metric in metrics.items()},
            }
            for launch in launches
        ]
    except (KeyError, ValueError) as error:
        raise ProfilerUnavailable(f"this ncu or this GPU lacks a counter ({error}).") from error


def experiment(name: str, source: Callable[[], str]) -> Callable:
    """Decorate a function that profiles and returns rows, as `results.experiment` does.

    The recorded rows are shown also where ncu is missing or this user may not read the GPU's counters.
    """

    def decorate(profile: Callable[[], Sequence[dict]]) -> Callable[[], results.Record]:
        measure = results.experiment(name, source, can_profile)(profile)

        @functools.wraps(profile)
        def run() -> results.Record:
            try:
                return measure()
            except ProfilerUnavailable as error:
                print(f"Recorded counters: {error}")
                return results.load_record(name, source())

        return results.register(name, run, source)

    return decorate
