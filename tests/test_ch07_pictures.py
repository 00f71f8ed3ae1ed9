"""Chapter 7's pictures: nothing is cut off, and what they claim is so."""

import pytest

from ch07 import pictures

PICTURES = {"ring": pictures.ring_picture, "one buffer": lambda: pictures.ring_picture(stages=1, chunks=4),
            "coalescing": pictures.coalescing_picture, "search": pictures.search_picture}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_every_word_is_inside_and_apart(draw):
    picture = draw()
    assert picture._repr_png_().startswith(b"\x89PNG")
    boxes = [text.get_window_extent() for text in (*picture.texts, *picture.axes[0].texts) if text.get_text().strip()]
    assert len(boxes) > 5
    for index, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= picture.bbox.x1 and box.y1 <= picture.bbox.y1
        assert box.count_overlaps(boxes[index + 1:]) == 0


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_slot_is_loaded_while_it_is_stored(stages):
    schedule = pictures.ring_schedule(stages, 12, load=4, store=1.5)
    assert [row["chunk"] for row in schedule] == list(range(12))
    for before, after in zip(schedule, schedule[stages:]):
        assert before["slot"] == after["slot"] and before["parity"] != after["parity"]
        assert before["load"] < before["landed"] <= before["store"] < before["read"] <= after["load"]


def test_a_deeper_ring_ends_sooner():
    ends = [pictures.ring_schedule(stages, 24, load=4, store=1.5)[-1]["read"] for stages in (1, 2, 4)]
    assert ends == sorted(ends, reverse=True) and ends[0] == 24 * 5.5


def test_steps_of_a_search():
    each, lane0, ballot, own = (row["steps"] for row in pictures.searches(1025))
    assert (each, lane0, ballot, own) == (320, 320, 64, 10)
