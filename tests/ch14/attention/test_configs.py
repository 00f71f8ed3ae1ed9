"""Configurations of flash attention: what is refused, where each can run, and the models of costs."""

import pytest
from cases import cases

from ch14.attention import AttentionConfig, configs
from ch14.attention.configs import (
    HEAD_DIMS,
    best_config,
    estimate_balance,
    estimate_clocks,
    parse,
    rejection,
    use_pairs,
)
from ch14.attention.lesson import experiments
from tilelab.runtime import device


@cases(
    "changes, message",
    ({"kernel": "fast"}, "choose plain, split, split_hopper or hopper"),
    ({"block_m": 96}, "power of two"),
    ({"block_n": 8}, "16 to 256"),
    ({"num_stages": 0}, "0 stages"),
    ({"overlap": True}, "kernel='hopper'"),
    ({"num_warps": 64}, "from 1 to 32"),
    ({"kernel": "hopper", "block_m": 64}, "two or three warp groups"),
    ({"kernel": "hopper", "num_stages": 1}, "1 stages"),
    ({"kernel": "hopper", "block_m": 160}, "256, 64, 16"),
)
def test_bad_configurations_get_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**changes)


def test_a_name_is_read_back():
    name = "128×128 · 8 warps · 2 stages · hopper · overlap · persistent"
    assert str(configs(128)["persistent"]) == name
    assert parse(name) == configs(128)["persistent"]
    assert all(parse(str(config)) == config for d in HEAD_DIMS for config in configs(d).values())
    with pytest.raises(ValueError, match="fast"):
        parse("128×128 · 8 warps · fast")


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


def test_the_model_knows_the_tiles_of_a_head_of_64():
    """Tiles of 256 queries where they fill the GPU, and smaller ones for short sequences."""
    assert best_config(64, "sm_90a").four_groups
    found = {(4, 32, 32, 4096, 4096, 64, True): 256, (2, 32, 32, 2048, 2048, 64, False): 256}
    found |= {(4, 32, 32, 4096, 4096, 64, False): 192, (32, 12, 12, 384, 384, 64, False): 192}
    found |= {(1, 20, 20, 4000, 4000, 64, False): 128, (2, 10, 10, 1500, 77, 64, False): 64}
    assert {case: best_config(64, "sm_90a", case).block_m for case in found} == found


def test_single_tiles_balance_where_pairs_are_few():
    """40 heads of 20 tiles are 400 pairs, of which some of 132 SMs get three and some four."""
    assert not use_pairs(20, 40, 132) and use_pairs(64, 64, 132)
    assert use_pairs(1, 132, 132)
