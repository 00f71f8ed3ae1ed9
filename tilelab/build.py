"""Compile kernels for any target with no GPU and read what came out."""
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def sass(cubin: bytes) -> str:
    """SASS of a cubin, through the cuobjdump that Triton's wheel carries; RuntimeError says why it could not be read."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump cannot read this cubin: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
