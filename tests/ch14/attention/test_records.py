"""Records of `ch14_attention`: what is asked of them."""

import pytest
from h200_records import load_h200


@pytest.mark.parametrize("causal", [False, True])
def test_the_best_step_is_as_fast_as_was_asked_for(causal):
    rows = {row["name"]: row for row in load_h200("ch14_attention_ladder")["rows"] if row["causal"] == causal}
    assert rows["persistent"]["ratio"] >= 0.95 and rows["persistent"]["error"] <= rows["persistent"]["tolerance"]
    assert rows["plain"]["ratio"] < rows["roles"]["ratio"] < rows["overlap"]["ratio"]
    assert rows["eager"]["ms"] > rows["flash"]["ms"] > rows["persistent"]["ms"]
