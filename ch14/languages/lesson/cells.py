"""The cell magic `%%language NAME` of `19_ch14_languages`: check and time a kernel typed in a cell, in its own process.

`%load_ext ch14.languages.lesson.cells` registers it. Without the GPU or the language it shows the recorded figures.
`%%language NAME --check Exercise N` hands the cell to the check of an exercise instead.
"""

from __future__ import annotations

import atexit
import pathlib
import shutil
import tempfile
from typing import Any

from ch14.languages import TITLES, configs
from ch14.languages.lesson import exercises, experiments, worker
from tilelab.runtime import device, provenance

ROUNDS = 6


# A process per language that has imported it, and waits for the text of a cell.
_spares: dict[str, tuple[experiments.Language, pathlib.Path]] = {}


def start_spare(name: str) -> None:
    """Start a process for the next cell of a language."""
    path = pathlib.Path(tempfile.mkdtemp(), worker.find_source(name).name)
    _spares[name] = experiments.Language(name, str(path)), path


@atexit.register
def end_spares() -> None:
    """End the processes that wait."""
    for language, path in _spares.values():
        language.close()
        shutil.rmtree(path.parent, ignore_errors=True)
    _spares.clear()


def try_kernel(name: str, text: str, config: dict) -> dict:
    """Check a kernel on ragged sizes and time it at 4096 cubed, in a new process; return the worker's answer."""
    if name not in _spares:
        start_spare(name)
    language, path = _spares.pop(name)
    path.write_text(text)
    try:
        found = language.ask("describe", 120)
        found |= language.ask("check", 120, config=config) if found["status"] == "ok" else {}
        if found["status"] == "ok":
            timed = experiments.time_rounds({name: language}, experiments.SQUARE, {name: config}, ROUNDS)
            reason = "it is right on ragged sizes, but at 4096³ it fails or takes more than a minute"
            found |= timed.get(name, {"status": "failed", "reason": reason})
        return found
    finally:
        language.close()
        shutil.rmtree(path.parent, ignore_errors=True)
        start_spare(name)


def is_recorded(name: str, text: str) -> bool:
    """Return whether a cell holds the kernel that the records are of, apart from comments and layout."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, worker.find_source(name).name)
        path.write_text(text)
        try:
            return provenance.source_hash(path) == provenance.source_hash(worker.find_source(name))
        except SyntaxError:
            return False


def try_compiler(name: str, text: str, config: dict) -> str:
    """Compile a kernel for Hopper without a GPU; return what became of it in words."""
    with experiments.start_text(name, text) as language:
        found = language.ask("compile", 240, config=config)
    if found["status"] != "ok":
        return f"It does not compile: {found['reason']}"
    return f"It compiles for Hopper {worker.describe_code(found)}."


def describe(row: dict) -> str:
    """Return the figures of a measured kernel in words."""
    return f"{row['ratio']:.2f} ± {row['spread']:.2f} × cuBLAS at 4096³ ({row['tflops']:.0f} TFLOP/s)"


def show_kernel(name: str, text: str) -> str:
    """Return what can be said about the kernel in a cell: measured now, or the recorded figures with the reason."""
    if name not in TITLES:
        raise ValueError(f"unknown language {name!r}; choose one of {', '.join(TITLES)}.")
    reason, row = "there is no GPU with TMA here" if not device.current().has_tma else "", {}
    try:
        record = experiments.measure_speed.load()
        row = experiments.find_row(record, "speed", name, experiments.SQUARE)
    except FileNotFoundError:
        if reason:
            raise
    config = row.get("config") or configs.CONFIGS[name][0]
    if not reason:
        found = try_kernel(name, text, config)
        if found["status"] == "ok":
            version = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
            error = f"right on ragged sizes (error {found['error_of_cublas']:.2f} × cuBLAS's)"
            return f"{TITLES[name]} ({version}): {error}, {describe(found)}; first call after {found['first_s']:.1f} s"
        if found["status"] == "wrong" or "ModuleNotFoundError" not in found["reason"]:
            return f"{TITLES[name]}: {found['status']}: {found.get('reason') or found.get('error_of_cublas')}"
        reason = found["reason"]
    if not is_recorded(name, text):
        said = f"{TITLES[name]}: this kernel is not the recorded one, and it cannot run: {reason}."
        return said + (f" {try_compiler(name, text, config)}" if worker.is_installed(name) else "")
    if not row.get("ratio"):
        return f"{TITLES[name]}: there is no record of its speed, and it cannot run: {reason}."
    return f"{TITLES[name]}: {describe(row)}; {record.label()} ({reason})"


def run_cell(line: str, text: str) -> None:
    """Print what the cell's kernel does, or whether it solves an exercise."""
    name, *options = line.split() or [""]
    if options and options[0] != "--check":
        raise ValueError(f"%%language takes a language, and --check Exercise N; it got {line.strip()!r:.60}.")
    if options:
        exercises.check(" ".join(options[1:]), name, text)
    else:
        print(show_kernel(name, text))


def load_ipython_extension(shell: Any) -> None:
    """Register %%language."""
    shell.register_magic_function(run_cell, "cell", "language")
    for name in TITLES if device.current().has_tma else ():
        start_spare(name)
