"""The bench that the chapters share, in rooms.

Start with `runtime`: what an operator needs when it runs, the only room that the product half of a topic imports, with
the CUDA headers in `include`. The other rooms serve the course: `measure` times and checks, `sweeps` searches
configurations, `records` keeps results, `cells` runs kernels of notebook cells, `emulator` runs them without a GPU,
`pictures` and `views` show, and `course` holds the commands.
"""

import importlib
import os
import pathlib
import signal
import sys
from types import ModuleType

ROOT = pathlib.Path(__file__).parents[1]  # the repository

# Version 0.1 had no rooms. What its users imported most keeps working: `from tilelab import cuda_magic`.
MOVED = {
    "bench": "measure",
    "build": "runtime",
    "check": "measure",
    "cuda": "runtime",
    "cuda_magic": "cells",
    "device": "runtime",
    "gluon_emulator": "emulator.gluon",
    "lesson": "cells",
    "results": "records",
    "tensor_map": "runtime",
    "triton_cell": "cells",
    "tuned": "runtime",
}


def name_command() -> str:
    """Return the command that runs: "python -m ch14.gemm"."""
    words = sys.orig_argv
    return f"python -m {words[words.index('-m') + 1]}" if "-m" in words[:-1] else words[-1]


def cancel_import(*_) -> None:
    """End a command that is still importing, as `cli.run_main` ends it later."""
    os.write(2, f"{name_command()}: cancelled.\n".encode())
    os._exit(130)


# While `python -m` still imports the package of its module, Ctrl-C would end in a traceback. `cli.run_main` takes over.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, cancel_import)


def __getattr__(name: str) -> ModuleType:
    """Import a module by the name that it had in version 0.1."""
    if name not in MOVED:
        raise AttributeError(f"module 'tilelab' has no attribute {name!r}")
    place = MOVED[name]
    return importlib.import_module(f"tilelab.{place}" if "." in place else f"tilelab.{place}.{name}")
