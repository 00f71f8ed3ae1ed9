"""Run a CUDA C++ kernel on the CPU, with a copy engine and a tensor core that are as slow, as fast or as irregular as
PTX allows.

The emulator is for readers without a GPU and for checks of exercises. It compiles a kernel with g++ and finds what a
GPU may hide: a wrong parity, a missing fence, bytes that were not announced, a buffer that is overwritten too early, a
wait without end. It knows threads, shared memory, barriers, shuffles and votes of a warp, clusters, and the wrappers in
tilelab/include (mbarriers, bulk copies, tensor maps, wgmma). It measures nothing.

engine.cpp, the engine, is compiled once per machine. A kernel is compiled against its small header emulator.h, which
takes a fraction of a second.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import math
import os
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tilelab.emulator import inline_ptx
from tilelab.emulator.source import change_for_gcc, find_unset_constant
from tilelab.runtime import cuda, device

FOLDER = pathlib.Path(__file__).parent
SEEDS = range(6)  # 0: slow engines; 1: fast engines; 2: fast copies and slow products; others: random
TOOLKIT = FOLDER / "toolkit"  # stand-ins for the headers of the CUDA toolkit
# Static variables of functions are shared memory. g++ ignores the section of those of a template.
LINKER_SCRIPT = """SECTIONS { emulated_shared : {
    __start_emulated_shared = .; *(emulated_shared) *(.bss._ZZ* .data._ZZ*) __stop_emulated_shared = .;
} } INSERT AFTER .data;
"""
CELL_HEADER = '#include "language.h"\n'
# g++ instruments the cell. The engine, not g++'s library, has the functions that the instrumented code calls.
CHECKS = (
    "-fsanitize=thread,alignment,bounds,object-size,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    "-fsanitize-recover=bounds",  # hooks.h decides
    "-nodefaultlibs",
    "--param=tsan-distinguish-volatile=1",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-delete-null-pointer-checks",
)
# Ubuntu's g++ defines _FORTIFY_SOURCE, which refuses jumps between the stacks of two threads.
LIBRARY_FLAGS = ("-U_FORTIFY_SOURCE", "-Wno-psabi", "-fPIC", "-fno-omit-frame-pointer")
CELL_FLAGS = (
    "-O1",
    "-gdwarf-4",  # version 5 names the wrong file for some lines
    "-g1",
    *CHECKS,
    "-fdata-sections",
    "-fno-gnu-unique",
    "-fno-threadsafe-statics",
)
ARRAY = re.compile(r"(?:\[[^][]*\]\s*)+")  # the extents of an array, or indices
LONGEST_RUN_S = 10.0  # of one thread without waiting
MOST_SHARED = 232448  # bytes of shared memory per block, as on sm_90
MOST_THREADS = 16384  # that run together
MOST_BLOCKS = 1 << 21  # of a launch

_seed = 0
_advice: list[str] | None = None
_hints: list[tuple[str, str]] | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def with_seed(seed: int) -> Iterator[None]:
    """Let the launches in this block run with another timing of the copy engine."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


@contextlib.contextmanager
def collect_advice() -> Iterator[list[str]]:
    """Collect what should be better in the launches in this block, although they are right."""
    global _advice
    before, _advice = _advice, []
    try:
        yield _advice
    finally:
        _advice = before


@contextlib.contextmanager
def collect_hints() -> Iterator[Callable[[], str]]:
    """Give a function that says what a launch in this block did first that is allowed, but may spoil its result."""
    global _hints
    before, _hints = _hints, []
    hints = _hints
    try:
        yield lambda: _name_lines(*hints[0]) if hints else ""
    finally:
        _hints = before


class Event(ctypes.Structure):
    """What a kernel issued: a bulk load, a bulk store, an addition in memory, or a wgmma, and in which block."""

    LOAD, STORE, ADD, PRODUCT = range(4)
    _fields_ = [(name, ctypes.c_uint32) for name in ("kind", "block", "bytes", "pending")]


class Trace:
    """What the launches under `trace` issued, in order, and how many basic blocks of their code they executed.

    `pending` of a product counts the groups of products of its thread that were committed and not waited for. `steps`
    stays 0 unless the kernel was compiled with COUNT_STEPS.
    """

    def __init__(self):
        self.events: list[Event] = []
        self.steps = 0


COUNT_STEPS = "-fsanitize-coverage=trace-pc"


@contextlib.contextmanager
def trace() -> Iterator[Trace]:
    """Record what the launches in this block issue; the Trace is complete after the block."""
    _, engine = _prepare_engine()
    found, count, steps = Trace(), ctypes.c_uint64(), ctypes.c_uint64()
    engine.start_trace()
    try:
        yield found
    finally:
        first = engine.end_trace(ctypes.byref(count), ctypes.byref(steps))
        found.events = [Event.from_buffer_copy(first[place]) for place in range(count.value)]
        found.steps = steps.value


def count_read_bytes(parameter: str) -> int:
    """Return how many bytes of a tensor the threads of the last launch have read themselves, without copies."""
    return _prepare_engine()[1].count_read_bytes(parameter.encode())


class EmulationError(RuntimeError):
    """A kernel broke a rule of the copy engine or waits for ever; the message says which block, thread and rule."""


class NotEmulated(RuntimeError):
    """The kernel uses what the emulator does not know; the message says what. It can only run on a GPU."""


def is_available() -> bool:
    """Return whether this machine has a C++ compiler."""
    return shutil.which("g++") is not None


def _call_compiler(
    source: str, flags: Sequence[str], what: str, header: str = ""
) -> subprocess.CompletedProcess:
    """Call g++ for a C++ source, or for the file of a header that is compiled in advance."""
    if not is_available():
        raise device.Unsupported(
            "running a CUDA kernel without a GPU needs g++: install it, or read the SASS."
        )
    command = [
        "g++",
        "-std=c++17",
        "-w",
        "-x",
        *(("c++-header", header) if header else ("c++", "-")),
        f"-I{FOLDER}",
        *flags,
    ]
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, env=english)
    if refused := re.search(r"attribute error: (.*)$", done.stderr, re.MULTILINE):
        raise NotEmulated(refused[1].replace("\\'", "'") + "; it runs on a GPU only.")
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "")
        raise cuda.CompileError(f"{what} does not compile for the emulator: {first}\n{done.stderr[:2000]}")
    return done


def _build(source: str, flags: Sequence[str], path: pathlib.Path, what: str, header: str = "") -> None:
    """Compile C++ to the library `path`, or the file of a header to what g++ reads in its place."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = pathlib.Path(folder, "built.so")
        _call_compiler(source, ["-shared", "-o", os.fspath(built), *LIBRARY_FLAGS, *flags], what, header)
        built.replace(path)


def _is_whole(path: pathlib.Path) -> bool:
    """Return whether a library is there, as far as the section headers at its end."""
    if not path.exists():
        return False
    content = path.read_bytes()
    if len(content) < 64 or content[:4] != b"\x7fELF":
        return False
    (begin,), (size, count) = struct.unpack_from("Q", content, 40), struct.unpack_from("2H", content, 58)
    return begin + size * count <= len(content)


def _plain_cpp(header: pathlib.Path) -> str:
    """Return the parts of a header of the course that g++ understands: those without inline PTX and macros."""
    parts = re.split(r"\n\n+(?=[^\s])", header.read_text())
    plain = [part for part in parts if not re.search(r"\basm\b|^ *#|^typedef|WGMMA\(", part, re.MULTILINE)]
    return "\n\n".join(["#pragma once", *plain]) + "\n"


@functools.cache
def _prepare_engine() -> tuple[pathlib.Path, ctypes.CDLL]:
    """Return the folder with the engine and the headers that kernels include, and the loaded engine."""
    plain = {
        f"plain_{name}": _plain_cpp(cuda.INCLUDE_FOLDER / name)
        for name in ("tma.cuh", "wgmma.cuh", "elements.cuh")
    }
    own = {
        path.name: path.read_text()
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file()
        and (path.suffix in (".cuh", ".h", ".cpp") or TOOLKIT in path.parents or path.name == "inline_ptx.py")
    }
    version = hashlib.sha256(
        repr((plain, own, LINKER_SCRIPT, LIBRARY_FLAGS, CELL_FLAGS)).encode()
    ).hexdigest()[:16]
    folder = cuda.cubin_folder() / f"emulator-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (plain | {"shared.ld": LINKER_SCRIPT, "cell.h": CELL_HEADER}).items():
        if not (folder / name).exists():
            with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
                file.write(text)
            os.replace(file.name, folder / name)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes, one compiles the engine
        if not _is_whole(folder / "engine.so"):
            _build(own["engine.cpp"], ["-O2"], folder / "engine.so", "the engine")
        # Half of the time to compile a cell would go into its headers.
        if not (folder / "cell.h.gch").exists():
            header = os.fspath(folder / "cell.h")
            _build("", CELL_FLAGS, folder / "cell.h.gch", "the header of a cell", header)
    engine = ctypes.CDLL(os.fspath(folder / "engine.so"), ctypes.RTLD_GLOBAL)
    for function in (engine.run_emulated, engine.take_printed, engine.take_advice, engine.take_hint):
        function.restype = ctypes.c_char_p
    engine.end_trace.restype = ctypes.POINTER(Event)
    engine.count_read_bytes.restype = ctypes.c_uint64
    return folder, engine


def _build_cell(text: str, flags: Sequence[str], path: pathlib.Path, has_ptx: bool) -> None:
    """Compile the text of a cell, with its inline PTX rewritten, to the library `path`."""
    if has_ptx:
        text = inline_ptx.rewrite(
            _call_compiler(text, ["-E", "-fpch-preprocess", *LIBRARY_FLAGS, *flags], "the cell").stdout
        )
        flags = [*flags, "-fpreprocessed"]
    _build(text, flags, path, "the cell")


def _explain(log: str) -> str:
    """Return what g++ stumbled over, in a sentence with the line of the cell."""
    errors = re.findall(r"^(?:cell|<stdin>|(\S+?)):(\d+):\d+: (?:fatal )?error: (.*)", log, re.MULTILINE)
    lines = re.findall(r"^cell:(\d+):", log, re.MULTILINE)
    if not errors:
        return "does not link for the emulator: " + log.splitlines()[-1]
    _, line, said = next((each for each in errors if not each[0]), errors[0])
    line = lines[0] if lines else line
    if known := re.search(r"static assertion failed: (the emulator knows .*)", log):
        said = known[1]
    if header := re.match(r"(\S+): No such file", said):
        return f"includes <{header[1]}> in line {line}, which the emulator lacks"
    name = re.search(
        r"'([^']+)' (?:was not declared|is not a member|has not been declared|does not name a|in namespace|was not)|"
        r"(?:no (?:type|template|member) named|call to|has no member named) '(\w[\w:]*)",
        said,
    )
    if name:
        return f"uses {name[1] or name[2]} in line {line}, which the emulator does not know"
    return f"has a form in line {line} that the emulator does not know ({said})"


@functools.lru_cache(256)
def _compile(kernel: Any) -> ctypes.CDLL:
    """Return the library of a kernel, compiled once and kept beside the engine."""
    folder, _ = _prepare_engine()
    source, name = kernel.source, kernel.name
    if constant := find_unset_constant(source, re.sub(r"<.*|.*::", "", kernel.expression or name)):
        raise NotEmulated(
            f"{name} reads {constant[0]} of line {constant[1]}, __constant__ memory that the host fills: give it an "
            "initialiser, or pass its values as a parameter."
        )
    headers, _ = cuda.included_headers(source, "", [f"-I{cuda.INCLUDE_FOLDER}", *kernel.options])
    # These headers come before the names and the constants of the cell, which would change them.
    for_gcc = [text for path, text in headers.items() if not path.endswith("nvcc_std.cuh")]
    includes = [each[1] for text in (source, *for_gcc) for each in cuda.INCLUDE.findall(text)]
    # The toolkit's own, which g++ takes; others are inline PTX.
    real = [each for each in includes if re.match("cuda/std/(?!atomic|barrier|latch|semaphore)", each)]
    own = [each for each in includes if (FOLDER / each).is_file() or (TOOLKIT / each).is_file()]
    if any("std::" in text for text in (source, *headers.values())):  # nvcc's files use it in kernels
        own += ["algorithm", "array", "cmath", "limits", "tuple", "type_traits", "utility"]
    outside = [f"#include <{each}>" for each in dict.fromkeys(real + own)]
    constants = [
        f"#define {option[2:].replace('=', ' ', 1) if '=' in option else option[2:] + ' 1'}"
        for option in kernel.options
        if option.startswith("-D")
    ]
    places = [f"-I{FOLDER}", *kernel.options, f"-I{folder}", f"-I{TOOLKIT}", f"-I{cuda.INCLUDE_FOLDER}"]
    of_gcc, _ = cuda.included_headers(source, "", places)  # the emulator's where it has some of the same name
    has_ptx = any(re.search(r"\b(asm|__asm__)\b", text) for text in (source, *of_gcc.values()))
    if has_ptx:
        outside.append('#include "instructions.h"')
    newline = "\n"
    # Names of the cell hide those of the C library. In the namespace without a name, static variables of templates and
    # inline functions belong to this file alone.
    text = f"""#include "cell.h"
#define EMULATED_ARCH {re.sub("[^0-9]", "", kernel.target)}0
{newline.join(outside + constants)}
namespace cell {{ namespace {{
BUILTINS_THAT_CELLS_OVERLOAD
#line 2 "cell"
{change_for_gcc(source)}
#line 1 "launch"
void call_kernel(void** values) {{ emulator::call({kernel.expression or name}, values); }}
}} }}
extern "C" {{
extern u8 __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern u8 __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern u8* const shared_begin = __start_emulated_shared;
extern u8* const shared_end = __stop_emulated_shared;
#define HIDDEN __attribute__((visibility("hidden")))
extern const u8 __ehdr_start[] HIDDEN, etext[] HIDDEN, _end[] HIDDEN;
extern const u8* const code_begin = __ehdr_start;
extern const u8* const code_end = etext;
extern const u8* const image_end = _end;
u32 dynamic_alignment = 16;
#line 1 "launch"
UNCHECKED void emulated_kernel(void** values) {{ cell::call_kernel(values); }}
}}
"""
    path = folder / f"{hashlib.sha256(repr((text, headers, kernel.options)).encode()).hexdigest()}.so"
    if not _is_whole(path):
        flags = [
            *CELL_FLAGS,
            *(option for option in kernel.options if option.startswith("-I") or option == COUNT_STEPS),
            *("-Xlinker", "-T", "-Xlinker", os.fspath(folder / "shared.ld")),
            f"-I{folder}",
            f"-I{TOOLKIT}",
            f"-I{cuda.INCLUDE_FOLDER}",
            *(f"-I{folder}" for folder in (cuda.toolkit_folders(name, real[0]) if real else ())),
            *(f"-DCCCL_DISABLE_{each}_SUPPORT" for each in ("FP16", "BF16", "FP8") if real),  # they are ours
        ]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            verdict = pool.submit(kernel.check)  # the GPU's compiler has the first word
            try:
                try:
                    _build_cell(text, flags, path, has_ptx)
                except cuda.CompileError as error:  # the cell has a function such as exp(float) of its own
                    if "conflicts with a previous declaration" not in str(error):
                        raise
                    _build_cell(text.replace("BUILTINS_THAT_CELLS_OVERLOAD", ""), flags, path, has_ptx)
            except cuda.CompileError as error:
                verdict.result()
                raise NotEmulated(f"{name} {_explain(str(error))}; it runs on a GPU only.") from error
            try:
                verdict.result()
            except cuda.CompileError:
                path.unlink(missing_ok=True)
                raise
    return ctypes.CDLL(os.fspath(path))


def _is_not_the_readers(folder: str, library: str) -> bool:
    """Return whether a folder that a library's debug information names holds headers of the emulator or of g++.

    The precompiled header in the cache may come from another copy of the project, whose path it then holds.
    """
    of_emulator = "/".join(FOLDER.parts[-2:])
    return f"/{of_emulator}/" in f"{folder}/" or folder.startswith((os.path.dirname(library), "/usr/"))


def _name_lines(said: str, library: str) -> str:
    """Return an error of the engine with "line 12: " for its marks, which hold return addresses in the library."""

    def find_lines(mark: re.Match) -> str:
        addresses = [hex(int(address, 16) - 1) for address in mark[1].split(",")]
        command = ["addr2line", "-i", "-e", library, *addresses]
        frames = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        lines = []
        for file, _, line in (frame.split(" ")[0].rpartition(":") for frame in frames):
            folder, _, file = file.rpartition("/")
            if line.isdecimal() and file != "launch" and not _is_not_the_readers(folder, library):
                lines.append(line if file == "cell" or file.endswith(".cu") else f"{line} of {file}")
        called = f", called from line {lines[-1]}" if lines and lines[-1] != lines[0] else ""
        return f"line {lines[0]}{called}: " if lines else ""

    return (
        re.sub("\1([^\2]*)\2", find_lines, said)
        if shutil.which("addr2line")
        else re.sub("\1[^\2]*\2", "", said)
    )


def _extents(what: str, extents: int | Sequence[int]) -> list[int]:
    """Return the three extents of a grid or a block; ValueError for those that no launch has."""
    given = [extents] if isinstance(extents, int) else list(extents)
    most = (2**31 - 1, 65535, 65535) if what == "grid" else (1024, 1024, 1024)
    if not 1 <= len(given) <= 3 or any(not 1 <= int(each) <= limit for each, limit in zip(given, most)):
        raise ValueError(
            f"the {what} is {extents}; it has one to three extents, up to {most[0]:,}, {most[1]:,} and {most[2]:,}."
        )
    return [int(each) for each in given] + [1] * (3 - len(given))


def _range(tensor: Any) -> tuple[int, int]:
    """Return the first address of a tensor's elements and the first one behind them."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    return begin, begin + (last + 1) * tensor.element_size()


def prepare(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence,
    smem_bytes: int = 0,
    cluster: int = 1,
) -> Callable[[], None]:
    """Return a function that runs a kernel of a %%cuda cell on CPU tensors.

    `args` are tensors, tensor maps of CPU tensors and ctypes scalars; `cluster` counts the blocks along x that run
    together. The function takes `seed`, which says when the copy engine acts (see SEEDS); the default is the one of
    `with_seed`, or 0. It raises EmulationError, which says the rule that the kernel broke.

    cuda.CompileError says why the kernel does not compile, NotEmulated that it uses a library or inline PTX, and
    Unsupported that there is no C++ compiler or too little shared memory.
    """
    library, (_, engine) = _compile(kernel), _prepare_engine()
    grid, block = (_extents(what, extents) for what, extents in (("grid", grid), ("block", block)))
    threads, blocks = math.prod(block), math.prod(grid)
    if threads > 1024 or block[2] > 64:
        raise ValueError(
            f"a block has 1 to 1,024 threads, up to 64 along z; {kernel.name} is launched with {threads:,} in {block}."
        )
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"the emulator runs up to {MOST_BLOCKS:,} blocks per launch; {kernel.name} is launched with {blocks:,}."
        )
    cluster = max(cluster, kernel.cluster_dims)
    if not isinstance(cluster, int) or not 1 <= cluster <= 8 or grid[0] % cluster:
        raise ValueError(
            f"cluster is {cluster}; it must be 1 to 8 and divide the grid's {grid[0]} blocks along x."
        )
    if not isinstance(smem_bytes, int) or smem_bytes < 0:
        raise ValueError(f"smem_bytes is {smem_bytes}; it must be an integer from 0 on.")
    tensors = [value for value in args if hasattr(value, "data_ptr")]
    tensors += [
        each for value in args for each in getattr(value, "pointees", ())
    ]  # behind a pointer to pointers
    values = [ctypes.c_void_p(value.data_ptr()) if hasattr(value, "data_ptr") else value for value in args]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    ranges = (ctypes.c_uint64 * (2 * len(tensors)))(*(bound for each in tensors for bound in _range(each)))
    given = [name for (_, name), value in zip(kernel.parameters, args) if hasattr(value, "data_ptr")]
    given += ["what a pointer points to"] * (len(tensors) - len(given))
    names = (ctypes.c_char_p * len(tensors))(*(name.encode() for name in given))
    begin, end, *code = (
        ctypes.c_void_p.in_dll(library, name)
        for name in ("shared_begin", "shared_end", "code_begin", "code_end", "image_end")
    )
    alignment = ctypes.c_uint32.in_dll(library, "dynamic_alignment")
    needed = (end.value or 0) - (begin.value or 0) + smem_bytes
    if needed > MOST_SHARED:
        raise device.Unsupported(
            f"the launch needs {needed:,} B of shared memory per block; sm_90 has "
            f"{MOST_SHARED:,} B: take a smaller tile or fewer stages."
        )
    dimensions = max((text.count("[") for text in ARRAY.findall(kernel.source)), default=1)
    per_sm = min(32, 2048 // threads, MOST_SHARED // (needed + 1024) or 1)
    resident = min(blocks, 132 * per_sm, MOST_THREADS // threads) // cluster or 1
    shape = [(ctypes.c_uint32 * 3)(*extents) for extents in (grid, block)]
    entry = ctypes.cast(library.emulated_kernel, ctypes.c_void_p)
    most_dimensions = ctypes.c_uint32.in_dll(engine, "most_dimensions")

    def run(seed: int | None = None, keep_alive=(args, values)) -> None:
        with _lock:  # the engine runs one kernel at a time
            most_dimensions.value = dimensions
            failure = engine.run_emulated(
                entry,
                *code,
                pointers,
                *shape,
                cluster,
                begin,
                end,
                smem_bytes,
                alignment,
                ranges,
                names,
                len(tensors),
                resident,
                _seed if seed is None else seed,
                int(10 * LONGEST_RUN_S),
            )
            printed, advice, hint = engine.take_printed(), engine.take_advice(), engine.take_hint()
        if printed:
            print(printed.decode(errors="replace"), end="")
        if advice and _advice is not None:
            _advice.append(_name_lines(advice.decode(), library._name))
        if hint and _hints is not None:
            _hints.append((hint.decode(), library._name))
        if failure == b"\3":
            raise KeyboardInterrupt
        if failure:
            raise EmulationError(_name_lines(failure.decode(), library._name))

    return run


def run(
    kernel: Any,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence,
    smem_bytes: int = 0,
    seed: int | None = None,
    cluster: int = 1,
) -> None:
    """Run a kernel of a %%cuda cell on CPU tensors. Takes the arguments of `prepare`, and `seed` as its function."""
    prepare(kernel, grid, block, args, smem_bytes, cluster)(seed)
