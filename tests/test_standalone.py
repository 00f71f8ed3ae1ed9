"""The kernel of a chapter in one file: without the course's headers, right in the emulator, and built in one line."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from cases import cases

from tilelab import ROOT, emulator
from tilelab.cells import check_kernel, cuda_magic, lesson

pytestmark = pytest.mark.compile
needs_emulator = pytest.mark.skipif(not emulator.is_available(), reason="needs g++")
RING, TRANSPOSE = FILES = ("ring_copy", "transpose")
FOLDER = ROOT / "notebooks" / "standalone"


def run(file, folder, *change):
    """Return the exit status of the emulator's command for a file of a chapter, in which a text is replaced."""
    path = FOLDER / f"{file}.cu"
    text = path.read_text()
    if change:
        assert change[0] in text
        text = text.replace(*change)
    (folder / path.name).write_text(text)
    launch = FOLDER / f"launch_{file}.py"
    return check_kernel.main([str(folder / path.name), "--launch", str(launch), "--seeds", "2"])


@needs_emulator
@pytest.mark.parametrize("file", FILES)
def test_it_is_right_and_compiles(file, tmp_path, capsys):
    assert run(file, tmp_path) == 0
    assert re.search(r"is right under 2 timings.*\n.* for sm_90a: .*SYNCS", capsys.readouterr().out)


@needs_emulator
@cases(
    "file, change",
    (RING, ("use / STAGES % 2", "use % 2")),
    (TRANSPOSE, ("fence.proxy.async.shared::cta;", "")),
    (TRANSPOSE, ("        __syncthreads();  // the engine has read", "        // the engine has read")),
)
def test_a_fault_is_found(file, change, tmp_path):
    assert run(file, tmp_path, *change) == 1


@needs_emulator
@pytest.mark.parametrize("file", FILES)
def test_it_needs_nothing_of_the_course(file, tmp_path):
    text = (FOLDER / f"{file}.cu").read_text()
    found = {"cuda.h", "cuda_runtime.h", "stdint.h", "stdio.h", "stdlib.h"}
    assert found >= set(re.findall(r"#include <(.*)>", text))
    assert '#include "' not in text
    assert all(kernel.cubin for kernel in cuda_magic.find_kernels(text, target="sm_90a").values())  # by NVRTC
    build = re.match(r"// (nvcc .*) && ", text)[1]
    if shutil.which("nvcc"):
        shutil.copy(FOLDER / f"{file}.cu", tmp_path)
        subprocess.run(build, shell=True, check=True, cwd=tmp_path, capture_output=True)
        assert (tmp_path / re.search(r"-o (\w+)", build)[1]).is_file()


GEMM = FOLDER / "descriptor_gemm.py"


def test_the_gemm_is_right_without_the_course(tmp_path):
    shutil.copy(GEMM, tmp_path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, GEMM.name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.count(": right, ") == 3
    imported = {
        (each.module if isinstance(each, ast.ImportFrom) else each.names[0].name).partition(".")[0]
        for each in ast.walk(ast.parse(GEMM.read_text()))
        if isinstance(each, (ast.Import, ast.ImportFrom))
    }
    assert imported == {"os", "sys", "torch", "triton"}


@pytest.mark.planted
@cases(
    "change",
    ("tile_id_c = tl.program_id(0) - PROGRAMS", "tile_id_c = tl.program_id(0)"),
    ("n + 3 * part", "n + 2 * part"),
)
def test_a_fault_of_the_gemm_is_found(change, tmp_path, capsys):
    text = GEMM.read_text()
    assert change[0] in text
    (tmp_path / GEMM.name).write_text(text.replace(*change))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / GEMM.name), run_name="__main__")
    assert ended.value.code == 1 and "WRONG" in capsys.readouterr().out


def test_the_gemm_loads_multiplies_and_stores_by_hoppers_instructions():
    found = lesson.define(GEMM.read_text())
    a, weight, out = found["make_case"](256, 256, 256, "cpu")
    report = lesson.compile_launch(lambda *tensors: found["prepare"](*tensors, 2), (a, weight, out), "sm_90a")
    assert report.launchable and report.programs_per_sm == 2
    assert report.counts["tma_load"] and report.counts["tma_store"] and report.counts["wgmma"]
