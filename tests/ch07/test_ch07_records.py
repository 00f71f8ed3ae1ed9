"""Chapter 7's records: what is asked of them."""

from h200_records import load_h200


def test_every_checked_result_is_within_one_unit_in_the_last_place():
    rows = load_h200("ch07_bulk_check")["rows"] + load_h200("ch07_resample_check")["rows"]
    assert all((row.get("ulps") or 0) <= 1 for row in rows)


def test_the_clean_ring_is_right_and_a_missing_fence_is_found():
    found = {row["name"]: row["status"] for row in load_h200("ch07_bulk_broken")["rows"]}
    assert found["nothing"] == "ok" and found["proxy_fence"] == "wrong"
    assert found["expect_tx"] == found["phase"] == "failed"
