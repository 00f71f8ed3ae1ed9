"""Run a CUDA C++ kernel on the CPU, with a copy engine that is as slow, as fast or as irregular as PTX allows.

The emulator is for readers without a GPU and for checks of exercises. It compiles a kernel with g++ and finds what a
GPU may hide: a wrong parity, a missing fence, bytes that were not announced, a buffer that is overwritten too early, a
wait without end. It knows threads, shared memory, __syncthreads, shuffles and votes of a warp, and the wrappers of
ptx.cuh (mbarriers and bulk copies). It measures nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from tilelab import cuda, device

FOLDER = pathlib.Path(__file__).parent
SEEDS = range(6)  # 0: the engine is as slow as possible; 1: as fast as possible; others: at random moments
EXTERN_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\w+\)\s*)?([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")


_seed = 0


@contextlib.contextmanager
def with_seed(seed: int) -> Iterator[None]:
    """Let the launches in this block run with another timing of the copy engine."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


class EmulationError(RuntimeError):
    """A kernel broke a rule of the copy engine or waits for ever; the message says which block, thread and rule."""


def is_available() -> bool:
    """Return whether this machine has a C++ compiler."""
    return shutil.which("g++") is not None


@functools.lru_cache(64)
def _compile(source: str, name: str, parameters: tuple[tuple[str, str], ...], options: tuple[str, ...],
             smem_bytes: int) -> ctypes.CDLL:
    """Return the library with `run`, compiled once and kept beside the cubins."""
    if not is_available():
        raise device.Unsupported("running a CUDA kernel without a GPU needs g++: install it, or read the SASS.")
    declared = ", ".join(f"{kind} {parameter}" for kind, parameter in parameters)
    arguments = ", ".join(f"*static_cast<{kind}*>(values[{index}])" for index, (kind, _) in enumerate(parameters))
    body = EXTERN_SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(dynamic_shared);", source)
    text = f"""#define EMULATED_DYNAMIC_SMEM {max(smem_bytes, 16)}
#include "ptx.cuh"
#line 2 "cell"
{body}
// {declared}
extern "C" const char* run_emulated(const u32* grid, const u32* block, void** values, const u64* ranges, u32 count,
                                    u32 seed) {{
    using namespace emulator;
    static std::string said;
    gridDim = {{grid[0], grid[1], grid[2]}};
    blockDim = {{block[0], block[1], block[2]}};
    emulator::seed = seed;
    random_numbers.seed(seed);
    failure.clear();
    tensors.clear();
    for (u32 i = 0; i < count; ++i) tensors.push_back({{ranges[2 * i], ranges[2 * i + 1]}});
    kernel_call = [&] {{ {name}({arguments}); }};
    const CatchWildAccess guard;
    for (blockIdx.z = 0; blockIdx.z < gridDim.z && failure.empty(); ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y && failure.empty(); ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x && failure.empty(); ++blockIdx.x) {{
                getcontext(&scheduler);
                if (failure.empty()) run_block();
                if (!failure.empty()) break;
            }}
    said = failure;
    return said.c_str();
}}
"""
    headers = "".join(path.read_text() for path in sorted(FOLDER.glob("*.cuh")))
    key = hashlib.sha256(repr((text, headers, options)).encode()).hexdigest()
    path = cuda.cubin_folder() / f"{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = pathlib.Path(folder, "kernel.so")
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-x", "c++", "-", *options, f"-I{FOLDER}",
                       "-o", os.fspath(built)]
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), "")
                raise cuda.CompileError(f"the cell does not compile for the emulator: {first}\n{done.stderr[:2000]}")
            built.replace(path)
    library = ctypes.CDLL(os.fspath(path))
    library.run_emulated.restype = ctypes.c_char_p
    return library


def run(kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence, smem_bytes: int = 0,
        seed: int | None = None) -> None:
    """Run a kernel of a %%cuda cell on CPU tensors. `args` are tensors and ctypes scalars.

    `seed` says when the copy engine acts (see SEEDS); the default is the one of `with_seed`, or 0.

    EmulationError says which rule the kernel broke, cuda.CompileError why it does not compile, and Unsupported that
    there is no C++ compiler.
    """
    library = _compile(kernel.source, kernel.name, kernel.parameters, kernel.options, smem_bytes)
    extents = [(ctypes.c_uint32 * 3)(*(list([extent] if isinstance(extent, int) else extent) + [1, 1])[:3])
               for extent in (grid, block)]
    tensors = [value for value in args if hasattr(value, "data_ptr")]
    values = [ctypes.c_void_p(value.data_ptr()) if hasattr(value, "data_ptr") else value for value in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    ranges = (ctypes.c_uint64 * (2 * len(tensors)))(
        *(bound for tensor in tensors for bound in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)))
    if failure := library.run_emulated(*extents, pointers, ranges, len(tensors), _seed if seed is None else seed):
        raise EmulationError(failure.decode())
