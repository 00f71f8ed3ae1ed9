"""The cell magic %%cuda: a notebook cell holds CUDA C++, and its kernels become Python objects.

    %load_ext tilelab.cells.cuda_magic

    %%cuda ring_copy -DBYTES=4096 --changed-from first_copy
    #include "ptx.cuh"
    extern "C" __global__ void ring_copy(const unsigned char* x, unsigned char* out, int tiles) { ... }

    ring_copy[blocks, threads](x, out, tiles)

Options: -DNAME=VALUE defines a constant, --instance "gemm<128, 64>" names an instance of a template, --changed-from
KERNEL lists the lines that differ from an earlier cell, --ptx and --sass PATTERN show instructions, --target ARCH
compiles for another GPU, --then EXPRESSION runs Python afterwards.

The cell is compiled with NVRTC for the GPU at hand, or for sm_90a where there is none. Errors name the lines of the
cell. Below the cell stand the registers, the shared memory and the instructions of each kernel.
"""

from __future__ import annotations

import argparse
import contextlib
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
from tilelab.cells import signatures
from tilelab.emulator import device_part
from tilelab.emulator import tensor_map as emulated_tensor_map
from tilelab.runtime import cubin, cuda, device, tensor_map
from tilelab.runtime.build import SYSTEM_SMEM
from tilelab.runtime.device import target_limits

if TYPE_CHECKING:
    import torch

FLOATS = {"float": ctypes.c_float, "double": ctypes.c_double}
VECTORS = {
    "char": ctypes.c_int8, "uchar": ctypes.c_uint8, "short": ctypes.c_int16, "ushort": ctypes.c_uint16,
    "int": ctypes.c_int32, "uint": ctypes.c_uint32, "long": ctypes.c_int64, "ulong": ctypes.c_uint64,
    "longlong": ctypes.c_int64, "ulonglong": ctypes.c_uint64, "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip
# Pointers to bytes take every dtype. A pointer to another type takes tensors of that type only.
DTYPES = {
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16",
    "f16": "float16",
    "__half": "float16",
    "half": "float16",
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
    expression: str = ""  # in C++, for a kernel that is no function of C: "ns::gemm<128, 64>"
    cluster_dims: int = 1  # of __cluster_dims__
    changed_from: str = dataclasses.field(default="", compare=False)  # the kernel of --changed-from

    @functools.cached_property
    def symbol(self) -> str:
        """The name in the cubin. Raises cuda.CompileError."""
        return (
            _lower(self.source, self.target, self.options, self.expression) if self.expression else self.name
        )

    def __repr__(self) -> str:
        arguments = ", ".join(f"{kind} {name}" for kind, name in self.parameters)
        return f"{self.name}({arguments}), compiled for {self.target}{''.join(f' {each}' for each in self.options)}"

    @functools.cached_property
    def cubin(self) -> bytes:
        """The compiled cell. Raises cuda.CompileError, whose lines are those of the cell."""
        return _compile(self.source, self.target, self.options, self.expression)

    def check(self) -> None:
        """Raise cuda.CompileError if the compiler of the GPU refuses the cell."""
        options = tuple(option for option in self.options if option != emulator.COUNT_STEPS)
        _compile_ptx(self.source, self.target, options, self.expression)

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
        found = cubin.read_resources(self.cubin, self.symbol)
        if found["smem_static"] and target_limits(self.target).capability >= (9, 0):
            found["smem_static"] -= SYSTEM_SMEM
        return found

    def counts(self) -> dict[str, int]:
        """Return how often each kind of data movement and tensor-core instruction stands in the SASS."""
        return dict(cubin.sass_counts(self.cubin, self.symbol))

    def sass(self, pattern: str = "") -> list[str]:
        """Return the instructions of the kernel that the regular expression `pattern` matches, in their order."""
        lines = re.findall(
            r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?;)", cubin.sass(self.cubin, self.symbol), re.MULTILINE
        )
        return [line for line in lines if re.search(pattern, line)]

    def ptx(self, pattern: str = "") -> list[str]:
        """Return the lines of the cell's PTX that the regular expression `pattern` matches."""
        return [
            line.strip()
            for line in _compile_ptx(self.source, self.target, self.options, self.expression).splitlines()
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
                dtype = DTYPES.get(kind[:-1])
                if kind.endswith("**") and isinstance(value, (list, tuple)):
                    value = _point_to(value)
                if kind == "CUtensorMap*" and getattr(value, "is_cpu", False):
                    value = _point_to_map(value)
                if value is None:
                    value = ctypes.c_void_p()
                elif not hasattr(value, "data_ptr"):
                    raise ValueError(
                        f"{name} of {self.name} is a pointer; pass a tensor on the GPU, or None."
                    )
                elif dtype and str(value.dtype) != f"torch.{dtype}":
                    raise ValueError(f"{name} of {self.name} points to {dtype}; the tensor is {value.dtype}.")
            elif kind in ("TensorMap", "CUtensorMap") and (
                hasattr(value, "data_ptr") or type(value) in (bool, int, float)
            ):
                raise ValueError(f"{name} of {self.name} is a tensor map; pass make_tensor_map(tensor, box).")
            elif isinstance(value, (bool, int, float, tuple, list, bytes)) or hasattr(value, "tobytes"):
                value = self._make_value(len(converted), value)
            elif kind.endswith("&"):
                raise ValueError(f"{name} of {self.name} is a reference; declare a value or a pointer.")
            converted.append(value)
        return converted

    def _make_value(self, index: int, value: Any) -> Any:
        """Return a Python value in the C type of the parameter `index`."""
        kind, name = self.parameters[index]
        size, family = _scalar_type(kind) or self._types[index]
        which = f"{name} of {self.name}"
        if family == "reference":
            raise ValueError(f"{which} is a reference; declare a value or a pointer.")
        if hasattr(value, "tobytes"):  # a numpy scalar or array
            value = value.item() if getattr(value, "ndim", 0) == 0 and family != "struct" else value.tobytes()
        if isinstance(value, (bool, int, float)):
            if family in ("signed", "unsigned", "enum", "bool"):
                bits = 1 if family == "bool" else 8 * size
                least = -(2 ** (bits - 1)) if family in ("signed", "enum") else 0
                most = 2**bits - 1 if family != "signed" else 2 ** (bits - 1) - 1
                if (
                    value != value
                    or abs(value) == float("inf")
                    or int(value) != value
                    or not least <= value <= most
                ):
                    raise ValueError(f"{which} is {value}, which does not fit its type {kind}.")
                signed = family == "signed" or value < 0
                return _INTEGERS[size, signed](int(value)) if family != "bool" else ctypes.c_bool(value)
            if family == "float":
                return (ctypes.c_float if size == 4 else ctypes.c_double)(value)
            if "bfloat16" in kind or kind == "bf16":
                return ctypes.c_uint16(_half_bits(value, "bfloat16"))
            if "half" in kind or kind == "f16":
                return ctypes.c_uint16(_half_bits(value, "float16"))
        vector = re.fullmatch(r"([a-z]+?)([1-4])", kind.replace("dim3", "uint3"))
        if (
            isinstance(value, (tuple, list))
            and vector
            and vector[1] in VECTORS
            and len(value) == int(vector[2])
        ):
            return (VECTORS[vector[1]] * len(value))(*value)
        if isinstance(value, bytes) and len(value) == size:
            return ctypes.create_string_buffer(value, size)
        raise ValueError(
            f"{which} has the type {kind} of {size} bytes; {value!r} is no such value: pass a number, a tuple of the "
            "fields of a vector type, or a ctypes.Structure."
        )

    @functools.cached_property
    def _types(self) -> list[tuple[int, str]]:
        """The size and the kind of each parameter, for types that are not known by their names."""
        options = (*self.options, f"-I{cuda.INCLUDE_FOLDER}")
        return signatures.ask_types(self.source, self.expression or self.name, self.target, options)


_INTEGERS = {
    (ctypes.sizeof(kind), kind(-1).value < 0): kind
    for kind in (ctypes.c_int8, ctypes.c_uint8, ctypes.c_int16, ctypes.c_uint16, ctypes.c_int32, ctypes.c_uint32,
                 ctypes.c_int64, ctypes.c_uint64)
}  # fmt: skip


def _point_to(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the addresses of others, which it keeps alive."""
    import torch

    device = tensors[0].device
    addresses = torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64, device=device)
    addresses.pointees = tuple(tensors)
    return addresses


def _point_to_map(map_of_cpu: Any) -> torch.Tensor:
    """Return a tensor that holds a tensor map of the emulator, which it keeps alive with its tensor."""
    import torch

    words = torch.frombuffer(map_of_cpu, dtype=torch.int64)
    words.pointees = (map_of_cpu.tensor,)
    return words


def _half_bits(value: float, dtype: str) -> int:
    import torch

    return int(torch.tensor(float(value), dtype=getattr(torch, dtype)).view(torch.int16)) & 0xFFFF


def _scalar_type(kind: str) -> tuple[int, str] | None:
    """Return the size and the kind of a type that C names, whatever the order of its words; None for any other."""
    words = sorted(kind.split())
    if kind in FLOATS:
        return ctypes.sizeof(FLOATS[kind]), "float"
    if kind == "bool":
        return 1, "bool"
    aliases = {
        "u32": (4, "unsigned"),
        "u64": (8, "unsigned"),
        "u8": (1, "unsigned"),
        "size_t": (8, "unsigned"),
    }
    if kind in aliases:
        return aliases[kind]
    if not set(words) <= {"int", "long", "short", "char", "signed", "unsigned"}:
        return None
    size = 1 if "char" in words else 2 if "short" in words else 8 if "long" in words else 4
    return size, "unsigned" if "unsigned" in words else "signed"


@functools.lru_cache(256)
def _compile(source: str, target: str, options: tuple[str, ...], expression: str = "") -> bytes:
    # The magic's own line is line 1 of the cell.
    folder = f"-I{cuda.INCLUDE_FOLDER}"
    expressions = [expression] if expression else []
    return cuda.compile_cubin("\n" + source, target, "cell", [*options, folder], expressions=expressions)


@functools.lru_cache(64)
def _compile_to_ptx(source: str, target: str, options: tuple[str, ...], expression: str = ""):
    folder = f"-I{cuda.INCLUDE_FOLDER}"
    expressions = [expression] if expression else []
    return cuda.compile_to_ptx("\n" + source, target, "cell", [*options, folder], expressions)


def _compile_ptx(source: str, target: str, options: tuple[str, ...], expression: str = "") -> str:
    return _compile_to_ptx(source, target, options, expression)[0]


def _lower(source: str, target: str, options: tuple[str, ...], expression: str) -> str:
    return _compile_to_ptx(source, target, options, expression)[1][0]


@functools.lru_cache(256)
def _load(kernel: CudaKernel):
    return cuda.load_cubin(kernel.cubin, kernel.symbol)


def find_kernels(
    source: str,
    options: Sequence[str] = (),
    target: str | None = None,
    instances: Sequence[str] = (),
    folder: pathlib.Path | None = None,
) -> dict[str, CudaKernel]:
    """Return the kernels that a CUDA C++ source declares, by their names.

    A template is a kernel once an instance is named, as "gemm<128, 64>", or as "small=gemm<64, 64>" to give it a name
    of its own, or when the source launches one instance of it with <<<...>>>. Of a file with host code, or of one that
    lies in `folder`, only the device's part is compiled.
    ValueError for an instance of no template.
    """
    target = target or default_target()
    launched: dict[str, str] = {}
    if folder or device_part.has_host_code(source):
        launched = device_part.find_launched_instances(source)
        source = device_part.keep_device_part(source, folder, options)
        options = (*options, "-default-device")
    found, templates = {}, {}
    for each in signatures.find_declarations(source, options, int(re.sub(r"\D", "", target)) * 10):
        if each.template is not None:
            templates[each.name] = templates[each.expression] = each
            continue
        expression = "" if each.is_c else each.expression
        kernel = CudaKernel(
            each.name, source, tuple(options), each.parameters, target, expression, each.cluster
        )
        found[each.name] = kernel
    named = {each.split("=")[-1].split("<")[0].strip().rpartition("::")[2] for each in instances}
    given = [launched[each] for each in launched if each in templates and each not in named]
    for instance in (*given, *instances):
        own_name, _, expression = re.fullmatch(
            r"\s*(?:(\w+)\s*(=))?\s*(.+?)\s*", instance, re.DOTALL
        ).groups()
        template = templates.get(expression.split("<")[0].strip())
        if not template:
            declared = ", ".join(dict.fromkeys(each.name for each in templates.values())) or "none"
            raise ValueError(
                f"{instance} is no instance of a kernel's template; the source declares {declared}."
            )
        name = own_name or template.name
        if name in found and found[name].expression != expression:
            raise ValueError(f"two instances are called {name}: name one, as in another={expression}.")
        qualified = template.expression.rpartition("::")
        if qualified[0] and "::" not in expression.split("<")[0]:
            expression = f"{qualified[0]}::{expression}"
        parameters = signatures.name_types(template, expression)
        found[name] = CudaKernel(
            name, source, tuple(options), parameters, target, expression, template.cluster
        )
    return found


def changed_lines(before: str, after: str) -> list[int]:
    """Return the numbers of the lines of a cell that are new or changed since another cell; the magic is line 1.

    Comments at the end of a line, such as the mark `// +`, and the name of the kernel do not count.
    """

    def normalised(source):
        names = "|".join(each.name for each in signatures.find_declarations(source)) or "(?!)"
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


def read_build(kernel: CudaKernel) -> dict:
    """Return `target`, the resources, and as `sass` the instructions of a kernel. Raises cuda.CompileError."""
    row = {"target": kernel.target, **kernel.resources()}
    with contextlib.suppress(RuntimeError):  # cuobjdump may be missing, or older than the target
        row["sass"] = kernel.counts()
    return row


def describe(name: str, row: dict) -> str:
    """Return one line with what `read_build` has found about a kernel."""
    text = f"{name} for {row['target']}: {row['registers']} registers, "
    text += f"{row['smem_static']:,} B of static shared memory"
    text += f", {row['spills']} B spilled per thread" if row["spills"] else ""
    counts = sorted(row.get("sass", {}).items(), key=lambda item: (-item[1], item[0]))
    return text + ("; " if counts else "") + ", ".join(f"{count} {opcode}" for opcode, count in counts)


def _parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="%%cuda", add_help=False)

    def refuse(message: str):
        raise ValueError(f"%%cuda: {message}.")

    parser.error = refuse
    parser.add_argument("name", nargs="?")
    parser.add_argument("-D", action="append", default=[], dest="constants")
    parser.add_argument("--instance", action="append", default=[], dest="instances")
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
    constants = [f"-D{constant}" for constant in options.constants]
    kernels = find_kernels(cell, constants, options.target, options.instances)
    if not kernels:
        for each in signatures.find_declarations(cell, constants):
            raise ValueError(
                f"%%cuda: {each.name} is a template; name an instance with --instance '{each.name}<...>', which has "
                f"values for {each.template}."
            )
        raise ValueError('%%cuda: the cell declares no kernel; write extern "C" __global__ void name(...).')
    if options.name and options.name not in kernels:
        raise ValueError(
            f"%%cuda: the cell declares no kernel {options.name!r}; it declares {', '.join(kernels)}."
        )
    before = names.get(options.changed_from) if options.changed_from else None
    if options.changed_from and not isinstance(before, CudaKernel):
        raise ValueError(f"%%cuda: {options.changed_from!r} is not a kernel of a cell above.")
    for name, kernel in kernels.items():
        print(describe(name, read_build(kernel)))
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
        kernels = {
            name: dataclasses.replace(kernel, changed_from=before.name) for name, kernel in kernels.items()
        }
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
            # without a traceback, which would hide the compiler's words
            raise UsageError(str(error)) from None

    shell.register_magic_function(magic, "cell", "cuda")
