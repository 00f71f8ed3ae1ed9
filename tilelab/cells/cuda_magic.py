"""The cell magic %%cuda: a notebook cell holds CUDA C++, and its kernels become Python objects.

    %load_ext tilelab.cells.cuda_magic

    %%cuda ring_copy -DBYTES=4096 --changed-from first_copy
    #include "ptx.cuh"
    extern "C" __global__ void ring_copy(const unsigned char* x, unsigned char* out, int tiles) { ... }

    ring_copy[blocks, threads](x, out, tiles)

Options: -DNAME=VALUE defines a constant, --changed-from KERNEL lists the lines that differ from an earlier cell, --ptx
and --sass PATTERN show instructions, --target ARCH compiles for another GPU, --then EXPRESSION runs Python afterwards.

The cell is compiled with NVRTC for the GPU at hand, or for sm_90a where there is none. Errors name the lines of the
cell. Below the cell stand the registers, the shared memory and the instructions of each kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import difflib
import functools
import hashlib
import json
import pathlib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilelab import emulator
from tilelab.emulator import tensor_map as emulated_tensor_map
from tilelab.runtime import cubin, cuda, device, tensor_map
from tilelab.runtime.build import SYSTEM_SMEM
from tilelab.runtime.device import target_limits

if TYPE_CHECKING:
    import torch

KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+'
    r"(?:__\w+__\s*\((?:[^()]|\([^()]*\))*\)\s*)*(\w+)\s*\(([^)]*)\)"
)  # attributes, name, parameters
INTEGERS = {
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32,
    "u32": ctypes.c_uint32,
    "long long": ctypes.c_int64,
    "unsigned long long": ctypes.c_uint64,
    "u64": ctypes.c_uint64,
    "size_t": ctypes.c_uint64,
    "bool": ctypes.c_bool,
}
SCALARS = INTEGERS | {"float": ctypes.c_float, "double": ctypes.c_double}
# Pointers to bytes take every dtype. A pointer to another type takes tensors of that type only.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "__nv_bfloat16": "bfloat16",
    "f16": "float16",
    "__half": "float16",
    "int": "int32",
    "long long": "int64",
}


def default_target() -> str:
    """Return the architecture that cells are compiled for: the GPU's, or sm_90a where no GPU has one."""
    return device.current().target or "sm_90a"


def make_tensor_map(tensor: torch.Tensor, box: Sequence[int], **options: str) -> Any:
    """Return a tensor map of a CUDA tensor for the GPU, or of a CPU tensor for the emulator: a kernel's argument.

    Takes the arguments of `tilelab.runtime.tensor_map.make_tensor_map` and raises its errors.
    """
    make = emulated_tensor_map if tensor.is_cpu else tensor_map
    return make.make_tensor_map(tensor, box, **options)


@dataclasses.dataclass(frozen=True)
class CudaKernel:
    """A kernel of a cell. `kernel[grid, block](...)` launches it.

    `kernel[grid, block, smem_bytes, cluster](...)` adds dynamic shared memory and the blocks per cluster. `parameters`
    are (type, name) pairs from its signature. Python numbers become the C types of the signature; a parameter of type
    TensorMap takes what `make_tensor_map` returns.
    """

    name: str
    source: str
    options: tuple[str, ...]
    parameters: tuple[tuple[str, str], ...]
    target: str

    def __repr__(self) -> str:
        arguments = ", ".join(f"{kind} {name}" for kind, name in self.parameters)
        return f"{self.name}({arguments}), compiled for {self.target}{''.join(f' {each}' for each in self.options)}"

    @functools.cached_property
    def cubin(self) -> bytes:
        """The compiled cell. Raises cuda.CompileError, whose lines are those of the cell."""
        return _compile(self.source, self.target, self.options)

    def define(self, **constants: Any) -> CudaKernel:
        """Return the kernel of the same cell compiled with other -D constants."""
        kept = [
            option
            for option in self.options
            if not any(re.fullmatch(rf"-D{name}(=.*)?", option) for name in constants)
        ]
        return dataclasses.replace(
            self, options=(*kept, *(f"-D{name}={value}" for name, value in constants.items()))
        )

    def resources(self) -> dict:
        """Return `registers`, `spills` (bytes per thread) and `smem_static` (bytes per block, as the source asks)."""
        found = cubin.read_resources(self.cubin, self.name)
        if found["smem_static"] and target_limits(self.target).capability >= (9, 0):
            found["smem_static"] -= SYSTEM_SMEM
        return found

    def counts(self) -> dict[str, int]:
        """Return how often each kind of data movement and tensor-core instruction stands in the SASS."""
        return dict(cubin.sass_counts(self.cubin, self.name))

    def sass(self, pattern: str = "") -> list[str]:
        """Return the instructions of the kernel that the regular expression `pattern` matches, in their order."""
        lines = re.findall(
            r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?;)", cubin.sass(self.cubin, self.name), re.MULTILINE
        )
        return [line for line in lines if re.search(pattern, line)]

    def ptx(self, pattern: str = "") -> list[str]:
        """Return the lines of the cell's PTX that the regular expression `pattern` matches."""
        return [
            line.strip()
            for line in _compile_ptx(self.source, self.target, self.options).splitlines()
            if line.strip() and re.search(pattern, line)
        ]

    def source_hash(self, with_constants: bool = True) -> str:
        """Return 16 hex digits that change with the code, its headers and, `with_constants`, the -D constants."""
        headers, _ = cuda.included_headers(self.source, "", self.options_with_headers())
        code = [cuda.squeeze(text) for text in (self.source, *headers.values())]
        constants = sorted(self.options) if with_constants else []
        return hashlib.sha256(repr([self.name, code, constants]).encode()).hexdigest()[:16]

    def options_with_headers(self) -> list[str]:
        """Return the compiler's options, with the folder of the course's headers."""
        return [*self.options, f"-I{cuda.INCLUDE_FOLDER}"]

    def __getitem__(self, shape: tuple) -> Callable[..., None]:
        if not isinstance(shape, tuple) or len(shape) not in (2, 3, 4):
            raise ValueError(
                f"launch {self.name} as {self.name}[grid, block](...) or {self.name}[grid, block, "
                "smem_bytes, cluster](...)."
            )
        return lambda *args: self.prepare(*shape[:2], args, *shape[2:])()

    def prepare(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        smem_bytes: int = 0,
        cluster: int = 1,
        early: bool = False,
    ) -> Callable[[], None]:
        """Return a function that launches the kernel on `args`, as `cuda.prepare_launch` does.

        With CPU tensors and their maps the function runs the kernel in `tilelab.emulator`, where `early` has no effect.
        """
        converted = self._convert(args)
        on_cpu = {value.is_cpu for value in converted if hasattr(value, "is_cpu")}
        if len(on_cpu) > 1:
            raise ValueError(f"{self.name} is given tensors or maps on the CPU and others on the GPU.")
        if True in on_cpu:
            return emulator.prepare(self, grid, block, converted, smem_bytes, cluster)
        return cuda.prepare_launch(_load(self), grid, block, converted, smem_bytes, cluster, early)

    def _convert(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments with the C types of the signature; ValueError for one that does not fit."""
        if len(args) != len(self.parameters):
            names = ", ".join(name for _, name in self.parameters)
            raise ValueError(
                f"{self.name} takes {len(self.parameters)} arguments ({names}); {len(args)} were given."
            )
        converted = []
        for (kind, name), value in zip(self.parameters, args):
            if kind.endswith("*"):
                dtype = DTYPES.get(kind.rstrip("* "))
                if not hasattr(value, "data_ptr"):
                    raise ValueError(f"{name} of {self.name} is a pointer; pass a tensor on the GPU.")
                if dtype and str(value.dtype) != f"torch.{dtype}":
                    raise ValueError(f"{name} of {self.name} points to {dtype}; the tensor is {value.dtype}.")
            elif kind == "TensorMap" and (hasattr(value, "data_ptr") or type(value) in (bool, int, float)):
                raise ValueError(f"{name} of {self.name} is a tensor map; pass make_tensor_map(tensor, box).")
            elif kind in SCALARS and isinstance(value, (bool, int, float)):
                limits = _integer_limits(kind)
                if limits and (int(value) != value or not limits[0] <= value <= limits[1]):
                    raise ValueError(f"{name} of {self.name} is {value}, which does not fit its type {kind}.")
                value = SCALARS[kind](int(value) if limits else value)
            converted.append(value)
        return converted


def _integer_limits(kind: str) -> tuple[int, int] | None:
    if kind not in INTEGERS:
        return None
    bits, signed = 8 * ctypes.sizeof(INTEGERS[kind]), INTEGERS[kind](-1).value < 0
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 1 if kind == "bool" else 2**bits - 1)


@functools.lru_cache(256)
def _compile(source: str, target: str, options: tuple[str, ...]) -> bytes:
    # The magic's own line is line 1 of the cell.
    return cuda.compile_cubin("\n" + source, target, "cell", [*options, f"-I{cuda.INCLUDE_FOLDER}"])


@functools.lru_cache(64)
def _compile_ptx(source: str, target: str, options: tuple[str, ...]) -> str:
    return cuda.compile_ptx("\n" + source, target, "cell", [*options, f"-I{cuda.INCLUDE_FOLDER}"])


@functools.lru_cache(256)
def _load(kernel: CudaKernel):
    return cuda.load_cubin(kernel.cubin, kernel.name)


def find_kernels(
    source: str, options: Sequence[str] = (), target: str | None = None
) -> dict[str, CudaKernel]:
    """Return the kernels that a CUDA C++ source declares `extern "C" __global__`, by their names."""
    found = {}
    for name, parameters in KERNEL.findall(cuda.strip_comments(source)):
        pairs = []
        for parameter in filter(None, (part.strip() for part in parameters.split(","))):
            words = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", parameter)
            kind, own_name = re.fullmatch(r"\s*(.+?)\s*(\w+)\s*", words, re.DOTALL).groups()
            pairs.append((re.sub(r"\s+", " ", kind.replace("*", " * ")).replace(" *", "*").strip(), own_name))
        found[name] = CudaKernel(name, source, tuple(options), tuple(pairs), target or default_target())
    return found


def changed_lines(before: str, after: str) -> list[int]:
    """Return the numbers of the lines of a cell that are new or changed since another cell; the magic is line 1.

    Comments at the end of a line, such as the mark `// +`, and the name of the kernel do not count.
    """

    def normalised(source):
        names = "|".join(name for name, _ in KERNEL.findall(source)) or "(?!)"
        return [" ".join(re.sub(rf"//.*|\b({names})\b", "", line).split()) for line in source.splitlines()]

    old, new = normalised(before), normalised(after)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [
        line + 2
        for tag, _, _, begin, end in matcher.get_opcodes()
        if tag != "equal"
        for line in range(begin, end)
        if new[line]
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, such as "3, 5–8"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts)


def describe(kernel: CudaKernel) -> str:
    """Return one line with the resources and the instructions of a kernel."""
    found = kernel.resources()
    text = (
        f"{kernel.name} for {kernel.target}: {found['registers']} registers, "
        f"{found['smem_static']:,} B of static shared memory"
    )
    if found["spills"]:
        text += f", {found['spills']} B spilled per thread"
    try:
        counts = sorted(kernel.counts().items(), key=lambda item: -item[1])
    except RuntimeError:  # cuobjdump may be older than the target
        return text
    return text + ("; " + ", ".join(f"{count} {opcode}" for opcode, count in counts) if counts else "")


def _parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="%%cuda", add_help=False)

    def refuse(message: str):
        raise ValueError(f"%%cuda: {message}.")

    parser.error = refuse
    parser.add_argument("name", nargs="?")
    parser.add_argument("-D", action="append", default=[], dest="constants")
    parser.add_argument("--changed-from", metavar="KERNEL")
    parser.add_argument("--ptx", metavar="PATTERN")
    parser.add_argument("--sass", metavar="PATTERN")
    parser.add_argument("--target", metavar="ARCH")
    parser.add_argument("--then", metavar="EXPRESSION", default="None")
    return parser.parse_args(shlex.split(line))


def run_cell(line: str, cell: str, names: dict[str, Any]) -> Any:
    """Compile a cell, print what the options ask for, bind its kernels in `names`, and return the value of --then.

    ValueError for a wrong option or a cell without a kernel, cuda.CompileError for a source that does not compile.
    """
    options = _parse(line)
    kernels = find_kernels(cell, [f"-D{constant}" for constant in options.constants], options.target)
    if not kernels:
        raise ValueError('%%cuda: the cell declares no kernel; write extern "C" __global__ void name(...).')
    if options.name and options.name not in kernels:
        raise ValueError(
            f"%%cuda: the cell declares no kernel {options.name!r}; it declares {', '.join(kernels)}."
        )
    before = names.get(options.changed_from) if options.changed_from else None
    if options.changed_from and not isinstance(before, CudaKernel):
        raise ValueError(f"%%cuda: {options.changed_from!r} is not a kernel of a cell above.")
    for name, kernel in kernels.items():
        print(describe(kernel))
        for kind, pattern in (("PTX", options.ptx), ("SASS", options.sass)):
            if pattern is not None:
                lines = kernel.ptx(pattern) if kind == "PTX" else kernel.sass(pattern)
                print(
                    "\n".join(
                        [f"{kind} of {name}:", *(f"    {each}" for each in lines or ["(no such line)"])]
                    )
                )
    if before:
        changed = changed_lines(before.source, cell)
        print(
            f"{len(changed)} of {len(cell.splitlines())} lines are new or changed since {before.name}: "
            f"{_ranges(changed) or 'none'}"
        )
    names.update(kernels)
    return eval(options.then, names)


def notebook_kernels(path: pathlib.Path) -> dict[str, CudaKernel]:
    """Return the kernels of all %%cuda cells of a notebook by name; nothing is compiled."""
    found = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        line, _, source = "".join(cell["source"]).partition("\n")
        if cell["cell_type"] == "code" and line.startswith("%%cuda"):
            options = _parse(line.removeprefix("%%cuda"))
            found |= find_kernels(source, [f"-D{constant}" for constant in options.constants], options.target)
    return found


def load_ipython_extension(shell: Any) -> None:
    """Register %%cuda; `%load_ext tilelab.cells.cuda_magic` calls this."""
    from IPython.core.error import UsageError

    def magic(line: str, cell: str) -> Any:
        try:
            return run_cell(line, cell, shell.user_ns)
        except (ValueError, cuda.CompileError) as error:
            raise UsageError(
                str(error)
            ) from None  # without a traceback, which would hide the compiler's words

    shell.register_magic_function(magic, "cell", "cuda")
