"""Private environments, made by pip from wheels that are made here: no network takes part."""

import os
import subprocess
import sys
import zipfile

import pytest

from ch14.bug_hunt import environments
from ch14.bug_hunt.environments import environments_folder, install, installed_version, is_available, locate
from tilelab.device import Unsupported


def wheel(where, version, code):
    """A wheel of a Triton that is one line long."""
    with zipfile.ZipFile(where / f"triton-{version}-py3-none-any.whl", "w") as file:
        info = f"triton-{version}.dist-info"
        file.writestr("triton/__init__.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\n"
                                       "Tag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (
            "triton/__init__.py", *(f"{info}/{each}" for each in ("METADATA", "WHEEL", "RECORD")))))


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    """Environments in a folder of their own, and pip that knows no index but these wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "0.1.0", "__version__ = '0.1.0'")
    wheel(wheels, "0.2.0", "import numpy.nonsense")
    for name, value in {"TILES_TRITONS": tmp_path / "tritons", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": wheels,
                        "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, str(value))
    return wheels


def names():
    return sorted(path.name for path in environments_folder().iterdir() if not path.name.endswith(".lock"))


def test_it_is_made_once_and_whole():
    said = []
    assert not is_available("0.1.0")
    with pytest.raises(Unsupported, match="Triton 0.1.0 needs an environment of its own; installed "
                                          r"is [\d.]+: make one with python -m ch14.bug_hunt --triton 0.1.0."):
        locate("0.1.0")
    place = install("0.1.0", said.append)
    assert (place / "triton/__init__.py").is_file() and names() == [place.name] and len(said) == 1
    assert is_available("0.1.0") and locate("0.1.0") == place == install("0.1.0", said.append) and len(said) == 1


def test_the_installed_one_needs_none():
    version = installed_version()
    assert install(version) is None and is_available(version) and locate(version) is None


def test_what_an_interrupted_process_left_is_not_used():
    left = environments_folder() / f".{environments._path('0.1.0').name}"
    (left / "triton").mkdir(parents=True)
    (left / "triton/__init__.py").write_text("half")
    assert not is_available("0.1.0")
    place = install("0.1.0")
    assert "0.1.0" in (place / "triton/__init__.py").read_text() and not left.exists()


def test_two_at_once_make_one():
    code = "from ch14.bug_hunt import environments; print(environments.install('0.1.0', lambda line: print('makes')))"
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
            for _ in range(2)]
    said = [each.communicate(timeout=60)[0] for each in both]
    place = str(install("0.1.0"))
    assert all(place in text for text in said) and "".join(said).count("makes") == 1


@pytest.mark.parametrize("version, sentence", [
    ("0.3.0", r"there is no Triton 0.3.0 for Python 3.\d+ on \w+; choose one of 0.1.0, 0.2.0."),
    ("0.2.0", "Triton 0.2.0 is installed but does not import: ModuleNotFoundError: No module named 'numpy")])
def test_it_cannot_be_made(version, sentence):
    with pytest.raises(Unsupported, match=sentence):
        install(version)
    assert names() == [] and not is_available(version)


def test_no_index_in_reach(index):
    for path in index.iterdir():
        path.unlink()
    with pytest.raises(Unsupported, match="the package index has nothing for Python .*, or cannot be reached."):
        install("0.1.0")


def test_no_pip():
    assert "this Python has no pip" in environments.explain_pip("0.1.0", "/usr/bin/python: No module named pip")


def test_a_folder_that_cannot_be(monkeypatch):
    monkeypatch.setenv("TILES_TRITONS", "/proc/nowhere")
    with pytest.raises(Unsupported, match="no environment for Triton 0.1.0 can be made in /proc/nowhere: "):
        install("0.1.0")


@pytest.mark.parametrize("version", ["", "3", "3.5", "latest", "3.5.1 --index-url=x", "../3.5.1", "-h"])
def test_no_version(version):
    with pytest.raises(ValueError, match="a Triton version must be three numbers such as 3.5.1; it is "):
        install(version)
    with pytest.raises(ValueError):
        is_available(version)
