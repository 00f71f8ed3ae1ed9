"""The command of `ch14.bug_hunt`: hunt, report, and build the recorded experiments again."""

import os
import pathlib
import sys

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments, own_kernel
from ch14.bug_hunt.lesson import experiments, report
from tilelab import cli
from tilelab.records import results
from tilelab.runtime import device, files


def _parse_start(text: str, options: cli.Options) -> dict:
    """Return {axis: value} of "LOOP=carry b,num_warps=4", with the hunt's own start for the other axes."""
    start, axes = dict(options.hunt.start), options.hunt.axes
    for part in filter(None, text.split(",")):
        axis, _, value = part.partition("=")
        values = {str(value): value for value in axes.get(axis, ())}
        if value not in values:
            allowed = f"{axis}={'|'.join(values)}" if values else ", ".join(f"{name}=..." for name in axes)
            raise ValueError(f"takes {allowed}; it is {part!r}.")
        start[axis] = values[value]
    return start


def _install(version: str) -> None:
    environments.install(version, lambda line: print(line, file=sys.stderr, flush=True))


def _finish(options: cli.Options, rows: list[dict], status: int = 0) -> int:
    options.write(results.make_record("ch14_bug_hunt", rows, experiments.source(), on=results.NO_GPU))
    return status


def _hunt(options: cli.Options) -> int:
    rows, reports = [], bool(options.report)
    for target in options.target or [options.hunt.target]:
        for version in options.triton or [environments.installed_version()]:
            _install(version)
            builds = Builds(options.hunt, version, target)
            found = _find(options, builds, reports)
            reports = reports and not found  # one report, of the first finding
            rows += builds.rows
    return _finish(options, rows)


def _find(options: cli.Options, builds: Builds, reports: bool) -> bool:
    """Hunt with one Triton for one target, say what was found, and return whether anything was."""
    finding = bug_hunt.find(builds, options.start, reach=options.reach)
    if finding is None:
        options.say(
            f"Triton {builds.triton}, {builds.target}, {options.hunt.title}: nothing found within {options.reach} "
            f"changes of {bug_hunt.describe(options.start)} ({len(builds.rows)} builds)."
        )
        return False
    finding.row["sentence"] = finding.sentence
    options.say(
        *finding.steps,
        f"the smallest trigger: {bug_hunt.describe(finding.config)}",
        finding.sentence,
        f"{len(builds.rows)} builds; of {len(finding.probes)} random configurations that differ from the trigger on "
        f"several axes, {finding.correct_probes} behave as this says.",
    )
    if reports:
        versions = [other for other in experiments.VERSIONS if environments.is_available(other)]
        files.write_atomically(pathlib.Path(options.report), report.write_report(finding, versions))
        options.say(f"{options.report} holds a report; nothing was sent anywhere.")
    return True


def _parse_kernel(kernel: str, options: cli.Options) -> str:
    if ":" not in kernel:
        raise ValueError(f"takes FILE.py:NAME; it is {kernel[:60]!r}.")
    own_kernel.find_parameters(*kernel.rpartition(":")[::2])
    return kernel


def _parse_signature(signature: str, options: cli.Options) -> str:
    if options.kernel:
        options.hunt = own_kernel.make_hunt(options.kernel, signature, device.TARGETS[1])
    elif signature:
        raise ValueError("goes with --kernel only.")
    return signature


def _parse_targets(names: str, options: cli.Options) -> list[str]:
    targets = names.split(",")
    for name in targets:
        if name not in device.TARGETS[1:]:
            raise ValueError(f"must be some of {', '.join(device.TARGETS[1:])}; it is {names[:60]!r}.")
    return targets


def _rebuild_matrix(options: cli.Options) -> int:
    """Build a recorded experiment again; return 1 if a build differs from the record."""
    name, rows, differ = options.matrix, [], 0
    versions = list(dict.fromkeys(version for version, *_ in experiments.EXPERIMENTS[name]()))
    if wrong := [version for version in options.triton or () if version not in versions]:
        raise ValueError(f"--triton must be one of {', '.join(versions)} for {name}; it is {wrong[0]}")
    keep = os.environ.get("TILES_RECORD") == "1"
    if keep and options.triton:
        raise ValueError("TILES_RECORD=1 keeps whole experiments: leave out --triton")
    for version in options.triton or versions:
        _install(version)
        built = experiments.build_now(name, version)
        rows += built
        differences = [] if keep else experiments.list_differences(name, built)
        differ += len(differences)
        same = "" if keep else f", {len(built) - len(differences)} as recorded"
        said = [f"{name}, Triton {version}: {len(built)} builds{same}", *differences]
        options.say("\n  ".join(said))
    if keep:
        record = results.make_record(f"ch14_bug_hunt_{name}", rows, experiments.source(), on=results.NO_GPU)
        results.save(record)
    return _finish(options, rows, int(differ > 0))


COMMAND = cli.Command(
    module="ch14.bug_hunt",
    description="Find the smallest kernel that shows a suspected bug of Triton, by real builds without a GPU, also of "
    "a kernel of your own. Exit status: 0 the hunt ended, 1 builds differ from the record, 2 something could not run.",
    options={
        "hunt": cli.named(HUNTS, "loop", "what is suspected (default loop)"),
        "kernel": cli.Option(
            "hunt in a @triton.jit function of your own", _parse_kernel, metavar="FILE.py:NAME"
        ),
        "signature": cli.Option(
            "its arguments: types, and the constants' values, the simplest first, such as "
            '"x=*bf16, n=i32, BLOCK=64|128, num_warps=4|8"',
            _parse_signature,
            default="",
            metavar="NAME=TYPE,...",
        ),
        "triton": cli.Option(
            "the Tritons to ask, installed privately if necessary (default: the installed one)",
            lambda versions, _: versions.split(","),
            metavar="VERSION,...",
        ),
        "target": cli.Option(
            f"compile for some of {', '.join(device.TARGETS[1:])} (default: the suspected target)",
            _parse_targets,
            metavar="TARGET,...",
        ),
        "start": cli.Option("begin with these values", _parse_start, default="", metavar="AXIS=VALUE,..."),
        "reach": cli.number(
            2, range(1000), "0 or more", "change up to N axes to find a first trigger (default 2)", "N"
        ),
        "report": cli.file("write a report that is ready to file to PATH"),
        "matrix": cli.Option(
            "build a recorded experiment again and compare (with --triton only that Triton's part); TILES_RECORD=1 "
            "keeps it",
            nargs="?",
            const="matrix",
            choices=tuple(experiments.EXPERIMENTS),
        ),
    },
    actions={"matrix": _rebuild_matrix, "hunt": _hunt},
    source=experiments.source,
)
