"""Say where a measurement comes from: a hash of the measured code, the versions of the software, and the time."""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import pathlib
import platform
import re
import textwrap
import threading
import types
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from tilelab.runtime import cuda, device

PARSING = threading.Lock()  # Python 3.11 counts the depth of its parser for all threads together
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_COURSE = re.compile(r"(ch\d\d|tilelab|claims)\b")
# The packages in front of a module's own name.
_FOLDERS = re.compile(r"\b(?:ch\d\d|tilelab|claims)\.(?:\w+\.)*(?=\w)")
_ERROR_TEXT = "text of an error"


class _Normalise(ast.NodeTransformer):
    """Remove from a syntax tree everything that cannot change a measurement (see `source_hash`)."""

    def __init__(self, modules: set[str]):
        self.modules = modules  # names under which the file imports modules of the course
        # The local variables of the current function, and their neutral names.
        self.local_names: dict[str, str] = {}

    def _normalise_body(self, node):
        if not getattr(node, "type_params", True):  # Python 3.11 does not have this field
            del node.type_params
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            node.body.pop(0)
        node.body = [statement for statement in node.body if not _is_administrative(statement)]
        return self.generic_visit(node)

    visit_Module = visit_ClassDef = _normalise_body

    def visit_FunctionDef(self, node):
        outer, self.local_names = self.local_names, self.local_names or _neutral_local_names(node)
        node = self._normalise_body(node)
        self.local_names = outer
        node.returns = None
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Name(self, node):
        node.id = self.local_names.get(node.id, node.id)
        return node

    def visit_arg(self, node):
        # A constexpr changes what Triton compiles, so its annotation stays.
        if node.annotation and "constexpr" not in ast.unparse(node.annotation):
            node.annotation = None
        return node

    def visit_Constant(self, node):  # a module may move to another package
        return ast.Constant(_FOLDERS.sub("", node.value)) if isinstance(node.value, str) else node

    def visit_Attribute(self, node):  # after a move, `configs.ITEMSIZE` may read `ITEMSIZE`
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)

    def visit_Raise(self, node):
        for part in ast.walk(node):
            for field, value in ast.iter_fields(part):
                if _is_text(value):
                    setattr(part, field, ast.Constant(_ERROR_TEXT))
                elif isinstance(value, list):
                    setattr(
                        part, field, [ast.Constant(_ERROR_TEXT) if _is_text(item) else item for item in value]
                    )
        return self.generic_visit(node)

    def visit_JoinedStr(self, node):  # Python 3.12 adds empty pieces to the format of an f-string
        node.values = [
            part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")
        ]
        return self.generic_visit(node)


def _is_administrative(statement: ast.stmt) -> bool:
    """Return whether a statement only imports, lists `__all__`, or runs the module as a command."""
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in ("__name__ == '__main__'", "TYPE_CHECKING")
    return isinstance(statement, (ast.Import, ast.ImportFrom)) or (
        isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
    )


def _is_text(value: Any) -> bool:
    return (
        isinstance(value, ast.JoinedStr) or isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def _neutral_local_names(function: ast.AST) -> dict[str, str]:
    """Return a neutral name for each variable that a function assigns, except its parameters: callers use those."""
    kept = set(dir(builtins))
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            kept.add(node.arg)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            kept.update(node.names)
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    assigned = dict.fromkeys(
        node.id for node in names if isinstance(node.ctx, ast.Store) and node.id not in kept
    )
    return {name: f"local {number}" for number, name in enumerate(assigned)}


@functools.cache
def _imported_course_modules(whole: str) -> set[str]:
    """Return the names that a file's text binds to modules of the course, as by `from ch14 import gemm`."""
    imports = [node for node in ast.walk(ast.parse(whole)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound = {
        alias.asname or alias.name.split(".")[-1]
        for node in imports
        for alias in node.names
        if _COURSE.match(getattr(node, "module", None) or alias.name)
    }
    return {name for name in bound if not name[:1].isupper()}  # a class keeps its attributes


def _normalised_definitions(thing: Any) -> list[str]:
    if isinstance(thing, pathlib.Path) and thing.suffix != ".py":  # CUDA C++
        headers, _ = cuda.included_headers(thing.read_text(), str(thing), [f"-I{cuda.INCLUDE_FOLDER}"])
        return [cuda.squeeze(text) for text in (thing.read_text(), *headers.values())]
    while not isinstance(thing, (type, types.ModuleType)) and hasattr(thing, "fn"):  # triton.jit, autotune
        thing = thing.fn
    if isinstance(thing, pathlib.Path):
        whole = thing.read_text()
    else:  # of a class inspect finds the file quickly through its module only
        home = inspect.getmodule(thing) if isinstance(thing, type) else thing
        whole = "".join(inspect.findsource(home)[0])
    is_part = not isinstance(thing, (pathlib.Path, types.ModuleType))
    return dump_normalised(_find_part(thing, whole) if is_part else whole, whole)


@functools.cache
def _find_part(thing: Any, whole: str) -> str:
    """Return the source of a function or class, which is a part of the file with the text `whole`."""
    return textwrap.dedent(inspect.getsource(thing))


@functools.cache
def dump_normalised(code: str, whole: str) -> list[str]:
    """Return the normalised statements of `code`, which is a part of the file with the text `whole`."""
    return normalise(ast.parse(code).body, whole)


def normalise(statements: list[ast.stmt], whole: str) -> list[str]:
    """Return statements of the file with the text `whole` without what cannot change a measurement; changes them."""
    tree = _Normalise(_imported_course_modules(whole)).visit(ast.Module(statements, []))
    # not ast.unparse: its quotes differ between 3.11 and 3.12
    return [ast.dump(statement) for statement in tree.body]


def source_hash(*things: Any) -> str:
    """Return 16 hex digits that change when the code of `things` changes.

    `things` are functions, Triton kernels, classes, modules, or the Path of a Python or CUDA C++ file. A CUDA C++ file
    counts together with the headers that it includes in quotes. A function that the code calls counts only when it is
    given too. Comments, docstrings, layout, types of arguments, imports, texts of errors, names of local variables,
    `__main__` blocks, names of files and of packages, and the order of definitions do not count, because they cannot
    change a measurement.
    """
    with PARSING:
        definitions = {text for thing in things for text in _normalised_definitions(thing)}
        return hashlib.sha256("\n".join(sorted(definitions)).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of the software that a measurement depends on; None for a package that is not installed."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "driver": device.current().driver,
        "cublas": _version("nvidia-cublas"),
    }


def utc_now() -> str:
    """Return the time as records hold it: "2026-11-21T04:50:17Z"."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
