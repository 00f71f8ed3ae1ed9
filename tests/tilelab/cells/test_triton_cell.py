"""Triton and Gluon functions of cells: found by name, compiled without a GPU, checked in the interpreter, hashed."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from ipykernel.compiler import XCachingCompiler
from IPython.core.interactiveshell import InteractiveShell

import ch14  # noqa: F401 (it selects the interpreter before triton is imported)
from tilelab import ROOT
from tilelab.cells import lesson, triton_cell
from tilelab.emulator import gluon as gluon_emulator
from tilelab.records import results
from tilelab.runtime import device

CELLS = [
    """import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor""",
    """%pwd
SCALE = tl.constexpr(3)


@triton.jit
def scale(x):
    return x * SCALE  # a helper of its own cell""",
    """@triton.jit
def scale_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, scale(tl.load(x_ptr + at, at < n)), at < n)


def prepare_scale(x, out, block=64):
    n = x.numel()
    return lambda: scale_kernel[(triton.cdiv(n, block),)](x, out, n, BLOCK=block, num_warps=2)""",
    """@triton.jit
def rows_kernel(x_desc, out_desc, M, BLOCK: tl.constexpr):
    for row in range(0, M, BLOCK):
        out_desc.store([row, 0], 3 * x_desc.load([row, 0]))


def prepare_rows(x, out):
    descriptors = [TensorDescriptor.from_tensor(each, [16, 64]) for each in (x, out)]
    return lambda: rows_kernel[(1,)](*descriptors, x.shape[0], BLOCK=16)""",
    """@gluon.jit
def gluon_kernel(x_ptr, out_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(out_ptr + at, 3 * gl.load(x_ptr + at, at < n), at < n)


def prepare_gluon(x, out):
    n = x.numel()
    return lambda: gluon_kernel[(triton.cdiv(n, 512),)](x, out, n, BLOCK=512, num_warps=4)""",
]
TEXT = "\n\n\n".join(CELLS).replace("%pwd\n", "")
NAMES = lesson.define(TEXT)
CASES = {"cpu": [(40, 64), (3, 7)], "cuda": [(4000, 64), (3, 7)]}
pytestmark = pytest.mark.compile


def make_inputs(case=(160, 64), where=None):
    x = torch.randn(case, device=where or ("cuda" if device.current().has_tma else "cpu"))
    return x, torch.empty_like(x)


def spec(x):
    return 3 * x.double()


def check(prepare):
    return lesson.check_launch(prepare, CASES, make_inputs, spec)


def make_ladder():
    def prepare_torch(x, out):
        return lambda: torch.mul(x, 3, out=out)

    return lesson.Ladder(
        "test_triton_ladder", "torch", prepare_torch, make_inputs, check, nbytes=2 * 160 * 64 * 4
    )


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILES_RESULTS", str(tmp_path))
    monkeypatch.setenv("TILES_CUBINS", str(tmp_path / "cubins"))


def test_a_function_brings_what_it_uses_and_no_more():
    code = "\n".join(triton_cell.collect(CELLS, "scale_kernel"))
    assert "def scale(" in code and "SCALE = " in code and "import triton.language as tl" in code
    assert "rows_kernel" not in code and "import torch" not in code and "prepare_scale" not in code


@pytest.mark.parametrize(
    "kernel, prepare",
    [("scale_kernel", "prepare_scale"), ("rows_kernel", "prepare_rows"), ("gluon_kernel", "prepare_gluon")],
)
def test_a_launch_is_compiled_as_it_would_run(kernel, prepare):
    report = lesson.compile_launch(NAMES[prepare], make_inputs(), "sm_90a")
    assert report.status == "ok", report.compiler_output
    assert report.threads == (64 if kernel == "scale_kernel" else 128)
    assert report.counts["tma_load"] == (kernel == "rows_kernel")
    assert "registers" in lesson.describe_report(report) and "LDG" in lesson.lines(report.sass, "LDG") + "LDG"
    assert "n" in report.job.signature or kernel == "rows_kernel"


def test_a_launch_finds_the_build_of_its_cell_in_the_cache(tmp_path):
    """Triton's key holds the lines of all functions. A launch on a GPU asks for it as `warmup` does here."""
    (tmp_path / "cells.json").write_text(json.dumps(CELLS))
    script = """
import json, linecache, os, sys, torch, triton
from triton.backends.compiler import GPUTarget
from types import SimpleNamespace
from tilelab.cells import triton_cell
folder, names = sys.argv[1], {"__name__": "__main__"}
for number, text in enumerate(json.load(open(f"{folder}/cells.json"))):
    text, file = text.replace("%pwd", "") + "\\n", f"{folder}/{number}.py"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    exec(compile(text, file, "exec"), names)
triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=int, get_current_target=lambda: GPUTarget("cuda", 90, 32)))
for prepare in "prepare_scale", "prepare_gluon":
    inputs = torch.zeros(160, 64), torch.zeros(160, 64)
    assert triton_cell.compile_launch(names[prepare], inputs, "sm_90a").launchable
    kept = os.listdir(os.environ["TRITON_CACHE_DIR"])
    launch = triton_cell.record_launch(names[prepare], inputs)
    launch.kernel.warmup(*launch.args_given, grid=(1,), **launch.options)
    assert os.listdir(os.environ["TRITON_CACHE_DIR"]) == kept, prepare
"""
    chosen = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, env=os.environ | chosen)


def test_the_lines_that_match_are_counted():
    report = lesson.compile_launch(NAMES["prepare_rows"], make_inputs(), "sm_90a")
    assert "1 × @%p cp.async.bulk.tensor.2d.global" in lesson.lines(report.ptx, "bulk.tensor.*global.shared")
    assert "UTMASTG" in lesson.lines(report.sass, "UTMASTG")
    assert lesson.lines(report.ptx, "wgmma") == "    (no such line)"


@pytest.mark.skipif(device.current().capability is not None, reason="shows the recorded figures")
def test_steps_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(gluon_emulator, "is_enabled", lambda: False)  # whatever ran before in this process
    ladder = make_ladder()
    shown = ladder.step(NAMES["scale_kernel"], NAMES["prepare_scale"], sass="LDG")
    assert list(shown.frame["check"]) == ["ok in the interpreter"] and "not recorded" in shown.caption
    ladder.step(NAMES["gluon_kernel"], NAMES["prepare_gluon"], changed_from=NAMES["scale_kernel"])
    assert ladder.rows[-1]["check"] == "compiled for sm_90a"
    assert "scale_kernel for sm_90a: " in (said := capsys.readouterr().out)
    assert "× LDG" in said and "lines are new or changed since scale_kernel" in said
    row = {"version": "scale_kernel", "ms": 1.0, "ratio": 0.5, "spread": 0.01}
    row |= {"code": lesson.code_hash(NAMES["scale_kernel"], NAMES["prepare_scale"])}
    results.save(results.make_record("test_triton_ladder", [row], ""))
    shown = make_ladder().step(NAMES["scale_kernel"], NAMES["prepare_scale"])
    assert list(shown.frame["check"]) == ["ok in the interpreter"] and list(shown.frame["±"]) == ["0.01"]


@pytest.mark.gpu
def test_a_step_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TILES_RECORD", "1")
    ladder = make_ladder()
    for name in ("scale", "gluon"):
        ladder.step(NAMES[f"{name}_kernel"], NAMES[f"prepare_{name}"])
    assert [row["check"] for row in ladder.rows] == ["ok", "ok"] and "gain" in ladder.rows[1]
    assert results.load("test_triton_ladder")["rows"][1]["version"] == "gluon_kernel"


@pytest.mark.parametrize(
    "change, reason",
    [
        (("at < n)), at < n)", "at < n)), at < n + 64)"), "writes 43 elements outside|overwritten"),
        (("x * SCALE", "x + SCALE"), "elements are wrong"),
        (("tl.program_id(0) * BLOCK", "64"), "not written"),
        (("tl.load(x_ptr + at, at < n)", "tl.load(x_ptr + n)"), "reads 1 element outside|read from outside"),
    ],
)
def test_a_wrong_version_fails(change, reason):
    assert change[0] in TEXT
    assert re.search(reason, check(lesson.define(TEXT.replace(*change))["prepare_scale"]))
    assert check(NAMES["prepare_scale"]) == ""


def test_the_hash_follows_the_code_and_not_the_comments(tmp_path):
    def code(text, **options):
        names = lesson.define(text)
        return lesson.code_hash(names["scale_kernel"], functools.partial(names["prepare_scale"], **options))

    same = code(TEXT)
    assert same == code(TEXT.replace("a helper of its own cell", "a remark").replace("at = tl", "at  =  tl"))
    for change in (
        ("x * SCALE", "x + SCALE"),
        ("constexpr(3)", "constexpr(4)"),
        ("num_warps=2", "num_warps=4"),
    ):
        assert code(TEXT.replace(*change)) != same
    assert code(TEXT, block=32) != same
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in CELLS]}))
    texts = triton_cell.notebook_texts(notebook)
    assert triton_cell.registered_hash(texts, "scale_kernel:prepare_scale") == same
    assert triton_cell.registered_hash(texts, "scale_kernel:prepare_scale(block=32)") == code(TEXT, block=32)


@pytest.mark.skipif(device.current().capability is not None, reason="shows what the compiler says")
def test_a_sweep_before_its_record():
    versions = {
        (block,): (NAMES["scale_kernel"], functools.partial(NAMES["prepare_scale"], block=block))
        for block in (32, 64)
    }
    record = make_ladder().sweep("test_triton_sweep", versions, ["block"])
    assert [row["block"] for row in record.rows] == [32, 64] and all(row["registers"] for row in record.rows)
    assert "not yet timed" in record.label()


def test_what_is_not_written_is_not_checked():
    text = TEXT.replace("    tl.store(", "    # your code: store\n    tl.store(")
    with pytest.raises(NotImplementedError):
        lesson.require_written(lesson.define(text)["scale_kernel"])
    lesson.require_written(NAMES["scale_kernel"])


def test_a_launch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="launches no Triton function"):
        lesson.compile_launch(lambda x, out: lambda: None, make_inputs())


def test_a_kernel_without_a_history_finds_what_other_cells_define(outputs):
    """nbval keeps no history of the cells that it runs."""
    shell = InteractiveShell.instance()
    shell.compile = XCachingCompiler()  # a kernel's, for which each cell is a file
    launch = (
        "report = triton_cell.compile_launch(prepare_scale, [torch.zeros(64), torch.zeros(64)], 'sm_90a')"
    )
    for cell in (*CELLS[:3], f"from tilelab.cells import triton_cell\n{launch}"):
        shell.run_cell(cell, store_history=False).raise_error()
    assert shell.user_ns["report"].status == "ok", shell.user_ns["report"].reason
