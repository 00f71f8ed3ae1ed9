"""The house: what a model imports knows nothing of the course, and arrows between rooms point one way."""

import ast
import pathlib
import subprocess
import sys

import pytest

from tilelab import ROOT

TOPICS = sorted(
    path.parent
    for path in ROOT.glob("ch*/*/__init__.py")
    if path.parent.name not in ("lesson", "__pycache__")
)
# From the bottom to the top: a room imports only rooms before it.
ROOMS = ("runtime", "pictures", "records", "measure", "sweeps", "emulator", "cells", "views", "course")
PRODUCT_ROOMS = {"tilelab", "tilelab.runtime"}


def list_imports(path: pathlib.Path) -> set[str]:
    """Return the dotted names that a file imports anywhere; of `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def product_files(topic: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in sorted(topic.glob("*.py")) if path.name != "__main__.py"]


@pytest.mark.parametrize("topic", TOPICS, ids=lambda path: f"{path.parent.name}.{path.name}")
def test_the_product_half_imports_only_the_runtime_and_other_products(topic):
    for path in product_files(topic):
        for name in list_imports(path):
            parts = name.split(".")
            assert "lesson" not in parts, f"{path} imports {name}"
            if parts[0] == "tilelab":
                assert ".".join(parts[:2]) in PRODUCT_ROOMS or parts[1:] == ["ROOT"], f"{path} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms_point_one_way(room):
    below = {*ROOMS[: ROOMS.index(room) + 1], "ROOT"}
    for path in sorted((ROOT / "tilelab" / room).rglob("*.py")):
        for name in list_imports(path):
            parts = name.split(".")
            if parts[0] == "tilelab" and len(parts) > 1 and parts[1] not in ("cli", "command"):
                assert parts[1] in below, f"{path} imports {name}"


def test_a_later_chapter_imports_an_earlier_one_and_tilelab_none():
    for folder in ("tilelab", "ch07", "ch10", "ch14"):
        later = [
            chapter
            for chapter in ("ch07", "ch10", "ch14", "claims")
            if chapter > folder or folder == "tilelab"
        ]
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = {name.split(".")[0] for name in list_imports(path)} & set(later)
            assert not found, f"{path} imports {found}"


def test_tilelab_has_few_doors():
    entries = [path for path in (ROOT / "tilelab").iterdir() if path.name != "__pycache__"]
    assert len([path for path in entries if path.is_dir()]) <= 10
    assert len([path for path in entries if path.is_file()]) <= 4


OPERATORS = """
import sys
import ch07.bulk_copy, ch07.resample, ch10.tile_pipeline, ch10.wgmma_gemm
import ch14.attention, ch14.blockscaled, ch14.descriptors, ch14.gemm, ch14.mx_formats
print(*sorted(sys.modules))
"""


def test_all_operators_load_nothing_of_the_course():
    done = subprocess.run(
        [sys.executable, "-c", OPERATORS], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = [name.split(".") for name in done.stdout.split()]
    ours = [parts for parts in loaded if parts[0] in ("tilelab", "claims") or parts[0].startswith("ch")]
    assert ["ch14", "gemm"] in ours and ["tilelab", "runtime", "plans"] in ours
    course = set(ROOMS) - {"runtime"}
    assert not [".".join(parts) for parts in ours if "lesson" in parts or course & set(parts[1:2])]
    assert not {"matplotlib", "pandas", "IPython", "ipywidgets", "jupyterlab"} & {
        parts[0] for parts in loaded
    }
