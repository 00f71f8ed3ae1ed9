"""Shared parts of the chapters' command lines.

A bad argument is one line on stderr, rows are a table or one JSON object, and the exit status says how the run went.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from tilelab import device, results


def make_plain_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for `python -m module` whose errors are one line on stderr, with exit status 2."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
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


def choose_variants(parser: argparse.ArgumentParser, variant: str, named: dict) -> dict:
    """Return the part of `named` that --variant selects: one name, "all", or "best" (the first)."""
    wanted = {"all": list(named), "best": list(named)[:1]}.get(variant, [variant])
    if wanted[0] not in named:
        parser.error(f"unknown --variant {variant[:60]}; choose one of {', '.join(named)}, best, all.")
    return {name: named[name] for name in wanted}


def unwritable_reason(path: str) -> str:
    """Return why nothing can be written to `path`, for a check before the work; "" when it seems possible."""
    try:
        file = pathlib.Path(path)
        if not path:
            return "it is empty"
        if file.is_dir():
            return f"{path} is a folder"
        nearest = next(parent for parent in (file, *file.absolute().parents) if parent.exists())
        if nearest is not file and not nearest.is_dir():
            return f"{nearest} is no folder"
        return "" if os.access(nearest, os.W_OK) else f"{path} may not be written"
    except OSError as error:
        return f"{path[:60]} cannot be one ({error.strerror})"


def run_and_report(module: str, columns: Sequence[str], source: str, path: str | None,
                   measure: Callable[[], list[dict]]) -> int:
    """Print the rows of `measure()` as a table with these `columns`, or write the rows as JSON to `path`.

    Return the exit status: 0 if all rows are ok, 1 for a wrong result, 2 if something could not run, 130 for Ctrl-C.
    """
    try:
        rows = measure()
        record = results.Record(results.make_record(module.replace(".", "_"), rows, source), live=True)
        if path != "-":
            targets = {row["target"] for row in rows if row.get("target")}
            label = f"compiled for {', '.join(sorted(targets))}" if targets else record.label()
            print(results.table(rows, f"{record.experiment}: {label}",
                                [name for name in columns if any(name in row for row in rows)]))
        if path:
            text = results.to_json(record.data)
            print(text, end="") if path == "-" else results.write_atomically(pathlib.Path(path), text)
    except (ValueError, OSError, RuntimeError) as error:  # Unsupported and CompileError are RuntimeErrors
        print(f"python -m {module}: {device.first_line(error)}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"python -m {module}: interrupted.", file=sys.stderr)
        return 130
    statuses = {row["status"] for row in rows}
    return 1 if "wrong" in statuses else 0 if statuses == {"ok"} else 2
