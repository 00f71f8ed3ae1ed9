"""The pictures of chapter 10: drawn whole and legibly, with the numbers of what they are given."""

import itertools
import warnings

import pytest
from matplotlib.text import Text

from ch10.tile_pipeline import figures
from ch10.tile_pipeline.configs import TileConfig
from ch10.wgmma_gemm import figures as gemm_figures
from tilelab import plots

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
    return gemm_figures.draw_ladder(rows, ceiling_tflops=1000, title="Up", source="made up")


PICTURES = {
    "map": figures.draw_tensor_map,
    "halo": figures.draw_halo,
    "tiles": gemm_figures.draw_gemm_tiles,
    "tiles of one": lambda: gemm_figures.draw_gemm_tiles(1),
    "roles": gemm_figures.draw_warp_roles,
    "timeline": timeline,
    "ladder": lambda: ladder(STEPS),
    "ladder with a gap": lambda: ladder([*STEPS, REFUSED]),
}


def words(figure):
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


BANKS = set(map(str, range(32)))


def assert_legible(figure):
    """No warning, no text cut, smaller than 7 points, or over another."""
    assert isinstance(figure, plots.Picture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figure._repr_png_().startswith(b"\x89PNG")
    shown = [text for text in words(figure) if text.axes is None or text.axes.axison or text in text.axes.texts]
    unseen = [text for axes in figure.axes for side in (axes.xaxis, axes.yaxis) for tick in side.get_major_ticks()
              for text in (tick.label1, tick.label2) if not min(side.get_view_interval()) <= tick.get_loc()
              <= max(side.get_view_interval())]  # a tick beyond the end of its axis is not drawn
    boxes = {text: text.get_window_extent() for text in shown if text not in unseen}
    width, height = figure.bbox.size
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"cut: {text.get_text()!r}"
        assert text.get_fontsize() >= 7
    numbers = {text for text in boxes if text.get_text() in BANKS}
    others = boxes.keys() - numbers  # two numbers in cells have room for a line, not for its descenders
    for one, other in [*itertools.combinations(others, 2), *itertools.product(numbers, others)]:
        box, beside = boxes[one], boxes[other]
        # A box has the room of a line, with its descenders: what lies within a pixel of its edge touches nothing.
        assert not box.padded(-1).overlaps(beside.padded(-1)), f"{one.get_text()!r} is over {other.get_text()!r}"


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_text_lies_inside_and_clear_of_the_others(draw):
    assert_legible(draw())


def texts(figure):
    return [text.get_text() for text in words(figure)]


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
    assert f"box {rows} × {columns - 16} at (-4, -1), columns first" in texts(figure)
    assert any(patch.get_hatch() for patch in figure.axes[0].patches)


def test_gemm_tiles_count_bytes():
    figure = gemm_figures.draw_gemm_tiles()
    assert figure.get_suptitle() == "2 CTAs read 64 KB a step as a cluster; without, 96 KB"
    assert texts(figure).count("B 16 KB") == 4 and "by CTA 1" in texts(figure)
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


def test_ladder_is_in_percent_of_the_ceiling():
    axes, = ladder([*STEPS, REFUSED]).axes
    assert [bar.get_width() for bar in axes.patches[:3]] == pytest.approx([30, 52, 78])
    assert "cuBLAS 80" in [text.get_text() for text in axes.texts]
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert marks == pytest.approx([40, 54, 80, 70])
    assert axes.get_xlabel() == "% of the ceiling, cuBLAS's fastest burst: 1,000 TFLOP/s"
    with pytest.raises(ValueError, match="one shape"):
        ladder([STEPS[0], {**STEPS[1], "shape": "8192"}])
