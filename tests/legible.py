"""Tell whether a picture can be read: nothing cut, small or on top of something else."""

import itertools
import warnings

from matplotlib.text import Text

from tilelab.pictures import plots

BANKS = set(map(str, range(32)))


def words(figure):
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def assert_legible(figure):
    """No warning, no text cut, smaller than 7 points, or over another."""
    assert isinstance(figure, plots.Picture)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    shown = [
        text for text in words(figure) if text.axes is None or text.axes.axison or text in text.axes.texts
    ]
    unseen = [
        text
        for axes in figure.axes
        for side in (axes.xaxis, axes.yaxis)
        for tick in side.get_major_ticks()
        for text in (tick.label1, tick.label2)
        if not min(side.get_view_interval()) <= tick.get_loc() <= max(side.get_view_interval())
    ]  # a tick beyond the end of its axis is not drawn
    boxes = {text: text.get_window_extent() for text in shown if text not in unseen}
    width, height = figure.bbox.size
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width, f"cut: {text.get_text()!r}"
        assert box.y1 <= height, f"cut: {text.get_text()!r}"
        assert text.get_fontsize() >= 7
    numbers = {text for text in boxes if text.get_text() in BANKS}
    others = boxes.keys() - numbers  # two numbers in cells have room for a line, not for its descenders
    for one, other in [*itertools.combinations(others, 2), *itertools.product(numbers, others)]:
        box, beside = boxes[one], boxes[other]
        # A box has the room of a line, with its descenders: what lies within a pixel of its edge touches nothing.
        assert not box.padded(-1).overlaps(beside.padded(-1)), (
            f"{one.get_text()!r} is over {other.get_text()!r}"
        )


def texts(figure):
    return [text.get_text() for text in words(figure)]
