"""The command of `ch14.bug_hunt`: hunt, report, and build the recorded experiments again."""

import os
import pathlib
import sys

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments
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
    version = options.triton or environments.installed_version()
    _install(version)
    builds = Builds(options.hunt, version, options.target or options.hunt.target)
    finding = bug_hunt.find(builds, options.start, reach=options.reach)
    if finding is None:
        options.say(
            f"Triton {version}, {builds.target}, {options.hunt.title}: nothing found within {options.reach} "
            f"changes of {bug_hunt.describe(options.start)} ({len(builds.rows)} builds)."
        )
        return _finish(options, builds.rows)
    finding.row["sentence"] = finding.sentence
    options.say(
        *finding.steps,
        f"the smallest trigger: {bug_hunt.describe(finding.config)}",
        finding.sentence,
        f"{len(builds.rows)} builds; away from its axes, {finding.correct_probes} of {len(finding.probes)} "
        "random configurations behave as this says.",
    )
    if options.report:
        versions = [other for other in experiments.VERSIONS if environments.is_available(other)]
        files.write_atomically(pathlib.Path(options.report), report.write_report(finding, versions))
        options.say(f"{options.report} holds a report; nothing was sent anywhere.")
    return _finish(options, builds.rows)


def _rebuild_matrix(options: cli.Options) -> int:
    """Build a recorded experiment again; return 1 if a build differs from the record."""
    name, rows, differ = options.matrix, [], 0
    versions = list(dict.fromkeys(version for version, *_ in experiments.EXPERIMENTS[name]()))
    if options.triton and options.triton not in versions:
        raise ValueError(f"--triton must be one of {', '.join(versions)} for {name}; it is {options.triton}")
    keep = os.environ.get("TILES_RECORD") == "1"
    if keep and options.triton:
        raise ValueError("TILES_RECORD=1 keeps whole experiments: leave out --triton")
    for version in [options.triton] if options.triton else versions:
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
    description="Find the smallest kernel that shows a suspected bug of Triton, by real builds without a GPU. Exit "
    "status: 0 the hunt ended, 1 builds differ from the record, 2 something could not run.",
    options={
        "hunt": cli.named(HUNTS, "loop", "what is suspected (default loop)"),
        "triton": cli.Option(
            "the Triton to ask, installed privately if necessary (default: the installed one)",
            metavar="VERSION",
        ),
        "target": cli.choice(device.TARGETS[1:], help="compile for it (default: the suspected target)"),
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
