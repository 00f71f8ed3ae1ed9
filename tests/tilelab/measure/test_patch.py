import pytest

from tilelab.measure.patch import patched_source


def test_a_copy_is_patched_and_then_gone(tmp_path):
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("wait(); load(); wait();")
    with patched_source(kernel, ("wait();", "", 2), ("load", "store", 1)) as patched:
        assert patched.read_text() == " store(); " and patched.name == kernel.name
    assert not patched.exists() and kernel.read_text() == "wait(); load(); wait();"


def test_a_patch_that_no_longer_matches_is_an_error(tmp_path):
    kernel = tmp_path / "kernel.cu"
    kernel.write_text("wait();")
    with (
        pytest.raises(AssertionError, match=r"kernel.cu contains 'wait\(\);' 1 times, not 2 times"),
        patched_source(kernel, ("wait();", "", 2)),
    ):
        pass
