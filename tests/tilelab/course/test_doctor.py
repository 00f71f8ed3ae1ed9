import errno
import json
import os
import re
import subprocess
import sys
import types

import pytest
import torch
from cases import cases
from pythons import run_python

from tilelab import emulator
from tilelab.course import doctor
from tilelab.course.doctor import Row
from tilelab.runtime import build, device

NO_GPU = device.Device(note="torch is a CPU build")
H200 = device.Device("NVIDIA H200", (9, 0), "sm_90a", 132, 232448, 60 << 20, 139 << 30, "580.95.05")
A100 = device.Device("NVIDIA A100-SXM4-80GB", (8, 0), "sm_80", 108, 166912, 40 << 20, 80 << 30, "580.95.05")
WITHOUT_PACKAGES = """
import sys
sys.modules.update(torch=None, triton=None, cuda=None)
from tilelab.course.doctor import main
sys.exit(main(["--target", "sm_90a"]))
"""


@pytest.fixture
def machine(monkeypatch):
    """A pretended machine: machine(device, evidence of a GPU, driver version). The proofs are not run."""

    def pretend(here=NO_GPU, evidence=None, driver=None):
        monkeypatch.setattr(device, "current", lambda: here)
        monkeypatch.setattr(device, "driver_version", lambda: driver)
        monkeypatch.setattr(doctor, "gpu_evidence", lambda: evidence)
        monkeypatch.setattr(
            doctor,
            "_proof",
            lambda kind, targets, skip_run: [
                *(Row(f"{doctor.LABEL[kind]} copy, {target}", "ok", "") for target in targets),
                Row(f"{doctor.LABEL[kind]} copy runs", "skipped" if skip_run else "ok", skip_run),
            ],
        )
        monkeypatch.setattr(
            doctor, "_prove_compiled", lambda skip: Row("torch.compile", "skipped" if skip else "ok", skip)
        )

    return pretend


def by_name(rows):
    return {row.name: row for row in rows}


@pytest.mark.compile
def test_without_a_gpu_it_proves_by_compiling():
    arguments = "-m tilelab.course.doctor --json --target sm_90a".split()
    done = run_python(*arguments, CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    rows = by_name(Row(**row) for row in report["rows"])
    assert report["status"] == "ok" and report["verdict"].startswith("Ready without a GPU")
    triton, cuda = rows["Triton copy, sm_90a"], rows["CUDA copy, sm_90a"]
    assert triton.status == cuda.status == "ok"
    assert "UTMALDG.2D" in triton.detail and "UTMASTG.2D" in triton.detail
    assert "UBLKCP.S.G" in cuda.detail and "UBLKCP.G.S" in cuda.detail
    skipped = [row for row in rows.values() if row.status == "skipped"]
    assert {"GPU", "Triton copy runs", "CUDA copy runs"} <= {row.name for row in skipped}
    assert all(row.detail for row in skipped)


def test_without_any_package_it_still_says_what_is_missing():
    done = run_python("-c", WITHOUT_PACKAGES)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    rows = {name: rest for name, *rest in (re.split(r"  +", line) for line in done.stdout.splitlines())}
    for name in ("torch", "Triton", "NVRTC"):
        status, detail = rows[name]
        assert status == "failed" and detail.endswith(": run pip install -r requirements.txt.")
    for name, needs in (("Triton copy", "Triton"), ("CUDA copy", "NVRTC")):
        assert rows[name] == ["skipped", f"needs {needs} (see {needs} above)."]


@cases(
    "package, row, proven",
    ("torch", "torch", {"Triton copy", "CUDA copy"}),
    ("triton", "Triton", {"CUDA copy"}),
    ("cuda", "NVRTC", {"Triton copy"}),
)
def test_a_package_missing(machine, monkeypatch, package, row, proven):
    machine()
    monkeypatch.setitem(sys.modules, package, None)
    rows = doctor.run_checks("sm_90a")
    (failed,) = (each for each in rows if each.status == "failed")
    assert failed.name == row and package in failed.detail and "requirements.txt" in failed.detail
    assert {each.name.partition(",")[0] for each in rows if each.name.endswith(", sm_90a")} == proven
    assert doctor.verdict(rows) == f"Not ready: 1 of {len(rows)} checks failed ({row})."


@pytest.mark.compile
@pytest.mark.parametrize("kind", doctor.LABEL)
def test_other_targets_hold_tma(kind):
    *compiled, run = doctor._proof(kind, ("sm_100a", "sm_120a"), "not here.")
    for row in compiled:  # an older Triton's cuobjdump does not know every target
        assert row.status == "ok" or row.status == "warn" and "cannot show its SASS" in row.detail, row
    assert (run.status, run.detail) == ("skipped", "not here.")


def test_the_copy_in_triton_is_right_on_a_ragged_shape():
    from tilelab.course.doctor_copy import copy_tma

    if device.current().capability and not device.current().has_tma:
        pytest.skip("this GPU has no TMA, and Triton's interpreter is only used without a GPU")
    source = torch.randint(
        -(2**15), 2**15, (130, 72), dtype=torch.int16, device="cuda" if device.current().capability else "cpu"
    )
    destination = ~source
    copy_tma(source.view(torch.bfloat16), destination.view(torch.bfloat16))
    assert torch.equal(source, destination)


def test_cache_that_cannot_be_written(machine, monkeypatch, tmp_path, capsys):
    machine()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "deep" / "er"))
    assert doctor.main([]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Triton cache"))
    assert " warn " in row and "keeps compiled kernels in a temporary folder: set TRITON_CACHE_DIR" in row


def test_a_home_that_cannot_be_written(machine, monkeypatch, tmp_path):
    machine()
    (tmp_path / "home").write_text("in the way")
    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME", "TILES_CUBINS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    rows = by_name(doctor.run_checks())
    assert (rows["Triton cache"].status, rows["CUDA cache"].status) == ("warn", "warn")
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert by_name(doctor.run_checks())["Triton cache"] == Row("Triton cache", "ok", str(tmp_path))


def test_a_disk_that_is_full(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))
    row = by_name(doctor.run_checks())["Triton cache"]
    assert row.status == "warn" and "No space left on device" in row.detail


def test_no_folder_for_temporary_files(monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", none)
    compiled, run = doctor._proof("triton", ("sm_90a",), "")
    assert compiled.status == run.status == "failed"
    assert "temporary directory" in compiled.detail and "temporary directory" in run.detail


def test_cache_is_examined_without_being_made(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert by_name(doctor.run_checks())["Triton cache"].status == "ok" and not list(tmp_path.iterdir())


def test_gpu_that_torch_cannot_see(machine, capsys):
    machine(NO_GPU, evidence="nvidia-smi lists NVIDIA H200", driver="580.95.05")
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "nvidia-smi lists NVIDIA H200, but torch cannot use it" in out and "CUDA build of torch" in out
    assert out.splitlines()[-1].startswith("Not ready: 1 of ")


def test_gpu_hidden_on_purpose_is_no_failure(machine):
    machine(
        device.Device(note="CUDA_VISIBLE_DEVICES hides every GPU"),
        "nvidia-smi lists NVIDIA H200",
        "580.95.05",
    )
    rows = by_name(doctor.run_checks())
    assert rows["GPU"].status == "skipped" and "CUDA_VISIBLE_DEVICES" in rows["GPU"].detail
    assert not [row for row in rows.values() if row.status == "failed"]


@cases("driver, status", ("570.124.06", "failed"), ("580.65.06", "ok"), ("590.10", "ok"), (None, "warn"))
def test_driver_version(machine, driver, status):
    machine(device.Device("NVIDIA H200", (9, 0), "sm_90a", driver=driver), driver=driver)
    row = by_name(doctor.run_checks())["driver"]
    assert row.status == status and "580" in row.detail


def test_no_driver_is_skipped(machine, monkeypatch, tmp_path):
    machine()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert by_name(doctor.run_checks())["driver"].status == "skipped"


OLD = """case "$*" in *-L*) echo "GPU 0: NVIDIA H200 (UUID: GPU-1)";; *) echo 535.104.05;; esac"""
BROKEN = "echo NVIDIA-SMI has failed because it couldn\\'t communicate with the NVIDIA driver.; exit 9"


@cases(
    "script, status, driver, gpu",
    (OLD, 1, ("failed", "535.104.05: CUDA 13 needs 580 or newer, so update the NVIDIA driver."), "failed"),
    (
        BROKEN,
        0,
        ("warn", "nvidia-smi is here but finds no driver that answers; compiling needs none."),
        "skipped",
    ),
)
@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="the driver here answers before nvidia-smi")
def test_what_nvidia_smi_says(monkeypatch, tmp_path, capsys, script, status, driver, gpu):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(device, "current", lambda: NO_GPU)
    monkeypatch.setattr(doctor, "_proof", lambda kind, targets, skip_run: [])
    assert doctor.main([]) == status and "Traceback" not in capsys.readouterr().out
    rows = by_name(doctor.run_checks())
    assert (rows["driver"].status, rows["driver"].detail) == driver and rows["GPU"].status == gpu


@cases(
    "python_version, status",
    ((3, 10, 14), "warn"),
    ((3, 11, 0), "ok"),
    ((3, 12, 9), "ok"),
    ((3, 13, 1), "warn"),
)
def test_python_version(machine, monkeypatch, python_version, status):
    monkeypatch.setattr(doctor, "sys", types.SimpleNamespace(version_info=python_version))
    row = doctor._row("Python", doctor._check_python)
    assert row.status == status and (status == "ok" or "3.11" in row.detail and "3.12" in row.detail)


def test_gpu_runs_its_own_target(machine, capsys):
    machine(H200, driver="580.95.05")
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "Triton copy, sm_90a" in out and "sm_100a" not in out
    assert out.splitlines()[-1] == "Ready: NVIDIA H200 runs the course live."


def test_torch_compile_is_checked_on_a_gpu_only(machine):
    machine()
    row = by_name(doctor.run_checks())["torch.compile"]
    assert row.status == "skipped" and row.detail.startswith("no GPU (torch is a CPU build); ")
    machine(H200, driver="580.95.05")
    assert by_name(doctor.run_checks())["torch.compile"].status == "ok"
    machine(NO_GPU, evidence="nvidia-smi lists NVIDIA H200", driver="580.95.05")
    assert "see GPU above" in by_name(doctor.run_checks())["torch.compile"].detail


@cases(
    "error, helps",
    ("InductorError: RuntimeError: Failed to find C compiler. Please specify via CC", "install gcc, or set"),
    ("InvalidCxxCompiler: No working C++ compiler found in config.cpp.cxx: (None, 'g++')", "install g++"),
    ("InductorError: main.c:5:10: fatal error: Python.h: No such file or directory", "python3-dev"),
    ("TritonMissing: Cannot find a working triton installation.", "pip install -r requirements.txt"),
    ("GPUTooOldForTriton: Found Tesla P100 which is too old to be supported", "7.0 or newer"),
    ("AcceleratorError: CUDA error: no kernel image is available for execution", "does not support the GPU"),
    ("ValueError: something else", "ValueError: something else"),
)
def test_an_error_of_torch_compile_becomes_the_sentence_that_helps(error, helps):
    said = doctor.explain_compile_error(error)
    assert helps in said and "\n" not in said


@cases(
    "compile, status, says",
    (lambda function: function, "ok", "a compiled function is right"),
    (lambda function: lambda x, y: function(x, y) + 1, "failed", "the compiled function errs by 1.0e+00"),
    (lambda function: 1 / 0, "failed", "ZeroDivisionError: division by zero"),
)
def test_the_compiled_function_is_checked(monkeypatch, compile, status, says):
    rand = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: rand(*shape))
    monkeypatch.setattr(torch, "compile", compile)
    row = doctor._row("torch.compile", doctor._check_compiled)
    assert row.status == status and says in row.detail


@pytest.mark.gpu
def test_torch_compile_on_this_gpu():
    row = doctor._prove_compiled("")
    assert row.status == "ok", row.detail


def test_gpu_is_not_run_for_another_target(machine):
    machine(H200, driver="580.95.05")
    row = by_name(doctor.run_checks("sm_100a"))["CUDA copy runs"]
    assert row.status == "skipped" and "sm_100a" in row.detail and "sm_90a" in row.detail


def test_only_a_missing_emulator_has_a_row(machine, monkeypatch):
    machine()
    assert ("emulator" in by_name(doctor.run_checks())) != emulator.is_available()
    monkeypatch.setattr(emulator, "is_available", lambda: False)
    rows = doctor.run_checks()
    assert by_name(rows)["emulator"].status == "warn" and "g++" in by_name(rows)["emulator"].detail
    assert "those in Triton run in its interpreter" in doctor.verdict(rows)


def test_gpu_without_tma(machine):
    machine(A100, driver="580.95.05")
    rows = doctor.run_checks()
    named = by_name(rows)
    assert named["GPU"].status == "ok" and "no TMA" in named["GPU"].detail
    assert named["Triton copy runs"].status == "skipped" and "8.0" in named["Triton copy runs"].detail
    assert "Triton copy, sm_90a" in named and "compiled, not run" in doctor.verdict(rows)


@cases(
    "nvrtc_version, architectures, says",
    ((0, 12, 4), [80, 90], "NVRTC 13"),
    ((0, 13, 0), [80, 90], "cannot compile for sm_100a"),
)
def test_wrong_nvrtc(machine, monkeypatch, nvrtc_version, architectures, says):
    from cuda.bindings import nvrtc

    machine()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: nvrtc_version)
    monkeypatch.setattr(nvrtc, "nvrtcGetSupportedArchs", lambda: (0, architectures))
    rows = by_name(doctor.run_checks())
    assert rows["NVRTC"].status == "failed" and says in rows["NVRTC"].detail
    assert rows["CUDA copy"].status == "skipped" and "NVRTC" in rows["CUDA copy"].detail


def test_nvrtc_absent(machine, monkeypatch):
    from cuda import pathfinder

    class NotFoundError(RuntimeError):
        pass

    def nowhere(name):
        raise NotFoundError("No such file: libnvrtc.so.13, No such file: libnvrtc.so.12")

    machine()
    monkeypatch.setattr(pathfinder, "DynamicLibNotFoundError", NotFoundError)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", nowhere)
    rows = by_name(doctor.run_checks())
    found = rows["NVRTC"]
    assert found == Row("NVRTC", "failed", "libnvrtc is not found: install cuda-toolkit[nvrtc]==13.0.3.")
    assert rows["CUDA copy"].status == "skipped"


def test_a_check_that_raises_is_a_row(machine, monkeypatch, capsys):
    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file\nsecond line")

    machine()
    monkeypatch.setattr(doctor, "_check_torch", broken)
    assert doctor.main([]) == 1
    captured = capsys.readouterr()
    assert "libcudart.so.13" in captured.out and "second line" not in captured.out + captured.err


def test_a_child_that_dies(monkeypatch):
    died = subprocess.CompletedProcess([], -6, "", "LLVM ERROR: cannot select\nstack dump")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: died)
    row = doctor._prove_compiled("")
    expected = Row("torch.compile", "failed", "the process ended with status -6: LLVM ERROR: cannot select")
    assert row == expected


def test_a_child_that_hangs(monkeypatch):
    monkeypatch.setattr(doctor, "PROOF_TIMEOUT_S", 0.01)
    rows = doctor._proof("cuda", ("sm_90a",), "")
    assert [row.status for row in rows] == ["failed", "failed"]
    assert all("no answer within 0.01 s" in row.detail for row in rows)


@cases(
    "message, line",
    ("Traceback (most recent call last):\n  File x\nImportError: no libcuda", "ImportError: no libcuda"),
    (
        "6: NVRTC_ERROR_COMPILATION, log:\n\na.cu(1): error: x is undefined\n1 error",
        "a.cu(1): error: x is undefined",
    ),
    ("out of memory\nsecond", "out of memory"),
)
def test_one_line(message, line):
    assert doctor._one_line(message) == line


def test_sass_without_tma_is_no_proof():
    line = "        /*0230*/                   UTMALDG.2D [UR8], [UR4] ;         /* 0x00000008040075b4 */\n"
    with pytest.raises(ValueError, match="no UTMASTG"):
        doctor.tma_lines("triton", line)
    assert doctor.tma_lines("triton", line + line.replace("LDG", "STG"))[0] == "UTMALDG.2D [UR8], [UR4]"
    with pytest.raises(ValueError, match="no UBLKCP.S.G and no UBLKCP.G.S"):
        doctor.tma_lines("cuda", "/*0000*/ LDG.E R1 ;")


@cases(
    "arguments, says",
    (["--bogus"], "unrecognized arguments"),
    (["--target", "sm_90"], "sm_90a"),
    (["--target", "hopper"], "unknown target"),
    (["--target", "sm_80"], "no TMA"),
)
def test_bad_usage_is_one_line_on_stderr(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        doctor.main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.compile
def test_sass_that_cannot_be_read_is_a_warning(monkeypatch):
    def too_old(*_):
        raise RuntimeError("cuobjdump fatal: no compilation option")

    monkeypatch.setattr(build, "sass", too_old)
    status, detail = doctor._check_instructions("cuda", "sm_90a")
    assert status == "warn" and "cannot show its SASS" in detail


@pytest.mark.compile
def test_a_copy_that_does_not_compile_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor, "CHUNK_BYTES", "undeclared")
    status, detail = doctor._check_instructions("cuda", "sm_90a")
    assert status == "failed" and "undeclared" in detail


@pytest.mark.compile
def test_the_proof_is_compiled_and_not_recalled(monkeypatch, tmp_path):
    monkeypatch.setenv("TILES_CUBINS", str(tmp_path))
    assert doctor._check_instructions("cuda", "sm_90a")[0] == "ok"
    assert [path.suffix for path in tmp_path.iterdir()] == [".listing"]


@pytest.mark.gpu
def test_on_this_gpu():
    rows = by_name(doctor.run_checks())
    assert not [row for row in rows.values() if row.status == "failed"], rows
    if device.current().has_tma:
        for name in ("Triton copy runs", "CUDA copy runs"):
            assert rows[name].status == "ok" and "bit for bit" in rows[name].detail


@pytest.mark.gpu
def test_a_copy_that_does_nothing_is_caught(monkeypatch):
    from tilelab.course import doctor_copy

    monkeypatch.setattr(doctor_copy, "copy_tma", lambda source, destination: None)
    with pytest.raises(ValueError, match="differ after the copy"):
        doctor._run_copy("triton")
