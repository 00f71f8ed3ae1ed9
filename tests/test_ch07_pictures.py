"""The pictures of chapter 7: drawn whole and legibly, from models that do what the kernels do."""

import itertools
import warnings

import numpy
import pytest

from ch07.bulk_copy import figures
from tilelab import plots

PICTURES = {
    "ring": figures.ring_picture,
    "one slot": lambda: figures.ring_picture(stages=1),
    "two slots": lambda: figures.ring_picture(2, 12, load=6, store=3),
    "coalescing": figures.coalescing_picture,
    "wider": lambda: figures.coalescing_picture(4, 8),
    "search": figures.search_picture,
    "search few": lambda: figures.search_picture(3),
    "search many": lambda: figures.search_picture(1025),
}


def words(figure):
    return [text for text in figure.findobj(lambda artist: hasattr(artist, "get_window_extent")
                                            and hasattr(artist, "get_text")) if text.get_visible() and text.get_text()]


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_text_lies_inside_and_clear_of_the_others(draw):
    figure = draw()
    assert isinstance(figure, plots.Picture) and figure.get_size_inches()[0] == plots.SIZE[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figure._repr_png_().startswith(b"\x89PNG")
    shown = [text for text in words(figure) if text.axes is None or text.axes.axison or text in text.axes.texts]
    boxes = {text: text.get_window_extent() for text in shown}
    width, height = figure.bbox.size
    for text, box in boxes.items():
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, f"cut: {text.get_text()!r}"
        assert text.get_fontsize() >= 7
    for (one, box), (other, beside) in itertools.combinations(boxes.items(), 2):
        # A box has the room of a line, with its descenders: what lies within a pixel of its edge touches nothing.
        assert not box.padded(-1).overlaps(beside.padded(-1)), f"{one.get_text()!r} is over {other.get_text()!r}"


def orders(spans):
    return [span for span in spans if span.slot is None and span.what in ("load", "store")]


@pytest.mark.parametrize("stages, chunks, load, store", [
    (1, 7, 4, 2), (4, 7, 4, 2), (2, 5, 1, 9), (3, 2, 4, 2), (8, 30, 12.5, 3), (4, 9, 1, 20)])
def test_a_slot_has_one_thing_at_a_time_and_a_chunk_goes_through_all_of_them(stages, chunks, load, store):
    spans = figures.ring_schedule(stages, chunks, load, store)
    for slot in (None, *range(stages)):
        of_slot = sorted((span for span in spans if span.slot == slot), key=lambda span: span.begin)
        for before, after in itertools.pairwise(of_slot):
            assert before.end <= after.begin, f"{before} and {after} overlap"
    for chunk in range(chunks):
        life = [span for span in spans if span.chunk == chunk and span.slot is not None]
        assert [span.what for span in life] == ["load", "full", "store"]
        assert {span.slot for span in life} == {chunk % stages}
        assert all(before.end == after.begin for before, after in itertools.pairwise(life))
        assert [span.end for span in orders(spans) if span.chunk == chunk] == [life[0].begin, life[2].begin]
    assert spans[-1].end == max(span.end for span in spans), "the CTA outlives its last store's read"


def most_at_once(spans, what):
    of_slots = [span for span in spans if span.slot is not None and span.what in what]
    return max(sum(span.begin <= other.begin < span.end for span in of_slots) for other in of_slots)


def test_one_slot_is_serial_and_a_ring_is_not():
    serial, ring = (figures.ring_schedule(stages, 7, 4, 2) for stages in (1, 4))
    assert most_at_once(serial, ("load", "store")) == 1 and serial[-1].end == 7 * (1 + 4 + 1 + 2)
    assert most_at_once(ring, ("load",)) == 4
    assert any(one.what == "load" and other.what == "store" and one.begin < other.end and other.begin < one.end
               for one in ring for other in ring if None not in (one.slot, other.slot)), "a store runs beside a load"
    # The prologue's four loads, then what the kernel orders: store i, and the load into the slot before.
    assert " ".join(f"{span.what} {span.chunk}" for span in orders(ring)) == (
        "load 0 load 1 load 2 load 3 store 0 store 1 load 4 store 2 load 5 store 3 load 6 store 4 store 5 store 6")
    assert "7 chunks in 20 steps, one slot takes 56" in figures.ring_picture().get_suptitle()


def test_a_ring_needs_a_slot_and_a_chunk():
    with pytest.raises(ValueError, match="here it has 0 and 7"):
        figures.ring_picture(0)


def test_a_warp_touches_two_sectors_or_four_lines():
    assert figures.touched(2, 32) == [0, 1] and figures.touched(2, 128) == [0]
    assert figures.touched(16, 32) == list(range(16)) and figures.touched(16, 128) == [0, 1, 2, 3]
    texts = [text.get_text() for text in words(figures.coalescing_picture())]
    assert "left row: 32 × 2 B = 64 B = 2 sectors" in texts
    assert "32 × 16 B = 512 B = 16 sectors = 4 lines" in texts


@pytest.mark.parametrize("sources", [3, 32, 33, 100, 1025, 2048])
def test_searches_end_at_the_source_before_the_target(sources):
    for target in numpy.linspace(0, sources - 1, 50)[:-1]:
        for reads in ([[word] for word in figures.halving(sources, target)], figures.ballots(sources, target)):
            known = [word for step in reads for word in step if word >= 0]
            below, above = ([word for word in known if (word <= target) == side] for side in (True, False))
            assert max(below, default=0) == int(target) and min(above, default=sources - 1) == int(target) + 1


def test_wavefronts():
    assert figures.wavefronts([7] * 32) == 1, "a broadcast"
    assert figures.wavefronts(range(32)) == 1
    assert figures.wavefronts(range(0, 64, 2)) == 2
    assert figures.wavefronts(range(0, 1024, 32)) == 32
    assert figures.wavefronts([-1, 5, -1, 37]) == 2


def test_search_picture_counts():
    title = "A target a lane takes 0.16 reads, a ballot 1, a search a thread 5"
    assert figures.search_picture().get_suptitle() == title
    with pytest.raises(ValueError, match="nothing to search"):
        figures.search_picture(2)
