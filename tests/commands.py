"""Run a topic's command in this process."""

import importlib
import json
import shlex

from tilelab import cli
from tilelab.runtime import device

H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")


def find(module: str) -> cli.Command:
    """Return the command of a topic."""
    return importlib.import_module(f"{module}.lesson.command").COMMAND


def run(capsys, command: str | cli.Command, arguments: str) -> tuple[int, str, str]:
    """Return (exit status, standard output, standard error), whether `main` returns or the parser exits."""
    command = find(command) if isinstance(command, str) else command
    try:
        status = command.main(shlex.split(arguments))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    return status, said.out, said.err


def run_json(capsys, command: str | cli.Command, arguments: str) -> tuple[int, dict]:
    """Return (exit status, record) of a command that prints JSON and nothing else."""
    status, out, err = run(capsys, command, f"{arguments} --json -")
    assert not err
    return status, json.loads(out)
