"""The wheel that `pip install .` builds: what a model needs, and the records that the notebooks show."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from tilelab import ROOT


@pytest.mark.compile
def test_the_wheel_holds_the_operators_and_their_tables(tmp_path):
    build = "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    copy = tmp_path / "source"  # setuptools leaves its own folders where it builds
    copy.mkdir()
    leave_out = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info")
    for path in ROOT.iterdir():
        if path.is_dir() and path.name.startswith(("ch", "tilelab", "claims", "tuned", "tests", "results")):
            shutil.copytree(path, copy / path.name, symlinks=True, ignore=leave_out)
        elif path.is_file():
            shutil.copy(path, copy)
    done = subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=copy, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        names = wheel.namelist()
        needs = next(wheel.read(name).decode() for name in names if name.endswith("METADATA"))
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "tilelab", "ch07", "ch10", "ch14", "tiles_in_flight",
    }  # fmt: skip
    records = f"{next(name for name in names if 'METADATA' in name).split('.dist')[0]}.data/data/share/tiles-in-flight"
    for kept in (
        f"{records}/results/nvidia-h200/ch07_bulk_check.json",
        "ch10/wgmma_gemm/wgmma_gemm.cu",
        "tilelab/include/tma.cuh",
        "tilelab/runtime/tuned_tables/nvidia-h200/gemm_families.json",
        "ch14/py.typed",
    ):
        assert kept in names
    assert not [name for name in names if name.endswith((".ipynb", ".toml")) or "/tests/" in name]
    for package in ("torch", "triton", "cuda-core", "numpy", "filelock", "tqdm"):
        assert f"Requires-Dist: {package}" in needs
