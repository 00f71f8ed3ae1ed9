"""Pretend to Triton that a Hopper GPU is there, in a process of its own.

Tests use it to compare what a launch looks up in the compiler's cache with what was built ahead.
"""

import contextlib
import dataclasses
import functools

import triton
from script_server import ScriptServer
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import driver

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


@functools.cache
def _start_server() -> ScriptServer:
    return ScriptServer()


def run(script: str) -> str:
    """Run a script in a process of its own and return what it prints; AssertionError when it fails."""
    return _start_server().run(script)
