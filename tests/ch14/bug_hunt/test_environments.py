"""Private environments, made by pip from wheels that are made here: no network takes part."""

import importlib.util
import os
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from ch14.bug_hunt import environments
from ch14.bug_hunt.environments import environments_folder, install, installed_version, is_available, locate
from tilelab.runtime.device import Unsupported

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")


def wheel(where, version, code):
    """A wheel of a Triton that is one line long."""
    with zipfile.ZipFile(where / f"triton-{version}-py3-none-any.whl", "w") as file:
        info = f"triton-{version}.dist-info"
        texts = {
            "triton/__init__.py": code,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        texts[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*texts, f"{info}/RECORD"))
        for name, text in texts.items():
            file.writestr(name, text)


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    """Environments in a folder of their own, and pip that knows no index but these wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel(wheels, "0.1.0", "__version__ = '0.1.0'")
    wheel(wheels, "0.2.0", "import numpy.nonsense")
    monkeypatch.setenv("TILES_TRITONS", str(tmp_path / "tritons"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return wheels


def names():
    return sorted(path.name for path in environments_folder().iterdir() if not path.name.endswith(".lock"))


@pytest.mark.fault
@needs_pip
def test_two_at_once_make_one_whole_environment_and_an_emptied_one_is_made_again():
    said = []
    assert not is_available("0.1.0")
    needs = r"0.1.0 needs an environment of its own; .* make one with python -m ch14.bug_hunt --triton 0.1.0."
    with pytest.raises(Unsupported, match=needs):
        locate("0.1.0")
    interrupted = environments_folder() / f".{environments._path('0.1.0').name}"
    (interrupted / "triton").mkdir(parents=True)
    (interrupted / "triton/__init__.py").write_text("half")
    assert not is_available("0.1.0")
    with ThreadPoolExecutor(2) as both:  # each opens the lock file, so they wait as processes would
        place, same = both.map(install, ["0.1.0"] * 2, [said.append] * 2)
    assert place == same and "0.1.0" in (place / "triton/__init__.py").read_text()
    assert names() == [place.name] and len(said) == 1
    assert is_available("0.1.0") and locate("0.1.0") == place
    assert install("0.1.0", said.append) == place and len(said) == 1

    shutil.rmtree(place / "triton")
    assert not is_available("0.1.0") and install("0.1.0", said.append) == place and len(said) == 2
    place.rename(environments._path("0.4.0"))
    assert not is_available("0.4.0"), "another version lies there"


@pytest.mark.fault
@needs_pip
def test_a_triton_that_does_not_import_leaves_nothing():
    says = "Triton 0.2.0 is installed but does not import: ModuleNotFoundError: No module named 'numpy"
    with pytest.raises(Unsupported, match=says):
        install("0.2.0")
    assert names() == [] and not is_available("0.2.0")


def test_the_installed_one_needs_none():
    version = installed_version()
    assert install(version) is None and is_available(version) and locate(version) is None


def test_the_words_of_pip_become_a_sentence():
    said = "ERROR: Could not find a version that satisfies the requirement triton==9 (from versions: LIST)\nERROR: No"
    for words, sentence in (
        (
            said.replace("LIST", "0.1.0, 0.2.0"),
            r"there is no Triton 9 for Python 3.\d+ on \w+; choose one of 0.1.0, 0.2.0.",
        ),
        (said.replace("LIST", "none"), "the package index has nothing for Python .*, or cannot be reached."),
        ("/usr/bin/python: No module named pip", "this Python has no pip"),
        ("ERROR: the disk is full.\n", "Triton 9 cannot be installed: pip says the disk is full.$"),
    ):
        assert re.search(sentence, environments.explain_pip("9", words))


def test_a_folder_that_cannot_be(monkeypatch):
    monkeypatch.setenv("TILES_TRITONS", "/proc/nowhere")
    with pytest.raises(Unsupported, match="no environment for Triton 0.1.0 can be made in /proc/nowhere: "):
        install("0.1.0")


def test_no_version():
    for version in ("", "3", "3.5", "latest", "3.5.1 --index-url=x", "../3.5.1", "-h"):
        with pytest.raises(ValueError, match="a Triton version must be three numbers such as 3.5.1; it is "):
            install(version)
