"""Pretend to Triton that a Hopper GPU is there, in a process of its own.

Tests use it to compare what a launch looks up in the compiler's cache with what was built ahead.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from tilelab import ROOT
from tilelab.course import notebook
from tilelab.runtime import build_worker

HOPPER, noted = GPUTarget("cuda", 90, 32), set()


class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return HOPPER


def note(source, target=None, options=None, **rest):
    noted.add((source.name, source.hash(), make_backend(HOPPER).parse_options(options).hash()))


def begin() -> None:
    """Note what would be compiled from here on, and compile nothing."""
    driver.set_active(Driver())
    triton.compile = triton.compiler.compile = note


def list_launch_lookups(work, *arguments) -> set:
    """Return what the cache is looked up by while work(*arguments) runs."""
    noted.clear()
    work(*arguments)
    return set(noted)


def list_build_lookups(jobs) -> set:
    """Return what the cache is looked up by when the jobs are built."""
    noted.clear()
    for job in jobs:
        with contextlib.suppress(AttributeError):  # it looks for the binary
            build_worker._compile_triton(dataclasses.asdict(job))
    return set(noted)


def run(script: str) -> None:
    """Run a script in a process of its own; AssertionError with its last words when it fails."""
    env = notebook.child_env(TRITON_INTERPRET="0")
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
