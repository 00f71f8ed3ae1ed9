"""Recordings: positions in the ring, when the tensor core works, the table and the view's data."""

import pytest
from cases import cases

from tilelab import views
from tilelab.records import timeline
from tilelab.views import timeline as timeline_view


def make_rows(stages=2, steps=6, producer=True):
    """Rows of a made-up CTA: each load takes 10 cycles to issue, and each product 100."""
    rows, loader = [], "producer" if producer else "one"
    consumer = "consumer 0" if producer else "one"
    for step in range(steps):
        begin = 100 * step + 150
        if producer:
            rows += [
                {"lane": loader, "kind": "wait", "begin": begin - 140, "end": begin - 50},
                {"lane": loader, "kind": "load", "begin": begin - 50, "end": begin - 40},
            ]
        rows += [
            {"lane": consumer, "kind": "wait", "begin": begin, "end": begin + 40},
            {"lane": consumer, "kind": "product", "begin": begin + 40, "end": begin + 150},
        ]
        for row in rows[-4 if producer else -2 :]:
            row |= {"step": step, "tile": 0}
    rows.append(
        {"lane": consumer, "kind": "store", "begin": 100 * steps + 200, "end": 100 * steps + 350, "tile": 0}
    )
    return rows


def make_recording(name="made up", **options):
    rows = make_rows(**options)
    return timeline.make_recording(
        name, rows, stages=options.get("stages", 2), gpu="a GPU", date="2026-11-23", product_cycles=80
    )


def events_of(recording, lane, kind):
    return [
        dict(zip(timeline.FIELDS, event))
        for event in recording["events"]
        if (recording["lanes"][event[timeline.LANE]], event[timeline.KIND]) == (lane, kind)
    ]


def test_lanes_begin_with_the_producer_and_events_are_in_the_order_of_time():
    recording = make_recording()
    assert recording["lanes"] == ["producer", "consumer 0"] and recording["barriers"] == ["full", "empty"]
    begins = [event[timeline.BEGIN] for event in recording["events"]]
    assert begins == sorted(begins) and recording["length"] == 950


def test_stage_and_phase_follow_the_ring():
    recording = make_recording()
    full, empty = events_of(recording, "consumer 0", "wait"), events_of(recording, "producer", "wait")
    found = [(row["stage"], row["phase"], row["barrier"]) for row in full][:5]
    assert found == [(0, 0, "full"), (1, 0, "full"), (0, 1, "full"), (1, 1, "full"), (0, 0, "full")]
    # A wait for an empty stage asks for the phase before the one that the load completes.
    found = [(row["stage"], row["phase"], row["barrier"]) for row in empty][:3]
    assert found == [(0, 1, "empty"), (1, 1, "empty"), (0, 0, "empty")]
    stages = [fill[:2] for fill in recording["fills"]]
    assert stages == [[0, 0], [1, 0], [0, 1], [1, 1], [0, 0], [1, 0]]


def test_a_fill_is_issued_lands_is_seen_and_is_freed_in_this_order():
    for producer in (True, False):
        for stage, _, _, _, issued, landed, seen, freed in make_recording(producer=producer)["fills"]:
            assert issued <= landed <= seen <= freed, (producer, stage)


def test_without_stamps_of_loads_a_stage_is_loaded_again_when_its_products_have_finished():
    fills = make_recording(producer=False)["fills"]
    assert [fill[4] for fill in fills] == [0, 0, 300, 400, 500, 600]


def test_the_tensor_core_works_as_long_as_its_products_need():
    recording = make_recording()
    assert sum(end - begin for begin, end in recording["tensor"]) == 6 * 80
    assert timeline.find_idle_share(recording) == pytest.approx(1 - 480 / 950)


def test_products_that_queue_follow_each_other():
    events = [[0, "product", 0, 110], [0, "product", 10, 210], [0, "product", 400, 420]]
    assert timeline.find_busy(events, 100) == [[0, 200], [400, 420]]
    assert timeline.find_busy(events) == [[0, 210], [400, 420]]


@cases(
    "change, message",
    ({"kind": "think"}, "unknown kind 'think'"),
    ({"begin": 9, "end": 3}, "ends at 3, before it begins at 9"),
)
def test_an_impossible_event_is_refused(change, message):
    row = {"lane": "a", "kind": "wait", "begin": 0, "end": 1} | change
    with pytest.raises(ValueError, match=message):
        timeline.make_recording("x", [row], stages=1, gpu="", date="")


def test_the_table_has_a_row_per_lane_and_one_of_the_tensor_core():
    recording = make_recording()
    rows = {row["lane"]: row for row in timeline.summarise(recording)}
    assert list(rows) == ["producer", "consumer 0", "tensor core"]
    assert (
        rows["consumer 0"]["store %"] == pytest.approx(15.8)
        and rows["tensor core"]["idle, this CTA %"] == 49.5
    )
    assert rows["producer"]["product %"] is None
    other = {"lane": "producer", "kind": "pause", "begin": 0, "end": 95}
    assert timeline.summarise(recording, [other])[0]["pause %"] == 10
    text = repr(timeline.make_table([recording]))
    assert "a GPU, 2026-11-23" in text and "nan" not in text.lower()
    recording |= {"idle_profiler": 0.52, "overhead": 0.031}
    caption = timeline.make_table([recording]).caption
    assert caption.endswith("recording costs 3.1 %; idle over all CTAs, by the profiler, 52.0 %")
    text = repr(timeline.make_table([make_recording(), recording]))
    assert "recording costs 3.1 %" in text and "nan" not in text.lower()


def test_a_part_of_a_recording_ends_with_its_last_tile():
    rows = make_rows()
    later = [{**row, "begin": row["begin"] + 950, "end": row["end"] + 950, "tile": 1} for row in make_rows()]
    recording = timeline.make_recording(
        "two tiles", rows + later, stages=2, gpu="", date="", product_cycles=80
    )
    kept = timeline.keep_tiles(recording, 1)
    assert kept["length"] == 950 and len(kept["fills"]) == 6
    assert timeline.keep_tiles(recording, 2) is recording
    assert timeline.find_idle_share(kept) == pytest.approx(1 - 480 / 950)


def test_shares_count_an_event_only_up_to_the_end_of_the_recording():
    event = {"lane": "producer", "tile": 0, "step": 0}
    rows = [
        {**event, "kind": "load", "begin": 0, "end": 60},
        {**event, "kind": "wait", "begin": 60, "end": 100},
        {**event, "kind": "wait", "begin": 100, "end": 900, "tile": 1},
        {**event, "kind": "product", "begin": 20, "end": 200, "lane": "consumer 0"},
        {**event, "kind": "product", "begin": 150, "end": 700, "lane": "consumer 0", "tile": 1},
    ]
    kept = timeline.keep_tiles(timeline.make_recording("x", rows, stages=1, gpu="", date=""), 1)
    producer, consumer, _ = timeline.summarise(kept)
    assert kept["length"] == 200 and kept["events"][-1][timeline.END] == 700
    assert (producer["load %"], producer["wait %"], consumer["product %"]) == (30, 70, 90)


def test_the_view_takes_two_recordings_and_refuses_an_unknown_one():
    recordings = [make_recording("one"), make_recording("two"), make_recording("three")]
    view = timeline_view.show(recordings, ["three", "one"])
    assert view.name == "timeline" and view.data["shown"] == ["three", "one"]
    assert "tensor core" in repr(view.table)
    assert timeline_view.show(recordings).data["shown"] == ["one", "two"]
    with pytest.raises(ValueError, match="unknown recording 'four'; choose one of one, two, three"):
        timeline_view.show(recordings, ["four"])


def test_the_page_part_needs_neither_a_network_nor_an_import():
    page = views.make_page_part("timeline", {"recordings": [make_recording()], "shown": ["made up"]})
    assert "@import" not in page and "https://" not in page
