"""Chapter 7's records: of today's kernels, and right."""

import pytest
from records import held

from ch07.bulk_copy import experiments, sweep
from ch07.resample import experiments as resample_experiments
from tilelab import results

EXPERIMENTS = {
    "ch07_bulk_check": experiments.checked, "ch07_bulk_speed": experiments.speed, "ch07_bulk_fronts": experiments.front,
    "ch07_bulk_first": experiments.first, "ch07_bulk_broken": experiments.broken, "ch07_bulk_sweep": sweep.swept,
    "ch07_resample_check": resample_experiments.checked, "ch07_resample_ladder": resample_experiments.ladder,
    "ch07_resample_rates": resample_experiments.rates, "ch07_resample_torch": resample_experiments.against_torch,
    "ch07_resample_note": resample_experiments.note, "ch07_resample_ncu": resample_experiments.profiled,
    "ch07_sanitizer": resample_experiments.sanitized}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_record_is_of_todays_kernels(name):
    assert results.stale_reason(held(name), EXPERIMENTS[name].source()) == ""


@pytest.mark.parametrize("name", ["ch07_bulk_check", "ch07_resample_check", "ch07_sanitizer", "ch07_bulk_hello"])
def test_nothing_recorded_is_wrong(name):
    rows = held(name)["rows"]
    assert rows and [row for row in rows if row["status"] != "ok"] == []
    assert all((row.get("ulps") or 0) <= 1 for row in rows)


def test_the_clean_ring_is_right_and_a_missing_fence_is_found():
    found = {row["name"]: row["status"] for row in held("ch07_bulk_broken")["rows"]}
    assert found["nothing"] == "ok" and found["proxy_fence"] == "wrong"
    assert found["expect_tx"] == found["phase"] == "failed"
