"""Read the compiler's IR of the loop of `kernels.loop_kernel`, as it stands before a pass.

Triton writes its IR before each pass to stderr where MLIR_ENABLE_DUMP names the kernel. `read_loop` compiles in a
process of its own and shortens what it finds, so that a loop fits on a page.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
import tempfile

from ch14.bug_hunt.hunts import HUNTS
from tilelab import ROOT

LIMIT_S = 120


@functools.cache
def _compile_with_dumps(config: tuple[tuple[str, object], ...], target: str) -> str:
    """Return everything that the installed Triton writes while it compiles a configuration of the loop hunt."""
    job = dataclasses.asdict(HUNTS["loop"].job(dict(config), target))
    env = {**os.environ, "MLIR_ENABLE_DUMP": "loop_kernel", "TRITON_ALWAYS_COMPILE": "1"}
    env.pop("TRITON_INTERPRET", None)  # the chapter sets it where there is no GPU
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from tilelab.runtime import build_worker; build_worker._compile_triton({job!r})",
            ],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=ROOT,
            check=False,
            timeout=LIMIT_S,
            env=env | {"TRITON_CACHE_DIR": cache},
        )
    return done.stderr


def shorten(line: str) -> str:
    """Return an operation without its place in the source, its types and its constant operands."""
    line = re.sub(r" loc\(.*?\)$", "", line.rstrip())
    attributes = re.search(r"\{(tt\.[^}]*)\}", line)
    head = line if line.lstrip().startswith(("scf.for", "}")) else re.split(r" : |\{tt\.", line)[0]
    if "scf.for" in head:
        head = re.sub(r" -> .*", " {", head)
    return head.rstrip() + (f"  {{{re.sub(' : i32', '', attributes[1])}}}" if attributes else "")


def read_loop(config: dict, before: str, target: str = "sm_100a") -> str:
    """Return the loop of a configuration of the hunt "loop", shortened, as it stands before the pass `before`.

    `before` is MLIR's name of the pass, such as "TritonGPUAssignLatencies". ValueError if the dump has no such pass or
    no loop there.
    """
    dumps = _compile_with_dumps(tuple(config.items()), target).split("// -----// IR Dump Before ")
    text = next((dump for dump in dumps if dump.startswith(f"{before} ") and "scf.for" in dump), "")
    begin = re.search(r"^( *)%\S+ = scf\.for .*", text, re.MULTILINE)
    if not begin:
        raise ValueError(f"the compiler's output has no loop before the pass {before}.")
    lines = text[begin.start() :].splitlines()
    end = next(index for index, line in enumerate(lines) if re.match(rf"{begin[1]}\}}", line))
    return "\n".join(shorten(line[len(begin[1]) :]) for line in lines[: end + 1])
