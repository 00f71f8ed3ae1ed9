"""Compile CUDA C++ with NVRTC for any target, load the cubin and launch it on torch's current stream.

Compiling needs no driver and no GPU; loading and launching need both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


class CompileError(RuntimeError):
    """NVRTC refused the source; the message holds the compiler's log."""


def _program_options(target: str, name: str, options: Sequence[str]):
    from cuda.core import ProgramOptions

    fields = {field.name for field in dataclasses.fields(ProgramOptions)} - {"arch", "name"}
    macros, includes, named = [], [], {}
    for option in options:
        if option.startswith("-D"):
            key, equals, value = option[2:].partition("=")
            macros.append((key, value if equals else "1"))
        elif option.startswith("-I"):
            includes.append(option[2:])
        else:
            key, equals, value = option.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            if not option.startswith("--") or key not in fields:
                raise ValueError(f"unknown compiler option {option!r}: use -DNAME=VALUE, -IPATH or --field[=value] "
                                 "for a field of cuda.core.ProgramOptions.")
            named[key] = (int(value) if value.isdigit() else value) if equals else True
    if macros:
        named["define_macro"] = macros
    if includes:
        named["include_path"] = includes
    return ProgramOptions(arch=target, name=name, **named)


def compile_cubin(source: str, target: str, name: str = "kernel.cu", options: Sequence[str] = ()) -> bytes:
    """Compile CUDA C++ to a cubin with NVRTC.

    `target` is an architecture such as "sm_90a"; `name` appears in diagnostics. `options` are -DNAME=VALUE, -IPATH and
    --field[=value] for a field of cuda.core.ProgramOptions (--max-register-count=64, --lineinfo); else ValueError.
    Declare kernels extern "C" so that `load` finds them by name. Raises CompileError with the compiler's log.
    """
    from cuda.core import Program

    prepared = _program_options(target, name, options)
    try:
        return bytes(Program(source, "c++", prepared).compile("cubin").code)
    except Exception as error:  # NVRTCError is private to cuda.core; the log is the only part a reader can use
        log = str(error).replace("\0", "").strip()
        raise CompileError(f"{name} does not compile for {target}:\n{log}") from error


def _current_device():
    """cuda.core's view of torch's device, with torch's primary context current in this thread."""
    import torch
    from cuda.core import Device

    from tilelab.device import Unsupported, current

    if current().capability is None:
        raise Unsupported(f"a CUDA kernel needs an NVIDIA GPU to run; here is {current().describe()}: "
                          "compile it and read its SASS.")
    torch.cuda.init()
    device = Device(torch.cuda.current_device())
    device.set_current()
    return device


def load(cubin: bytes, kernel_name: str):
    """Load a cubin on the current device and return its kernel (cuda.core.Kernel). Raises Unsupported without a GPU."""
    from cuda.core import ObjectCode

    _current_device()
    return ObjectCode.from_cubin(cubin).get_kernel(kernel_name)


def _argument(value: Any) -> Any:
    """A tensor becomes its address; a scalar must carry its C width, or the kernel reads the wrong bytes."""
    if hasattr(value, "data_ptr"):
        if not value.is_cuda:
            raise ValueError("a kernel argument is a CPU tensor: move it to the GPU first.")
        return value.data_ptr()
    if isinstance(value, (bool, int, float)):
        raise TypeError(f"kernel argument {value!r} has no C width: pass ctypes.c_int, ctypes.c_uint64 or the like.")
    return value


def launch(kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any],
           smem_bytes: int = 0) -> None:
    """Launch a loaded kernel on torch's current stream; asynchronous, like any torch operation.

    `grid` and `block` are in blocks and threads, an int or up to three of them (x first). `args` are CUDA tensors
    (passed as pointers), ctypes or numpy scalars of the parameter's own width, or cuda.core tensor maps; TypeError for
    a plain Python number. `smem_bytes` is dynamic shared memory, above 48 KiB too. Raises Unsupported when there is no
    GPU or a block of it has less shared memory than that.
    """
    import torch
    from cuda.bindings import driver
    from cuda.core import LaunchConfig, Stream
    from cuda.core import launch as core_launch

    from tilelab.device import Unsupported, current

    device = _current_device()
    if smem_bytes > current().smem_per_block:
        raise Unsupported(f"the launch needs {smem_bytes:,} B of shared memory a block; {current().name} has "
                          f"{current().smem_per_block:,} B: take a smaller tile or fewer stages.")
    if smem_bytes > 48 * 1024:  # above 48 KiB the driver wants a per-kernel opt-in
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, smem_bytes, kernel.handle, device.device_id)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver refused {smem_bytes:,} B of dynamic shared memory: {status.name}.")
    grid, block = (extent if isinstance(extent, int) else tuple(extent) for extent in (grid, block))
    config = LaunchConfig(grid=grid, block=block, shmem_size=smem_bytes)
    stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
    core_launch(stream, config, kernel, *map(_argument, args))
