"""The command line of `ch14.bug_hunt`: hunt, report, and build the recorded experiments again."""

from __future__ import annotations

import os
import pathlib
import sys

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments
from ch14.bug_hunt.lesson import experiments, report
from tilelab import cli
from tilelab.records import results
from tilelab.runtime import device, files


def _parse_options(argv):
    parser = cli.make_parser(
        "ch14.bug_hunt",
        "Find the smallest kernel that shows a suspected bug of Triton, by real "
        "builds without a GPU. Exit status: 0 the hunt ended, 1 builds differ from the record, "
        "2 something could not run.",
    )
    parser.add_argument(
        "--hunt", default="loop", choices=tuple(HUNTS), help="what is suspected (default loop)"
    )
    parser.add_argument(
        "--triton",
        metavar="VERSION",
        help="the Triton to ask, installed privately if necessary (default: the installed one)",
    )
    parser.add_argument(
        "--target", choices=device.TARGETS[1:], help="compile for it (default: the suspected target)"
    )
    parser.add_argument("--start", default="", metavar="AXIS=VALUE,...", help="begin with these values")
    parser.add_argument(
        "--reach",
        type=int,
        default=2,
        metavar="N",
        help="change up to N axes to find a first trigger (default 2)",
    )
    parser.add_argument("--report", metavar="PATH", help="write a report that is ready to file to PATH")
    parser.add_argument(
        "--matrix",
        nargs="?",
        const="matrix",
        choices=tuple(experiments.EXPERIMENTS),
        help="build a recorded experiment again and compare (with --triton only that Triton's part); "
        "TILES_RECORD=1 keeps it",
    )
    options = cli.parse_options(parser, argv)
    if options.report is not None and (reason := cli.unwritable_reason(options.report)):
        parser.error(f"--report takes a file; {reason}.")
    if options.reach < 0:
        parser.error(f"--reach must be 0 or more; it is {options.reach}.")
    options.hunt = HUNTS[options.hunt]
    try:
        options.start = options.hunt.start | _parse_start(options.hunt, options.start)
    except ValueError as error:
        parser.error(str(error))
    return options


def _parse_start(hunt: bug_hunt.Hunt, text: str) -> dict:
    """Return {axis: value} of "LOOP=carry b,num_warps=4"."""
    start = {}
    for part in filter(None, text.split(",")):
        axis, _, value = part.partition("=")
        values = {str(value): value for value in hunt.axes.get(axis, ())}
        if value not in values:
            allowed = (
                f"{axis}={'|'.join(values)}" if values else ", ".join(f"{name}=..." for name in hunt.axes)
            )
            raise ValueError(f"--start takes {allowed}; it is {part!r}.")
        start[axis] = values[value]
    return start


def _install(version: str) -> None:
    environments.install(version, lambda line: print(line, file=sys.stderr, flush=True))


def _hunt(options) -> tuple[list[dict], int]:
    version = options.triton or environments.installed_version()
    _install(version)
    builds = Builds(options.hunt, version, options.target or options.hunt.target)
    finding = bug_hunt.find(builds, options.start, reach=options.reach)
    if finding is None:
        lines = [
            f"Triton {version}, {builds.target}, {options.hunt.title}: nothing found within {options.reach} "
            f"changes of {bug_hunt.describe(options.start)} ({len(builds.rows)} builds)."
        ]
    else:
        lines = [
            *finding.steps,
            f"the smallest trigger: {bug_hunt.describe(finding.config)}",
            finding.sentence,
            f"{len(builds.rows)} builds; away from its axes, {finding.correct_probes} of {len(finding.probes)} "
            "random configurations behave as this says.",
        ]
        finding.row["sentence"] = finding.sentence
    if options.report and finding:
        versions = [other for other in experiments.VERSIONS if environments.is_available(other)]
        files.write_atomically(pathlib.Path(options.report), report.write_report(finding, versions))
        lines.append(f"{options.report} holds a report; nothing was sent anywhere.")
    if options.json != "-":
        print(*lines, sep="\n")
    return builds.rows, 0


def _rebuild_matrix(options) -> tuple[list[dict], int]:
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
        if options.json != "-":
            same = "" if keep else f", {len(built) - len(differences)} as recorded"
            print(
                f"{name}, Triton {version}: {len(built)} builds{same}", *differences, sep="\n  ", flush=True
            )
    if keep:
        results.save(
            results.make_record(f"ch14_bug_hunt_{name}", rows, experiments.source(), on=results.NO_GPU)
        )
    return rows, int(differ > 0)


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit status is 0 at the end of a hunt, 1 if builds differ from the record, 2 if something
    could not run, 130 if it was cancelled."""
    options = _parse_options(argv)
    try:
        rows, status = _rebuild_matrix(options) if options.matrix else _hunt(options)
        if options.json:
            record = results.make_record("ch14_bug_hunt", rows, experiments.source(), on=results.NO_GPU)
            cli.write_json(record, options.json)
        return status
    except BrokenPipeError:
        raise  # to `cli.run_main`
    except (ValueError, OSError, RuntimeError) as error:
        print(f"python -m ch14.bug_hunt: {device.first_line(error)}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m ch14.bug_hunt: cancelled.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    cli.run_main(main)
