"""Compile CUDA C++ with NVRTC for any target, load the cubin and launch it on torch's current stream.

Compiling needs no driver and no GPU; loading and launching need both. Cubins are kept on disk, in the folder that
`cubin_folder` returns, and are compiled again when the source, a header, an option or the compiler changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import pathlib
import re
import tempfile
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from tilelab import ROOT
from tilelab.runtime import caches, device

INCLUDE_FOLDER = ROOT / "tilelab" / "include"  # the headers that chapters share
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
INCLUDE_BY_MACRO = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[^<\"\s]", re.MULTILINE)
TOOLKIT = re.compile(
    r"(cuda|cub|thrust|nv|cooperative_groups)/|cuda(_\w+)?\.h|(cooperative_groups|mma|math_constants)\.h"
    r"|(vector_(types|functions)|builtin_types|device_launch_parameters)\.h"
)


class CompileError(RuntimeError):
    """NVRTC refused the source; the message holds the compiler's log, with file, line and the text of the line."""


def included_headers(source: str, name: str, options: Sequence[str]) -> tuple[dict[str, str], str]:
    """Return the headers that `source` includes from its own folder or an -I, directly or through another header.

    The result is ({path: text}, name of the first header of the CUDA toolkit that is included, or "").
    """
    folders = [option[2:] for option in options if option.startswith("-I")]
    found, toolkit, unread = {}, "", [(os.path.dirname(name), source)]
    while unread:
        beside, text = unread.pop()
        for bracket, header in INCLUDE.findall(text):
            for folder in folders if bracket == "<" else [beside, *folders]:
                path = os.path.join(folder, header)
                if os.path.isfile(path):
                    if path not in found:
                        found[path] = pathlib.Path(path).read_text(errors="replace")
                        unread.append((os.path.dirname(path), found[path]))
                    break
            else:
                if bracket == "<" and TOOLKIT.match(header):
                    toolkit = toolkit or header
    return found, toolkit


def strip_comments(source: str) -> str:
    """Return CUDA C++ without its comments."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)


def squeeze(source: str) -> str:
    """Return CUDA C++ without what cannot change a kernel.

    That is comments, #include lines, `#pragma once`, and white space that separates no words.
    """
    code = re.sub(r"#include[^\n]*|#pragma once|\\\n", " ", strip_comments(source))
    return re.sub(r"\s*([^\w\s])\s*", r"\1", " ".join(code.split()))


def toolkit_folders(name: str, header: str) -> dict[str, str]:
    """Return the folders of the CCCL and CUDA runtime headers, each with the text of the file that holds its version.

    CompileError, which names the file `name` and its `header`, where they are not installed.
    """
    from cuda import pathfinder

    folders = {}
    for part, version_file in (("cccl", "cuda/std/__cccl/version.h"), ("cudart", "cuda_runtime_api.h")):
        folder = pathfinder.find_nvidia_header_directory(part)
        if folder is None:
            raise CompileError(
                f"{name} includes <{header}>, and the {part} headers are not installed: "
                "run pip install -r requirements.txt."
            )
        folders[folder] = pathlib.Path(folder, version_file).read_text()
    # The wheels above lack <crt/mma.h>, which <mma.h> includes. Triton brings one.
    if (triton := importlib.util.find_spec("triton")) and triton.origin:
        folders[os.path.join(os.path.dirname(triton.origin), "backends/nvidia/include")] = version("triton")
    return folders


def cubin_folder() -> pathlib.Path:
    """Return the folder of cached cubins: `named_cubin_folder`, or a temporary one where that cannot be written."""
    return caches.replace_if_unwritable(named_cubin_folder(), "cubins")


def named_cubin_folder() -> pathlib.Path:
    """Return the folder that TILES_CUBINS names, else tiles-in-flight/cubins in XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("TILES_CUBINS"):
        return pathlib.Path(folder)
    return pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tiles-in-flight/cubins"
    )


def read_cached(path: pathlib.Path) -> bytes | None:
    """Return the bytes that `write_cached` wrote to `path`; None where there is no file or it is damaged."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if content[:32] == hashlib.sha256(content[32:]).digest():
            return content[32:]
    return None


def write_cached(path: pathlib.Path, content: bytes) -> None:
    """Write bytes after their checksum, atomically: other processes may use the file. A full disk is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)


def compile_cubin(
    source: str,
    target: str,
    name: str = "kernel.cu",
    options: Sequence[str] = (),
    cache: bool = True,
    expressions: Sequence[str] = (),
) -> bytes:
    """Compile CUDA C++ to a cubin with NVRTC, or with `cache` read an earlier result from disk.

    `target` is an architecture such as "sm_90a". `name` appears in diagnostics, and its folder is searched for quoted
    headers. `options` are -DNAME=VALUE and -IPATH (ValueError for any other). Headers of CCCL (<cuda/barrier>,
    <cub/...>) and of the CUDA runtime (<cuda_bf16.h>) are found where they are installed. `expressions` name instances
    of templates, such as "gemm<128, 64>"; `compile_to_ptx` returns their symbols. Declare other kernels extern "C",
    so that `load_cubin` finds them by name. Raises CompileError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    headers, toolkit_header = included_headers(source, name, options)
    folders = toolkit_folders(name, toolkit_header) if toolkit_header else {}
    cache &= not any(map(INCLUDE_BY_MACRO.search, (source, *headers.values())))  # that header is unknown here
    key = (source, headers, folders, target, name, list(options)), nvrtc.nvrtcVersion()
    path = cubin_folder() / hashlib.sha256(repr((*key, *expressions)).encode()).hexdigest()
    if cache and (cubin := read_cached(path)):
        return cubin
    cubin, _ = _run_nvrtc("CUBIN", source, target, name, [*options, *_include(folders)], expressions)
    if cache:
        write_cached(path, cubin)
    return cubin


def compile_ptx(source: str, target: str, name: str = "kernel.cu", options: Sequence[str] = ()) -> str:
    """Return the PTX from which `compile_cubin` makes its cubin; it is not kept on disk. Raises CompileError."""
    return compile_to_ptx(source, target, name, options)[0]


def compile_to_ptx(
    source: str, target: str, name: str, options: Sequence[str], expressions: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the PTX of a source, and the names in it of C++ `expressions` such as "gemm<128, 64>"."""
    _, toolkit_header = included_headers(source, name, options)
    folders = toolkit_folders(name, toolkit_header) if toolkit_header else {}
    ptx, lowered = _run_nvrtc("PTX", source, target, name, [*options, *_include(folders)], expressions)
    return ptx.decode().rstrip("\0"), lowered


def _include(folders: Iterable[str]) -> list[str]:
    return [f"-I{folder}" for folder in folders]


def _run_nvrtc(
    result: str, source: str, target: str, name: str, options: Sequence[str], expressions: Sequence[str]
) -> tuple[bytes, list[str]]:
    """Return the "PTX" or the "CUBIN" of a source, and the names in it of C++ `expressions`."""
    from cuda.bindings import nvrtc  # cuda.core would ask the driver, which is missing without a GPU

    known = ("-D", "-I")
    if unknown := [each for each in options if each[:2] not in known and each != "-default-device"]:
        raise ValueError(f"unknown compiler option {unknown[0]!r}; use -DNAME=VALUE or -IPATH.")
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    for expression in expressions:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    arch = target.replace("sm_", "compute_") if result == "PTX" else target
    flags = [option.encode() for option in (f"-arch={arch}", *options)]
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        failed = status != nvrtc.nvrtcResult.NVRTC_SUCCESS
        what = "ProgramLog" if failed else result
        found = bytearray(getattr(nvrtc, f"nvrtcGet{what}Size")(program)[1])
        getattr(nvrtc, f"nvrtcGet{what}")(program, found)
        if failed:
            log = found.decode().rstrip("\0").strip()
            raise CompileError(f"{name} does not compile for {target}:\n{log}")
        lowered = [nvrtc.nvrtcGetLoweredName(program, each.encode())[1].decode() for each in expressions]
        return bytes(found), lowered
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_file_to_ptx(path: str | os.PathLike, target: str, options: Sequence[str] = ()) -> str:
    """Return the PTX of a .cu file that `compile_file` compiles."""
    path = pathlib.Path(path).absolute()
    return compile_ptx(path.read_text(), target, str(path), [*options, f"-I{INCLUDE_FOLDER}"])


def compile_file(
    path: str | os.PathLike, target: str, options: Sequence[str] = (), cache: bool = True
) -> bytes:
    """Compile a .cu file as `compile_cubin` does; quoted headers may be beside it or in tilelab/include/."""
    path = pathlib.Path(path).absolute()
    try:  # the absolute path makes the compiler search the file's folder, not the current one
        return compile_cubin(path.read_text(), target, str(path), [*options, f"-I{INCLUDE_FOLDER}"], cache)
    except CompileError as error:
        raise CompileError(str(error).replace(f"{path.parent}{os.sep}", "")) from None


def current_device() -> Any:
    """Return the cuda.core Device of torch's current GPU, and make its primary context current in this thread."""
    import torch
    from cuda.core import Device

    here = device.current()
    if here.capability is None:
        raise device.Unsupported(
            f"a CUDA kernel needs an NVIDIA GPU to run; here is {here.describe()}: "
            "compile it and read its SASS."
        )
    torch.cuda.init()
    core_device = Device(torch.cuda.current_device())
    core_device.set_current()
    return core_device


_thread = threading.local()


def ensure_cuda_context() -> None:
    """Give this thread a CUDA context, once.

    Triton 3.6 and 3.7 encode the tensor maps of host descriptors before they make a context current, so the first
    launch of a new thread would fail.
    """
    if not hasattr(_thread, "ready"):
        current_device()
        _thread.ready = True


def load_cubin(cubin: bytes, kernel_name: str) -> Any:
    """Load a cubin on the current GPU and return its kernel (cuda.core.Kernel). Raises Unsupported without a GPU."""
    from cuda.core import ObjectCode

    current_device()
    return ObjectCode.from_cubin(cubin).get_kernel(kernel_name)


# {(device, file, name, options): (files that were compiled, their state then, kernel)}
_kernels: dict[tuple, tuple] = {}


def _file_states(files: Sequence[str]) -> list[tuple[int, int]]:
    return [(stat.st_mtime_ns, stat.st_size) for stat in map(os.stat, files)]


def load_kernel(path: str | os.PathLike, name: str, options: Sequence[str] = ()) -> Any:
    """Return the kernel `name` of a .cu file (cuda.core.Kernel), compiled for torch's current GPU and loaded on it.

    The kernel is kept until the file or a header that it includes is edited, so a call takes microseconds. Raises
    CompileError as `compile_file` does, and Unsupported without a GPU.
    """
    key = (current_device().device_id, os.path.abspath(path), name, tuple(options))
    with contextlib.suppress(KeyError, OSError):
        files, states, kernel = _kernels[key]
        if _file_states(files) == states:
            return kernel
    headers, _ = included_headers(pathlib.Path(path).read_text(), key[1], [*options, f"-I{INCLUDE_FOLDER}"])
    files = [key[1], *headers]
    states = _file_states(files)  # before they are compiled: the next call notices an edit in between
    kernel = load_cubin(compile_file(path, device.current().target, options), name)
    _kernels[key] = files, states, kernel
    return kernel


class Address(ctypes.c_uint64):
    """A pointer among the parameters of a launch."""

    def move(self, address: int) -> None:
        self.value = address


def as_parameter(value: Any) -> Any:
    """Return a kernel argument as a value in memory of the host; a plain number raises TypeError."""
    if value is None:
        return Address()
    if hasattr(value, "data_ptr"):
        if not value.is_cuda:
            raise ValueError("a kernel argument is a CPU tensor: move it to the GPU first.")
        return Address(value.data_ptr())
    if type(value) in (bool, int, float):  # a numpy scalar is an instance of float too, but has a width
        raise TypeError(f"kernel argument {value!r} has no C width: pass ctypes.c_int, c_uint64 or the like.")
    if hasattr(value, "tobytes"):  # a numpy scalar
        return ctypes.create_string_buffer(value.tobytes(), value.nbytes)
    return value


class PreparedLaunch:
    """A kernel, its launch configuration and its parameters, where the driver finds them.

    Call it to launch the kernel on torch's current stream. Call it with tensors to write their addresses into the
    parameters first: parameter i then holds the address of tensor `follows[i]` of the call, unless that is None. A
    negative position counts from the last tensor.
    """

    def __init__(
        self,
        handle: int,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: Sequence[Any],
        follows: Sequence[int | None] = (),
        smem_bytes: int = 0,
        cluster: int = 1,
        early: bool = False,
        keep_alive: Any = None,
    ):
        import torch
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes, config.attrs = smem_bytes, self._attributes(cluster, early)
        config.numAttrs = len(config.attrs)
        pointers = [getattr(value, "pointer", None) or ctypes.addressof(value) for value in parameters]
        self._config, self._kernel, self._launch = config, driver.CUfunction(handle), driver.cuLaunchKernelEx
        self._parameters, self._pointers = parameters, (ctypes.c_void_p * len(pointers))(*pointers)
        self._table, self._keep_alive = ctypes.addressof(self._pointers), keep_alive
        self._following = [
            (parameter, position) for parameter, position in zip(parameters, follows) if position is not None
        ]
        self._addresses: list[int] = []
        self._core_device, self._lock = current_device(), threading.Lock()
        self._device_id = self._core_device.device_id
        # Triton uses this function too; torch.cuda.current_stream takes 15 times longer.
        self._raw_stream = torch._C._cuda_getCurrentRawStream

    @staticmethod
    def _attributes(cluster: int, early: bool) -> list:
        from cuda.bindings import driver

        attributes, names = [], driver.CUlaunchAttributeID
        if cluster > 1:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id, shape = (
                names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                attributes[-1].value.clusterDim,
            )
            shape.x, shape.y, shape.z = cluster, 1, 1
        if early:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        return attributes

    def __call__(self, *tensors) -> None:
        with self._lock:  # another thread may not move the parameters before the driver has copied them
            self._core_device.set_current()  # a new thread has no context, and moving a tensor map needs one
            if tensors:
                addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
                if addresses != self._addresses:
                    for parameter, position in self._following:
                        parameter.move(addresses[position])
                    self._addresses = addresses
            self._config.hStream = self._raw_stream(self._device_id)
            (status,) = self._launch(self._config, self._kernel, self._table, 0)
        if status:
            raise RuntimeError(f"the driver refused to launch the kernel: {status.name}.")


# {kernel: {device: bytes of dynamic shared memory that the driver allows}}
_allowed_smem: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _allow_smem(kernel, device_id: int, smem_bytes: int) -> None:
    """Ask the driver once to allow this much dynamic shared memory; it must be asked above 48 KiB in total."""
    from cuda.bindings import driver

    allowed = _allowed_smem.setdefault(kernel, {})
    if smem_bytes <= allowed.get(device_id, 0):
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, smem_bytes, kernel.handle, device_id)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused {smem_bytes:,} B of dynamic shared memory: {status.name}.")
    allowed[device_id] = smem_bytes


def prepare_launch(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] | Mapping[str, Any],
    smem_bytes: int = 0,
    cluster: int = 1,
    early: bool = False,
    follows: Sequence[int | None] | Mapping[str, int] | None = None,
) -> PreparedLaunch:
    """Check a launch once and return a function that launches the kernel on the then current stream of torch.

    `grid` and `block` count blocks and threads: one int or up to three, x first. `args` are CUDA tensors (passed as
    pointers, and kept alive by the function), None for a pointer that the kernel does not read, ctypes or numpy scalars
    as wide as the parameter, or tensor maps; TypeError for a plain Python number. They may have names, in the order of
    the kernel's parameters, by which `follows` then calls them. `smem_bytes` is the dynamic shared memory of a
    block. `cluster` is the number of blocks, neighbours along x, that run together: 1 to 8, and a divisor of the grid's
    x. With `early` the kernel may start before the one before it has ended (programmatic dependent launch), and must
    wait for it with griddepcontrol.wait. Launches use the GPU that is current now, from any thread, and leave it
    current there. With `follows` the function takes tensors, as `PreparedLaunch` says, and keeps none alive. Raises
    Unsupported without a GPU or with too little shared memory per block.
    """
    if isinstance(args, Mapping):
        names = follows or {}
        follows, args = [names.get(name) for name in args] if names else None, list(args.values())
    core_device, here = current_device(), device.current()
    # A kernel's static memory counts too.
    needed = smem_bytes + getattr(getattr(kernel, "attributes", None), "shared_size_bytes", 0)
    if needed > here.smem_per_block:
        raise device.Unsupported(
            f"the launch needs {needed:,} B of shared memory per block; {here.name} has "
            f"{here.smem_per_block:,} B: take a smaller tile or fewer stages."
        )
    device_id = core_device.device_id
    for value in args:
        if getattr(value, "is_cuda", False) and value.device.index != device_id:
            raise ValueError(
                f"a kernel argument is on {value.device}, and the current GPU is cuda:{device_id}: make "
                "the tensors' GPU the current one, with torch.cuda.device."
            )
    grid, block = ((extent,) if isinstance(extent, int) else tuple(extent) for extent in (grid, block))
    if not 1 <= cluster <= 8 or grid[0] % cluster:
        raise ValueError(
            f"cluster is {cluster}; it must be 1 to 8 and divide the grid's {grid[0]} blocks along x."
        )
    if cluster > 1 or early:
        device.require("has_tma", "a cluster or an early start", "launch without")
    _allow_smem(kernel, device_id, smem_bytes)
    # The driver takes a CUkernel for a CUfunction. A kernel lives as long as its Python object.
    return PreparedLaunch(
        int(kernel.handle),
        grid,
        block,
        [as_parameter(value) for value in args],
        follows or (),
        smem_bytes,
        cluster,
        early,
        keep_alive=(kernel, None if follows else tuple(args)),
    )


def launch(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    smem_bytes: int = 0,
    cluster: int = 1,
    early: bool = False,
) -> None:
    """Launch a loaded kernel on torch's current stream, asynchronously. Takes the arguments of `prepare_launch`."""
    prepare_launch(kernel, grid, block, args, smem_bytes, cluster, early)()
