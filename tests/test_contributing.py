"""What CONTRIBUTING.md asks of a module, where a machine can tell."""

import json
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LINES = 300
CELLS = 45
ALL_STEPS = "every step of one kernel, from the simplest to the last, for the same compiler run"
LONGER = {
    "ch07/resample/resample.cu": ALL_STEPS, "ch10/tile_pipeline/tile_pipeline.cu": ALL_STEPS, "ch10/wgmma_gemm/wgmma_gemm.cu": ALL_STEPS,
    "ch14/blockscaled/fp8.cu": "one kernel",
    "ch07/resample/experiments.py": "all experiments of one notebook",
    "ch10/tile_pipeline/experiments.py": "all experiments of one notebook", "ch10/wgmma_gemm/experiments.py": "all experiments of one notebook",
    "ch14/descriptors/experiments.py": "all experiments of one notebook",
    "ch10/tile_pipeline/figures.py": "six drawings, none of which uses another", "ch10/tile_pipeline/explorer.py": "one widget and what it draws",
    "ch14/gemm/__init__.py": "two kernels and their launcher", "ch14/gemm/configs.py": "one model of what a configuration needs",
    "ch14/mx_formats/__init__.py": "both ways of each format, and the checks of arguments",
    "ch14/blockscaled/native.py": "one launcher, and what every target makes of it",
    "ch14/blockscaled/__main__.py": "the note's whole command line",
    "tilelab/sweep.py": "one class", "tilelab/panel.py": "one class",
    "tilelab/panel_html.py": "one page's texts, tables and styles",
    "tilelab/doctor.py": "a list of checks, one after the other", "tilelab/plots.py": "six plots that share a frame",
    "tilelab/results.py": "records and tables: one format, read and written", "tilelab/cuda.py": "one way to a kernel",
}


def modules():
    listed = subprocess.run(["git", "ls-files", "*.py", "*.cu", "*.cuh"], capture_output=True, text=True, cwd=ROOT,
                            check=False)
    if listed.returncode:
        pytest.skip("needs a clone")
    return {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in listed.stdout.split()
            if not path.startswith("tests/") and (ROOT / path).exists()}


def test_a_long_module_has_a_reason():
    """A reason that a reader accepts: what would have to be torn apart to make it shorter."""
    long = {path for path, lines in modules().items() if lines > LINES}
    assert long - set(LONGER) == set(), "split it, or say why it stays whole"
    assert set(LONGER) - long == set(), "no reason is needed any more"


def test_a_notebook_stays_short():
    cells = {path.name: len(json.loads(path.read_text(encoding="utf-8"))["cells"])
             for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert cells and {name: count for name, count in cells.items() if count > CELLS} == {}
