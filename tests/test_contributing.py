"""What CONTRIBUTING.md asks of imports and notebooks, where a machine can tell."""

import ast
import functools

from pythons import run_python

from tilelab import ROOT
from tilelab.measure import peers

PACKAGES = ("tilelab", "ch07", "ch10", "ch14", "claims")
# The rooms of tilelab from the bottom to the top: a room imports only rooms before it.
ROOMS = ("runtime", "pictures", "records", "measure", "sweeps", "emulator", "cells", "views", "course")


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_modules():
    """{module name: path} of every file in the course's packages."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {module_name(path): path for path in paths}


MODULES = find_modules()


def imported_modules(name):
    """The files of the course that one file imports, at the top and inside functions, but not for type checking.

    `from a import b` imports the file a/b.py where there is one. To import a.b runs a/__init__.py first, which counts
    too, unless the importing file lies in the package a itself.
    """
    path = MODULES[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    for module in list(found):
        parents = [module.rpartition(".")[0]] if "." in module else []
        while parents and "." in parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        found |= {parent for parent in parents if not f"{name}.".startswith(f"{parent}.")}
    return {module for module in found if module in MODULES}


@functools.cache
def list_imports():
    """{module name: the modules of the course that it imports}."""
    return {name: imported_modules(name) for name in MODULES}


def find_circle(imports):
    """A list of modules, each of which imports the next, that begins and ends with the same one; [] without any."""
    finished = set()

    def visit(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        for other in sorted(imports[name]):
            if circle := visit(other, [*path, name]):
                return circle
        finished.add(name)
        return []

    return next((circle for name in sorted(imports) if (circle := visit(name, []))), [])


def test_a_circle_is_found():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_imports_form_a_circle():
    assert find_circle(list_imports()) == []


def find_imports(is_wrong):
    """(module, module that it imports) of the imports that are wrong."""
    imports = [(name, other) for name, others in list_imports().items() for other in others]
    return [pair for pair in imports if is_wrong(*pair)]


def test_no_file_imports_a_command_line():
    assert not find_imports(lambda name, other: other.endswith("__main__"))


def test_imports_point_from_later_chapters_to_earlier_ones_and_to_tilelab():
    def order(name):
        return PACKAGES.index(name.split(".")[0])

    assert not find_imports(lambda name, other: order(other) > order(name))


def test_the_product_half_imports_only_the_runtime_and_other_products():
    def is_product(name):
        parts = name.split(".")
        return parts[0].startswith("ch") and not {"lesson", "__main__"} & set(parts)

    def is_own(name):
        return is_product(name) or room_of(name) in ("", "runtime")

    assert not find_imports(lambda name, other: is_product(name) and not is_own(other))


def room_of(name):
    """The room of a module of tilelab; "" for tilelab itself, and the whole name for a module of no room."""
    parts = name.split(".")
    return name if parts[0] != "tilelab" else parts[1] if len(parts) > 1 else ""


def test_arrows_between_rooms_point_one_way():
    def is_upwards(name, other):
        if name.endswith("__main__") or not {room_of(name), room_of(other)} <= set(ROOMS):
            return False  # a doorway, which nobody imports, or no room
        return ROOMS.index(room_of(other)) > ROOMS.index(room_of(name))

    assert not find_imports(is_upwards)


def test_tilelab_has_few_doors():
    top = ROOT / "tilelab"
    rooms = {path.relative_to(top).parts[0] for path in top.rglob("*.*") if path.suffix != ".pyc"}
    files = {path.name for path in top.iterdir() if path.is_file()}
    assert len(rooms - files) <= 10 and len(files) <= 4, (rooms, files)


def test_all_operators_load_nothing_of_the_course_and_experiments_no_peer():
    code = """
import sys
import ch07.bulk_copy, ch07.resample, ch10.tile_pipeline, ch10.wgmma_gemm
import ch14.attention, ch14.blockscaled, ch14.descriptors, ch14.gemm, ch14.mx_formats
print(*sys.modules)
import ch10.wgmma_gemm.lesson.experiments, ch14.fp8_gemm.lesson.experiments, ch14.attention.lesson.audit
print(*sys.modules)
"""
    loaded, by_experiments = (set(line.split()) for line in run_python("-c", code).stdout.splitlines())
    ours = loaded & set(MODULES)
    assert {"ch14.gemm", "tilelab.runtime.plans"} <= ours
    course = set(ROOMS) - {"runtime"}
    assert not [
        name for name in ours if ".lesson" in name or name.startswith("claims") or room_of(name) in course
    ]
    assert not loaded & {"matplotlib", "pandas", "IPython", "ipywidgets", "jupyterlab"}
    modules = {kind.MODULE.partition(".")[0] for kind in peers.KINDS.values()}
    assert not by_experiments & {*modules, "cutlass", "tvm_ffi"}, "a peer is imported before it is asked for"


def test_every_chapter_and_topic_is_a_package():
    assert [
        folder
        for folder in {path.parent for path in MODULES.values()}
        if not (folder / "__init__.py").exists()
    ] == [ROOT / "ch14/languages/kernels"]  # its files import other languages, in processes of their own
