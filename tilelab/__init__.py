"""The bench that the chapters share, in rooms.

Start with `runtime`: what an operator needs when it runs, the only room that the product half of a topic imports, with
the CUDA headers in `include`. The other rooms serve the course: `measure` times and checks, `sweeps` searches
configurations, `records` keeps results, `cells` runs kernels of notebook cells, `emulator` runs them without a GPU,
`pictures` and `views` show, and `course` holds the commands.
"""

import os
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).parents[1]  # the repository


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
