"""Run the host's part of a launch without a GPU, in a process of its own: the driver is pretended_driver.c.

Tests use it to compare what the driver is given by a plan with what Triton or a fresh launch gives it.
"""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile

from script_server import ScriptServer

from tilelab import ROOT

COMPILER = shutil.which("cc")
BEGIN = "import pretended_gpu\npretended_gpu.begin()"


@functools.cache
def _start_server() -> ScriptServer:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    driver = ["-o", f"{folder}/libcuda.so.1", str(ROOT / "tests" / "pretended_driver.c")]
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", *driver, "-ldl"], check=True)
    # Triton's launcher is built against this driver, so it has a cache of its own.
    paths = {"LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
    # No kernel runs, so none needs to be quick.
    return ScriptServer(BEGIN, TRITON_CACHE_DIR=f"{folder}/triton", DISABLE_PTXAS_OPT="1", **paths)


def run(script: str) -> str:
    """Run a script after `begin` in a process of its own, and return what it prints; AssertionError when it fails."""
    return _start_server().run(script)


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
