"""Private environments of `ch14.bug_hunt`: one folder per Triton, which only the builds with that Triton import."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

from tilelab.runtime.device import Unsupported

VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc|\.post)\d+)?", re.ASCII)
LIMIT_S = 1200


def installed_version() -> str:
    """Return the version of the Triton that this Python imports."""
    return importlib.metadata.version("triton")


def environments_folder() -> pathlib.Path:
    """Return TILES_TRITONS, or tiles-in-flight/tritons in XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("TILES_TRITONS"):
        return pathlib.Path(folder)
    return pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tiles-in-flight/tritons"
    )


def _path(version: str) -> pathlib.Path:
    if not VERSION.fullmatch(version):
        raise ValueError(f"a Triton version must be three numbers such as 3.5.1; it is {version[:40]!r}.")
    name = f"{version}-cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"
    return environments_folder() / name


def _is_complete(path: pathlib.Path, version: str) -> bool:
    found = importlib.metadata.distributions(name="triton", path=[os.fspath(path)])
    return (path / "triton").is_dir() and [each.version for each in found] == [version]


def is_available(version: str) -> bool:
    """Return whether builds with this Triton can begin at once."""
    return version == installed_version() or _is_complete(_path(version), version)


def locate(version: str) -> pathlib.Path | None:
    """Return the folder of an available Triton; None stands for the installed one. Raise Unsupported for any other."""
    if not is_available(version):
        raise Unsupported(
            f"Triton {version} needs an environment of its own; installed is {installed_version()}: make "
            f"one with python -m ch14.bug_hunt --triton {version}."
        )
    return None if version == installed_version() else _path(version)


def install(version: str, report: Callable[[str], object] = lambda line: None) -> pathlib.Path | None:
    """Return the folder of a Triton, which pip installs the first time (0.6 to 1 GB); None for the installed one.

    A folder gets its name after Triton was imported from it; one that has been emptied is made again. Two processes
    that want the same folder wait for each other. Raise Unsupported with one sentence if it cannot be made.
    """
    if is_available(version):
        return locate(version)
    path = _path(version)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(f".{path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process closes the file, or ends
            if not _is_complete(path, version):
                report(f"installing Triton {version} into {path} (up to 1 GB, once)")
                _install(version, path)
    except OSError as error:
        raise Unsupported(
            f"no environment for Triton {version} can be made in {path.parent}: {error}."
        ) from error
    return path


def _install(version: str, path: pathlib.Path) -> None:
    unfinished = path.with_name(f".{path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # an interrupted process may have left one
    try:
        options = (
            "--no-deps --only-binary :all: --disable-pip-version-check --no-input --retries 1 -q".split()
        )
        pip = [sys.executable, "-m", "pip", "install", f"triton=={version}", "--target", unfinished]
        output = _run([*pip, *options])
        if output:
            raise Unsupported(explain_pip(version, output))
        # Without site-packages, and without the interpreter, which would import numpy.
        output = _run(
            [sys.executable, "-S", "-c", "import triton"],
            PYTHONPATH=os.fspath(unfinished),
            TRITON_INTERPRET="0",
        )
        if output:
            raise Unsupported(f"Triton {version} is installed but does not import: {_last_line(output)}.")
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _run(command: list, **env: str) -> str:
    """Run a command and return "", or what it wrote if it failed."""
    try:
        process = subprocess.run(
            command, env=os.environ | env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S} s"
    return (process.stderr or process.stdout or "no message") if process.returncode else ""


def explain_pip(version: str, output: str) -> str:
    """Return one sentence for the output of a pip that failed."""
    if "No module named pip" in output:
        return f"Triton {version} cannot be installed: this Python has no pip; install it with python -m ensurepip."
    if offered := re.search(r"from versions: ([^)]*)\)", output):
        here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
        versions = [name for name in offered[1].split(", ") if name[:1].isdigit()]
        if versions:
            return f"there is no Triton {version} for {here}; choose one of {', '.join(versions[-12:])}."
        return f"Triton {version} cannot be installed: the package index has nothing for {here}, or cannot be reached."
    return f"Triton {version} cannot be installed: pip says {_last_line(output)}."


def _last_line(output: str) -> str:
    return output.strip().splitlines()[-1].removeprefix("ERROR: ").rstrip(".")[:300]
