"""The pictures of chapter 10: drawn whole and legibly, with the numbers of what they are given."""

import itertools
from types import SimpleNamespace

import pytest
from legible import assert_legible, texts

from ch10.tile_pipeline.configs import TileConfig
from ch10.tile_pipeline.lesson import figures
from ch10.wgmma_gemm.lesson import figures as gemm_figures

EVENTS = [
    {
        "role": role,
        "event": event,
        "step": step,
        "tile": tile,
        "begin": 9000 * tile + 1000 * step + begin,
        "end": 9000 * tile + 1000 * step + end,
    }
    for tile in range(2)
    for step in range(8)
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


PICTURES = {
    "map": figures.draw_tensor_map,
    "halo": figures.draw_halo,
    "ring": figures.draw_ring,
    "wavefronts": figures.draw_wavefronts,
    "multicast": figures.draw_multicast,
    "curve": curve,
    "tiles": gemm_figures.draw_gemm_tiles,
    "descriptor": gemm_figures.draw_descriptor,
    "sums": gemm_figures.draw_accumulators,
    "roles": gemm_figures.draw_warp_roles,
    "two consumers": lambda: gemm_figures.draw_warp_roles(2, 256),
    "raster": gemm_figures.draw_raster,
    "timeline": timeline,
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_text_lies_inside_and_clear_of_the_others(draw):
    assert_legible(draw())


def test_the_drawing_of_a_tensor_map_holds_the_fields():
    said = texts(figures.draw_tensor_map())
    for text in (
        "100, 40",
        "224 bytes",
        "32, 16",
        "64B",
        "zero",
        "128B of L2",
        "bfloat16",
        "16 × 64 B = 1,024 B",
        "corner (40, 12)",
    ):
        assert text in said


def test_the_halo_that_is_drawn_is_the_kernels():
    figure = figures.draw_halo()
    assert (
        figure.get_suptitle()
        == f"One box brings tile and halo; {24 + 4 * 10 - 4} of 240 elements lie outside"
    )
    assert "the barrier expects the whole box: 10 × 24 × 4 B = 960 bytes" in texts(figure)
    rows, columns = TileConfig("stencil", 8, 32, 32).box()
    assert any(f"box {rows} × {columns - 16} at (-4, -1), columns first" in text for text in texts(figure))
    assert any(patch.get_hatch() for patch in figure.axes[0].patches)


def test_wavefronts_are_those_of_the_swizzle():
    figure = figures.draw_wavefronts()
    assert figure.get_suptitle() == "A warp reads column 5: 32 wavefronts as it lies, 4 with the swizzle"
    assert [texts(figure).count(f"wavefront {number}") for number in (1, 2, 3, 16)] == [9, 9, 1, 1]


def test_a_curve_tells_its_values():
    assert "900 at 1, 3900 at 64, 250 at 8,192; torch sum 4000" in curve().description


def test_gemm_tiles_count_operations_per_byte():
    said = texts(gemm_figures.draw_gemm_tiles())
    assert "2.1 M operations, 64 per byte" in said and "4.2 M operations, 85 per byte" in said


def test_the_descriptor_is_drawn_with_the_swizzle_of_the_hardware():
    said = texts(gemm_figures.draw_descriptor())
    row_3 = said.index("row 3")
    assert said[row_3 + 1 : row_3 + 9] == [f"unit {place ^ 3}" for place in range(8)]


def test_the_sums_are_drawn_where_the_kernel_stores_them():
    figure = gemm_figures.draw_accumulators()
    said = texts(figure)
    assert [said.count(f"lane {lane}") for lane in range(32)] == [2] * 32
    assert said[said.index("row 5") + 1] == said[said.index("row 13") + 1] == "lane 20" and figure.description


def test_roles_count_arrivals_and_bytes():
    for consumers, columns, expected in (
        (1, 128, "1 arrival + 32,768 bytes"),
        (2, 256, "1 arrival + 49,152 bytes"),
    ):
        said = texts(gemm_figures.draw_warp_roles(consumers, columns))
        assert expected in said and f"{4 * consumers} arrivals, one per warp" in said


def test_the_raster_counts_what_is_read():
    said = texts(gemm_figures.draw_raster())
    assert "5 tiles of A + 32 of B: 1.08 MiB" in said and "16 tiles of A + 9 of B: 0.53 MiB" in said


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
