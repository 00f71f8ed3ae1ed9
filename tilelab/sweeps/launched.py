"""Which kernels of Triton were launched? A sweep asks, because it reports the registers of what it built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from tilelab.runtime import build


@contextlib.contextmanager
def watch_launches() -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Yield a list that gets (name, {"num_warps", "num_stages"}) of each kernel that is compiled or launched inside."""
    from triton.runtime.jit import JITFunction

    launched, run = [], JITFunction.run

    def watch(self, *arguments, **options):
        compiled = run(self, *arguments, **options)
        if metadata := getattr(compiled, "metadata", None):
            words = ("num_warps", "num_stages")
            # The compiler counts the warps of all roles of a warp-specialised kernel; a job names those of the first.
            found = {word: options.get(word, getattr(metadata, word, None)) for word in words}
            launched.append((self.fn.__name__, found))
        return compiled

    with mock.patch.object(JITFunction, "run", watch):
        yield launched


def find_difference(job: build.Job, launched: list[tuple[str, dict[str, int]]]) -> str:
    """Return a sentence if the kernel of a job was launched, but never as the job builds it, or ""."""
    kernel = job.kernel.rpartition(":")[2]
    built = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    options = [found for name, found in launched if name == kernel]
    if not options or built in options:
        return ""
    different = ", ".join(
        f"{word}={value} and it built {built[word]}"
        for word, value in options[-1].items()
        if value != built[word]
    )
    return f"the sweep launched {kernel} with {different}: let job(config) pass num_warps and num_stages to build.Job."
