"""A model's prediction is corrected by its errors at the nearest measured shapes."""

import math

import numpy as np
import pytest

from tilelab.runtime import choice


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILES_TUNED", str(tmp_path))
    choice.load.cache_clear()
    yield
    choice.load.cache_clear()


def predict(m, n, k):
    return {"small": 10.0, "large": 11.0} | ({"wide": 12.0} if n > 64 else {})


MEASURED = [
    ((64, 64, 64), {"small": 19.0, "large": 11.0}),
    ((64, 128, 64), {"small": 19.0, "large": 11.0, "wide": 12.0}),
    ((8192, 8192, 8192), {"small": 10.0, "large": 22.0, "wide": 36.0}),
]


def test_errors_near_a_shape_decide():
    choice.keep("gemm", "GPU", MEASURED, predict)
    assert choice.rank("gemm", "GPU", predict(72, 64, 64), 72, 64, 64)[0] == ["large", "small"]
    ranked, why = choice.rank("gemm", "GPU", predict(4096, 8192, 8192), 4096, 8192, 8192)
    assert ranked[0] == "small" and why == "by the model and its errors near 8192 × 8192 × 8192"
    table = choice.load("gemm", "GPU")
    # three times the prediction: a disturbed measurement
    assert table.errors[2][table.places["wide"]] is None
    names, us = ("small", "large", "wide"), np.array([10.0, 11.0, 12.0])
    corrected, row = table.correct(names, us, (64, 128, 64))
    assert math.isclose(corrected[0], 19, rel_tol=0.1) and row == 1
    assert table.correct(names, us, (64, 64, 64))[1] == 0
    assert table.correct(names, us, (64, 64, 64), without=lambda shape: shape == (64, 64, 64))[1] == 1


def test_errors_at_as_full_a_last_wave_count_more():
    """Both shapes are as near; at the first, "small" fills its last wave as it does here."""

    def predict(m, n, k, sms, gpu):
        return np.full((*np.shape(n)[:1], 1), 10.0), 1.0 + 0.02 * (np.asarray([n]) > 64)

    table = choice.Table("GPU", ["small"], [(64, 64, 64), (64, 128, 64)], [[500], [-500]])
    (here,), _ = table.correct(("small",), np.array([10.0]), (64, 90, 64), np.array([[1.0]]), predict)
    (alike,), _ = table.correct(("small",), np.array([10.0]), (64, 91, 64), np.array([[1.02]]), predict)
    assert here > 11 > 9 > alike


def test_errors_at_tiles_as_full_count_more():
    """At one measured shape, "small" takes twice the prediction, with tiles that are half empty."""

    def find_traits(m, n, k):
        return {"small": (1.0, float(n > 64)), "large": (1.0, 0.0)}

    measured = [((64, n, 64), {"small": 19.0 if n > 64 else 10.0, "large": 11.0}) for n in (64, 128)]
    choice.keep("gemm", "GPU", measured, predict)
    for n, fastest in (65, "large"), (64, "small"):
        assert choice.rank("gemm", "GPU", predict(63, n, 64), 63, n, 64, find_traits)[0][0] == fastest


def test_without_a_table_the_model_decides():
    assert choice.rank("gemm", "GPU", predict(1, 64, 1), 1, 64, 1) == (["small", "large"], "by the model")
    choice.path("gemm", "GPU").parent.mkdir(parents=True)
    tables = (
        '"shapes": [["x"]], "errors": [[1]]',
        '"shapes": [[0, 8, 8]], "errors": [[1]]',
        '"shapes": [], "errors": []',
    )
    for damage in ("", "{}", "[" * 100_000, *(f'{{"families": ["a"], {table}}}' for table in tables)):
        choice.path("gemm", "GPU").write_text(damage)
        choice.load.cache_clear()
        assert choice.load("gemm", "GPU") is None


def test_another_gpu_borrows_the_errors_of_the_h200():
    choice.keep("gemm", "NVIDIA H200", MEASURED, predict)
    ranked, why = choice.rank("gemm", "GPU", predict(72, 64, 64), 72, 64, 64)
    assert ranked[0] == "large" and why.endswith("near 64 × 64 × 64 on an NVIDIA H200")
