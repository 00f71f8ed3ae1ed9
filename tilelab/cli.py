"""Shared parts of the chapters' command lines.

A bad argument is one line on stderr, rows are a table or one JSON object, and the exit status says how the run went.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tilelab.records import results
from tilelab.runtime import device, files


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a command line and end the process with its exit status.

    A reader that closes the pipe early, as `head -1` does, ends the process silently, as SIGPIPE would.
    """
    try:
        try:
            status = main()
        except SystemExit as stopped:  # argparse prints --help and leaves
            status = stopped.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes once more when it ends
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def make_plain_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m module` whose errors are one line on stderr, with exit status 2."""

    def error(message: str) -> NoReturn:
        line = re.sub(r"\S{300,}", lambda word: f"{word[0][:60]}…", " ".join(message.split()))
        parser.exit(2, f"{parser.prog}: {line}\n")

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.error = error
    return parser


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser as `make_plain_parser` does, with the option --json."""
    parser = make_plain_parser(module, description)
    parser.add_argument("--json", metavar="PATH", help="write one JSON object to PATH, - for standard output")
    return parser


def parse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; a --json that cannot be written is refused here, before the work."""
    options = parser.parse_args(argv)
    if options.json == "":
        parser.error("--json takes a file or -.")
    if options.json not in (None, "-") and (reason := unwritable_reason(options.json)):
        parser.error(f"--json takes a file; {reason}.")
    return options


def choose_variants(
    parser: argparse.ArgumentParser, variant: str, named: dict, option: str = "--variant"
) -> dict:
    """Return the part of `named` that the option selects: one name, "all", or "best" (the first)."""
    wanted = {"all": list(named), "best": list(named)[:1]}.get(variant, [variant])
    if wanted[0] not in named:
        parser.error(
            f"unknown {option} {variant[:60]}; choose one of {', '.join(dict.fromkeys([*named, 'best']))}, "
            "all."
        )
    return {name: named[name] for name in wanted}


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the whole numbers of "4096,4096,64". ValueError for other text, and for numbers of over 18 digits."""
    parts = text.split(",")
    if any(len(part) > 18 for part in parts):
        raise ValueError(f"a size has at most 18 digits; it is {text[:60]}.")
    return tuple(map(int, parts))


def write_json(record: dict, path: str) -> None:
    """Write a record as one JSON object to the file `path`, or to standard output for "-"."""
    text = results.to_json(record)
    print(text, end="") if path == "-" else files.write_atomically(pathlib.Path(path), text)


def require_sizes(
    parser: argparse.ArgumentParser, option: str, text: str, form: str, largest: int
) -> tuple[int, ...]:
    """Return `parse_sizes(text)`, which must have the form (such as "R,C") and lie from 1 to `largest`."""
    try:
        sizes = parse_sizes(text)
    except ValueError:
        sizes = ()
    if len(sizes) != len(form.split(",")) or not 0 < min(sizes) <= max(sizes) <= largest:
        parser.error(f"{option} must be {form}, each from 1 to {largest:,}; it is {text[:60]}.")
    return sizes


def check_and_time(
    chosen: dict, verify: Callable[[object], dict], compare: Callable[[dict], list[dict]]
) -> list[dict]:
    """Return a row for each named configuration: `verify(config)` and, if it is right, its row of `compare(right)`."""
    rows = {name: {**verify(config), "name": name, "config": str(config)} for name, config in chosen.items()}
    right = {name: chosen[name] for name, row in rows.items() if row["status"] == "ok"}
    for timed in compare(right) if right else []:
        if timed["name"] in rows:  # others are the library's own
            rows[timed["name"]] |= timed
    return list(rows.values())


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


def run_and_report(
    module: str, columns: Sequence[str], source: str, path: str | None, measure: Callable[[], list[dict]]
) -> int:
    """Print the rows of `measure()` as a table with these `columns`, or write the rows as JSON to `path`.

    Return the exit status: 0 if all rows are ok, 1 for a wrong result, 2 if something could not run, 130 for Ctrl-C.
    """
    try:
        rows = measure()
        record = results.Record(results.make_record(module.replace(".", "_"), rows, source), live=True)
        if path != "-":
            targets = {row["target"] for row in rows if row.get("target")}
            label = f"compiled for {', '.join(sorted(targets))}" if targets else record.label()
            print(
                results.table(
                    rows,
                    f"{record.experiment}: {label}",
                    [name for name in columns if any(name in row for row in rows)],
                )
            )
        if path:
            write_json(record.data, path)
    except BrokenPipeError:
        raise  # to `run_main`
    except (ValueError, OSError, RuntimeError) as error:  # Unsupported and CompileError are RuntimeErrors
        print(f"python -m {module}: {device.first_line(error)}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"python -m {module}: interrupted.", file=sys.stderr)
        return 130
    statuses = {row["status"] for row in rows}
    return 1 if "wrong" in statuses else 0 if statuses == {"ok"} else 2
