"""The pictures of chapter 7: legible, and drawn from models that do what the kernels do."""

import itertools

import numpy
import pytest
from legible import assert_legible

from ch07.bulk_copy.lesson import figures
from ch07.resample.lesson import figures as resample_figures
from ch07.resample.lesson.figures import ballot_search_reads, binary_search_reads, count_wavefronts
from tilelab.records import results


@pytest.mark.parametrize("stages", [1, 4])
def test_the_ring_is_legible_and_described(stages):
    picture = figures.ring_picture(stages)
    assert_legible(picture)
    assert len(picture.description) > 100


def orders(intervals):
    return [
        interval for interval in intervals if interval.stage is None and interval.what in ("load", "store")
    ]


@pytest.mark.parametrize(
    "stages, chunks, load, store",
    [(1, 7, 4, 2), (4, 7, 4, 2), (2, 5, 1, 9), (3, 2, 4, 2), (8, 30, 12.5, 3), (4, 9, 1, 20)],
)
def test_a_stage_has_one_thing_at_a_time_and_a_chunk_goes_through_all_of_them(stages, chunks, load, store):
    intervals = figures.ring_schedule(stages, chunks, load, store)
    for stage in (None, *range(stages)):
        in_stage = sorted(
            (interval for interval in intervals if interval.stage == stage), key=lambda each: each.begin
        )
        for before, after in itertools.pairwise(in_stage):
            assert before.end <= after.begin, f"{before} and {after} overlap"
    for chunk in range(chunks):
        life = [interval for interval in intervals if interval.chunk == chunk and interval.stage is not None]
        assert [interval.what for interval in life] == ["load", "full", "store"]
        assert {interval.stage for interval in life} == {chunk % stages}
        assert all(before.end == after.begin for before, after in itertools.pairwise(life))
        ordered = [interval.end for interval in orders(intervals) if interval.chunk == chunk]
        assert ordered == [life[0].begin, life[2].begin]
    assert intervals[-1].end == max(interval.end for interval in intervals), (
        "the CTA outlives its last store's read"
    )


def most_at_once(intervals, what):
    in_stages = [interval for interval in intervals if interval.stage is not None and interval.what in what]
    return max(
        sum(interval.begin <= other.begin < interval.end for interval in in_stages) for other in in_stages
    )


def test_one_stage_is_serial_and_a_ring_is_not():
    serial, ring = (figures.ring_schedule(stages, 7, 4, 2) for stages in (1, 4))
    assert most_at_once(serial, ("load", "store")) == 1 and serial[-1].end == 7 * (1 + 4 + 1 + 2)
    assert most_at_once(ring, ("load",)) == 4
    assert any(
        one.what == "load" and other.what == "store" and one.begin < other.end and other.begin < one.end
        for one in ring
        for other in ring
        if None not in (one.stage, other.stage)
    ), "a store runs beside a load"
    # The prologue's four loads, then what the kernel issues: store i, and the load into the stage before.
    assert " ".join(f"{interval.what} {interval.chunk}" for interval in orders(ring)) == (
        "load 0 load 1 load 2 load 3 store 0 store 1 load 4 store 2 load 5 store 3 load 6 store 4 store 5 store 6"
    )
    assert "7 chunks in 20 steps, one stage takes 56" in figures.ring_picture().get_suptitle()


@pytest.mark.parametrize("sources", [3, 32, 33, 100, 1025, 2048])
def test_searches_end_at_the_source_before_the_target(sources):
    for target in numpy.linspace(0, sources - 1, 50)[:-1]:
        for reads in (
            [[word] for word in binary_search_reads(sources, target)],
            ballot_search_reads(sources, target),
        ):
            known = [word for step in reads for word in step if word >= 0]
            below, above = ([word for word in known if (word <= target) == side] for side in (True, False))
            assert max(below, default=0) == int(target) and min(above, default=sources - 1) == int(target) + 1


def test_the_order_of_chunks_is_titled_by_its_figures():
    record = results.load_record("ch07_bulk_fronts", "")
    first, second = (f"{100 * abs(1 - row['ratio']):.0f} % slower" for row in record.rows[:2])
    title = figures.draw_fronts(record).get_suptitle().replace("\n", " ")
    assert f"chunk: {first} than torch" in title and title.endswith(f"free chunk: {second}")


def test_wavefronts():
    assert count_wavefronts([7] * 32) == 1, "a broadcast"
    assert count_wavefronts(range(32)) == 1
    assert count_wavefronts(range(0, 64, 2)) == 2
    assert count_wavefronts(range(0, 1024, 32)) == 32
    assert count_wavefronts([-1, 5, -1, 37]) == 2


def test_a_search_per_thread_takes_a_thirtieth_of_the_wavefronts_of_a_search_per_warp():
    lanes, alone, ballot, threads = (
        row["wavefronts per target"] for row in resample_figures.count_search_wavefronts()
    )
    assert lanes == alone == pytest.approx(10, abs=0.01), "a broadcast costs no more than a read by one lane"
    assert ballot == 33, "32 for the first pivots, which share a bank, and one for the second"
    assert threads == pytest.approx(lanes / 30, rel=0.05)
