"""Compile CUDA C++ with NVRTC for any target, load the cubin and launch it on torch's current stream.

Compiling needs no driver and no GPU; loading and launching need both. Cubins are kept on disk, in TILES_CUBINS or else
under the user's cache folder, for as long as everything that went into them stays the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

INCLUDE_FOLDER = pathlib.Path(__file__).with_name("include")  # the headers that chapters share
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
ELSEWHERE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[^<\"\s]|^--pre-include", re.MULTILINE)
TOOLKIT = re.compile(r"(cuda|cub|thrust|nv)/|cuda_\w+\.h|(cooperative_groups|mma|math_constants)\.h")


class CompileError(RuntimeError):
    """NVRTC refused the source; the message holds the compiler's log, with file, line and the line itself."""


def _program_options(target: str, name: str, options: Sequence[str], folders: Sequence[str] = ()):
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
            named[key] = _value(value) if equals else True
    if macros:
        named["define_macro"] = macros
    if includes or folders:
        named["include_path"] = [*includes, *folders]
    return ProgramOptions(arch=target, name=name, **named)


def _value(text: str):
    """An option's value: a word that is not empty would count as true."""
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)


def included_headers(source: str, name: str, options: Sequence[str]) -> tuple[dict[str, str], str]:
    """The texts, by path, of what `source` includes from its own folder or an -I, itself or through another; and the
    first header of the toolkit that any of them includes, or ""."""
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


def _toolkit(name: str, header: str) -> dict[str, str]:
    """The folders of the CCCL and CUDA runtime headers in the wheels or the CUDA toolkit, each with what tells its
    version. CompileError when they are not here."""
    from cuda import pathfinder

    folders = {}
    for part, says_version in (("cccl", "cuda/std/__cccl/version.h"), ("cudart", "cuda_runtime_api.h")):
        folder = pathfinder.find_nvidia_header_directory(part)
        if folder is None:
            raise CompileError(f"{name} includes <{header}>, and the {part} headers are not installed: "
                               "run pip install -r requirements.txt.")
        folders[folder] = pathlib.Path(folder, says_version).read_text()
    return folders


def _key(*parts: object) -> str:
    from cuda.bindings import nvrtc

    return hashlib.sha256(repr((parts, nvrtc.nvrtcVersion(), version("cuda-core"))).encode()).hexdigest()


def cubin_folder() -> pathlib.Path:
    """Where cubins are kept: TILES_CUBINS, else tiles-in-flight/cubins in XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("TILES_CUBINS"):
        return pathlib.Path(folder)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tiles-in-flight/cubins")


def read_cached(path: pathlib.Path) -> bytes | None:
    """What is kept at `path`, unless it is not there or is not what was written."""
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        if kept[:32] == hashlib.sha256(kept[32:]).digest():
            return kept[32:]
    return None


def write_cached(path: pathlib.Path, made: bytes) -> None:
    """Write it whole or not at all, as another process may read or write the same; a full disk only costs time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(hashlib.sha256(made).digest() + made)
            os.replace(part, path)
        except OSError:
            os.unlink(part)


def compile_cubin(source: str, target: str, name: str = "kernel.cu", options: Sequence[str] = (),
                  cache: bool = True) -> bytes:
    """Compile CUDA C++ to a cubin with NVRTC, or recall it from disk where `cache`.

    `target` is an architecture such as "sm_90a"; `name` appears in diagnostics, and its folder is searched for quoted
    headers. `options` are -DNAME=VALUE, -IPATH and --field[=value] for a field of cuda.core.ProgramOptions
    (--max-register-count=64, --lineinfo); else ValueError. Headers of CCCL (<cuda/barrier>, <cub/...>) and of the CUDA
    runtime (<cuda_bf16.h>) are found where they are installed. Declare kernels extern "C" so that `load_cubin` finds them by
    name. Raises CompileError with the compiler's log.
    """
    headers, toolkit = included_headers(source, name, options)
    folders = _toolkit(name, toolkit) if toolkit else {}
    # A header that is named by a macro, or by an option, would not be seen to change.
    cache &= not any(ELSEWHERE.search(text) for text in (source, *headers.values(), *options))
    path = cubin_folder() / _key(source, headers, folders, target, name, list(options))
    if cache and (cubin := read_cached(path)):
        return cubin
    from cuda.core import Program

    prepared = _program_options(target, name, options, list(folders))
    try:
        cubin = bytes(Program(source, "c++", prepared).compile("cubin").code)
    except Exception as error:  # NVRTCError is private to cuda.core; the log is the only part a reader can use
        log = re.sub(r"^\d+: NVRTC_ERROR_\w+, compilation log:\s*", "", str(error).replace("\0", "").strip())
        raise CompileError(f"{name} does not compile for {target}:\n{log}") from error
    if cache:
        write_cached(path, cubin)
    return cubin


def compile_file(path: str | os.PathLike, target: str, options: Sequence[str] = (), cache: bool = True) -> bytes:
    """`compile_cubin` of a .cu file: quoted headers are found beside it and in tilelab/include/. OSError when it
    cannot be read."""
    path = pathlib.Path(path).absolute()
    try:  # by its whole path, so that the compiler looks beside it and no further
        return compile_cubin(path.read_text(), target, str(path), [*options, f"-I{INCLUDE_FOLDER}"], cache)
    except CompileError as error:
        raise CompileError(str(error).replace(f"{path.parent}{os.sep}", "")) from error.__cause__


def current_device():
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


_thread = threading.local()


def ensure_cuda_context() -> None:
    """Give this thread a CUDA context, once.

    Triton 3.6 and 3.7 let the driver encode the tensor maps of host descriptors before they make a context current, so
    that the first launch of a new thread would fail.
    """
    if not hasattr(_thread, "ready"):
        current_device()
        _thread.ready = True


def load_cubin(cubin: bytes, kernel_name: str):
    """Load a cubin on the current device and return its kernel (cuda.core.Kernel). Raises Unsupported without a GPU."""
    from cuda.core import ObjectCode

    current_device()
    return ObjectCode.from_cubin(cubin).get_kernel(kernel_name)


_kernels: dict[tuple, tuple] = {}  # by device, file, name and options: the files it was made of, their state, itself


def _state(files: Sequence[str]) -> list[tuple[int, int]]:
    return [(stat.st_mtime_ns, stat.st_size) for stat in map(os.stat, files)]


def load_kernel(path: str | os.PathLike, name: str, options: Sequence[str] = ()):
    """The kernel `name` of a .cu file (cuda.core.Kernel), compiled for torch's current device and loaded on it.

    Cheap enough to be called at each launch: it is compiled again only when the file, or a header that it includes,
    has been edited. Raises CompileError as `compile_file` does and Unsupported without a GPU.
    """
    from tilelab.device import current

    device = current_device()
    key = (device.device_id, os.path.abspath(path), name, tuple(options))
    with contextlib.suppress(KeyError, OSError):
        files, state, found = _kernels[key]
        if _state(files) == state:
            return found
    headers, _ = included_headers(pathlib.Path(path).read_text(), key[1], [*options, f"-I{INCLUDE_FOLDER}"])
    files = [key[1], *headers]
    state = _state(files)  # before they are read to be compiled: an edit in between is seen at the next call
    found = load_cubin(compile_file(path, current().target, options), name)
    _kernels[key] = files, state, found
    return found


def _argument(value: Any) -> Any:
    """A tensor becomes its address; a scalar must carry its C width, or the kernel reads the wrong bytes."""
    if hasattr(value, "data_ptr"):
        if not value.is_cuda:
            raise ValueError("a kernel argument is a CPU tensor: move it to the GPU first.")
        return value.data_ptr()
    if type(value) in (bool, int, float):  # a numpy scalar may be a float too, and has a width
        raise TypeError(f"kernel argument {value!r} has no C width: pass ctypes.c_int, ctypes.c_uint64 or the like.")
    return value


# Bytes of dynamic shared memory that the driver has been asked to allow, by kernel and device.
_opted: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _opt_in(kernel, device, smem_bytes: int) -> None:
    """Above 48 KiB, static shared memory counted in, the driver wants to be asked: once a kernel and device."""
    from cuda.bindings import driver

    opted = _opted.setdefault(kernel, {})
    if smem_bytes <= opted.get(device.device_id, 0):
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, smem_bytes, kernel.handle, device.device_id)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused {smem_bytes:,} B of dynamic shared memory: {status.name}.")
    opted[device.device_id] = smem_bytes


@functools.lru_cache(64)
def _stream(device_id: int, handle: int):
    """cuda.core's view of a stream: kept, as making it costs more than a launch."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def prepare_launch(kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any],
                   smem_bytes: int = 0, cluster: int = 1, early: bool = False) -> Callable[[], None]:
    """Check a launch once and return a function that only launches it, on torch's current stream at that time.

    `grid` and `block` are in blocks and threads, an int or up to three of them (x first). `args` are CUDA tensors
    (passed as pointers, and kept alive by the function), ctypes or numpy scalars of the parameter's own width, or
    cuda.core tensor maps; TypeError for a plain Python number. `smem_bytes` is dynamic shared memory, above 48 KiB
    too. `cluster` blocks that are neighbours along x run together, at most 8 and a divisor of the grid's x. With
    `early` the kernel may start while the one before it drains: it must wait for that one itself (griddepcontrol.wait).
    Raises Unsupported when there is no GPU or a block of it has less shared memory than that. Launches are for the
    device that is current now, in any thread, and leave it current there.
    """
    import torch
    from cuda.core import LaunchConfig
    from cuda.core import launch as core_launch

    from tilelab.device import Unsupported, current, require

    device = current_device()
    needed = smem_bytes + getattr(getattr(kernel, "attributes", None), "shared_size_bytes", 0)  # static, too
    if needed > current().smem_per_block:
        raise Unsupported(f"the launch needs {needed:,} B of shared memory a block; {current().name} has "
                          f"{current().smem_per_block:,} B: take a smaller tile or fewer stages.")
    for value in args:
        if getattr(value, "is_cuda", False) and value.device.index != device.device_id:
            raise ValueError(f"a kernel argument lies on {value.device}, and the launch is for cuda:"
                             f"{device.device_id}: make the tensors' GPU the current one, with torch.cuda.device.")
    grid, block = ((extent,) if isinstance(extent, int) else tuple(extent) for extent in (grid, block))
    if not 1 <= cluster <= 8:
        raise ValueError(f"a cluster has 1 to 8 blocks; here {cluster}.")
    if grid[0] % cluster:
        raise ValueError(f"a grid is whole clusters along x; here are {grid[0]} blocks and clusters of {cluster}.")
    if cluster > 1 or early:
        require("has_tma", "a cluster or an early start", "launch without")
    _opt_in(kernel, device, smem_bytes)
    # cuda.core counts the grid in clusters where there are any.
    clusters = {"cluster": cluster, "grid": (grid[0] // cluster, *grid[1:])} if cluster > 1 else {"grid": grid}
    config = LaunchConfig(block=block, shmem_size=smem_bytes, programmatic_stream_serialization=early, **clusters)
    values = tuple(map(_argument, args))
    raw_stream = torch._C._cuda_getCurrentRawStream  # as Triton asks; torch.cuda.current_stream() takes 15 times longer

    def launched(kept_alive=tuple(args)) -> None:
        device.set_current()
        core_launch(_stream(device.device_id, raw_stream(device.device_id)), config, kernel, *values)

    return launched


def launch(kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any],
           smem_bytes: int = 0, cluster: int = 1, early: bool = False) -> None:
    """Launch a loaded kernel on torch's current stream; asynchronous, like any torch operation. As `prepare_launch`."""
    prepare_launch(kernel, grid, block, args, smem_bytes, cluster, early)()
