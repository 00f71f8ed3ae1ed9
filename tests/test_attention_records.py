"""Records of `ch14_attention`: of today's kernels, and what is asked of them."""

import pytest
from records import held

from ch14.attention import experiments, sweep
from tilelab import results

EXPERIMENTS = {"ch14_attention_ladder": experiments.ladder, "ch14_attention_shapes": experiments.shapes,
               "ch14_attention_sanitizer": experiments.sanitized, "ch14_attention_sweep": sweep.swept}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_record_is_of_todays_kernels(name):
    assert results.stale_reason(held(name), EXPERIMENTS[name].source()) == ""


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "ch14_attention_sweep"])
def test_nothing_recorded_is_wrong(name):
    rows = held(name)["rows"]
    assert rows and [row for row in rows if row["status"] != "ok"] == []


def test_a_sweep_finds_no_wrong_result():
    rows = held("ch14_attention_sweep")["rows"]
    assert {row["status"] for row in rows} <= {"ok", "rejected"} and any(row["status"] == "ok" for row in rows)


@pytest.mark.parametrize("causal", [False, True])
def test_the_best_step_is_as_fast_as_was_asked_for(causal):
    rows = {row["name"]: row for row in held("ch14_attention_ladder")["rows"] if row["causal"] == causal}
    assert rows["persistent"]["ratio"] >= 0.95 and rows["persistent"]["error"] <= rows["persistent"]["tolerance"]
    assert rows["plain"]["ratio"] < rows["roles"]["ratio"] < rows["overlap"]["ratio"]
    assert rows["eager"]["ms"] > rows["flash"]["ms"] > rows["persistent"]["ms"]
