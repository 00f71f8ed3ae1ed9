"""The command line of `ch14.bug_hunt`: hunt, report, and build the recorded matrix again."""

from __future__ import annotations

import os
import pathlib
import sys

from ch14 import bug_hunt
from ch14.bug_hunt import HUNTS, Builds, environments, experiments, report
from tilelab import cli, device, results


def _arguments(argv):
    parser = cli.make_parser("ch14.bug_hunt", "Find the smallest kernel that a Triton does not compile as one hopes for a "
                        "target, by real builds without a GPU. Exit status: 0 the hunt ended, 1 builds differ from the "
                        "record, 2 something could not run.")
    parser.add_argument("--hunt", default="loop", choices=tuple(HUNTS), help="what is suspected (default loop)")
    parser.add_argument("--triton", metavar="VERSION", help="the Triton to ask, installed privately if need be "
                        "(default: the installed one)")
    parser.add_argument("--target", choices=device.TARGETS[1:], help="compile for it (default: where the hunt's "
                        "suspicion is)")
    parser.add_argument("--start", default="", metavar="AXIS=VALUE,...", help="begin with these values")
    parser.add_argument("--symptom", default="", metavar="WORD", help="hunt this outcome, or failures of this pass")
    parser.add_argument("--reach", type=int, default=2, metavar="N", help="change up to N axes to find a first trigger "
                        "(default 2)")
    parser.add_argument("--report", metavar="PATH", help="write a report that is ready to file to PATH")
    parser.add_argument("--matrix", nargs="?", const="matrix", choices=tuple(experiments.EXPERIMENTS),
                        help="build a recorded experiment again and compare (with --triton only that Triton's part); "
                        "TILES_RECORD=1 keeps it")
    options = cli.parse_options(parser, argv)
    if options.report is not None and (reason := cli.unwritable_reason(options.report)):
        parser.error(f"--report takes a file; {reason}.")
    if options.report and options.json and os.path.abspath(options.report) == os.path.abspath(options.json):
        parser.error(f"--report and --json take a file each; here both are {options.report}.")
    hunting = {name for name in ("hunt", "target", "start", "symptom", "reach", "report")
               if getattr(options, name) != parser.get_default(name)}
    if options.matrix and hunting:
        parser.error(f"--matrix goes with --triton and --json; here is --{min(hunting)} too.")
    if options.reach < 0:
        parser.error(f"--reach is 0 or more; here it is {options.reach}.")
    options.hunt = HUNTS[options.hunt]
    try:
        options.start = options.hunt.start | _start(options.hunt, options.start)
    except ValueError as error:
        parser.error(str(error))
    return options


def _start(hunt: bug_hunt.Hunt, text: str) -> dict:
    """{axis: value} of "LOOP=carry b,num_warps=4"; ValueError for what is none."""
    found = {}
    for part in filter(None, text.split(",")):
        axis, equals, value = part.partition("=")
        values = {str(each): each for each in hunt.axes.get(axis, ())}
        if not values or value not in values:
            takes = f"{axis}={'|'.join(values)}" if values else ", ".join(f"{name}=..." for name in hunt.axes)
            raise ValueError(f"--start takes {takes}; here it is {part!r}.")
        found[axis] = values[value]
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when it came to its end, whatever it found, 1 when builds differ from the record,
    2 when something could not run, 130 cancelled."""
    options = _arguments(argv)
    try:
        rows, status = _matrix(options) if options.matrix else _hunt(options)
        if options.json:
            record = results.make_record("ch14_bug_hunt", rows, experiments.source(), on=results.NO_GPU)
            text = results.to_json(record)
            print(text, end="") if options.json == "-" else results.write_atomically(pathlib.Path(options.json), text)
        return status
    except (ValueError, OSError, RuntimeError) as error:
        print(f"python -m ch14.bug_hunt: {device.first_line(error)}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("python -m ch14.bug_hunt: cancelled.", file=sys.stderr)
        return 130


def _hunt(options) -> tuple[list[dict], int]:
    version = options.triton or environments.installed()
    environments.environment(version, _say)
    builds = Builds(options.hunt, version, options.target or options.hunt.target)
    found = bug_hunt.find(builds, options.start, options.symptom, reach=options.reach)
    say = (lambda *_: None) if options.json == "-" else print
    if found is None:
        say(f"Triton {version}, {builds.target}, {options.hunt.title}: nothing found within {options.reach} changes of "
            f"{bug_hunt.describe(options.start)} ({len(builds.rows)} builds)"
            + (f"; no report is written to {options.report}." if options.report else "."))
        return builds.rows, 0
    for step in found.steps:
        say(step)
    right = sum(predicted == shown for _, predicted, shown in found.probes)
    say(f"the smallest trigger: {bug_hunt.describe(found.config)}\n{found.sentence}\n"
        f"{len(builds.rows)} builds; off its axes {right} of {len(found.probes)} random ones do as this says.")
    if options.report:
        others = [each for each in experiments.VERSIONS if environments.known(each)]
        results.write_atomically(pathlib.Path(options.report), report.write(found, others))
        say(f"{options.report} holds a report; nothing was sent anywhere.")
    return [row | ({"sentence": found.sentence} if row is found.row else {}) for row in builds.rows], 0


def _matrix(options) -> tuple[list[dict], int]:
    name, rows, differ = options.matrix, [], 0
    versions = list(dict.fromkeys(version for version, *_ in experiments.EXPERIMENTS[name]()))
    if options.triton and options.triton not in versions:
        raise ValueError(f"{name} has Triton {', '.join(versions)}; here it is {options.triton}")
    keep = os.environ.get("TILES_RECORD") == "1"
    if keep and options.triton:
        raise ValueError("TILES_RECORD=1 keeps whole experiments: leave out --triton")
    for version in [options.triton] if options.triton else versions:
        environments.environment(version, _say)
        built = experiments.built(name, version)
        rows += built
        found = [] if keep else experiments.differences(name, built)
        differ += len(found)
        if options.json != "-":
            print(f"{name}, Triton {version}: {len(built)} builds"
                  + ("" if keep else f", {len(built) - len(found)} as recorded"), *found, sep="\n  ", flush=True)
    if keep:
        experiments.save(name, rows)
    return rows, int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())


if __name__ == "__main__":
    sys.exit(main())
