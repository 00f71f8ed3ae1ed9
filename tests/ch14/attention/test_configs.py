"""Configurations of flash attention: what is refused, where each can run, and the models of costs."""

import pytest

from ch14.attention import AttentionConfig, configs, experiments
from ch14.attention.configs import (
    HEAD_DIMS,
    best_config,
    estimate_balance,
    estimate_clocks,
    estimate_useful_share,
    rejection,
)
from tilelab import device

THREE_GROUPS = configs(64)["three groups"]


@pytest.mark.parametrize("changes, message", [
    ({"kernel": "fast"}, "choose plain or hopper"), ({"block_m": 96}, "power of two"), ({"block_n": 8}, "16 to 256"),
    ({"num_stages": 0}, "0 stages"), ({"overlap": True}, "kernel='hopper'"), ({"num_warps": 64}, "from 1 to 32"),
    ({"kernel": "hopper", "block_m": 64}, "two warp groups"), ({"kernel": "hopper", "num_stages": 1}, "1 stages"),
    ({"kernel": "hopper", "block_m": 192}, "192, 128, 12"), ({"joint": True}, "kernel='hopper'")])
def test_bad_configurations_get_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**changes)


def test_the_choice_can_run_where_it_is_made_for(monkeypatch):
    for target in device.TARGETS[1:]:
        monkeypatch.setattr(device, "current", lambda target=target: device.Device("a GPU", (9, 0), target))
        for d in HEAD_DIMS:
            steps = experiments.ladder_here(d)
            assert not any(rejection(config, target) for config in (best_config(d, target), *steps.values()))
            assert steps == configs(d) if target == "sm_90a" else [*steps] == ["plain"]
    assert "wgmma" in rejection(configs(128)["overlap"], "sm_100a")
    assert "TMA" in rejection(AttentionConfig(), "sm_80")


def test_clocks_say_what_bounds_a_head_dimension():
    assert estimate_clocks(64)["exponential"] == estimate_clocks(64)["products"]
    assert estimate_clocks(128)["products"] == 2 * estimate_clocks(128)["exponential"]


def test_pairs_are_equal_work():
    """Busy SMs by hand: four tiles of 5, 4, 3 and 2 on two programs, and in pairs of 7."""
    assert estimate_balance(4, 1, 2, paired=False) == 14 / (2 * (5 + 3))
    assert estimate_balance(4, 1, 2, paired=True) == 1
    assert estimate_balance(3, 1, 1, paired=True) == 1  # the middle one stays alone


def test_the_useful_share_by_hand():
    """Six tiles of 192 queries for 1,024. Under a mask each meets the blocks of its last row; three pairs remain."""
    assert estimate_useful_share(THREE_GROUPS, (1, 2, 2, 1024, 1024, 64, False), 12) == 1024 / 1152
    blocks = 2 + 3 + 5 + 6 + 8 + 8
    assert estimate_useful_share(THREE_GROUPS, (2, 2, 2, 1024, 1024, 64, True), 12) == 1024 * 1025 / 2 / (
        blocks * 192 * 128)
    # One SM of four works.
    assert estimate_useful_share(configs(64)["plain"], (1, 1, 1, 64, 128, 64, False), 4) == 1 / 4
    assert estimate_useful_share(THREE_GROUPS, (1, 1, 1, 0, 128, 64, False), 4) == 0


def test_a_head_of_64_gets_three_groups_where_they_waste_little():
    """As on an H200: 192 queries lose where a third of their work lies past the diagonal or the end."""
    found = {case: best_config(64, "sm_90a", case, 132) == THREE_GROUPS for case in (
        (4, 32, 32, 4096, 4096, 64, True), (2, 32, 32, 8192, 8192, 64, False), (16, 32, 32, 1024, 1024, 64, False),
        (16, 32, 32, 1024, 1024, 64, True), (8, 16, 16, 577, 577, 64, True), (1, 16, 16, 1, 8192, 64, False))}
    assert [*found.values()] == [True] * 3 + [False] * 3
    assert best_config(64, "sm_90a") == configs(64)["plain"]
    assert best_config(64, "sm_100a", next(iter(found))).kernel == "plain"
