"""Private environments of `ch14.bug_hunt`: a folder a Triton, that nothing but the builds of that Triton see."""

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

from tilelab.device import Unsupported

VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc|\.post)\d+)?", re.ASCII)
LIMIT_S = 1200


def installed() -> str:
    """The version of the Triton that this Python imports."""
    return importlib.metadata.version("triton")


def folder() -> pathlib.Path:
    """Where environments are kept: TILES_TRITONS, else tiles-in-flight/tritons in XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("TILES_TRITONS"):
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tiles-in-flight/tritons")


def _place(version: str) -> pathlib.Path:
    if not VERSION.fullmatch(version):
        raise ValueError(f"a Triton version is three numbers such as 3.5.1; here it is {version[:40]!r}.")
    return folder() / f"{version}-cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"


def known(version: str) -> bool:
    """Whether builds with this Triton can begin at once: it is installed, or its environment is there."""
    return version == installed() or _place(version).is_dir()


def ready(version: str) -> pathlib.Path | None:
    """The folder of a `known` Triton; None stands for the installed one. Unsupported says how to make another."""
    if version == installed():
        return None
    if not _place(version).is_dir():
        raise Unsupported(f"Triton {version} needs an environment of its own, which is not there; installed is "
                          f"{installed()}: make it with python -m ch14.bug_hunt --triton {version}.")
    return _place(version)


def environment(version: str, say: Callable[[str], object] = lambda line: None) -> pathlib.Path | None:
    """The folder of a Triton, installed there by pip the first time (0.6 to 1 GB); None stands for the installed one.

    A folder that is there is whole: it gets its name when Triton has been imported from it. Two processes that want
    one wait for each other. ValueError for what is no version, Unsupported with one sentence when it cannot be made.
    """
    if version == installed():
        return None
    place = _place(version)
    if place.is_dir():
        return place
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with open(place.with_name(f".{place.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process lets go, or ends
            if not place.is_dir():
                say(f"installing Triton {version} into {place} (up to 1 GB, once)")
                _make(version, place)
    except OSError as error:
        raise Unsupported(f"no environment for Triton {version} can be made in {folder()}: {error}.") from error
    return place


def _make(version: str, place: pathlib.Path) -> None:
    unfinished = place.with_name(f".{place.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # what an interrupted process has left
    command = [sys.executable, "-m", "pip", "install", f"triton=={version}", "--target", unfinished, "--no-deps",
               "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--retries", "1", "-q"]
    try:
        _run(command, {}, lambda said: _why_not(version, said))
        # Without site-packages, and not as an interpreter, which would want numpy.
        _run([sys.executable, "-S", "-c", "import triton"],
             {"PYTHONPATH": os.fspath(unfinished), "TRITON_INTERPRET": "0"},
             lambda said: f"Triton {version} is installed but does not import: {_last(said)}.")
        unfinished.rename(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _run(command: list, env: dict, why: Callable[[str], str]) -> None:
    try:
        done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S,
                              check=False)
    except subprocess.TimeoutExpired:
        raise Unsupported(f"{command[1:4]} had not ended after {LIMIT_S} s.") from None
    if done.returncode:
        raise Unsupported(why(done.stderr or done.stdout))


def _why_not(version: str, said: str) -> str:
    """One sentence from what pip wrote."""
    here = f"Python {sys.version_info.major}.{sys.version_info.minor} on {platform.machine()}"
    if "No module named pip" in said:
        return f"Triton {version} cannot be installed: this Python has no pip; install it with python -m ensurepip."
    if offered := re.search(r"from versions: ([^)]*)\)", said):
        versions = [each for each in offered[1].split(", ") if each[:1].isdigit()]
        if versions:
            return f"there is no Triton {version} for {here}; there are {', '.join(versions[-12:])}."
        return f"Triton {version} cannot be installed: the package index has nothing for {here}, or cannot be reached."
    return f"Triton {version} cannot be installed: pip says {_last(said)}."


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return (lines or ["nothing"])[-1].removeprefix("ERROR: ").rstrip(".")[:300]
