"""The pictures of chapter 7: legible, and drawn from models that do what the kernels do."""

import numpy
import pytest
from legible import assert_legible

from ch07.bulk_copy.lesson import figures
from ch07.resample.lesson import figures as resample_figures
from ch07.resample.lesson.figures import ballot_search_reads, binary_search_reads, count_wavefronts
from tilelab.records import results


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


def test_the_curve_of_bytes_in_flight_is_legible():
    assert_legible(figures.draw_in_flight(results.load_record("ch07_bulk_copy_in_flight", "")))


def test_the_order_of_tiles_is_titled_by_its_figures():
    record = results.load_record("ch07_bulk_fronts", "")
    first, second = (f"{100 * abs(1 - row['ratio']):.0f} % slower" for row in record.rows[:2])
    title = figures.draw_fronts(record).get_suptitle().replace("\n", " ")
    assert f"tile: {first} than torch" in title and title.endswith(f"free tile: {second}")


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
