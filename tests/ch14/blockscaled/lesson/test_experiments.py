"""The experiments of `15_ch14_blockscaled`, as far as they go without a GPU."""

import pytest

from ch14.blockscaled.lesson import verification
from tilelab.runtime import device


def test_paths_are_checked_without_a_gpu():
    if device.current().capability:
        pytest.skip("the whole of it is the GPU test")
    rows = verification.check_correctness()
    assert {row["path"] for row in rows} == {"emulated", "decode"}
    assert [r for r in rows if r["status"] != "ok"] == []


@pytest.mark.gpu
def test_all_paths_are_right():
    assert [row for row in verification.check_correctness() if row["status"] != "ok"] == []
