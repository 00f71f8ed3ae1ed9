import warnings

import pytest

from ch14.gemm_configs import configs
from tilelab import plots

ROWS = [{"name": "best", "shape": [64, 64, 64], "config": "64,64", "ms": 0.5, "predicted_ms": 0.6, "tflops": 700.0,
         "ratio": 1.05, "status": "ok", "reason": "", "intensity": 300.0, "x": 64, "y": 128},
        {"name": "proposed", "shape": [64, 64, 64], "config": "$64", "ms": 1.0, "predicted_ms": 0.9, "tflops": 350.0,
         "ratio": 0.5, "status": "ok", "reason": "", "intensity": 30.0, "x": 128, "y": 128},
        {"name": "plain", "shape": [64, 64, 64], "config": "256", "ms": 2.0, "predicted_ms": 3.0, "tflops": 50.0,
         "ratio": 0.2, "status": "ok", "reason": "", "intensity": 3.0, "x": 64, "y": 64}]
REJECTED = {"name": "proposed", "config": "256,256", "status": "rejected", "reason": "it needs 9 B of shared memory",
            "x": 256, "y": 128, "shape": [64, 64, 64]}
TITLES = {"title": "A finding: $5 a tile", "source": "recorded on NVIDIA H200, 2026-11-21"}


def label(row):
    return row["config"]


def words(figure):
    return " ".join(text.get_text() for axes in figure.axes for text in axes.texts)


PICTURES = {
    "ratios": lambda rows: plots.ratios(rows, label=label, **TITLES),
    "ladder": lambda rows: plots.ladder(rows, label=label, ceiling=800, ceiling_label="roof", **TITLES),
    "heat_map": lambda rows: plots.heat_map(rows, "x", "y", "ratio", **TITLES),
    "roofline": lambda rows: plots.roofline(rows, peak_tflops=800, bandwidth_gbps=4000, **TITLES),
    "scatter": lambda rows: plots.scatter_predicted(rows, **TITLES),
    "build": lambda rows: plots.build_table([row | {"target": "sm_90a", "unit": "wgmma"} for row in rows], **TITLES),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_draws_without_a_warning_and_leaves_nothing_open(draw):
    import matplotlib.pyplot

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(ROWS)._repr_png_().startswith(b"\x89PNG")
    assert matplotlib.pyplot.get_fignums() == []


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_nothing_to_draw_is_a_sentence(draw):
    with pytest.raises(ValueError, match="the list of rows is empty"):
        draw([])


def test_what_did_not_run_stays_in_the_picture_with_its_reason():
    assert "it needs 9 B of shared memory" in words(PICTURES["ladder"]([*ROWS, REJECTED]))
    assert "x" in words(PICTURES["heat_map"]([*ROWS, REJECTED])).split()
    assert "no: shared memory" in words(PICTURES["build"]([REJECTED]))


@pytest.mark.parametrize("config", configs("course") + configs("proposed"), ids=lambda config: config.name)
def test_gemm_picture(config):
    figure = plots.gemm_picture(config, 1024, 2048, 1024)
    assert f"stage {config.num_stages - 1}" in words(figure) and figure._repr_png_()


def test_rank_correlation():
    assert plots.rank_correlation([1, 2, 3], [10, 20, 300]) == pytest.approx(1)
    assert plots.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
