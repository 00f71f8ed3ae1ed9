"""Triton and Gluon functions that are typed in a notebook: their source, a build for any target, and their hash.

A worker process cannot import a function of a cell. So the function is written to a file, together with what it calls
and with the imports that it needs, all found by name in the cells that were run so far.
"""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import inspect
import json
import linecache
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tilelab.cells import cuda_magic
from tilelab.runtime import build, cuda, device, files, provenance

_STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)
_LONG = 110  # characters of an instruction that are shown


class _Launch(BaseException):
    """Ends a call of a prepared function at its first launch; not an Exception, which the function might catch."""

    def __init__(self, kernel, grid, args, options):
        self.kernel, self.grid, self.args_given, self.options = kernel, grid, args, options


def is_triton(kernel: Any) -> bool:
    """Return whether `kernel` is a function under @triton.jit or @gluon.jit, compiled or interpreted."""
    return hasattr(kernel, "fn") and hasattr(kernel, "arg_names")


def is_gluon(kernel: Any) -> bool:
    """Return whether `kernel` is a function under @gluon.jit, which Triton's interpreter cannot run."""
    return bool(getattr(kernel, "is_gluon", bool)())


def is_interpreted(kernel: Any) -> bool:
    """Return whether `kernel` runs in Triton's interpreter."""
    return is_triton(kernel) and type(kernel).__name__ == "InterpretedFunction"


# ---- the source of a cell's function


def notebook_texts(path: pathlib.Path) -> list[str]:
    """Return the texts of the code cells of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def texts_of(function: Callable) -> list[str]:
    """Return the texts that may define what `function` uses: the cells run so far, or its own file."""
    own = "".join(inspect.findsource(function)[0])
    if function.__module__ != "__main__":
        return [own]
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    history = [*shell.history_manager.input_hist_raw] if shell else []
    # A kernel that keeps no history, as under nbval, still keeps the text of each cell as a file in one folder.
    folder = os.path.dirname(inspect.getfile(function))
    files = [
        "".join(entry[2])
        for name, entry in linecache.cache.items()
        if len(entry) > 2 and os.path.dirname(name) == folder
    ]
    for cells in (history, files):
        if any(re.search(rf"^def {function.__name__}\b", cell, re.MULTILINE) for cell in cells):
            return cells
    return [own]


@functools.cache  # a lesson asks for the hash of each version, and each time for all cells so far
def _parse(text: str) -> list[tuple[ast.stmt, str]]:
    """Return the definitions at the top of a cell with their texts; magics are left out."""
    if text.startswith("%%"):
        return []
    lines = ["" if re.match(r"\s*[%!?]", line) else line for line in text.splitlines()]
    try:
        with provenance.PARSING:
            body = ast.parse("\n".join(lines)).body
    except SyntaxError:  # a cell that did not run
        return []
    found = []
    for statement in body:
        if isinstance(statement, _STATEMENTS):
            first = min(
                [statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))]
            )
            last = statement.end_lineno
            while last < len(lines) and re.match(r"\s+#", lines[last]):  # a comment at the end of a body
                last += 1
            found.append((statement, "\n".join(lines[first - 1 : last])))
    return found


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _used_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement takes from outside."""
    nodes = list(ast.walk(statement))
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own


def collect(texts: Iterable[str], *names: str) -> list[str]:
    """Return the texts of the imports, then of the definitions of `names` and of all that they use, in their order.

    Where a name is defined twice, the last definition counts.
    """
    definitions, order = {}, 0
    for text in texts:
        for statement, code in _parse(text):
            for name in _bound_names(statement):
                definitions[name] = (order := order + 1), statement, code
    wanted, open_names = {}, list(names)
    while open_names:
        name = open_names.pop()
        if name not in definitions or name in wanted:
            continue
        order, statement, code = definitions[name]
        is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
        if is_import:
            alias = next(
                each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name
            )
            kept = (
                ast.Import([alias])
                if isinstance(statement, ast.Import)
                else ast.ImportFrom(statement.module, [alias], statement.level)
            )
            code = ast.unparse(kept)
        wanted[name] = not is_import, order, code
        open_names += _used_names(statement)
    return list(dict.fromkeys(code for *_, code in sorted(wanted.values())))


def hash_of(texts: Iterable[str], *names: str, options: dict | None = None) -> str:
    """Return 16 hex digits that change with the definitions of `names`, with all that they use, and with `options`.

    As for `provenance.source_hash`, comments, layout, imports and the names of local variables do not count.
    """
    dumps = {dump for code in collect(texts, *names) for dump in provenance.dump_normalised(code, "")}
    return hashlib.sha256(repr([sorted(dumps), sorted((options or {}).items())]).encode()).hexdigest()[:16]


def split_prepare(prepare: Callable) -> tuple[Callable, dict]:
    """Return the function below a functools.partial, and its keyword arguments."""
    return (prepare.func, prepare.keywords) if isinstance(prepare, functools.partial) else (prepare, {})


def code_hash(kernel: Any, prepare: Callable | None = None, with_options: bool = True) -> str:
    """Return the hash of a Triton function with what it calls, and of `prepare` where that is a cell's function too.

    `with_options` says whether the keyword arguments of a functools.partial count.
    """
    names, options, texts = [kernel.fn.__name__], {}, texts_of(kernel.fn)
    if prepare is not None:
        function, options = split_prepare(prepare)
        if inspect.isfunction(function) and function.__module__ == kernel.fn.__module__:
            names.append(function.__name__)
            texts = [*texts, *(text for text in texts_of(function) if text not in texts)]
    return hash_of(texts, *names, options=options if with_options else {})


def registered_hash(texts: Sequence[str], version: str, with_options: bool = True) -> str:
    """Return `code_hash` of a version from the texts of cells: "kernel:prepare" or "kernel:prepare(stages=4)"."""
    kernel, _, prepare = version.partition(":")
    call = ast.parse(prepare or "None", mode="eval").body
    options = {each.arg: ast.literal_eval(each.value) for each in getattr(call, "keywords", [])}
    function = getattr(getattr(call, "func", call), "id", None)
    names = [kernel, *([function] if function else [])]
    return hash_of(texts, *names, options=options if with_options else {})


def define(text: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Execute the text of cells as a module of its own, whose source Triton finds, and return its names."""
    name = f"cell_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    linecache.cache[f"<{name}>"] = len(text), None, text.splitlines(keepends=True), f"<{name}>"
    found = {"__name__": name, **(names or {})}
    exec(compile(text, f"<{name}>", "exec"), found)
    return found


# ---- compiling


def record_launch(prepare: Callable, inputs: Sequence) -> _Launch:
    """Return the kernel and the arguments of the first launch that `prepare(*inputs)()` makes; nothing is launched.

    ValueError where it launches no Triton function.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def stop(kernel, *args, grid, warmup=False, **options):
        raise _Launch(kernel, grid, args, options)

    kept = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}
    try:
        for kind in kept:
            kind.run = stop
        prepare(*inputs)()
    except _Launch as launch:
        return launch
    finally:
        for kind, run in kept.items():
            kind.run = run
    raise ValueError(f"{getattr(prepare, '__name__', prepare)} launches no Triton function.")


def _type_of(value: Any) -> str | None:
    """Return Triton's type of an argument; None where it becomes a constant of the kernel."""
    from triton.runtime.jit import mangle_type

    if value is None or (type(value) is int and value == 1):
        return None
    if hasattr(value, "block_shape"):
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{mangle_type(value.base).removeprefix('*')}{list(value.block_shape)}{layout}>"
    return mangle_type(value)


def _general_arguments(kernel: Any) -> list[str]:
    """Return the names of the arguments whose values Triton must not make constants of."""
    if is_interpreted(kernel):
        return [
            kernel.arg_names[each] if isinstance(each, int) else each
            for each in kernel.kwargs.get("do_not_specialize") or ()
        ]
    return [each.name for each in kernel.params if each.do_not_specialize]


def job_of(launch: _Launch, target: str) -> build.Job:
    """Return the build job that compiles what `launch` would launch."""
    function = launch.kernel.fn
    parameters = inspect.signature(function).parameters
    options = {name: value for name, value in launch.options.items() if name not in parameters}
    bound = inspect.signature(function).bind(
        *launch.args_given, **{name: value for name, value in launch.options.items() if name in parameters}
    )
    bound.apply_defaults()
    signature, constants, aligned, general = {}, {}, [], _general_arguments(launch.kernel)
    for name, value in bound.arguments.items():
        value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        is_constant = "constexpr" in str(parameters[name].annotation)
        kind = None if is_constant else "i32" if name in general and value == 1 else _type_of(value)
        if kind is None:
            constants[name] = value
            continue
        signature[name] = kind
        address = value.data_ptr() if hasattr(value, "data_ptr") else value
        if not kind.startswith("tensordesc") and isinstance(address, int) and address % 16 == 0:
            aligned.append(name)
    name, first_lines = f"{function.__name__}", {}
    if function.__module__ != "__main__" and function.__module__ in sys.modules:
        where = function.__module__
    else:
        text = "\n\n".join(collect(texts_of(function), name)) + "\n"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = cuda.cubin_folder() / f"cell_{digest}.py"
        if not path.exists():
            files.write_atomically(path, text)
        where = str(path)
        first_lines = {
            name: value.starting_line_number
            for name, value in function.__globals__.items()
            if hasattr(value, "starting_line_number")
        }
    return build.Job(
        f"{where}:{name}",
        signature,
        constants,
        target,
        options.pop("num_warps", 4),
        options.pop("num_stages", 3),
        tuple(aligned),
        options,
        name,
        first_lines=first_lines,
    )


def compile_launch(prepare: Callable, inputs: Sequence, target: str | None = None) -> build.Report:
    """Compile what `prepare(*inputs)()` launches first, without a GPU, and return the Report.

    Types, alignment, constants and options are those of the launch. The default target is this machine's GPU, or sm_90a
    where none has TMA. The tensors may be on the CPU.
    """
    here = device.current()
    target = target or (here.target if here.has_tma else "sm_90a")
    return build.build_one(job_of(record_launch(prepare, inputs), target))


# ---- showing


def describe_report(report: build.Report, name: str = "") -> str:
    """Return one line with the resources of a build and the instructions in its PTX, or the reason of its failure."""
    text = f"{name or report.job.name} for {report.job.target}: "
    if report.registers is None:
        return text + f"does not compile: {report.reason}"
    text += f"{report.registers} registers, {report.smem:,} B of shared memory"
    text += f", {report.spills} B spilled per thread" if report.spills else ""
    if report.status != "ok":
        return f"{text}; it cannot be launched: {report.reason}"
    counts = [f"{count} {name}" for name, count in report.counts.items() if count]
    return text + f", {report.programs_per_sm} per SM" + ("; " + ", ".join(counts) if counts else "")


def describe_changes(before: Any, after: Any) -> str:
    """Return which lines of a Triton function are new or changed since another one, counted from its decorator."""
    old, new = (inspect.getsource(function.fn) for function in (before, after))
    changed = [
        number - 1 for number in cuda_magic.changed_lines(*(_without_marks(text) for text in (old, new)))
    ]
    return (
        f"{len(changed)} of {len(new.splitlines())} lines are new or changed since {before.fn.__name__}: "
        f"{cuda_magic._ranges(changed) or 'none'}"
    )


def _without_marks(text: str) -> str:
    text = re.sub(r"[ \t]*#.*", "", text).replace("//", "div")  # to `changed_lines` // begins a comment
    return re.sub(r"^def \w+", "def _", text, flags=re.MULTILINE)


def lines(text: str, pattern: str) -> str:
    """Return the lines of PTX or SASS that a regular expression matches, alike ones once with their count.

    Lines are alike when they differ in the numbers of registers and in offsets only. Lists of registers are shortened.
    """
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?;)", text, re.MULTILINE)  # of SASS; PTX has none
    found = instructions or [line.strip() for line in text.splitlines()]
    counts = collections.Counter(_shorten(line) for line in found if re.search(pattern, line))
    return "\n".join(f"    {count:4} × {line}" for line, count in counts.items()) or "    (no such line)"


def _shorten(line: str) -> str:
    line = re.sub(r"\{\s*(%\w+)(?:\s*,\s*%\w+){2,}\s*\}", "{…}", line)
    line = re.sub(r"%([a-z]+)\d+", r"%\1", re.sub(r"\b(U?[RP])\d+\b", r"\1", line))
    line = re.sub(r"\+-?(0x[0-9a-f]+|\d+)\]", "+n]", line)
    return line if len(line) <= _LONG else line[:_LONG] + "…"
