"""Records of `ch14_descriptors`: what is asked of them."""

import pytest
from h200_records import load_h200

from ch14.descriptors import experiments, rules
from ch14.descriptors.configs import OPS, configs


def test_every_variant_is_recorded():
    rows = {(row["op"], row["name"], row["config"]) for row in load_h200("ch14_descriptors_speed")["rows"]}
    assert rows == {(op, name, str(config)) for op in OPS for name, config in configs(op).items()
                    if not config.rejection("sm_90a")}


@pytest.mark.parametrize("op", ["copy", "add"])
def test_the_best_descriptor_variant_keeps_up_with_torch(op):
    rows = [row for row in load_h200("ch14_descriptors_speed")["rows"] if row["op"] == op]
    assert max(row["ratio"] for row in rows if not row["config"].startswith("pointers")) >= 0.98
    assert all(row["ratio"] == pytest.approx(row["peer_ms"] / row["ms"]) for row in rows)


def test_a_map_encoded_once_costs_less_than_two_microseconds():
    us = {row["name"]: row["us"] for row in load_h200("ch14_descriptors_launch")["rows"]}
    assert us["host, bound"] - us["pointers, bound"] <= 2 and us["host, bound"] - us["pointers"] <= 2
    assert us["host, made each time"] > us["host, kept"] > us["pointers"]


def test_what_the_notebook_says_of_rules():
    rows = {row["rule"]: row for row in load_h200("ch14_descriptors_rules")["rows"]}
    assert list(rows) == list(rules.RULES)
    assert rows["none is broken"]["host"] == rows["none is broken"]["device"] == "right"
    for rule in ("start at 16 bytes", "rows 16 bytes apart", "tile 16 bytes wide"):
        assert "invalid argument" in rows[rule]["host"]
    assert "elements are wrong" in rows["rows 16 bytes apart"]["device"]
    for way in rules.WAYS:
        assert "illegal instruction" in rows["tiles start at 16 bytes"][way]
        assert rows["rows end at 16 bytes"][way] == "right, and 8 elements behind its rows are overwritten"
    assert "invalid device context" in rows["a context in the thread"]["host"]
    assert rows["a context in the thread"]["device"] == "right"


def test_a_loop_costs_a_copy_also_with_the_host_s_maps():
    ratio = {(row["name"], row["loop"]): row["ratio"] for row in load_h200("ch14_descriptors_made")["rows"]}
    assert all(ratio["host", loop] < ratio["host", "a tile a program"] for loop in list(experiments.LOOPS)[1:])
