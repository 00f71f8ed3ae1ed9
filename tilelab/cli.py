"""What the chapters' command lines share: a bad argument is one line, rows are a table or one JSON object, and the exit
status says how it went."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from tilelab import device, results


def make_plain_parser(module: str, description: str) -> argparse.ArgumentParser:
    """A parser for `python -m module` whose errors are one line on stderr and status 2."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.error = lambda message: made.exit(2, f"{made.prog}: {message}\n")
    return made


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The same, with --json."""
    made = make_plain_parser(module, description)
    made.add_argument("--json", metavar="PATH", help="write one JSON object to PATH, - for standard output")
    return made


def parse_options(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; a --json that names no file is refused here, before the work."""
    options = made.parse_args(argv)
    if options.json == "":
        made.error("--json takes a file or -.")
    if options.json not in (None, "-") and (reason := unwritable_reason(options.json)):
        made.error(f"--json takes a file; {reason}.")
    return options


def choose_variants(made: argparse.ArgumentParser, asked: str, named: dict) -> dict:
    """Those of `named` that --variant asks for: one by its name, the first as "best", or "all"."""
    wanted = {"all": list(named), "best": list(named)[:1]}.get(asked, [asked])
    if wanted[0] not in named:
        made.error(f"--variant is one of {', '.join(named)}, best or all; here it is {asked[:60]}.")
    return {name: named[name] for name in wanted}


def unwritable_reason(path: str) -> str:
    """Why nothing can be written to `path`, before the work that is to be written; empty when it seems that it can."""
    try:
        file = pathlib.Path(path)
        if not path:
            return "it is empty"
        if file.is_dir():
            return f"{path} is a folder"
        there = next(each for each in (file, *file.absolute().parents) if each.exists())  # folders are made
        if there is not file and not there.is_dir():
            return f"{there} is no folder"
        return "" if os.access(there, os.W_OK) else f"{path} may not be written"
    except OSError as error:
        return f"{path[:60]} cannot be one ({error.strerror})"


def run_and_report(module: str, columns: Sequence[str], source: str, path: str | None,
           measure: Callable[[], list[dict]]) -> int:
    """Show the rows of `measure()` as a table of those `columns` that they have, or as JSON at `path`.

    The exit status: 0 when all rows are ok, 1 for a wrong result, 2 when something could not run, with one line.
    """
    try:
        rows = measure()
        record = results.Record(results.make_record(module.replace(".", "_"), rows, source), live=True)
        if path != "-":
            built = {row["target"] for row in rows if row.get("target")}
            label = f"compiled for {', '.join(sorted(built))}" if built else record.label()
            print(results.table(rows, f"{record.experiment}: {label}",
                                [name for name in columns if any(name in row for row in rows)]))
        if path:
            text = results.to_json(record.data)
            print(text, end="") if path == "-" else results.write_atomically(pathlib.Path(path), text)
    except (ValueError, OSError, RuntimeError) as error:  # Unsupported and CompileError among the last
        print(f"python -m {module}: {device.first_line(error).rstrip('.')}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"python -m {module}: interrupted.", file=sys.stderr)
        return 130
    statuses = {row["status"] for row in rows}
    return 1 if "wrong" in statuses else 0 if statuses == {"ok"} else 2
