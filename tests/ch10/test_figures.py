"""The pictures of chapter 10: drawn whole and legibly, with the numbers of what they are given."""

import itertools
from types import SimpleNamespace

import pytest
from legible import assert_legible, texts

from ch10.tile_pipeline import figures
from ch10.tile_pipeline.configs import TileConfig
from ch10.wgmma_gemm import figures as gemm_figures

EVENTS = [{"role": role, "event": event, "step": step, "tile": tile, "begin": 9000 * tile + 1000 * step + begin,
           "end": 9000 * tile + 1000 * step + end}
          for tile in range(2) for step in range(8) for role, event, begin, end in (
              ("producer", "wait", 0, 200), ("producer", "load", 200, 1900), ("consumer 0", "wait", 1900, 2000),
              ("consumer 0", "product", 2000, 2900), ("consumer 1", "product", 2000, 2900),
              *[("consumer 0", "store", 2900, 3600)] * (step == 7))]
STEPS = [{"name": name, "shape": "4096", "tflops": tflops, "ms": 137.4 / tflops, "peer_ms": 137.4 / 800,
          "ratio": tflops / 800, "predicted": predicted}
         for name, tflops, predicted in (("one group", 300, 400), ("ring", 520, 540), ("persistent", 780, 800))]
REFUSED = {"name": "too large", "shape": "4096", "status": "rejected", "reason": "too much shared memory",
           "predicted": 700}


def timeline():
    return gemm_figures.draw_timeline(EVENTS, title="The producer is a step ahead", source="made up")


def ladder(rows):
    return gemm_figures.draw_ladder(rows, title="Up", source="made up")


def curve():
    rows = [{"share": share, "gbps": gbps, "ratio": gbps / 4000, "peer": "torch sum"}
            for share, gbps in ((1, 900.0), (64, 3900.0), (8192, 250.0))]
    record = SimpleNamespace(rows=rows, label=lambda: "made up")
    return figures.draw_curve(record, "share", "tiles that a block adds up", "The middle wins", logarithmic=True)


PICTURES = {
    "map": figures.draw_tensor_map,
    "halo": figures.draw_halo,
    "ring": figures.draw_ring,
    "wavefronts": figures.draw_wavefronts,
    "multicast": figures.draw_multicast,
    "curve": curve,
    "tiles": gemm_figures.draw_gemm_tiles,
    "tiles of one": lambda: gemm_figures.draw_gemm_tiles(1),
    "roles": gemm_figures.draw_warp_roles,
    "timeline": timeline,
    "ladder": lambda: ladder(STEPS),
    "ladder with a gap": lambda: ladder([*STEPS, REFUSED]),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_text_lies_inside_and_clear_of_the_others(draw):
    assert_legible(draw())


def test_the_drawing_of_a_tensor_map_holds_the_fields():
    said = texts(figures.draw_tensor_map())
    for text in ("100, 40", "224 bytes", "32, 16", "64B", "zero", "128B of L2", "bfloat16", "16 × 64 B = 1,024 B",
                 "corner (40, 12)"):
        assert text in said


def test_the_halo_that_is_drawn_is_the_kernels():
    figure = figures.draw_halo()
    assert figure.get_suptitle() == f"One box brings tile and halo; {24 + 4 * 10 - 4} of 240 elements lie outside"
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


def test_gemm_tiles_count_bytes():
    figure = gemm_figures.draw_gemm_tiles()
    assert figure.get_suptitle() == "2 CTAs read 64 KB per step as a cluster; without, 96 KB"
    assert [texts(figure).count(f"B 16 KB\n{whose}") for whose in ("own load", "by CTA 0", "by CTA 1")] == [2, 1, 1]
    assert "alone reads 48 KB" in gemm_figures.draw_gemm_tiles(1).get_suptitle()


def test_roles_count_registers():
    assert "registers: 128 × (40 + 2 × 232) = 64,512 of 65,536 an SM has" in texts(gemm_figures.draw_warp_roles())


def test_timeline():
    figure = timeline()
    axes, = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["producer", "consumer 0", "consumer 1"]
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]
    assert len(axes.patches) == len(EVENTS) and max(ends) == pytest.approx(max(row["end"] for row in EVENTS))
    placed = gemm_figures._stack_rows([row for row in EVENTS if row["role"] == "producer"])
    for (line, row), (other, later) in itertools.combinations(placed, 2):
        assert line != other or row["end"] <= later["begin"]


def test_ladder():
    axes, = ladder([*STEPS, REFUSED]).axes
    assert [bar.get_width() for bar in axes.patches[:3]] == [300, 520, 780]
    assert "cuBLAS 800" in [text.get_text() for text in axes.texts]
    marks, = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "D"]
    assert marks == [400, 540, 800, 700]
    with pytest.raises(ValueError, match="one shape"):
        ladder([STEPS[0], {**STEPS[1], "shape": "8192"}])
