"""The pictures of chapter 10: drawn whole and legibly, with the numbers of what they are given."""

import itertools
from types import SimpleNamespace

import pytest
from legible import assert_legible

from ch10.tile_pipeline.lesson import figures
from ch10.wgmma_gemm.lesson import figures as gemm_figures

EVENTS = [
    {"role": role, "event": event, "step": step, "tile": tile, "begin": at + begin, "end": at + end}
    for tile, step in itertools.product(range(2), range(8))
    for at in [9000 * tile + 1000 * step]
    for role, event, begin, end in (
        ("producer", "wait", 0, 200),
        ("producer", "load", 200, 1900),
        ("consumer 0", "wait", 1900, 2000),
        ("consumer 0", "product", 2000, 2900),
        ("consumer 1", "product", 2000, 2900),
        *[("consumer 0", "store", 2900, 3600)] * (step == 7),
    )
]


def timeline():
    return gemm_figures.draw_timeline(EVENTS, title="The producer is a step ahead", source="made up")


def curve():
    rows = [
        {"share": share, "gbps": gbps, "ratio": gbps / 4000, "peer": "torch sum"}
        for share, gbps in ((1, 900.0), (64, 3900.0), (8192, 250.0))
    ]
    record = SimpleNamespace(rows=rows, label=lambda: "made up")
    return figures.draw_curve(
        record, "share", "tiles that a block adds up", "The middle wins", logarithmic=True
    )


@pytest.mark.parametrize("draw", [curve, timeline])
def test_every_text_lies_inside_and_clear_of_the_others(draw):
    assert_legible(draw())


def test_a_curve_tells_its_values():
    assert "900 at 1, 3900 at 64, 250 at 8,192; torch sum 4000" in curve().description


def test_timeline():
    figure = timeline()
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["producer", "consumer 0", "consumer 1"]
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    assert figure.description.endswith(
        "Tile 1 begins at cycle 9,200 (producer), 11,000 (consumer 0), 11,000 (consumer 1)."
    )
    assert len(axes.patches) == len(EVENTS) and max(ends) == pytest.approx(max(row["end"] for row in EVENTS))
    placed = gemm_figures._stack_rows([row for row in EVENTS if row["role"] == "producer"])
    for (line, row), (other, later) in itertools.combinations(placed, 2):
        assert line != other or row["end"] <= later["begin"]
