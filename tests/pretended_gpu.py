"""Run the host's part of a launch without a GPU, in a process of its own: the driver is pretended_driver.c.

Tests use it to compare what the driver is given by a plan with what Triton or a fresh launch gives it.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile

from tilelab import ROOT
from tilelab.course import notebook

COMPILER = shutil.which("cc")
BEGIN = """
import pretended_gpu
pretended_gpu.begin()
"""


def run(script: str) -> str:
    """Run a script after `begin` in a process of its own, and return what it prints; AssertionError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        tests = ROOT / "tests"
        subprocess.run(
            [
                COMPILER,
                "-O1",
                "-shared",
                "-fPIC",
                "-o",
                f"{folder}/libcuda.so.1",
                str(tests / "pretended_driver.c"),
                "-ldl",
            ],
            check=True,
        )
        # Triton's launcher is built against this driver, so it has a cache of its own.
        env = notebook.child_env(
            TRITON_INTERPRET="0",
            TRITON_CACHE_DIR=f"{folder}/triton",
            LD_LIBRARY_PATH=folder,
            TRITON_LIBCUDA_PATH=folder,
        )
        env["PYTHONPATH"] += os.pathsep + str(tests)
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + script],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            cwd=ROOT,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def begin() -> None:
    """Let tensors of the CPU pass for those of an H200."""
    import torch

    from tilelab.runtime import device, operands

    torch.Tensor.is_cuda = property(lambda tensor: True)
    here, make = torch.device("cpu", 0), torch.empty
    torch.Tensor.device = property(lambda tensor: here)
    torch.empty = lambda *args, **rest: make(*args, **rest | {"device": "cpu"})
    torch.cuda.init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda index: 0x77
    torch._C._cuda_getDevice = lambda: 0
    gpu = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580")
    device.current = lambda: gpu
    operands.require_gpu = lambda *_, **__: None


def note_launch(parameter_bytes, call, *tensors) -> list[str]:
    """Call, and return what the driver was given: a line for the launch and one for each parameter."""
    driver, notes = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(1 << 20)
    sizes = (ctypes.c_size_t * (len(parameter_bytes) + 1))(*parameter_bytes)
    driver.note_launches_in(notes, sizes)
    call(*tensors)
    driver.note_launches_in(None, None)
    return notes.value.decode().splitlines()
