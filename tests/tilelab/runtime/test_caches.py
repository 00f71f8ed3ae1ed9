import os
import warnings

import pytest

from tilelab.runtime import caches, device


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """(a folder that can be written, one that cannot); the temporary folder of this user is below tmp_path."""
    monkeypatch.setattr(device.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("in the way")
    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "new" / "folder", tmp_path / "file" / "folder"


def test_a_folder_that_can_be_written_stays(folders, monkeypatch):
    good, _ = folders
    monkeypatch.setenv("TRITON_CACHE_DIR", str(good))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caches.replace_unwritable_caches()
    assert os.environ["TRITON_CACHE_DIR"] == str(good) and "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not good.exists(), "looking makes nothing"


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_folder_that_cannot_is_replaced_with_one_sentence(folders, monkeypatch, variable):
    good, bad = folders
    monkeypatch.setenv("TRITON_CACHE_DIR", str(good))
    monkeypatch.setenv(variable, str(bad))
    with pytest.warns(UserWarning) as said:
        caches.replace_unwritable_caches()
    (other,) = [os.environ[variable]]
    expected = [f"{bad} cannot be written (Not a directory): compiled kernels are kept in {other} instead."]
    assert [str(each.message) for each in said] == expected
    assert caches.why_not_writable(caches.pathlib.Path(other)) == ""


def test_without_a_better_folder_nothing_changes(folders, monkeypatch):
    _, bad = folders

    def refuse(name):
        raise PermissionError

    monkeypatch.setattr(device, "user_lock_path", refuse)
    assert caches.replace_if_unwritable(bad, "x") == bad
