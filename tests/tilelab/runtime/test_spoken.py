import dataclasses

import pytest
from cases import cases

from tilelab.runtime import spoken

PHRASES = {"block_m block_n": "{}×{}", "num_warps": "{} warps", "kernel": "{}", "parts": "C in {} parts"}
PHRASES |= {"programs": "{} programs per SM", "pdl": "early"}


@dataclasses.dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int
    kernel: str
    parts: int = 1
    programs: int = 2
    pdl: bool = False


@cases(
    "config, name",
    (Config(128, 256, 8, "split_k"), "128×256 · 8 warps · split_k"),
    (
        Config(64, 64, 1, "plain", 4, 1, True),
        "64×64 · 1 warp · plain · C in 4 parts · 1 program per SM · early",
    ),
)
def test_a_name_is_said_and_read(config, name):
    assert spoken.say(config, PHRASES) == name
    assert Config(**spoken.read(name, PHRASES)) == config


def test_a_default_may_be_said():
    config = Config(64, 64, 4, "plain")
    assert spoken.say(config, PHRASES, always=["programs"]).endswith("plain · 2 programs per SM")


def test_parts_may_come_in_any_order_and_with_an_x():
    found = spoken.read("plain, 4 warps·64x32", PHRASES)
    assert found == {"kernel": "plain", "num_warps": 4, "block_m": 64, "block_n": 32}


@cases("text", "", "64×64 · 4 stages", "64×64×64", "plain · plain", "4 warps 5", "9" * 4301 + " warps")
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="^unknown part"):
        spoken.read(text, PHRASES)
