"""The kernel of a chapter in one file: without the course's headers, right in the emulator, and built in one line."""

import re
import shutil
import subprocess

import pytest

from tilelab import ROOT, emulator
from tilelab.cells import check_kernel, cuda_magic

pytestmark = [pytest.mark.compile, pytest.mark.skipif(not emulator.is_available(), reason="needs g++")]
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


@pytest.mark.parametrize("file", FILES)
def test_it_is_right_and_compiles(file, tmp_path, capsys):
    assert run(file, tmp_path) == 0
    assert re.search(r"is right under 2 timings.*\n.* for sm_90a: .*SYNCS", capsys.readouterr().out)


@pytest.mark.parametrize(
    "file, change",
    [
        (RING, ("use / STAGES % 2", "use % 2")),
        (RING, ("wait_group.read 1;", "wait_group.read 2;")),
        (TRANSPOSE, ("fence.proxy.async.shared::cta;", "")),
        (TRANSPOSE, ("use / STAGES % 2", "0")),
        (TRANSPOSE, ("        __syncthreads();  // the engine has read", "        // the engine has read")),
    ],
)
def test_a_fault_is_found(file, change, tmp_path):
    assert run(file, tmp_path, *change) == 1


@pytest.mark.parametrize("file", FILES)
def test_it_needs_nothing_of_the_course(file, tmp_path):
    text = (FOLDER / f"{file}.cu").read_text()
    assert {"cuda.h", "cuda_runtime.h", "stdint.h", "stdio.h", "stdlib.h"} >= set(
        re.findall(r"#include <(.*)>", text)
    )
    assert '#include "' not in text
    assert all(kernel.cubin for kernel in cuda_magic.find_kernels(text, target="sm_90a").values())  # by NVRTC
    build = re.match(r"// (nvcc .*) && ", text)[1]
    if shutil.which("nvcc"):
        shutil.copy(FOLDER / f"{file}.cu", tmp_path)
        subprocess.run(build, shell=True, check=True, cwd=tmp_path, capture_output=True)
        assert (tmp_path / re.search(r"-o (\w+)", build)[1]).is_file()
