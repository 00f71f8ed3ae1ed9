"""Chapter 10, tensor maps and pipelines: tiles of two dimensions, and a GEMM on Hopper's tensor cores."""

import tilelab  # noqa: F401, it says that Ctrl-C cancelled a command, also during the imports below
