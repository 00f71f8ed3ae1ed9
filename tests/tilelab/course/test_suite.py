"""The suite's order of tests, on machines with and without a GPU, and `make`'s care for .venv."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tilelab import ROOT
from tilelab.course import suite

TESTS = """
import sys
import pytest
@pytest.fixture
def broken(): 1 / 0
def test_a(): assert not sys.dont_write_bytecode and sys.pycache_prefix
def test_b(): assert 0
def test_c(broken): pass
def test_d(): pytest.skip("needs a GPU")
def test_e(): pytest.skip("needs a GPU")
@pytest.mark.timing
def test_f(request): assert not hasattr(request.config, "workerinput")
"""
MAKEFILE = ROOT / "Makefile"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = timing\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path


@pytest.mark.fault
@pytest.mark.parametrize("gpus, failed", [({}, 3), ({"0": 100.0}, 2)])
def test_only_on_a_gpu_tests_that_time_run_alone(folder, monkeypatch, gpus, failed):
    monkeypatch.setattr(suite, "find_gpus", lambda: gpus)
    monkeypatch.setattr(suite, "count_processes", lambda _: 1)
    summary = suite.run()
    assert (summary["passed"], summary["failed"], summary["skipped"]) == (4 - failed, failed, 2)
    assert summary["skips"] == [("needs a GPU", 2)] and "test_it::test_b" in summary["failures"]
    times = [seconds for _, seconds in summary["slowest"]]
    assert len(times) == 6 and times == sorted(times, reverse=True)


def test_tiers():
    assert suite.select_tiers([]) == "not (trouble or mutants)"
    assert suite.select_tiers(["compile", "fault"]) == "compile or fault"
    found = suite.select_tiers(["unit"])
    assert found == "not (compile or fault or browser or notebook or gpu or timing or trouble or mutants)"
    with pytest.raises(SystemExit) as ended:
        suite.main(["fast"])
    assert ended.value.code == 2


def test_the_summary_ends_with_the_failures_and_the_counts(monkeypatch, capsys):
    summary = {"passed": 2, "failed": 1, "failures": ["test_it::test_b"], "skipped": 3, "skips": []}
    summary |= {"seconds": 61.2, "slowest": [("test_it::test_a", 12.3), ("test_it::test_b", 0.1)]}
    monkeypatch.setattr(suite, "run", lambda tiers: summary)
    assert suite.main(["unit"]) == 1
    expected = ["The slowest tests:", "  12.3 s  test_it::test_a", "   0.1 s  test_it::test_b"]
    expected += ["These tests failed:", "test_it::test_b", "2 passed, 1 failed, 3 skipped in 61 s"]
    assert capsys.readouterr().out.splitlines() == expected


def test_processes_fit_the_gpu(monkeypatch):
    monkeypatch.setattr(suite.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert [
        suite.count_processes(gpus)
        for gpus in ({}, {"0": 140.0}, {"0": 40.0}, {"0": 8.0}, {"0": 40.0, "1": 40.0})
    ] == [16, 12, 3, 1, 7]


def test_torch_has_no_more_threads_than_this_test_process_has_cpus():
    # Only with a GPU could this fail: there tests/conftest.py itself imports torch.
    assert torch.get_num_threads() <= len(os.sched_getaffinity(0))


def test_only_visible_gpus_count(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-a1, 1024'\necho '1, GPU-b2, 2048'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert suite.find_gpus() == {"0": 1.0, "1": 2.0}
    found_by = {"1": {"1": 2.0}, "GPU-b": {"GPU-b": 2.0}, "1,GPU-a1": {"1": 2.0, "GPU-a1": 1.0}}
    for visible, found in (found_by | {"0, 1": {"0": 1.0, "1": 2.0}, "-1": {}, "": {}, "GPU-c": {}}).items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert suite.find_gpus() == found


def make(folder, *arguments, target="test"):
    """Return what `make -n TARGET` would run in `folder`."""
    command = ["make", "-n", target, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_rebuilds_a_venv_that_cannot_work(tmp_path):
    clone = tmp_path / "clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(MAKEFILE, clone)
    for name in ("requirements.txt", "requirements.lock", "pyproject.toml"):
        (clone / name).touch()
    python, ready = clone / ".venv" / "bin" / "python", clone / ".venv" / ".ready"

    def is_kept(*arguments):
        return "-m venv" not in make(clone, *arguments)

    def set_up():
        python.unlink(missing_ok=True)
        python.symlink_to(sys.executable)
        ready.write_text(f"{clone}\n")

    set_up()
    assert is_kept()
    other = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho '({other.replace('.', ', ')})'\n")
    fake.chmod(0o755)
    assert not is_kept(f"PYTHON={fake}"), "another version was asked for"
    set_up()
    assert is_kept(f"PYTHON={sys.executable}")
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert not is_kept(), "its Python is gone"
    set_up()
    clone = clone.rename(tmp_path / "moved")
    assert not is_kept(), "it was moved with its clone"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_lab_opens_the_first_notebook_and_changes_settings_that_jupyterlab_knows(tmp_path):
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("requirements.txt", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    commands = make(tmp_path, target="lab")
    assert (MAKEFILE.parent / re.search("default_url=/lab/tree/(\\S+)", commands)[1]).exists()
    settings = json.loads(
        re.search("echo '({.*})' > .venv/share/jupyter/lab/settings/overrides.json", commands)[1]
    )
    commands = pytest.importorskip("jupyterlab.commands", reason="needs JupyterLab")
    for plugin, values in settings.items():
        package, _, name = plugin.partition(":")
        schema = json.loads(
            (pathlib.Path(commands.get_app_dir()) / "schemas" / package / f"{name}.json").read_text()
        )
        for key, value in values.items():
            known = schema["properties"][key]
            assert value in [
                choice["const"] for choice in known.get("oneOf", [{"const": False}, {"const": True}])
            ]
