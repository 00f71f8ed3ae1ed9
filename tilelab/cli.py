"""Command lines: the table that describes a topic's command, and the parts that all programs share.

A bad argument is one line on stderr, rows are a table or one JSON object, and the exit status says how the run went:
0 all is fine, 1 a wrong result, 2 bad usage or something that cannot run here, 130 cancelled.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tilelab import cancel_import, name_command
from tilelab.records import results
from tilelab.runtime import build, device, files


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a command line and end the process with its exit status.

    A reader that closes the pipe early, as `head -1` does, ends the process silently, as SIGPIPE would. So does a
    standard output that is closed from the start. A terminal that lacks a character gets a question mark.
    """
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is cancel_import:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            status = main()
        except SystemExit as stopped:  # argparse prints --help and leaves
            status = stopped.code
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{name_command()}: cancelled.", file=sys.stderr)
        status = 130
    # What still runs here, a thread or the exit of a library, says nothing about a second Ctrl-C.
    with contextlib.suppress(ValueError):  # this is not the main thread
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    sys.exit(status)


def prepare_streams() -> None:
    """Let standard output and error take every text: they may be closed, or know fewer characters than UTF-8."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        if hasattr(getattr(sys, name), "reconfigure"):  # a test may have put another object there
            getattr(sys, name).reconfigure(errors="replace")


def make_plain_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m module` whose errors are one line on stderr, with exit status 2."""

    def error(message: str) -> NoReturn:
        line = re.sub(r"\S{300,}", lambda word: f"{word[0][:60]}…", " ".join(message.split()))
        parser.exit(2, f"{parser.prog}: {line}\n")

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.error = error
    return parser


def unwritable_reason(path: str) -> str:
    """Return why nothing can be written to `path`, for a check before the work; "" when it seems possible."""
    try:
        file = pathlib.Path(path)
        if not path:
            return "it is empty"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file.stat()  # an OSError for a symbolic link that leads to itself
        if file.is_dir():
            return f"{path} is a folder"
        nearest = next(parent for parent in (file, *file.absolute().parents) if parent.exists())
        if nearest is not file and not nearest.is_dir():
            return f"{nearest} is no folder"
        return "" if os.access(nearest, os.W_OK) else f"{path} may not be written"
    except OSError as error:
        return f"{path[:60]} cannot be one ({error.strerror})"


# ---- the kinds of options

LARGEST = 2**31 - 1  # size


class Options(argparse.Namespace):
    """The values of a command's options."""

    def say(self, *lines: str) -> None:
        """Print lines, unless standard output is kept for JSON."""
        if self.json != "-":
            print(*lines, sep="\n", flush=True)

    def write(self, record: dict) -> None:
        """Write a record as one JSON object where --json says."""
        text = results.to_json(record) if self.json else ""
        if self.json == "-":
            try:
                text.encode(sys.stdout.encoding or "utf-8")
            except UnicodeEncodeError:
                text = json.dumps(json.loads(text)) + "\n"  # which escapes what the encoding lacks
            print(text, end="")
        elif self.json:
            files.write_atomically(pathlib.Path(self.json), text)


class Option:
    """An option: the keywords of argparse's `add_argument`, and `convert(value, options)`, which returns its value.

    `convert` finds the values of the options above it in `options`, and meets no value that is None. Its ValueError
    says in one sentence what is wrong.
    """

    def __init__(self, help: str = "", convert: Callable[[Any, Options], Any] | None = None, **keywords: Any):
        self.keywords, self.convert = {"help": help or None, **keywords}, convert


def parse_sizes(text: str, form: str, largest: int = LARGEST) -> tuple[int, ...]:
    """Return the numbers of "4096,64" for a form such as "R,C". ValueError unless each lies from 1 to `largest`."""
    parts = text.split(",")
    sizes = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 19]
    if not len(sizes) == len(parts) == len(form.split(",")) or not 0 < min(sizes) <= max(sizes) <= largest:
        raise ValueError(f"must be {form}, each from 1 to {largest:,}; it is {text[:60]}.")
    return tuple(sizes)


def sizes(
    form: str,
    default: Sequence[int],
    help: str = "sizes",
    largest: int = LARGEST,
    rule: Callable[..., str] = lambda *sizes: "",
) -> Option:
    """Return an option of whole numbers, which `form` names, such as "M,N,K". `rule(*sizes)` says what else they must
    be, or ""."""
    usual = ",".join(map(str, default))

    def convert(text: str, _: Options) -> tuple[int, ...]:
        found = parse_sizes(text, form, largest)
        if reason := rule(*found):
            raise ValueError(f"must be {form} with {reason}; it is {text[:60]}.")
        return found

    return Option(f"{help} (default {usual})", convert, default=usual, metavar=form)


def number(default: int, allowed: range, words: str, help: str = "", metavar: str | None = None) -> Option:
    """Return an option of a whole number in `allowed`, a range that `words` describe."""

    def convert(value: int, _: Options) -> int:
        if value not in allowed:
            raise ValueError(f"must be {words}; it is {value}.")
        return value

    return Option(help, convert, type=int, default=default, metavar=metavar)


def choice(choices: Iterable, default: Any = None, help: str = "") -> Option:
    """Return an option that takes one of some texts or numbers."""
    choices = tuple(choices)
    return Option(help, choices=choices, default=default, type=type(choices[0]))


def named(values: dict[str, Any], default: str, help: str = "") -> Option:
    """Return an option that takes one of the names, and whose value is the one of this name."""
    return Option(help, lambda name, _: values[name], choices=tuple(values), default=default)


def flag(help: str) -> Option:
    """Return an option that is True where it is given."""
    return Option(help, action="store_true")


def file(help: str, metavar: str = "PATH") -> Option:
    """Return an option for a file to write, which is refused before the work if that is impossible."""

    def convert(path: str, _: Options) -> str:
        if path != "-" and (reason := unwritable_reason(path)):
            raise ValueError(f"takes a file; {reason}.")
        return path

    return Option(help, convert, metavar=metavar)


def target(help: str = "compile only, for this target (sm_100a); needs no GPU") -> Option:
    """Return an option for a target of tilelab.runtime.device.TARGETS."""

    def convert(name: str, _: Options) -> str:
        try:
            device.target_limits(name)
        except ValueError as error:
            raise ValueError(f"must name a target: {error}") from None
        return name

    return Option(help, convert, metavar="TARGET")


def tune() -> Option:
    """Return an option for a file of shapes, of which the command finds the fastest configurations."""
    words = "find the fastest configuration for each shape M,N,K of a file, and keep it where"
    return Option(f'{words} config="best" finds it', metavar="FILE")


def configs(named: Callable[[Options], dict], default: str, help: str) -> Option:
    """Return an option that puts into `options.configs` the part of `named(options)` that it selects.

    It takes a name, "all", or "best", which is the first name unless one is called so.
    """

    def convert(text: str, options: Options) -> str:
        known = named(options)
        chosen = {"all": list(known), "best": list(known)[:1]}
        if "best" in known:
            chosen["best"] = ["best"]
        if text not in {**known, **chosen}:
            every = ", ".join(dict.fromkeys([*known, "best", "all"]))
            raise ValueError(f"must be one of {every}; it is {text[:60]!r}.")
        options.configs = {name: known[name] for name in chosen.get(text, [text])}
        return text

    return Option(f"{help} (default {default})", convert, default=default, metavar="NAME|best|all")


JSON = file("write one JSON object to PATH, - for standard output")

# ---- the command


def show_recorded(
    options: Options, record: results.Record, rows: Iterable[dict], instead: str = ""
) -> results.Record:
    """Say that nothing is measured here, and return a record with only these of its rows; Unsupported for none."""
    here, kept = device.current().describe(), list(rows)
    if not kept:
        raise device.Unsupported(
            f"{record.experiment} holds no such row, and here is {here}{instead and ': '}{instead}"
        )
    options.say(f"Nothing is measured here ({here}). These rows were recorded, at the shapes that they name.")
    return dataclasses.replace(record, data=record.data | {"rows": kept})


Action = Callable[[Options], "list[dict] | results.Record | int"]


def label_row(options: Options, name: str, config: Any) -> dict:
    """Return the names in the row of a configuration."""
    return {"name": name, "config": str(config)} | ({"op": options.op} if "op" in options else {})


def describe_tuned(options: Options) -> str:
    """Return what a cancelled command has kept."""
    return "the shapes that were printed are kept" if getattr(options, "tune", None) else ""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command of a topic: `main` reads the options, does what they ask for, and reports it.

    An action takes the options and returns rows, a Record, or an exit status when it has said all by itself. The first
    option of `actions` that is set chooses its action. Else --target chooses to compile. Otherwise `measure` runs, or
    the configurations in `options.configs` are checked and those that are right are timed. Without a GPU these are
    compiled instead, but a `measure` that is not `compile` shows a record.
    """

    module: str
    description: str
    options: dict[str, Option]
    source: Callable[[], str]  # the hash of the code that is measured
    columns: str = ""  # of the table; none for a command that prints its rows as they come
    needs: tuple[str, str, str] = ("has_tma", "it", "")  # what `device.require` takes before a measurement
    alone: dict[str, tuple[str, ...]] = field(default_factory=dict)  # {option: those that go with it}
    complete: Callable[[Options], None] = lambda options: None  # add values; ValueError if they do not fit
    actions: dict[str, Action] = field(default_factory=dict)
    measure: Action | None = None
    compile: Action | None = None
    reject: Callable[[Options, Any, str], str] = lambda *_: ""  # why a configuration cannot run on a target
    verify: Callable[[Options, Any], dict] | None = None  # the row of a configuration
    compare: Callable[[Options, dict], list[dict]] | None = None  # rows with times of {name: configuration}
    job: Callable[[Options, Any], build.Job] | None = None
    describe: Callable[[build.Report], dict] = lambda report: {}  # more columns of what was compiled
    label: Callable[[Options, str, Any], dict] = label_row  # the names in a row
    kept: Callable[[Options], str] = describe_tuned  # what is kept when the command is cancelled
    partial: bool = False  # configurations that cannot run are part of a good answer

    def run(self) -> NoReturn:
        """Run the command with the arguments of this process, and end the process."""
        run_main(self.main)

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command and return its exit status. Bad usage ends in SystemExit, with status 2."""
        options = self.parse(argv)
        try:
            found = self._choose_action(options)(options)
            if isinstance(found, int):
                return found
            if not isinstance(found, results.Record):
                name = self.module.replace(".", "_")
                found = results.Record(results.make_record(name, found, self.source()), live=True)
            self._show(options, found)
        except BrokenPipeError:
            raise  # to `run_main`
        except (ValueError, OSError, RuntimeError) as error:  # Unsupported and CompileError are RuntimeErrors
            print(f"python -m {self.module}: {device.first_line(error)}.", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            kept = self.kept(options)
            print(f"python -m {self.module}: cancelled{kept and '; '}{kept}.", file=sys.stderr)
            return 130
        statuses = {row["status"] for row in found.rows}
        fine = "ok" in statuses if self.partial else statuses == {"ok"}
        return 1 if "wrong" in statuses else 0 if fine else 2

    def parse(self, argv: Sequence[str] | None) -> Options:
        """Return the options, converted and completed."""
        parser = make_plain_parser(self.module, self.description)
        for name, option in {**self.options, "json": JSON}.items():
            parser.add_argument(f"--{name}", **option.keywords)
        options = parser.parse_args(argv, Options())
        given = {name for name, value in vars(options).items() if value != parser.get_default(name)}
        for name, beside in self.alone.items():
            if name in given and (others := given - {name, *beside}):
                goes = f"goes with --{' and --'.join(beside)} only" if beside else "stands alone"
                parser.error(f"--{name} {goes}; --{min(others)} was given too.")
        options.given = given
        for name, option in {**self.options, "json": JSON}.items():
            value = getattr(options, name, None)
            try:
                if option.convert and value is not None:
                    setattr(options, name, option.convert(value, options))
            except (ValueError, OSError) as error:
                parser.error(f"--{name} {error}")
        try:
            self.complete(options)
        except ValueError as error:
            parser.error(str(error))
        return options

    def _choose_action(self, options: Options) -> Action:
        for name, action in self.actions.items():
            if getattr(options, name):
                return action
        times = self.measure in (None, self.compile)  # and shows no record
        if not getattr(options, "target", None) and times and device.current().capability is None:
            options.target = "sm_90a"
            options.say(
                f"Nothing is timed here ({device.current().describe()}). It is compiled for {options.target}."
            )
        if getattr(options, "target", None):
            return self.compile or self.build_configs
        return self.measure or self.check_and_time

    def _show(self, options: Options, record: results.Record) -> None:
        if self.columns and options.json != "-":
            columns = [name for name in self.columns.split() if any(name in row for row in record.rows)]
            targets = sorted({row["target"] for row in record.rows if row.get("target")})
            label = f"compiled for {', '.join(targets)}" if targets else record.label()
            print(results.table(record.rows, f"{record.experiment}: {label}", columns))
        options.write(record.data)

    def _list_rejected(self, options: Options, target: str) -> dict[str, dict]:
        """Return the rows of configurations that cannot run on a target."""
        reasons = {name: self.reject(options, config, target) for name, config in options.configs.items()}
        return {
            name: {"target": target, "status": "unsupported", "reason": reason}
            for name, reason in reasons.items()
            if reason
        }

    def build_configs(self, options: Options) -> list[dict]:
        """Compile the chosen configurations for a target, in parallel, and return a row for each."""
        rows = self._list_rejected(options, options.target)
        jobs = {name: self.job(options, each) for name, each in options.configs.items() if name not in rows}
        reports = {id(report.job): report for report in build.build(jobs.values())}
        for name, job in jobs.items():
            rows[name] = reports[id(job)].row() | self.describe(reports[id(job)])
        return self._label_rows(options, rows)

    def check_and_time(self, options: Options) -> list[dict]:
        """Check the chosen configurations, time those that are right, and return a row for each."""
        device.require(*self.needs)
        rows = self._list_rejected(options, device.current().target)
        for name, config in options.configs.items():
            if name not in rows:
                rows[name] = self.verify(options, config)
        right = {name: options.configs[name] for name, row in rows.items() if row["status"] == "ok"}
        for timed in self.compare(options, right) if right else []:
            if timed["name"] in right:  # others are the library's own
                rows[timed["name"]] |= timed
        return self._label_rows(options, rows)

    def _label_rows(self, options: Options, rows: dict[str, dict]) -> list[dict]:
        return [rows[name] | self.label(options, name, config) for name, config in options.configs.items()]
