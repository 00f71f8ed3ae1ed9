"""Find what a record's figures depend on beside its kernels: the code that measures, peers, shapes and tuned tables.

From the statement that defines an experiment, names lead to the functions and constants of the course that it uses, and
from those to others. A hash of all of them is the record's `environment`. As for `provenance.source_hash`, comments,
docstrings, layout, texts of errors and names of files do not count. Nothing is imported or run: only files are read.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tilelab import ROOT
from tilelab.runtime import cuda, device, provenance

COURSE = re.compile(r"(?:ch\d\d|tilelab|claims)(?:\.\w+)*")
NAMED = re.compile(r"((?:ch\d\d|tilelab|claims)(?:\.\w+)+)(?::(\w+))?")  # "ch14.gemm.kernels:gemm_kernel"
# Rooms that cannot alter a figure: they write and show rows, or run kernels without a GPU.
CANNOT_ALTER = (
    "tilelab.records tilelab.pictures tilelab.views tilelab.course tilelab.emulator tilelab.runtime.interpreter "
    "tilelab.runtime.provenance tilelab.runtime.files tilelab.runtime.spoken tilelab.cli"
).split()
OWN = ", the user's own"  # behind the name of a table
LADDER, TABLES = ("tilelab.cells.lesson", "Ladder"), "tilelab.runtime.choice"
DEFINES = re.compile("adder|sweep|experiment|make_record")  # in the name of a call that defines an experiment
CUDA = (".cu", ".cuh", ".h", ".hpp", ".cpp")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Name = tuple[str, str]  # a module, and a name in it; "*" for all of them


def read_imports(statement: ast.Import | ast.ImportFrom) -> dict[str, Name]:
    """Return {name that is bound: (module, name in it, or "" for the module itself)}."""
    if isinstance(statement, ast.ImportFrom):
        return {each.asname or each.name: (statement.module or "", each.name) for each in statement.names}
    whole = {each.asname or each.name.split(".")[0]: each for each in statement.names}
    return {name: (each.name if each.asname else name, "") for name, each in whole.items()}


def read_chain(node: ast.AST) -> tuple[str, ...]:
    """Return ("bench", "compare") of `bench.compare`; () for anything but names and dots."""
    if isinstance(node, ast.Name):
        return (node.id,)
    chain = read_chain(node.value) if isinstance(node, ast.Attribute) else ()
    return (*chain, node.attr) if chain else ()


def list_bound(*nodes: ast.AST) -> set[str]:
    """Return the names that nodes assign."""
    found = (node for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, ast.Store)}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@dataclasses.dataclass
class Mention:
    """Hold a statement that defines experiments by a name or its `beginning`, and the Ladder's `method` it calls."""

    module: Module
    statement: ast.stmt
    name: str
    beginning: bool
    method: str


class Module:
    """The top-level statements of a file by the names that they bind, its imports, and statements that bind none."""

    def __init__(self, name: str, path: pathlib.Path, code: str) -> None:
        self.name, self.path, self.code = name, path, code
        self.statements, self.effects = ast.parse(code).body, []
        self.defined: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, Name] = {}
        self._known: dict[tuple[int, bool], tuple[References, list[str]]] = {}
        for statement in self.statements:
            self._add(statement, statement)

    def read(self, statement: ast.stmt, without_methods: bool) -> tuple[References, list[str]]:
        """Return what a statement uses, and its normalised code, without decorators that register an experiment."""
        key = id(statement), without_methods
        if key not in self._known:
            kept = copy.deepcopy(statement)
            if isinstance(kept, DEFINITIONS):
                found = [each for each in kept.decorator_list if "experiment" not in ast.unparse(each)]
                kept.decorator_list = found
            if without_methods:
                kept.body = [each for each in kept.body if not isinstance(each, DEFINITIONS)] or [ast.Pass()]
            used = References(self.imports)
            used.visit(kept)
            if used.reads_by_name:
                used.attributes.update(word for text in used.texts for word in text.split())
            self._known[key] = used, provenance.normalise([kept], self.code)
        return self._known[key]

    def _add(self, part: ast.stmt, whole: ast.stmt) -> None:
        if isinstance(part, (ast.Import, ast.ImportFrom)):
            self.imports |= read_imports(part)
        elif isinstance(part, (ast.If, ast.Try)):
            parts = [*part.body, *part.orelse, *getattr(part, "finalbody", ())]
            parts += [each for handler in getattr(part, "handlers", ()) for each in handler.body]
            for each in parts if not ast.unparse(part).startswith("if __name__ ==") else ():
                self._add(each, whole)
        else:
            for name in (bound := {part.name} if isinstance(part, DEFINITIONS) else list_bound(part)):
                self.defined.setdefault(name, []).append(whole)
            is_docstring = isinstance(part, ast.Expr) and is_text(part.value)
            if not (bound or is_docstring or "register" in ast.unparse(part).partition("(")[0]):
                self.effects.append(whole)

    @functools.cached_property
    def mentions(self) -> list[Mention]:
        """The experiments that are defined here."""
        return [each for statement in self.statements for each in self.list_mentions(statement)]

    def list_mentions(self, statement: ast.stmt) -> Iterator[Mention]:
        """Yield the experiments that a statement defines.

        It does so by a call that takes the name, or an f-string with its beginning, or by a default argument of a
        function that makes a ladder.
        """
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef) and "ladder" in node.name:
                arguments, callee = node.args.defaults, "ladder"
            elif isinstance(node, ast.Call):
                arguments, callee = node.args, ast.unparse(node.func).rpartition(".")[2]
            else:
                continue
            if (made := DEFINES.search(callee)) and "register" not in callee:
                method = {"adder": "_measure", "sweep": "sweep"}.get(made[0], "")
                for each in arguments:
                    start = each.values[0] if isinstance(each, ast.JoinedStr) and each.values else each
                    if is_text(start) and len(start.value) > 5:
                        yield Mention(self, statement, start.value, start is not each, method)


@functools.cache
def parse(name: str, path: pathlib.Path, text: str) -> Module:
    """Return the Module of a file, or of a notebook's code cells that are Python, without their lines of magics.

    ValueError names a file that is neither.
    """
    try:
        return _parse(name, path, text)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be parsed: {type(error).__name__}: {error}.") from error


def _parse(name: str, path: pathlib.Path, text: str) -> Module:
    if path.suffix == ".py":
        return Module(name, path, text)
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    texts = []
    for cell in cells:
        lines = [line for line in cell.splitlines() if not line.lstrip().startswith(("%", "!"))]
        with contextlib.suppress(SyntaxError):
            if not cell.startswith("%%") and ast.parse("\n".join(lines)):
                texts += lines
    module = Module(name, path, "\n".join(texts))
    module.effects.clear()  # they show something
    return module


class References(ast.NodeVisitor):
    """Collect what a statement uses: dotted names that are not local, attributes, texts, and calls with a text."""

    def __init__(self, imports: Mapping[str, Name]) -> None:
        self.imports = dict(imports)
        self.chains: set[tuple[str, ...]] = set()
        self.attributes: set[str] = set()
        self.texts: set[str] = set()
        self.calls: list[tuple[tuple[str, ...], str]] = []
        self._scopes: list[set[str]] = []
        self.reads_by_name = False

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.imports |= read_imports(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.Lambda) -> None:
        body = node.body if isinstance(node.body, list) else [node.body]
        inner = [each for statement in body for each in ast.walk(statement)]
        bound = list_bound(*body) | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        bound |= {each.name for each in inner if isinstance(each, DEFINITIONS)}
        bound -= {name for each in inner if isinstance(each, ast.Global) for name in each.names}
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        for each in (*getattr(node, "decorator_list", ()), *defaults):
            self.visit(each)
        self._visit_scope(bound, body)

    def _visit_comprehension(self, node: ast.AST) -> None:
        self._visit_scope(list_bound(node), ast.iter_child_nodes(node))

    visit_ImportFrom = visit_Import
    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef
    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _visit_scope(self, bound: set[str], nodes: Iterable[ast.AST]) -> None:
        self._scopes.append(bound)
        for each in nodes:
            self.visit(each)
        self._scopes.pop()

    def visit_Expr(self, node: ast.Expr) -> None:
        if not is_text(node.value):  # a docstring
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        texts = set(self.texts)
        self.generic_visit(node)
        self.texts = texts

    def visit_Name(self, node: ast.Name) -> None:
        self._add_chain((node.id,))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        if chain := read_chain(node):
            self.attributes.update(chain[1:])
            self._add_chain(chain)
        else:
            self.generic_visit(node)

    def _add_chain(self, chain: tuple[str, ...]) -> None:
        if not any(chain[0] in scope for scope in self._scopes):
            self.chains.add(chain)

    def visit_Call(self, node: ast.Call) -> None:
        chain, texts = read_chain(node.func), [each.value for each in node.args if is_text(each)]
        if chain and texts:
            self.calls.append((chain, texts[0]))
        self.generic_visit(node)
        # The name that these take may be in any text here.
        self.reads_by_name |= bool({*chain[-1:]} & {"getattr", "attrgetter", "methodcaller"})

    def visit_Constant(self, node: ast.Constant) -> None:
        if is_text(node):
            self.texts.add(node.value)


@dataclasses.dataclass
class Part:
    """Hold the code of a statement, without the parts that cannot alter a figure, and the names that it uses."""

    definitions: list[str]
    names: set[Name]
    attributes: set[str]
    tables: set[str]
    methods: list[ast.stmt]  # of a class, for those who use their names


class Code:
    """The files of the course. `changes` ({path: text}) replaces the texts of some files, for a test."""

    def __init__(self, root: pathlib.Path = ROOT, changes: Mapping[str, str] | None = None) -> None:
        self.root, self._changes = root, {root / path: text for path, text in (changes or {}).items()}
        self._modules: dict[str, Module | None] = {}
        self._parts: dict[int, Part] = {}

    def read(self, path: pathlib.Path) -> str:
        """Return the text of a file."""
        return self._changes.get(path) or path.read_text(encoding="utf-8")

    def module(self, name: str) -> Module | None:
        """Return a module of the course, or None for another one."""
        if name not in self._modules:
            stem = self.root / name.replace(".", "/")
            paths = (stem.with_suffix(".py"), stem / "__init__.py") if COURSE.fullmatch(name) else ()
            path = next((each for each in paths if each.is_file()), None)
            self._modules[name] = path and parse(name, path, self.read(path))
        return self._modules[name]

    @functools.cached_property
    def lessons(self) -> list[Module]:
        """The modules and notebooks that may define experiments. ValueError in a wheel, which has no notebooks."""
        if not (self.root / "notebooks").is_dir():
            raise ValueError(
                f"what a record depends on is found in the source tree; {self.root} has no notebooks."
            )
        paths = [*self.root.glob("ch[0-9][0-9]/**/*.py"), *self.root.glob("claims/audits/*.py")]
        paths = sorted([*paths, self.root / "tilelab/measure/bench.py"])
        stems = [
            path.relative_to(self.root).with_suffix("")
            for path in paths
            if re.search(r"(adder|sweep|experiment|record)\(", self.read(path))
        ]
        names = [".".join(stem.parts).removesuffix(".__init__") for stem in stems]
        notebooks = {path.stem: path for path in sorted(self.root.glob("notebooks/*.ipynb"))}
        self._modules |= {name: parse(name, path, self.read(path)) for name, path in notebooks.items()}
        return [self.module(name) for name in (*names, *notebooks)]

    def find_roots(self, experiment: str) -> list[tuple[Module, ast.stmt, str]]:
        """Return where an experiment is defined: (module, statement, the method of a Ladder that measures, or "")."""
        mentions = [each for module in self.lessons for each in module.mentions]
        found = [each for each in mentions if each.name == experiment and not each.beginning]
        found = found or [each for each in mentions if each.beginning and experiment.startswith(each.name)]
        roots = [(each.module, each.statement, each.method) for each in found]
        for each in found:
            if each.method and isinstance(each.statement, ast.FunctionDef):
                roots += [(*caller, "") for caller in self._find_callers(each.module, each.statement.name)]
        return roots

    def _find_callers(self, module: Module, maker: str) -> Iterator[tuple[Module, ast.stmt]]:
        """Yield the statements that call a function that makes a ladder, unless they name an experiment themselves."""
        for other in (each for each in self.lessons if f"{maker}(" in each.code):
            for statement in other.statements:
                calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
                for call in calls if not list(other.list_mentions(statement)) else ():
                    chain = read_chain(call.func)
                    if chain and self.resolve(other, chain, other.imports) == (module.name, maker):
                        if not any(map(is_text, call.args)):
                            yield other, statement

    def resolve(self, module: Module, chain: tuple[str, ...], imports: Mapping[str, Name]) -> Name | None:
        """Return the Name that a dotted name of a module means; None for one that is not of the course."""
        first, *rest = chain
        if first not in imports:
            return (module.name, first) if first in module.defined else None
        current, name = imports[first]
        rest = [name, *rest] if name else rest
        while rest and self.module(f"{current}.{rest[0]}"):
            current = f"{current}.{rest.pop(0)}"
        return self._find(current, rest[0] if rest else "*")

    def _find(self, where: str, name: str) -> Name | None:
        module = self.module(where)
        if module is None or name in module.defined or name == "*":
            return module and (where, name)
        return self.resolve(module, (name,), module.imports) if name in module.imports else None

    def analyse(self, module: Module, statement: ast.stmt) -> Part:
        """Return what a statement says and uses; the methods of a class are apart, unless a library may call them."""
        if found := self._parts.get(id(statement)):
            return found
        is_class = isinstance(statement, ast.ClassDef)
        bases = [read_chain(base) or ("",) for base in statement.bases] if is_class else ()
        apart = is_class and all(self.resolve(module, base, module.imports) for base in bases)
        methods = [each for each in statement.body if isinstance(each, DEFINITIONS)] if apart else []
        used, definitions = module.read(statement, apart)
        names = {self.resolve(module, chain, used.imports) for chain in used.chains}
        calls = [(text, self.resolve(module, chain, used.imports)) for chain, text in used.calls]
        tables = {text for text, name in calls if name and name[0] == TABLES}
        for text in used.texts:
            if named := NAMED.fullmatch(text):  # a process of its own imports it
                names.add(self._find(named[1], named[2] or "*"))
            elif text.endswith(CUDA) and (path := module.path.parent / text).is_file():
                source = self.read(path)
                headers, _ = cuda.included_headers(source, str(path), [f"-I{cuda.INCLUDE_FOLDER}"])
                definitions = [*definitions, *map(cuda.squeeze, (source, *headers.values()))]
        names = {name for name in names if name and not cannot_alter(name[0])}
        self._parts[id(statement)] = Part(definitions, names, used.attributes, tables, methods)
        return self._parts[id(statement)]


def cannot_alter(module: str) -> bool:
    """Return whether a module is in one of CANNOT_ALTER."""
    return any(f"{module}.".startswith(f"{room}.") for room in CANNOT_ALTER)


class Closure:
    """Hold all that an experiment reaches: its `definitions` (normalised code), and the names of `tables`."""

    def __init__(self, code: Code, experiment: str) -> None:
        self.definitions, self.tables = set(), set()
        self._code, self._reached, self._attributes = code, set(), set()
        self._methods: dict[
            str, list[tuple[Module, ast.stmt]]
        ] = {}  # of reached classes, not yet reached themselves
        self._left: list[tuple[Module, ast.stmt]] = []
        for module, statement, method in code.find_roots(experiment):
            if method:
                self._attributes.add(method)
                self._reach(LADDER)
            self._left.append((module, statement))
        while self._left:
            self._include(*self._left.pop())

    def _reach(self, name: Name) -> None:
        if name not in self._reached:
            self._reached.add(name)
            module = self._code.module(name[0])
            found = module.defined.values() if name[1] == "*" else [module.defined[name[1]]]
            # Importing a module also runs the statements that define nothing.
            self._left += [
                (module, each) for each in (*(each for part in found for each in part), *module.effects)
            ]

    def _include(self, module: Module, statement: ast.stmt) -> None:
        if id(statement) in self._reached:
            return
        self._reached.add(id(statement))
        part = self._code.analyse(module, statement)
        self.definitions.update(part.definitions)
        self.tables |= part.tables
        for method in part.methods:
            used = method.name.startswith("__") or method.name in self._attributes
            (self._left if used else self._methods.setdefault(method.name, [])).append((module, method))
        for name in part.attributes - self._attributes:
            self._attributes.add(name)
            self._left += self._methods.pop(name, ())
        for name in part.names:
            self._reach(name)


CODE = Code()
find_closure = functools.cache(functools.partial(Closure, CODE))


def digest(value: Any) -> str:
    """Return 16 hex digits that change when a value changes that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def hash_table(table: str, gpu: str, rows: Iterable[Mapping], code: Code) -> str | None:
    """Return the hash of the part of a GPU's table that a record's rows used, or None if there is no such table.

    The part is the table's rows of the same shapes, or all its rows if it lacks one of the shapes.
    """
    path = code.root / "tuned" / device.Device(gpu).slug / f"{table}_families.json"
    if not path.is_file():
        return None
    found = json.loads(code.read(path))
    known = dict(zip(map(tuple, found["shapes"]), found["errors"]))
    shapes = {tuple(row.get("shape") or ()) for row in rows}
    used = shapes if shapes and shapes <= known.keys() else known.keys()
    return digest([found["families"], sorted([shape, known[shape]] for shape in used)])


def hash_own_rows(table: str, gpu: str, rows: Iterable[Mapping]) -> str | None:
    """Return the hash of the user's own tuned rows that a record's rows may have used, or None without any.

    These are the rows of the same shapes, or all rows if a record's row has no shape of a product. What TILES_TUNED
    holds in place of the course's table counts too.
    """
    from tilelab.runtime import tuned  # which imports torch; the doctor reads this module without

    used: list[Any] = []
    with contextlib.suppress(ValueError):  # an operator passes over a damaged table
        used = tuned.load(table, gpu)
    shapes = {tuple(row.get("shape") or ()) for row in rows}
    if all(len(shape) == 3 for shape in shapes):
        used = [row for row in used if (row["m"], row["n"], row["k"]) in shapes]
    instead = tuned.folder() / device.Device(gpu).slug / f"{table}_families.json"
    if os.environ.get("TILES_TUNED") and instead.is_file():
        used = [*used, instead.read_text(encoding="utf-8")]
    return digest(used) if used else None


def describe(experiment: str, gpu: str, rows: Iterable[Mapping], code: Code = CODE) -> dict[str, Any]:
    """Return the `environment` of a record: the hash of the code, and one of each table that the code reads.

    A table of the user's own has OWN behind its name.

    The result is empty for an experiment that is not defined in the course.
    """
    with provenance.PARSING:
        closure = find_closure(experiment) if code is CODE else Closure(code, experiment)
    rows = list(rows)
    tables = {table: hash_table(table, gpu, rows, code) for table in sorted(closure.tables)}
    tables |= {table + OWN: hash_own_rows(table, gpu, rows) for table in sorted(closure.tables)}
    tables = {table: found for table, found in tables.items() if found}
    return {"code": digest(sorted(closure.definitions)), "tables": tables} if closure.definitions else {}


def find_change(record: Mapping[str, Any], code: Code = CODE) -> str:
    """Return a clause that says what has changed since a record was made, or "" also where it has no environment."""
    if not (before := record.get("environment")):
        return ""
    now = describe(record["experiment"], record["device"]["name"], record["rows"], code)
    if before["code"] != now.get("code"):
        return "the code that measures, a peer or a shape has changed"
    old, new = before["tables"], now["tables"]
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # Rows that a user has tuned since do not make a record older.
    if own := [name.removesuffix(OWN) for name in changed if name in old and name.endswith(OWN)]:
        return f"it was measured with a user's own tuned rows of {', '.join(own)}, which are not here"
    changed = [name for name in changed if not name.endswith(OWN)]
    return f"the rows of the tuned table {', '.join(changed)} have changed" if changed else ""
